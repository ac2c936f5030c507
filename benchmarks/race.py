"""The speed expected of trained heads, from one alternating race of their rounds and from a stored τ.

    python benchmarks/race.py runs/fasteagle runs/eagle3 runs/eagle --tau benchmarks/results/heads.json \
        --tree chain-3 --tree best-first-3x8 --compile --json benchmarks/results/heads_race.json

A race runs rounds of plain decoding, of every head and of every tree in turn, and takes the median of each
part. Heads that grow the same tree share one target pass, so all of them are charged the same verify time,
the median over the heads. Several races, each with another head first, give a t interval of every cost. A
head's costs depend on its sizes alone, so these weights need not be those whose τ is stored. `bita`, whose
masks are further rows of the pass, shares none: heads.py charges it its own.

Expected speed: τ · plain round / (draft + shared verify + host). The interval of a ratio adds the half widths
of the stored τ's interval (over the questions) and of the cost's interval (over the races) in quadrature.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated, Any

import typer

from common import run
from slipstream.cli import common as cli
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.engine import Seconds
from slipstream.files import check_writable, read_json, write_json
from slipstream.measure.bootstrap import student
from slipstream.measure.cost import Rounds
from slipstream.measure.datasets import load_questions
from slipstream.measure.results import PARTS
from slipstream.results import Figures, heading
from slipstream.targets.prompts import encode

Race = dict[tuple[str, str], Seconds]  # by head and tree


def race(
    target: Any, heads: dict[str, Any], trees: Sequence[str], probe: list[int], races: int, rounds: int
) -> list[tuple[Seconds, Race]]:
    """Costs of plain rounds and of every head's and tree's, race by race."""
    kinds = [(head, tree) for tree in trees for head in heads]
    found = []
    for i in range(races):
        order = kinds[i % len(kinds) :] + kinds[: i % len(kinds)]
        arms = [(heads[head], TreeSpec.parse(tree)) for head, tree in order]
        plain, *spent = Rounds(target, [(Vanilla(), None), *arms], [probe], most=rounds).run(rounds)
        found.append((plain, dict(zip(order, spent, strict=True))))
        print(f"race {i + 1} of {races}: plain {1e3 * plain.total:.1f} ms", file=sys.stderr, flush=True)
    return found


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean over the races, and its t interval."""
    middle = mean(values)
    half = student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": round(middle, 4), "interval": [round(middle - half, 4), round(middle + half, 4)]}


def product(share: float, of_share: Sequence[float], cost: dict[str, Any]) -> dict[str, Any]:
    """A ratio of τ times a ratio of costs; relative half widths of their intervals in quadrature."""
    value = share * cost["mean"]
    halves = [
        (ends[1] - ends[0]) / 2 / middle
        for ends, middle in ((of_share, share), (cost["interval"], cost["mean"]))
    ]
    half = value * math.hypot(*halves)
    return {"ratio": round(value, 4), "interval": [round(value - half, 4), round(value + half, 4)]}


def report(races: list[tuple[Seconds, Race]], trees: Sequence[str], stored: dict[str, Any]) -> dict[str, Any]:
    """Every head's costs with each tree, its expected speed, and both over the first head's."""
    heads = list(dict.fromkeys(head for head, _ in races[0][1]))
    heads.sort(key=list(stored["heads"]).index)
    found: dict[str, Any] = {}
    for tree in trees:
        shared = [median(race[head, tree].verify for head in heads) for _, race in races]
        found[tree] = {"shared_verify_ms": spread([1e3 * v for v in shared]), "heads": {}}
        totals = {
            head: [
                race[head, tree].draft + v + race[head, tree].host
                for (_, race), v in zip(races, shared, strict=True)
            ]
            for head in heads
        }
        drafts = {head: [race[head, tree].draft for _, race in races] for head in heads}
        for head in heads:
            parts = {
                f"{p}_ms": spread([1e3 * getattr(race[head, tree], p) for _, race in races]) for p in PARTS
            }
            over_first = [a / b for a, b in zip(totals[heads[0]], totals[head], strict=True)]
            of_draft = [a / b for a, b in zip(drafts[heads[0]], drafts[head], strict=True)]
            entry = {**parts, "first_draft_over_its": spread(of_draft), "expected": {}}
            for arm in stored["heads"][head]["trees"]:
                if arm["tree"] == tree:
                    plain = [p.total / total for (p, _), total in zip(races, totals[head], strict=True)]
                    speed = mean(arm["tau"] * ratio for ratio in plain)
                    ratio = product(arm["share"], arm["interval"], spread(over_first))
                    entry["expected"][str(arm["temperature"])] = {
                        "speed": round(speed, 4),
                        "over_first": ratio,
                    }
            found[tree]["heads"][head] = entry
    return found


