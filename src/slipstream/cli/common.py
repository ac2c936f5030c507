"""What commands share: the application, its consoles, options that mean the same everywhere, loading, progress."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from slipstream.targets import Target

app = typer.Typer(
    help="Slipstream makes a frozen LLM answer faster without changing one token of what it says.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
out, err = Console(highlight=False), Console(stderr=True, highlight=False)

TargetName = Annotated[str, typer.Option("--target", help="alias (smollm2), directory, hub id or GGUF file")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, float64 or auto")]
Device = Annotated[str, typer.Option(help="cpu, cuda, …")]
Compile = Annotated[bool, typer.Option("--compile", help="compile all passes: a minute the first time, then seconds")]
DRAFTERS = (
    "vanilla, ngram, lookahead, eagle, fasteagle, hybrid:head=eagle, draft-model:model=DIR, self-speculative:skip=10-14, "
    "or a directory that train made; with options: eagle:tree=chain-5"
)
DrafterName = Annotated[str, typer.Option("--drafter", help=DRAFTERS)]
DrafterNames = Annotated[list[str], typer.Option("--drafter", help=f"{DRAFTERS}; repeatable")]
Files = Annotated[list[str], typer.Option("--questions", help="question.jsonl; repeatable (default: the project's own)")]
Limit = Annotated[int | None, typer.Option(help="questions per file, taken evenly over it (default: all)")]
MaxNewTokens = Annotated[int, typer.Option(help="tokens per answer, at most")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="the same seed gives the same text, whatever the drafter")]
JsonPath = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="write the results here; - is standard output")
]
Force = Annotated[bool, typer.Option("--force", help="write into --out whatever it holds")]


def examples(*lines: str) -> str:
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  slipstream {line}" for line in lines)


def load(name: str, dtype: str, device: str, compile: bool = False) -> "Target":
    with err.status(f"loading {name}"):
        from transformers.utils import logging

        from slipstream.targets import load_target

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        target = load_target(name, dtype, device, compile)
    if compile:
        with err.status("compiling: a minute the first time, then seconds"):
            target.warm_up()
    return target


def inputs(target: str, drafters: Sequence[str] = (), files: Sequence[str] = ()) -> list[str]:
    """What a command reads: a drafter's options may name files, too."""
    return [target, *(part for drafter in drafters for part in re.split("[:,=]", drafter)), *files]


def deliver(shown: Any, report: dict[str, Any], json_path: str | None) -> None:
    """Print what was found, then write it: the one is not lost with the other. JSON has standard output for itself."""
    from slipstream.files import STANDARD, write_json

    try:
        (err if json_path in STANDARD else out).print(shown)
    finally:
        if json_path is not None:
            write_json(json_path, report)


@contextmanager
def kept(show: Callable[[dict[str, Any]], None]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Call what it yields with whatever was found: that is shown at the end, even if it comes by an error."""
    found: list[dict[str, Any]] = []
    try:
        yield found.append
    finally:
        for report in found:
            show(report)
            if "stopped" in report:
                err.print("stopped early: these are the figures of what was done until then", style="yellow")


@contextmanager
def progress_bar(steps: int | None) -> Iterator[Callable[..., None]]:
    """A bar on standard error; each call says what is under way and advances it, by one or by `n`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), TimeRemainingColumn())
    what = TextColumn("{task.description}")
    with Progress(BarColumn(), MofNCompleteColumn(), *times, what, console=err, transient=True) as bar:
        task = bar.add_task("loading", total=steps)

        def advance(what: str, n: int = 1) -> None:
            bar.update(task, description=what, advance=n)

        yield advance
