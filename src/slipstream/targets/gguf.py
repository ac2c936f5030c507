"""Read a GGUF file through transformers, whose reader drops what it does not know without a word: another
model then answers. Here every key and every tensor of the file is set, is known to change nothing, or is
refused by name, as llama.cpp has them (`src/llama-model.cpp`, `src/llama-vocab.cpp`, `src/models`)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from math import log
from pathlib import Path
from threading import Lock
from typing import Any, Never

import gguf
import numpy as np
import torch
import transformers
import transformers.modeling_gguf_pytorch_utils as hf_gguf
from gguf import GGUFReader, dequantize
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.files import first_line
from slipstream.targets.support import check_supported

READS = Lock()  # one file at a time

# The attribute of a Hugging Face configuration that holds what a key says: the first of these that it has.
SAME = ("vocab_size", "attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual")
ATTRIBUTES = {
    **{name: (name,) for name in SAME},
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("ffn_hidden_size", "n_inner", "intermediate_size"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("norm_epsilon", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
ROPE = ("dimension_count", "freq_base", "freq_base_swa", "scale_linear", *(f"scaling.{name}" for name in (
    "type", "factor", "attn_factor", "original_context_length", "finetuned", "yarn_attn_factor",
    "yarn_beta_fast", "yarn_beta_slow")))  # fmt: skip
READ_BELOW = ("attention.value_length", "attention.causal", "attention.sliding_window_pattern",
              "tensor_data_layout", *(f"rope.{name}" for name in ROPE))  # fmt: skip
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma2", "gemma3", "phi3", "starcoder2",
                 "stablelm", "nemotron", "falcon", "gpt2")  # fmt: skip
WINDOWED = ("gemma2", "gemma3", "phi3")
PARTIAL = ("phi3", "stablelm", "nemotron")  # may turn a part of each head by RoPE
BLOCKS_OF_27B = {"gemma2": 46, "gemma3": 62}  # llama.cpp knows the 27B, which scales queries otherwise, by it
PERIODS = {"gemma2": 2, "gemma3": 6}  # every so manyth block has full attention

# How vocabularies of bytes split text before they merge: regular expressions, each applied to what the ones
# before it left whole.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|%s"
CASED += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ONE, THREE = r"\p{N}", r"\p{N}{1,3}"
LLAMA3, QWEN2 = (f"{ENDS}|{WORDS % digits}" for digits in (THREE, ONE))
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe",
                     "chatglm-bpe", "glm4"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan",
                     "grok-2", "solar-open"), (QWEN2,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "a.x-4.0", "mellum", "gigachat", "trillion",
                     "exaone4", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
                     "mellum2"), (ONE, GPT2)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (CASED % (f"{ENDS}?", f"{ENDS}?", THREE),)),
    "tekken": (CASED % ("", "", ONE),),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", ONE),
    "default": (PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")  # with a BOS
WHOLE_WORDS = (*BEGUN, "glm4")  # a word of the vocabulary is one token, whatever the merges say
TOKENIZER = ("model", "pre", "tokens", "scores", "token_type", "token_type_count", "merges", "add_bos_token",
             "add_eos_token", "add_sep_token", "add_space_prefix")  # fmt: skip
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
SPACE = "\u2581"


class Reader(GGUFReader):
    """gguf's reader over a plain array: of one of numpy's memmap type each slice takes many times as long."""

    def _get(self, offset: int, dtype: Any, *more: Any, **how: Any) -> Any:
        self.data: Any = np.asarray(self.data)
        return super()._get(offset, dtype, *more, **how)


@contextmanager
def opened(file: Path) -> Iterator[Reader]:
    """A file's reader, which transformers gets for its configuration, its tokenizer and its weights."""

    def reader_of(path: str, *_: Any) -> Reader:
        return reader if Path(path) == file else Reader(path)

    library: Any = gguf
    with READS:
        reader, library.GGUFReader = Reader(file), reader_of
        try:
            yield reader
        finally:
            library.GGUFReader = GGUFReader


