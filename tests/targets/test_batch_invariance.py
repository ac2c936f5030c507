"""Bits: what a target says at a node of any tree is what it says alone, one row at a time."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from jaxtyping import config
from torch import Tensor
from transformers import DogeConfig, MixtralConfig

import tiny
from slipstream.core.drafter import Drafter
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampling, rows_of
from slipstream.core.span import Output
from slipstream.core.tree import Probes, Tree, chain
from slipstream.drafters import load_drafter
from slipstream.drafters.suffix import NGram
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.generate import Job
from slipstream.engine.request import Request
from slipstream.kernels import ops
from slipstream.targets import HFTarget
from slipstream.targets.batch_invariance import agrees, own_noise, rounds_alike

PROMPTS = tiny.prompts(9, 5, 14)
CHUNKS = (4, 1, 5)  # in which the prompts are read alone
NODES = 13
SPLIT = torch.tensor(
    [0, 0, 0, 1, 1, 2, 3, 3, 4, 6, 9, 10, 11]
)  # a path of eight nodes: longer than the window
DTYPES = (torch.float32, torch.bfloat16)
needs_kernels = pytest.mark.skipif(not ops.available(), reason="there is no C++ compiler")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def checked(request):
    """Shapes and types, which take most of the time to check, are checked in one family."""
    asked = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    config.update("jaxtyping_disable", asked.get("family") != "llama")
    yield
    config.update("jaxtyping_disable", False)


@cache
def target_of(family: str, dtype: torch.dtype) -> HFTarget:
    return HFTarget(deepcopy(tiny.reference(family)).to(dtype), tiny.tokenizer(), family)


def random_tree(seed: int) -> Tree:
    """Three trees, one of them deep, with probes behind two nodes of each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(tiny.VOCAB, (3, NODES), generator=generator)
    parents = (torch.rand(3, NODES, generator=generator) * torch.arange(NODES).clamp(min=1)).long()
    parents[seed % 3] = SPLIT
    hosts = torch.randint(-1, NODES, (3, 2), generator=generator)
    hosts[seed % 3, 0] = NODES - 1  # the deepest node: its probes read more rows than any other
    tree = Tree(tokens, parents, NODES - 1, probes=Probes(tiny.noise(2, 32), hosts))
    return replace(tree, depth=int(tree.layout().depths[:, :NODES].max()))


def in_a_batch(target: HFTarget, tree: Tree) -> tuple[Tensor, Output]:
    """What the target says at the last token of each prompt and at all nodes, beside memory and probes."""
    layers, heads, width = tiny.kv_shape(target)
    lengths = list(map(len, PROMPTS))
    tokens = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in PROMPTS])
    cache = target.new_cache(3, tiny.noise(layers, 2, 3, heads, width).to(target.dtype))
    last = torch.tensor(lengths)[:, None] - 1
    read = target(chain(tokens), cache, rows=last).logits[:, 0]
    cache.keep(None, torch.tensor(lengths))
    cache.flush(lengths)
    return read, target(tree, cache, ("final",))


def say(target: HFTarget, cache: KVCache, tokens: list[int]) -> Tensor:
    """What it says at the last of these tokens, which the cache keeps."""
    said = target(chain(torch.tensor([tokens])), cache).logits[0, -1]
    cache.keep(None, torch.tensor([len(tokens)]))
    return said


def alone(target: HFTarget, tree: Tree, text: int) -> tuple[Tensor, Tensor]:
    """The same of one text: its prompt in chunks, then every path to a leaf, one row in a pass."""
    prompt, tokens, parents = PROMPTS[text], tree.tokens[text].tolist(), tree.parent_slots()[text].tolist()
    cache, size = target.new_cache(1), CHUNKS[text]
    for at in range(0, len(prompt), size):
        read = say(target, cache, prompt[at : at + size])
    logits = read.new_empty(NODES, tiny.VOCAB)
    for leaf in set(range(NODES)) - set(parents[1:]):
        path = [leaf]
        while path[0]:
            path.insert(0, parents[path[0]])
        cache.lengths = torch.tensor([len(prompt)])  # forget the path before
        cache.flush([len(prompt)])
        for node in path:
            logits[node] = say(target, cache, [tokens[node]])
    return read, logits


