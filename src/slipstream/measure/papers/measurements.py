"""What was measured, as sums over questions: the values of figures, their intervals, and what they decide."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.measure.bootstrap import SAMPLES, Interval, interval
from slipstream.measure.confidence import BINS
from slipstream.measure.papers.entry import Claim, Figure
from slipstream.results import Part

PREDICTION = "prediction"  # along the target's recorded answers
RACE = "race"  # of `bench`
CONFIDENCE = "confidence"  # of the guesses behind right ones, by the drafter's own confidence
Sums = dict[str, Float[Tensor, " draws"]]  # by column of the cells


def _reached(sums: Sums) -> list[Tensor]:
    """By depth d, from 0: rounds that accepted d guesses or more, which are the columns behind the tokens."""
    return [*sums.values()][1:]


def _alpha(sums: Sums) -> Tensor:
    reached = torch.stack(_reached(sums))
    return reached[1:].sum(0) / reached[:-1].sum(0)


def _n_alpha(n: int, sums: Sums) -> Tensor:
    reached = _reached(sums)
    return reached[n + 1] / reached[n]


def _over(baseline: str, sums: Sums) -> Tensor:
    theirs = sums[f"{baseline} tokens"] / sums[f"{baseline} seconds"]
    return sums["tokens"] / sums["seconds"] / theirs


def _step_cost(sums: Sums) -> Tensor:
    return sums["draft seconds"] / sums["levels"] / (sums["plain verify"] / sums["plain rounds"])


def _total(name: str, bins: range, sums: Sums) -> Tensor:
    return torch.stack([sums[f"{name} {b}"] for b in bins]).sum(0)


def _accepted(bins: range, sums: Sums) -> Tensor:
    return _total("accepted", bins, sums) / _total("judged", bins, sums)


def _calibration(sums: Sums) -> Tensor:
    errors = torch.stack([(sums[f"confidence {b}"] - sums[f"accepted {b}"]).abs() for b in range(BINS)])
    return errors.sum(0) / _total("judged", range(BINS), sums)


class Kind(NamedTuple):
    """A kind of figure. `how`: prediction, race or confidence."""

    how: str
    formula: Callable[[Sums], Tensor]


KINDS = {
    # Tokens a target pass.
    "τ": Kind(PREDICTION, lambda sums: sums["tokens"] / sums["rounds"]),
    # The share accepted of the guesses of a chain that were judged, and of those behind n accepted ones.
    "α": Kind(PREDICTION, _alpha),
    **{f"{n}-α": Kind(PREDICTION, partial(_n_alpha, n)) for n in range(5)},
    # Speed over plain decoding's and Hugging Face generate's.
    "× plain": Kind(RACE, partial(_over, "plain")),
    "× HF": Kind(RACE, partial(_over, "hf")),
    "tokens/s": Kind(RACE, lambda sums: sums["tokens"] / sums["seconds"]),
    # Milliseconds of drafting a round.
    "draft ms": Kind(RACE, lambda sums: 1e3 * sums["draft seconds"] / sums["rounds"]),
    # One draft step over a plain pass.
    "c": Kind(RACE, _step_cost),
    # Speed over plain decoding's if a pass cost the same for any rows: τ / (γc + 1).
    "E": Kind(RACE, lambda sums: sums["tokens"] / (sums["levels"] * _step_cost(sums) + sums["rounds"])),
    # The share accepted where the confidence is 0.5 or more, and where it is less.
    "sure": Kind(CONFIDENCE, partial(_accepted, range(BINS // 2, BINS))),
    "unsure": Kind(CONFIDENCE, partial(_accepted, range(BINS // 2))),
    # The mean distance of confidence and acceptance over ten bins.
    "calibration error": Kind(CONFIDENCE, _calibration),
}
HOLDS, FAILS, OPEN, ABSENT = "holds", "does not hold", "undecided", "not measured"


class CellKey(NamedTuple):
    """A drafter on a set of questions, and how it is measured there."""

    drafter: str
    asked: str
    temperature: float
    batch: int
    how: str

    @classmethod
    def of(cls, figure: Figure, name: str) -> "CellKey":
        """The cell that a figure needs of a set; `mt_bench/coding` is a category of `mt_bench`."""
        how = KINDS[figure.kind].how
        return cls(figure.drafter, name.partition("/")[0], figure.temperature, figure.batch, how)


class Cell(Part):
    """What was measured of one drafter along one set of questions."""

    drafter: str
    asked: str  # the set's name
    temperature: float
    batch: int
    how: str  # it was measured, as its kinds of figures are
    columns: list[str]  # what is counted of each question
    questions: dict[str, list[float]]

    @property
    def key(self) -> CellKey:
        return CellKey(self.drafter, self.asked, self.temperature, self.batch, self.how)


def _rounded(figures: Float[Tensor, " draws"], freedom: int) -> tuple[float | None, Interval | None]:
    """The first figure and the interval of the others, to four digits. None where it, or one of them, is a
    share of nothing."""
    value = round(float(figures[0]), 4) if figures[0].isfinite() else None
    if not figures.isfinite().all():
        return value, None
    low, high = interval(figures[1:], freedom)
    return value, (round(low, 4), round(high, 4))


class Measurements:
    """Cells, and what figures and claims they make. `categories`: of the questions, by set and name."""

    def __init__(self, cells: Mapping[CellKey, Cell], categories: Mapping[str, Mapping[str, str]]) -> None:
        self._cells, self._categories = cells, categories

    def value(self, figure: Figure) -> tuple[float | None, Interval | None]:
        """The figure and its interval over questions; None where it was not measured."""
        draws = self._draws(figure, figure)
        return (None, None) if draws is None else _rounded(*draws)

    def verdict(self, claim: Claim) -> tuple[str, float | None, Interval | None]:
        """Whether the claim holds, and by how much the left figure exceeds what it is compared with.
        Intervals over questions decide."""
        left, right = self._draws(claim.left, claim.right), self._draws(claim.right, claim.left)
        if left is None or right is None:
            return ABSENT, None, None
        value, bounds = _rounded(left[0] - claim.times * right[0], min(left[1], right[1]))
        if bounds is None:
            return OPEN, value, None
        low, high = bounds
        if claim.within is None:
            holds, fails = low > 0, high < 0
        else:
            holds, fails = max(-low, high) <= claim.within, max(low, -high) > claim.within
        return (HOLDS if holds else FAILS if fails else OPEN), value, bounds

    def questions(self, figure: Figure) -> int:
        """The number of questions in the smallest of the figure's sets."""
        return min(len(self._rows(figure, name)) for name in figure.sets)

    def _draws(self, figure: Figure, compared: Figure) -> tuple[Float[Tensor, " draws"], int] | None:
        """The figure of all questions, behind it those of questions drawn anew, which are NaN where a set has
        one question only, and the freedom of their `interval`; None where a set was not measured. Of a set
        that it shares with the figure that it is compared with, the questions of both count."""
        parts, freedom = [], 0
        for name in figure.sets:
            groups = self._groups(figure, compared if name in compared.sets else figure, name)
            if not groups:
                return None
            parts.append(KINDS[figure.kind].formula(self._sums(figure, name, groups)))
            freedom += len(groups) - 1
        return torch.stack(parts).mean(0), freedom

    def _rows(self, figure: Figure, name: str) -> dict[str, list[float]]:
        """What was counted of each question of a set."""
        cell, (whole, _, category) = self._cells.get(CellKey.of(figure, name)), name.partition("/")
        if cell is None:
            return {}
        categories = self._categories[whole] if category else {}
        return {q: row for q, row in cell.questions.items() if not category or categories[q] == category}

    def _groups(self, figure: Figure, other: Figure, name: str) -> list[list[str]]:
        """The questions of both figures. Those that were answered at once share their time: they are one."""
        both = self._rows(figure, name).keys() & self._rows(other, name).keys()
        wide = max(figure, other, key=lambda figure: figure.batch)
        groups: dict[int, list[str]] = {}
        for i, question in enumerate(self._cells[CellKey.of(wide, name)].questions if both else ()):
            if question in both:
                groups.setdefault(i // wide.batch, []).append(question)
        return [*groups.values()]

    def _sums(self, figure: Figure, name: str, groups: Sequence[Sequence[str]]) -> Sums:
        """Sums over the groups, and over groups drawn anew: the same for all figures of the same groups."""
        rows = self._rows(figure, name)
        by_group = ([rows[question] for question in group] for group in groups)
        counts = torch.stack([torch.tensor(row, dtype=torch.float64).sum(0) for row in by_group])
        n, generator = len(counts), torch.Generator().manual_seed(crc32(name.encode()))
        drawn = torch.full((SAMPLES, counts.shape[1]), torch.nan, dtype=torch.float64)
        if n > 1:  # n − 1 of them are drawn, as `paired` explains
            drawn = counts[torch.randint(n, (SAMPLES, n - 1), generator=generator)].sum(1)
        sums = torch.cat([counts.sum(0, keepdim=True), drawn])
        return dict(zip(self._cells[CellKey.of(figure, name)].columns, sums.T, strict=True))
