"""Models from files, whole or not at all: directories, hub ids, GGUF files, and in the user's cache what was
made of them, whose packed weights a later start maps."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from slipstream.catalog import MODELS
from slipstream.files import first_line
from slipstream.targets import model_cache
from slipstream.targets.gguf import read_gguf
from slipstream.targets.quantize import quantised
from slipstream.targets.quantized import Quantised, QuantisedEmbedding, QuantisedLinear
from slipstream.targets.support import check_supported, fingerprint_of

MOST = 10_000  # layers, or experts of a layer
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


class Origin(NamedTuple):
    """How a model was rounded, and of the model before: directory or hub id, or "", its hash, and how many
    numbers it has."""

    quantize: str
    source: str
    fingerprint: str
    weights: int


def read_model(name: str, path: Path, gguf: Path | None, dtype: torch.dtype, quantize: str | None) -> Loaded:
    """A model and its tokenizer: from the path, or the GGUF file that it is or holds, or by its name where
    there is no path. The cache keeps what is quantised so. Raises ValueError as `load_target` does."""
    load = partial(_load, str(path) if path.exists() else name, dtype)
    if gguf is not None:
        load = partial(_load_gguf, gguf, dtype, quantize is None)
    return load() if quantize is None else _quantised(gguf or path, name, dtype, quantize, load)


def _load(source: str, dtype: torch.dtype) -> Loaded:
    try:
        _check_config(source)
        config = AutoConfig.from_pretrained(source)
        check_supported(config.get_text_config(decoder=True))
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
            raise ValueError(
                f"target {source!r} is a {config.model_type}, which is more than a causal LM: load it with "
                "its own class, such as AutoModelForImageTextToText, and give HFTarget(model, tokenizer)"
            )
        return _whole(source, dtype), AutoTokenizer.from_pretrained(source)
    except ValueError:
        raise
    except Exception as error:  # damaged files raise errors of many types
        if Path(source).is_dir():
            raise ValueError(f"target directory {source!r} cannot be read: {first_line(error)}") from error
        known = ", ".join(MODELS)
        raise ValueError(
            f"Unknown target: {source!r}. It is no alias ({known}), no directory with a config.json, no GGUF "
            f"file, and as a hub id it could not be loaded ({first_line(error).rstrip('.')})."
        ) from error


def _check_config(source: str) -> None:
    """Raise ValueError for a directory whose config.json transformers would read at length, or not at all."""
    config = PreTrainedConfig.get_config_dict(source)[0]
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for name, count in part.items():
            if re.search("(layers?|experts)$", name) and isinstance(count, int) and count > MOST:
                most = f"at most {MOST:,} can be"
                raise ValueError(f"target {source!r} has {name} {count} in its config.json; {most}")
    packed = config.get("quantization_config") or config.get("quantization") or {}
    kind = packed.get("quant_method", "MLX" if "group_size" in packed else "unknown") if packed else None
    if kind is not None and kind not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        kind = f"{packed.get('quant_algo', '')} {kind}".strip()
        raise ValueError(
            f"target {source!r} holds weights in the format {kind}, which transformers cannot read: give the "
            "model's own directory, in bfloat16, and --quantize int8 or int4"
        )


def _whole(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model whose weights and its files' weights are the same set, or raise ValueError. Hugging Face
    only warns: it draws missing weights at random, and drops unexpected ones."""
    read: Any = AutoModelForCausalLM.from_pretrained
    model, info = read(pretrained_model_name_or_path=name, dtype=dtype, output_loading_info=True)
    blocks = model.config.get_text_config(decoder=True).num_hidden_layers
    kind = f"target {name!r}: a {type(model).__name__} of {blocks} blocks"
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{kind} needs {_some(missing)}, which its files do not hold: give a causal LM's whole checkpoint"
        )
    if unexpected := sorted(info["unexpected_keys"]):
        raise ValueError(
            f"{kind} has no place for {_some(unexpected)}, which its files hold: give a causal LM's own "
            "checkpoint; to leave them out, load the model yourself and give HFTarget(model, tokenizer)"
        )
    for weight in model.parameters():  # experts that were MXFP4 come as bfloat16, whatever is asked for
        if weight.is_floating_point() and weight.dtype.itemsize < dtype.itemsize:
            weight.data = weight.data.to(dtype)
    return model


