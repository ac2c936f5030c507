"""One file per drafter, one final class each. `load_drafter` finds them by name or directory."""

import re
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from slipstream.core.drafter import Drafter, Ends
from slipstream.drafters.store import TRAINED, find_drafter, read_drafter, read_tuned

NAMES = ("vanilla", "ngram", *TRAINED)


def load_drafter(spec: str, ends: Ends | None = None, temperature: float = 0.0) -> Drafter:
    """A drafter by name or directory, with options: "ngram", "eagle:tree=chain-5,proposal=noise", "runs/mine:tree=fig9".

    Args:
        spec: a name (a trained one finds the weights that ship for the target) or a drafter directory, then `:` and
            `key=value` pairs for the drafter's own arguments.
        ends: `target.ends`; trained drafters need it.
        temperature: what it will draft for: `tune` may have found another tree for greedy answers than for sampled ones.

    Raises:
        ValueError: there is no such drafter or option, or it was made for another target.
    """
    name, _, tail = spec.partition(":")
    options = dict(_option(part, spec) for part in re.split(r",(?=\w+=)", tail) if part)
    if name == "vanilla":
        from slipstream.drafters.vanilla import Vanilla

        return Vanilla(**_checked(Vanilla, options, spec))
    if name == "ngram":
        from slipstream.drafters.ngram import NGram

        return NGram(**_checked(NGram, options, spec))
    if name in NAMES or Path(name).expanduser().is_dir():
        if ends is None:
            raise ValueError(f"drafter {name!r} is made for a target: pass the target's ends, load_drafter(…, target.ends)")
        home = find_drafter(name, ends)
        config, tensors = read_drafter(home, ends)
        method = drafter_class(config.get("method"), f"drafter directory {name}")
        options = _checked(method, options, spec, without=("head", "ends", "vocab"))
        return method.load(config, tensors, ends, **(options or read_tuned(home, ends.place, temperature)))
    near = get_close_matches(name, NAMES, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"Unknown drafter: {name!r}. Available: {', '.join(NAMES)}, or a drafter directory.{hint}")


def drafter_class(method: Any, source: str) -> Any:
    """The class of a trained method. Raises ValueError."""
    from slipstream.drafters.eagle import Eagle
    from slipstream.drafters.eagle3 import Eagle3
    from slipstream.drafters.fasteagle import FastEagle

    classes = {cls.method: cls for cls in (Eagle, Eagle3, FastEagle)}
    if method not in classes:
        raise ValueError(f"{source}: Unknown method: {method!r}. Available: {', '.join(classes)}")
    return classes[method]


def _option(part: str, spec: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"drafter {spec!r}: {part!r} is no option: write key=value, such as eagle:tree=chain-5")
    return key, value


def _checked(drafter: type[Drafter], options: dict[str, Any], spec: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    known = [] if drafter.__init__ is object.__init__ else [p for p in signature(drafter).parameters if p not in without]
    for key in options:
        if key not in known:
            raise ValueError(f"drafter {spec!r} has no option {key!r}. Available: {', '.join(known) or 'none'}")
        if signature(drafter).parameters[key].annotation is int:
            if not options[key].isdecimal():
                raise ValueError(f"drafter {spec!r}: {key} is {options[key]!r}; it must be a whole number")
            options[key] = int(options[key])
    return options