@needs_kernels
@each_dtype
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_node_has_the_bits_of_its_path_alone(family, dtype):
    """Any operation that rounds a row by its neighbours: another tree, batch, chunk, slot, or what stands in
    slots that the row does not read."""
    target = target_of(family, dtype)
    assert target.exactness == "bits"
    tree = random_tree(seed=1)
    read, out = in_a_batch(target, tree)
    for text in range(3):
        one, nodes = alone(target, tree, text)
        assert torch.equal(one, read[text])
        assert torch.equal(nodes, out.logits[text])
    if dtype == torch.float32:  # and all is right, probes too
        _, right = in_a_batch(tiny.target(family), tree)
        torch.testing.assert_close(out.logits, right.logits.float(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(out.features, right.features.float(), rtol=1e-3, atol=1e-3)


@needs_kernels
def test_float64_is_audited():
    """A promise of bits where torch's own attention and products run."""
    assert tiny.target("llama").exactness == "audited"
    assert HFTarget(deepcopy(tiny.reference("llama"))).exactness == "audited"


@needs_kernels
def test_torchs_own_attention_is_found_out():
    """A check that lets a target pass whose rows do round by their neighbours."""
    target = HFTarget(deepcopy(tiny.reference("llama")).float())
    assert rounds_alike(target)
    target._ours, target.decoder = False, None  # dense masks
    assert agrees(target, target.plain)
    assert not rounds_alike(target)


@needs_kernels
def test_layers_that_compute_with_the_mask_keep_their_own_attention(monkeypatch):
    """An error about the sizes of lists of keys. One about memory stays an error."""
    model = tiny.build(DogeConfig(**tiny.GROUPED | {"pad_token_id": 0}))
    target = HFTarget(model.float())
    assert target.exactness == "audited"
    text = torch.tensor(PROMPTS[:1])
    theirs = target.plain(text, use_cache=False).logits
    torch.testing.assert_close(target(chain(text), target.new_cache(1)).logits, theirs, rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(target.shadow_model, "forward", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        agrees(target, target.plain)


FAULTS = {  # passes that say something else: by their tree
    "one row": lambda tree: tree.rows == 1,
    "64 rows": lambda tree: tree.rows == 64,
    "a few rows": lambda tree: tree.rows == 5,
    "a tree": lambda tree: not tree.is_chain,
}


@needs_kernels
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_wherever_it_is(fault, layer, monkeypatch):
    """A check that tries too few numbers of rows, chains alone, or one type of layer alone."""
    target = HFTarget(deepcopy(tiny.reference("qwen2")).float())  # its two layers are of two types
    assert target.exactness == "bits"
    norm, passes = target.blocks[layer].input_layernorm, list[Tree]()
    layout, said = Tree.layout, norm.forward
    monkeypatch.setattr(Tree, "layout", lambda tree: (passes.append(tree), layout(tree))[1])
    monkeypatch.setattr(norm, "forward", lambda x: said(x) * (1 + 1e-6 * FAULTS[fault](passes[-1])))
    del target.exactness
    assert target.exactness == "audited"


@needs_kernels
@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_experts_by_other_products_are_tried_too(experts):
    """Experts that do not call torch's linear layer: bits are promised only if every row has them."""
    mixtral = MixtralConfig(**tiny.GROUPED, num_local_experts=4, experts_implementation=experts)
    target = HFTarget(tiny.build(mixtral).float())
    tree = random_tree(seed=1)
    read, out = in_a_batch(target, tree)
    equal = all(
        torch.equal(one, read[text]) and torch.equal(nodes, out.logits[text])
        for text in range(3)
        for one, nodes in [alone(target, tree, text)]
    )
    assert equal or target.exactness == "audited"


def run(target: HFTarget, drafter: Drafter, prompts: tiny.Texts, rows: list[Sampling]) -> tiny.Texts:
    """Answers to prompts in one batch."""
    requests = [Request(prompt, row, 24) for prompt, row in zip(prompts, rows, strict=True)]
    Job(target, drafter, requests).run()
    return [request.tokens for request in requests]


def sampling(temperature: float) -> list[Sampling]:
    """A row for each prompt."""
    return rows_of(Sampling(temperature=temperature, seed=5), len(PROMPTS))


def head_of(target: HFTarget) -> Drafter:
    """EAGLE in the target's precision."""
    drafter = tiny.eagle(target, "dynamic-3x4x14")
    drafter.head.to(target.dtype)
    return drafter


@cache
def plain(dtype: torch.dtype, temperature: float) -> tiny.Texts:
    """Each prompt alone, one token in a pass."""
    each = zip(PROMPTS, sampling(temperature), strict=True)
    return [run(target_of("llama", dtype), Vanilla(), [prompt], [row])[0] for prompt, row in each]


DRAFTERS = {  # for a target, and the texts that it will write
    "oracle": lambda target, texts: TreeOracle(texts, target.vocab),
    "eagle": lambda target, texts: head_of(target),
    "ngram": lambda target, texts: NGram(shortest=1),
    "self-speculative": lambda target, texts: load_drafter(
        "self-speculative:skip=0,tree=dynamic-3x3x9", target
    ),
    "random, probes, memory": lambda target, texts: tiny.random_drafter(target),
}


@needs_kernels
@each_dtype
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_those_of_plain_decoding(name, batch, temperature, dtype):
    """A near-tie that turns, somewhere between the bits of a pass and the token."""
    target, want = target_of("llama", dtype), plain(dtype, temperature)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, want, strict=True)][:batch]
    drafter = DRAFTERS[name](target, texts)
    assert run(target, drafter, PROMPTS[:batch], sampling(temperature)[:batch]) == want[:batch]


def test_a_margin_is_no_less_than_what_hugging_face_differs_from_itself_by():
    """ernie4_5_moe and phimoe in bf16 failed the audit by more than half a logit, as they do without us."""
    target = target_of("mixtral", torch.bfloat16)

    def plain(text: Tensor, use_cache: bool, past_key_values: object = None) -> Mock:
        shift = 0.7 if use_cache else 0.2 * (len(text) > 1)
        return Mock(logits=torch.full((*text.shape, target.vocab), shift), past_key_values=None)

    assert own_noise(target, plain) == pytest.approx(0.7)
    made = HFTarget(deepcopy(tiny.reference("mixtral")).to(torch.bfloat16))
    vars(made)["plain"] = plain
    assert made.margin == pytest.approx(1.4)
    assert tiny.target("mixtral").margin == 1e-9
