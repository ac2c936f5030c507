"""How sure a speed-up is: a bootstrap over questions that both methods answered."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.results import Part

Interval = tuple[float, float]  # 95 % over the questions
SAMPLES = 2000
NORMAL = 1.959964  # the normal law's quantile of 97.5 %


class QuestionResult(Part):
    """One method's answers to one question, all turns together."""

    file: str
    new_tokens: int
    seconds: float
    category: str = ""
    group: int | None = None  # questions of one number were answered at once, and share their time equally


@dataclass(frozen=True)
class Paired:
    """`mean` over the questions' files; `interval`: 95 % of it, None where a file has one question only."""

    mean: float
    interval: Interval | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (" [{:.2f}, {:.2f}]".format(*self.interval) if self.interval else "")


def paired(ours: Mapping[str, QuestionResult], theirs: Mapping[str, QuestionResult]) -> Paired:
    """One method's tokens per second over another's: over each file's questions together, and the mean over
    the files.

    The interval is the percentile bootstrap's. From every file of n questions it draws n − 1 with
    replacement, the same for both methods (n draws vary too little: McCarthy & Snowden 1985), and is as wide
    as `interval` makes it. It says how far other questions would move the figure, not another machine.
    Questions that were answered at once are drawn together.
    """
    sums = _by_file(ours, theirs)
    mean = torch.stack([_ratio(file.sum(0)) for file in sums]).mean().item()
    return Paired(mean, _bootstrap(sums, lambda draws: torch.stack([_ratio(d) for d in draws]).mean(0)))


def together(ours: Mapping[str, QuestionResult], theirs: Mapping[str, QuestionResult]) -> Interval | None:
    """The interval of one method's tokens per second over another's, over all questions together; the draws
    are those of `paired`."""
    return _bootstrap(_by_file(ours, theirs), lambda draws: _ratio(torch.stack(draws).sum(0)))


def _by_file(ours: Mapping[str, QuestionResult], theirs: Mapping[str, QuestionResult]) -> list[Tensor]:
    """For each file: tokens and seconds of both methods, a row for what is drawn together."""
    files: dict[str, dict[str | int, Tensor]] = {}
    for name, a in ours.items():
        b, group = theirs[name], name if a.group is None else a.group
        row = torch.tensor([a.new_tokens, a.seconds, b.new_tokens, b.seconds], dtype=torch.float64)
        groups = files.setdefault(a.file, {})
        groups[group] = groups[group] + row if group in groups else row
    return [torch.stack([*groups.values()]) for groups in files.values()]


def _ratio(sums: Tensor) -> Tensor:
    """Tokens per second of the one over the other's."""
    tokens, seconds, their_tokens, their_seconds = sums.unbind(-1)
    return tokens / seconds * their_seconds / their_tokens


def _bootstrap(files: list[Tensor], ratio: Callable[[list[Tensor]], Tensor]) -> Interval | None:
    """The interval of a ratio of each file's sums over its draws; None where a file has one question only."""
    if any(len(rows) < 2 for rows in files):
        return None
    generator = torch.Generator().manual_seed(0)
    sizes = [(SAMPLES, len(rows) - 1) for rows in files]
    draws = [
        rows[torch.randint(len(rows), size, generator=generator)].sum(1)
        for rows, size in zip(files, sizes, strict=True)
    ]
    low, high = interval(ratio(draws).log(), sum(count for _, count in sizes))  # as likely halved as doubled
    return math.exp(low), math.exp(high)


def interval(draws: Tensor, freedom: int) -> Interval:
    """The interval that holds the middle 95 % of the draws, wider by Student's t over the normal law's. Draws
    of few units vary as if their spread were known, and the middle of 3 covers 74 %. `freedom`: how many
    units were drawn from, less one for each file that they were drawn within."""
    low, middle, high = draws.quantile(torch.tensor([0.025, 0.5, 0.975], dtype=draws.dtype)).tolist()
    wider = student(freedom) / NORMAL
    return middle + wider * (low - middle), middle + wider * (high - middle)


def student(freedom: int) -> float:
    """The quantile of 97.5 % of Student's t, to 0.2 % (Abramowitz & Stegun 26.7.5)."""
    if freedom < 3:
        return {1: 12.706, 2: 4.303}[freedom]
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
