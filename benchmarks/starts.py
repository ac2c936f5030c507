r"""Seconds and memory that a process takes for one token, on the command line: cold starts. Models are
converted, weights rounded and rounds measured before, by a start that is not counted.

    python benchmarks/starts.py smollm2 qwen2.5-coder-1.5b:int8 --json benchmarks/results/starts.json
    python benchmarks/starts.py smollm2 --checkout ../before --checkout . --repeats 5
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.text import Text

from common import run
from slipstream.cli import common as cli
from slipstream.files import check_writable
from slipstream.machine import hardware, versions
from slipstream.results import Figures, Part, Result, made
from slipstream.targets.quantized import KINDS

LONGEST = 600  # seconds, of one start


class Start(Part):
    """A target that was started some times.

    Attributes:
        checkout: whose code ran.
        seconds: from the start of the process to its end, behind one token.
        first_seconds: of the start before, which may convert, round and compile.
        peak_mib: of resident memory.
    """

    checkout: str
    target: str
    seconds: list[float]
    peak_mib: list[int]
    first_seconds: float


class Starts(Result):
    """What `measure` found."""

    hardware: dict[str, str | int | float]
    versions: dict[str, str]
    starts: list[Start]

    def __rich__(self) -> Figures:
        table = Figures(f"One token, {self.hardware['cpu']}", "target", "checkout", "first", "s", "peak MiB")
        for each in self.starts:
            cells = (f"{each.first_seconds:.1f}", f"{median(each.seconds):.1f}", f"{max(each.peak_mib):,}")
            table.add_row(Text(each.target), each.checkout, *cells)
        return table


def start(checkout: str, target: str) -> tuple[float, int]:
    """Seconds and peak MiB of one process. Raises ValueError where it fails."""
    name, _, kind = target.partition(":")
    quantised = ["--quantize", kind] if kind else []
    command = [sys.executable, "-m", "slipstream", "generate", "Hello", "--target", name, *quantised]
    env = {**os.environ, "PYTHONPATH": str(Path(checkout).resolve() / "src"), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen([*command, "--max-new-tokens", "1"], stdout=said, stderr=said, env=env)
        late = threading.Timer(LONGEST, process.kill)
        late.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        late.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            last = (said.read().strip() or f"exit code {process.returncode}").split("\n")[-1]
            raise ValueError(f"{target} with {checkout} did not start: {last}")
    return seconds, usage.ru_maxrss // 1024


def measure(targets: list[str], checkouts: list[str], repeats: int) -> Starts:
    """Starts in turn. Raises ValueError."""
    arms = [(checkout, target) for target in targets for checkout in checkouts]
    first = {arm: start(*arm)[0] for arm in arms}
    seconds: dict[tuple[str, str], list[float]] = {arm: [] for arm in arms}
    peaks: dict[tuple[str, str], list[int]] = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm in arms:
            took, peak = start(*arm)
            seconds[arm].append(round(took, 2))
            peaks[arm].append(peak)
    starts = [
        Start(
            checkout=Path(checkout).name or ".",
            target=target,
            seconds=seconds[checkout, target],
            peak_mib=peaks[checkout, target],
            first_seconds=round(first[checkout, target], 2),
        )
        for checkout, target in arms
    ]
    return Starts(**made(), hardware=hardware(), versions=versions(), starts=starts)


def main(
    targets: Annotated[list[str], typer.Argument(help=f"NAME, or NAME:{' or NAME:'.join(KINDS)}")],
    checkout: Annotated[list[str], cli.option("whose code runs; repeatable", "DIR")] = ["."],  # noqa: B006
    repeats: Annotated[int, cli.option("starts of each", "N", min=1)] = 5,
    json_path: cli.JsonPath = None,
) -> None:
    check_writable(json_path)
    cli.deliver(measure(targets, checkout, repeats), json_path)


if __name__ == "__main__":
    run(main)
