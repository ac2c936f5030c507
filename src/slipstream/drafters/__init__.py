"""One file per drafter, one final class each. `load_drafter` finds them by name."""

from difflib import get_close_matches

from slipstream.core.drafter import Drafter

NAMES = ("vanilla", "ngram")


def load_drafter(name: str) -> Drafter:
    """The drafter of that name, with its defaults.

    Raises:
        ValueError: no drafter is called that; the nearest name is offered.
    """
    if name == "vanilla":
        from slipstream.drafters.vanilla import Vanilla

        return Vanilla()
    if name == "ngram":
        from slipstream.drafters.ngram import NGram

        return NGram()
    near = get_close_matches(name, NAMES, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"Unknown drafter: {name!r}. Available: {', '.join(NAMES)}.{hint}")
