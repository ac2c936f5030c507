"""Our attention and products inside a shadow model: they follow its weights, let gradients through, and step
back."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as with_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

import tiny
from slipstream.core.tree import Tree, chain
from slipstream.kernels import ops
from slipstream.targets import HFTarget, attention_patch as ours, hf, linear as products
from slipstream.targets.attention_patch import Turned, attend
from slipstream.targets.decoder import Undescribed
from slipstream.targets.linear import Linear, Packed

TEXT = torch.tensor(tiny.prompts(11))
needs_kernels = pytest.mark.skipif(not ops.available(), reason="there is no C++ compiler")


def made(family: str, dtype: torch.dtype = torch.float32) -> HFTarget:
    return HFTarget(deepcopy(tiny.reference(family)).to(dtype))


def says(target: HFTarget) -> Tensor:
    """The target's logits on the text."""
    return target(chain(TEXT), target.new_cache(1)).logits[0]


@torch.inference_mode()
def theirs(target: HFTarget) -> Tensor:
    """Hugging Face's own."""
    return target.plain(TEXT, use_cache=False).logits[0].float()


def assert_close(got: Tensor, want: Tensor) -> None:
    """Equal up to rounding in float32."""
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def products_of(target: HFTarget) -> set[type[nn.Module]]:
    """The kinds of its layers' linear modules."""
    return {type(m) for m in target.blocks.modules() if isinstance(m, Linear | Packed | Turned)}


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", Packed), ("gpt2", Turned), ("falcon, new", Packed), ("llama", Linear)],
    ids=["packed", "turned", "falcon", "linear"],
)
def test_products_follow_changes_in_place(family, kind):
    """A copy of a weight that is older than the weight: of a model that is being trained."""
    target = made(family)
    if kind is Linear:  # which a target takes that is too large for copies
        for module in target.shadow_model.modules():
            module.__class__ = Linear if type(module) is Packed else type(module)
        del target.decoder
    assert products_of(target) == {kind}
    before = says(target)
    assert_close(before, theirs(target))
    optimizer = torch.optim.AdamW(target.model.parameters(), lr=0.1)
    target.model(TEXT, labels=TEXT).loss.backward()
    optimizer.step()
    assert (says(target) - before).abs().max() > 0.1
    assert_close(says(target), theirs(target))
    target.model.load_state_dict(tiny.reference(family).state_dict())
    assert torch.equal(says(target), before)


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_that_were_made_in_inference_mode(family):
    """Their weights have no versions, which a copy of a weight asks for."""
    with torch.inference_mode():
        target = HFTarget(tiny.build(tiny.FAMILIES[family]).float())
    assert all(p.is_inference() for p in target.shadow_model.parameters())
    assert target.exactness == "bits"
    assert_close(says(target), theirs(target))


@needs_kernels
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_flow_through_states(family):
    """Training that fails or gets wrong gradients, because our kernels have none."""
    target, model = made(family), tiny.reference(family)
    T = TEXT.shape[1]
    embedded = tiny.noise(1, T, 32).float().requires_grad_()
    positions = torch.arange(T)[None]
    states, own = target.states(embedded, positions, torch.ones(1, T, T).tril().bool(), positions)
    assert len(own) == 2
    states.square().sum().backward()
    same = embedded.detach().double().requires_grad_()
    out = model(inputs_embeds=same, use_cache=False, output_hidden_states=True).hidden_states[-1]
    out.square().sum().backward()
    torch.testing.assert_close(states.double(), out, rtol=1e-3, atol=1e-3)
    scale = float(same.grad.abs().max())
    torch.testing.assert_close(embedded.grad.double() / scale, same.grad / scale, rtol=1e-3, atol=1e-3)


def misread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our attention, which modules call where no description stands for them, say nothing."""
    monkeypatch.setattr(hf, "ModelDecoder", Mock(side_effect=Undescribed))
    monkeypatch.setattr(ours, "attention", lambda q, k, v, *_: torch.zeros_like(q).transpose(1, 2))


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "mixtral", "falcon, new"])
def test_a_model_that_our_attention_does_not_fit_keeps_its_own(family, monkeypatch):
    """Wrong answers of a model whose attention has a part that ours does not know."""
    misread(monkeypatch)
    target = made(family)
    assert target.exactness == "audited"
    assert_close(says(target), theirs(target))
    tree = Tree(TEXT[:, :5], torch.tensor([[0, 0, 0, 1, 3]]), 3)
    path = TEXT[:, [0, 1, 3, 4]]
    logits = target(tree, target.new_cache(1)).logits[0, 4]
    with torch.inference_mode():
        assert_close(logits, target.plain(path, use_cache=False).logits[0, -1])


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """The second arguments of all calls of a function of `ours`."""
    calls, function = list[Any](), getattr(ours, name)
    monkeypatch.setattr(ours, name, lambda *args: (calls.append(args[1]), function(*args))[1])
    return calls


@needs_kernels
def test_experts_go_through_our_products(monkeypatch):
    """Experts call torch's linear layer themselves, with a slice of a weight of three dimensions."""
    target = made("mixtral")
    experts = target.blocks[0].mlp.experts
    weights = {weight.data_ptr() for p in (experts.gate_up_proj, experts.down_proj) for weight in p}
    calls = counted(monkeypatch, "linear")
    says(target)
    assert weights <= {weight.data_ptr() for weight in calls}
    assert target.exactness == "bits"
    assert made("mixtral", torch.float64).exactness == "audited"


