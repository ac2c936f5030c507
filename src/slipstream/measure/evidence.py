"""Figures of the papers' tables, from sums over questions: their values, intervals, and what they decide."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.measure.confidence import BINS
from slipstream.measure.paired import SAMPLES, interval
from slipstream.measure.papers.entry import Claim, Figure
from slipstream.results import Part

Sums = dict[str, Float[Tensor, " draws"]]  # by column; the first of all questions, the others drawn anew
Interval = tuple[float, float]
Place = tuple[str, str, float, int, str]
HOLDS, FAILS, OPEN, ABSENT = "holds", "does not hold", "undecided", "not measured"


class Cell(Part):
    """What was measured of one drafter along one set of questions.

    Attributes:
        asked: the set's name.
        how: it was measured, as `Figure.how` has it.
        columns: what is counted of each question, by its name in `questions`.
    """

    drafter: str
    asked: str
    temperature: float
    batch: int
    how: str
    columns: list[str]
    questions: dict[str, list[float]]

    @property
    def place(self) -> Place:
        return self.drafter, self.asked, self.temperature, self.batch, self.how


def place(figure: Figure, asked: str) -> Place:
    """The cell that a figure needs of a set; `mt_bench/coding` is a category of `mt_bench`."""
    return figure.drafter, asked.partition("/")[0], figure.temperature, figure.batch, figure.how


class Evidence:
    """Cells, and what figures and claims they make.

    Args:
        categories: of the questions, by set and name.
    """

    def __init__(self, cells: Mapping[Place, Cell], categories: Mapping[str, Mapping[str, str]]) -> None:
        self._cells, self._categories = cells, categories

    def draws(self, figure: Figure) -> Float[Tensor, " draws"] | None:
        """The figure, and below it the figure of questions drawn anew; not a number where a set has one
        question only. None where a set was not measured."""
        parts = []
        for asked in figure.sets:
            if (sums := self._sums(figure, asked)) is None:
                return None
            parts.append(FORMULAS[figure.kind](sums))
        return torch.stack(parts).mean(0)

    def questions(self, figure: Figure) -> int:
        """Of the smallest set of the figure's."""
        return min(len(self._chosen(figure, asked)) for asked in figure.sets)

    def _chosen(self, figure: Figure, asked: str) -> dict[int, list[float]]:
        """What was counted of each question, by its place among those of its cell."""
        cell, (name, _, category) = self._cells.get(place(figure, asked)), asked.partition("/")
        if cell is None:
            return {}
        of = self._categories[name]
        rows = enumerate(cell.questions.items())
        return {i: row for i, (question, row) in rows if not category or of[question] == category}

    def _sums(self, figure: Figure, asked: str) -> Sums | None:
        if not (rows := self._chosen(figure, asked)):
            return None
        counts = torch.tensor([*rows.values()], dtype=torch.float64)
        if figure.batch > 1:  # those that were answered at once share their time, and are drawn together
            groups = (torch.tensor([*rows]) // figure.batch).unique(return_inverse=True)[1]
            counts = counts.new_zeros(int(groups.max()) + 1, counts.shape[1]).index_add(0, groups, counts)
        n, generator = len(counts), torch.Generator().manual_seed(crc32(asked.encode()))
        drawn = torch.full((SAMPLES, counts.shape[1]), torch.nan, dtype=torch.float64)
        if n > 1:  # n − 1 of them, as `paired` explains; the same for all drafters
            drawn = counts[torch.randint(n, (SAMPLES, n - 1), generator=generator)].sum(1)
        sums = torch.cat([counts.sum(0, keepdim=True), drawn])
        return dict(zip(self._cells[place(figure, asked)].columns, sums.T, strict=True))

    def value(self, figure: Figure) -> tuple[float | None, Interval | None]:
        """The figure and its interval over questions; None where it was not measured."""
        return (None, None) if (draws := self.draws(figure)) is None else measured(draws)

    def verdict(self, claim: Claim) -> tuple[str, float | None, Interval | None]:
        """Whether the claim holds, and by how much the left figure exceeds the right one, or what it is told
        to exceed. Intervals over questions decide."""
        left, right = self.draws(claim.left), self.draws(claim.right)
        if left is None or right is None:
            return ABSENT, None, None
        value, between = measured(left - claim.times * right)
        if between is None:
            return OPEN, value, None
        low, high = between
        if claim.within is None:
            return (HOLDS if low > 0 else FAILS if high < 0 else OPEN), value, between
        inside, outside = max(-low, high) <= claim.within, max(low, -high) > claim.within
        return (HOLDS if inside else FAILS if outside else OPEN), value, between


def measured(draws: Float[Tensor, " draws"]) -> tuple[float | None, Interval | None]:
    """A figure and its interval, rounded to four digits; None where it, or some draw, has no value: a share
    of nothing."""
    value = round(float(draws[0]), 4) if draws[0].isfinite() else None
    if not draws.isfinite().all():
        return value, None
    low, high = interval(draws[1:])
    return value, (round(low, 4), round(high, 4))


def levels(sums: Mapping[str, Tensor]) -> list[Tensor]:
    """By depth d: rounds that accepted d guesses or more, from d = 0."""
    depths: Sequence[str] = sorted((name for name in sums if name.isdigit()), key=int)
    return [sums["rounds"], *(sums[depth] for depth in depths)]


def _alpha(sums: Sums) -> Tensor:
    reached = levels(sums)
    return torch.stack(reached[1:]).sum(0) / torch.stack(reached[:-1]).sum(0)


def _n_alpha(n: int, sums: Sums) -> Tensor:
    reached = levels(sums)
    return reached[n + 1] / reached[n]


def _over(base: str, sums: Sums) -> Tensor:
    theirs = sums[f"{base} tokens"] / sums[f"{base} seconds"]
    return sums["tokens"] / sums["seconds"] / theirs


def _accepted(bins: range, sums: Sums) -> Tensor:
    counts = (torch.stack([sums[f"{name} {b}"] for b in bins]).sum(0) for name in ("accepted", "judged"))
    accepted, judged = counts
    return accepted / judged


def _calibration(sums: Sums) -> Tensor:
    off = torch.stack([(sums[f"confidence {b}"] - sums[f"accepted {b}"]).abs() for b in range(BINS)])
    return off.sum(0) / torch.stack([sums[f"judged {b}"] for b in range(BINS)]).sum(0)


def _cost(sums: Sums) -> Tensor:
    return sums["draft seconds"] / sums["levels"] / (sums["plain verify"] / sums["plain rounds"])


FORMULAS: dict[str, Callable[[Sums], Tensor]] = {
    "τ": lambda sums: sums["tokens"] / sums["rounds"],
    "α": _alpha,
    **{f"{n}-α": partial(_n_alpha, n) for n in range(5)},
    "× plain": partial(_over, "plain"),
    "× HF": partial(_over, "hf"),
    "tokens/s": lambda sums: sums["tokens"] / sums["seconds"],
    "draft ms": lambda sums: 1e3 * sums["draft seconds"] / sums["rounds"],
    "c": _cost,
    "sure": partial(_accepted, range(BINS // 2, BINS)),
    "unsure": partial(_accepted, range(BINS // 2)),
    "calibration error": _calibration,
}
