"""Losslessness: the text is that of plain decoding, whatever the drafter, the tree, the batch and the family.

A drafter joins by one line in `tiny.DRAFTERS`; everything here must then hold for it.
"""

import io
import json
from functools import cache

import pytest
import torch
from jaxtyping import config
from transformers import LlamaConfig

import tiny
from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampling, rows_of
from slipstream.core.verify import Law, coupled, multi_round
from slipstream.drafters.random_drafter import RandomDrafter
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.generate import Job
from slipstream.engine.request import Request
from slipstream.measure.runner import hf_generate
from slipstream.targets import HFTarget

SAMPLINGS = {
    "T=0": Sampling(),
    "T=0, penalised": Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "T=0.8": Sampling(
        temperature=0.8,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        seed=2**40 + 7,
    ),
}
NEW = 24
PROMPTS = tiny.prompts(11, 5, 19, 7, 13, 17, 55, 9)  # the longest answer runs past a bucket of the cache
BATCHES = {1: slice(4, 5), 3: slice(5, 8), 8: slice(0, 8)}

EVERY = ("llama", "qwen2", "gpt2")  # plain, sliding and learned positions


def grid() -> list[tuple[str, int, str, str]]:
    """Family, batch, drafter, sampling. Every family and drafter with ragged prompts, three of the families
    also alone and in a full batch. Where not all samplings are tried, families and drafters take turns."""
    cases = []
    for f, family in enumerate(tiny.FAMILIES):
        for batch in BATCHES if family in EVERY else (3,):
            for d, name in enumerate(tiny.DRAFTERS):
                for s, sampling in enumerate(SAMPLINGS):
                    every = family == "llama" or (family in EVERY and batch == 3)
                    if every or (f + batch + d + s) % len(SAMPLINGS) == 0:
                        cases.append((family, batch, name, sampling))
    return cases


every_family = pytest.mark.parametrize("family", tiny.FAMILIES)
every_drafter = pytest.mark.parametrize("name", tiny.DRAFTERS)


@pytest.fixture(autouse=True)
def checked(request):
    """Shapes and types, which take three quarters of the time to check, are checked in one family and
    batch."""
    asked = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    config.update("jaxtyping_disable", asked.get("family", "llama") != "llama" or asked.get("batch", 3) != 3)
    yield
    config.update("jaxtyping_disable", False)


def run(
    target: HFTarget,
    drafter: Drafter,
    prompts: tiny.Texts,
    rows: list[Sampling],
    law: Law = coupled,
    new: int = NEW,
    trace: io.StringIO | None = None,
) -> tiny.Texts:
    """Answers to the prompts, decoded as one batch."""
    requests = [Request(prompt, row, new) for prompt, row in zip(prompts, rows, strict=True)]
    Job(target, drafter, requests, law, trace=trace).run()
    return [request.tokens for request in requests]


@cache
def plain(family: str, sampling: str) -> tiny.Texts:
    """Every prompt alone, one token per pass."""
    rows = rows_of(SAMPLINGS[sampling], len(PROMPTS))
    return [
        run(tiny.target(family), Vanilla(), [prompt], [row])[0]
        for prompt, row in zip(PROMPTS, rows, strict=True)
    ]


def texts_of(family: str, sampling: str) -> tiny.Texts:
    return [prompt + answer for prompt, answer in zip(PROMPTS, plain(family, sampling), strict=True)]


@pytest.mark.parametrize(("family", "batch", "name", "sampling"), grid())
def test_the_text_is_that_of_plain_decoding(family, name, sampling, batch):
    """Any error in masks, positions, compaction, histories, noise keys or raggedness: one of them changes a
    token."""
    target, some = tiny.target(family), BATCHES[batch]
    drafter = tiny.DRAFTERS[name](target, texts_of(family, sampling)[some])
    rows = rows_of(SAMPLINGS[sampling], len(PROMPTS))
    assert run(target, drafter, PROMPTS[some], rows[some]) == plain(family, sampling)[some]


TREES = (  # the second: triangular, as in BiTA's code
    "chain-2",
    "[[0],[1],[2],[0,0],[0,1],[0,0,0]]",
    "full-3x2",
    "backbone-3x3",
    "best-first-3x8",
    "dynamic-3x3x9",
    "beam-3x3",
    "cape-3x9",
)
HEADS = (
    tiny.eagle,
    tiny.eagle3,
    tiny.fasteagle,
    tiny.medusa,
    tiny.bita,
    tiny.glide,
    tiny.draft_model,
    tiny.distilled,
)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_the_text_is_that_of_plain_decoding_whatever_the_tree(head, tree):
    """Every tree of every head: static, grown by confidence, fixed in breadth or not."""
    target, some = tiny.target("qwen2"), BATCHES[3]
    rows = rows_of(SAMPLINGS["T=0.8"], len(PROMPTS))
    assert (
        run(target, head(target, tree, "noise"), PROMPTS[some], rows[some]) == plain("qwen2", "T=0.8")[some]
    )


