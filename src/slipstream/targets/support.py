"""Which models can be targets. Others are refused by name, with the reason."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ROPE_REFUSED = ("dynamic", "longrope", "su")
LAYERS_KNOWN = ("full_attention", "sliding_attention")
# How much of their spread a causal model's logits may change by rounding; the second limit is for models
# with routed experts, which read other rows with them.
LEAK, ROUTED = 1e-3, 0.05
SUPPORTED = "Supported: decoder-only models with attention in every layer"


def check_supported(config: Any, stateful: bool = False, positioned: bool = True) -> None:
    """Refuse architectures for which a tree pass with explicit positions and masks is not exact.

    Args:
        config: the model's Hugging Face text config.
        stateful: whether the model class keeps a recurrent state (`PreTrainedModel._is_stateful`).
        positioned: whether its forward takes `position_ids`.

    Raises:
        ValueError: names the model type and the reason.
    """
    kind = getattr(config, "model_type", type(config).__name__)

    def refuse(reason: str) -> None:
        raise ValueError(f"Unsupported target: {kind}: {reason}. {SUPPORTED}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder; one token tree has no place in its encoder")
    layers = set(getattr(config, "layer_types", None) or ())
    if stateful or layers & {"linear_attention", "mamba", "recurrent", "conv"}:
        refuse("it keeps a recurrent state, which cannot be read at several branches of a tree at once")
    if not positioned:
        refuse(
            "its forward takes no position_ids, and the nodes of a tree do not stand in the order of their "
            "slots"
        )
    attention = getattr(config, "attn_config", None)
    if getattr(config, "alibi", False) or getattr(attention, "alibi", False) or kind in ("bloom", "mpt"):
        refuse("ALiBi derives positions from cache slots, where the nodes of a tree do not stand in order")
    if unknown := layers - set(LAYERS_KNOWN):
        refuse(f"layers of type {', '.join(sorted(unknown))} use a mask that is not implemented")
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in [value for value in ropes.values() if isinstance(value, dict)] or [ropes]:  # by layer type
        if (rope := each.get("rope_type", each.get("type"))) in ROPE_REFUSED:
            refuse(f"{rope} RoPE scaling changes every position with the longest text of the batch")


def attention_windows(config: Any) -> dict[str, int | None]:
    """The sliding window of each layer type; `None` means full attention."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is None:
        return {"full_attention": None}
    layers = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    return {layer: window if layer == "sliding_attention" else None for layer in sorted(layers)}


@torch.inference_mode()
def check_causal(model: Any) -> None:
    """Refuse a model that reads later tokens, such as an encoder, whatever its configuration says. Another
    last token must not change the logits at the tokens before it.

    Raises:
        ValueError: names the model type.
    """
    V = model.config.get_text_config(decoder=True).vocab_size
    texts = (torch.tensor([[1 % V, 2 % V, 3 % V, last % V]], device=model.device) for last in (4, 5))
    one, other = (model(input_ids=text, use_cache=False).logits[0, :-1].double() for text in texts)
    limit = ROUTED if any("expert" in name for name, _ in model.named_parameters()) else LEAK
    if (one - other).pow(2).mean().sqrt() > limit * one.std():
        raise ValueError(
            f"Unsupported target: {model.config.model_type}: its attention is not causal: later tokens "
            f"change what it says of earlier ones. {SUPPORTED}"
        )


@torch.inference_mode()
def first_unsound(model: Any, tokens: Sequence[int]) -> str | None:
    """The first module that returns numbers which are not finite in a pass over a text; None if none does."""
    unsound: list[str] = []

    def look(module: nn.Module, args: Any, out: Any, name: str) -> None:
        parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
        if not all(bool(part.isfinite().all()) for part in parts if isinstance(part, Tensor)):
            unsound.append(name or type(module).__name__)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(look, name=name)).remove)
        model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False)
    return unsound[0] if unsound else None
