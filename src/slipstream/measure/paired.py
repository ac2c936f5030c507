"""How sure a speed-up is: a bootstrap over questions that both methods answered."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.results import Part

SAMPLES = 2000


class Asked(Part):
    """One method's answers to one question, all turns together.

    Attributes:
        file, category: where the question is from, and its kind.
        group: questions of one number were answered at once, and share their time equally.
    """

    file: str
    new_tokens: int
    seconds: float
    category: str = ""
    group: int | None = None


@dataclass(frozen=True)
class Paired:
    """`mean` over the questions' files; `interval`: 95 % of it, None where a file has one question only."""

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (" [{:.2f}, {:.2f}]".format(*self.interval) if self.interval else "")


def paired(ours: Mapping[str, Asked], theirs: Mapping[str, Asked]) -> Paired:
    """One method's tokens per second over another's: over each file's questions together, and the mean over
    the files.

    The interval is the percentile bootstrap's. From every file of n questions it draws n − 1 with
    replacement, the same for both methods (n draws vary too little: McCarthy & Snowden 1985). It says how far
    other questions would move the figure, not another machine. Questions that were answered at once are drawn
    together.

    Args:
        ours, theirs: `by_question` of two methods in one report of `bench`.
    """
    sums = _by_file(ours, theirs)
    mean = torch.stack([_ratio(q.sum(0)) for q in sums]).mean().item()
    drawn = _drawn(sums)
    if drawn is None:
        return Paired(mean, None)
    return Paired(mean, interval(torch.stack([_ratio(draw) for draw in drawn]).mean(0)))


def together(ours: Mapping[str, Asked], theirs: Mapping[str, Asked]) -> tuple[float, float] | None:
    """The interval of one method's tokens per second over another's, over all questions together; the draws
    are those of `paired`."""
    drawn = _drawn(_by_file(ours, theirs))
    return None if drawn is None else interval(_ratio(torch.stack(drawn).sum(0)))


def interval(draws: Tensor) -> tuple[float, float]:
    """The interval that holds the middle 95 % of the draws."""
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return low, high


def _by_file(ours: Mapping[str, Asked], theirs: Mapping[str, Asked]) -> list[Tensor]:
    """For each file: tokens and seconds of both methods, a row for what is drawn together."""
    files: dict[str, dict[str | int, list[list[float]]]] = {}
    for name, a in ours.items():
        b, drawn_with = theirs[name], name if a.group is None else a.group
        row = [float(a.new_tokens), a.seconds, float(b.new_tokens), b.seconds]
        files.setdefault(a.file, {}).setdefault(drawn_with, []).append(row)
    return [
        torch.stack([torch.tensor(rows, dtype=torch.float64).sum(0) for rows in groups.values()])
        for groups in files.values()
    ]


def _drawn(sums: list[Tensor]) -> list[Tensor] | None:
    """For each file the sums over its draws; None where a file has one question only."""
    generator = torch.Generator().manual_seed(0)
    if any(len(q) < 2 for q in sums):
        return None
    return [q[torch.randint(len(q), (SAMPLES, len(q) - 1), generator=generator)].sum(1) for q in sums]


def _ratio(sums: Tensor) -> Tensor:
    """Tokens per second of the one over the other's."""
    tokens, seconds, their_tokens, their_seconds = sums.unbind(-1)
    return tokens / seconds * their_seconds / their_tokens
