"""Is `auto` ever slower than plain decoding, or than one of its own trees, always grown?

    python benchmarks/policy.py smollm2 --questions mt_bench.jsonl --questions gsm8k.jsonl --compile \
        --batch 1 --batch 8 --context 64 --context 2048 --json benchmarks/results/policy_bfloat16.json

A cell is a number of texts, of tokens before them, and a temperature. In each, plain decoding, auto and every
tree that auto chooses among decode the same texts in turn, a few rounds each, again and again. Speeds are
compared turn by turn; the interval is over turns. The result is written after every cell.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from common import prompts_by_file, run
from slipstream.cli import common as cli
from slipstream.core.sampling import Sampling
from slipstream.core.shape import Shape
from slipstream.decode.costs import keep, policy
from slipstream.decode.session import Session
from slipstream.drafters import load_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.files import check_writable, write_json
from slipstream.measure.paired import SAMPLES, interval
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget, load_target

TURN = 8  # rounds
Turn = tuple[int, float]  # tokens and seconds


def sessions(
    target: HFTarget, prompts: list[list[int]], temperature: float, trees: bool
) -> Iterator[tuple[str, Session, Shape | None]]:
    """Plain decoding, auto, and each of its trees alone, under way behind the prompts."""
    auto = load_drafter("auto", target, temperature)
    arms: list[tuple[str, Any, Shape | None]] = [("plain", Vanilla(), None), ("auto", auto, None)]
    arms += [(shape.name, auto, shape) for shape in auto.rungs[1:] if trees]
    for name, drafter, shape in arms:
        rows = len(prompts)
        chooses = policy(target, auto, rows) if name == "auto" else None
        capacity, shapes = max(map(len, prompts)) + 600, [shape] if shape else []
        session = Session(target, drafter, rows=rows, capacity=capacity, shapes=shapes, policy=chooses)
        session.admit(prompts, [Sampling(temperature, seed=i) for i in range(rows)])
        yield name, session, shape


def cell(
    target: HFTarget, prompts: list[list[int]], temperature: float, turns: int, trees: bool
) -> dict[str, Any]:
    """Tokens per second of every arm, and auto's speed over plain decoding's and over the best arm's."""
    arms = list(sessions(target, prompts, temperature, trees))
    spent: dict[str, list[Turn]] = {name: [] for name, _, _ in arms}
    for turn in range(1 + turns):
        for name, session, shape in arms:
            began = perf_counter()
            made = [each for _ in range(TURN) for each in session.step(shape=shape)]
            if turn:  # the first one warms up
                spent[name].append((sum(len(each.tokens) for each in made), perf_counter() - began))
    keep(target, arms[1][1].drafter)  # as `generate` does
    speeds = {name: sum(n for n, _ in some) / sum(s for _, s in some) for name, some in spent.items()}
    best = max((name for name in speeds if name != "auto"), key=lambda name: speeds[name])
    return {
        "tokens_per_second": {name: round(speed, 2) for name, speed in speeds.items()},
        "over_plain": ratio(spent["auto"], spent["plain"]),
        "best": best,
        "over_best": ratio(spent["auto"], spent[best]),
    }


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> list[float]:
    """The ratio of two speeds, and the ends of the bootstrap's 95 % of it over turns."""
    a, b = (torch.tensor(some, dtype=torch.float64) for some in (ours, theirs))
    drawn = torch.randint(len(a), (SAMPLES, len(a)), generator=torch.Generator().manual_seed(0))
    ratios = [x.sum(-2)[..., 0] / x.sum(-2)[..., 1] for x in (a, b, a[drawn], b[drawn])]
    low, high = interval(ratios[2] / ratios[3])
    return [round(float(each), 3) for each in (ratios[0] / ratios[1], low, high)]


def texts(prompts: list[list[int]], batch: int, context: int) -> list[list[int]]:
    """`batch` prompts of `context` tokens each: a question behind as much of the others as is needed."""
    lines = []
    for i in range(batch):
        others = [token for other in prompts[i + 1 :] + prompts[:i] for token in other]
        filler = (others * (1 + context // len(others)))[-context:]
        lines.append([*filler, *prompts[i % len(prompts)]][-context:])
    return lines


def main(
    target: Annotated[str, typer.Argument()],
    questions: Annotated[list[str], cli.option("JSONL file", "FILE")],
    json: Annotated[str, cli.option("the result", "FILE")],
    batch: Annotated[list[int], cli.option("texts; repeat it", "N")] = [1, 2, 4, 8],  # noqa: B006
    context: Annotated[list[int], cli.option("tokens; repeat it", "N")] = [64, 512, 2048],  # noqa: B006
    temperature: Annotated[list[float], cli.option("repeat it", "T")] = [0.0, 1.0],  # noqa: B006
    turns: Annotated[int, cli.option("of every arm, eight rounds each", "N")] = 8,
    trees: Annotated[bool, cli.option("also every tree of auto's, always grown")] = False,
    dtype: Annotated[str, cli.option("precision", "NAME")] = "auto",
    compile: Annotated[bool, cli.option("compile every pass")] = False,
) -> None:
    """Decode, compare, print."""
    check_writable(json, reads=questions)
    loaded = load_target(target, dtype, compile=compile)
    loaded.warm_up()
    prompts = [prompt for some in prompts_by_file(loaded, questions, 4).values() for prompt in some]
    columns = ("batch", "T", "plain", "auto", "over plain", "95 %", "best", "over best")
    table = Figures(f"{loaded.place}: tokens/s", "context", *columns)
    cells: list[dict[str, Any]] = []
    for n, rows, heat in product(context, batch, temperature):
        found = cell(loaded, texts(prompts, rows, n), heat, turns, trees)
        cells.append({"context": n, "batch": rows, "temperature": heat, **found})
        write_json(json, heading(loaded) | {"cells": cells})
        speeds, (over, low, high) = found["tokens_per_second"], found["over_plain"]
        figures = (
            f"{speeds['plain']:.1f}",
            f"{speeds['auto']:.1f}",
            f"{over:.2f}",
            f"{low:.2f} to {high:.2f}",
        )
        table.add_row(n, rows, f"{heat:g}", *figures, found["best"], f"{found['over_best'][0]:.2f}")
        print(cells[-1], flush=True)
    cli.out.print(table)


if __name__ == "__main__":
    run(main)
