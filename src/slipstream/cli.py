"""The command line: one command per verb. Parses, calls, prints; heavy imports inside, so that --help is quick."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

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
STOPPED = 130
out, err = Console(highlight=False), Console(stderr=True, highlight=False)

TargetName = Annotated[str, typer.Option("--target", help="alias (smollm2), directory, hub id or GGUF file")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64")]
Device = Annotated[str, typer.Option(help="cpu, cuda, …")]
DrafterName = Annotated[str, typer.Option("--drafter", help="vanilla or ngram")]
DrafterNames = Annotated[list[str], typer.Option("--drafter", help="vanilla or ngram; may be repeated")]
Files = Annotated[list[str], typer.Option("--questions", help="question.jsonl; repeatable (default: the project's own)")]
Limit = Annotated[int | None, typer.Option(help="questions per file, taken evenly over it (default: all)")]
MaxNewTokens = Annotated[int, typer.Option(help="tokens per answer, at most")]
Temperature = Annotated[float, typer.Option(help="0 is greedy")]
Seed = Annotated[int, typer.Option(help="the same seed gives the same text, whatever the drafter")]
JsonPath = Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the results here")]


def _examples(*lines: str) -> str:
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  slipstream {line}" for line in lines)


@app.command(epilog=_examples("demo", "demo --limit 8 --temperature 1", "demo --target ./my-model --dtype float32"))
def demo(
    target: TargetName = "smollm2",
    drafter: DrafterName = "ngram",
    questions: Files = [],  # noqa: B006
    limit: Limit = 8,
    max_new_tokens: MaxNewTokens = 96,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Answer questions twice, plainly and with a drafter: the same text, sooner."""
    from slipstream.bench.demo import demo as run
    from slipstream.bench.questions import load_questions
    from slipstream.bench.run import Contest

    asked = load_questions(questions, limit)
    contest = Contest.of(_load(target, dtype, device), [drafter], max_new_tokens, temperature, seed)
    run(contest, drafter, asked, out)


@app.command(
    epilog=_examples(
        'generate "What is gravity?"',
        'generate "Write a haiku." --temperature 0.8 --top-p 0.95 --seed 7',
        "generate - --drafter ngram --json answer.json < long_prompt.txt",
    )
)
def generate(
    prompt: Annotated[str, typer.Argument(help="the user's message; - reads it from standard input")],
    target: TargetName = "smollm2",
    drafter: DrafterName = "ngram",
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (default: the target's)")] = None,
    top_k: Annotated[int | None, typer.Option(help="keep the k likeliest tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="keep the likeliest tokens with this mass")] = None,
    min_p: Annotated[float | None, typer.Option(help="keep tokens this fraction as likely as the likeliest")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="counts prompt and answer")] = None,
    presence_penalty: Annotated[float, typer.Option(help="counts the answer")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="counts the answer")] = 0.0,
    seed: Seed = 0,
    stop: Annotated[list[str], typer.Option(help="a string that ends the answer; may be repeated")] = [],  # noqa: B006
    law: Annotated[str | None, typer.Option(help="coupled or multi-round (default: the drafter's own)")] = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    trace: Annotated[str | None, typer.Option(metavar="FILE", help="write one JSON line per round here")] = None,
    json_path: JsonPath = None,
) -> None:
    """Answer one prompt, printed as it is made; figures go to standard error."""
    from transformers import TextStreamer

    from slipstream.decode.generate import generate as run
    from slipstream.files import check_writable, replacing, write_json

    for path in (trace, json_path):
        if path is not None:
            check_writable(path)
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = _load(target, dtype, device)
    with replacing(trace) if trace is not None else nullcontext() as trace_file:
        made = run(
            loaded,
            text,
            drafter,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=stop,
            law=law,
            streamer=TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),  # type: ignore[arg-type]
            trace=trace_file,
        )
    speed = len(made.tokens) / made.seconds.total
    err.print(f"{len(made.tokens)} tokens ({made.finish})   τ {made.tau:.2f}   {speed:.1f} tokens/s", style="dim")
    if json_path is not None:
        fields = {"text": made.text, "tokens": made.tokens, "finish": made.finish, "tau": made.tau}
        write_json(json_path, {**fields, "target_passes": len(made.rounds), "seconds": vars(made.seconds)})


@app.command(
    epilog=_examples(
        "bench --drafter ngram --limit 2",
        "bench --questions mt_bench.jsonl --questions gsm8k.jsonl --limit 20 --drafter ngram --json out.json",
        "bench --drafter ngram --temperature 1 --dtype float32",
    )
)
def bench(
    target: TargetName = "smollm2",
    drafter: DrafterNames = ["ngram"],  # noqa: B006
    questions: Files = [],  # noqa: B006
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    json_path: JsonPath = None,
) -> None:
    """Measure drafters beside plain decoding and Hugging Face generate, in alternation on the same prompts."""
    from slipstream.bench.questions import load_questions
    from slipstream.bench.report import bench_table
    from slipstream.bench.run import bench as run
    from slipstream.files import check_writable, write_json

    if json_path is not None:
        check_writable(json_path)
    asked = load_questions(questions, limit)
    steps = 1 + sum(len(question.turns) for question in asked) * (2 + len(set(drafter) - {"vanilla"}))
    with _progress(steps) as progress:
        report = run(_load(target, dtype, device), drafter, asked, max_new_tokens, temperature, seed, progress)
    if json_path is not None:
        write_json(json_path, report)
    out.print(bench_table(report))


