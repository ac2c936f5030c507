"""The application, its consoles, the table of options, and the helpers that commands share."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from slipstream.catalog import find_target
from slipstream.directories import check_drafter
from slipstream.files import STANDARD, check_file, several
from slipstream.measure.datasets import is_set
from slipstream.methods import TABLE, Method, load_plugin, named
from slipstream.progress import bars
from slipstream.provenance import TAKES
from slipstream.spec import Spec

if TYPE_CHECKING:
    from slipstream.results import Result
    from slipstream.targets import HFTarget

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
        self._try(sys.stderr.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(sys.stderr.flush)

    def _try(self, action: Callable[..., Any], *args: Any) -> None:
        try:
            action(*args)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # a name may hold [/] or :eyes:
out, err = Console(**PLAIN), Console(file=cast(IO[str], Unfailing()), stderr=True, **PLAIN)


def option(help: str, metavar: str | None = None, *names: str, panel: str | None = None, **how: Any) -> Any:
    """An option of a command, named like its parameter unless `names` are given."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=help, **how)


def flag(help: str, name: str) -> Any:
    """An option without a value."""
    return option(help, None, name)


PANELS = ("Questions and answers", "Sampling", "Target and machine", "Results", "Limits")  # of --help
on_questions, on_sampling, on_machine, on_results, on_limits = (partial(option, panel=p) for p in PANELS)
argument = typer.Argument


def in_64_bits(seed: int | None) -> int | None:
    if seed is not None and seed >= 2**63:  # a maximum of typer's would widen the help
        raise ValueError(f"seed is {seed}; it must be below 2^63")
    return seed


MOST_TEXTS = 4096  # at once
many = partial(on_questions, min=1, max=MOST_TEXTS)
MEASURING = "measuring rounds: a few seconds, once"
DIRECTORY = ("DIR", "a directory that slipstream train or import wrote")
MACHINE = "dtype device compile quantize"  # options of most commands
LAYOUTS = [layout for method in TABLE for layout in method.layouts]
PUBLIC = f"{', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}"

# Help that several options share, or that is long.
NAMED = "alias (smollm2, or what slipstream fetch lists), directory, hub id or GGUF file"
QUESTIONS = "question.jsonl, mt_bench, humaneval or hf:REPOSITORY:SPLIT; repeatable (default: our own)"
SMALLER = "smaller target of the same tokenizer, by which auto drafts too, while it pays"
COMPILED = "compile models whose layers are not described, and on a GPU drafters: a minute the first time"
JSON = "write the results here; - is standard output"
SAME = (
    "same seed, same text, whatever the drafter: token for token on a CPU in float32 and bfloat16, "
    "elsewhere up to near-ties that rounding turns (certify says which)"
)
OWN = "0 is greedy (default: the target's own)"
SEVERAL = "0 is greedy; repeatable"
LIKELY = "keep tokens this fraction as likely as the likeliest"
SCHEMA = "the answer is JSON of the schema in this file"
CHOICE = "the answer is one of the texts given so; repeatable"
TRACE = "write one JSON line per round here, for slipstream report"
WRITTEN = "texts written at once: all in memory"
MEMORY = "memory for the KV cache; fewer rows if they do not fit"
SECONDS = "time a request may take, until its client has read the answer"
GRAMMAR_SECONDS = "processor time that reading a grammar may take"
GRACE = "time that requests under way get after Ctrl-C or SIGTERM"
DELETE = "delete what would be shown"
SENT = f"{SAME} (default: 0; a server is sent none)"
GRAMMAR = "the answer is a text of the grammar in this file, in Lark's or llama.cpp's form"
LAW = "coupled or multi-round (default: the drafter's own)"
EXPLAIN = "show which trees auto chose, and why, and what keys and values take"
PLOT = "draw it, as SVG or PNG: by task and round, or of several runs by texts at once"
CONTEXT = "length of the context at which rounds are timed, in tokens (default: the questions')"
USED = "length of your texts, in tokens (default: the questions')"
TABLES = "such as eagle-table-1 (default: all); --list shows them"
SETS = "questions of a set, as xsum=FILE; repeatable (default: what ships)"
HEADS = "a head's directory, as eagle=runs/eagle; repeatable"
UNTIMED = "leave out what takes time: τ and acceptance alone"
LISTING = "show all tables and figures, and which stand in the file of --json"
PAGES = "what bench or certify --json and generate --trace wrote"
SECTIONS = "of the recipe: data, features, head, loss, optimizer and schedule (docs/training.md)"
ANYHOW = "write into --out whatever it holds, and learn answers that another target wrote, too"
SERVER = "let this OpenAI-compatible server write (vllm serve, …; key: $OPENAI_API_KEY)"
WARMER = [0.0, 0.7, 1.0]
IN_TURN = "temperature of the answers; several take turns; repeatable"
KIND = (
    "kind of prompt; several take turns: any, maths, code, writing, questions; and about earlier answers: "
    "reading, summaries, translation, turns; repeatable"
)
ANSWERED = "JSONL in any training shape; its own answers are dropped, raw text is gone on with"
AFTER = "ask each question once more after this system message; repeatable"
EXCLUDE = (
    "questions: rows that share 13 words in a row with one, or a shorter one whole, are dropped; repeatable"
)
TREE = "the drafter's own tree (default: the checkpoint's, else its layout's)"
LAYOUT = f"{PUBLIC} (default: that of an imported head, else the method's first)"
EXPORTED = "eagle, eagle3, fasteagle or medusa, or a directory of one"
VLLM = "interpreter of vLLM's environment (make vllm)"
FILTERED = "write the rows that are kept here: JSONL"
HOST = "address to listen at; 0.0.0.0 lets other machines in"
GRAMMAR_MEMORY = "memory that a grammar may take"
ALIAS = "one of those below; without one, what is here is shown"
KEY = "key that requests must give; repeatable; better in the environment, where ps does not show it"
ALLOWED = "a further name by which clients and pages may reach it; repeatable"
SERVED = "what requests call the model (default: as --target names it)"
WINDOW = "tokens of prompt and answer together (default: the target's window, 4096 at most)"
KEEP = "tokens of finished texts whose KV cache is kept for prompts that begin alike; 0 keeps none"

