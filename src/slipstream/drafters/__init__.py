"""Drafters: one file and one final class each. `load_drafter` makes them by name or directory."""

import hashlib
import re
from collections.abc import Callable, Collection
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.core.tree_spec import LARGEST, ROWS, shortened
from slipstream.directories import check_drafter
from slipstream.drafters.store import find_drafter, read_drafter, read_tuned
from slipstream.files import cache_home, understood
from slipstream.methods import METHODS
from slipstream.spec import Named, Spec

BUILT = ("head", "model", "target", "vocab", "part")  # a trained drafter's arguments that are not options


def load_drafter(
    spec: Named, target: Target | None = None, temperature: float = 0.0, texts: int = 1
) -> Drafter:
    """Make a drafter: "ngram", "eagle:tree=chain-5,proposal=noise", "runs/mine:tree=fig9".

    Args:
        spec: the name of a method (of a trained one: the weights that ship for the target) or a drafter
            directory, then `:` and `key=value` pairs for the drafter's own arguments. Or a `Spec`.
        target: the target that it drafts for. Drafters that use nothing of a target do not need it.
        temperature: of the answers. Above 0 the default proposal is "noise", and `tune` may have found other
            trees.
        texts: answers that share a pass: `tune` may have found other trees for several.

    Raises:
        ValueError: there is no such drafter or option, it was made for another target, or its passes are too
            large.
    """
    spec = Spec.parse(spec)
    drafter = _load(spec, target, temperature, texts)
    if drafter.rows > ROWS:
        raise ValueError(
            f"drafter {shortened(str(spec))!r} costs target passes over {drafter.rows:,} rows; at most are "
            f"{ROWS:,}: name less"
        )
    return drafter


def _load(spec: Spec, target: Target | None, temperature: float, texts: int) -> Drafter:
    check_drafter(spec)
    name, method = spec.name, METHODS.get(spec.name)
    if method is not None and method.made(spec.options):
        make: Callable[..., Drafter] = resolve_name(str(method.make))
        takes = signature(make).parameters
        known = {"temperature": temperature, "texts": texts}
        filled: dict[str, Any] = {name: value for name, value in known.items() if name in takes}
        if "target" in takes:
            filled["target"] = target = _needed(target, name)
        if method.tunes and target is not None:
            spec = _tuned(spec, tuned_home(spec, target), target.place, temperature, texts)
        spec = _looking(spec, takes, temperature)
        return make(**filled, **_checked(make, spec, filled))
    target = _needed(target, name)
    home = find_drafter(name, target)
    config, tensors = read_drafter(home, target)
    source = f"drafter directory {name}"
    with understood(source):
        cls = drafter_class(config.get("method"), source)
        spec = _tuned(spec, home, target.place, temperature, texts)
        spec = _looking(spec, signature(cls).parameters, temperature)
        drafter: Drafter = cls.load(config, tensors, target, **_checked(cls, spec, BUILT))
    return drafter


def tuned_home(spec: Named, target: Target) -> Path:
    """The directory for what `tune` finds: beside a drafter's weights, or in the user's cache if it has none.
    The spec's tree and proposal do not matter."""
    spec = Spec.parse(spec)
    if spec.name not in METHODS or not METHODS[spec.name].made(spec.options):
        return find_drafter(spec.name, target)
    called = f"{spec.name}_{spec.replace(tree=None, proposal=None).tail}"
    name = re.sub(r"[^\w.-]+", "_", called)
    if len(name.encode()) > 200:  # a long path of a model: file systems allow 255 bytes
        name = f"{spec.name}_{hashlib.sha256(called.encode()).hexdigest()[:16]}"
    return cache_home() / "tuned" / target.fingerprint / name


def _tuned(spec: Spec, home: Path, place: str, temperature: float, texts: int) -> Spec:
    """The spec with the options that `tune` chose here. A tree or a proposal in the spec replaces both."""
    tuned = read_tuned(home, place, temperature, texts)
    if not spec.options.keys().isdisjoint(("tree", "proposal")):
        tuned = {key: value for key, value in tuned.items() if key == "skip"}
    return Spec(spec.name, tuned | spec.options)


def _looking(spec: Spec, takes: Collection[str], temperature: float) -> Spec:
    """The spec, which at T > 0 proposes by the target's noise unless it says otherwise: that accepts more
    than top-k, and unlike sampled children it keeps same seed, same text (docs/eagle.md)."""
    if not temperature or "proposal" not in takes:
        return spec
    return Spec(spec.name, {"proposal": "noise"} | spec.options)


def drafter_class(method: Any, source: str) -> Any:
    """The class of a trained method. Raises ValueError."""
    known = {name: each.drafter for name, each in METHODS.items() if each.drafter is not None}
    if not isinstance(method, str) or method not in known:
        raise ValueError(f"{source}: Unknown method: {method!r}. Available: {', '.join(known)}")
    return resolve_name(known[method])


def _needed(target: Target | None, name: str) -> Target:
    if target is None:
        raise ValueError(f"drafter {name!r} is made for a target: pass it, load_drafter(…, target)")
    return target


def _checked(make: Callable[..., Drafter], spec: Spec, without: Collection[str]) -> dict[str, Any]:
    """A spec's options as arguments of `make`. Raises ValueError for an unknown or a missing one."""
    known = {name: p for name, p in signature(make).parameters.items() if name not in without}
    options: dict[str, Any] = {}
    for key, value in spec.options.items():
        if key not in known:
            raise ValueError(
                f"drafter {str(spec)!r} has no option {key!r}. Available: {', '.join(known) or 'none'}"
            )
        number = known[key].annotation in (int, int | None)
        if number and not (value.isdecimal() and len(value) <= 4 and int(value) <= LARGEST):
            raise ValueError(
                f"drafter {str(spec)!r}: {key} is {value!r}; it must be a whole number up to {LARGEST}"
            )
        options[key] = int(value) if number else value
    if missing := [name for name, p in known.items() if p.default is p.empty and name not in options]:
        raise ValueError(
            f"drafter {str(spec)!r} needs {missing[0]}: write {spec.replace(**{missing[0]: '…'})}"
        )
    return options
