"""How often a drafted token is accepted, by the drafter's own confidence in it (GLIDE with a CAPE §4.2).

Drafts start at every position of the target's own answers and follow them: each drafted token is judged where
all before it were right. The calibration error is the mean distance of confidence and acceptance over bins,
by their size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.tree import Tree
from slipstream.core.tree_builders import Expand
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.proposer import Proposer
from slipstream.engine.replay import record
from slipstream.measure.questions import Questions, load_questions
from slipstream.measure.runner import first_prompts
from slipstream.measure.trees import ranked, ranks
from slipstream.plotting import picture
from slipstream.provenance import public
from slipstream.results import Figures, Part, Report, flat, heading
from slipstream.targets import HFTarget, RecordedTarget

BINS, RANKS = 10, (1, 3, 5, 7)  # CAPE takes 1, 3, 5 or 7 candidates


class Bin(Part):
    """Drafted tokens of about the same confidence: their mean confidence, and how often the right token was
    among the first candidates."""

    tokens: int
    confidence: float
    top_1: float
    top_3: float
    top_5: float
    top_7: float


class Calibration(Part):
    """One drafter's confidence and acceptance, over drafts of `depth` tokens."""

    tokens: int
    depth: int
    calibration_error: float
    bins: list[Bin]

    def mean(self, figure: str) -> float:
        """A figure of the bins, over all tokens."""
        return sum(getattr(part, figure) * part.tokens for part in self.bins) / self.tokens


class ConfidenceReport(Report):
    """What `calibrate` found. `limit`: questions of each file."""

    max_new_tokens: int
    questions: list[str]
    limit: int | None
    drafters: dict[str, Calibration]

    def __rich__(self) -> Figures:
        columns = ("confidence", *(f"top_{k}" for k in RANKS))
        table = Figures(None, "drafter", "tokens", *columns, "calibration error")
        for name, found in self.drafters.items():
            means = (f"{found.mean(figure):.3f}" for figure in columns)
            table.add_row(name, str(found.tokens), *means, f"{found.calibration_error:.3f}")
        return table

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"drafter": name} | flat(each) for name, found in self.drafters.items() for each in found.bins
        ]

    def plot(self, path: str | None = None) -> Any:
        """Acceptance by confidence, of every drafter, and the first one's candidates: a matplotlib Figure,
        which a notebook shows and `path` (.svg or .png) keeps. Raises ValueError where it cannot be
        written."""
        with picture(path, 2) as (left, right):
            left.plot([0, 1], [0, 1], color="0.8", linewidth=1)
            for name, found in self.drafters.items():
                left.plot(*_curve(found, 1), label=f"{name} (error {found.calibration_error:.3f})", **MARKED)
            left.set(xlabel="confidence", ylabel="accepted", title="Accepted, by confidence", **UNIT)
            name, found = next(iter(self.drafters.items()))
            for k in RANKS:
                right.plot(*_curve(found, k), label=f"among the first {k}", **MARKED)
            right.set(xlabel="confidence", title=f"The right token among the candidates ({name})", **UNIT)
            for axes in (left, right):
                axes.legend(frameon=False, fontsize=8)
        return left.figure


MARKED: dict[str, Any] = {"marker": "o", "markersize": 3}
UNIT: dict[str, Any] = {"xlim": (0, 1), "ylim": (0, 1)}


def _curve(found: Calibration, k: int) -> tuple[list[float], list[float]]:
    return [part.confidence for part in found.bins], [getattr(part, f"top_{k}") for part in found.bins]


@dataclass(frozen=True)
class Watched(TreeSpec):
    """A backbone that notes how sure the drafter is of the first candidate at each depth."""

    sure: list[Float[Tensor, "B depth"]] = field(default_factory=list)

    def grow(self, root: Int[Tensor, " B"], expand: Expand) -> Tree:
        levels: list[Tensor] = []

        def watched(tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            ids, log_q = expand(tokens, origin)
            levels.append(log_q[:, 0, 0].exp())
            return ids, log_q

        tree = super().grow(root, watched)
        self.sure.append(torch.stack(levels, 1))
        return tree


@public
def calibrate(
    target: HFTarget,
    drafters: Mapping[str, Proposer],
    questions: Questions = (),
    *,
    depth: int = 3,
    limit: int | None = 10,
    max_new_tokens: int = 128,
) -> ConfidenceReport:
    """Confidence and acceptance of drafters.

    Args:
        drafters: by the names that the report gives them.
        depth: tokens drafted ahead, where the drafter can.
        limit: questions of each file.

    Raises:
        ValueError: a file cannot be read, or the target answers nothing.
    """
    asked = load_questions(questions, limit)
    taps = tuple(dict.fromkeys(tap for drafter in drafters.values() for tap in drafter.taps))
    recorded = record(target, first_prompts(target, asked), max_new_tokens, taps, batch=20)
    return ConfidenceReport(
        **heading(target),
        max_new_tokens=max_new_tokens,
        questions=list(dict.fromkeys(question.file for question in asked)),
        limit=limit,
        drafters={name: _calibration(drafter, recorded, depth) for name, drafter in drafters.items()},
    )


def _calibration(drafter: Proposer, recorded: RecordedTarget, depth: int) -> Calibration:
    depth = min(depth, drafter.deepest or depth)
    spec = Watched(**vars(TreeSpec.parse(f"backbone-{depth}x{max(RANKS)}")))
    rank = ranks(drafter, recorded, spec)
    confidence = torch.cat(spec.sure).double()[rank >= 0]
    rank, bins = rank[rank >= 0], []
    for b in range(BINS):
        inside = (confidence >= b / BINS) & ((confidence < (b + 1) / BINS) | (b == BINS - 1))
        if n := int(inside.sum()):
            hits = {f"top_{k}": round(float((rank[inside] < k).double().mean()), 4) for k in RANKS}
            bins.append(Bin(tokens=n, confidence=round(float(confidence[inside].mean()), 4), **hits))
    error = sum(part.tokens * abs(part.confidence - part.top_1) for part in bins) / len(rank)
    return Calibration(tokens=len(rank), depth=depth, calibration_error=round(float(error), 4), bins=bins)


def by_question(
    drafter: Proposer, recorded: RecordedTarget, depth: int = 3
) -> tuple[list[str], list[list[float]]]:
    """For each text of a record and each bin: judged tokens, the sum of their confidence, and how many were
    accepted. Returns the columns' names and their values."""
    depth = min(depth, drafter.deepest or depth)
    spec = Watched(**vars(TreeSpec.parse(f"backbone-{depth}x1")))
    texts, rank = ranked(drafter, recorded, spec)
    confidence = torch.cat(spec.sure).double()
    at = (confidence * BINS).long().clamp(max=BINS - 1)
    sums = torch.zeros(len(recorded.tokens), BINS, 3, dtype=torch.float64)
    judged = rank >= 0
    place = (texts[:, None].expand_as(rank)[judged], at[judged])
    parts = (torch.ones_like(confidence), confidence, (rank == 0).double())
    for column, values in enumerate(parts):
        sums[..., column].index_put_(place, values[judged], accumulate=True)
    return [f"{name} {b}" for b in range(BINS) for name in COLUMNS], sums.flatten(1).tolist()


COLUMNS = ("judged", "confidence", "accepted")  # of a bin
