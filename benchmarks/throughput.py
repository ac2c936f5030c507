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
from contextlib import ExitStack
from itertools import product
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from rich.text import Text

from common import Plot, Turn, cells_in, prompts_by_file, ratio, run, texts_behind
from engines import OURS, Way, begun, crowded
from slipstream.cli import common as cli
from slipstream.drafters import load_drafter
from slipstream.engine.memory import memory
from slipstream.files import cache_home, check_writable
from slipstream.machine import hardware
from slipstream.plotting import picture
from slipstream.progress import bars
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget

DRAFTERS = ["vanilla", "ngram", "eagle", "fasteagle", "hybrid", "auto"]
PLAIN = f"{OURS}, vanilla"
TEXTS, FEWEST = 24, 4  # in all turns of a cell together, and turns at least
WARM_UP = 8  # tokens
Turns = Sequence[list[list[int]]]  # the prompts of each


class Arm(Part):
    """What an engine did, in one of its ways.

    Attributes:
        texts: asked at once.
        tokens_per_second: prompts included.
        behind: tokens per second behind the first tokens.
        seconds: of a turn.
        over_plain: `tokens_per_second` over plain decoding's, and the ends of its 95 %.
    """

    texts: int
    tokens_per_second: float
    behind: float
    seconds: float
    over_plain: list[float]


class Cell(Part):
    """So many texts at once behind so many tokens.

    Attributes:
        batch: 0 where each arm takes as many texts as fit in `memory` GiB.
        new: tokens of an answer.
    """

    context: int
    batch: int
    memory: float
    new: int
    arms: dict[str, Arm]

    @property
    def asked(self) -> str:
        return f"in {self.memory:g} GiB" if self.memory else str(self.batch)

    def shown(self, arm: str) -> str:
        """A speed, and how many texts fitted where that was asked."""
        if (found := self.arms.get(arm)) is None:
            return "–"
        return f"{found.tokens_per_second:.1f}" + f" ({found.texts})" * bool(self.memory)


class ThroughputReport(Report):
    """What was measured. `skipped`: why arms are missing."""

    skipped: dict[str, str]
    cells: list[Cell]

    @property
    def by_context(self) -> dict[int, list[Cell]]:
        contexts = dict.fromkeys(cell.context for cell in self.cells)
        return {context: [cell for cell in self.cells if cell.context == context] for context in contexts}

    def __rich__(self) -> Group:
        tables = []
        for context, cells in self.by_context.items():
            title = f"tokens/s, prompts of {context} tokens, by texts at once"
            table = Figures(title, "engine", *(cell.asked for cell in cells))
            for arm in arms_of(cells):
                table.add_row(arm, *(cell.shown(arm) for cell in cells))
            tables.append(table)
        return Group(*tables, *(Text(f"{arm} is left out: {why}") for arm, why in self.skipped.items()))

    def draw(self, path: str) -> None:
        """Tokens per second against texts, a panel for each context. Raises ValueError."""
        with picture(path, len(self.by_context), "; the result is stored") as axes:
            for panel, (context, cells) in zip(axes, self.by_context.items(), strict=True):
                some = [cell for cell in cells if not cell.memory]
                for arm in arms_of(some):
                    points = [
                        (each.batch, each.arms[arm].tokens_per_second) for each in some if arm in each.arms
                    ]
                    style = "-" if arm.startswith(OURS) else "--" if arm.startswith("vLLM") else ":"
                    panel.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=arm)
                panel.set_xscale("log", base=2)
                panel.set_yscale("log", base=2)
                panel.set_xticks([each.batch for each in some], [each.asked for each in some])
                panel.yaxis.set_major_formatter("{x:.0f}")
                panel.set_xlabel(f"texts at once, prompts of {context} tokens")
            axes[0].set_ylabel("tokens/s")
            beside = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
            axes[-1].legend(fontsize=6, handlelength=4, **beside)


def arms_of(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell.arms))


def race(arms: Mapping[str, Way], turns: Mapping[str, Turns], new: int) -> dict[str, Arm]:
    """What every arm did, in an order that rotates."""
    spent: dict[str, list[Turn]] = {name: [] for name in arms}
    behind: dict[str, list[Turn]] = {name: [] for name in arms}
    for number in range(-1, min(map(len, turns.values()))):  # the first one warms up
        first = number % len(arms)
        for name in [*arms][first:] + [*arms][:first]:
            answers, options = arms[name]
            prompts = turns[name][max(number, 0)]
            made = answers.ask(prompts=prompts, new=WARM_UP if number < 0 else new, **options)
            if number >= 0:
                seconds = made["seconds_prompt"] + made["seconds_decode"]
                spent[name].append((new * len(prompts), seconds))
                behind[name].append(((new - 1) * len(prompts), made["seconds_decode"]))
    return {
        name: Arm(
            texts=len(turns[name][0]),
            tokens_per_second=_speed(taken),
            behind=_speed(behind[name]),
            seconds=round(sum(s for _, s in taken) / len(taken), 3),
            over_plain=ratio(taken, spent[PLAIN]),
        )
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
    target: HFTarget, drafters: Sequence[str], gib: float, prompts: list[list[int]], context: int, new: int
) -> dict[str, Turns]:
    """The turns of our arms, of as many texts as fit. Raises ValueError where none does."""
    most = {each: memory(target, load_drafter(each, target), context + new).batch(gib) for each in drafters}
    return {f"{OURS}, {each}": groups(prompts, texts, context) for each, texts in most.items()}


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
    if "vanilla" not in drafter:
        raise ValueError("ratios are over plain decoding: name the drafter vanilla, too")
    model = cli.load(target, dtype, "cpu")
    cells = cells_in(json, ThroughputReport, target=model.name, dtype=model.dtype_name, hardware=hardware())
    if other := {cell.new for cell in cells} - {max_new_tokens}:
        raise ValueError(f"{json} has answers of {other.pop()} tokens: name another file for --json")
    asked = [prompt for some in prompts_by_file(model, questions, None).values() for prompt in some]
    home = cache_home() / "peers" / f"{model.fingerprint}-{model.dtype_name}"
    sizes = [*((texts, 0.0) for texts in batch), *((0, gib) for gib in memory_gib)]
    with ExitStack() as last, bars(cli.err) as shown:
        task = shown.add_task("cells", total=len(context) * len(sizes), note="")
        engines = crowded(model, home, drafter, torch.get_num_threads(), max(batch), chain)
        arms, skipped = begun(engines, last, lambda note: shown.update(task, note=note))
        report = ThroughputReport(**{**heading(model), "compiled": True}, skipped=skipped, cells=cells)
        for tokens, (texts, gib) in product(context, sizes):
            place: dict[str, Any] = {"context": tokens, "batch": texts, "memory": gib}
            if not any(place.items() <= dict(cell).items() for cell in cells):
                shown.update(task, note=f"{texts or f'in {gib:g} GiB'} texts, {tokens} tokens")
                if gib:
                    turns = fitting(model, drafter, gib, asked, tokens, max_new_tokens)
                else:
                    turns = dict.fromkeys(arms, groups(asked, texts, tokens))
                made = race({name: arms[name] for name in turns}, turns, max_new_tokens)
                report.cells.append(Cell(**place, new=max_new_tokens, arms=made))
                report.cells.sort(key=lambda cell: (cell.context, cell.memory, cell.batch))
                report.write(json)
            shown.advance(task)
    cli.out.print(report)
    if plot is not None:
        report.draw(plot)


if __name__ == "__main__":
    run(main)
