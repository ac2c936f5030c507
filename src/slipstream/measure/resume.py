"""Runs that go on: what was found before counts on where the same was asked, on the same machine."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.drafters.proposer import Proposer
from slipstream.results import Part
from slipstream.targets.support import dense

UNFINISHED = "not finished"  # why a result that is written while its run goes on has `stopped`
SHARED = ("target", "dtype", "compiled", "exactness", "max_new_tokens", "seed", "hardware", "versions")


def fingerprint(*asked: Any) -> str:
    """Of texts, tokens and names, which a run that goes on must share with the one that was begun."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


@torch.inference_mode()
def marks(drafter: Drafter) -> list[Any]:
    """What tells a drafter from another of its name: its law, its trees, the tokens that it says, and some of
    its weights."""
    found: list[Any] = [drafter.law, drafter.rows, [spec.name for spec in drafter.candidate_trees]]
    if isinstance(drafter, Proposer):
        found += [drafter.tree_spec.name, drafter.proposal, fingerprint(drafter.vocab.tolist())]
    for name, part in sorted(vars(drafter).items()):
        if isinstance(part, Drafter):
            found.append(marks(part))
        elif isinstance(part, nn.Module) and name != "lm_head":  # which is the target's
            weights = part.named_parameters()
            found.append({each: dense(w).flatten()[:256].double().tolist() for each, w in weights})
        elif isinstance(part, Target) and name != "target":
            found.append(part.values)
    return found


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
    check_same(what, pairs)


def check_same(what: str, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ValueError where of something by name what was and what is differ."""
    for name, (was, now) in pairs.items():
        if was != now:
            told = "are others" if isinstance(now, list | dict) else f"was {was}, and is {now}"
            raise ValueError(f"this {what} cannot be gone on with: {name} {told}")
