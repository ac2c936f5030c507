"""demo and generate: answers of a model."""

import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

from slipstream.cli import common as cli
from slipstream.files import STANDARD, check_writable, read_text, replacing, write_json
from slipstream.measure.datasets import load_questions
from slipstream.provenance import suggested

if TYPE_CHECKING:
    from slipstream.core.drafter import Drafter
    from slipstream.targets import HFTarget


@cli.command(
    "demo",
    "demo --limit 8 --temperature 1",
    "demo --target ./my-model --dtype float32",
    takes=f"target drafter questions limit max_new_tokens temperature seed {cli.MACHINE}",
    limit=3,
    max_new_tokens=64,
)
def demo(options: cli.Arguments) -> None:
    """Answer questions twice, plainly and with a drafter: the same text, sooner.

    Where passes over several rows round differently, as on a GPU, a near-tie may turn; the
    demo then says so.
    """
    drafter = options.drafter
    cli.inputs(options.target, [drafter], options.questions)
    questions = load_questions(options.questions, options.limit)
    from slipstream.measure.demo import demo as run
    from slipstream.measure.runner import Runner

    settings = (options.max_new_tokens, options.temperature, options.seed)
    run(Runner.of(options.load(), [drafter], *settings), drafter, questions, cli.out)
    words = 'generate "What is gravity?"'
    words += f" --drafter {shlex.quote(drafter)}" if drafter != "auto" else ""
    cli.out.print(f"\nnext: {suggested(words)}", soft_wrap=True)


CUTS, PENALTIES = "top_k top_p min_p", "repetition_penalty presence_penalty frequency_penalty"


@cli.command(
    'generate "What is gravity?"',
    'generate "What is gravity?" --explain',
    'generate "Write a haiku." --temperature 0.8 --top-p 0.95 --seed 7',
    'generate "Who wrote Faust?" --json-schema person.json',
    "generate - --drafter ngram --json answer.json < long_prompt.txt",
    takes=f"prompt target drafter draft_model max_new_tokens own_temperature {CUTS} {PENALTIES} seed stop "
    f"json_schema regex grammar choice law {cli.MACHINE} explain trace json_path",
    max_new_tokens=256,
)
def generate(options: cli.Arguments) -> None:
    """Answer one prompt, printed as it is made; figures go to standard error.

    The text is the same whatever the drafter: token for token in float32 and bfloat16
    on a CPU with a C++ compiler, and elsewhere up to near-ties, which rounding may turn.
    """
    drafter = cli.with_model(options.drafter, options.draft_model)
    schema, grammar, trace, json_path = options.json_schema, options.grammar, options.trace, options.json_path
    reads = cli.inputs(options.target, [drafter], [file for file in (schema, grammar) if file is not None])
    check_writable(trace, json_path, reads=reads)
    settings = options.pick(f"{CUTS} {PENALTIES} max_new_tokens seed regex law")
    settings |= {"temperature": options.own_temperature}
    settings |= {"json_schema": schema and read_text(schema, "schema")}
    settings |= {"grammar": grammar and read_text(grammar, "grammar")}
    settings |= {"stop": options.stop or None, "choice": options.choice or None}
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    from slipstream.engine.costs import explained
    from slipstream.engine.generate import stream
    from slipstream.engine.sampling_params import resolve_sampling

    target = options.load()
    temperature = resolve_sampling(target, temperature=options.own_temperature).temperature
    loaded = _drafter(target, drafter, temperature, options.explain, prompt)
    aside = redirect_stdout(sys.stderr) if {trace, json_path} & {*STANDARD} else nullcontext()
    with replacing(trace) if trace is not None else nullcontext() as trace_file, aside:
        pieces = stream(target, prompt, loaded, **settings, trace=trace_file)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    cuts = [name for name, value in options.pick(CUTS).items() if value is not None and not temperature]
    _figures(pieces.generation, target.precision, options.law or loaded.law, cuts, json_path)
    if options.explain:
        cli.err.print(explained(target, loaded, pieces.tokens))


def _drafter(target: "HFTarget", name: str, temperature: float, explain: bool, prompt: str) -> "Drafter":
    """The drafter, whose first answer measures and compiles nothing. Raises ValueError."""
    from slipstream.drafters import load_drafter
    from slipstream.engine.costs import policy
    from slipstream.engine.generate import stream

    drafter = load_drafter(name, target, temperature)
    if explain and not drafter.candidate_trees:
        raise ValueError(f"drafter {name!r} always grows the same tree: --explain is for auto")
    if drafter.candidate_trees:
        with cli.err.status(cli.MEASURING):
            policy(target, drafter, 1)
    if target.compiles:
        with cli.err.status("warming up"):
            list(stream(target, prompt, drafter, max_new_tokens=4))
    return drafter


def _figures(answer: Any, precision: str, law: str, idle: list[str], json_path: str | None) -> None:
    """Print an answer's figures, and the options that had no effect."""
    speed = f"τ {answer.tau:.2f}   {len(answer.tokens) / answer.seconds.total:.1f} tokens/s"
    cli.err.print(f"{len(answer.tokens)} tokens ({answer.finish})   {speed}   {precision}", style="dim")
    if idle:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        cli.err.print(f"at temperature 0 nothing is sampled: {options} without effect", style="yellow")
    if json_path is not None:
        fields = {name: getattr(answer, name) for name in ("text", "tokens", "finish", "tau")}
        passes = {"law": law, "target_passes": len(answer.rounds), "seconds": vars(answer.seconds)}
        write_json(json_path, fields | passes)
