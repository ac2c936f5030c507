"""Drafters that are named again and again are read and packed once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.catalog import path_of
from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.drafters import load_drafter, tuned_home
from slipstream.drafters.auto import shipped
from slipstream.drafters.hybrid import HEAD
from slipstream.drafters.store import find_drafter, tuned_file
from slipstream.spec import Named, Spec

LIMIT = 4  # drafters of a target
FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def cached_drafter(spec: Named, target: Target, temperature: float = 0.0, texts: int = 1) -> Drafter:
    """`load_drafter`, which raises as it does. A trained drafter is kept with its target, and read again once
    its files have changed; callers must not change it. One that remembers answers is made anew: what it
    remembers is that call's own."""
    spec = Spec.parse(spec)
    homes = _homes(spec, target)
    if not homes or "remember" in spec.options:
        return load_drafter(spec, target, temperature, texts)
    # The target holds its drafters, which hold the target: a table of our own would keep both alive.
    cache: dict[Any, tuple[Any, Drafter]] = vars(target).setdefault("drafters", {})
    key, stamp = (id(target), str(spec), temperature > 0, texts), _stamp(homes)
    with target.lock:
        if key not in cache or cache[key][0] != stamp:
            cache.pop(key, None)
            for oldest in list(cache)[: max(0, len(cache) + 1 - LIMIT)]:
                del cache[oldest]
            cache[key] = stamp, load_drafter(spec, target, temperature, texts)
        return cache[key][1]


def home_of(spec: Spec, target: Target) -> Path | None:
    """The directory that a drafter's weights are read from; None where there is none."""
    name: str | None = spec.name
    if name in ("auto", "hybrid"):
        name = spec.options.get("head") or (shipped(target) if name == "auto" else HEAD)
    try:
        return None if name is None else find_drafter(Spec.parse(name).name, target)
    except ValueError:  # a drafter without weights, or none at all
        return None


def _homes(spec: Spec, target: Target) -> list[Path]:
    """What a drafter's weights are read from and, last, the directory of its tuned tree; none for one without
    weights, and for a draft model of the hub."""
    head = Spec.parse(spec.options.get("head", spec))
    if "model" not in head.options:
        home = home_of(spec, target)
        return [] if home is None else [home]
    model = path_of(head.options["model"])
    return [model, tuned_home(head, target)] if model.exists() else []


def _stamp(homes: Sequence[Path]) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file is written: its number, time and size."""
    files = [*(home / name for home in homes for name in FILES), *homes[:-1], tuned_file(homes[-1])]
    stats = [file.stat() if file.exists() else None for file in files]
    return tuple(stat and (stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)
