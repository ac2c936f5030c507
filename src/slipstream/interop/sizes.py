"""What a config.json in Hugging Face's manner says of a head's one layer and of the states that it reads, and
which of its other keys matter. Most are the target's own, of which a head keeps a copy."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor
from transformers import LlamaConfig

from slipstream.core.drafter import INPUT
from slipstream.core.target import Target
from slipstream.drafters.heads import HeadConfig, block_taps
from slipstream.drafters.layers import ACTIVATIONS, SCALED, LayerConfig

# keys that are read here
SHARED = {f.name for f in fields(LayerConfig)} - {"output_bias"} | {
    "num_hidden_layers", "vocab_size", "rope_parameters", "partial_rotary_factor", "qkv_bias", "model_type",
}  # fmt: skip
IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config."
# Keys on files, tokens, training and limits, and on experts: a head with experts would have their tensors.
_INERT = """
architectures auto_map base_model_name_or_path modal_type model_type target_model_type dtype torch_dtype
transformers_version speculators_version speculators_model_type speculators_config slipstream
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id image_token_id video_token_id
audio_token_id vision_start_token_id vision_end_token_id mask_token_id attention_dropout hidden_dropout
embd_pdrop resid_pdrop attn_pdrop dropout initializer_range use_cache max_position_embeddings
original_max_position_embeddings max_window_layers tie_word_embeddings pretraining_tp id2label label2id
problem_type is_encoder_decoder is_decoder output_attentions output_hidden_states return_dict
chunk_size_feed_forward gradient_checkpointing attn_implementation num_experts num_local_experts
num_experts_per_tok experts_per_token moe_intermediate_size norm_topk_prob decoder_sparse_step
mlp_only_layers output_router_logits router_aux_loss_coef shared_expert_intermediate_size has_lm_head
num_eagle_features num_aux_hidden_states num_target_layers ttt_length ttt_steps max_paths topk
medusa_choices eagle_config.next_layer_regular eagle_config.parallel_draft_heads_num_layers
"""
INERT = set(_INERT.split())
# Keys of which one value alone is implemented here.
ONLY: dict[str, Any] = {
    "is_causal": True,
    "layer_types": ["full_attention"],
    "eagle_config.use_aux_hidden_state": True,
    "eagle_config.use_input_layernorm_in_first_layer": True,
    "eagle_config.use_last_layernorm": True,
    "eagle_config.parallel_draft_step": 1,
    "eagle_config.eagle_decoder_type": "llama",
}
LLAMA = LlamaConfig().to_dict()


def described(target: Target) -> dict[str, Any]:
    """What a head's config.json copies from the target's, without what would change the head's layer."""
    gone = {
        "rope_parameters", "rope_scaling", "partial_rotary_factor", "layer_types", "sliding_window",
        "use_sliding_window", "qkv_bias", "mlp_bias", "quantization_config", "_name_or_path",
        "transformers_version",
    }  # fmt: skip
    kept = {key: value for key, value in target.described.items() if key not in gone}
    return kept | {"num_hidden_layers": 1}


def written(head: HeadConfig) -> dict[str, Any]:
    """The layer's sizes under Hugging Face's names: a bias of q, k and v alone is `qkv_bias`."""
    sizes = {f.name: getattr(head, f.name) for f in fields(LayerConfig)}
    bias, scaling = sizes.pop("output_bias"), sizes.pop("rope_scaling")
    if head.attention_bias and not bias:
        sizes["qkv_bias"] = True
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": head.rope_theta}
    return sizes | {"rope_parameters": rope} | ({"rope_scaling": scaling} if scaling else {})


def fits(name: str, value: Any, own: int) -> None:
    """Raises ValueError for a size that is not this target's."""
    if value != own:
        raise ValueError(f"{name}={value}; this target's is {own}: import it for the target it was made for")


def taps(config: dict[str, Any], blocks: int) -> tuple[str, ...]:
    """The states that an EAGLE-3 head reads. Raises ValueError."""
    inputs, outputs = config.get(IDS), config.get(f"{NESTED}{IDS}")
    if inputs and outputs and inputs != [i + 1 for i in outputs]:
        raise ValueError(
            f"{IDS}={inputs} are inputs of blocks, and {NESTED}{IDS}={outputs} outputs, that is inputs of "
            f"{[i + 1 for i in outputs]}: they say different states; take the wrong one out of config.json"
        )
    ids = inputs or [i + 1 for i in outputs or ()]
    if not ids:
        return block_taps(blocks)
    if not all(0 <= i < blocks for i in ids) or ids != sorted(set(ids)):
        raise ValueError(
            f"the head reads the inputs of blocks {ids}; this target has blocks 0 to {blocks - 1}, and "
            "engines read them in ascending order"
        )
    return tuple(f"{INPUT}{i}" for i in ids)


def layer(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> dict[str, Any]:
    """Sizes of a head's one layer, checked against the target. Raises ValueError."""
    for name, own in (("num_hidden_layers", 1), ("vocab_size", target.vocab)):
        fits(name, config.get(name, own), own)
    if missing := [name for name in ("intermediate_size", "num_attention_heads") if name not in config]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    if (activation := config.get("hidden_act", "silu")) not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r}; available: {', '.join(ACTIVATIONS)}")
    heads = config["num_attention_heads"]
    defaults = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
    names = {f.name for f in fields(LayerConfig)}
    given = {name: config[name] for name in names if config.get(name) is not None}
    biases = [config[name] for name in ("qkv_bias", "attention_bias") if config.get(name) is not None]
    own_biases = {
        "attention_bias": bool(biases[0]) if biases else config.get("model_type") == "qwen2",
        "output_bias": any(name.endswith("self_attn.o_proj.bias") for name in tensors),
    }
    return {**defaults, **given, **_rope(config), **own_biases}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Base and scaling of a head's rotary positions. Raises ValueError for one that is not known here."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind, old_kind = given.pop("rope_type", None), given.pop("type", None)
    kind = kind or next((name for name in given if isinstance(given[name], dict)), old_kind or "default")
    partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if kind not in ("default", *SCALED) or partial != 1.0:
        raise ValueError(
            f"rope {kind!r} over {partial} of a head's width; available: default, {', '.join(SCALED)}, over "
            "all of it"
        )
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    length = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    scaling = {"original_max_position_embeddings": length, **given, "rope_type": kind}
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def unread(config: Mapping[str, Any], read: Sequence[str], target: Mapping[str, Any]) -> list[str]:
    """The keys that are not `read` and change nothing: known ones and those that begin with "_", unset ones,
    and those at Llama's default or at the target's own value. Raises ValueError where there are others."""
    left = {name: value for name, value in config.items() if name not in read}
    windowless = config.get("use_sliding_window") is False or config.get("layer_types") == ONLY["layer_types"]

    def inert(name: str, value: Any) -> bool:
        if value is None or name in INERT or name.startswith("_"):
            return True
        if name == "sliding_window" and windowless:
            return True
        if name in ONLY:
            return bool(value == ONLY[name])
        known = any(name in own and own[name] == value for own in (LLAMA, target))
        return known or value is False or value in ([], {}, "")

    if wrong := [f"{name}={value!r}" for name, value in left.items() if not inert(name, value)]:
        raise ValueError(
            f"config.json says {', '.join(wrong)}, which may change what the head says and is not known "
            "here: import a head without it, or take it out if you know that it changes nothing"
        )
    return sorted(left)
