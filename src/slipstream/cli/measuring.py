"""bench, certify, reproduce: measure, prove, and hold the papers' tables against what is found here."""

from typing import Annotated, Any

import typer

from slipstream.cli.common import (
    MOST_TEXTS,
    Compile,
    Device,
    DrafterNames,
    DraftModelName,
    Dtype,
    Files,
    JsonPath,
    Limit,
    MaxNewTokens,
    Quantize,
    Resume,
    Seed,
    TargetName,
    TargetNames,
    command,
    deliver,
    drafters,
    err,
    inputs,
    kept,
    load,
    on_questions,
    on_results,
    on_sampling,
    option,
    out,
    progress_bar,
    storing,
    unfinished,
    with_model,
)
from slipstream.files import check_writable
from slipstream.measure.datasets import load_questions
from slipstream.plotting import check_picture

SEVERAL = "0 is greedy; repeatable"
PLOT = "draw it, as SVG or PNG: by task and round, or of several runs by texts at once"
BATCHES = "questions that are asked at once; repeatable"
BENCH, SWEEP = "slipstream.measure.results:BenchReport", "slipstream.measure.results:Sweep"  # results
CERTIFICATE = "slipstream.measure.results:Certificate"
REPRODUCED = "slipstream.measure.papers.reproduce_report:ReproduceReport"
Temperatures = Annotated[list[float], on_sampling(SEVERAL, "T", "--temperature", min=0)]


@command(
    "bench --drafter ngram --limit 2",
    "bench --questions mt_bench.jsonl --questions gsm8k.jsonl --limit 20 --drafter ngram --json out.json",
    "bench --drafter auto --questions hf:openai/gsm8k:test --limit 20 --json out.json --resume",
    "bench --drafter ngram --temperature 0 --temperature 1 --batch 1 --batch 4 --json out.json",
    lists=drafters,
)
def bench(
    target: TargetNames = ["smollm2"],
    drafter: DrafterNames = ["auto"],
    draft_model: DraftModelName = None,
    questions: Files = [],
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 128,
    temperatures: Temperatures = [0.0],
    batch: Annotated[list[int], on_questions(BATCHES, "N", "--batch", min=1, max=MOST_TEXTS)] = [1],
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
    plot: Annotated[str | None, on_results(PLOT, "FILE")] = None,
    json_path: JsonPath = None,
    resume: Resume = False,
) -> None:
    """Measure drafters beside plain decoding and Hugging Face generate, in alternation on the same
    prompts.

    Several targets, temperatures or numbers of texts make one run each, and one file in all.
    """
    drafter = [with_model(each, draft_model) for each in drafter]
    check_picture(plot)
    check_writable(plot, json_path, reads=inputs(target, drafter, questions))
    asked, others = load_questions(questions, limit), len(set(drafter) - {"vanilla"})
    several = len(target) * len(temperatures) * len(batch) > 1
    begun: Any = unfinished(resume, json_path, *([] if several else [BENCH]), SWEEP)
    from slipstream.measure.bench import bench as run, steps, sweep
    from slipstream.measure.report.pictures import draw_run, draw_sweep
    from slipstream.measure.results import Sweep

    several |= isinstance(begun, Sweep)  # to which one run is added
    each = sum(steps(asked, others, texts) for texts in batch) * len(temperatures)
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed, "begun": begun}
    each *= len(target)

    def show(report: Any) -> None:
        deliver(report, json_path, plot, lambda path: (draw_sweep if several else draw_run)(report, path))

    with kept(show) as keep, progress_bar(each) as progress:
        how |= {"progress": progress, "keep": storing(keep, json_path)}
        targets = (load(name, dtype, device, compile, quantize) for name in target)
        if several:
            keep(sweep(targets, drafter, asked, temperatures=temperatures, batches=batch, **how))
        else:
            keep(run(next(targets), drafter, asked, temperature=temperatures[0], batch=batch[0], **how))


DRAWS = "answers of each distribution test, at T > 0"


