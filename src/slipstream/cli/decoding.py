"""demo, generate, bench, certify: answer, measure, prove."""

import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.common import (
    DRAFTERS,
    RESULTS,
    SAMPLING,
    Compile,
    Device,
    DrafterName,
    DrafterNames,
    Dtype,
    Files,
    JsonPath,
    Limit,
    MaxNewTokens,
    Seed,
    TargetName,
    Temperature,
    command,
    deliver,
    err,
    inputs,
    kept,
    load,
    option,
    out,
    progress_bar,
)

if TYPE_CHECKING:
    from slipstream.decode.generate import Generation


OWN = "0 is greedy (default: the target's own)"
OwnTemperature = Annotated[float | None, option(OWN, "T", panel=SAMPLING)]
TopK = Annotated[int | None, option("keep the K likeliest tokens", "K", panel=SAMPLING)]
TopP = Annotated[float | None, option("keep the likeliest tokens with this mass", "P", panel=SAMPLING)]
LIKELY = "keep tokens this fraction as likely as the likeliest"
MinP = Annotated[float | None, option(LIKELY, "P", panel=SAMPLING)]
RepetitionPenalty = Annotated[float | None, option("counts prompt and answer", "X", panel=SAMPLING)]
AnswerPenalty = Annotated[float, option("counts the answer", "X", panel=SAMPLING)]
Stop = Annotated[list[str], option("ends the answer; repeatable", "TEXT", panel=SAMPLING)]
LAW = "coupled or multi-round (default: the drafter's own); lossy-typical, Medusa's, changes the text"
LawName = Annotated[str | None, option(LAW, "NAME", panel=SAMPLING)]
Trace = Annotated[str | None, option("write one JSON line per round here", "FILE", panel=RESULTS)]
SEVERAL = "0 is greedy; repeatable"
Temperatures = Annotated[list[float], option(SEVERAL, "T", "--temperature", panel=SAMPLING, min=0)]


@command("demo", "demo --limit 8 --temperature 1", "demo --target ./my-model --dtype float32", lists=DRAFTERS)
def demo(
    target: TargetName = "smollm2",
    drafter: DrafterName = "ngram",
    questions: Files = [],  # noqa: B006
    limit: Limit = 8,
    max_new_tokens: MaxNewTokens = 96,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
) -> None:
    """Answer questions twice, plainly and with a drafter: the same text, sooner.

    In float32 and bfloat16 rounding may turn a near-tie; the demo then says so.
    """
    from slipstream.measure.demo import demo as run
    from slipstream.measure.questions import load_questions
    from slipstream.measure.run import Contest

    asked = load_questions(questions, limit)
    contest = Contest.of(load(target, dtype, device, compile), [drafter], max_new_tokens, temperature, seed)
    run(contest, drafter, asked, out)


@command(
    'generate "What is gravity?"',
    'generate "Write a haiku." --temperature 0.8 --top-p 0.95 --seed 7',
    "generate - --drafter ngram --json answer.json < long_prompt.txt",
    lists=DRAFTERS,
)
def generate(
    prompt: Annotated[str, typer.Argument(help="the user's message; - reads it from standard input")],
    target: TargetName = "smollm2",
    drafter: DrafterName = "ngram",
    max_new_tokens: MaxNewTokens = 256,
    temperature: OwnTemperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: AnswerPenalty = 0.0,
    frequency_penalty: AnswerPenalty = 0.0,
    seed: Seed = 0,
    stop: Stop = [],  # noqa: B006
    law: LawName = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    trace: Trace = None,
    json_path: JsonPath = None,
) -> None:
    """Answer one prompt, printed as it is made; figures go to standard error.

    The text is the same whatever the drafter: exactly in float64, and in
    float32 and bfloat16 up to near-ties, which rounding may turn.
    """
    from slipstream.decode.generate import stream
    from slipstream.decode.settings import resolve_sampling
    from slipstream.drafters import load_drafter
    from slipstream.files import STANDARD, check_writable, replacing

    check_writable(trace, json_path, reads=inputs(target, [drafter]))
    aside = redirect_stdout(sys.stderr) if {trace, json_path} & {*STANDARD} else nullcontext()
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(target, dtype, device, compile)
    heat = resolve_sampling(loaded, temperature=temperature).temperature
    guide = load_drafter(drafter, loaded, heat)
    if compile:
        with err.status("warming up"):
            list(stream(loaded, text, guide, max_new_tokens=4))
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    penalties = {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
    how: dict[str, Any] = {**cuts, **penalties, "repetition_penalty": repetition_penalty, "law": law}
    how |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "stop": stop or None}
    with replacing(trace) if trace is not None else nullcontext() as trace_file, aside:
        pieces = stream(loaded, text, guide, **how, trace=trace_file)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    idle = [f"--{name.replace('_', '-')}" for name, value in cuts.items() if value is not None and not heat]
    _figures(pieces.generation, law or guide.law, idle, json_path)


