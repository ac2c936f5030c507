"""What was made of a model, in the user's cache under a hash of its sources."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from pickle import PickleError
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.files import LOADED, cache_home, read_results, update_json
from slipstream.kernels.build import fingerprint

Cached = TypeVar("Cached")
DIGESTS, WEIGHTS = "digests.json", "quantised.pt"
FORMAT = 6  # of what is kept, and of what quantised models are rounded to
READER = 1  # of what gguf.py sets: what an earlier one made is not taken from the cache
# The disk is full (for torch.save a RuntimeError) or read-only, another process was faster, or what was
# written would be read otherwise.
UNWRITTEN = (OSError, RuntimeError, ValueError, KeyError, PickleError, SafetensorError)


def place_of(source: Path, *made_by: Any) -> Path:
    """The directory of what is made of a file or a model's directory, in this way."""
    sources = (_content(source), transformers.__version__, *made_by)
    key = hashlib.sha256(repr(sources).encode()).hexdigest()[:16]
    return next(cache_home().glob(f"*-{key}"), cache_home() / f"{source.stem or 'model'}-{key}")


def _content(source: Path) -> str:
    """A hash of a file, or of all files in a directory that a model is loaded from. What was hashed once is
    known by its place, size and times."""
    files = [source]
    if source.is_dir():
        files = [x for x in sorted(source.iterdir()) if any(fnmatch(x.name, pattern) for pattern in LOADED)]
    digests, news = cache_home() / DIGESTS, dict[str, dict[str, Any]]()
    try:
        known = read_results(digests)
    except ValueError:  # a damaged file goes
        known = {}
        with suppress(OSError):
            digests.unlink(missing_ok=True)
    for file in files:
        place, status = os.path.realpath(file), os.stat(file)
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if known.get(place, {}).get("stamp") != stamp:
            with open(file, "rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            known[place] = news[place] = {"stamp": stamp, "sha256": digest}
    if news:
        with suppress(*UNWRITTEN):
            cache_home().mkdir(parents=True, exist_ok=True)
            update_json(digests, news)
    parts = [(file.name, known[os.path.realpath(file)]["sha256"]) for file in files]
    return parts[0][1] if source.is_file() else repr(parts)


def write_cached(place: Path, write: Callable[[Path], Any]) -> bool:
    """Let `write` fill a directory, which then gets this name. Whether it is there."""
    with suppress(*UNWRITTEN):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as home:
            write(temporary := Path(home) / "model")
            os.rename(temporary, place)
    return place.is_dir()


def read_cached(place: Path, read: Callable[[Path], Cached]) -> Cached | None:
    """What is read from a directory, if there is one. A damaged one is removed."""
    if place.is_dir():
        try:
            return read(place)
        except Exception:
            shutil.rmtree(place, ignore_errors=True)
    return None


def apart(tensor: Tensor) -> Tensor:
    """A tensor that can be saved alone: a copy, where it is a part of a larger memory."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def mapped(file: Path) -> dict[str, Any]:
    """What `torch.save` wrote, with tensors in the file's own memory, which all processes share. Each begins
    with a cache line, which safetensors does not do."""
    record: dict[str, Any] = torch.load(file, mmap=True, weights_only=True)
    return record


def weights_of(source: Path, dtype: torch.dtype, quantize: str | None) -> Callable[[str], Tensor]:
    """The tensors by name of a directory's or GGUF file's model in this precision, as the cache keeps it."""
    if quantize is not None:
        tensors = mapped(place_of_quantised(source, dtype, quantize) / WEIGHTS)["tensors"]
        return lambda name: tensors[name]
    directory = source if source.is_dir() else place_of(source, dtype, READER)
    files: list[Any] = [safe_open(file, "pt") for file in directory.glob("*.safetensors")]
    homes = {name: content for content in files for name in content.keys()}  # noqa: SIM118
    return lambda name: homes[name].get_tensor(name).to(dtype)


def place_of_quantised(source: Path, dtype: torch.dtype, quantize: str) -> Path:
    """The directory of a quantised model."""
    return place_of(source, dtype, quantize, FORMAT, READER, fingerprint())


def tokenizer_of(place: Path, kind: str) -> Any:
    """The tokenizer of a class that was saved in a directory. AutoTokenizer would take another class for some
    families, which reads text otherwise."""
    return getattr(transformers, kind).from_pretrained(place)
