"""GGUF files against the Hugging Face models that they were written from: small files of each kind."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny
from slipstream.targets.gguf import read_gguf

EPS = 2.0**-16  # which 32 bits hold exactly
TEXT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]])
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SCALED_BY_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                  "rope.scaling.original_context_length": 32}  # fmt: skip
BYTES = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b"], "eos_token_id": 63,
         "tokens": [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234567", "ab", "Ġ", "1Ġ", "</s>"],
         "token_type": [1] * 63 + [3]}  # fmt: skip
PIECES = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab", "▁▁"]
WORDS = {"model": "llama", "tokens": PIECES, "scores": [-float(i) for i in range(10)], "bos_token_id": 1,
         "eos_token_id": 2, "token_type": [2, 3, 3, *[1] * 7]}  # fmt: skip


def write(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: dict[str, np.ndarray],
    tokenizer: dict[str, Any],
) -> Path:
    """A GGUF file."""
    writer = GGUFWriter(path, architecture)
    every = {f"{architecture}.{key}": value for key, value in keys.items() if "general." not in key}
    every |= {key: value for key, value in keys.items() if "general." in key}
    every |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in every.items():
        adders[type(value)](key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """A model's weights by llama.cpp's names and in its order."""
    config, stored = model.config, {}
    state = dict(model.named_parameters())
    for name, place in get_gguf_hf_weights_map(model, TensorProcessor()).items():
        if place not in state:  # a tied LM head
            continue
        weight = state[place].detach().numpy()
        for part, heads in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
            if architecture == "llama" and part in name:
                parts = weight.reshape(getattr(config, heads), 2, -1, *weight.shape[1:])
                weight = parts.swapaxes(1, 2).reshape(weight.shape)
        if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            weight = weight + 1
        if architecture == "gpt2" and any(
            part in name for part in ("attn_qkv.w", "ffn_down.w", "ffn_up.w", "attn_output.w")
        ):
            weight = weight.T
        stored[name] = weight
    return stored


def keys_of(config: Any, rms: bool = True) -> dict[str, Any]:
    """What every file says of a model."""
    return {
        "context_length": 128,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        f"attention.layer_norm_{'rms_' if rms else ''}epsilon": EPS,
    }


@dataclasses.dataclass
class Kind:
    architecture: str
    config: Any
    keys: dict[str, Any]  # beside those that every file has
    rms: bool = True


def of(config: type, **how: Any) -> Any:
    return config(**(tiny.GROUPED | {"rms_norm_eps": EPS} | how))


BIG = {"head_dim": 8, "sliding_window": tiny.WINDOW, "query_pre_attn_scalar": 8,
       "hidden_size": 64,  # whose root, by which embeddings are scaled, 32 bits hold exactly
       "tie_word_embeddings": True}  # fmt: skip
NEAR = {"attention.head_count_kv": 2, "attention.key_length": 8, "attention.sliding_window": tiny.WINDOW}
TWO = {"attention.head_count_kv": 2}
THETA = {"rope.freq_base": 500000.0}
KINDS = {
    "llama": Kind("llama", of(LlamaConfig), TWO),
    "llama, wide heads": Kind("llama", of(LlamaConfig, head_dim=16), TWO | {"attention.key_length": 16}),
    "llama, biases": Kind("llama", of(LlamaConfig, attention_bias=True, mlp_bias=True), TWO),
    "llama, llama3": Kind("llama", of(LlamaConfig, rope_parameters=LLAMA3), TWO | THETA),
    "llama, linear": Kind(
        "llama",
        of(LlamaConfig, rope_parameters=LINEAR),
        TWO | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "llama, old linear": Kind(
        "llama", of(LlamaConfig, rope_parameters=LINEAR), TWO | {"rope.scale_linear": 8.0}
    ),
    "llama, yarn": Kind("llama", of(LlamaConfig, rope_parameters=YARN), TWO | SCALED_BY_YARN),
    "qwen2, yarn": Kind("qwen2", of(Qwen2Config, rope_parameters=YARN), TWO | SCALED_BY_YARN),
    "qwen3": Kind("qwen3", of(Qwen3Config, head_dim=8), TWO),
    "gemma2": Kind("gemma2", of(Gemma2Config, **BIG), NEAR | {"final_logit_softcapping": 30.0}),
    "gemma2, 27B": Kind(
        "gemma2",
        of(
            Gemma2Config,
            **BIG | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16},
        ),
        NEAR,
    ),
    "gemma3, linear": Kind(
        "gemma3",
        of(
            Gemma3TextConfig,
            **BIG | {"num_hidden_layers": 6},
            rope_parameters={"full_attention": LINEAR, "sliding_attention": PLAIN},
        ),
        NEAR | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gemma3, pattern": Kind(
        "gemma3",
        of(
            Gemma3TextConfig,
            **BIG,
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters={"full_attention": PLAIN, "sliding_attention": PLAIN | {"rope_theta": 500.0}},
        ),
        NEAR | {"attention.sliding_window_pattern": [False, True], "rope.freq_base_swa": 500.0},
    ),
    "phi3": Kind(
        "phi3",
        of(
            Phi3Config,
            pad_token_id=None,
            sliding_window=tiny.WINDOW,
            rope_parameters=PLAIN | {"partial_rotary_factor": 0.5},
        ),
        TWO
        | {"attention.sliding_window": tiny.WINDOW, "rope.dimension_count": 4}
        | {"rope.scaling.original_context_length": 128},
    ),
    "starcoder2": Kind(
        "starcoder2",
        of(Starcoder2Config, norm_epsilon=EPS, rope_parameters=PLAIN | {"rope_theta": 500000.0}),
        TWO | THETA,
        rms=False,
    ),
    "stablelm": Kind(
        "stablelm",
        of(
            StableLmConfig,
            layer_norm_eps=EPS,
            use_qkv_bias=True,
            rope_parameters=PLAIN | {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        ),
        TWO | THETA | {"rope.dimension_count": 4, "use_parallel_residual": False},
        rms=False,
    ),
    "nemotron": Kind(
        "nemotron",
        of(
            NemotronConfig,
            norm_eps=EPS,
            rope_parameters=PLAIN | {"partial_rotary_factor": 0.25},
        ),
        TWO | {"rope.dimension_count": 2},
        rms=False,
    ),
    "gpt2": Kind("gpt2", GPT2Config(**tiny.SHORT, n_embd=32, n_layer=2, n_head=4, n_positions=128,
                                    n_inner=48, layer_norm_epsilon=EPS), {"feed_forward_length": 48},
                 rms=False),
    "falcon": Kind(
        "falcon",
        FalconConfig(**tiny.FALCON, alibi=False, multi_query=True, layer_norm_epsilon=EPS),
        {"attention.head_count_kv": 1},
        rms=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_the_model_it_was_written_from(tmp_path, name):
    """Scalings, windows, partial rotary, thetas, biases and query scales that transformers' reader drops
    without a word: another model answered, and the target said "bits"."""
    kind = KINDS[name]
    model = tiny.build(kind.config)
    for weight in model.parameters():  # 32 bits hold it, and it + 1
        weight.data = ((weight.float() + 1) - 1).double()
    tensors = tensors_of(model, kind.architecture)
    if name == "llama, llama3":
        inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](kind.config, torch.device("cpu"))
        tensors["rope_freqs.weight"] = (500000.0 ** (-torch.arange(0, 8, 2) / 8) / inverse).numpy()
    keys = keys_of(kind.config, kind.rms) | kind.keys
    file = write(tmp_path / "tiny.gguf", kind.architecture, keys, tensors, BYTES)
    read, tokenizer = read_gguf(file, torch.float64)
    torch.testing.assert_close(read(TEXT).logits, model(TEXT).logits)
    assert read.generation_config.eos_token_id == [63]
    assert tokenizer.decode([60]) == "ab"


SMALL = tiny.build(LlamaConfig(**tiny.GROUPED)).float()


def small(path: Path, tokenizer: dict[str, Any], **keys: Any) -> Path:
    """A tiny llama with this tokenizer and these keys, and with the tensors among them."""
    tensors = tensors_of(SMALL, "llama") | {
        key: value for key, value in keys.items() if isinstance(value, np.ndarray)
    }
    said = {key: value for key, value in keys.items() if key not in tensors}
    return write(path / "tiny.gguf", "llama", keys_of(SMALL.config) | TWO | said, tensors, tokenizer)


@pytest.mark.parametrize(
    ("tokenizer", "text", "ids"),
    [
        (WORDS, "ab a", [1, 8, 6]),  # llama.cpp begins such a text with a BOS and a space, if not told
        (WORDS | {"add_bos_token": True, "add_space_prefix": False}, "ab a", [1, 7, 6]),
        (WORDS | {"add_bos_token": False, "add_space_prefix": True}, " ab", [3, 8]),
        (WORDS | {"add_bos_token": False, "add_eos_token": True}, "a", [6, 2]),
        (BYTES, "ab", [60]),
        (BYTES | {"bos_token_id": 63, "add_bos_token": True}, "ab", [63, 60]),
        (BYTES | {"bos_token_id": 63, "pre": "llama-bpe"}, "ab", [63, 60]),
        (BYTES | {"merges": ["1 Ġ"]}, "1 a", [53, 61, 0]),
        (BYTES | {"merges": ["1 1"], "tokens": [*BYTES["tokens"][:62], "11", "</s>"]}, "11", [62]),
        (
            BYTES | {"merges": ["1 1"], "tokens": [*BYTES["tokens"][:62], "11", "</s>"], "pre": "smollm"},
            "11",
            [53, 53],
        ),
    ],
)
def test_text_is_split_begun_and_ended_as_the_file_says(tmp_path, tokenizer, text, ids):
    """A BOS that was lost: "The capital of France is" went on "France. The The The …"."""
    if tokenizer["model"] == "llama":
        tokens = tokenizer["tokens"] + [f"<{i}>" for i in range(54)]
        tokenizer = tokenizer | {"tokens": tokens, "scores": [-float(i) for i in range(64)],
                                 "token_type": [*WORDS["token_type"], *[1] * 54]}  # fmt: skip
    _, made = read_gguf(small(tmp_path, tokenizer), torch.float32)
    assert made(text)["input_ids"] == ids
    made.save_pretrained(tmp_path / "kept")
    again = type(made).from_pretrained(tmp_path / "kept")
    assert again(text)["input_ids"] == ids
    assert again.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"attention.clamp_kqv": 8.0}, "its key llama.attention.clamp_kqv is 8.0, for which llama has no"),
        ({"expert_count": 8}, "its key llama.expert_count is 8"),
        ({"attention.sliding_window": 8}, "its key llama.attention.sliding_window is 8"),
        ({"rope.dimension_count": 4}, "it turns 4 of 8 positions of each head"),
        ({"rope.scaling.type": "longrope"}, "it scales RoPE by 'longrope'"),
        ({"rope_freqs.weight": np.array([1.0, 2, 3, 4])}, "its rope_freqs.weight is not the scaling"),
        ({"rope_factors_long.weight": np.ones(4)}, r"its tensor rope_factors_long.weight has no place"),
        ({"output.bias": np.ones(64)}, r"its tensor output.bias has no place in a LlamaForCausalLM"),
        ({"block_count": 10**9}, "it says that it has 1000000000 blocks, and holds tensors of 2"),
        ({"embedding_length": 2**16}, "a LlamaForCausalLM of its sizes has .* numbers in"),
        ({"tokenizer.pre": "martian"}, "its tokenizer splits text as 'martian', which is not known"),
        ({"tokenizer.remove_extra_whitespaces": True}, "its key tokenizer.ggml.remove_extra_whitespaces"),
        ({"general.type": "adapter"}, "it is an adapter, not a model"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_refused_by_name(tmp_path, keys, says):
    """Loaded as another model, without a word."""
    own = {key.removeprefix("tokenizer."): value for key, value in keys.items() if "tokenizer." in key}
    rest = {key: value for key, value in keys.items() if "tokenizer." not in key}
    with pytest.raises(ValueError, match=f"tiny.gguf' could not be read as GGUF: {says}") as refused:
        read_gguf(small(tmp_path, BYTES | own, **rest), torch.float32)
    assert "\n" not in str(refused.value)


def test_a_file_without_tensors_is_refused_at_once(tmp_path):
    """34 seconds, and all memory."""
    file = write(tmp_path / "tiny.gguf", "llama", keys_of(SMALL.config) | {"block_count": 80}, {}, BYTES)
    with pytest.raises(ValueError, match="it says that it has 80 blocks, and holds tensors of 0"):
        read_gguf(file, torch.float32)
