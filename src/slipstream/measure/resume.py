"""Runs that go on: what was measured before counts on where the same was asked, on the same machine."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.drafters.proposer import Proposer
from slipstream.results import Part, reason_of
from slipstream.targets.support import dense

R = TypeVar("R")
UNFINISHED = "not finished"  # why a result that is written while its run goes on has `stopped`
SHARED = ("target", "dtype", "compiled", "exactness", "max_new_tokens", "seed", "hardware", "versions")


@contextmanager
def reported(keep: Callable[[R], None], report: Callable[[str], R | None]) -> Iterator[None]:
    """Where an error or Ctrl-C ends the run in this context, `keep` gets its report, unless it has none."""
    try:
        yield
    except BaseException as error:
        if (unfinished := report(reason_of(error))) is not None:
            keep(unfinished)
        raise


def fingerprint(*asked: Any) -> str:
    """Of texts, tokens and names, which a run that goes on must share with the one that was begun."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


@torch.inference_mode()
def marks(drafter: Drafter) -> list[Any]:
    """What tells a drafter from another of its name: its law, its trees, the tokens that it says, and some of
    its weights."""
    parts: list[Any] = [drafter.law, drafter.rows, [shape.name for shape in drafter.candidate_trees]]
    if isinstance(drafter, Proposer):
        parts += [drafter.tree_spec.name, drafter.proposal, fingerprint(drafter.vocab.tolist())]
    for name, part in sorted(vars(drafter).items()):
        if isinstance(part, Drafter):
            parts.append(marks(part))
        elif isinstance(part, nn.Module) and name != "lm_head":  # which is the target's
            weights = part.named_parameters()
            parts.append({key: dense(w).flatten()[:256].double().tolist() for key, w in weights})
        elif isinstance(part, Target) and name != "target":
            parts.append(part.values)
    return parts


def check_goes_on(
    what: str, begun: Any, fields: Mapping[str, Any], settings: Part | Mapping[str, Any]
) -> None:
    """Raise ValueError where the report that was begun is another run's than one with these fields."""
    if settings and begun.settings is None:
        raise ValueError(f"this {what} cannot be gone on with: it does not say what was asked")
    pairs = {name: (getattr(begun, name), fields[name]) for name in SHARED if name in fields}
    pairs |= {name: (getattr(begun.settings, name), now) for name, now in dict(settings).items()}
    check_same(what, pairs)


def check_same(what: str, pairs: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise ValueError where of something by name what was and what is differ."""
    for name, (before, now) in pairs.items():
        if before != now:
            differs = "are others" if isinstance(now, list | dict) else f"was {before}, and is {now}"
            raise ValueError(f"this {what} cannot be gone on with: {name} {differs}")
