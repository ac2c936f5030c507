"""A model's sizes, rotary positions and windows, from its Hugging Face configuration; which models can be
targets. Others are refused by name, with the reason."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.core.target import Sizes
from slipstream.files import several
from slipstream.targets.quantized import dense

ROPE_REFUSED = ("dynamic", "longrope", "su")
LAYERS_KNOWN = ("full_attention", "sliding_attention")
# How much of their spread a causal model's logits may change by rounding; the second limit is for models
# with routed experts, which read other rows with them.
LEAK, ROUTED = 1e-3, 0.05
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # whole numbers of so many bytes
SUPPORTED = "Supported: decoder-only models with attention in every layer"


def check_supported(
    config: Any, stateful: bool = False, takes: Collection[str] = ("position_ids", "past_key_values")
) -> None:
    """Refuse, by a text config, whether the model keeps a recurrent state and the arguments that its forward
    takes, an architecture for which a tree pass with explicit positions and masks is not exact. Raises
    ValueError, which names the model type and the reason."""
    kind = getattr(config, "model_type", type(config).__name__)

    def refuse(reason: str) -> None:
        raise ValueError(f"Unsupported target: {kind}: {reason}. {SUPPORTED}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder; one token tree has no place in its encoder")
    layers = set(getattr(config, "layer_types", None) or ())
    if stateful or layers & {"linear_attention", "mamba", "recurrent", "conv"}:
        refuse("it keeps a recurrent state, which cannot be read at several branches of a tree at once")
    if "position_ids" not in takes:
        refuse(
            "its forward takes no position_ids, and the nodes of a tree do not stand in the order of their "
            "slots"
        )
    if "past_key_values" not in takes:
        refuse("its forward takes no past_key_values, and what was read cannot be kept")
    if kind == "gpt_neo":
        refuse("its local attention counts cache slots, where the nodes of a tree do not stand in order")
    if getattr(config, "attention_type", None) == "block_sparse":
        refuse('its attention is sparse in long texts alone: load it with attention_type="original_full"')
    uneven = {"head_dim", "num_key_value_heads"} & set(getattr(config, "per_layer_attributes", None) or ())
    if uneven or kind == "mimo_v2_flash":  # its sliding layers have twice the heads of keys
        refuse("its layers keep keys and values of different sizes")
    attention = getattr(config, "attn_config", None)
    if getattr(config, "alibi", False) or getattr(attention, "alibi", False) or kind in ("bloom", "mpt"):
        refuse("ALiBi derives positions from cache slots, where the nodes of a tree do not stand in order")
    if unknown := layers - set(LAYERS_KNOWN):
        refuse(f"layers of type {', '.join(sorted(unknown))} use a mask that is not implemented")
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in [value for value in ropes.values() if isinstance(value, dict)] or [ropes]:  # by layer type
        if (rope := entry.get("rope_type", entry.get("type"))) in ROPE_REFUSED:
            refuse(f"{rope} RoPE scaling changes every position with the longest text of the batch")


def check_whole(model: Any) -> None:
    """Raise ValueError for a model whose weights come from elsewhere in each pass, as accelerate has them."""
    if any(weight.is_meta for weight in model.parameters()):
        kind = type(model).__name__
        raise ValueError(f"weights of this {kind} are offloaded, to memory or disk: load all on one device")


def attention_windows(config: Any) -> dict[str, int | None]:
    """The sliding window of each layer type; `None` means full attention."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is None:
        return {"full_attention": None}
    layers = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    return {layer: window if layer == "sliding_attention" else None for layer in sorted(layers)}


@torch.inference_mode()
def check_causal(model: Any) -> None:
    """Raise ValueError for a model that reads later tokens, such as an encoder, whatever its configuration
    says. Another last token must not change the logits at the tokens before it."""
    V = model.config.get_text_config(decoder=True).vocab_size
    texts = (torch.tensor([[1 % V, 2 % V, 3 % V, last % V]], device=model.device) for last in (4, 5))
    one, other = (model(input_ids=text, use_cache=False).logits[0, :-1].double() for text in texts)
    limit = ROUTED if any("expert" in name for name, _ in model.named_parameters()) else LEAK
    if _differ(one, other, limit):
        raise ValueError(
            f"Unsupported target: {model.config.model_type}: its attention is not causal: later tokens "
            f"change what it says of earlier ones. {SUPPORTED}"
        )


def _differ(one: Tensor, other: Tensor, limit: float) -> bool:
    """Whether logits differ by more than a share of their spread."""
    return bool((one - other).pow(2).mean().sqrt() > limit * one.std())


