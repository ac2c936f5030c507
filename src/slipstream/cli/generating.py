"""generate: answer one prompt."""

import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.common import (
    MEASURING,
    Compile,
    Device,
    DrafterName,
    DraftModelName,
    Dtype,
    JsonPath,
    MaxNewTokens,
    OwnTemperature,
    Quantize,
    Seed,
    TargetName,
    command,
    drafters,
    err,
    inputs,
    load,
    on_results,
    on_sampling,
    with_model,
)
from slipstream.files import STANDARD, check_writable, read_text, replacing, write_json

if TYPE_CHECKING:
    from slipstream.core.drafter import Drafter
    from slipstream.engine.generate import Generation
    from slipstream.targets import HFTarget

MASS = "keep the likeliest tokens with this mass"
LIKELY = "keep tokens this fraction as likely as the likeliest"
BOTH = "counts prompt and answer"
AnswerPenalty = Annotated[float, on_sampling("counts the answer", "X")]
TRACE = "write one JSON line per round here, for slipstream report"
EXPLAIN = "show which trees auto chose, and why, and what keys and values take"
SCHEMA = "the answer is JSON of the schema in this file"
REGEX = "the answer is a match"
GRAMMAR = "the answer is a text of the grammar in this file, in Lark's or llama.cpp's form"
CHOICE = "the answer is one of the texts given so; repeatable"
LAW = "coupled or multi-round (default: the drafter's own); lossy-typical, Medusa's, changes the text"


@command(
    'generate "What is gravity?"',
    'generate "What is gravity?" --explain',
    'generate "Write a haiku." --temperature 0.8 --top-p 0.95 --seed 7',
    'generate "Who wrote Faust?" --json-schema person.json',
    "generate - --drafter ngram --json answer.json < long_prompt.txt",
    lists=drafters,
)
def generate(
    prompt: Annotated[str, typer.Argument(help="the user's message; - reads it from standard input")],
    target: TargetName = "smollm2",
    drafter: DrafterName = "auto",
    draft_model: DraftModelName = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: OwnTemperature = None,
    top_k: Annotated[int | None, on_sampling("keep the K likeliest tokens", "K")] = None,
    top_p: Annotated[float | None, on_sampling(MASS, "P")] = None,
    min_p: Annotated[float | None, on_sampling(LIKELY, "P")] = None,
    repetition_penalty: Annotated[float | None, on_sampling(BOTH, "X")] = None,
    presence_penalty: AnswerPenalty = 0.0,
    frequency_penalty: AnswerPenalty = 0.0,
    seed: Seed = 0,
    stop: Annotated[list[str], on_sampling("ends the answer; repeatable", "TEXT")] = [],
    json_schema: Annotated[str | None, on_sampling(SCHEMA, "FILE")] = None,
    regex: Annotated[str | None, on_sampling(REGEX, "REGEX")] = None,
    grammar: Annotated[str | None, on_sampling(GRAMMAR, "FILE")] = None,
    choice: Annotated[list[str], on_sampling(CHOICE, "TEXT")] = [],
    law: Annotated[str | None, on_sampling(LAW, "NAME")] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
    explain: Annotated[bool, on_results(EXPLAIN, None, "--explain")] = False,
    trace: Annotated[str | None, on_results(TRACE, "FILE")] = None,
    json_path: JsonPath = None,
) -> None:
    """Answer one prompt, printed as it is made; figures go to standard error.

    The text is the same whatever the drafter: token for token in float32 and bfloat16
    on a CPU with a C++ compiler, and elsewhere up to near-ties, which rounding may turn.
    """
    drafter = with_model(drafter, draft_model)
    files = [each for each in (json_schema, grammar) if each is not None]
    check_writable(trace, json_path, reads=inputs(target, [drafter], files))
    bounds = {"json_schema": json_schema and read_text(json_schema, "schema"), "regex": regex}
    bounds["grammar"] = grammar and read_text(grammar, "grammar")
    aside = redirect_stdout(sys.stderr) if {trace, json_path} & {*STANDARD} else nullcontext()
    text = sys.stdin.read() if prompt == "-" else prompt
    from slipstream.engine.costs import explained
    from slipstream.engine.generate import stream
    from slipstream.engine.sampling_params import resolve_sampling

    loaded = load(target, dtype, device, compile, quantize)
    T = resolve_sampling(loaded, temperature=temperature).temperature
    guide = _guide(loaded, drafter, T, explain, text)
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    penalties = {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
    how: dict[str, Any] = {**cuts, **penalties, **bounds, "repetition_penalty": repetition_penalty}
    how |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "law": law}
    with replacing(trace) if trace is not None else nullcontext() as trace_file, aside:
        how |= {"stop": stop or None, "choice": choice or None}
        pieces = stream(loaded, text, guide, **how, trace=trace_file)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    idle = [f"--{name.replace('_', '-')}" for name, value in cuts.items() if value is not None and not T]
    _figures(pieces.generation, loaded.precision, law or guide.law, idle, json_path)
    if explain:
        err.print(explained(loaded, guide, pieces.tokens))


def _guide(target: "HFTarget", name: str, temperature: float, explain: bool, text: str) -> "Drafter":
    """The drafter, ready to go. Raises ValueError."""
    from slipstream.drafters import load_drafter
    from slipstream.engine.costs import policy
    from slipstream.engine.generate import stream

    guide = load_drafter(name, target, temperature)
    if explain and not guide.candidate_trees:
        raise ValueError(f"drafter {name!r} always grows the same tree: --explain is for auto")
    if guide.candidate_trees:
        with err.status(MEASURING):
            policy(target, guide, 1)
    if target.compiles:
        with err.status("warming up"):
            list(stream(target, text, guide, max_new_tokens=4))
    return guide


def _figures(
    made: "Generation | None", precision: str, law: str, idle: list[str], json_path: str | None
) -> None:
    """Print an answer's figures, and the options that had no effect."""
    from slipstream.engine.generate import LOSSY

    assert made is not None
    speed = f"τ {made.tau:.2f}   {len(made.tokens) / made.seconds.total:.1f} tokens/s"
    err.print(f"{len(made.tokens)} tokens ({made.finish})   {speed}   {precision}", style="dim")
    if idle:
        err.print(f"at temperature 0 nothing is sampled: {', '.join(idle)} without effect", style="yellow")
    if law == LOSSY and made.sampling.temperature:
        warning = "lossy: typical acceptance keeps tokens that the target would not have drawn"
        err.print(warning, style="yellow")
    if json_path is not None:
        fields = {name: getattr(made, name) for name in ("text", "tokens", "finish", "tau")}
        passes = {"law": law, "target_passes": len(made.rounds), "seconds": vars(made.seconds)}
        write_json(json_path, fields | passes)