@needs_kernels
@pytest.mark.parametrize("family", ["falcon, new", "falcon, multi-query"])
def test_falcon_goes_through_our_attention(family, monkeypatch):
    """Falcon calls torch's attention itself, which would take a list of keys for a mask."""
    target = made(family)
    calls = counted(monkeypatch, "attention")
    assert_close(says(target), theirs(target))
    assert len(calls) == 2  # layers
    outside = torch.zeros(1, 2, 3, 8)
    F.scaled_dot_product_attention(outside, outside, outside)
    assert len(calls) == 2


class Layer(nn.Module):
    """What Hugging Face's attention functions ask of a layer."""

    num_key_value_groups, head_dim = 3, 8

    def __init__(self, sinks: Tensor | None = None) -> None:
        super().__init__()
        self.sinks = sinks


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, grouped keys and values, a mask, and lists of keys that say the same."""
    q, k, v = (tiny.noise(2, heads, n, 8, seed=n).float() for heads, n in ((6, 5), (2, 9), (2, 9)))
    seen = torch.arange(9) <= torch.arange(5)[:, None] + 4
    mask = torch.zeros(2, 1, 5, 9).masked_fill(~seen, -torch.inf)
    ends = torch.arange(5, 10, dtype=torch.int32)
    keys = torch.stack([torch.zeros_like(ends), torch.zeros_like(ends), ends], -1)[None, None]
    return q, k, v, mask, keys


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "softcap": (with_softcap, {"softcap": 0.8}),
    "sinks": (with_sinks, {"s_aux": torch.linspace(-1, 2, 6)}),
}


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_softcap_and_sinks_are_hugging_faces(kind):
    """A softcap behind the mask, sinks that take no part in the softmax, or keys of another group: under a
    dense mask, without any, and by lists."""
    function, how = KINDS[kind]
    q, k, v, mask, keys = inputs()
    want = function(Layer(how.get("s_aux")), q, k, v, mask, scaling=0.4, **how)[0]
    for given in (mask, keys):
        got = attend(Layer(), q, k, v, given, scaling=0.4, **how)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    everything = attend(Layer(), q, k, v, None, scaling=0.4, **how)[0]
    want = function(Layer(how.get("s_aux")), q, k, v, None, scaling=0.4, **how)[0]
    torch.testing.assert_close(everything, want, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_a_model_with_sinks():
    """GPT-OSS, whose sinks would be left out without a word."""
    shape = tiny.GROUPED | {"head_dim": 8, "sliding_window": tiny.WINDOW, "num_local_experts": 4}
    target = HFTarget(tiny.build(GptOssConfig(**shape, experts_implementation="eager")).float())
    assert target._ours
    assert_close(says(target), theirs(target))


@needs_kernels
def test_a_mask_that_is_no_list_goes_to_torch():
    """Grouped keys that are read as if each head had its own."""
    q, k, v, mask, keys = inputs()
    want = F.scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), mask)
    for given in (mask, keys):
        got = attend(Layer(), q, k, v, given)[0]
        torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_rows_with_gradients_attend_alike():
    """A mask that adds nothing was taken for one that hides."""
    q, k, v, mask, _ = inputs()
    want = attend(Layer(), q, k, v, mask, scaling=0.4)[0]
    torch.testing.assert_close(attend(Layer(), q.requires_grad_(), k, v, mask, scaling=0.4)[0], want)


@pytest.mark.parametrize("alike", [True, False])
def test_a_packed_product_is_taken_where_its_rows_are_alike(monkeypatch, alike):
    """On a processor with bf16 instructions, which fp32 plays here: oneDNN's product for a size of which it
    rounds rows by their number, or never."""
    packed = products.packed_linear

    def uneven(x, weight, bias, N):
        return packed(x, weight, bias, N) + (len(x) == 3) * 1e-6

    monkeypatch.setattr(products, "packs", lambda *_: True)
    monkeypatch.setattr(products, "has_tiles", lambda dtype: False)  # whose rows are alike by construction
    if not alike:
        monkeypatch.setattr(products, "packed_linear", uneven)
    target = HFTarget(deepcopy(tiny.reference("llama")).float())
    kinds = {type(m) for m in target.shadow_model.modules() if isinstance(m, nn.Linear)}
    assert kinds == {Packed if alike else Linear}
    assert target.exactness == "bits"


@needs_kernels
def test_exact_is_said_to_be_impossible_where_it_is(monkeypatch):
    """A user who asks for bits and gets a target that rounds otherwise."""
    assert HFTarget(deepcopy(tiny.reference("llama")).float(), exact=True)._ours
    with pytest.raises(ValueError, match="cannot be exact in float64"):
        HFTarget(deepcopy(tiny.reference("llama")), exact=True)
    misread(monkeypatch)
    with pytest.raises(ValueError, match="attention that can be replaced"):
        HFTarget(deepcopy(tiny.reference("llama")).float(), exact=True)
