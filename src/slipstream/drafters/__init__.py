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
from slipstream.drafters.spec import Named, Spec
from slipstream.drafters.store import TRAINED, find_drafter, read_drafter, read_tuned
from slipstream.files import cache_home, understood

# drafters that need no target, by name: module and class, imported when asked for
FREE = {
    "vanilla": ("vanilla", "Vanilla"),
    "ngram": ("ngram", "NGram"),
    "lookahead": ("lookahead", "Lookahead"),
}
NAMES = (*FREE, "hybrid", *TRAINED, "draft-model", "self-speculative")


def load_drafter(spec: Named, ends: Ends | None = None, temperature: float = 0.0) -> Drafter:
    """A drafter by name or directory, with options: "ngram", "eagle:tree=chain-5,proposal=noise",
    "runs/mine:tree=fig9".

    Args:
        spec: a name (a trained one finds the weights that ship for the target) or a drafter directory, then
            `:` and `key=value` pairs for the drafter's own arguments; or all that as a `Spec`.
        ends: `target.ends`; trained drafters need it.
        temperature: what it will draft for: `tune` may have found another tree for greedy answers than for
            sampled ones.

    Raises:
        ValueError: there is no such drafter or option, it was made for another target, or its passes would be
            too large.
    """
    drafter = _load(Spec.parse(spec), ends, temperature)
    if drafter.rows > ROWS:
        raise ValueError(
            f"drafter {shortened(str(spec))!r} costs target passes over {drafter.rows:,} rows; at most are "
            f"{ROWS:,}: name less"
        )
    return drafter


def _load(spec: Spec, ends: Ends | None, temperature: float) -> Drafter:
    name = spec.name
    if name in FREE:
        module, cls = FREE[name]
        make = getattr(import_module(f"slipstream.drafters.{module}"), cls)
        drafter: Drafter = make(**_checked(make, spec))
        return drafter
    if name == "hybrid":
        from slipstream.drafters.hybrid import Hybrid

        ends = _needed(ends, name)
        return Hybrid.named(ends, **_checked(Hybrid.named, spec, without=("ends",)))
    if name in ("draft-model", "self-speculative"):
        from slipstream.drafters.draft_model import DraftModel

        make, ends = DraftModel.named if name == "draft-model" else DraftModel.of_itself, _needed(ends, name)
        tuned = read_tuned(tuned_home(spec, ends), ends.place, temperature)
        if {"tree", "proposal"} & spec.options.keys():
            tuned = {key: value for key, value in tuned.items() if key == "skip"}
        options = _checked(make, Spec(name, tuned | spec.options), without=("ends",))
        return make(ends=ends, **options)
    if name in NAMES or os.path.isdir(os.path.expanduser(name)):
        ends = _needed(ends, name)
        home = find_drafter(name, ends)
        config, tensors = read_drafter(home, ends)
        with understood(f"drafter directory {name}"):
            method = drafter_class(config.get("method"), f"drafter directory {name}")
            options = _checked(method, spec, without=("head", "model", "ends", "vocab", "part"))
            return method.load(
                config, tensors, ends, **(options or read_tuned(home, ends.place, temperature))
            )
    near = get_close_matches(name, NAMES, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"Unknown drafter: {name!r}. Available: {', '.join(NAMES)}, or a drafter directory.{hint}"
    )


def tuned_home(spec: Named, ends: Ends) -> Path:
    """The directory for what `tune` finds for a drafter: beside its weights, or in the user's cache where it
    has none of its own. Trees and proposals that the drafter is named with make no difference."""
    spec = Spec.parse(spec)
    if spec.name not in ("draft-model", "self-speculative"):
        return find_drafter(spec.name, ends)
    called = f"{spec.name}_{spec.replace(tree=None, proposal=None).tail}"
    return cache_home() / "tuned" / ends.fingerprint / re.sub(r"[^\w.-]+", "_", called)


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


def _checked(make: Callable[..., Drafter], spec: Spec, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A drafter's options as `make` takes them. Raises ValueError for one that it does not have, or that is
    missing."""
    known = {name: p for name, p in signature(make).parameters.items() if name not in without}
    options: dict[str, Any] = {}
    for key, value in spec.options.items():
        if key not in known:
            raise ValueError(
                f"drafter {str(spec)!r} has no option {key!r}. Available: {', '.join(known) or 'none'}"
            )
        if known[key].annotation is int and not (
            value.isdecimal() and len(value) <= 4 and int(value) <= LARGEST
        ):
            raise ValueError(
                f"drafter {str(spec)!r}: {key} is {value!r}; it must be a whole number up to {LARGEST}"
            )
        options[key] = int(value) if known[key].annotation is int else value
    if missing := [name for name, p in known.items() if p.default is p.empty and name not in options]:
        raise ValueError(
            f"drafter {str(spec)!r} needs {missing[0]}: write {spec.replace(**{missing[0]: '…'})}"
        )
    return options
