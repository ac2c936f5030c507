"""bench, certify, tune, doctor, reproduce, report: measure, prove, choose trees, find faults, and show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from os.path import exists
from pkgutil import resolve_name
from typing import Any

import typer

from slipstream.cli import common as cli
from slipstream.files import STANDARD, check_writable, evenly, read_results, replacing
from slipstream.measure.datasets import load_questions
from slipstream.methods import named
from slipstream.plotting import check_picture

BENCH, SWEEP = "slipstream.measure.results:BenchReport", "slipstream.measure.results:Sweep"  # results
CERTIFICATE = "slipstream.measure.results:Certificate"
REPRODUCED = "slipstream.measure.papers.reproduce_report:ReproduceReport"


@contextmanager
def reported(
    json_path: str | None, show: Callable[[Any], Any] | None = None
) -> Iterator[Callable[..., None]]:
    """Yields a function that takes reports. A report of a run under way is written to --json. The others are
    shown at the end, by default printed and written, even where an error ends the work."""
    from slipstream.measure.resume import UNFINISHED

    reports: list[Any] = []

    def take(report: Any) -> None:
        if report.stopped != UNFINISHED:
            reports.append(report)
        elif json_path is not None and json_path not in STANDARD:
            report.write(json_path)

    try:
        yield take
    finally:
        for report in reports:
            show(report) if show else cli.deliver(report, json_path)
            if report.stopped is not None:
                text = "stopped early: these are the figures of what was done until then"
                cli.err.print(text, style="yellow")


def unfinished(resume: bool, json_path: str | None, *kinds: str) -> Any:
    """The run in --json that --resume goes on with, if there is one. Raises ValueError for a file that holds
    a result of none of these kinds, each of which is "module:Class"."""
    if resume and (json_path is None or json_path in STANDARD):
        raise ValueError("--resume goes on with the run in --json: give --json FILE")
    if not resume or not exists(str(json_path)):
        return None
    errors = []
    for kind in kinds:
        try:
            return resolve_name(kind).read(json_path)
        except ValueError as error:
            errors.append(error)
    fix = "name a run of this command, or another file"
    raise ValueError(f"--json {json_path}: {errors[0]}: {fix}") from errors[0]


@cli.command(
    "bench --drafter ngram --limit 2",
    "bench --questions mt_bench.jsonl --questions gsm8k.jsonl --limit 20 --drafter ngram --json out.json",
    "bench --drafter auto --questions hf:openai/gsm8k:test --limit 20 --json out.json --resume",
    "bench --drafter ngram --temperature 0 --temperature 1 --batch 1 --batch 4 --json out.json",
    takes="targets drafters draft_model questions limit max_new_tokens temperatures batches seed "
    f"{cli.MACHINE} plot json_path resume",
)
def bench(options: cli.Arguments) -> None:
    """Measure drafters beside plain decoding and Hugging Face generate, in alternation on the same
    prompts.

    Several targets, temperatures or numbers of texts make one run each, and one file in all.
    """
    drafters = [cli.with_model(drafter, options.draft_model) for drafter in options.drafters]
    plot, json_path, batches, temperatures = (
        options.plot,
        options.json_path,
        options.batches,
        options.temperatures,
    )
    check_picture(plot)
    check_writable(plot, json_path, reads=cli.inputs(options.targets, drafters, options.questions))
    questions = load_questions(options.questions, options.limit)
    several = len(options.targets) * len(temperatures) * len(batches) > 1
    begun: Any = unfinished(options.resume, json_path, *([] if several else [BENCH]), SWEEP)
    from slipstream.measure.bench import bench as run, steps, sweep
    from slipstream.measure.results import Sweep

    several |= isinstance(begun, Sweep)  # to which one run is added
    others = len(set(drafters) - {"vanilla"})
    total = sum(steps(questions, others, batch) for batch in batches)
    total *= len(temperatures) * len(options.targets)

    def show(report: Any) -> None:
        cli.deliver(report, json_path, plot, report.plot)

    with reported(json_path, show) as keep, cli.progress_bar(total) as progress:
        settings: dict[str, Any] = {"begun": begun, "progress": progress, "keep": keep}
        settings |= options.pick("max_new_tokens seed")
        targets = (cli.load(name, **options.pick(cli.MACHINE)) for name in options.targets)
        if several:
            settings |= {"temperatures": temperatures, "batches": batches}
            keep(sweep(targets, drafters, questions, **settings))
        else:
            settings |= {"temperature": temperatures[0], "batch": batches[0]}
            keep(run(next(targets), drafters, questions, **settings))


@cli.command(
    "certify --limit 4",
    "certify --target ./my-model --drafter ngram --temperature 0 --temperature 0.7 --json certificate.json",
    "certify --drafter auto --drafter eagle:proposal=sampled,tree=chain-3 --json certificate.json --resume",
    takes="target drafters questions limit max_new_tokens temperatures draws seed "
    f"{cli.MACHINE} json_path resume",
    limit=20,
    temperatures=[0.0, 1.0],
    dtype="float32",
)
def certify(options: cli.Arguments) -> None:
    """Prove losslessness on your own model: every token of every answer is audited against plain decoding.

    On a CPU in float32 and bfloat16 no token may differ, because a row of a pass has the same
    bits whatever rows stand beside it. Elsewhere one may where two are nearly tied and
    rounding turned them: within 1e-9 logits in float64, 0.001 in float32, 0.1 in float16, 0.5 in bfloat16.

    A tree oracle always runs beside the drafters, and at T = 0 Hugging Face generate is
    audited too, except with --quantize: its own attention rounds otherwise. At T > 0 draws are
    tested against the target's law: plain decoding's, and those of drafters that keep the
    distribution and not the text. Exit code 1 if a token is not explained or a test fails.

    slipstream report shows the JSON as a page.
    """
    json_path = options.json_path
    check_writable(json_path, reads=cli.inputs(options.target, options.drafters, options.questions))
    questions = load_questions(options.questions, options.limit)
    settings = options.pick("temperatures max_new_tokens seed draws")
    settings["begun"] = unfinished(options.resume, json_path, CERTIFICATE)
    from slipstream.measure.certify import certify as run

    with reported(json_path) as keep, cli.progress_bar(None) as progress:
        report = run(options.load(), options.drafters, questions, **settings, progress=progress, keep=keep)
        keep(report)
    if not report.certified:
        raise typer.Exit(1)


@cli.command(
    "tune",
    "tune --batch 4 --context 1024",
    "tune --drafter runs/eagle --questions gsm8k.jsonl --json tuned.json --plot tuned.svg",
    "tune --drafter draft-model:model=./small",
    "tune --drafter self-speculative",
    "tune --measure --plot costs.svg",
    takes=f"target tuned_drafter questions prompt_count batch context measure {cli.MACHINE} "
    "tuned_plot json_path",
    lists=lambda: cli.listed(
        "[bold]Drafters that grow trees[/bold]", filter(attrgetter("tunes"), named()), cli.DIRECTORY
    ),
)
def tune(options: cli.Arguments) -> None:
    """Find the tree that pays most on this machine; generate and bench then grow it unless told otherwise.

    The best tree of each size is kept for auto, whose head this drafter may be, with what auto's
    rounds cost and bring here: its first answer then measures nothing.
    """
    drafter, plot, json_path = options.tuned_drafter, options.tuned_plot, options.json_path
    check_picture(plot)
    check_writable(plot, json_path, reads=cli.inputs(options.target, [drafter], options.questions))
    unused = options.pick("tuned_drafter questions prompt_count batch context")
    if options.measure and unused != cli.Arguments().pick(" ".join(unused)):
        raise ValueError(
            "--measure times passes of 1 and of 4 texts behind 128, 512 and 1024 tokens, without a drafter: "
            "leave --drafter, --questions, --limit, --batch and --context out"
        )
    questions = evenly(load_questions(options.questions), options.prompt_count)
    from slipstream.drafters import tuned_home
    from slipstream.drafters.auto import tuned_head
    from slipstream.drafters.store import tuned_file
    from slipstream.measure import cost
    from slipstream.measure.tune import tune as run

    target = options.load()
    if options.measure:
        read_results(cost.costs_file())
        with cli.progress_bar(None) as progress:
            curve = cost.cost_curve(target, progress=progress)
        try:
            cli.deliver(curve, json_path, plot, curve.plot)
        finally:
            cost.save_costs(target, curve)
        cli.err.print(f"kept in {cost.costs_file()}", style="dim", soft_wrap=True)
        return

    def show(report: Any) -> None:
        cli.deliver(report, json_path, plot, report.plot)
        head = tuned_head(drafter, target)
        for line in report.static_trees(head):
            cli.console_for(json_path, plot).print(line, soft_wrap=True)
        cli.err.print(f"kept in {tuned_file(tuned_home(head, target))}", style="dim", soft_wrap=True)

    with reported(json_path, show) as keep, cli.progress_bar(None) as progress:
        settings: Any = options.pick("batch context") | {"limit": None}
        keep(run(target, drafter, questions, **settings, progress=progress, keep=keep))


@cli.command(
    "doctor",
    "doctor --drafter runs/eagle --temperature 0.7",
    "doctor --drafter eagle:tree=chain-2 --batch 8 --context 2048 --json found.json",
    takes="target drafter questions prompt_count max_new_tokens temperature answers_at_once own_context "
    f"{cli.MACHINE} json_path",
    max_new_tokens=32,
)
def doctor(options: cli.Arguments) -> None:
    """Find out why drafting is slow or guesses badly, and what to do about it.

    A few short answers are decoded and measured: their framing, the head's guesses as they are and with other
    states and positions, and what passes cost here. It takes about a minute. Exit code 1 if a fault was
    found.
    """
    check_writable(options.json_path, reads=cli.inputs(options.target, [options.drafter], options.questions))
    questions = load_questions(options.questions)
    from slipstream.measure.doctor.doctor import STEPS, doctor as run

    settings = options.pick("temperature max_new_tokens") | {"limit": options.prompt_count}
    settings |= {"batch": options.answers_at_once, "context": options.own_context}
    with cli.progress_bar(STEPS) as progress:
        report = run(options.load(), options.drafter, questions, **settings, progress=progress)
    cli.deliver(report, options.json_path)
    if report.found:
        raise typer.Exit(1)


@cli.command(
    "reproduce --list",
    "reproduce eagle-table-1 eagle-table-2 --set gsm8k=gsm8k.jsonl --json tables.json",
    "reproduce --no-speed --set mt_bench=mt_bench.jsonl --json tables.json --resume",
    "reproduce fasteagle-table-2 --head parallel=runs/parallel --head nofeature=runs/nofeature",
    takes=f"names target sets heads limit max_new_tokens speed seed {cli.MACHINE} json_path resume listing",
    limit=20,
    max_new_tokens=64,
)
def reproduce(options: cli.Arguments) -> None:
    """Measure the papers' tables and figures on your target, beside the papers' own figures.

    Each relation that a table shows holds, does not hold, or is undecided, by intervals over
    questions. Fewer than 20 questions of 64 tokens are marked as smoke.
    """
    sets, heads = _pairs(options.sets, "--set"), _pairs(options.heads, "--head")
    listing, json_path = options.listing, options.json_path
    if not listing:
        check_writable(json_path, reads=cli.inputs(options.target, [*heads.values()], [*sets.values()]))
    begun = unfinished((listing and json_path is not None) or options.resume, json_path, REPRODUCED)
    from slipstream.measure.papers.reproduce import listed, reproduce as run, wanted

    if listing:
        cli.out.print(listed(begun))
        return
    wanted(options.names, sets, heads, options.limit)
    settings = options.pick("limit max_new_tokens speed seed") | {"sets": sets, "heads": heads}
    with reported(json_path) as keep, cli.progress_bar(None) as progress:

        def announce(text: str, steps: int) -> None:
            cli.err.print(text, soft_wrap=True)
            progress("", 0, of=steps)

        settings |= {"begun": begun, "progress": progress, "announce": announce, "keep": keep}
        keep(run(options.load(), options.names, **settings))


def _pairs(words: list[str], option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not (name and value):
            raise ValueError(f"{option} {word}: give NAME=PATH, such as gsm8k=gsm8k.jsonl")
        if name in pairs:
            raise ValueError(f"{option} {name} is given twice, {pairs[name]} and {value}: give one")
        pairs[name] = value
    return pairs


@cli.command(
    "report bench.json",
    "report before.json after.json --out both.html",
    "report bench.json answer.jsonl",
    "report certificate.json --out certificate.html",
    takes="pages page",
)
def report(options: cli.Arguments) -> None:
    """Make one HTML page of runs, certificates and traces: tables, pictures, and answers round by round.

    The page needs no other file and no network. Several runs are compared, two at a time. Each
    round of an answer shows the tree that was drafted, and what the target made of it.
    """
    path = options.page
    check_writable(path, reads=cli.inputs(files=options.pages))
    from slipstream.measure.report.page import page

    html = page(options.pages)
    with replacing(path) as file:
        file.write(html)
    if path not in STANDARD:
        cli.err.print(f"{path}: {len(html.encode()) / 1000:,.0f} kB", style="dim", soft_wrap=True)
