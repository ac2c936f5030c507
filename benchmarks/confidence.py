r"""How often a drafted token is accepted, by the drafter's own confidence in it (GLIDE with a CAPE §4.2, Fig.
1b).

    python benchmarks/confidence.py eagle fasteagle --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/confidence.json --plot docs/confidence.svg

Drafts start at every position of the target's own greedy answers and follow them: each drafted token is
judged where all before it were right. The calibration error is the mean distance of confidence and acceptance
over bins, by their size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from common import Plot, run
from slipstream.cli import common as cli
from slipstream.drafters import load_drafter
from slipstream.drafters.proposer import Proposer
from slipstream.engine.replay import record
from slipstream.files import check_writable
from slipstream.measure.confidence import by_confidence
from slipstream.measure.datasets import Questions, load_questions
from slipstream.measure.runner import first_prompts
from slipstream.plotting import picture
from slipstream.provenance import public
from slipstream.results import Figures, Part, Report, flat, heading
from slipstream.targets import HFTarget, RecordedTarget

RANKS = (1, 3, 5, 7)  # CAPE takes 1, 3, 5 or 7 candidates
FIGURES = ("confidence", *(f"top_{k}" for k in RANKS))  # of a bin, as means
UNIT: dict[str, Any] = {"xlim": (0, 1), "ylim": (0, 1)}


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

    def draw(self, axes: Any, k: int, label: str) -> None:
        """How often the right token is among the first k candidates, by confidence."""
        hits = [getattr(part, f"top_{k}") for part in self.bins]
        axes.plot([part.confidence for part in self.bins], hits, label=label, marker="o", markersize=3)


class ConfidenceReport(Report):
    """What `calibrate` found. `limit`: questions of each file."""

    max_new_tokens: int
    questions: list[str]
    limit: int | None
    drafters: dict[str, Calibration]

    def __rich__(self) -> Figures:
        table = Figures(None, "drafter", "tokens", *FIGURES, "calibration error")
        for name, row in self.drafters.items():
            means = (f"{row.mean(figure):.3f}" for figure in FIGURES)
            table.add_row(name, row.tokens, *means, f"{row.calibration_error:.3f}")
        return table

    def _rows(self) -> list[dict[str, Any]]:
        return [{"drafter": name} | flat(part) for name, row in self.drafters.items() for part in row.bins]

    def plot(self, path: str | None = None) -> Any:
        """Acceptance by confidence, of every drafter, and the first one's candidates: a matplotlib Figure,
        which a notebook shows and `path` (.svg or .png) keeps. Raises ValueError where it cannot be
        written."""
        with picture(path, 2) as (left, right):
            left.plot([0, 1], [0, 1], color="0.8", linewidth=1)
            for name, row in self.drafters.items():
                row.draw(left, 1, f"{name} (error {row.calibration_error:.3f})")
            left.set(xlabel="confidence", ylabel="accepted", title="Accepted, by confidence", **UNIT)
            name, row = next(iter(self.drafters.items()))
            for k in RANKS:
                row.draw(right, k, f"among the first {k}")
            right.set(xlabel="confidence", title=f"The right token among the candidates ({name})", **UNIT)
            for axes in (left, right):
                axes.legend(frameon=False, fontsize=8)
        return left.figure


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
    sums, bins = by_confidence(drafter, recorded, depth, RANKS).sum(0), list[Bin]()
    for tokens, *values in sums[sums[:, 0] > 0].tolist():
        means = (round(value / tokens, 4) for value in values)
        bins.append(Bin(tokens=int(tokens), **dict(zip(FIGURES, means, strict=True))))
    tokens = sum(part.tokens for part in bins)
    error = sum(part.tokens * abs(part.confidence - part.top_1) for part in bins) / tokens
    return Calibration(tokens=tokens, depth=depth, calibration_error=round(error, 4), bins=bins)


def main(
    drafters: Annotated[list[str], typer.Argument(help="as in `slipstream bench`")],
    target: cli.TargetName = "smollm2",
    questions: cli.Files = [],  # noqa: B006
    limit: cli.Limit = 10,
    max_new_tokens: cli.MaxNewTokens = 128,
    dtype: cli.Dtype = "float32",
    depth: Annotated[int, cli.option("tokens drafted ahead, where the drafter can", "N", min=1)] = 3,
    json_path: cli.JsonPath = None,
    plot: Plot = None,
) -> None:
    check_writable(json_path, plot, reads=cli.inputs(target, drafters, questions))
    loaded = cli.load(target, dtype, "cpu")
    named: dict[str, Proposer] = {}
    for name in drafters:
        if not isinstance(drafter := load_drafter(name, loaded), Proposer):
            raise ValueError(f"drafter {name} has no confidence: give a trained one")
        named[Path(name).name] = drafter
    how: dict[str, Any] = {"depth": depth, "limit": limit, "max_new_tokens": max_new_tokens}
    report = calibrate(loaded, named, questions, **how)
    cli.deliver(report, json_path)
    if plot is not None:
        report.plot(plot)


if __name__ == "__main__":
    run(main)