# Options that scripts under benchmarks/ have as well.
TargetName = Annotated[str, on_machine(NAMED, "NAME", "--target")]
Dtype = Annotated[str, on_machine("float32, bfloat16, float16, float64 or auto", "TYPE")]
Device = Annotated[str, on_machine("cpu, cuda, cuda:1, …", "NAME")]
Compile = Annotated[bool, on_machine(COMPILED, None, "--compile")]
Quantize = Annotated[str | None, on_machine("int8 or int4: weights of 8 or 4 bits", "TYPE")]
DrafterName = Annotated[str, option("one of the drafters below", "NAME", "--drafter")]
DrafterNames = Annotated[list[str], option("one of those below; repeatable", "NAME", "--drafter")]
Files = Annotated[list[str], on_questions(QUESTIONS, "FILE", "--questions")]
Limit = Annotated[int | None, on_questions("questions of each file, evenly over it", "N", min=1)]
MaxNewTokens = Annotated[int, on_questions("tokens per answer, at most", "N", min=1, max=2**20)]
Temperature = Annotated[float, on_sampling("0 is greedy", "T", min=0)]
JsonPath = Annotated[str | None, on_results(JSON, "FILE", "--json")]


class Arguments(SimpleNamespace):
    """What a command is called with. This is the table of all options and arguments: type, help, default."""

    # the model
    target: TargetName = "smollm2"
    targets: Annotated[list[str], on_machine(f"{NAMED}; repeatable", "NAME", "--target")] = ["smollm2"]
    dtype: Dtype = "auto"
    device: Device = "cpu"
    compile: Compile = False
    quantize: Quantize = None

    # drafters, and what is asked
    drafter: DrafterName = "auto"
    drafters: DrafterNames = ["auto"]
    tuned_drafter: Annotated[str, option("one of those below", "NAME", "--drafter")] = "auto"
    draft_model: Annotated[str | None, option(SMALLER, "NAME")] = None
    prompt: Annotated[str, argument(help="the user's message; - reads it from standard input")]
    system: Annotated[str | None, on_questions("what the system says first", "TEXT")] = None
    questions: Files = []
    limit: Limit = None
    prompt_count: Annotated[int, on_questions("prompts to measure on, in all", "N", "--limit", min=1)] = 8
    max_new_tokens: MaxNewTokens = 128
    batch: Annotated[int, many("texts decoded at once; what is found serves the nearest number", "N")] = 1
    batches: Annotated[list[int], many("questions that are asked at once; repeatable", "N", "--batch")] = [1]
    answers_at_once: Annotated[int, many("answers that are made at once", "N", "--batch")] = 1
    context: Annotated[int | None, on_questions(CONTEXT, "N", min=1)] = None
    own_context: Annotated[int | None, on_questions(USED, "N", "--context", min=1)] = None

    # sampling
    temperature: Temperature = 0.0
    own_temperature: Annotated[float | None, on_sampling(OWN, "T", "--temperature")] = None
    temperatures: Annotated[list[float], on_sampling(SEVERAL, "T", "--temperature", min=0)] = [0.0]
    top_k: Annotated[int | None, on_sampling("keep the K likeliest tokens", "K")] = None
    top_p: Annotated[float | None, on_sampling("keep the likeliest tokens with this mass", "P")] = None
    min_p: Annotated[float | None, on_sampling(LIKELY, "P")] = None
    repetition_penalty: Annotated[float | None, on_sampling("counts prompt and answer", "X")] = None
    presence_penalty: Annotated[float, on_sampling("counts the answer", "X")] = 0.0
    frequency_penalty: Annotated[float, on_sampling("counts the answer", "X")] = 0.0
    seed: Annotated[int, on_sampling(SAME, "N", min=0, callback=in_64_bits)] = 0
    stop: Annotated[list[str], on_sampling("ends the answer; repeatable", "TEXT")] = []
    json_schema: Annotated[str | None, on_sampling(SCHEMA, "FILE")] = None
    regex: Annotated[str | None, on_sampling("the answer is a match", "REGEX")] = None
    grammar: Annotated[str | None, on_sampling(GRAMMAR, "FILE")] = None
    choice: Annotated[list[str], on_sampling(CHOICE, "TEXT")] = []
    law: Annotated[str | None, on_sampling(LAW, "NAME")] = None
    draws: Annotated[int, on_sampling("answers of each distribution test, at T > 0", "N", min=1)] = 64

    # results
    explain: Annotated[bool, on_results(EXPLAIN, None, "--explain")] = False
    trace: Annotated[str | None, on_results(TRACE, "FILE")] = None
    plot: Annotated[str | None, on_results(PLOT, "FILE")] = None
    tuned_plot: Annotated[str | None, on_results("draw it, as SVG or PNG", "FILE", "--plot")] = None
    json_path: JsonPath = None
    resume: Annotated[bool, on_results("go on with the unfinished run in --json", None, "--resume")] = False
    measure: Annotated[bool, flag("only measure what passes of 1 to 64 rows cost", "--measure")] = False
    page: Annotated[str, option("the page; - is standard output", "FILE", "--out")] = "report.html"
    pages: Annotated[list[str], argument(metavar="RUN.json… TRACE.jsonl…", help=PAGES, show_default=False)]

    # reproduce and parity
    names: Annotated[list[str], argument(metavar="NAME…", help=TABLES, show_default=False)] = []
    sets: Annotated[list[str], on_questions(SETS, "NAME=FILE", "--set")] = []
    heads: Annotated[list[str], option(HEADS, "NAME=DIR", "--head")] = []
    speed: Annotated[bool, on_results(UNTIMED, None, "--speed/--no-speed")] = True
    listing: Annotated[bool, on_results(LISTING, None, "--list")] = False
    python: Annotated[str, option(VLLM, "FILE")] = ".venv-vllm/bin/python"
    draft_tokens: Annotated[int, option("drafted a round", "N", min=1, max=64)] = 3

    # making drafters
    method: Annotated[str, argument(help="one of those below")]
    overrides: Annotated[list[str], argument(metavar="[SECTION.KEY=VALUE]...", help=SECTIONS)] = []
    data: Annotated[list[str], option("JSONL or .txt, gzipped or not; repeatable", "FILE", "--data")] = []
    run_home: Annotated[str | None, option("drafter, checkpoints and log go here", "DIR", "--out")] = None
    recipe: Annotated[str | None, option("YAML, such as the recipe.yaml of each run", "FILE")] = None
    resume_run: Annotated[bool, flag("go on, exactly, from the last checkpoint in --out", "--resume")] = False
    force: Annotated[bool, flag("write into --out whatever it holds", "--force")] = False
    force_run: Annotated[bool, flag(ANYHOW, "--force")] = False
    preview: Annotated[bool, flag("show what is learnt of the data, coloured, and stop", "--preview")] = False
    checkpoint: Annotated[str, argument(metavar="DIR", help=f"a checkpoint written as {PUBLIC}")]
    head: Annotated[str, argument(metavar="drafter", help=EXPORTED)]
    drafter_home: Annotated[str, option("the drafter directory to write", "DIR", "--out")]
    checkpoint_home: Annotated[str, option("the checkpoint to write", "DIR", "--out")]
    tree: Annotated[str | None, option(TREE, "NAME")] = None
    layout: Annotated[str | None, option(LAYOUT, "NAME")] = None

    # training data
    answers: Annotated[str, option("JSONL; an interrupted file is gone on with", "FILE", "--out")]
    prompts: Annotated[int, on_questions("how many to write", "N", min=1, max=10**8)] = 200
    kinds: Annotated[list[str], on_questions(KIND, "NAME", "--kind")] = ["any"]
    server: Annotated[str | None, option(SERVER, "URL")] = None
    systems: Annotated[list[str], option(AFTER, "TEXT", "--system")] = []
    answer_temperatures: Annotated[list[float], on_sampling(IN_TURN, "T", "--temperature", min=0)] = WARMER
    prompt_temperature: Annotated[float, on_sampling("temperature of the prompts", "T", min=0)] = 0.8
    written_at_once: Annotated[int, on_machine(WRITTEN, "N", "--batch", min=1, max=MOST_TEXTS)] = 32
    own_seed: Annotated[int | None, on_sampling(SENT, "N", "--seed", min=0, callback=in_64_bits)] = None
    prompt_file: Annotated[str, argument(metavar="FILE", help=ANSWERED)]
    files: Annotated[list[str], argument(metavar="FILE...", help="training data in any shape")]
    exclude: Annotated[list[str], option(EXCLUDE, "FILE", "--exclude")] = []
    filtered: Annotated[str | None, option(FILTERED, "FILE", "--out")] = None

    # the server
    host: Annotated[str, option(HOST, "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, option("0 takes a free one", "N", min=0, max=65535)] = 8000
    api_key: Annotated[list[str], option(KEY, "KEY", "--api-key", envvar="SLIPSTREAM_API_KEY")] = []
    allowed_host: Annotated[list[str], option(ALLOWED, "NAME", "--allowed-host")] = []
    served_model_name: Annotated[str | None, option(SERVED, "NAME")] = None
    rows: Annotated[int, on_limits("texts under way at once", "N", min=1, max=1024)] = 16
    memory: Annotated[float | None, on_limits(MEMORY, "GIB", min=0)] = None
    queue: Annotated[int, on_limits("texts that may wait for a row", "N", min=0, max=2**20)] = 64
    max_context: Annotated[int | None, on_limits(WINDOW, "N", min=2)] = None
    keep: Annotated[int, on_limits(KEEP, "N", min=0)] = 8192
    max_body: Annotated[int, on_limits("bytes of a request", "N", min=1)] = 2**20
    max_seconds: Annotated[float, on_limits(SECONDS, "S", min=0.001)] = 600.0
    max_grammar_seconds: Annotated[float, on_limits(GRAMMAR_SECONDS, "S", min=0.001, max=86400)] = 2.0
    max_grammar_memory: Annotated[int, on_limits(GRAMMAR_MEMORY, "MIB", min=1, max=2**20)] = 256
    grace: Annotated[int, on_limits(GRACE, "S", min=0)] = 30

    # the cache
    alias: Annotated[str | None, argument(help=ALIAS, show_default=False)] = None
    action: Annotated[str, argument(metavar="clean", help=DELETE, show_default=False)] = "show"
    models: Annotated[bool, flag("only models converted from GGUF, or quantised", "--models")] = False
    fetched: Annotated[bool, flag("only models that fetch brought", "--fetched")] = False
    features: Annotated[bool, flag("only targets' features of training data", "--features")] = False
    compiled: Annotated[bool, flag("only compiled passes", "--compiled")] = False
    kernels: Annotated[bool, flag("only compiled attention and products", "--kernels")] = False
    tuned: Annotated[bool, flag("only trees that tune chose", "--tuned")] = False
    costs: Annotated[bool, flag("only measured costs of passes and rounds", "--costs")] = False
    peers: Annotated[bool, flag("only environments and models of other engines", "--peers")] = False
    older_than: Annotated[float | None, option("only what was not used for this long", "DAYS", min=0)] = None
    yes: Annotated[bool, flag("delete without asking", "--yes")] = False

    def load(self) -> "HFTarget":
        return load(self.target, self.dtype, self.device, self.compile, self.quantize)

    def pick(self, names: str) -> dict[str, Any]:
        """Some of the options, by name."""
        return {name: getattr(self, name) for name in names.split()}


TYPES, REQUIRED = get_type_hints(Arguments, include_extras=True), Parameter.empty


def command(
    *examples: str, takes: str, lists: Callable[[], str] | None = None, **defaults: Any
) -> Callable[[Command], Command]:
    """Registers a command under its function's name, with the options that it `takes`, in this order.

    Args:
        examples: lines of its help, without `slipstream`.
        lists: returns what else its help ends in, when it is shown; the drafters where the command takes any.
        defaults: of options whose default is not the table's.
    """
    names = takes.split()
    ends = lists or (drafters if {"drafter", "drafters"} & {*names} else None)

    class Listing(TyperCommand):
        def format_help(self, *args: Any) -> None:
            lines = ["[bold]Examples[/bold]", *(f"slipstream {line}" for line in examples)]
            self.epilog = "\n".join([*([ends(), ""] if ends else []), *lines])
            super().format_help(*args)

    def register(function: Command) -> Command:
        @wraps(function)
        def call(**values: Any) -> None:
            function(Arguments(**values))

        table = vars(Arguments) | defaults
        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=TYPES[name], default=table.get(name, REQUIRED))
            for name in names
        ]
        call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # where typer reads them
        verb = function.__name__.strip("_")
        TAKES[verb] = {f"--{name.removesuffix('s')}" for name in names}  # --target may stand for `targets`
        app.command(verb, cls=Listing)(call)
        return function

    return register


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


