"""demo, tune, doctor: show, choose trees, and find faults."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.common import (
    DIRECTORY,
    MOST_TEXTS,
    Compile,
    Device,
    DrafterName,
    Dtype,
    Files,
    JsonPath,
    Limit,
    MaxNewTokens,
    Quantize,
    Seed,
    TargetName,
    Temperature,
    beside,
    command,
    deliver,
    drafters,
    err,
    flag,
    inputs,
    kept,
    listed,
    load,
    on_questions,
    on_results,
    option,
    out,
    progress_bar,
)
from slipstream.files import check_writable, evenly, read_results
from slipstream.measure.datasets import load_questions
from slipstream.methods import named
from slipstream.plotting import check_picture
from slipstream.provenance import suggested

if TYPE_CHECKING:
    from slipstream.targets import HFTarget


@command("demo", "demo --limit 8 --temperature 1", "demo --target ./my-model --dtype float32", lists=drafters)
def demo(
    target: TargetName = "smollm2",
    drafter: DrafterName = "auto",
    questions: Files = [],
    limit: Limit = 3,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
) -> None:
    """Answer questions twice, plainly and with a drafter: the same text, sooner.

    Where passes over several rows round differently, as on a GPU, a near-tie may turn; the
    demo then says so.
    """
    inputs(target, [drafter], questions)
    asked = load_questions(questions, limit)
    from slipstream.measure.demo import demo as run
    from slipstream.measure.runner import Runner

    runner = Runner.of(
        load(target, dtype, device, compile, quantize), [drafter], max_new_tokens, temperature, seed
    )
    run(runner, drafter, asked, out)
    words = 'generate "What is gravity?"'
    words += f" --drafter {shlex.quote(drafter)}" if drafter != "auto" else ""
    out.print(f"\nnext: {suggested(words)}", soft_wrap=True)


def _growers() -> str:
    tuned = (method for method in named() if method.tunes)
    return listed("[bold]Drafters that grow trees[/bold]", tuned, others=[DIRECTORY])


Prompts = Annotated[int, on_questions("prompts to measure on, in all", "N", min=1)]
PROMPTS = 8
TEXTS = "texts decoded at once; what is found serves the nearest number"
CONTEXT = "length of the context at which rounds are timed, in tokens (default: the questions')"


@command(
    "tune",
    "tune --batch 4 --context 1024",
    "tune --drafter runs/eagle --questions gsm8k.jsonl --json tuned.json --plot tuned.svg",
    "tune --drafter draft-model:model=./small",
    "tune --drafter self-speculative",
    "tune --measure --plot costs.svg",
    lists=_growers,
)
def tune(
    target: TargetName = "smollm2",
    drafter: Annotated[str, option("one of those below", "NAME")] = "auto",
    questions: Files = [],
    limit: Prompts = PROMPTS,
    batch: Annotated[int, on_questions(TEXTS, "N", min=1, max=MOST_TEXTS)] = 1,
    context: Annotated[int | None, on_questions(CONTEXT, "N", min=1)] = None,
    measure: Annotated[bool, flag("only measure what passes of 1 to 64 rows cost", "--measure")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
    plot: Annotated[str | None, on_results("draw it, as SVG or PNG", "FILE")] = None,
    json_path: JsonPath = None,
) -> None:
    """Find the tree that pays most on this machine; generate and bench then grow it unless told otherwise.

    The best tree of each size is kept for auto, whose head this drafter may be, with what auto's
    rounds cost and bring here: its first answer then measures nothing.
    """
    check_picture(plot)
    check_writable(plot, json_path, reads=inputs(target, [drafter], questions))
    if measure and (drafter != "auto" or questions or limit != PROMPTS or batch > 1 or context is not None):
        raise ValueError(
            "--measure times passes of 1 and of 4 texts behind 128, 512 and 1024 tokens, without a drafter: "
            "leave --drafter, --questions, --limit, --batch and --context out"
        )
    asked = evenly(load_questions(questions), limit)
    from slipstream.drafters import tuned_home
    from slipstream.drafters.auto import tuned_head
    from slipstream.drafters.store import tuned_file
    from slipstream.measure.results import TuneReport
    from slipstream.measure.tune import tune as run

    loaded = load(target, dtype, device, compile, quantize)
    if measure:
        _measure(loaded, plot, json_path)
        return

    def show(report: TuneReport) -> None:
        deliver(report, json_path, plot, report.plot)
        head = tuned_head(drafter, loaded)
        for line in report.static_trees(head):
            beside(json_path, plot).print(line, soft_wrap=True)
        err.print(f"kept in {tuned_file(tuned_home(head, loaded))}", style="dim", soft_wrap=True)

    with kept(show) as keep, progress_bar(None) as progress:
        how: dict[str, Any] = {"batch": batch, "context": context, "limit": None}
        keep(run(loaded, drafter, asked, **how, progress=progress, keep=keep))


def _measure(target: "HFTarget", plot: str | None, json_path: str | None) -> None:
    """Measure the cost of passes, show it and store it."""
    from slipstream.measure import cost

    read_results(cost.costs_file())
    with progress_bar(None) as progress:
        report = cost.cost_curve(target, progress=progress)
    try:
        deliver(report, json_path, plot, report.plot)
    finally:
        cost.save_costs(target, report)
    err.print(f"kept in {cost.costs_file()}", style="dim", soft_wrap=True)


AT_ONCE = "answers that are made at once"
USED = "length of your texts, in tokens (default: the questions')"


@command(
    "doctor",
    "doctor --drafter runs/eagle --temperature 0.7",
    "doctor --drafter eagle:tree=chain-2 --batch 8 --context 2048 --json found.json",
    lists=drafters,
)
def doctor(
    target: TargetName = "smollm2",
    drafter: DrafterName = "auto",
    questions: Files = [],
    limit: Prompts = 8,
    max_new_tokens: MaxNewTokens = 32,
    temperature: Temperature = 0.0,
    batch: Annotated[int, on_questions(AT_ONCE, "N", min=1, max=MOST_TEXTS)] = 1,
    context: Annotated[int | None, on_questions(USED, "N", min=1)] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
    json_path: JsonPath = None,
) -> None:
    """Find out why drafting is slow or guesses badly, and what to do about it.

    A few short answers are decoded and measured: their framing, the head's guesses as they are and with other
    states and positions, and what passes cost here. It takes about a minute. Exit code 1 if a fault was
    found.
    """
    check_writable(json_path, reads=inputs(target, [drafter], questions))
    asked = load_questions(questions)
    from slipstream.measure.doctor.doctor import STEPS, doctor as run

    how: Any = {"temperature": temperature, "batch": batch, "context": context, "limit": limit}
    with progress_bar(STEPS) as progress:
        loaded = load(target, dtype, device, compile, quantize)
        report = run(loaded, drafter, asked, **how, max_new_tokens=max_new_tokens, progress=progress)
    deliver(report, json_path)
    if report.found:
        raise typer.Exit(1)