@every_family
def test_the_oracle_is_right_in_every_way(family):
    """An exactness suite that passes because nothing is ever accepted, or only first siblings in contiguous
    slots."""
    target, trace = tiny.target(family), io.StringIO()
    oracle = TreeOracle(texts_of(family, "T=0.8"), target.vocab)
    run(target, oracle, PROMPTS, rows_of(SAMPLINGS["T=0.8"], len(PROMPTS)), trace=trace)
    lengths, ranks, contiguous = set(), set(), set()
    for line in map(json.loads, trace.getvalue().splitlines()):
        path, parents = line["accepted"], line["parents"]
        lengths.add(len(path) - 1)
        ranks |= {parents[1:slot].count(parents[slot]) for slot in path[1:]}
        contiguous.add(path == list(range(len(path))))
    assert lengths == set(range(oracle.depth + 1))
    assert ranks == set(range(oracle.width))
    assert contiguous == {True, False}


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@every_family
def test_plain_decoding_is_hugging_faces_greedy_search(family, penalty):
    """A baseline, and with it every text here, that differs from what people get without us."""
    target = tiny.target(family)
    for prompt in PROMPTS[:3]:
        ours = run(target, Vanilla(), [prompt], [Sampling(repetition_penalty=penalty)])
        theirs = hf_generate(
            target, torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, repetition_penalty=penalty
        )
        assert ours == [theirs[0, len(prompt) :].tolist()]


@every_drafter
def test_multi_round_at_temperature_zero_is_plain_decoding(name):
    """Residuals or point masses that turn a certain choice into another."""
    target, some = tiny.target("llama"), BATCHES[3]
    drafter = tiny.DRAFTERS[name](target, texts_of("llama", "T=0")[some])
    if drafter.uses_target_noise:
        pytest.skip("the coupled law only: generate refuses the other")
    assert run(target, drafter, PROMPTS[some], [Sampling()] * 3, multi_round) == plain("llama", "T=0")[some]


def test_multi_round_with_a_sampled_law_at_temperature_zero_is_plain_decoding():
    """The same, where the proposal's law is subtracted."""
    target, some = tiny.target("llama"), BATCHES[8]
    drafter = tiny.random_drafter(target, sampled=True)
    assert run(target, drafter, PROMPTS[some], [Sampling()] * 8, multi_round) == plain("llama", "T=0")[some]


def test_multi_round_is_reproducible_by_seed():
    """Acceptance or draft draws from a global generator; a seed that changes nothing."""
    target = tiny.target("llama")

    def answers(seed: int) -> tiny.Texts:
        rows = rows_of(Sampling(temperature=0.8, seed=seed), 3)
        return run(target, tiny.random_drafter(target, sampled=True), PROMPTS[:3], rows, multi_round)

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


@pytest.mark.parametrize(
    ("law", "drafter"),
    [
        (coupled, RandomDrafter(6, width=3)),
        (multi_round, RandomDrafter(6, width=3)),
        (multi_round, RandomDrafter(6, width=3, sampled=True)),
        (
            multi_round,
            TreeOracle([[1, 2, 3, 4, 4, 4]] * 2000, vocab=6, depth=2, width=2),
        ),  # the same guess every time
        (coupled, lambda target: tiny.eagle(target, "dynamic-2x3x8", "noise", vocab=5)),
        (multi_round, lambda target: tiny.eagle(target, "[[0],[1],[2],[0,0],[1,0]]", "sampled", vocab=5)),
        (multi_round, lambda target: tiny.eagle(target, "[[0],[1],[2],[0,0],[1,0]]", vocab=5)),
        (coupled, lambda target: tiny.fasteagle(target, "backbone-2x3", "noise", vocab=5)),
        (multi_round, lambda target: tiny.fasteagle(target, "[[0],[1],[2],[0,0],[1,0]]", "sampled", vocab=5)),
        (multi_round, lambda target: tiny.glide(target, "[[0],[1],[2],[0,0],[1,0]]", "sampled")),
        (multi_round, lambda target: tiny.distilled(target, "[[0],[1],[2],[0,0],[1,0]]", "sampled")),
        (multi_round, lambda target: tiny.bita(target, "[[0],[1],[2],[0,0],[1,0]]", "sampled", hosts=2)),
        (multi_round, lambda target: tiny.medusa(target, "[[0],[1],[2],[0,0],[1,0]]", "sampled", vocab=5)),
    ],
    ids=["coupled", "random", "sampled", "fixed"]
    + [f"eagle, {proposal}" for proposal in ("noise", "sampled", "top-k")]
    + [f"fasteagle, {proposal}" for proposal in ("noise", "sampled")]
    + [f"{name}, sampled" for name in ("glide", "distilled", "bita", "medusa")],
)
def test_three_tokens_follow_the_targets_law(law, drafter):
    """Siblings judged against the wrong residual, or draws that share their noise: text from another
    distribution."""
    V, T, prompt, batches, batch = 6, 2.0, [1, 2, 3], 2, 2000  # so hot that every sibling matters
    model = tiny.build(LlamaConfig(**(tiny.GROUPED | {"vocab_size": V})))
    pairs = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(prompt).expand(V * V, -1), pairs], 1)).logits
    first, second, third = logits[:, -3:].div(T).softmax(-1).unbind(1)
    law_of_text = (first.gather(1, pairs[:, :1]) * second.gather(1, pairs[:, 1:]) * third).view(V, V, V)

    target, seen = HFTarget(model), torch.zeros(V, V, V)
    drafter = drafter if isinstance(drafter, Drafter) else drafter(target)
    for seed in range(batches):
        rows = rows_of(Sampling(temperature=T, seed=seed), batch)
        for text in run(target, drafter, [prompt] * batch, rows, law, new=3):
            seen[tuple(text)] += 1
    n = batches * batch
    for kept in ("a", "b", "c", "ab", "bc", "abc"):
        p, count = (torch.einsum(f"abc->{kept}", x) for x in (law_of_text, seen))
        assert ((count - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt() + 2).all(), (
            kept
        )  # + 2: where few are expected
