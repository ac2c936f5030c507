"""demo, bench, certify, tune, doctor: show, measure, prove, choose trees, and find faults."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.common import (
    DIRECTORY,
    DRAFTERS,
    Compile,
    Device,
    DrafterName,
    DrafterNames,
    Dtype,
    Files,
    JsonPath,
    Limit,
    MaxNewTokens,
    Quantize,
    Seed,
    TargetName,
    Temperature,
    command,
    deliver,
    err,
    flag,
    inputs,
    kept,
    listed,
    load,
    on_questions,
    on_results,
    on_sampling,
    option,
    out,
    progress_bar,
)
from slipstream.files import STANDARD, check_writable, evenly, read_results
from slipstream.measure.questions import load_questions
from slipstream.methods import named

if TYPE_CHECKING:
    from slipstream.targets import HFTarget

SEVERAL = "0 is greedy; repeatable"
Temperatures = Annotated[list[float], on_sampling(SEVERAL, "T", "--temperature", min=0)]


@command("demo", "demo --limit 8 --temperature 1", "demo --target ./my-model --dtype float32", lists=DRAFTERS)
def demo(
    target: TargetName = "smollm2",
    drafter: DrafterName = "auto",
    questions: Files = [],
    limit: Limit = 8,
    max_new_tokens: MaxNewTokens = 96,
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
    from slipstream.measure.demo import demo as run
    from slipstream.measure.run import Contest

    asked = load_questions(questions, limit)
    contest = Contest.of(
        load(target, dtype, device, compile, quantize), [drafter], max_new_tokens, temperature, seed
    )
    run(contest, drafter, asked, out)


@command(
    "bench --drafter ngram --limit 2",
    "bench --questions mt_bench.jsonl --questions gsm8k.jsonl --limit 20 --drafter ngram --json out.json",
    "bench --drafter ngram --temperature 1 --dtype float32",
    lists=DRAFTERS,
)
def bench(
    target: TargetName = "smollm2",
    drafter: DrafterNames = ["auto"],
    questions: Files = [],
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
    json_path: JsonPath = None,
) -> None:
    """Measure drafters beside plain decoding and Hugging Face generate, in alternation on the same
    prompts."""
    from slipstream.measure.run import bench as run

    check_writable(json_path, reads=inputs(target, drafter, questions))
    asked = load_questions(questions, limit)
    steps = 1 + sum(len(question.turns) for question in asked) * (2 + len(set(drafter) - {"vanilla"}))
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    with kept(lambda report: deliver(report, json_path)) as keep, progress_bar(steps) as progress:
        loaded = load(target, dtype, device, compile, quantize)
        keep(run(loaded, drafter, asked, **how, progress=progress, keep=keep))


DRAWS = "answers of each distribution test, at T > 0"
GO_ON = "go on with the unfinished run in --json"


@command(
    "certify --limit 4",
    "certify --target ./my-model --drafter ngram --temperature 0 --temperature 0.7 --json certificate.json",
    "certify --drafter auto --drafter eagle:proposal=sampled,tree=chain-3 --json certificate.json --resume",
    lists=DRAFTERS,
)
def certify(
    target: TargetName = "smollm2",
    drafter: DrafterNames = ["auto"],
    questions: Files = [],
    limit: Limit = 20,
    max_new_tokens: MaxNewTokens = 128,
    temperatures: Temperatures = [0.0, 1.0],
    draws: Annotated[int, on_sampling(DRAWS, "N", min=1)] = 64,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
    json_path: JsonPath = None,
    resume: Annotated[bool, on_results(GO_ON, None, "--resume")] = False,
) -> None:
    """Prove losslessness on your own model: every token of every answer is audited against plain decoding.

    On a CPU in float32 and bfloat16 no token may differ, because a row of a pass has the same
    bits whatever rows stand beside it. Elsewhere one may where two are nearly tied and
    rounding turned them: within 0.001 logits in float32, 0.5 in bfloat16, and in float64 never.

    A tree oracle always runs beside the drafters, and at T = 0 Hugging Face generate is
    audited too, except with --quantize: its own attention rounds otherwise. At T > 0 draws are
    tested against the target's law: plain decoding's, and those of drafters that keep the
    distribution and not the text. Exit code 1 if a token is not explained or a test fails.

    slipstream report shows the JSON as a page.
    """
    from slipstream.measure.certify import UNFINISHED, Certificate, certify as run

    if resume and (json_path is None or json_path in STANDARD):
        raise ValueError("--resume goes on with the run in --json: give --json FILE")
    check_writable(json_path, reads=inputs(target, drafter, questions))
    asked = load_questions(questions, limit)
    begun = Certificate.read(json_path) if resume and json_path and os.path.exists(json_path) else None
    how: Any = {"temperatures": temperatures, "max_new_tokens": max_new_tokens, "seed": seed, "draws": draws}

    def store(found: Certificate) -> None:
        if found.stopped != UNFINISHED:
            keep(found)
        elif json_path is not None and json_path not in STANDARD:
            found.write(json_path)

    with kept(lambda report: deliver(report, json_path)) as keep, progress_bar(None) as progress:
        loaded = load(target, dtype, device, compile, quantize)
        report = run(loaded, drafter, asked, **how, begun=begun, progress=progress, keep=store)
        keep(report)
    if not report.certified:
        raise typer.Exit(1)


TUNED = [method for method in named() if method.tunes]
Prompts = Annotated[int, on_questions("prompts that drafts are held against, in all", "N", min=1)]
TEXTS = "texts that share a round; kept for the nearest number"
CONTEXT = "tokens behind which rounds are timed (default: as the questions have)"


@command(
    "tune --drafter auto --dtype auto --compile",
    "tune --drafter auto --batch 4 --context 1024 --compile",
    "tune --drafter runs/eagle --questions gsm8k.jsonl --json tuned.json --plot tuned.svg",
    "tune --drafter draft-model:model=./small --compile",
    "tune --drafter self-speculative",
    "tune --measure --plot costs.svg",
    lists=listed("[bold]Drafters that grow trees[/bold]", *TUNED, others=[DIRECTORY]),
)
def tune(
    target: TargetName = "smollm2",
    drafter: Annotated[str, option("one of those below", "NAME")] = "eagle",
    questions: Files = [],
    limit: Prompts = 8,
    batch: Annotated[int, on_questions(TEXTS, "N", min=1)] = 1,
    context: Annotated[int | None, on_questions(CONTEXT, "N", min=1)] = None,
    measure: Annotated[bool, flag("only measure what passes of 1 to 64 rows cost", "--measure")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
    plot: Annotated[str | None, on_results("draw it, as SVG", "FILE")] = None,
    json_path: JsonPath = None,
) -> None:
    """Find the tree that pays most on this machine; generate and bench then grow it unless told otherwise.

    The best tree of each size is kept for auto, whose head this drafter may be, with what auto's
    rounds cost and bring here: its first answer then measures nothing.
    """
    from slipstream.drafters import tuned_home
    from slipstream.drafters.auto import tuned_head
    from slipstream.drafters.store import tuned_file
    from slipstream.measure.tune import tune as run
    from slipstream.measure.tuned import TuneReport

    check_writable(plot, json_path, reads=inputs(target, [drafter], questions))
    asked = evenly(load_questions(questions), limit)
    loaded = load(target, dtype, device, compile, quantize)
    if measure:
        _measure(loaded, plot, json_path)
        return

    def show(report: TuneReport) -> None:
        deliver(report, json_path, plot, report.draw)
        head = tuned_head(drafter, loaded)
        for line in report.static_trees(head):
            out.print(line, soft_wrap=True)
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
        deliver(report, json_path, plot, report.draw)
    finally:
        cost.save_costs(target, report)
    err.print(f"kept in {cost.costs_file()}", style="dim", soft_wrap=True)


AT_ONCE = "answers that are made at once"
USED = "tokens of the texts in use (default: as the questions have)"


@command(
    "doctor --compile",
    "doctor --drafter runs/eagle --temperature 0.7 --compile",
    "doctor --drafter eagle:tree=chain-2 --batch 8 --context 2048 --json found.json",
    lists=DRAFTERS,
)
def doctor(
    target: TargetName = "smollm2",
    drafter: DrafterName = "auto",
    questions: Files = [],
    limit: Prompts = 8,
    max_new_tokens: MaxNewTokens = 32,
    temperature: Temperature = 0.0,
    batch: Annotated[int, on_questions(AT_ONCE, "N", min=1)] = 1,
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
    from slipstream.measure.doctor import STEPS, doctor as run

    check_writable(json_path, reads=inputs(target, [drafter], questions))
    asked = load_questions(questions)
    how: Any = {"temperature": temperature, "batch": batch, "context": context, "limit": limit}
    with progress_bar(STEPS) as progress:
        loaded = load(target, dtype, device, compile, quantize)
        report = run(loaded, drafter, asked, **how, max_new_tokens=max_new_tokens, progress=progress)
    deliver(report, json_path)
    if report.found:
        raise typer.Exit(1)
