"""Which keys of a public config.json matter. Most are the target's own, of which a head keeps a copy."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import LlamaConfig

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


def unread(config: Mapping[str, Any], read: Sequence[str], target: Mapping[str, Any]) -> list[str]:
    """The keys that are not `read` and change nothing: known ones and those that begin with "_", unset ones,
    and those at Llama's default or at the target's own value.

    Raises:
        ValueError: there are others, which may change what the head says.
    """
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
