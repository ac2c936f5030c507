"""Is `auto` ever slower than plain decoding, or than one of its own trees, always grown?

    python benchmarks/policy.py smollm2 --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/policy.json

A cell is a precision, passes that are compiled or not, a number of texts, of tokens before them, and a
temperature. `--texts` are decoded in each, in groups that share rounds. In every group plain decoding, auto
and the quickest of auto's trees, always grown, make the same number of tokens, in turns of a few rounds. A
first lap over all trees, in a engine of its own, says which tree. A ratio is that of the seconds for all
tokens, with the 95 % of the bootstrap over stretches of them, the same for both arms. Prompts are read once
for all arms and temperatures, whose first token is the likeliest; what a head has yet to read of them is in
its arm's time. The result is written after every cell, and cells that it holds are not made again. Those in
which auto may be slower than plain decoding or the best arm are made again if more texts are asked for:

    python benchmarks/policy.py … --texts 24 --json benchmarks/results/policy.json
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from math import ceil
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer

from common import Turn, cells_in, prompts_by_file, ratio, run, texts_behind
from slipstream.cli import common as cli
from slipstream.core.drafter import Drafter, State
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.costs import keep, policy
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request
from slipstream.files import check_writable
from slipstream.machine import hardware
from slipstream.progress import bars
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget, load_target

TURN = 8  # rounds
ENOUGH = 0.95  # of plain decoding's speed, with 95 % of certainty, and of the best arm's
NEW, STRETCH = 96, 8  # tokens of a text that are made, and that are resampled together
ROOM = 600  # tokens behind the prompts
AXES = ("precision", "compiled", "context", "batch", "temperature")


class Cell(Part):
    """What was measured at one place of the axes.

    Attributes:
        stretches: that ratios are resampled over.
        tokens_per_second: of plain decoding, of auto, and of the tree that is always grown.
        over_plain: auto's speed over plain decoding's, and the ends of its 95 %.
        over_best: the same over the best other arm's.
    """

    precision: str
    compiled: bool
    context: int
    batch: int
    temperature: float
    stretches: int
    tokens_per_second: dict[str, float]
    over_plain: list[float]
    best: str
    over_best: list[float]

    @property
    def place(self) -> tuple[Any, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def texts(self) -> int:
        """Texts that each arm decoded."""
        return self.stretches * self.batch * STRETCH // NEW

    @property
    def enough(self) -> bool:
        """Whether auto is surely no slower than plain decoding, and about as fast as the best arm."""
        return self.over_plain[1] >= ENOUGH and self.over_best[0] >= ENOUGH


class PolicyReport(Report):
    """Cells of several precisions, which are named in each."""

    dtype: str = ""
    cells: list[Cell]

    @property
    def by_passes(self) -> dict[str, list[Cell]]:
        """Cells by precision, and whether passes were compiled."""
        made: dict[str, list[Cell]] = {}
        for cell in self.cells:
            made.setdefault(f"{cell.precision}, {'' if cell.compiled else 'not '}compiled", []).append(cell)
        return made

    def __rich__(self) -> Figures:
        columns = ("context", "texts", "T", "plain", "auto", "over plain", "95 %", "best", "over best")
        made = Figures("tokens/s", "passes", *columns)
        for passes, cells in self.by_passes.items():
            for cell in cells:
                over, low, high = cell.over_plain
                place = (cell.context, cell.batch, f"{cell.temperature:g}")
                speeds = (f"{cell.tokens_per_second[arm]:.1f}" for arm in ("plain", "auto"))
                ratios = (f"{over:.2f}", f"{low:.2f} to {high:.2f}", cell.best, f"{cell.over_best[0]:.2f}")
                made.add_row(passes, *place, *speeds, *ratios)
        return made


@dataclass
class Arm:
    """Texts under way in one manner; `spec`: a tree that is always grown. `made`, `spent`: tokens over all
    texts and seconds, after each round."""

    engine: Engine
    spec: TreeSpec | None = None
    made: list[int] = field(default_factory=lambda: [0])
    spent: list[float] = field(default_factory=lambda: [0.0])

    def turn(self, rounds: int = TURN) -> None:
        """Some rounds."""
        for _ in range(rounds):
            began = perf_counter()
            made = self.engine.step(spec=self.spec)
            self.spent.append(self.spent[-1] + perf_counter() - began)
            self.made.append(self.made[-1] + sum(len(request.committed) for request in made))

    def stretches(self, texts: int) -> list[Turn]:
        """Tokens and seconds of each stretch, a round's seconds spread evenly over its tokens."""
        ends = np.arange(0, NEW + 1, STRETCH) * texts
        return [(STRETCH * texts, each) for each in np.diff(np.interp(ends, self.made, self.spent)).tolist()]


def read(target: HFTarget, drafter: Drafter, prompts: list[list[int]]) -> Engine:
    """An engine that has read the prompts, to be forked."""
    capacity = max(map(len, prompts)) + ROOM
    engine = Engine(target, drafter, rows=len(prompts), capacity=capacity, specs=drafter.candidate_trees)
    engine.admit(*map(Request, prompts))
    engine.span = None
    return engine


@torch.inference_mode()
def forked(engine: Engine, prompts: list[list[int]], temperature: float, drafter: Drafter | None) -> Engine:
    """A copy with caches of its own, of which `drafter` goes on; None: plain decoding."""
    target, own = engine.target, engine.drafter
    made: Engine = deepcopy(engine, {id(target): target, id(own): drafter or own})
    sampling = [Sampling(temperature, seed=i) for i in range(len(prompts))]
    made.sampler = Sampler(sampling, prompts, target.vocab, target.device)
    if drafter is None:
        made.drafter, made.state = Vanilla(), State(made.state.root)
    return made


