"""Find and load a target: an alias, a directory, a GGUF file or a hub id."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Union, cast

import torch

from slipstream.catalog import find_target
from slipstream.files import first_line, name_of
from slipstream.kernels import ops
from slipstream.kernels.build import fingerprint, processor
from slipstream.kernels.weight_packing import HAS_BF16
from slipstream.targets import model_cache
from slipstream.targets.cached_target import CachedTarget, write
from slipstream.targets.decoder_target import DecoderTarget
from slipstream.targets.quantized import KINDS

if TYPE_CHECKING:
    from slipstream.targets.hf import HFTarget

NAMED = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMED}
AnyTarget = Union["HFTarget", str, os.PathLike[str]]


def loaded(target: AnyTarget) -> "HFTarget":
    """A target as it is, or one by name, as `load_target` loads it."""
    return target if isinstance(target, DecoderTarget) else load_target(target)


def load_target(
    name: str | os.PathLike[str],
    dtype: str = "auto",
    device: str = "cpu",
    compile: bool = False,
    exact: bool = False,
    quantize: str | None = None,
) -> "HFTarget":
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
    place = device_of(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type != "cpu" or HAS_BF16 else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"Unknown dtype: {dtype!r}. Available: auto, {', '.join(DTYPES)}")
    if quantize not in (None, *KINDS):
        raise ValueError(f"Unknown quantisation: {quantize!r}. Available: {', '.join(KINDS)}")
    path, gguf = find_target(name)
    kind, source = DTYPES[dtype], gguf or path
    keeps = place.type == "cpu" and path.exists() and ops.load(place, kind)
    rounded = quantize if keeps else None  # which the cache keeps

    def modules() -> "HFTarget":
        from slipstream.targets.hf import HFTarget  # and Hugging Face's modelling code: over a second
        from slipstream.targets.models import read_model

        model, tokenizer = read_model(name, path, gguf, kind, rounded)
        return HFTarget(model.to(place), tokenizer, name, compile, exact, quantize)  # type: ignore[arg-type]

    if not keeps:
        return modules()
    how = kind, rounded, model_cache.FORMAT, model_cache.READER, fingerprint(), processor()
    place_now = partial(model_cache.place_of, source, "target", str(path), *how)
    home = place_now()

    def same_modules() -> "HFTarget":
        if source.exists() and place_now() == home:
            return modules()
        raise ValueError(f"the files of target {name} were written again since it was loaded: load it anew")

    def read(home: Path) -> CachedTarget:
        weights = model_cache.weights_of(source, kind, rounded)
        return CachedTarget(home, weights, same_modules, name, kind, rounded)

    if (cached := model_cache.read_cached(home, read)) is not None:
        return cast("HFTarget", cached)  # which it becomes when somebody asks for its modules
    target = modules()
    model_cache.write_cached(home, lambda directory: write(target, directory, read))
    return target


def device_of(device: str) -> torch.device:
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