def _some(names: list[str], n: int = 3) -> str:
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def _load_gguf(file: Path, dtype: torch.dtype, keeps: bool) -> Loaded:
    """Read a GGUF file, dequantised. That takes over ten seconds, so the user's cache keeps the result,
    unless another is made of it."""
    place = model_cache.place_of(file, dtype, model_cache.READER)

    def read(home: Path) -> Loaded:  # not with AutoTokenizer, see `read_gguf`
        return _whole(str(home), dtype), PreTrainedTokenizerFast.from_pretrained(home)

    def write(directory: Path) -> None:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    if (cached := model_cache.read_cached(place, read)) is not None:
        return cached
    model, tokenizer = read_gguf(file, dtype)
    return read(place) if keeps and model_cache.write_cached(place, write) else (model, tokenizer)


def _quantised(
    source: Path, name: str, dtype: torch.dtype, quantize: str, load: Callable[[], Loaded]
) -> Loaded:
    """A model with weights of 8 or 4 bits: from the cache, or made of what `load` brings, and kept there."""
    place = model_cache.place_of_quantised(source, dtype, quantize)
    if (cached := model_cache.read_cached(place, _read_quantised)) is not None:
        return cached
    model, tokenizer = load()
    config = model.config.get_text_config(decoder=True)
    origin = Origin(quantize, config.name_or_path or "", fingerprint_of(model), model.num_parameters())
    copy: Any = quantised(model, quantize, name)
    del model
    copy.origin = origin
    if type(copy).__module__.startswith("transformers."):
        model_cache.write_cached(place, partial(_write_quantised, copy, tokenizer))
    return copy, tokenizer


def _write_quantised(model: Any, tokenizer: Any, place: Path) -> None:
    """Raises ValueError where the model that is read again differs."""
    model.config.save_pretrained(place)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(place)
    tokenizer.save_pretrained(place)
    layers = {
        name: (isinstance(module, QuantisedEmbedding), module.width)
        for name, module in model.named_modules()
        if isinstance(module, Quantised)
    }
    apart = {id(tensor): model_cache.apart(tensor.detach()) for _, tensor in _tensors_of(model)}  # tied once
    tensors = {name: apart[id(tensor)] for name, tensor in _tensors_of(model)}
    record = {"origin": model.origin._asdict(), "dtype": model.dtype, "tokenizer": type(tokenizer).__name__}
    torch.save({**record, "layers": layers, "tensors": tensors}, place / model_cache.WEIGHTS)
    text = torch.arange(1, 5)[None] % model.config.get_text_config(decoder=True).vocab_size
    again = _read_quantised(place)[0]
    with torch.inference_mode():
        logits = (one(text, use_cache=False).logits for one in (again, model.eval()))
    if not torch.equal(*logits):
        raise ValueError("what was read again differs")


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that a model's modules hold, also what they do not save."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}", tensor


def _read_quantised(place: Path) -> Loaded:
    record = model_cache.mapped(place / model_cache.WEIGHTS)
    origin, tensors = Origin(**record["origin"]), record["tensors"]
    config = AutoConfig.from_pretrained(place)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    for path, (embeds, width) in record["layers"].items():
        kind = QuantisedEmbedding if embeds else QuantisedLinear
        weight, scales = tensors[f"{path}.weight"], tensors[f"{path}.scales"]
        # Bias and factor are among the tensors.
        model.set_submodule(path, kind(weight, scales, width, record["dtype"], None))
    modules = dict(model.named_modules())
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        if own in modules[path]._buffers:
            modules[path]._buffers[own] = tensor
        else:
            modules[path]._parameters[own] = nn.Parameter(tensor, requires_grad=False)
    if any(tensor.is_meta for _, tensor in _tensors_of(model)):
        raise ValueError("some weights are missing")
    config.name_or_path = origin.source
    if (place / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(place)
    model.origin = origin
    return model.eval(), model_cache.tokenizer_of(place, record["tokenizer"])