@app.command(
    epilog=_examples(
        "certify --limit 4",
        "certify --target ./my-model --drafter ngram --temperature 0 --temperature 0.7 --json certificate.json",
    )
)
def certify(
    target: TargetName = "smollm2",
    drafter: DrafterNames = ["ngram"],  # noqa: B006
    questions: Files = [],  # noqa: B006
    limit: Limit = 20,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[list[float], typer.Option(help="may be repeated")] = [0.0, 1.0],  # noqa: B006
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    json_path: JsonPath = None,
) -> None:
    """Prove losslessness on your own model: every token of every answer is audited against plain decoding.

    A tree oracle always runs beside the drafters, and at T = 0 Hugging Face generate is audited too. Exit code 1 if a
    token is not explained.
    """
    from slipstream.bench.certify import certify as run
    from slipstream.bench.questions import load_questions
    from slipstream.bench.report import certificate
    from slipstream.files import check_writable, write_json

    if json_path is not None:
        check_writable(json_path)
    asked = load_questions(questions, limit)
    with _progress(None) as progress:
        report = run(_load(target, dtype, device), drafter, asked, temperature, max_new_tokens, seed, progress)
    if json_path is not None:
        write_json(json_path, report)
    out.print(certificate(report))
    if not report["certified"]:
        raise typer.Exit(1)


@app.command(
    epilog=_examples(
        "train eagle --data answers.jsonl --out runs/eagle",
        "train eagle --data answers.jsonl --preview",
        "train eagle --recipe recipes/eagle_smollm2.yaml --out runs/eagle optimizer.lr=5e-4 loss.unroll=3",
        "train eagle --recipe runs/eagle/recipe.yaml --out runs/eagle --resume",
    )
)
def train(
    method: Annotated[str, typer.Argument(help="eagle")],
    overrides: Annotated[list[str], typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = [],  # noqa: B006
    data: Annotated[list[str], typer.Option(help="JSONL or .txt, gzipped or not; repeatable")] = [],  # noqa: B006
    directory: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="drafter, checkpoints and log go here")
    ] = None,
    target: TargetName = "smollm2",
    recipe: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML; see the recipe.yaml that each run leaves")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on, exactly, from the last checkpoint in --out")] = False,
    preview: Annotated[bool, typer.Option("--preview", help="show what is learnt of the data, coloured, and stop")] = False,
    dtype: Annotated[str, typer.Option(help="of the target: auto, float32, bfloat16, …")] = "auto",
    device: Device = "cpu",
) -> None:
    """Train a drafter for a target. The directory holds, at any time, the best drafter so far and the last checkpoint."""
    from slipstream.train.data import load_examples
    from slipstream.train.recipe import load_recipe
    from slipstream.train.show import preview as show_preview
    from slipstream.train.show import watching
    from slipstream.train.trainer import Trainer

    if resume and recipe is None and directory is not None:
        recipe = f"{directory}/recipe.yaml"
    given = {"data": {"files": data}} if data else {}
    settled = load_recipe(recipe, overrides, method=method, **given)
    if directory is None and not preview:
        raise ValueError("no place for the drafter: give --out DIR (or --preview to look at the data)")
    loaded = _load(target, dtype, device)
    if directory is None or preview:
        kept = settled.data
        out.print(show_preview(loaded, load_examples(kept.files, loaded, kept.max_length, kept.limit)))
        return
    with watching(err) as watch:
        trainer = Trainer(loaded, settled, directory, resume)
        trainer.prepare(watch.filling)
        progress = trainer.run(watch.show)
    out.print(f"predicted τ {progress.best:.2f} ({settled.head.tree}) after {progress.trained:,} tokens, in {directory}")


def _load(name: str, dtype: str, device: str) -> "Target":
    with err.status(f"loading {name}"):
        from transformers.utils import logging

        from slipstream.targets import load_target

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return load_target(name, dtype, device)


@contextmanager
def _progress(steps: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, advanced by each call, which says what is under way."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), TimeRemainingColumn())
    what = TextColumn("{task.description}")
    with Progress(BarColumn(), MofNCompleteColumn(), *times, what, console=err, transient=True) as bar:
        task = bar.add_task("loading", total=steps)

        def advance(what: str) -> None:
            bar.update(task, description=what, advance=1)

        yield advance


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, Ctrl-C is one line and 130."""
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = STOPPED
    except ValueError as error:
        _fail(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own complaint about the command line
            raise
        if message := error.format_message():  # empty: help was asked for by giving no command
            _fail(f"{message} (see slipstream --help)")
        code = 2
    if code == STOPPED:  # typer turns Ctrl-C into this
        err.print("slipstream: stopped")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    err.print(f"slipstream: {' '.join(message.split())}", style="red", markup=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
