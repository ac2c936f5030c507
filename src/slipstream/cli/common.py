"""The application, its consoles, and the options and helpers that commands share."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from slipstream.catalog import find_target
from slipstream.directories import check_drafter
from slipstream.files import STANDARD, check_file, several
from slipstream.measure.datasets import is_set
from slipstream.methods import Method, load_plugin, named
from slipstream.progress import bars
from slipstream.spec import Spec

if TYPE_CHECKING:
    from slipstream.measure.results import Sweep
    from slipstream.results import Report, Result
    from slipstream.targets import HFTarget

R = TypeVar("R", bound="Report | Sweep")
Command = TypeVar("Command", bound=Callable[..., Any])

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Unfailing:
    """Standard error, which is dropped once it cannot be written: the work goes on."""

    def write(self, text: str) -> int:
        with self._dropping():
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            sys.stderr.flush()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # a name may hold [/] or :eyes:
out, err = Console(**PLAIN), Console(file=cast(IO[str], Unfailing()), stderr=True, **PLAIN)


def option(help: str, metavar: str | None = None, *names: str, panel: str | None = None, **kept: Any) -> Any:
    """An option of a command, named like its parameter unless `names` are given."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=help, **kept)


PANELS = ("Questions and answers", "Sampling", "Target and machine", "Results")  # of --help
on_questions, on_sampling, on_machine, on_results = (partial(option, panel=panel) for panel in PANELS)


def flag(help: str, name: str) -> Any:
    """An option without a value."""
    return option(help, None, name)


MEASURING = "measuring rounds: a few seconds, once"
NAMED = "alias (smollm2, or what slipstream fetch lists), directory, hub id or GGUF file"
REPEATED = f"{NAMED}; repeatable"
TargetNames = Annotated[list[str], on_machine(REPEATED, "NAME", "--target")]
TargetName = Annotated[str, on_machine(NAMED, "NAME", "--target")]
Dtype = Annotated[str, on_machine("float32, bfloat16, float16, float64 or auto", "TYPE")]
Device = Annotated[str, on_machine("cpu, cuda, cuda:1, …", "NAME")]
COMPILED = "compile models whose layers are not described, and on a GPU drafters: a minute the first time"
Compile = Annotated[bool, on_machine(COMPILED, None, "--compile")]
Quantize = Annotated[str | None, on_machine("int8 or int4: weights of 8 or 4 bits", "TYPE")]
DIRECTORY = ("DIR", "a directory that slipstream train or import wrote")


def listed(title: str, methods: Iterable[Method], others: Sequence[tuple[str, str]] = ()) -> str:
    """A list of methods for the end of a command's help."""
    lines = []
    for method in methods:
        ships = f"; ships for {', '.join(method.shipped)}" if method.ships and method.shipped else ""
        lines.append((method.name, method.help + ships))
    return "\n".join([title, *(f"  {name:<16}  {help}" for name, help in (*lines, *others))])


def drafters() -> str:
    """All drafters that have a name, those of plugins among them."""
    title = "[bold]Drafters[/bold] (options follow a colon: eagle:tree=chain-5,proposal=noise)"
    return listed(title, named(), others=[DIRECTORY])


DrafterName = Annotated[str, option("one of the drafters below", "NAME", "--drafter")]
DrafterNames = Annotated[list[str], option("one of those below; repeatable", "NAME", "--drafter")]
SMALLER = "smaller target of the same tokenizer, by which auto drafts too, while it pays"
DraftModelName = Annotated[str | None, option(SMALLER, "NAME", "--draft-model")]
QUESTIONS = "question.jsonl, mt_bench, humaneval or hf:REPOSITORY:SPLIT; repeatable (default: our own)"
Files = Annotated[list[str], on_questions(QUESTIONS, "FILE", "--questions")]
Limit = Annotated[int | None, on_questions("questions of each file, evenly over it", "N", min=1)]
MOST_TEXTS = 4096  # at once
MaxNewTokens = Annotated[int, on_questions("tokens per answer, at most", "N", min=1, max=2**20)]
Temperature = Annotated[float, on_sampling("0 is greedy", "T", min=0)]
OwnTemperature = Annotated[float | None, on_sampling("0 is greedy (default: the target's own)", "T")]


def _version(wanted: bool) -> bool:
    if wanted:
        from slipstream import __version__

        out.print(f"slipstream {__version__}")
        raise typer.Exit
    return wanted


def _plugins(names: list[str]) -> list[str]:
    for name in names:
        load_plugin(name)
    return names


PLUGIN = "import a module or a .py file that registers drafting methods; repeatable"


