r"""Throughput by the number of texts at once: our drafters, Hugging Face and vLLM, on equal prompts.

    python benchmarks/throughput.py smollm2 --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/throughput.json --plot docs/throughput.svg

Every engine is a process that is stopped while another answers, as in benchmarks/peers.py. In a turn an
engine is asked so many prompts of so many tokens at once, and gives each an answer of the same length, at T
= 0. Arms take turns over the same prompts. Tokens per second are those of all answers in the time from
asking to the last token, prompts included; `behind` is the rate behind the first tokens. Ratios are over
our plain decoding, with 95 % of the bootstrap over turns. With `--memory-gib` each of our arms is also
asked as many texts as their keys and values fit in. The result is written after every cell, and cells that
it holds are not made again.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from common import Plot, Turn, prompts_by_file, ratio, run, texts_behind
from engines import OURS, Answers, crowded, started
from slipstream.bars import bars
from slipstream.cli import common as cli
from slipstream.decode.memory import memory
from slipstream.drafters import load_drafter
from slipstream.files import cache_home, check_writable, read_json, write_json
from slipstream.picture import picture
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget

DRAFTERS = ["vanilla", "ngram", "eagle", "fasteagle", "hybrid", "auto"]
PLAIN = f"{OURS}, vanilla"
TEXTS, FEWEST = 8, 3  # in all turns of a cell together, and turns at least
WARM_UP = 8  # tokens
AXES = ("context", "batch")


class Way(NamedTuple):
    """What answers for an arm, and the options of its answers."""

    answers: Answers
    options: dict[str, Any]


Turns = Sequence[list[list[int]]]  # the prompts of each


def cell(arms: Mapping[str, Way], turns: Mapping[str, Turns], new: int) -> dict[str, Any]:
    """What every arm did: its speeds, the seconds of a turn, and its speed over plain decoding's."""
    spent, behind = dict[str, list[Turn]](), dict[str, list[Turn]]()
    for number in range(-1, max(map(len, turns.values()))):  # the first one warms up
        names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        for name in names:
            answers, options = arms[name]
            prompts = turns[name][max(number, 0)]
            made = answers.ask(prompts=prompts, new=WARM_UP if number < 0 else new, **options)
            if number >= 0:
                seconds = made["seconds_prompt"] + made["seconds_decode"]
                spent.setdefault(name, []).append((new * len(prompts), seconds))
                behind.setdefault(name, []).append(((new - 1) * len(prompts), made["seconds_decode"]))
    return {
        name: {
            "texts": len(turns[name][0]),
            "tokens_per_second": _speed(taken),
            "behind": _speed(behind[name]),
            "seconds": round(sum(s for _, s in taken) / len(taken), 3),
            "over_plain": ratio(taken, spent[PLAIN]),
        }
        for name, taken in spent.items()
    }


def _speed(turns: Sequence[Turn]) -> float:
    return round(sum(n for n, _ in turns) / sum(s for _, s in turns), 2)


