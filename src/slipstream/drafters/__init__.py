"""Drafters: a file or a folder each. `load_drafter` makes them by name or directory."""

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
    check_drafter(spec)
    method, make = METHODS.get(spec.name), None
    if method is not None and method.makes(spec.options):
        make = resolve_name(str(method.make))
    if target is None and (make is None or "target" in signature(make).parameters):
        raise ValueError(f"drafter {spec.name!r} is made for a target: pass it, load_drafter(…, target)")
    if method is not None and make is not None:
        known = {"target": target, "temperature": temperature, "texts": texts}
        filled = {name: value for name, value in known.items() if name in signature(make).parameters}
        tuned = dict[str, str]()
        if method.tunes and target is not None:
            tuned = read_tuned(tuned_home(spec, target), target.place, temperature, texts)
        drafter = make(**filled, **_options(spec, make, filled, temperature, tuned))
    else:
        assert target is not None
        home, source = find_drafter(spec.name, target), f"drafter directory {spec.name}"
        config, tensors = read_drafter(home, target)
        with understood(source):
            cls = drafter_class(config.get("method"), source)
            tuned = read_tuned(home, target.place, temperature, texts)
            drafter = cls.load(config, tensors, target, **_options(spec, cls, BUILT, temperature, tuned))
    if drafter.rows > ROWS:
        raise ValueError(
            f"drafter {shortened(str(spec))!r} costs target passes over {drafter.rows:,} rows; at most are "
            f"{ROWS:,}: name less"
        )
    return drafter


def tuned_home(spec: Named, target: Target) -> Path:
    """The directory for what `tune` finds: beside a drafter's weights, or in the user's cache if it has none.
    The spec's tree and proposal do not matter."""
    spec = Spec.parse(spec)
    if spec.name not in METHODS or not METHODS[spec.name].makes(spec.options):
        return find_drafter(spec.name, target)
    called = f"{spec.name}_{spec.replace(tree=None, proposal=None).tail}"
    name = re.sub(r"[^\w.-]+", "_", called)
    if len(name.encode()) > 200:  # a long path of a model: file systems allow 255 bytes
        name = f"{spec.name}_{hashlib.sha256(called.encode()).hexdigest()[:16]}"
    return cache_home() / "tuned" / target.fingerprint / name


def drafter_class(method: Any, source: str) -> Any:
    """The class of a trained method. Raises ValueError."""
    known = {name: entry.drafter for name, entry in METHODS.items() if entry.drafter is not None}
    if not isinstance(method, str) or method not in known:
        raise ValueError(f"{source}: Unknown method: {method!r}. Available: {', '.join(known)}")
    return resolve_name(known[method])


def _options(
    spec: Spec,
    make: Callable[..., Drafter],
    filled: Collection[str],
    temperature: float,
    tuned: dict[str, str],
) -> dict[str, Any]:
    """A spec's options as arguments of `make`, and those that `tune` chose here; a tree or a proposal in the
    spec replaces both. At T > 0 it proposes by the target's noise unless it says otherwise: that accepts more
    than top-k, and unlike sampled children it keeps same seed, same text (docs/eagle.md). Raises ValueError
    for an unknown option or a missing one."""
    known = {name: p for name, p in signature(make).parameters.items() if name not in filled}
    if not spec.options.keys().isdisjoint(("tree", "proposal")):
        tuned = {key: value for key, value in tuned.items() if key == "skip"}
    noise = {"proposal": "noise"} if temperature and "proposal" in known else {}
    spec, options = Spec(spec.name, noise | tuned | spec.options), dict[str, Any]()
    for key, value in spec.options.items():
        if key not in known:
            raise ValueError(
                f"drafter {str(spec)!r} has no option {key!r}. Available: {', '.join(known) or 'none'}"
            )
        is_number = known[key].annotation in (int, int | None)
        if is_number and not (value.isdecimal() and len(value) <= 4 and int(value) <= LARGEST):
            raise ValueError(
                f"drafter {str(spec)!r}: {key} is {value!r}; it must be a whole number up to {LARGEST}"
            )
        options[key] = int(value) if is_number else value
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"drafter {str(spec)!r} needs {name}: write {spec.replace(**{name: '…'})}")
    return options
