"""Passes and plain decoding of one target in bf16, int8 and int4, in one alternating race.

    python benchmarks/precisions.py smollm2 --json benchmarks/results/precisions_zen4.json

Every lap times a pass of each number of rows, and 48 tokens of plain decoding, of every precision in turn,
each lap another one first. A ratio to bf16 is the median over laps, beside the bootstrap's 95 % of it.
"""

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from common import between, drawn_of, run
from slipstream.cli import common as cli
from slipstream.core.tree import chain
from slipstream.engine.generate import generate
from slipstream.files import check_writable
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget, load_target
from slipstream.targets.quantized import KINDS

ROWS = (1, 8, 16, 32)
NEW = 48
WARM = 3  # laps before that do not count: they compile
BF16 = "bf16"
Ratio = tuple[float, float, float]  # the median of pairs, and the ends of its 95 %


class Precision(Part):
    """One precision beside bf16.

    Attributes:
        weights: the bytes that a pass reads, over bf16's.
        tokens_per_second: of plain decoding, the median.
        plain: its speed, over bf16's.
        passes_ms: the median pass, by rows.
        passes: its time, over bf16's.
    """

    precision: str
    weights: float
    tokens_per_second: float
    plain: Ratio
    passes_ms: dict[int, float]
    passes: dict[int, Ratio]


class PrecisionsReport(Report):
    """What `precisions` found."""

    context: int
    laps: int
    precisions: list[Precision]

    def __rich__(self) -> Figures:
        rows = self.precisions[0].passes_ms
        title = f"{self.target}, compiled: behind {self.context} tokens, over bf16 [95 %]"
        table = Figures(title, "precision", "weights", "plain tok/s", *(f"{n} rows, ms" for n in rows))
        for each in self.precisions:
            passes = (f"{ms:.1f}  {_said(each.passes[n])}" for n, ms in each.passes_ms.items())
            plain = f"{each.tokens_per_second:.1f}  {_said(each.plain)}"
            table.add_row(each.precision, f"{each.weights:.2f}", plain, *passes)
        return table


def _said(ratio: Ratio) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*ratio)


def over(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The median of pairs' ratios, and the ends of the bootstrap's 95 % of it."""
    a, b = (torch.tensor(some, dtype=torch.float64) for some in (ours, theirs))
    low, high = between((a / b)[drawn_of(len(a))].median(-1).values, len(a))
    return round(float((a / b).median()), 3), round(float(low), 3), round(float(high), 3)


class Racer:
    """A target, and the seconds that its passes and texts took."""

    def __init__(self, target: HFTarget, context: int) -> None:
        self.target, self.context = target, context
        self.passes: dict[int, list[float]] = {rows: [] for rows in ROWS}
        self.texts: list[float] = []
        self.tokens = torch.arange(context + max(ROWS))[None] % target.vocab
        self.cache = target.new_cache(1)
        target(chain(self.tokens[:, :context]), self.cache, rows=self.tokens[:, :0])
        self.cache.keep(None, torch.tensor([context]))

    def run(self, rows: int) -> None:
        """A pass."""
        tree = chain(self.tokens[:, self.context : self.context + rows])
        began = perf_counter()
        self.target(tree, self.cache)
        self.passes[rows].append(perf_counter() - began)

    def write(self) -> None:
        """A text, behind a prompt of one token."""
        how: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0, "eos_token_ids": ()}
        began = perf_counter()
        generate(self.target, [1], "vanilla", **how)
        self.texts.append(perf_counter() - began)


@torch.inference_mode()
def race(racers: Sequence[Racer], laps: int) -> None:
    """Time all of them."""
    for lap in range(WARM + laps):
        if lap == WARM:
            for racer in racers:
                for times in (racer.texts, *racer.passes.values()):
                    times.clear()
        turn = lap % len(racers)
        order = [*racers[turn:], *racers[:turn]]
        for rows in ROWS:
            for racer in order:
                racer.run(rows)
        for racer in order:
            racer.write()


def main(
    target: Annotated[str, typer.Argument()],
    context: Annotated[int, cli.option("tokens before", "N", min=1)] = 512,
    laps: Annotated[int, cli.option("of the race", "N", min=5)] = 25,
    json_path: cli.JsonPath = None,
) -> None:
    check_writable(json_path)
    kinds = {BF16: None, **{kind: kind for kind in KINDS}}
    racers = {
        name: Racer(load_target(target, "bfloat16", "cpu", compile=True, quantize=kind), context)
        for name, kind in kinds.items()
    }
    race([*racers.values()], laps)
    base, made = racers[BF16], []
    for name, racer in racers.items():
        made.append(
            Precision(
                precision=name,
                weights=round(racer.target.read_bytes / base.target.read_bytes, 3),
                tokens_per_second=round(NEW / median(racer.texts), 1),
                plain=over(base.texts, racer.texts),
                passes_ms={rows: round(1e3 * median(times), 3) for rows, times in racer.passes.items()},
                passes={rows: over(times, base.passes[rows]) for rows, times in racer.passes.items()},
            )
        )
    report = PrecisionsReport(**heading(base.target), context=context, laps=laps, precisions=made)
    cli.deliver(report, json_path)


if __name__ == "__main__":
    run(main)
