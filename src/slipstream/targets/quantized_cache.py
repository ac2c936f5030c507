"""Quantised models in the user's cache, whose packed weights a later start maps."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from slipstream.files import read_json
from slipstream.kernels import ops
from slipstream.targets import model_cache
from slipstream.targets.quantize import quantised
from slipstream.targets.quantized import Quantised, QuantisedEmbedding, QuantisedLinear
from slipstream.targets.support import fingerprint_of

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@dataclass(frozen=True)
class Origin:
    """What a quantised model was made of.

    Attributes:
        quantize: how it was rounded.
        source: directory or hub id of the model before, or "".
        fingerprint, weights: of the model before: its hash, and how many numbers it has.
    """

    quantize: str
    source: str
    fingerprint: str
    weights: int


def cached_quantised(
    source: Path, name: str, dtype: torch.dtype, quantize: str, load: Callable[[], Loaded]
) -> Loaded:
    """A model with weights of 8 or 4 bits: from the cache, or made of what `load` brings, and kept there.
    Raises ValueError as `quantised` does."""
    if not ops.load(dtype=dtype):
        return load()  # which is refused then
    place = model_cache.place_of_quantised(source, dtype, quantize)
    if (cached := model_cache.read_cached(place, _read)) is not None:
        return cached
    model, tokenizer = load()
    config = model.config.get_text_config(decoder=True)
    origin = Origin(quantize, config.name_or_path or "", fingerprint_of(model), model.num_parameters())
    copy: Any = quantised(model, quantize, name)
    del model
    copy.origin = origin
    if type(copy).__module__.startswith("transformers."):
        model_cache.write_cached(place, lambda directory: _write(copy, tokenizer, directory))
    return copy, tokenizer


def _write(model: Any, tokenizer: Any, place: Path) -> None:
    """Raises ValueError where the model that is read again differs."""
    tensors, names, first = dict[str, Tensor](), dict[str, str](), dict[int, str]()
    for name, tensor in tensors_of(model):
        names[name] = first.setdefault(id(tensor), name)
        tensors[names[name]] = tensor.detach().contiguous()
    model.config.save_pretrained(place)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(place)
    tokenizer.save_pretrained(place)
    record = {
        "origin": asdict(model.origin),
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokenizer": type(tokenizer).__name__,
        "layers": {
            name: {"embeds": isinstance(module, QuantisedEmbedding), "width": module.width}
            for name, module in model.named_modules()
            if isinstance(module, Quantised)
        },
        "names": names,
        "places": model_cache.save(tensors, place / model_cache.WEIGHTS),
    }
    (place / model_cache.LAYERS).write_text(json.dumps(record), "utf-8")
    text = torch.arange(1, 5)[None] % model.config.get_text_config(decoder=True).vocab_size
    again = _read(place)[0]
    with torch.inference_mode():
        logits = (one(text, use_cache=False).logits for one in (again, model.eval()))
    if not torch.equal(*logits):
        raise ValueError("what was read again differs")


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that a model's modules hold, also what they do not save."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}", tensor


def _read(place: Path) -> Loaded:
    record, tensor_of = read_json(place / model_cache.LAYERS, "cache"), model_cache.of_quantised(place)
    origin = Origin(**record["origin"])
    config, dtype = AutoConfig.from_pretrained(place), getattr(torch, record["dtype"])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    tensors = {name: tensor_of(name) for name in record["names"]}
    for path, layer in record["layers"].items():
        weight, scales = tensors[f"{path}.weight"], tensors[f"{path}.scales"]
        kind = QuantisedEmbedding if layer["embeds"] else QuantisedLinear
        # Bias and factor are among the tensors.
        model.set_submodule(path, kind(weight, scales, layer["width"], dtype, None))
    modules = dict(model.named_modules())
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        if own in modules[path]._buffers:
            modules[path]._buffers[own] = tensor
        else:
            modules[path]._parameters[own] = nn.Parameter(tensor, requires_grad=False)
    if any(tensor.is_meta for _, tensor in tensors_of(model)):
        raise ValueError("some weights are missing")
    config.name_or_path = origin.source
    if (place / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(place)
    model.origin = origin
    return model.eval(), model_cache.tokenizer_of(place, record["tokenizer"])