@app.callback()
def slipstream(
    plugin: Annotated[
        list[str], typer.Option("--plugin", metavar="MODULE", callback=_plugins, help=PLUGIN)
    ] = [],
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Slipstream makes a frozen LLM answer faster without changing one token of what it says."""


def in_64_bits(seed: int | None) -> int | None:
    if seed is not None and seed >= 2**63:  # a maximum of typer's would widen the help
        raise ValueError(f"seed is {seed}; it must be below 2^63")
    return seed


SAME = (
    "same seed, same text, whatever the drafter: token for token on a CPU in float32 and bfloat16, "
    "elsewhere up to near-ties that rounding turns (certify says which)"
)
Seed = Annotated[int, on_sampling(SAME, "N", min=0, callback=in_64_bits)]
JSON = "write the results here; - is standard output"
JsonPath = Annotated[str | None, on_results(JSON, "FILE", "--json")]
Resume = Annotated[bool, on_results("go on with the unfinished run in --json", None, "--resume")]
Force = Annotated[bool, flag("write into --out whatever it holds", "--force")]


def command(
    *examples: str, lists: Callable[[], str] | None = None, name: str | None = None
) -> Callable[[Command], Command]:
    """Registers a command, by default under its function's name. Its help ends in what `lists` returns, which
    is asked when help is shown, and examples."""

    class Listing(TyperCommand):
        def format_help(self, *args: Any) -> None:
            lines = ["[bold]Examples[/bold]", *(f"slipstream {line}" for line in examples)]
            self.epilog = "\n".join([*([lists(), ""] if lists else []), *lines])
            super().format_help(*args)

    return app.command(name, cls=Listing)


def load(
    name: str, dtype: str, device: str, compile: bool = False, quantize: str | None = None
) -> "HFTarget":
    with err.status(Text(f"loading {name}")):
        from transformers.utils import logging

        from slipstream.targets import load_target

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        target = load_target(name, dtype, device, compile, quantize=quantize)
    if target.compiles:
        with err.status("compiling: a minute the first time, then seconds"):
            target.warm_up()
    return target


def inputs(
    targets: str | Sequence[str] = (), drafters: Sequence[str] = (), files: Sequence[str] = ()
) -> list[str]:
    """What a command reads: targets, drafters, files that their options name, and other files. Commands ask
    before they import torch. Raises ValueError for what is not there."""
    for target in several(targets):
        find_target(target)
    for drafter in drafters:
        check_drafter(drafter)
    for file in files:
        if not is_set(file):
            check_file(file, "file")
    specs = [Spec.parse(drafter) for drafter in drafters]
    named = [name.partition(":")[0] for spec in specs for name in (spec.name, *spec.options.values())]
    return [*several(targets), *named, *files]


def with_model(drafter: str, model: str | None) -> str:
    """The drafter auto, whose head is a draft model if one is named. Raises ValueError for any other
    drafter."""
    spec = Spec.parse(drafter)
    if model is None:
        return drafter
    if spec.name != "auto" or "head" in spec.options:
        raise ValueError(
            f"--draft-model is for --drafter auto without a head, and --drafter is {drafter!r}: leave one of "
            f"the two out, or give --drafter draft-model:model={model}"
        )
    return str(spec.replace(head=f"draft-model:model={model}"))


def deliver(
    result: "Result", json_path: str | None, other: str | None = None, draw: Callable[..., Any] | None = None
) -> None:
    """Print a result, write it and draw it, each even if another fails. `other`: where it is drawn, or what
    else was written."""
    with ExitStack() as last:  # in reverse order
        if other is not None and draw is not None:
            last.callback(draw, other)
        if json_path is not None:
            last.callback(result.write, json_path)
        beside(json_path, other).print(result)


def beside(*paths: str | None) -> Console:
    """Where tables and lines go: to standard error if one of these files has standard output for itself."""
    return err if any(path in STANDARD for path in paths) else out


@contextmanager
def kept(show: Callable[[R], None]) -> Iterator[Callable[[R], None]]:
    """Yields a function that takes a result. The result is shown at the end, even where an error ends the
    work."""
    results: list[R] = []
    try:
        yield results.append
    finally:
        for result in results:
            show(result)
            if result.stopped is not None:
                err.print("stopped early: these are the figures of what was done until then", style="yellow")


def unfinished(resume: bool, json_path: str | None, *kinds: str) -> Any:
    """The run in --json that --resume goes on with, if there is one. Raises ValueError for a file that holds
    a result of none of these kinds, each of which is "module:Class"."""
    if not resume:
        return None
    if json_path is None or json_path in STANDARD:
        raise ValueError("--resume goes on with the run in --json: give --json FILE")
    if not os.path.exists(json_path):
        return None
    refused = []
    for kind in kinds:
        try:
            return resolve_name(kind).read(json_path)
        except ValueError as error:
            refused.append(error)
    raise ValueError(
        f"--json {json_path}: {refused[0]}: name a run of this command, or another file"
    ) from refused[0]


def storing(keep: Callable[[Any], None], json_path: str | None) -> Callable[[Any], None]:
    """Takes the reports of a run under way: one that has not ended is written, and any other is kept to be
    shown at the end."""
    from slipstream.measure.resume import UNFINISHED

    def store(found: Any) -> None:
        if found.stopped != UNFINISHED:
            keep(found)
        elif json_path is not None and json_path not in STANDARD:
            found.write(json_path)

    return store


@contextmanager
def progress_bar(steps: int | None) -> Iterator[Callable[..., None]]:
    """A bar on standard error. Each call names the step under way and advances the bar, by one or by `n`;
    `of`: steps in all, where they were not known before."""
    with bars(err, transient=True) as bar:
        task = bar.add_task("", total=steps, note="loading")

        def step(what: str, n: int = 1, of: int | None = None) -> None:
            bar.update(task, note=what, advance=n, total=of)

        yield step


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error for lines of a file. Each call gives their count and the total."""
    with bars(err, transient=True) as bar:
        task = bar.add_task("", total=None, note="loading")
        yield lambda done, total: bar.update(task, note=what, completed=done, total=total)