def show(found: dict[str, Any], title: str) -> None:
    """The report as a table."""
    columns = ("draft ms", "verify own", "shared", "T", "× plain", "over the first")
    table = Figures(title, "tree", "head", *columns)
    for tree, entry in found.items():
        for head, arm in entry["heads"].items():
            for temperature, expected in arm["expected"].items():
                ratio, (low, high) = expected["over_first"]["ratio"], expected["over_first"]["interval"]
                times = (arm["draft_ms"], arm["verify_ms"], entry["shared_verify_ms"])
                cells = (f"{each['mean']:.2f}" for each in times)
                speed = f"{expected['speed']:.2f}"
                table.add_row(tree, head, *cells, temperature, speed, f"{ratio:.3f} [{low:.3f}, {high:.3f}]")
    cli.out.print(table)


def check_stored(heads: Sequence[str], trees: Sequence[str], stored: dict[str, Any], tau: str) -> None:
    """Raise ValueError where the stored result lacks a head or a tree, or its first head is not asked for."""
    first, known = next(iter(stored)), {arm["tree"] for head in stored.values() for arm in head["trees"]}
    if strange := [name for name in heads if name not in stored]:
        raise ValueError(f"{tau} has no head {', '.join(strange)}: it has {', '.join(stored)}")
    if first not in heads:
        raise ValueError(f"the ratios in {tau} are over {first}: name it, too")
    if strange := [tree for tree in trees if tree not in known]:
        raise ValueError(f"{tau} has no tree {', '.join(strange)}: it has {', '.join(sorted(known))}")


def main(
    heads: Annotated[list[str], typer.Argument(help="drafter directories, called as in the stored result")],
    tau: Annotated[str, cli.option("what heads.py wrote of heads of these names", "FILE")],
    trees: Annotated[list[str], cli.option("repeatable", "TREE", "--tree")],
    target: cli.TargetName = "smollm2",
    questions: cli.Files = [],  # noqa: B006
    races: Annotated[int, cli.option("of all heads and trees", "N", min=2)] = 7,
    rounds: Annotated[int, cli.option("of each head and tree in a race", "N", min=1)] = 15,
    dtype: cli.Dtype = "float32",
    compile: cli.Compile = False,
    json_path: cli.JsonPath = None,
) -> None:
    check_writable(json_path, reads=cli.inputs(target, heads, [tau, *questions]))
    stored = read_json(Path(tau), "result")
    check_stored([Path(name).name for name in heads], trees, stored["heads"], tau)
    loaded = cli.load(target, dtype, "cpu", compile)
    named = {Path(name).name: load_drafter(name, loaded) for name in heads}
    if masked := [name for name, drafter in named.items() if drafter.probes is not None]:
        raise ValueError(f"{', '.join(masked)}: the pass has rows of masks, which others lack: use heads.py")
    probe = encode(loaded, load_questions(questions, 1)[0].turns[0])
    found = race(loaded, named, trees, probe, races, rounds)
    result = report(found, trees, stored)
    show(result, "compiled" if compile else "eager")
    if json_path is not None:
        settings = {"tau_from": Path(tau).name, "races": races, "rounds": rounds}
        plain_ms = spread([1e3 * plain.total for plain, _ in found])
        write_json(json_path, {**heading(loaded), **settings, "plain_ms": plain_ms, "trees": result})


if __name__ == "__main__":
    run(main)