def cell(
    target: HFTarget, groups: Sequence[tuple[Engine, list[list[int]]]], temperature: float
) -> dict[str, Any]:
    """Tokens per second of every arm, and auto's speed over plain decoding's and over the best arm's."""
    auto = load_drafter("auto", target, temperature)
    fixed, spent = quickest(auto, *groups[0], temperature), defaultdict[str, list[Turn]](list)
    for engine, prompts in groups:
        arms = {
            "plain": Arm(forked(engine, prompts, temperature, None)),
            "auto": Arm(forked(engine, prompts, temperature, auto)),
            fixed.name: Arm(forked(engine, prompts, temperature, auto), fixed),
        }
        arms["auto"].engine.policy = policy(target, auto, len(prompts))
        while behind := [arm for arm in arms.values() if arm.made[-1] < NEW * len(prompts)]:
            for arm in behind:
                arm.turn()
        for name, arm in arms.items():
            spent[name] += arm.stretches(len(prompts))
    keep(target, auto)  # as `generate` does
    speeds = {name: sum(n for n, _ in some) / sum(s for _, s in some) for name, some in spent.items()}
    best = max((name for name in speeds if name != "auto"), key=lambda name: speeds[name])
    return {
        "stretches": len(spent["auto"]),
        "tokens_per_second": {name: round(speed, 2) for name, speed in speeds.items()},
        "over_plain": ratio(spent["auto"], spent["plain"]),
        "best": best,
        "over_best": ratio(spent["auto"], spent[best]),
    }


def quickest(auto: Drafter, engine: Engine, prompts: list[list[int]], temperature: float) -> TreeSpec:
    """The tree that decodes most tokens a second in one turn."""
    trial, speeds = forked(engine, prompts, temperature, auto), dict[TreeSpec, float]()
    for spec in auto.candidate_trees:
        Arm(trial, spec).turn(1)  # makes graphs, and reads what there is to read
        arm = Arm(trial, spec)
        arm.turn()
        speeds[spec] = arm.made[-1] / arm.spent[-1]
    return max(auto.candidate_trees[1:], key=lambda spec: speeds[spec])


def loaded(target: str, precision: str, compiled: bool) -> HFTarget:
    """The target, ready to decode. "int8" and "int4" are bfloat16 with such weights."""
    quantized = precision if precision.startswith("int") else None
    made = load_target(target, "bfloat16" if quantized else precision, compile=compiled, quantize=quantized)
    made.warm_up()
    return made


def main(
    target: Annotated[str, typer.Argument()],
    questions: Annotated[list[str], cli.option("JSONL file", "FILE")],
    json: Annotated[str, cli.option("the result", "FILE")],
    precision: Annotated[list[str], cli.option("repeat it", "NAME")] = ["bfloat16", "float32", "int8"],  # noqa: B006
    passes: Annotated[list[str], cli.option("compiled or eager", "NAME")] = ["compiled", "eager"],  # noqa: B006
    batch: Annotated[list[int], cli.option("texts; repeat it", "N")] = [1, 2, 4, 8],  # noqa: B006
    context: Annotated[list[int], cli.option("tokens; repeat it", "N")] = [64, 512, 2048],  # noqa: B006
    temperature: Annotated[list[float], cli.option("repeat it", "T")] = [0.0, 1.0],  # noqa: B006
    texts: Annotated[int, cli.option("of a cell", "N")] = 8,
) -> None:
    """Decode, compare, print."""
    check_writable(json, reads=questions)
    cells = {cell.place: cell for cell in cells_in(json, PolicyReport)}
    made = {place for place, cell in cells.items() if cell.enough or cell.texts >= texts}
    with bars(cli.err) as shown:
        task = shown.add_task(
            "cells", total=len(precision) * len(passes) * len(context) * len(batch), note=""
        )
        for kind, how in product(precision, passes):
            wanted = [
                (n, rows, [T for T in temperature if (kind, how == "compiled", n, rows, T) not in made])
                for n, rows in product(context, batch)
            ]
            if not any(heats for _, _, heats in wanted):
                shown.advance(task, len(wanted))
                continue
            cells_in(json, PolicyReport, hardware=hardware())  # cells of two machines are no result,
            model = loaded(target, kind, how == "compiled")
            cells_in(json, PolicyReport, target=model.name)  # nor are those of two targets
            by_file = prompts_by_file(model, questions, ceil(texts / len(questions)))
            asked = [prompt for some in by_file.values() for prompt in some]
            for n, rows, heats in wanted:
                shown.update(task, note=f"{kind}, {how}, {n} tokens, {rows} texts")
                lines = texts_behind(asked, max(texts, rows), n) if heats else []
                parts = [lines[i : i + rows] for i in range(0, len(lines), rows)]
                groups = [(read(model, load_drafter("auto", model), some), some) for some in parts]
                for T in heats:
                    place: dict[str, Any] = dict(
                        zip(AXES, (kind, how == "compiled", n, rows, T), strict=True)
                    )
                    cells[tuple(place.values())] = Cell(**place, **cell(model, groups, T))
                    axes = ("dtype", "compiled")
                    about = {name: each for name, each in heading(model).items() if name not in axes}
                    PolicyReport(**about, cells=[*cells.values()]).write(json)
                shown.advance(task)
    cli.out.print(PolicyReport.read(json))


if __name__ == "__main__":
    run(main)
