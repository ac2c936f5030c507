"""Figures of the papers' tables, from sums over questions: their values, intervals, and what they decide."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.measure.bootstrap import SAMPLES, Interval, interval
from slipstream.measure.confidence import BINS
from slipstream.measure.papers.entry import Claim, Figure
from slipstream.results import Part

Sums = dict[str, Float[Tensor, " draws"]]  # by column; the first of all questions, the others drawn anew
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


@dataclass(frozen=True)
class Draws:
    """A figure, and below it the figure of questions drawn anew, which is not a number where a set has one
    question only. `freedom`: as `interval` takes it."""

    figures: Float[Tensor, " draws"]
    freedom: int

    @property
    def measured(self) -> tuple[float | None, Interval | None]:
        """The figure and its interval, rounded to four digits; None where it, or some draw, has no value: a
        share of nothing."""
        value = round(float(self.figures[0]), 4) if self.figures[0].isfinite() else None
        if not self.figures.isfinite().all():
            return value, None
        low, high = interval(self.figures[1:], self.freedom)
        return value, (round(low, 4), round(high, 4))


class Evidence:
    """Cells, and what figures and claims they make.

    Args:
        categories: of the questions, by set and name.
    """

    def __init__(self, cells: Mapping[Place, Cell], categories: Mapping[str, Mapping[str, str]]) -> None:
        self._cells, self._categories = cells, categories

    def draws(self, figure: Figure, beside: Figure | None = None) -> Draws | None:
        """A figure; None where a set was not measured. `beside`: what it is compared with. Of a set that both
        have, the questions of both count."""
        parts, freedom = [], 0
        for asked in figure.sets:
            other = beside if beside is not None and asked in beside.sets else figure
            groups = self._groups(figure, other, asked)
            if not groups:
                return None
            sums = self._sums(figure, asked, groups)
            parts.append(FORMULAS[figure.kind](sums))
            freedom += len(groups) - 1
        return Draws(torch.stack(parts).mean(0), freedom)

    def questions(self, figure: Figure) -> int:
        """Of the smallest set of the figure's."""
        return min(len(self._chosen(figure, asked)) for asked in figure.sets)

    def _chosen(self, figure: Figure, asked: str) -> dict[str, list[float]]:
        """What was counted of each question."""
        cell, (name, _, category) = self._cells.get(place(figure, asked)), asked.partition("/")
        if cell is None:
            return {}
        of = self._categories[name]
        return {each: row for each, row in cell.questions.items() if not category or of[each] == category}

    def _groups(self, figure: Figure, other: Figure, asked: str) -> list[list[str]]:
        """The questions of both figures. Those that were answered at once share their time: they are one."""
        both = self._chosen(figure, asked).keys() & self._chosen(other, asked).keys()
        wide = max(figure, other, key=lambda each: each.batch)
        groups: dict[int, list[str]] = {}
        for i, name in enumerate(self._cells[place(wide, asked)].questions if both else ()):
            if name in both:
                groups.setdefault(i // wide.batch, []).append(name)
        return [*groups.values()]

    def _sums(self, figure: Figure, asked: str, groups: Sequence[Sequence[str]]) -> Sums:
        """Sums over the groups, and over groups drawn anew: the same for all figures of the same groups."""
        rows = self._chosen(figure, asked)
        counts = torch.stack(
            [torch.tensor([rows[name] for name in group], dtype=torch.float64).sum(0) for group in groups]
        )
        n, generator = len(counts), torch.Generator().manual_seed(crc32(asked.encode()))
        drawn = torch.full((SAMPLES, counts.shape[1]), torch.nan, dtype=torch.float64)
        if n > 1:  # n − 1 of them are drawn, as `paired` explains
            drawn = counts[torch.randint(n, (SAMPLES, n - 1), generator=generator)].sum(1)
        sums = torch.cat([counts.sum(0, keepdim=True), drawn])
        return dict(zip(self._cells[place(figure, asked)].columns, sums.T, strict=True))

    def value(self, figure: Figure) -> tuple[float | None, Interval | None]:
        """The figure and its interval over questions; None where it was not measured."""
        return (None, None) if (draws := self.draws(figure)) is None else draws.measured

    def verdict(self, claim: Claim) -> tuple[str, float | None, Interval | None]:
        """Whether the claim holds, and by how much the left figure exceeds the right one, or what it is told
        to exceed. Intervals over questions decide."""
        left, right = self.draws(claim.left, claim.right), self.draws(claim.right, claim.left)
        if left is None or right is None:
            return ABSENT, None, None
        by = left.figures - claim.times * right.figures
        value, between = Draws(by, min(left.freedom, right.freedom)).measured
        if between is None:
            return OPEN, value, None
        low, high = between
        if claim.within is None:
            return (HOLDS if low > 0 else FAILS if high < 0 else OPEN), value, between
        inside, outside = max(-low, high) <= claim.within, max(low, -high) > claim.within
        return (HOLDS if inside else FAILS if outside else OPEN), value, between


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


def _total(name: str, bins: range, sums: Sums) -> Tensor:
    return torch.stack([sums[f"{name} {b}"] for b in bins]).sum(0)


def _accepted(bins: range, sums: Sums) -> Tensor:
    return _total("accepted", bins, sums) / _total("judged", bins, sums)


def _calibration(sums: Sums) -> Tensor:
    off = torch.stack([(sums[f"confidence {b}"] - sums[f"accepted {b}"]).abs() for b in range(BINS)])
    return off.sum(0) / _total("judged", range(BINS), sums)


def _cost(sums: Sums) -> Tensor:
    return sums["draft seconds"] / sums["levels"] / (sums["plain verify"] / sums["plain rounds"])


def _free(sums: Sums) -> Tensor:
    return sums["tokens"] / (sums["levels"] * _cost(sums) + sums["rounds"])


FORMULAS: dict[str, Callable[[Sums], Tensor]] = {
    "τ": lambda sums: sums["tokens"] / sums["rounds"],
    "α": _alpha,
    **{f"{n}-α": partial(_n_alpha, n) for n in range(5)},
    "× plain": partial(_over, "plain"),
    "× HF": partial(_over, "hf"),
    "tokens/s": lambda sums: sums["tokens"] / sums["seconds"],
    "draft ms": lambda sums: 1e3 * sums["draft seconds"] / sums["rounds"],
    "c": _cost,
    "E": _free,
    "sure": partial(_accepted, range(BINS // 2, BINS)),
    "unsure": partial(_accepted, range(BINS // 2)),
    "calibration error": _calibration,
}
