"""Compiled passes: the same numbers, and no new graph for a new length.

`make test-compiled` runs these, and the whole exactness suite on compiled targets.
"""

import gc
import weakref
from copy import deepcopy

import pytest
import torch
from transformers import SmolLM3Config

import tiny
from slipstream.core.sampling import Sampling, rows_of
from slipstream.core.tree import Tree, chain
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.engine import Engine
from slipstream.engine.generate import Job
from slipstream.engine.request import Request
from slipstream.targets import HFTarget

pytestmark = pytest.mark.skipif(not tiny.COMPILED, reason="make test-compiled")
PROMPTS = tiny.prompts(7, 13, 55)


def answers(target: HFTarget, drafter, prompts, rows) -> tiny.Texts:
    requests = [Request(prompt, row, 24) for prompt, row in zip(prompts, rows, strict=True)]
    Job(target, drafter, requests).run()
    return [request.tokens for request in requests]


@pytest.fixture(scope="module")
def compiled():
    return HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), compile=True)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)], ids=["T=0", "T=0.8"]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_compiled_texts_are_those_of_eager_plain_decoding(compiled, batch, sampling):
    prompts, rows = PROMPTS[:batch], rows_of(sampling, batch)
    plain = answers(HFTarget(deepcopy(tiny.reference("llama"))), Vanilla(), prompts, rows)
    assert answers(compiled, Vanilla(), prompts, rows) == plain
    assert answers(compiled, tiny.eagle(compiled, "dynamic-3x4x14"), prompts, rows) == plain


def test_lengths_and_trees_share_a_graph(compiled):
    """A graph for every length would compile for minutes, again and again."""
    rows = rows_of(Sampling(), 1)
    drafter = tiny.eagle(compiled, "dynamic-3x4x14")
    answers(compiled, drafter, PROMPTS[:1], rows)
    torch._logging.set_logs(recompiles=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for nodes in (5, 9, 12):
        drafter.grow_as(f"dynamic-3x4x{nodes}")
        for prompt in PROMPTS:
            answers(compiled, drafter, [prompt], rows)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_texts_that_join_and_leave_share_the_graphs(compiled):
    """Windows of another number of rows, of another first row, or of a storage that has grown."""

    def play(sizes: list[int], capacity: int) -> None:
        engine = Engine(compiled, tiny.eagle(compiled, "dynamic-3x4x14"), rows=4, capacity=capacity)
        for i, size in enumerate(sizes):
            engine.cancel(*engine.running[: max(0, len(engine.running) + size - 4)])
            engine.free()
            engine.admit(*map(Request, (2 * PROMPTS)[:size]))
            for _ in range(1 + i):
                engine.step()
        assert (engine.cache.storage.capacity == capacity + 14) == (capacity > 100)

    play([1, 1, 2], 200)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    play([2, 1, 3, 1], 300)
    play([4, 2, 1, 1, 3], 40)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


SOME_ROPE = SmolLM3Config(
    **tiny.GROUPED | {"num_hidden_layers": 4, "pad_token_id": 0}, no_rope_layers=[1, 1, 1, 0]
)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "smollm3"])
def test_compiled_layers_say_what_eager_ones_say(family):
    """A graph that is shared by layers which differ: SmolLM3 turns the keys of three layers in four, as a
    number of each says. Norms and rotary angles are float32 in Hugging Face's own code, and a compiled sum
    rounds otherwise: hence 1e-4."""
    model = tiny.build(SOME_ROPE) if family == "smollm3" else tiny.reference(family)
    eager, fast = (HFTarget(deepcopy(model), compile=compile) for compile in (False, True))
    said = []
    for target in (eager, fast):
        cache = target.new_cache(2)
        target(chain(torch.tensor(tiny.prompts(12, 12))), cache)
        cache.keep(None, torch.tensor([12, 9]))
        for nodes in (1, 6):
            tokens = torch.arange(2 * nodes).view(2, nodes)
            parents = torch.tensor([[0, 0, 0, 1, 1, 2]])[:, :nodes]
            out = target(Tree(tokens, parents, 2), cache, ("input of block 1", "final"))
            cache.keep(None, torch.tensor([1, 1]))
            said += [out.logits, out.features]
    for ours, theirs in zip(said[4:], said[:4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_pass_leaves_no_tensor_behind(compiled):
    """A cache that lives until the next collection, because its pass refers to itself."""
    compiled.warm_up()
    gc.collect()
    gc.disable()
    try:
        cache = compiled.new_cache(1)
        held = weakref.ref(cache)
        compiled(chain(torch.arange(6)[None]), cache)
        del cache
        assert held() is None
    finally:
        gc.enable()
