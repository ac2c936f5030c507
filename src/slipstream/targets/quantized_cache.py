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
from slipstream.kernels import ops as kernels
from slipstream.targets import model_cache as kept
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


def kept_quantised(
    source: Path, name: str, dtype: torch.dtype, quantize: str, load: Callable[[], Loaded]
) -> Loaded:
    """A model with weights of 8 or 4 bits: from the cache, or made of what `load` brings, and kept there.
    Raises ValueError as `quantised` does."""
    if not kernels.load(dtype=dtype):
        return load()  # which is refused then
    place = kept.place_of_quantised(source, dtype, quantize)
    if (here := kept.found(place, _read)) is not None:
        return here
    model, tokenizer = load()
    config = model.config.get_text_config(decoder=True)
    origin = Origin(quantize, config.name_or_path or "", fingerprint_of(model), model.num_parameters())
    made: Any = quantised(model, quantize, name)
    del model
    made.origin = origin
    if type(made).__module__.startswith("transformers."):
        kept.keep(place, lambda beside: _write(made, tokenizer, beside))
    return made, tokenizer


def _write(model: Any, tokenizer: Any, place: Path) -> None:
    """Raises ValueError where the model that is read again says anything else."""
    tensors, names, layers = dict[str, Tensor](), dict[str, str](), dict[str, Any]()
    first = dict[int, str]()
    for name, tensor in tensors_of(model):
        names[name] = first.setdefault(id(tensor), name)
        tensors[names[name]] = tensor.detach().contiguous()
    for name, module in model.named_modules():
        if isinstance(module, Quantised):
            layers[name] = {"embeds": isinstance(module, QuantisedEmbedding), "width": module.width}
    model.config.save_pretrained(place)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(place)
    tokenizer.save_pretrained(place)
    said = {
        "origin": asdict(model.origin),
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokenizer": type(tokenizer).__name__,
        "layers": layers,
        "names": names,
        "places": kept.save(tensors, place / kept.WEIGHTS),
    }
    (place / kept.LAYERS).write_text(json.dumps(said), "utf-8")
    text = torch.arange(1, 5)[None] % model.config.get_text_config(decoder=True).vocab_size
    again = _read(place)[0]
    with torch.inference_mode():
        mine, theirs = (each(text, use_cache=False).logits for each in (again, model.eval()))
    if not torch.equal(mine, theirs):
        raise ValueError("what was kept says something else")


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that a model's modules hold, also what they do not save."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}", tensor


def _read(place: Path) -> Loaded:
    said, tensor_of = read_json(place / kept.LAYERS, "cache"), kept.of_quantised(place)
    origin = Origin(**said["origin"])
    config, dtype = AutoConfig.from_pretrained(place), getattr(torch, said["dtype"])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    given = {name: tensor_of(name) for name in said["names"]}
    for path, layer in said["layers"].items():
        weight, scales = given[f"{path}.weight"], given[f"{path}.scales"]
        made = QuantisedEmbedding if layer["embeds"] else QuantisedLinear
        # Bias and factor are among the tensors.
        model.set_submodule(path, made(weight, scales, layer["width"], dtype, None))
    modules = dict(model.named_modules())
    for name, tensor in given.items():
        path, _, own = name.rpartition(".")
        module = modules[path]
        if own in module._buffers:
            module._buffers[own] = tensor
        else:
            module._parameters[own] = nn.Parameter(tensor, requires_grad=False)
    if any(tensor.is_meta for _, tensor in tensors_of(model)):
        raise ValueError("some weights are missing")
    config.name_or_path = origin.source
    if (place / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(place)
    model.origin = origin
    return model.eval(), kept.tokenizer_of(place, said["tokenizer"])
