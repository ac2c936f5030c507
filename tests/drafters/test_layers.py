"""The decoder layer that learned drafters are made of."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.drafters.layers import SCALED, LayerConfig, Rope

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
