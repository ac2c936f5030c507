"""A model's sizes and rotary positions, from its Hugging Face configuration."""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.core.target import Sizes


def sizes_of(config: Any) -> Sizes:
    """The sizes. What the configuration lacks is as in a Llama-like layer."""
    H, heads = config.hidden_size, config.num_attention_heads
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return Sizes(
        hidden_size=H,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * H),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or H // heads,
        rope_theta=float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        hidden_act=str(getattr(config, "hidden_act", None)),
        blocks=config.num_hidden_layers,
    )


def rope(config: Any, block: int) -> tuple[list[float], float]:
    """`Target.rope` of a configuration."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = (getattr(config, "layer_types", None) or {block: None})[block]
    nested = kind in parameters
    parameters = parameters[kind] if nested else parameters
    if not parameters:
        return [], 1.0
    if (scaling := parameters.get("rope_type", "default")) != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](
            config, torch.device("cpu"), layer_type=kind if nested else None
        )
        return frequencies.tolist(), float(factor)
    D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(D * (parameters.get("partial_rotary_factor") or 1.0))
    return (1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)).tolist(), 1.0