def _figures(made: "Generation | None", law: str, idle: list[str], json_path: str | None) -> None:
    """Print an answer's figures, and the options that had no effect."""
    from slipstream.decode.generate import LOSSY
    from slipstream.files import write_json

    assert made is not None
    speed = f"τ {made.tau:.2f}   {len(made.tokens) / made.seconds.total:.1f} tokens/s"
    err.print(f"{len(made.tokens)} tokens ({made.finish})   {speed}", style="dim")
    if idle:
        err.print(f"at temperature 0 nothing is sampled: {', '.join(idle)} without effect", style="yellow")
    if law == LOSSY:
        warning = "lossy: typical acceptance keeps tokens that the target would not have drawn"
        err.print(warning, style="yellow")
    if json_path is not None:
        fields = {name: getattr(made, name) for name in ("text", "tokens", "finish", "tau")}
        passes = {"law": law, "target_passes": len(made.rounds), "seconds": vars(made.seconds)}
        write_json(json_path, fields | passes)


@command(
    "bench --drafter ngram --limit 2",
    "bench --questions mt_bench.jsonl --questions gsm8k.jsonl --limit 20 --drafter ngram --json out.json",
    "bench --drafter ngram --temperature 1 --dtype float32",
    lists=DRAFTERS,
)
def bench(
    target: TargetName = "smollm2",
    drafter: DrafterNames = ["ngram"],  # noqa: B006
    questions: Files = [],  # noqa: B006
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    json_path: JsonPath = None,
) -> None:
    """Measure drafters beside plain decoding and Hugging Face generate, in alternation on the same
    prompts."""
    from slipstream.files import check_writable
    from slipstream.measure.questions import load_questions
    from slipstream.measure.run import bench as run

    check_writable(json_path, reads=inputs(target, drafter, questions))
    asked = load_questions(questions, limit)
    steps = 1 + sum(len(question.turns) for question in asked) * (2 + len(set(drafter) - {"vanilla"}))
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    with kept(lambda report: deliver(report, json_path)) as keep, progress_bar(steps) as progress:
        loaded = load(target, dtype, device, compile)
        keep(run(loaded, drafter, asked, **how, progress=progress, keep=keep))


@command(
    "certify --limit 4",
    "certify --target ./my-model --drafter ngram --temperature 0 --temperature 0.7 --json certificate.json",
    lists=DRAFTERS,
)
def certify(
    target: TargetName = "smollm2",
    drafter: DrafterNames = ["ngram"],  # noqa: B006
    questions: Files = [],  # noqa: B006
    limit: Limit = 20,
    max_new_tokens: MaxNewTokens = 128,
    temperatures: Temperatures = [0.0, 1.0],  # noqa: B006
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    compile: Compile = False,
    json_path: JsonPath = None,
) -> None:
    """Prove losslessness on your own model: every token of every answer is audited against plain decoding.

    A token may differ where two are nearly tied and rounding turned them: within
    0.001 logits in float32, within 0.5 in bfloat16, never in float64.

    A tree oracle always runs beside the drafters, and at T = 0 Hugging Face
    generate is audited too. Exit code 1 if a token is not explained.
    """
    from slipstream.files import check_writable
    from slipstream.measure.certify import certify as run
    from slipstream.measure.questions import load_questions

    check_writable(json_path, reads=inputs(target, drafter, questions))
    asked = load_questions(questions, limit)
    how: Any = {"temperatures": temperatures, "max_new_tokens": max_new_tokens, "seed": seed}
    with kept(lambda report: deliver(report, json_path)) as keep, progress_bar(None) as progress:
        loaded = load(target, dtype, device, compile)
        report = run(loaded, drafter, asked, **how, progress=progress, keep=keep)
        keep(report)
    if not report.certified:
        raise typer.Exit(1)
