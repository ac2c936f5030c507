"""What a Hugging Face configuration says of a model's sizes and rotary positions."""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.core.target import Sizes


def sizes_of(config: Any) -> Sizes:
    """The sizes, with the defaults of a Llama-like layer where the configuration is silent."""
    H, heads = config.hidden_size, config.num_attention_heads
    about: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return Sizes(
        hidden_size=H,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * H),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or H // heads,
        rope_theta=float(about.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        hidden_act=str(getattr(config, "hidden_act", None)),
        blocks=config.num_hidden_layers,
    )


def rope(config: Any, block: int) -> tuple[list[float], float]:
    """`Target.rope` of a configuration: the base, width and scaling that its block has."""
    about: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = (getattr(config, "layer_types", None) or {block: None})[block]
    nested = kind in about
    about = about[kind] if nested else about
    if not about:
        return [], 1.0
    if (scaled := about.get("rope_type", "default")) != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaled](
            config, torch.device("cpu"), layer_type=kind if nested else None
        )
        return frequencies.tolist(), float(factor)
    D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(D * (about.get("partial_rotary_factor") or 1.0))
    return (1.0 / about["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)).tolist(), 1.0
