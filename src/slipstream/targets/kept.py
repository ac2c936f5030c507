"""Models in the user's cache, under a hash of what they were made of, so that a later start reads them as
they are: GGUF files, dequantised, and quantised models, whose packed weights are mapped."""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from slipstream import kernels
from slipstream.files import LOADED, cache_home, read_json, read_results, update_json
from slipstream.targets.gguf import READER
from slipstream.targets.quantised import Quantised, QuantisedEmbedding, QuantisedLinear, quantised
from slipstream.targets.support import fingerprint_of

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
DIGESTS, WEIGHTS, LAYERS = "digests.json", "weights.bin", "layers.json"
FORMAT = 4  # of these files, and of what `quantised` rounds
LINE = 64  # bytes


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


def place_of(source: Path, *made_by: Any) -> Path:
    """The directory of what is made of a file or a model's directory, in this way."""
    said = (_content(source), transformers.__version__, *made_by)
    key = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    return next(cache_home().glob(f"*-{key}"), cache_home() / f"{source.stem or 'model'}-{key}")


def _content(source: Path) -> str:
    """A hash of a file, or of all files in a directory that a model is loaded from. What was hashed once is
    known by its place, size and times."""
    files = [source]
    if source.is_dir():
        files = [
            file for file in sorted(source.iterdir()) if any(fnmatch(file.name, each) for each in LOADED)
        ]
    known, news = read_results(cache_home() / DIGESTS), dict[str, dict[str, Any]]()
    for file in files:
        place, said = os.path.realpath(file), os.stat(file)
        stamp = [said.st_size, said.st_mtime_ns, said.st_ctime_ns, said.st_ino]
        if known.get(place, {}).get("stamp") != stamp:
            with open(file, "rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            known[place] = news[place] = {"stamp": stamp, "sha256": digest}
    if news:
        _try(lambda: update_json(cache_home() / DIGESTS, news))
    parts = [(file.name, known[os.path.realpath(file)]["sha256"]) for file in files]
    return parts[0][1] if source.is_file() else repr(parts)


def _try(write: Callable[[], Any]) -> None:
    """Write to the cache. One that cannot be written is no error: the disk is full or read-only, or another
    process was faster."""
    try:
        cache_home().mkdir(parents=True, exist_ok=True)
        write()
    except (OSError, ValueError, SafetensorError):
        pass


def keep(place: Path, write: Callable[[Path], Any]) -> bool:
    """Let `write` fill a directory, which then gets this name. Whether it is there."""

    def whole() -> None:
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as home:
            write(beside := Path(home) / "model")
            os.rename(beside, place)

    _try(whole)
    return place.is_dir()


def found(place: Path, read: Callable[[Path], Loaded]) -> Loaded | None:
    """What is read from a directory, if there is one. A damaged one is removed."""
    if place.is_dir():
        try:
            return read(place)
        except Exception:
            shutil.rmtree(place, ignore_errors=True)
    return None


def kept_quantised(
    source: Path, name: str, dtype: torch.dtype, quantize: str, load: Callable[[], Loaded]
) -> Loaded:
    """A model with weights of 8 or 4 bits: from the cache, or made of what `load` brings, and kept there.
    Raises ValueError as `quantised` does."""
    if not kernels.has_kernels(torch.device("cpu"), dtype):
        return load()  # which is refused then
    place = place_of(source, dtype, quantize, FORMAT, READER, kernels.build())
    if (here := found(place, _read)) is not None:
        return here
    model, tokenizer = load()
    config = model.config.get_text_config(decoder=True)
    origin = Origin(quantize, config.name_or_path or "", fingerprint_of(model), model.num_parameters())
    made: Any = quantised(model, quantize, name)
    del model
    made.origin = origin
    if type(made).__module__.startswith("transformers."):
        keep(place, lambda beside: _write(made, tokenizer, beside))
    return made, tokenizer


def _write(model: Any, tokenizer: Any, place: Path) -> None:
    """Raises ValueError where the model that is read again says anything else."""
    tensors, names, layers = dict[str, Tensor](), dict[str, str](), dict[str, Any]()
    first = dict[int, str]()
    for name, tensor in _tensors(model):
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
        "places": _save(tensors, place / WEIGHTS),
    }
    (place / LAYERS).write_text(json.dumps(said), "utf-8")
    text = torch.arange(1, 5)[None] % model.config.get_text_config(decoder=True).vocab_size
    again = _read(place)[0]
    with torch.inference_mode():
        mine, theirs = (each(text, use_cache=False).logits for each in (again, model.eval()))
    if not torch.equal(mine, theirs):
        raise ValueError("what was kept says something else")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that a model's modules hold, also what they do not save."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}", tensor


def _read(place: Path) -> Loaded:
    said = read_json(place / LAYERS, "cache")
    tensors = _mapped(place / WEIGHTS, said["places"])
    origin = Origin(**said["origin"])
    config, dtype = AutoConfig.from_pretrained(place), getattr(torch, said["dtype"])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    given = {name: tensors[key] for name, key in said["names"].items()}
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
    if any(tensor.is_meta for _, tensor in _tensors(model)):
        raise ValueError("some weights are missing")
    config.name_or_path = origin.source
    if (place / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(place)
    model.origin = origin
    # AutoTokenizer would take another class for some families, which reads text otherwise.
    return model.eval(), getattr(transformers, said["tokenizer"]).from_pretrained(place)


def _save(tensors: dict[str, Tensor], file: Path) -> dict[str, Any]:
    """Write tensors one behind the other, each at a whole cache line, which safetensors does not do. Returns
    where each lies, and what it is."""
    places = dict[str, Any]()
    with open(file, "wb") as content:
        for name, tensor in tensors.items():
            content.write(bytes(-content.tell() % LINE))
            places[name] = content.tell(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            content.write(tensor.flatten().view(torch.uint8).numpy().data)
    return places


def _mapped(file: Path, places: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that `_save` wrote, in the file's own memory, which all processes share."""
    whole = torch.from_file(str(file), shared=False, size=os.path.getsize(file), dtype=torch.uint8)
    made = dict[str, Tensor]()
    for name, (start, kind, shape) in places.items():
        dtype: torch.dtype = getattr(torch, kind)
        part = whole[start : start + math.prod(shape) * dtype.itemsize]
        made[name] = part.view(dtype).view(shape)
    return made
