"""One file per drafter, one final class each. `load_drafter` finds them by name or directory."""

import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from slipstream.core.drafter import Drafter, Ends
from slipstream.core.shape import LARGEST, ROWS, shortened
from slipstream.drafters.store import TRAINED, find_drafter, read_drafter, read_tuned
from slipstream.files import cache_home, name_of, understood

# drafters that need no target, by name: module and class, imported when asked for
FREE = {
    "vanilla": ("vanilla", "Vanilla"),
    "ngram": ("ngram", "NGram"),
    "lookahead": ("lookahead", "Lookahead"),
}
NAMES = (*FREE, "hybrid", *TRAINED, "draft-model", "self-speculative")


def load_drafter(spec: str | os.PathLike[str], ends: Ends | None = None, temperature: float = 0.0) -> Drafter:
    """A drafter by name or directory, with options: "ngram", "eagle:tree=chain-5,proposal=noise",
    "runs/mine:tree=fig9".

    Args:
        spec: a name (a trained one finds the weights that ship for the target) or a drafter directory, then
            `:` and `key=value` pairs for the drafter's own arguments.
        ends: `target.ends`; trained drafters need it.
        temperature: what it will draft for: `tune` may have found another tree for greedy answers than for
            sampled ones.

    Raises:
        ValueError: there is no such drafter or option, it was made for another target, or its passes would be
            too large.
    """
    spec = name_of(spec, "a drafter")
    drafter = _load(spec, ends, temperature)
    if drafter.rows > ROWS:
        raise ValueError(
            f"drafter {shortened(spec)!r} costs target passes over {drafter.rows:,} rows; at most are "
            f"{ROWS:,}: name less"
        )
    return drafter


def _load(spec: str, ends: Ends | None, temperature: float) -> Drafter:
    name, _, tail = spec.partition(":")
    options = dict(_option(part, spec) for part in re.split(r",(?=\w+=)", tail) if part)
    if name in FREE:
        module, cls = FREE[name]
        make = getattr(import_module(f"slipstream.drafters.{module}"), cls)
        drafter: Drafter = make(**_checked(make, options, spec))
        return drafter
    if name == "hybrid":
        from slipstream.drafters.hybrid import Hybrid

        ends = _needed(ends, name)
        return Hybrid.named(ends, **_checked(Hybrid.named, options, spec, without=("ends",)))
    if name in ("draft-model", "self-speculative"):
        from slipstream.drafters.draft_model import DraftModel

        make, ends = DraftModel.named if name == "draft-model" else DraftModel.of_itself, _needed(ends, name)
        tuned = read_tuned(tuned_home(spec, ends), ends.place, temperature)
        if {"tree", "proposal"} & options.keys():
            tuned = {key: value for key, value in tuned.items() if key == "skip"}
        options = tuned | options
        return make(ends=ends, **_checked(make, options, spec, without=("ends",)))
    if name in NAMES or os.path.isdir(os.path.expanduser(name)):
        ends = _needed(ends, name)
        home = find_drafter(name, ends)
        config, tensors = read_drafter(home, ends)
        with understood(f"drafter directory {name}"):
            method = drafter_class(config.get("method"), f"drafter directory {name}")
            options = _checked(method, options, spec, without=("head", "model", "ends", "vocab", "part"))
            return method.load(
                config, tensors, ends, **(options or read_tuned(home, ends.place, temperature))
            )
    near = get_close_matches(name, NAMES, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"Unknown drafter: {name!r}. Available: {', '.join(NAMES)}, or a drafter directory.{hint}"
    )


def tuned_home(spec: str, ends: Ends) -> Path:
    """Where what `tune` finds for a drafter is kept: beside its weights, or in the user's cache if it has no
    directory."""
    name, _, tail = spec.partition(":")
    if name not in ("draft-model", "self-speculative"):
        return find_drafter(name, ends)
    said = re.sub(r",?(tree|proposal)=.*?(?=,\w+=|$)", "", tail).strip(",")
    return cache_home() / "tuned" / ends.fingerprint / re.sub(r"[^\w.-]+", "_", f"{name}_{said}")


def drafter_class(method: Any, source: str) -> Any:
    """The class of a trained method. Raises ValueError."""
    from slipstream.drafters.bita import Bita
    from slipstream.drafters.draft_model import DraftModel
    from slipstream.drafters.eagle import Eagle
    from slipstream.drafters.eagle3 import Eagle3
    from slipstream.drafters.fasteagle import FastEagle
    from slipstream.drafters.glide import Glide
    from slipstream.drafters.medusa import Medusa

    classes = {cls.method: cls for cls in (Eagle, Eagle3, FastEagle, Medusa, Bita, Glide, DraftModel)}
    if method not in classes:
        raise ValueError(f"{source}: Unknown method: {method!r}. Available: {', '.join(classes)}")
    return classes[method]


def _needed(ends: Ends | None, name: str) -> Ends:
    if ends is None:
        raise ValueError(
            f"drafter {name!r} is made for a target: pass the target's ends, load_drafter(…, target.ends)"
        )
    return ends


def _option(part: str, spec: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals:
        raise ValueError(
            f"drafter {spec!r}: {part!r} is no option: write key=value, such as eagle:tree=chain-5"
        )
    return key, value


def _checked(
    make: Callable[..., Drafter], options: dict[str, Any], spec: str, without: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The options as `make` takes them. Raises ValueError for one that it does not have, or that is
    missing."""
    known = {name: p for name, p in signature(make).parameters.items() if name not in without}
    for key in options:
        if key not in known:
            raise ValueError(
                f"drafter {spec!r} has no option {key!r}. Available: {', '.join(known) or 'none'}"
            )
        if known[key].annotation is int:
            if not options[key].isdecimal() or len(options[key]) > 4 or int(options[key]) > LARGEST:
                raise ValueError(
                    f"drafter {spec!r}: {key} is {options[key]!r}; it must be a whole number up to {LARGEST}"
                )
            options[key] = int(options[key])
    if missing := [name for name, p in known.items() if p.default is p.empty and name not in options]:
        raise ValueError(
            f"drafter {spec!r} needs {missing[0]}: write {spec}{',' if options else ':'}{missing[0]}=…"
        )
    return options
