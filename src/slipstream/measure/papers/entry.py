"""What a table or a figure of a paper compares, as figures that are measured here."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

BASELINES = VANILLA, HF = "vanilla", "hf_generate"
MEDUSA, SMALL = "medusa:tree=best-first-3x16", "draft-model:tree=chain-5"  # beside several papers' heads


@dataclass(frozen=True)
class Figure:
    """What is measured: one kind of figure of a drafter.

    Attributes:
        drafter: as `load_drafter` takes it. Its name may stand for a directory that the user names.
        sets: of questions, whose figures are averaged.
        kind: a name in `KINDS` of measurements.py.
        batch: questions that are answered at once.
    """

    drafter: str
    sets: tuple[str, ...]
    kind: str = "τ"
    temperature: float = 0.0
    batch: int = 1

    @property
    def head(self) -> str:
        """The name of the drafter, without its options."""
        return self.drafter.partition(":")[0]


@dataclass(frozen=True)
class Line:
    """A cell of a table: ours, and the paper's where it gives one."""

    row: str
    column: str
    figure: Figure
    paper: float | None = None


@dataclass(frozen=True)
class Claim:
    """A relation that the paper's figures show: the left figure exceeds the right one.

    Attributes:
        within: the figures differ by no more than that, instead.
        times: the left figure is so many times the right one, or more.
    """

    text: str
    left: Figure
    right: Figure
    within: float | None = None
    times: float = 1.0


class Entry:
    """A table or a figure of a paper.

    Args:
        shows: what it is about.
        parts: lines, which are measured, and claims, which must follow.
        model: whose figures are quoted from the paper.
        note: what differs here from the paper.
        experts: whether it is of a mixture of experts, and is left empty for another target.
    """

    def __init__(
        self,
        shows: str,
        *parts: Line | Claim,
        model: str = "Vicuna 7B",
        note: str = "",
        experts: bool = False,
    ) -> None:
        self.shows, self.model, self.note, self.experts = shows, model, note, experts
        self.lines = [part for part in parts if isinstance(part, Line)]
        self.claims = [part for part in parts if isinstance(part, Claim)]

    def without_parts(self) -> "Entry":
        return Entry(self.shows, model=self.model, note=self.note, experts=self.experts)

    @property
    def figures(self) -> list[Figure]:
        """All that is measured."""
        compared = [side for claim in self.claims for side in (claim.left, claim.right)]
        return list(dict.fromkeys([*(line.figure for line in self.lines), *compared]))


def figure(kind: str, drafter: str, *sets: str, T: float = 0.0, batch: int = 1) -> Figure:
    """A figure, by default on MT-bench. At T > 0 a drafter draws its children, as Algorithm 1 verifies them
    (EAGLE, appendix A.2), unless it names another proposal."""
    if T and drafter not in BASELINES and "proposal=" not in drafter:
        drafter += ",proposal=sampled"
    return Figure(drafter, sets or ("mt_bench",), kind, T, batch)


tau, speed = partial(figure, "τ"), partial(figure, "× plain")


def compare(
    text: str,
    kind: str,
    left: str,
    right: str,
    *sets: str,
    T: float = 0.0,
    batch: int = 1,
    within: float | None = None,
    times: float = 1.0,
) -> Claim:
    """A claim that compares two drafters in the same kind of figure."""
    ours, theirs = (figure(kind, drafter, *sets, T=T, batch=batch) for drafter in (left, right))
    return Claim(text, ours, theirs, within, times)


def line(row: str, drafter: str, kind: str, paper: float | None = None, *sets: str, T: float = 0.0) -> Line:
    """A cell in the column of its kind."""
    return Line(row, f"{kind}, T = {T:g}" if T else kind, figure(kind, drafter, *sets, T=T), paper)


def by_set(
    row: str, drafter: str, kind: str, sets: Sequence[str], paper: Sequence[float] = (), T: float = 0.0
) -> list[Line]:
    """A row with a column for each set."""
    suffix = f", T = {T:g}" if T else ""
    return [
        Line(row, f"{name} {kind}{suffix}", figure(kind, drafter, name, T=T), value)
        for name, value in zip_longest(sets, paper)
    ]


def by_batch(row: str, drafter: str, paper: dict[int, float | None]) -> tuple[Line, ...]:
    """A row of speeds with a column for each number of texts at once."""
    return tuple(Line(row, f"batch {n}", speed(drafter, batch=n), value) for n, value in paper.items())


def n_alpha(
    row: str, chain: str, paper: Sequence[float | None] = (None,) * 5, name: str = "mt_bench", T: float = 0.0
) -> list[Line]:
    """The n-α of a chain of five, for n = 0 … 4."""
    return [line(row, chain, f"{n}-α", paper[n], name, T=T) for n in range(5)]


def alike(head: str) -> str:
    """A note for what compares heads that were trained in several ways."""
    return f"Train {head} as the others (recipes/equal_data.yaml), and name it: --head {head}=runs/{head}."
