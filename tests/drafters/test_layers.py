"""The decoder layer that learned drafters are made of."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.drafters.layers import SCALED, LayerConfig, Rope, attended
from slipstream.learning import ROWS
from slipstream.training.methods import Unrolled

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
        expected = whole(q, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), seen)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(attended(q.detach(), key.detach(), value.detach(), seen), out.detach())
        weights = torch.randn(out.shape, dtype=out.dtype, generator=drawn)
        mine, other = (
            torch.autograd.grad((x * weights).sum(), (q, k, v), retain_graph=True) for x in (out, expected)
        )
        torch.testing.assert_close(mine, other)