def read_gguf(file: Path, dtype: torch.dtype) -> tuple[transformers.PreTrainedModel, PreTrainedTokenizerFast]:
    """Model and tokenizer of a GGUF file, dequantised. Raises ValueError, in one line, for a file that cannot
    be read, or says what cannot be set."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    dense: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep the weights packed by default
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with opened(file) as reader:
            keys = {name: field.contents() for name, field in reader.fields.items() if len(field.data) < 1000}
            _check_file(keys, reader.tensors)
            config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
            _set_config(config, keys, {tensor.name: tensor for tensor in reader.tensors})
            check_supported(config)
            _check_tensors(config, keys, reader.tensors)
            tokenizer = _tokenizer(AutoTokenizer.from_pretrained(**source), keys)
            model = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=dtype, **dense)
    except Exception as error:  # damaged files raise errors of many types
        raise ValueError(f"target {str(file)!r} could not be read as GGUF: {first_line(error)}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    ends = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    model.generation_config.eos_token_id = [*dict.fromkeys(end for end in ends if end is not None)] or None
    return model, tokenizer


def _refuse(reason: str) -> Never:
    raise ValueError(f"{reason}: give the model's Hugging Face directory")


def _check_file(keys: dict[str, Any], tensors: list[Any]) -> None:
    """Refuse what is no whole model, before anything is made of its size."""
    architecture = keys["general.architecture"]
    if architecture not in ARCHITECTURES:
        _refuse(f"its architecture {architecture!r} is none of {', '.join(ARCHITECTURES)}")
    if (kind := keys.get("general.type", "model")) != "model":
        raise ValueError(f"it is an {kind}, not a model: give the model's own file")
    if (pieces := keys.get("split.count", 1)) > 1:
        raise ValueError(f"it is one of {pieces} pieces: join them with llama-gguf-split --merge")
    held = len({x.name.split(".")[1] for x in tensors if x.name.startswith("blk.")})
    if held != (blocks := keys[f"{architecture}.block_count"]):
        raise ValueError(
            f"it says that it has {blocks} blocks, and holds tensors of {held}: download it again"
        )


def _set_config(config: Any, keys: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Set what the file says, and what llama.cpp takes where the file says nothing."""
    architecture = keys["general.architecture"]
    written = _below(keys, f"{architecture}.")
    own = {name: _single(f"{architecture}.{name}", value) for name, value in written.items()}
    heads = own["attention.head_count"]
    neutral = {"attention.key_length": own["embedding_length"] // heads, "attention.head_count_kv": heads}
    own = neutral | own
    D = own["attention.key_length"]
    for name, value in own.items():
        attribute = next((field for field in ATTRIBUTES.get(name, ()) if hasattr(config, field)), None)
        if attribute is not None:
            new = None if value == 0 and name.endswith(("softcapping", "window")) else value
            if getattr(config, attribute) != new:  # Falcon's head_dim cannot be set
                setattr(config, attribute, new)
        elif value and name not in READ_BELOW and value != neutral.get(name):
            _refuse(f"its key {architecture}.{name} is {value!r}, for which {config.model_type} has no place")
    if own.get("attention.value_length", D) != D or own.get("attention.causal") is False:
        _refuse("its keys and values differ in length, or its attention is not causal")
    if architecture == "falcon" and own["attention.head_count_kv"] != 1:
        _refuse("its fused keys and values of several heads stand in another order")
    for name, key in SPECIAL.items():
        setattr(config, f"{name}_token_id", keys.get(f"tokenizer.ggml.{key}_token_id"))
    for tensor, attribute in (("attn_q.bias", "attention_bias"), ("ffn_up.bias", "mlp_bias")):
        if hasattr(config, attribute):
            setattr(config, attribute, f"blk.0.{tensor}" in tensors)
    if architecture in BLOCKS_OF_27B:
        big = config.num_hidden_layers == BLOCKS_OF_27B[architecture]
        config.query_pre_attn_scalar = config.hidden_size // heads if big else D
    _set_windows(config, architecture, own)
    if architecture != "gpt2":
        _set_rope(config, architecture, own, D, tensors.get("rope_freqs.weight"))


def _below(keys: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in keys.items() if name.startswith(prefix)}


def _single(name: str, value: Any) -> Any:
    """One value of those by block, which must be equal."""
    if not isinstance(value, list) or name.endswith("sliding_window_pattern"):
        return value
    if len(set(value)) != 1:
        _refuse(f"its key {name} differs from block to block")
    return value[0]


def _set_windows(config: Any, architecture: str, own: dict[str, Any]) -> None:
    window, pattern = own.get("attention.sliding_window"), own.get("attention.sliding_window_pattern")
    if (window and architecture not in WINDOWED) or (pattern and architecture not in PERIODS):
        _refuse(f"it has a sliding window of {window}, for which {config.model_type} has no place")
    if architecture in PERIODS:
        period = pattern or PERIODS[architecture]
        slides = period if isinstance(period, list) else [(i + 1) % period for i in range(own["block_count"])]
        slides = slides if window or architecture == "gemma2" else [False] * len(slides)
        config.layer_types = ["sliding_attention" if one else "full_attention" for one in slides]


def _set_rope(config: Any, architecture: str, own: dict[str, Any], D: int, factors: Any) -> None:
    turned = own.get("rope.dimension_count", D)
    if turned != D and architecture not in PARTIAL:
        _refuse(f"it turns {turned} of {D} positions of each head, for which {architecture} has no place")
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10000.0)}
    if architecture in PARTIAL:
        base["partial_rotary_factor"] = turned / D
    scaled = base | _scaling(own)
    if factors is not None:
        if scaled["rope_type"] != "default":
            _refuse("it holds rope_freqs.weight and names another scaling beside it")
        scaled = _llama3(config, base, dequantize(factors.data, factors.tensor_type).copy())
    if architecture == "phi3" and scaled != base:
        _refuse(f"it scales RoPE ({scaled['rope_type']}), for which phi3 has no place")
    if architecture == "gemma3":
        sliding = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", 10000.0)}
        config.rope_parameters = {"full_attention": scaled, "sliding_attention": sliding}
    elif own.get("rope.freq_base_swa", base["rope_theta"]) != base["rope_theta"]:
        _refuse(f"its key {architecture}.rope.freq_base_swa has no place in {config.model_type}")
    else:
        config.rope_parameters = scaled


