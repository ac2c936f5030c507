"""Find and load a target: an alias, a directory, a GGUF file or a hub id."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from slipstream.catalog import MODELS, find_target
from slipstream.files import first_line, name_of
from slipstream.packing import HAS_BF16
from slipstream.targets import kept
from slipstream.targets.gguf import READER, read_gguf
from slipstream.targets.hf import HFTarget
from slipstream.targets.quantised import KINDS
from slipstream.targets.support import check_supported

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}
MOST = 10_000  # layers, or experts of a layer
Tokenizer = transformers.PreTrainedTokenizerBase
AnyTarget = HFTarget | str | os.PathLike[str]


def loaded(target: AnyTarget) -> HFTarget:
    """A target as it is, or one by name, as `load_target` loads it."""
    return target if isinstance(target, HFTarget) else load_target(target)


def load_target(
    name: str | os.PathLike[str],
    dtype: str = "auto",
    device: str = "cpu",
    compile: bool = False,
    exact: bool = False,
    quantize: str | None = None,
) -> HFTarget:
    """Load a target from an alias ("smollm2", "qwen2.5-coder-0.5b"), a directory, a GGUF file or a hub id.

    Args:
        dtype: "float32", "bfloat16", "float16", "float64", or "auto": float32 on a CPU without instructions
            for bfloat16, bfloat16 everywhere else.
        device: such as "cpu", "cuda" or "cuda:1".
        compile, exact, quantize: see `HFTarget`.

    Raises:
        ValueError: there is no such target or device, it cannot be read, its weights do not fit, or it is not
            supported.
    """
    name = name_of(name, "a target")
    place = place_of(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type != "cpu" or HAS_BF16 else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"Unknown dtype: {dtype!r}. Available: auto, {', '.join(DTYPES)}")
    if quantize not in (None, *KINDS):
        raise ValueError(f"Unknown quantisation: {quantize!r}. Available: {', '.join(KINDS)}")
    path, gguf = find_target(name)
    rounded = quantize if place.type == "cpu" and path.exists() else None  # which the cache keeps
    if gguf is not None:
        load = partial(_load_gguf, gguf, DTYPES[dtype], rounded is None)
    else:
        load = partial(_load, str(path) if path.exists() else name, DTYPES[dtype])
    if rounded is not None:
        model, tokenizer = kept.kept_quantised(gguf or path, name, DTYPES[dtype], rounded, load)
    else:
        model, tokenizer = load()
    model.to(place)  # type: ignore[arg-type]
    return HFTarget(model, tokenizer, name, compile, exact, quantize)


def _load(source: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Tokenizer]:
    try:
        _check_config(source)
        config = AutoConfig.from_pretrained(source)
        check_supported(config.get_text_config(decoder=True))
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
            raise ValueError(
                f"target {source!r} is a {config.model_type}, which is more than a causal LM: load it with "
                "its own class, such as AutoModelForImageTextToText, and give HFTarget(model, tokenizer)"
            )
        model = _whole(source, pretrained_model_name_or_path=source, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(source)
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
    said = PreTrainedConfig.get_config_dict(source)[0]
    for part in (said, *(part for part in said.values() if isinstance(part, dict))):
        for name, count in part.items():
            if re.search("(layers?|experts)$", name) and isinstance(count, int) and count > MOST:
                raise ValueError(
                    f"target {source!r} has {name} {count} in its config.json; at most {MOST:,} can be"
                )
    packed = said.get("quantization_config") or said.get("quantization") or {}
    kind = packed.get("quant_method", "MLX" if "group_size" in packed else "unknown") if packed else None
    if kind is not None and kind not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        kind = f"{packed.get('quant_algo', '')} {kind}".strip()
        raise ValueError(
            f"target {source!r} holds weights in the format {kind}, which transformers cannot read: give the "
            "model's own directory, in bfloat16, and --quantize int8 or int4"
        )


def _whole(name: str, **how: Any) -> PreTrainedModel:
    """Load a model whose weights and its files' weights are the same set, or raise ValueError. Hugging Face
    only warns: it draws missing weights at random, and drops unexpected ones."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(**how, output_loading_info=True)
    model, info = loaded
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
        if weight.is_floating_point() and weight.dtype.itemsize < how["dtype"].itemsize:
            weight.data = weight.data.to(how["dtype"])
    return model


def _some(names: list[str], n: int = 3) -> str:
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def _load_gguf(file: Path, dtype: torch.dtype, keeps: bool) -> tuple[PreTrainedModel, Tokenizer]:
    """Read a GGUF file, dequantised. That takes over ten seconds, so the user's cache keeps the result,
    unless another is made of it."""
    place = kept.place_of(file, dtype, READER)

    def read(home: Path) -> tuple[PreTrainedModel, Tokenizer]:  # not with AutoTokenizer, see `read_gguf`
        model = _whole(str(home), pretrained_model_name_or_path=str(home), dtype=dtype)
        return model, PreTrainedTokenizerFast.from_pretrained(home)

    def write(beside: Path) -> None:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)

    if (here := kept.found(place, read)) is not None:
        return here
    model, tokenizer = read_gguf(file, dtype)
    return read(place) if keeps and kept.keep(place, write) else (model, tokenizer)


def place_of(device: str) -> torch.device:
    """The device of a name. Raises ValueError where there is none."""
    try:
        place = torch.empty(0, device=device).device
        if place.type == "meta":
            raise RuntimeError("meta tensors have no values")
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"Unknown or missing device: {device!r}. Use cpu, cuda, cuda:1, … "
            f"({first_line(error).split('. ')[0]})"  # torch goes on with the names of all backends
        ) from error
    return place