SHOW = "show the version and exit"
PLUGIN = "import a module or a .py file that registers drafting methods; repeatable"


@app.callback()
def slipstream(
    plugin: Annotated[list[str], option(PLUGIN, "MODULE", "--plugin", callback=_plugins)] = [],
    version: Annotated[bool, option(SHOW, None, "--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Slipstream makes a frozen LLM answer faster without changing one token of what it says."""


def listed(title: str, methods: Iterable[Method], *others: tuple[str, str]) -> str:
    """A list of methods for the end of a command's help."""
    lines = []
    for method in methods:
        ships = f"; ships for {', '.join(method.shipped)}" if method.ships and method.shipped else ""
        lines.append((method.name, method.help + ships))
    return "\n".join([title, *(f"  {name:<16}  {help}" for name, help in (*lines, *others))])


def drafters() -> str:
    """All drafters that have a name, those of plugins among them."""
    title = "[bold]Drafters[/bold] (options follow a colon: eagle:tree=chain-5,proposal=noise)"
    return listed(title, named(), DIRECTORY)


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
    """What a command reads: targets, drafters, files that their options name, and other files. Commands call
    it before they import torch. Raises ValueError for what does not exist."""
    for target in several(targets):
        find_target(target)
    for drafter in drafters:
        check_drafter(drafter)
    for file in files:
        if not is_set(file):
            check_file(file, "file")
    specs = [Spec.parse(drafter) for drafter in drafters]
    parts = [part.partition(":")[0] for spec in specs for part in (spec.name, *spec.options.values())]
    return [*several(targets), *parts, *files]


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
        console_for(json_path, other).print(result)


def console_for(*paths: str | None) -> Console:
    """Standard output for tables and lines, or standard error if one of these files is standard output."""
    return err if any(path in STANDARD for path in paths) else out


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
