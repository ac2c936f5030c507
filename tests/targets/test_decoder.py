"""Described layers: the families' own mathematics, rows alike, weights that change, parts and taps."""

from copy import deepcopy
from functools import wraps

import pytest
import torch
from transformers import (
    Cohere2Config,
    CohereConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from slipstream.core.tree import chain
from slipstream.kernels.ops import available
from slipstream.targets import HFTarget, description, linear as products, masks
from slipstream.targets.decoder import Undescribed
from slipstream.targets.decoder_target import DecoderTarget
from slipstream.targets.description import ModelDecoder
from slipstream.targets.executor_torch import Layers
from tiny import FAMILIES, GROUPED, MIXED, SHAPE, build

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SQUARE = GROUPED | {"intermediate_size": 64, "pad_token_id": None}  # gate and up in whole panels
DESCRIBED: dict[str, PreTrainedConfig] = {
    **{name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")},
    "llama, biases": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "granite": GraniteConfig(
        **GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "smollm3": SmolLM3Config(**SQUARE, no_rope_layers=[1, 0]),
    "phi3": Phi3Config(**SQUARE),
    "olmo2": Olmo2Config(**GROUPED),
    "olmo3": Olmo3Config(**MIXED),
    "starcoder2": Starcoder2Config(**GROUPED),
    "mixtral": FAMILIES["mixtral"],
    "qwen3-moe": Qwen3MoeConfig(**GROUPED, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[0]),
    "gpt-oss": GptOssConfig(**MIXED, head_dim=8, num_local_experts=5, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**GROUPED, **EXPERTS),
    "cohere": CohereConfig(**GROUPED, logit_scale=0.5),
    "cohere2": Cohere2Config(**MIXED),
    "gpt-neox": FAMILIES["gpt-neox"],
    "gpt-neox, in turn": GPTNeoXConfig(**SHAPE, use_parallel_residual=False, attention_bias=False),
    "stablelm": StableLmConfig(**GROUPED, use_qkv_bias=True),
    "stablelm, parallel": StableLmConfig(**GROUPED, use_parallel_residual=True),
}
MIXTURES = "mixtral", "qwen3-moe", "gpt-oss", "olmoe"
TAPS = "input of block 1", "final", "input of block 0", "cache of block 1"
UNDESCRIBED = "gpt2", "opt", "phi", "falcon, new"

pytestmark = pytest.mark.skipif(not available(), reason="there are no kernels")


def text(count: int) -> torch.Tensor:
    return torch.randint(64, (1, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", DESCRIBED)
def test_a_description_says_what_the_familys_own_modules_do(family):
    model = build(DESCRIBED[family]).float()
    target = HFTarget(deepcopy(model), name=family)
    assert target.decoder is not None
    whole = text(20)
    theirs = model(whole).logits
    cache, mine = target.new_cache(1), []
    for rows in whole.split([7, 1, 12], 1):
        mine.append(target(chain(rows), cache).logits)
        cache.keep(None, torch.tensor([rows.shape[1]]))
    assert torch.allclose(torch.cat(mine, 1), theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [family for family in DESCRIBED if family not in MIXTURES])
@pytest.mark.parametrize(
    ("dtype", "exact"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)], ids=str
)
def test_torch_operations_say_what_the_familys_own_modules_do(family, exact, dtype, monkeypatch):
    """As on a GPU. A norm in another's place, other halves that turn, another layer's window, another text's
    slots."""
    monkeypatch.setattr(products, "packs", lambda *_: False)
    if dtype == torch.float64:  # for which there is no attention over lists
        lists = DecoderTarget._masks

        def how(self, layout, positions, cache, nodes, depth):
            return masks.dense(lists(self, layout, positions, cache, nodes, depth), cache.view, self.dtype)

        monkeypatch.setattr(HFTarget, "_masks", how)
    model = build(DESCRIBED[family]).to(dtype)
    target, modules = HFTarget(deepcopy(model), name=family), HFTarget(deepcopy(model))
    target.decoder = ModelDecoder(target.shadow_model, target.blocks, list(target.windows), exact)
    modules.decoder = None
    assert isinstance(target.decoder._run.__self__, Layers)
    near = {"rtol": 1e-4, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    whole = torch.cat([text(20), text(20).flip(1)])
    both = target, modules
    caches, mine = [each.new_cache(2) for each in both], []
    for rows in whole.split([7, 1, 12], 1):
        one, other = (each(chain(rows), cache, TAPS) for each, cache in zip(both, caches, strict=True))
        assert torch.allclose(one.features, other.features, **near)
        mine.append(one.logits)
        for cache in caches:
            cache.keep(None, torch.tensor([rows.shape[1]] * 2))
    assert torch.allclose(torch.cat(mine, 1), model(whole).logits, **near)


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_are_no_torch_operations(family):
    target = HFTarget(build(DESCRIBED[family]))
    with pytest.raises(Undescribed, match="experts"):
        ModelDecoder(target.shadow_model, target.blocks, list(target.windows))


@pytest.mark.parametrize("family", DESCRIBED)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_rows_are_alike_to_the_bit(family, precision):
    quantize = precision if precision.startswith("int") else None
    dtype = torch.bfloat16 if quantize else getattr(torch, precision)
    target = HFTarget(build(DESCRIBED[family]).to(dtype), name=family, quantize=quantize)
    assert target.decoder is not None
    assert target.exactness == "bits"


@pytest.mark.parametrize("family", UNDESCRIBED)
def test_what_has_no_description_runs_by_hugging_faces_modules(family):
    model = build(FAMILIES[family]).float()
    target = HFTarget(deepcopy(model), name=family)
    assert target.decoder is None
    assert torch.allclose(
        target(chain(text(9)), target.new_cache(1)).logits, model(text(9)).logits, atol=2e-4
    )


def test_a_module_more_is_no_word_of_the_description():
    model = build(FAMILIES["llama"]).float()
    model.model.layers[1].self_attn.more = torch.nn.Linear(2, 2)
    assert HFTarget(model).decoder is None


def test_a_description_that_is_wrong_is_not_taken(monkeypatch):
    """Nor for a part of the model, which nobody tries."""
    model = build(FAMILIES["llama"]).float()
    monkeypatch.setattr(description, "eps_of", lambda norm: 100.0)
    target = HFTarget(deepcopy(model))
    assert target.decoder is None
    assert target.part([1]).decoder is None
    mine = target(chain(text(9)), target.new_cache(1)).logits
    assert torch.allclose(mine, model(text(9)).logits, atol=2e-4)


def test_layers_follow_weights_that_are_changed_in_place():
    model = build(FAMILIES["llama"]).float()
    target = HFTarget(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    mine = target(chain(text(9)), target.new_cache(1)).logits
    assert torch.allclose(mine, model(text(9)).logits, atol=2e-4, rtol=1e-4)


def test_layers_follow_weights_that_are_replaced():
    target = HFTarget(build(FAMILIES["llama"]).float())
    other = HFTarget(build(FAMILIES["llama"]).float())
    for each in (target, other):
        each(chain(text(9)), each.new_cache(1))
        weights = each.blocks[1].mlp.up_proj._parameters
        weights["weight"] = torch.nn.Parameter(-weights["weight"], False)
    other.decoder = None
    mine, theirs = (each(chain(text(9)), each.new_cache(1)).logits for each in (target, other))
    assert torch.allclose(mine, theirs, atol=2e-4, rtol=1e-4)


class Doubles(LlamaForCausalLM):
    """Makes other logits than its LM head."""

    @wraps(LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out


def test_what_a_model_does_between_its_modules_is_not_left_out():
    model = build(FAMILIES["llama"]).float()
    model.__class__ = Doubles
    target = HFTarget(model)
    assert target.decoder is None
    assert torch.allclose(
        target(chain(text(9)), target.new_cache(1)).logits, model(text(9)).logits, atol=2e-4
    )


def test_whoever_looks_at_a_module_sees_its_passes():
    target = HFTarget(build(FAMILIES["llama"]).float())
    model, block = target.shadow_model, target.blocks[1]
    for module in (model, model.get_decoder(), block, block.mlp.up_proj):
        calls = []
        hook = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        target(chain(text(9)), target.new_cache(1))
        hook.remove()
        assert len(calls) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_taps_and_parts_are_those_of_the_modules(family):
    model = build(FAMILIES[family]).float()
    target = HFTarget(model)

    def features(target: HFTarget) -> torch.Tensor:
        found = target(chain(text(9)), target.new_cache(1), TAPS).features
        assert found is not None
        return found

    modules = HFTarget(model)
    modules.decoder = None
    assert target.decoder is not None
    assert torch.allclose(features(target), features(modules), atol=2e-4, rtol=1e-4)
    one, other = target.part([1]), modules.part([1])
    assert one.decoder is not None
    assert other.decoder is None
    mine, theirs = (each(chain(text(9)), each.new_cache(1)).logits for each in (one, other))
    assert torch.allclose(mine, theirs, atol=2e-4, rtol=1e-4)