def groups(prompts: list[list[int]], texts: int, context: int) -> Turns:
    """The prompts of each turn, of `texts` texts."""
    count = max(FEWEST, TEXTS // texts)
    lines = texts_behind(prompts, count * texts, context)
    return [lines[i * texts : (i + 1) * texts] for i in range(count)]


def fitting(
    target: HFTarget, names: Sequence[str], gib: float, prompts: list[list[int]], context: int, new: int
) -> dict[str, Turns]:
    """The turns of our arms, of as many texts as fit. Raises ValueError where none does."""
    most = {name: memory(target, load_drafter(name, target), context + new).batch(gib) for name in names}
    return {f"{OURS}, {name}": groups(prompts, texts, context) for name, texts in most.items()}


def known(path: str) -> list[dict[str, Any]]:
    """The cells that a result holds; none where there is no result. Raises ValueError for another one."""
    cells = read_json(path, "result").get("cells") if Path(path).exists() else []
    with suppress(TypeError):
        if all({*AXES, "arms"} <= each.keys() for each in cells):
            return cells
    raise ValueError(f"result {path} holds something else than cells of these axes: name another file")


def tables(cells: Sequence[dict[str, Any]]) -> list[Figures]:
    """One for each context: tokens per second of every arm, by the number of texts."""
    made = []
    for context in dict.fromkeys(each["context"] for each in cells):
        some = [each for each in cells if each["context"] == context]
        heads = [f"in {each['memory']:g} GiB" if each["memory"] else str(each["batch"]) for each in some]
        table = Figures(f"tokens/s, {context} tokens of prompt, by texts at once", "engine", *heads)
        for arm in dict.fromkeys(name for each in some for name in each["arms"]):
            table.add_row(arm, *(_shown(each, arm) for each in some))
        made.append(table)
    return made


def _shown(each: Mapping[str, Any], arm: str) -> str:
    """A speed, and how many texts fitted where that was asked."""
    if (figures := each["arms"].get(arm)) is None:
        return "–"
    return f"{figures['tokens_per_second']:.0f}" + f" ({figures['texts']})" * bool(each["memory"])


def draw(cells: Sequence[dict[str, Any]], path: str) -> None:
    """Tokens per second against texts, a panel for each context. Raises ValueError."""
    by_context: dict[int, list[dict[str, Any]]] = {}
    for each in cells:
        if not each["memory"]:
            by_context.setdefault(each["context"], []).append(each)
    with picture(path, len(by_context), "; the result is stored") as axes:
        for panel, (context, some) in zip(axes, by_context.items(), strict=True):
            for arm in dict.fromkeys(name for each in some for name in each["arms"]):
                points = [(each["batch"], each["arms"][arm]["tokens_per_second"]) for each in some]
                dashed = "-" if arm.startswith(OURS) else "--"
                panel.plot(*zip(*points, strict=True), dashed, marker="o", markersize=3, label=arm)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.set_xticks([each["batch"] for each in some], [str(each["batch"]) for each in some])
            panel.yaxis.set_major_formatter("{x:.0f}")
            panel.set_xlabel(f"texts at once, prompts of {context} tokens")
        axes[0].set_ylabel("tokens/s")
        axes[0].legend(fontsize=6)


def main(
    target: Annotated[str, typer.Argument(help=cli.NAMED)],
    questions: cli.Files,
    json: Annotated[str, cli.option("the result", "FILE")],
    drafter: cli.DrafterNames = DRAFTERS,
    batch: Annotated[list[int], cli.option("texts; repeat it", "N")] = [1, 2, 4, 8, 16, 32],  # noqa: B006
    context: Annotated[list[int], cli.option("tokens; repeat it", "N")] = [64, 512],  # noqa: B006
    chain: Annotated[list[int], cli.option("tokens that vLLM's heads draft; repeat it", "N")] = [2, 3],  # noqa: B006
    memory_gib: Annotated[list[float], cli.option("of keys and values; repeat it", "GIB")] = [],  # noqa: B006
    max_new_tokens: cli.MaxNewTokens = 64,
    dtype: cli.Dtype = "auto",
    plot: Plot = None,
) -> None:
    """Ask, compare, print."""
    check_writable(json, plot, reads=questions)
    cells, model = known(json), cli.load(target, dtype, "cpu")
    asked = [prompt for some in prompts_by_file(model, questions, None).values() for prompt in some]
    home = cache_home() / "peers" / f"{model.fingerprint}-{model.dtype_name}"
    skipped = dict[str, str]()
    with ExitStack() as last, bars(cli.err) as shown:
        task = shown.add_task("cells", total=len(context) * (len(batch) + len(memory_gib)), note="")
        arms = dict[str, Way]()
        for engine in crowded(model, home, drafter, torch.get_num_threads(), max(batch), chain):
            shown.update(task, note=f"starting {', '.join(engine.named())}")
            try:
                answers = started(engine)
            except ValueError as error:
                skipped |= dict.fromkeys(engine.named(), str(error))
                continue
            last.callback(answers.close)
            arms |= {name: Way(answers, options) for name, options in engine.named().items()}
        for tokens, (texts, gib) in product(
            context, [*((n, 0.0) for n in batch), *((0, g) for g in memory_gib)]
        ):
            place = {"context": tokens, "batch": texts, "memory": gib}
            if not any(place.items() <= each.items() for each in cells):
                shown.update(task, note=f"{texts or f'in {gib:g} GiB'} texts, {tokens} tokens")
                if gib:
                    turns = fitting(model, drafter, gib, asked, tokens, max_new_tokens)
                else:
                    turns = dict.fromkeys(arms, groups(asked, texts, tokens))
                made = cell({name: arms[name] for name in turns}, turns, max_new_tokens)
                cells.append({**place, "new": max_new_tokens, "arms": made})
                write_json(json, {**heading(model), "compiled": True, "skipped": skipped, "cells": cells})
            shown.advance(task)
    for table in tables(cells):
        cli.out.print(table)
    for arm, why in skipped.items():
        cli.out.print(f"{arm} is left out: {why}")
    if plot is not None:
        draw(cells, plot)


if __name__ == "__main__":
    run(main)
