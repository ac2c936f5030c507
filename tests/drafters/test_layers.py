"""The decoder layer that learned drafters are made of."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.core.kv_cache import KVCache
from slipstream.drafters.eagle.objective import Unrolled
from slipstream.drafters.layers import (
    SCALED,
    CacheAttend,
    DecoderLayer,
    LayerConfig,
    Residuals,
    Rope,
    attend_cache,
    attended,
)
from slipstream.kernels.ops import available
from slipstream.kernels.training_attention import ROWS
from slipstream.kernels.weight_packing import EIGHT
from slipstream.targets.linear import own_products

NUMBERS = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions_are_hugging_faces(kind):
    """Another width or base than the head's own; yarn's factor of cos and sin left out."""
    scaling = {"rope_type": kind, **NUMBERS, **(LLAMA3 if kind == "llama3" else {})}
    sizes = LayerConfig(48, 64, 4, 2, head_dim=16, rope_theta=500.0, rope_scaling=scaling)
    rope = {"rope_theta": 500.0, **scaling}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=48,
            num_attention_heads=4,
            head_dim=16,
            max_position_embeddings=128,
            rope_parameters=rope,
        )
    )
    at = torch.arange(100)[None]
    for mine, other in zip(Rope.of(sizes)(at, torch.float32), theirs(torch.zeros(1), at), strict=True):
        torch.testing.assert_close(mine, other)


def test_training_attends_as_drafting_does():
    """Training takes rows apart and leaves out the keys that none of them sees, not one that some do."""
    T, drawn = 2 * ROWS + 7, torch.Generator().manual_seed(0)
    unrolled = Unrolled(T, torch.device("cpu"))
    for _ in range(3):
        q, k, v = (
            torch.randn(2, heads, T, 8, dtype=torch.float64, generator=drawn, requires_grad=True)
            for heads in (4, 2, 2)
        )
        key, value, seen = unrolled.step(k, v)
        out, whole = attended(q, key, value, seen), F.scaled_dot_product_attention
        expected = whole(q, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), seen).transpose(1, 2)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(attended(q.detach(), key.detach(), value.detach(), seen), out.detach())
        weights = torch.randn(out.shape, dtype=out.dtype, generator=drawn)
        mine, other = (
            torch.autograd.grad((x * weights).sum(), (q, k, v), retain_graph=True) for x in (out, expected)
        )
        torch.testing.assert_close(mine, other)


SIZES = LayerConfig(64, 96, 4, 2, head_dim=16)


def cached(layer: DecoderLayer, text: int, dtype: torch.dtype) -> KVCache:
    """Two texts of that many tokens, and room for more."""
    like = torch.empty(1, 2, 0, 16, dtype=dtype)
    cache = KVCache(1, 2, like=(like, like))
    attends, positions = attend_cache(cache, text)
    x = torch.randn(2, text, 64, generator=torch.Generator().manual_seed(text)).to(dtype)
    layer(x, layer.self_attn.rope(positions, dtype), attends[0])
    cache.keep(None, torch.tensor([text, text - 3]))
    return cache


def branch(cache: KVCache) -> tuple[CacheAttend, Tensor]:
    """Three rows, of which the last two follow the first, and their positions."""
    among = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(2, -1, -1)
    attends, positions = attend_cache(cache, 3, 0, among)
    return attends[0], positions


def said(layer: DecoderLayer, x: Tensor, cache: KVCache, reads: Tensor | None = None) -> Tensor:
    """One call's, of a branch."""
    attend, positions = branch(cache)
    made = layer.residuals.one_call(x, layer.self_attn.rope(positions, x.dtype), attend, reads)
    assert made is not None
    return made


@pytest.mark.skipif(not available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_one_call_says_what_the_modules_say(dtype, eight):
    """A norm or a sum that is left out, keys of another row or slot, a weight of before it was changed, a
    copy's call that reads the first one's weights."""
    torch.manual_seed(0)
    layer = DecoderLayer(SIZES).to(dtype).requires_grad_(False)
    if eight:
        for weight in layer.parameters():
            step = weight.float().abs().amax(-1, keepdim=True) / 127
            if weight.dim() == 2:
                weight.copy_((weight.float() / step).round() * step)
                setattr(weight, EIGHT, True)
    own_products(layer, dtype, torch.device("cpu"))
    x, reads = (torch.randn(2, 3, 64).to(dtype) for _ in range(2))

    def proven(read: Tensor | None = None) -> Tensor:
        """By modules, in another cache."""
        attend, positions = branch(cached(layer, 9, dtype))
        normed = layer.input_layernorm(x if read is None else read)
        middle = x + layer.self_attn(normed, layer.self_attn.rope(positions, dtype), attend)
        return middle + layer.mlp(layer.post_attention_layernorm(middle))

    def near(got: Tensor, want: Tensor) -> None:
        error = (got.float() - want.float()).abs().max()
        assert error < (1e-5 if dtype == torch.float32 and not eight else 0.05) * want.float().std()

    near(said(layer, x, cached(layer, 9, dtype)), proven())
    near(said(layer, x, cached(layer, 9, dtype), reads), proven(reads))
    attention = Residuals(SIZES, layer.self_attn, layer.input_layernorm)
    mlp = Residuals(SIZES, mlp=layer.mlp, second=layer.post_attention_layernorm)
    attends, positions = attend_cache(cache := cached(layer, 9, dtype), 3)
    middle = attention(x, layer.self_attn.rope(positions, dtype), attends[0])
    attends, _ = attend_cache(cache, 3)
    assert torch.equal(mlp(middle), layer(x, layer.self_attn.rope(positions, dtype), attends[0]))
    before = said(layer, x, cached(layer, 9, dtype))
    other = deepcopy(layer)
    other.mlp.down_proj.weight.mul_(2)
    assert torch.equal(said(layer, x, cached(layer, 9, dtype)), before)
    assert not torch.equal(said(other, x, cached(layer, 9, dtype)), before)
    layer.mlp.down_proj.weight.mul_(2)
    near(said(layer, x, cached(layer, 9, dtype)), proven())


@pytest.mark.skipif(not available(), reason="there is no C++ compiler")
@torch.no_grad()
def test_a_layer_that_was_cast_is_described_anew():
    """Its parameters stay the same objects, of the same version, and lie elsewhere."""
    layer = DecoderLayer(SIZES).bfloat16().requires_grad_(False)
    own_products(layer, torch.bfloat16, torch.device("cpu"))
    x = torch.randn(2, 3, 64)
    rounded = said(layer, x.bfloat16(), cached(layer, 9, torch.bfloat16))
    exact = said(layer.float(), x, cached(layer.float(), 9, torch.float32))
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.1)


@torch.no_grad()
def test_modules_say_what_no_call_can():
    """An activation of the GPU's, weights that are not packed, and gradients."""
    x = torch.randn(1, 2, 64)
    for config in SIZES, replace(SIZES, hidden_act="relu"):
        layer = DecoderLayer(config)
        if config is not SIZES:
            own_products(layer, torch.float32, torch.device("cpu"))
        attends, positions = attend_cache(KVCache(1, 1), 2)
        assert layer.residuals.one_call(x, layer.self_attn.rope(positions, x.dtype), attends[0]) is None
