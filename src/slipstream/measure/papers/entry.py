"""What a table or a figure of a paper compares, as figures that are measured here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREDICTED = {  # along the target's recorded answers
    "τ": "tokens a target pass",
    "α": "share accepted of the guesses of a chain that were judged",
    **{f"{n}-α": f"share accepted of a chain's guesses behind {n} accepted ones" for n in range(5)},
}
TIMED = {  # in a race of `bench`
    "× plain": "speed over plain decoding's",
    "× HF": "speed over Hugging Face generate's",
    "tokens/s": "tokens a second",
    "draft ms": "milliseconds of drafting a round",
    "c": "one draft step over a plain pass",
    "E": "speed over plain decoding's if a pass cost the same for any rows: τ / (γc + 1)",
}
JUDGED = {  # of the guesses behind right ones, by the drafter's own confidence
    "sure": "share accepted where the confidence is 0.5 or more",
    "unsure": "share accepted where it is less",
    "calibration error": "mean distance of confidence and acceptance over ten bins",
}
PREDICTION, RACE, CONFIDENCE = "prediction", "race", "confidence"  # how figures are measured
VANILLA, HF = "vanilla", "hf_generate"


@dataclass(frozen=True)
class Figure:
    """What is measured: one kind of figure of a drafter.

    Attributes:
        drafter: as `load_drafter` takes it. Its name may stand for a directory that the user names.
        sets: of questions, whose figures are averaged.
        kind: of `PREDICTED`, `TIMED` or `JUDGED`.
        batch: questions that are answered at once.
    """

    drafter: str
    sets: tuple[str, ...]
    kind: str = "τ"
    temperature: float = 0.0
    batch: int = 1

    @property
    def how(self) -> str:
        """How it is measured."""
        return RACE if self.kind in TIMED else CONFIDENCE if self.kind in JUDGED else PREDICTION

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
        within: it is no further from the right one than that, instead.
        times: it is so many times the right one, or more.
    """

    text: str
    left: Figure
    right: Figure
    within: float | None = None
    times: float = 1.0


@dataclass(frozen=True)
class Entry:
    """A table or a figure of a paper.

    Attributes:
        name: for `reproduce`.
        shows: what it is about.
        model: whose figures are quoted from the paper.
        lines, claims: what is measured, and what must follow.
        note: what stands otherwise here.
        experts: whether it is of a mixture of experts, and says nothing of another target.
    """

    name: str
    shows: str
    model: str
    lines: tuple[Line, ...] = ()
    claims: tuple[Claim, ...] = ()
    note: str = ""
    experts: bool = False

    @property
    def figures(self) -> list[Figure]:
        """All that is measured."""
        compared = [side for claim in self.claims for side in (claim.left, claim.right)]
        return list(dict.fromkeys([*(line.figure for line in self.lines), *compared]))


def alike(head: str) -> str:
    """A note for what compares heads that were trained in several ways."""
    return f"Train {head} as the others (recipes/equal_data.yaml), and name it: --head {head}=runs/{head}."


def drawn(drafter: str, temperature: float) -> str:
    """At T > 0 a drafter draws its children, as Algorithm 1 verifies them (EAGLE, appendix A.2), unless it
    names another proposal."""
    return f"{drafter},proposal=sampled" if temperature and "proposal=" not in drafter else drafter


def by_set(
    rows: Mapping[str, str],
    sets: Sequence[str],
    kind: str,
    paper: Mapping[str, Sequence[float]],
    temperature: float = 0.0,
) -> tuple[Line, ...]:
    """A row a drafter and a column a set. `paper`: its figures, by row."""
    at = f", T = {temperature:g}" if temperature else ""
    return tuple(
        Line(
            row,
            f"{name} {kind}{at}",
            Figure(drawn(drafter, temperature), (name,), kind, temperature),
            paper[row][i] if row in paper else None,
        )
        for row, drafter in rows.items()
        for i, name in enumerate(sets)
    )


def n_alpha(
    row: str, chain: str, name: str, paper: Sequence[float | None], temperature: float = 0.0
) -> list[Line]:
    """n-α of a chain of five, for n = 0 … 4."""
    at, chain = f", T = {temperature:g}" if temperature else "", drawn(chain, temperature)
    return [
        Line(row, f"{n}-α{at}", Figure(chain, (name,), f"{n}-α", temperature), paper[n]) for n in range(5)
    ]


def over(text: str, left: Figure, right: Figure, times: float = 1.0) -> Claim:
    """The left figure exceeds the right one."""
    return Claim(text, left, right, times=times)


def near(text: str, left: Figure, right: Figure, within: float) -> Claim:
    """The figures lie within this distance."""
    return Claim(text, left, right, within)
