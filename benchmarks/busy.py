r"""Plain decoding beside other processes that never rest, in tokens per second: ours on all threads and on
one, Hugging Face's and llama.cpp's.

    python benchmarks/busy.py smollm2 --json benchmarks/results/busy.json

Each neighbour is a process in a session of its own, so that the scheduler shares the cores evenly. Engines
answer in turn; each is a process, which is stopped while another answers. An engine that cannot be had is
left out, with one line that says why: llama.cpp is compiled at its first use, for some ten minutes.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from time import sleep
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from rich.text import Text

from common import run
from engines import OURS, Answers, Engine, Way, begun, engines, started
from slipstream.cli import common as cli
from slipstream.files import cache_home, check_counts, check_writable
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget

RESTLESS = [sys.executable, "-c", "while True: pass"]
TEXT = "Write a short story about a lighthouse keeper who finds a letter."
KEPT = ("Hugging Face", "llama.cpp Q4_1")  # of the engines that peers.py compares
WARM_UP = 8  # tokens


class Cell(Part):
    """An engine beside some neighbours. `tokens_per_second`: of each answer, prompt included."""

    arm: str
    neighbours: int
    tokens_per_second: list[float]

    @property
    def median(self) -> float:
        return median(self.tokens_per_second)


class BusyReport(Report):
    """What `measure` found. `skipped`: why arms are missing."""

    new_tokens: int
    cells: list[Cell]
    skipped: dict[str, str]

    def __rich__(self) -> Group:
        counts = sorted({cell.neighbours for cell in self.cells})
        columns = ["idle" if count == 0 else f"beside {count}" for count in counts]
        title = f"{self.target}, {self.dtype}, tokens/s, {self.hardware['cpu']}"
        table = Figures(title, "engine", *columns)
        for arm in dict.fromkeys(cell.arm for cell in self.cells):
            mine = {cell.neighbours: cell.median for cell in self.cells if cell.arm == arm}
            cells = [f"{mine[n]:.1f} ({mine[n] / mine[counts[0]]:.2f})" for n in counts]
            table.add_row(arm, *cells)
        return Group(table, *(Text(f"{arm} is left out: {why}") for arm, why in self.skipped.items()))


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Inside, so many other processes never rest."""
    made = [subprocess.Popen(RESTLESS, start_new_session=True) for _ in range(count)]
    try:
        sleep(1)
        yield
    finally:
        for each in made:
            each.kill()
            each.wait()


def compared(target: HFTarget) -> list[Engine]:
    """Ours on all threads and on one, and the others on all."""
    every = engines(
        target, cache_home() / "peers" / target.fingerprint, ["vanilla"], torch.get_num_threads(), False
    )
    ours = next(each for each in every if each.name == OURS)
    one = replace(ours, name=f"{OURS}, one thread", options={**ours.options, "threads": 1})
    others = [replace(each, arms={"plain": {}}) for each in every if each.name in KEPT]
    return [ours, one, *others]


def measure(
    target: HFTarget,
    counts: Sequence[int],
    repeats: int,
    new_tokens: int,
    progress: Any = lambda _: None,
    start: Callable[[Engine], Answers] = started,
) -> BusyReport:
    """Each engine's answers beside so many neighbours. Raises ValueError.

    Args:
        start: gives what answers for an engine.
    """
    check_counts(repeats=repeats, new_tokens=new_tokens)
    assert target.text is not None
    prompt = target.text.encode(TEXT)
    with ExitStack() as last:
        arms, skipped = begun(compared(target), last, progress, start)
        for way in arms.values():
            _pace(way, prompt, WARM_UP)
        cells = []
        for count in counts:
            made: dict[str, list[float]] = {name: [] for name in arms}
            with neighbours(count):
                for repeat in range(repeats):
                    for name, way in arms.items():
                        progress(f"beside {count}, {repeat + 1} of {repeats}, {name}")
                        made[name].append(_pace(way, prompt, new_tokens))
            cells += [Cell(arm=name, neighbours=count, tokens_per_second=each) for name, each in made.items()]
    return BusyReport(**heading(target), new_tokens=new_tokens, cells=cells, skipped=skipped)


def _pace(way: Way, prompt: list[int], new: int) -> float:
    answer = way.answers.ask(prompts=[prompt], new=new, **way.options)
    return round(new / (answer["seconds_prompt"] + answer["seconds_decode"]), 2)


def main(
    target: Annotated[str, typer.Argument(help=cli.NAMED)],
    neighbour: Annotated[list[int], cli.option("processes beside; repeatable", "N", min=0)] = [0, 1, 2],  # noqa: B006
    repeats: Annotated[int, cli.option("answers of each engine", "N", min=1)] = 5,
    new_tokens: Annotated[int, cli.option("tokens an answer", "N", min=1)] = 96,
    dtype: cli.Dtype = "auto",
    json_path: cli.JsonPath = None,
) -> None:
    check_writable(json_path, reads=cli.inputs(target, [], []))
    loaded = cli.load(target, dtype, "cpu")
    with cli.progress_bar(None) as step:
        report = measure(loaded, neighbour, repeats, new_tokens, step)
    cli.deliver(report, json_path)


if __name__ == "__main__":
    run(main)