@torch.inference_mode()
def check_embedding(model: Any, embed: Any) -> None:
    """Raise ValueError for a model that looks its tokens up again behind the embedding, as Gemma 3n's blocks
    do. Rows that are no tokens, such as BiTA's masks, cannot be read beside tokens then."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    text = torch.arange(1, 5, device=model.device)[None] % vocab
    inputs: list[dict[str, Any]] = [{"input_ids": text}, {"inputs_embeds": embed(text)}]
    one, other = (model(**how, use_cache=False).logits.double() for how in inputs)
    if _differ(one, other, LEAK):
        raise ValueError(
            f"{model.config.model_type} reads tokens beside their embeddings, and so no masks: take another "
            "drafter than bita"
        )


@torch.inference_mode()
def longest_text(model: Any) -> int:
    """How many tokens prompt and answer may have, for a shadow model. Moshi's configuration names a sliding
    window, which Hugging Face's cache has and its attention has not, so its texts end where the two would
    differ. A window that attention has changes the logits when it is two tokens."""
    config = model.config.get_text_config(decoder=True)
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "keep_window_size"))
    longest = min(filter(None, named), default=2**31)  # Doge drops tokens by their places in the cache
    if getattr(config, "attn_temperature_tuning", False) and 0 in getattr(config, "no_rope_layers", ()):
        longest = min(longest, config.floor_scale - 1)  # Llama 4 counts later tokens by the cache
    windows_named = [window for window in attention_windows(config).values() if window]
    if not windows_named:
        return longest
    text = torch.arange(1, 7, device=model.device)[None] % config.vocab_size
    whole = model(input_ids=text, use_cache=False).logits
    holders: list[Any] = [x for module in model.modules() for x in (module, getattr(module, "config", None))]
    windows = [(holder, window) for holder in holders if (window := getattr(holder, "sliding_window", None))]
    try:
        for holder, _ in windows:
            holder.sliding_window = 2
        narrow = model(input_ids=text, use_cache=False).logits
    finally:
        for holder, window in windows:
            holder.sliding_window = window
    return min(longest, *windows_named) if torch.equal(narrow, whole) else longest


def fingerprint_of(model: Any) -> str:
    """The model's type and a hash of the signs of each weight's first values, which no precision changes."""
    kind = model.config.get_text_config(decoder=True).model_type
    firsts = (dense(p).flatten()[:256] for p in model.parameters())
    return f"{kind}-{_hash(bytes(torch.signbit(first).tolist()) for first in firsts)}"


@torch.inference_mode()
def hash_of(model: Any) -> str:
    """A hash of all weights, by the sum of each row's bits: one pass over memory, in any order the same."""
    return _hash(_row_sums(dense(p)).numpy(force=True).tobytes() for p in model.parameters())


def _row_sums(weight: Tensor) -> Tensor:
    rows = weight.reshape(len(weight) if weight.dim() else 1, -1)
    return rows.view(WHOLE[weight.element_size()]).sum(1, dtype=torch.int64)


def _hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"|".join(sorted(parts))).hexdigest()[:12]


@torch.inference_mode()
def first_non_finite(model: Any, tokens: Sequence[int]) -> str | None:
    """The first module that returns numbers which are not finite in a pass over a text; None if none does."""
    non_finite: list[str] = []

    def look(module: nn.Module, args: Any, out: Any, name: str) -> None:
        parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
        if not all(bool(part.isfinite().all()) for part in parts if isinstance(part, Tensor)):
            non_finite.append(name or type(module).__name__)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(look, name=name)).remove)
        model(input_ids=torch.tensor([list(tokens)], device=model.device), use_cache=False)
    return non_finite[0] if non_finite else None


def sizes_of(config: Any) -> Sizes:
    """The sizes. What the configuration lacks is as in a Llama-like layer."""
    H, heads = config.hidden_size, config.num_attention_heads

    def read(name: str, default: Any) -> Any:
        return getattr(config, name, None) or default

    shared = read("multi_query", False) and not read("new_decoder_architecture", False)  # Falcon's words
    return Sizes(
        hidden_size=H,
        intermediate_size=int(max(several(read("intermediate_size", 4 * H)))),  # Gemma 3n names each block's
        num_attention_heads=heads,
        num_key_value_heads=1 if shared else read("num_key_value_heads", heads),
        head_dim=read("head_dim", H // heads),
        rope_theta=float(read("rope_parameters", {}).get("rope_theta") or read("rope_theta", 10000.0)),
        rms_norm_eps=float(read("rms_norm_eps", 1e-6)),
        hidden_act=str(read("hidden_act", None)),
        blocks=config.num_hidden_layers,
    )


def rope(config: Any, block: int) -> tuple[list[float], float]:
    """`Target.rope` of a configuration."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = (getattr(config, "layer_types", None) or {block: None})[block]
    nested = kind in parameters
    parameters = parameters[kind] if nested else parameters
    turns = getattr(config, "no_rope_layers", None) or [1] * (block + 1)
    if not parameters or not turns[block]:
        return [], 1.0
    if (scaling := parameters.get("rope_type", "default")) != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](
            config, torch.device("cpu"), layer_type=kind if nested else None
        )
        return frequencies.tolist(), float(factor)
    D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(D * (parameters.get("partial_rotary_factor") or 1.0))
    return (1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)).tolist(), 1.0


def scale_and_cap(config: Any) -> tuple[float, float | None]:
    """Of logits, see `LMHead`."""
    factor = getattr(config, "logits_scaling", None) or 1  # all models but one divide by it
    own = factor if config.model_type == "hyperclovax" else 1 / factor
    return getattr(config, "logit_scale", None) or own, getattr(config, "final_logit_softcapping", None)
