"""Runs that go on: what was found before counts on where the same was asked, on the same machine."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from slipstream.results import Part

UNFINISHED = "not finished"  # why a result that is written while its run goes on has `stopped`
SHARED = ("target", "dtype", "compiled", "exactness", "max_new_tokens", "seed", "hardware", "versions")


def fingerprint(*asked: Any) -> str:
    """Of texts, tokens and names, which a run that goes on must share with the one that was begun."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def check_goes_on(what: str, begun: Any, ours: Mapping[str, Any], settings: Part) -> None:
    """Raise ValueError where a run that was begun is another one.

    Args:
        what: it is, for the error.
        begun: a report that was stored, which says what was asked as `settings`.
        ours: fields of the report that would be made now.
        settings: what is asked now.
    """
    if begun.settings is None:
        raise ValueError(f"this {what} cannot be gone on with: it does not say what was asked")
    pairs = {name: (getattr(begun, name), ours[name]) for name in SHARED if name in ours}
    pairs |= {name: (was, getattr(settings, name)) for name, was in begun.settings}
    for name, (was, now) in pairs.items():
        if was != now:
            told = "are others" if isinstance(now, list | dict) else f"was {was}, and is {now}"
            raise ValueError(f"this {what} cannot be gone on with: {name} {told}")