def _scaling(own: dict[str, Any]) -> dict[str, Any]:
    kind = own.get("rope.scaling.type", "linear")
    factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear") or 1.0
    attention = own.get("rope.scaling.attn_factor", 1.0)
    if kind == "yarn" and factor != 1:
        betas = {name: own.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        original = own.get("rope.scaling.original_context_length", own["context_length"])
        attention = attention * own.get("rope.scaling.yarn_attn_factor", 1.0) * (0.1 * log(factor) + 1)
        scaling = {"factor": factor, "original_max_position_embeddings": original}
        scaling |= {name: beta for name, beta in betas.items() if beta}
        return {"rope_type": kind, "attention_factor": attention, **scaling}
    if kind not in ("none", "linear", "yarn") or attention != 1:
        _refuse(f"it scales RoPE by {kind!r} with an attention factor of {attention}, which is not known")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}


def _llama3(config: Any, base: dict[str, Any], divisors: np.ndarray) -> dict[str, Any]:
    """The scaling whose frequencies are those of `base` over these numbers, as llama.cpp stores Llama 3's."""
    if np.all(divisors == 1):
        return base

    def frequencies(**scaling: Any) -> torch.Tensor:
        changed = deepcopy(config)
        changed.rope_parameters = base | scaling
        return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](changed, torch.device("cpu"))[0]

    plain = frequencies(rope_type="linear", factor=1.0)
    known: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    known["original_max_position_embeddings"] = 8192  # of Llama 3.1 to 3.3
    for factor in (float(divisors.max()), 8.0, 32.0):
        ratio = plain / frequencies(**known, factor=factor)
        if torch.allclose(ratio, torch.from_numpy(divisors).float(), rtol=1e-4):
            return base | known | {"factor": factor}
    _refuse("its rope_freqs.weight is not the scaling of Llama 3.1 to 3.3")


def _check_tensors(config: Any, keys: dict[str, Any], tensors: list[Any]) -> None:
    """Refuse a tensor that transformers would drop, and a weight that the file does not fill."""
    architecture = keys["general.architecture"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = hf_gguf.TENSOR_PROCESSORS.get(architecture, hf_gguf.TensorProcessor)(config=config.to_dict())
    places, kind = hf_gguf.get_gguf_hf_weights_map(model, processor), type(model).__name__
    held = Counter[str]()
    for tensor in tensors:
        if tensor.name in places:
            held[places[tensor.name]] += int(tensor.n_elements)
        elif tensor.name != "rope_freqs.weight":
            _refuse(f"its tensor {tensor.name} has no place in a {kind}")
    for name, weight in model.named_parameters():
        if held[name] != weight.numel():
            raise ValueError(
                f"a {kind} of its sizes has {weight.numel():,} numbers in {name}, and the file {held[name]:,}"
            )


def _tokenizer(theirs: Any, keys: dict[str, Any]) -> PreTrainedTokenizerFast:
    """transformers' tokenizer, which splits, begins and ends text as the file says."""
    own = _below(keys, "tokenizer.ggml.")
    for name, value in own.items():
        if name not in TOKENIZER and not name.endswith("_token_id") and value:
            _refuse(f"its key tokenizer.ggml.{name} is {str(value)[:40]!r}, which is not known")
    model, pre, backend = own.get("model"), own.get("pre") or "default", theirs.backend_tokenizer
    if model == "gpt2":
        if pre not in SPLITS:
            _refuse(f"its tokenizer splits text as {pre!r}, which is not known")
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
        backend.model.ignore_merges = pre in WHOLE_WORDS
    elif model == "llama":
        spaced = own.get("add_space_prefix", True)
        before = [normalizers.Prepend(SPACE)] * spaced
        backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
        backend.pre_tokenizer = None
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * spaced])
    else:
        _refuse(f"its tokenizer {model!r} is neither 'gpt2' nor 'llama'")
    ids = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {}
    ids |= {name: own[f"{key}_token_id"] for name, key in SPECIAL.items() if f"{key}_token_id" in own}
    special = {name: theirs.convert_ids_to_tokens(number) for name, number in ids.items()}
    begun = own.get("add_bos_token", model == "llama" or pre in BEGUN) and "bos" in ids
    ended = own.get("add_eos_token", False) and "eos" in ids
    backend.post_processor = processors.TemplateProcessing(
        single=[*([special["bos"]] if begun else []), "$A", *([special["eos"]] if ended else [])],
        special_tokens=[(special[name], ids[name]) for name in ("bos", "eos") if name in ids],
    )
    # The class by which tokenizer.json alone says what the tokenizer does, also when it is read again.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=theirs.chat_template,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )
