"""Targets of 8 or 4 bits: rows keep their bits, Hugging Face says the same, and nothing else changes."""

import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import config
from transformers import BioGptConfig, PhimoeConfig
from transformers.pytorch_utils import Conv1D

import tiny
from slipstream.core.tree import Tree, chain
from slipstream.drafters import load_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.generate import generate
from slipstream.kernels import ops
from slipstream.targets import HFTarget, load_target
from slipstream.targets.quantize import is_quantised, on_gpu, quantised
from slipstream.targets.quantized import KINDS, Quantised, QuantisedLinear, stored_bytes
from slipstream.targets.shadow_model import shadow_of

pytestmark = pytest.mark.skipif(not ops.available(), reason="there is no C++ compiler")
DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)
PROMPT = tiny.prompts(11)[0]


@pytest.fixture(autouse=True)
def checked(request):
    """Shapes and types are checked in one family."""
    asked = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    config.update("jaxtyping_disable", asked.get("family", "llama") != "llama")
    yield
    config.update("jaxtyping_disable", False)


@cache
def target_of(family: str, dtype: torch.dtype, kind: str = "int8", compile: bool = False) -> HFTarget:
    model = deepcopy(tiny.reference(family)).to(dtype)
    return HFTarget(model, tiny.tokenizer(), family, compile, quantize=kind)


def logits(target: HFTarget, tree: Tree) -> torch.Tensor:
    """Of all nodes behind the prompt."""
    text = torch.tensor([PROMPT])
    store = target.new_cache(1)
    target(chain(text), store, rows=text[:, :0])
    store.keep(None, torch.tensor([len(PROMPT)]))
    return target(tree, store).logits[0]


def random_tree(nodes: int, seed: int) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    parents = (torch.rand(1, nodes, generator=generator) * torch.arange(nodes).clamp(min=1)).long()
    return Tree(torch.randint(tiny.VOCAB, (1, nodes), generator=generator), parents, nodes - 1)


def hold_a_tree_to_its_paths(target: HFTarget, nodes: int) -> None:
    """Each node's logits are those of its path alone."""
    tree = random_tree(nodes, seed=nodes)
    said, parents = logits(target, tree), tree.parent_slots()[0].tolist()
    for node in {1 % nodes, nodes // 2, nodes - 1}:
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        alone = logits(target, chain(tree.tokens[:, path]))
        assert torch.equal(alone[-1], said[node])


@each_kind
@each_dtype
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_keep_their_bits(family, dtype, kind):
    """An operation that rounds a row by its neighbours, in any family."""
    target = target_of(family, dtype, kind)
    assert target.exactness == "bits"
    for nodes in (1, 2, 5, 17, 64):
        hold_a_tree_to_its_paths(target, nodes)


@pytest.mark.skipif(not tiny.COMPILED, reason="make test-compiled")
@each_kind
@each_dtype
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_compiled_rows_keep_their_bits(family, dtype, kind):
    """Calls that take in norm, activation and attention: another sum for another number of rows, a key in
    another slot. Qwen 2 has biases and windows, so its graphs take in less."""
    target, eager = target_of(family, dtype, kind, True), target_of(family, dtype, kind)
    target.warm_up()
    assert target.exactness == "bits"
    for nodes in (1, 8, 33):
        hold_a_tree_to_its_paths(target, nodes)
    tree = random_tree(33, seed=0)
    near, want = logits(target, tree), logits(eager, tree)
    assert (near - want).pow(2).mean().sqrt() < 0.1 * want.std()


@pytest.mark.parametrize(("kind", "off"), [("int8", 0.25), ("int4", 0.5)])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_it_says_nearly_what_the_model_says(family, kind, off):
    """Scales of another row, a panel read as another, a bias or Gemma's factor left out."""
    whole = HFTarget(deepcopy(tiny.reference(family)).float())
    tree = chain(torch.tensor([tiny.prompts(20)[0]]))
    want, got = logits(whole, tree), logits(target_of(family, torch.float32, kind), tree)
    assert (got - want).pow(2).mean().sqrt() < off * want.std()


@each_kind
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_hugging_face_says_the_same(family, kind):
    """A reference that is not the quantised model, or one that generates without its layers."""
    target = target_of(family, torch.float32, kind)
    assert is_quantised(target.plain)
    text = torch.tensor([PROMPT])
    want = target.plain(text, use_cache=False).logits[0]
    got = target(chain(text), target.new_cache(1)).logits[0]
    assert (got - want).pow(2).mean().sqrt() < 0.05 * want.std()  # a number in between may round otherwise
    answer = target.plain.generate(text, max_new_tokens=8, do_sample=False)
    assert answer.shape == (1, len(PROMPT) + 8)


@each_kind
def test_texts_are_those_of_plain_decoding(kind):
    """A drafter made for the full target, refused or decoding something else."""
    whole, target = (
        HFTarget(deepcopy(tiny.reference("llama")).float(), None, "m", quantize=how) for how in (None, kind)
    )
    assert target.fingerprint == whole.fingerprint
    for make in (tiny.eagle, tiny.medusa):
        drafter = make(target)
        drafter.head.float()
        for temperature in (0.0, 1.0):
            how = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
            want = generate(target, PROMPT, Vanilla(), **how).tokens
            assert generate(target, PROMPT, drafter, **how).tokens == want
    drafter = load_drafter("self-speculative:skip=0,tree=chain-2", target)
    assert (
        generate(target, PROMPT, drafter, max_new_tokens=24).tokens
        == generate(target, PROMPT, Vanilla(), max_new_tokens=24).tokens
    )


@each_kind
def test_the_model_stays_as_it_is(kind):
    """A caller's model with other layers or weights, or one that takes the room of both."""
    model = deepcopy(tiny.reference("llama")).bfloat16()
    before = {name: p.clone() for name, p in model.named_parameters()}
    modules = [type(module) for module in model.modules()]
    target = HFTarget(model, quantize=kind)
    assert [type(module) for module in model.modules()] == modules
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in target.model.parameters()}
    assert all(p.data_ptr() not in shared for p in model.parameters() if p.dim() > 1)
    assert all(p.dim() == 1 for p in target.model.parameters())