@command(
    "certify --limit 4",
    "certify --target ./my-model --drafter ngram --temperature 0 --temperature 0.7 --json certificate.json",
    "certify --drafter auto --drafter eagle:proposal=sampled,tree=chain-3 --json certificate.json --resume",
    lists=drafters,
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
    resume: Resume = False,
) -> None:
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
    check_writable(json_path, reads=inputs(target, drafter, questions))
    asked = load_questions(questions, limit)
    begun = unfinished(resume, json_path, CERTIFICATE)
    from slipstream.measure.certify import certify as run

    how: Any = {"temperatures": temperatures, "max_new_tokens": max_new_tokens, "seed": seed, "draws": draws}

    with kept(lambda report: deliver(report, json_path)) as keep, progress_bar(None) as progress:
        loaded = load(target, dtype, device, compile, quantize)
        how |= {"begun": begun, "progress": progress, "keep": storing(keep, json_path)}
        report = run(loaded, drafter, asked, **how)
        keep(report)
    if not report.certified:
        raise typer.Exit(1)


TABLES = "such as eagle-table-1 (default: all); --list shows them"
SETS = "questions of a set, as xsum=FILE; repeatable (default: what ships)"
HEADS = "a head's directory, as eagle=runs/eagle; repeatable"
LISTING = "show all tables and figures, and which stand in the file of --json"
UNTIMED = "leave out what takes time: τ and acceptance alone"


@command(
    "reproduce --list",
    "reproduce eagle-table-1 eagle-table-2 --set gsm8k=gsm8k.jsonl --json tables.json",
    "reproduce --no-speed --set mt_bench=mt_bench.jsonl --json tables.json --resume",
    "reproduce fasteagle-table-2 --head parallel=runs/parallel --head nofeature=runs/nofeature",
)
def reproduce(
    names: Annotated[list[str], typer.Argument(help=TABLES, metavar="NAME…", show_default=False)] = [],
    target: TargetName = "smollm2",
    sets: Annotated[list[str], on_questions(SETS, "NAME=FILE", "--set")] = [],
    heads: Annotated[list[str], option(HEADS, "NAME=DIR", "--head")] = [],
    limit: Limit = 20,
    max_new_tokens: MaxNewTokens = 64,
    speed: Annotated[bool, on_results(UNTIMED, None, "--speed/--no-speed")] = True,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
    json_path: JsonPath = None,
    resume: Resume = False,
    listing: Annotated[bool, on_results(LISTING, None, "--list")] = False,
) -> None:
    """Measure the papers' tables and figures on your target, beside the papers' own figures.

    Each relation that a table shows holds, does not hold, or is undecided, by intervals over
    questions. Fewer than 20 questions of 64 tokens are marked as smoke.
    """
    own, where = _pairs(sets, "--set"), _pairs(heads, "--head")
    if not listing:
        check_writable(json_path, reads=inputs(target, [*where.values()], [*own.values()]))
    begun = unfinished((listing and json_path is not None) or resume, json_path, REPRODUCED)
    from slipstream.measure.papers.reproduce import listed, reproduce as run, wanted

    if listing:
        out.print(listed(begun))
        return
    wanted(names, own, where, limit)
    how: dict[str, Any] = {"limit": limit, "max_new_tokens": max_new_tokens, "speed": speed, "seed": seed}
    with kept(lambda report: deliver(report, json_path)) as keep, progress_bar(None) as progress:
        loaded = load(target, dtype, device, compile, quantize)
        how |= {"sets": own, "heads": where, "begun": begun, "progress": progress}

        def announce(told: str, steps: int) -> None:
            err.print(told, soft_wrap=True)
            progress("", 0, of=steps)

        how |= {"announce": announce, "keep": storing(keep, json_path)}
        keep(run(loaded, names, **how))


def _pairs(given: list[str], option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals and value):
            raise ValueError(f"{option} {each}: give NAME=PATH, such as gsm8k=gsm8k.jsonl")
        if name in pairs:
            raise ValueError(f"{option} {name} is given twice, {pairs[name]} and {value}: give one")
        pairs[name] = value
    return pairs