@each_kind
def test_a_tied_weight_is_one(kind):
    """Embedding and LM head stored twice; a lookup of other rows than the head multiplies."""
    model = tiny.build(tiny.LlamaConfig(**tiny.GROUPED | {"tie_word_embeddings": True})).bfloat16()
    target = HFTarget(model, quantize=kind)
    embedding, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    assert embedding.weight is head.weight
    assert isinstance(head, QuantisedLinear)
    rows = target.embed(torch.arange(tiny.VOCAB)).float()
    table = model.get_input_embeddings().weight.float()
    assert ((rows - table).abs() <= table.abs().amax(1, keepdim=True) / 127).all()
    some = torch.tensor([3, 1, 60])
    narrow = target.lm_head(some)(rows[:4].bfloat16())
    torch.testing.assert_close(narrow, target.lm_head()(rows[:4].bfloat16())[:, some], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("kind", "part"), [("int8", 0.55), ("int4", 0.35)])
def test_weights_take_half_the_room_or_a_third(kind, part):
    """Weights that stay in the precision of the source, as well or instead; an LM head of 4 bits, or other
    layers of 8."""
    sizes = tiny.GROUPED | {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    model = tiny.build(tiny.LlamaConfig(**sizes)).bfloat16()
    target = HFTarget(model, quantize=kind)
    assert stored_bytes(target.model) <= part * stored_bytes(model)
    assert target.read_bytes == stored_bytes(target.model)
    assert not any(p.dim() > 1 for p in target.shadow_model.parameters())
    assert all(isinstance(m, Quantised) for m in target.shadow_model.modules() if hasattr(m, "in_features"))
    layers = {
        module.weight.dtype for module in target.blocks.modules() if isinstance(module, QuantisedLinear)
    }
    assert layers == {torch.int8 if kind == "int8" else torch.uint8}
    assert target.model.get_output_embeddings().weight.dtype == torch.int8


@each_kind
def test_it_is_named(kind):
    """Results of different quantisation taken for each other: in places, which tuned trees and costs hold
    for, and in reports."""
    target, whole = target_of("llama", torch.bfloat16, kind), tiny.target("llama")
    assert (target.quantize, target.precision) == (kind, f"bfloat16, {kind}")
    assert target.place.endswith(f"bfloat16, {kind}")
    assert f"bfloat16, {kind} on cpu" in repr(target)
    assert (whole.quantize, whole.precision) == (None, "float64")
    assert f"bfloat16, {kind} is" in target.explain_non_finite([1, 2])
    with pytest.raises(ValueError, match=f"{kind}, which Hugging Face cannot read"):
        target.save("nowhere")


def test_an_embedding_may_have_a_factor_that_is_a_number():
    """A tensor in Gemma, a number in BioGPT."""
    config = BioGptConfig(**tiny.SHAPE | {"pad_token_id": 1})
    model = tiny.build(config).to(torch.float32)
    embedding = quantised(model, "int8", "biogpt").get_input_embeddings()
    assert float(embedding.factor) == pytest.approx(tiny.SHAPE["hidden_size"] ** 0.5)


def test_a_router_that_says_more_than_a_product_stays():
    """It became a product, whose answer the experts could not read."""
    config = PhimoeConfig(**tiny.GROUPED, num_local_experts=4, num_experts_per_tok=2)
    model = tiny.build(config).float()
    target = HFTarget(model, quantize="int8")
    assert generate(target, [3, 4, 5], "ngram", max_new_tokens=4).tokens
    assert type(target.blocks[0].mlp.router) is type(model.model.layers[0].mlp.router)


def test_what_cannot_be_quantised_is_refused(unchecked):
    """A traceback, or a target that says it is quantised and is not."""
    model = deepcopy(tiny.reference("llama"))
    with pytest.raises(ValueError, match="Unknown quantisation: 'int3'"):
        HFTarget(model, quantize="int3")
    with pytest.raises(ValueError, match="Unknown quantisation: 'int3'"):
        load_target("smollm2", quantize="int3")
    with pytest.raises(ValueError, match="cannot be int8 in float64 on cpu"):
        HFTarget(model, quantize="int8")
    with pytest.raises(ValueError, match="quantised already"):
        HFTarget(target_of("llama", torch.float32).model, quantize="int8")


@each_kind
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_on_a_gpu_layers_have_8_bits_or_torchaos_4(unchecked, family, kind, monkeypatch):
    """A model that is changed; a layer that is left out; texts of a drafter, or of Hugging Face, that are not
    plain decoding's. The product of a GPU needs one, and so does torchao's layout of 4 bits: others stand
    in."""
    monkeypatch.syspath_prepend(Path(sys.prefix) / "aside")
    torchao = pytest.importorskip("torchao.quantization")

    def four_bits(group_size: int, **_: Any) -> Any:
        return torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(group_size))

    monkeypatch.setattr("slipstream.targets.quantize.GROUP", 16)
    monkeypatch.setattr("torchao.quantization.Int4WeightOnlyConfig", four_bits)
    monkeypatch.setattr("slipstream.kernels.ops.linear", whole_linear)
    monkeypatch.setattr("slipstream.targets.hf.quantised", lambda model, *how: on_gpu(shadow_of(model), *how))
    model = deepcopy(tiny.reference(family)).to(torch.float32)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    target = HFTarget(model, tiny.tokenizer(), quantize=kind)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert not is_quantised(model)
    assert is_quantised(target.model)
    linear = [part for part in target.model.modules() if isinstance(part, (torch.nn.Linear, QuantisedLinear))]
    assert len(linear) == 1 + sum(isinstance(part, (torch.nn.Linear, Conv1D)) for part in layers(model))
    narrow = [part for part in linear if not isinstance(part, QuantisedLinear)]
    assert all("Intx" in type(part.weight).__name__ for part in narrow)
    divided = [part for part in linear if part.in_features % 16 == 0 and part.out_features != tiny.VOCAB]
    assert len(narrow) == (kind == "int4") * len(divided)
    assert kind == "int4" or stored_bytes(target.model) < stored_bytes(model)
    assert target.exactness == ("audited" if narrow else "bits")
    assert target.fingerprint == HFTarget(model).fingerprint
    rows, head = torch.tensor([1, 5]), target.model.get_output_embeddings()
    assert torch.equal(target.lm_head(rows).weight, head.rows(rows))
    answer = generate(target, PROMPT, "vanilla", max_new_tokens=8, temperature=0.0).tokens
    assert generate(target, PROMPT, "ngram", max_new_tokens=8, temperature=0.0).tokens == answer
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    theirs = target.model.generate(torch.tensor([PROMPT]), **how)[0, len(PROMPT) :].tolist()
    assert theirs[: len(answer)] == answer


def whole_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.linear` of a GPU, by that of the CPU."""
    weight = weight if scales is None else (weight * scales[:, None]).to(x.dtype)
    out: torch.Tensor = torch.ops.slipstream.linear(x, weight, bias)
    return out


def layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """All modules but the LM head."""
    return (part for part in model.modules() if part is not model.get_output_embeddings())


def test_without_torchao_it_says_so(monkeypatch):
    """A traceback of an import."""
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"cannot be int4 on cpu without torchao: pip install .*\[gpu\]'"):
        on_gpu(shadow_of(tiny.reference("llama")), "int4", "tiny")


@each_kind
def test_gradients_flow_through(unchecked, kind):
    """Training that goes through a quantised target and gets no gradient."""
    target = target_of("llama", torch.float32, kind)
    layer = target.blocks[0].mlp.down_proj
    x = torch.randn(3, layer.in_features, requires_grad=True)
    layer(x).sum().backward()
    want = layer.rows(torch.arange(layer.out_features)).sum(0)
    torch.testing.assert_close(x.grad, want.expand(3, -1))


def test_the_command_line(run):
    """Words that name no quantisation: a traceback, or a target in full precision."""
    code, out, err = run("generate", "Hi", "--quantize", "int3")
    assert (code, out) == (2, "")
    assert "Unknown quantisation: 'int3'. Available: int8, int4" in err
    assert len(err.strip().splitlines()) == 1
