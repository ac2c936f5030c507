"""train, synthesize, regenerate, data, import, export, parity: make a drafter, and take it elsewhere."""

import os
import shlex
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slipstream.cli import common as cli
from slipstream.directories import RUN, check_claim, checkpoint_file
from slipstream.files import HANDED, check_interpreter, check_writable, name_of, written_to
from slipstream.measure.datasets import load_questions
from slipstream.methods import METHODS
from slipstream.provenance import suggested

if TYPE_CHECKING:
    from slipstream.training.synthesize import Answers


@cli.command(
    "train eagle --data answers.jsonl --out runs/eagle",
    "train eagle --data answers.jsonl --preview",
    "train eagle --recipe recipes/equal_data.yaml --data answers.jsonl --out runs/eagle optimizer.lr=5e-4",
    "train eagle --recipe runs/eagle/recipe.yaml --out runs/eagle --resume",
    takes="method overrides data run_home target recipe resume_run force_run preview dtype device",
    lists=lambda: cli.listed("[bold]Methods[/bold]", filter(attrgetter("objective"), METHODS.values())),
)
def train(options: cli.Arguments) -> None:
    """Train a drafter for a target.

    The directory holds, at any time, the best drafter so far and the last checkpoint.
    """
    directory, preview = options.run_home, options.preview
    resume, force = options.resume_run, options.force_run
    if preview and resume:
        raise ValueError("--preview only shows data: leave out --resume")
    if directory is None and not preview:
        raise ValueError("no place for the drafter: give --out DIR (or --preview to look at the data)")
    recipe = f"{directory}/{RUN}" if resume and options.recipe is None else options.recipe
    reads = [*options.data, *filter(None, [recipe])]
    if directory is not None and not preview and os.environ.get("RANK", "0") == "0":  # which alone writes
        check_claim(written_to(directory), ("train",), force or resume, [options.target, *reads])
    cli.inputs(options.target, files=reads)
    from accelerate import PartialState

    from slipstream.progress import bars
    from slipstream.training.data import read_rows
    from slipstream.training.run import Watch, preview as show_preview, recipe_of, train as run

    settings = recipe_of(options.method, directory, options.data, options.recipe, options.overrides, resume)
    for file in settings.data.files:
        if not file.startswith(HANDED):  # which are read once
            next(read_rows(file), None)
    if options.device == "cuda" and "LOCAL_RANK" in os.environ:  # one process a device, by accelerate
        options.device = f"cuda:{os.environ['LOCAL_RANK']}"
    target = options.load()
    if directory is None or preview:
        cli.out.print(show_preview(target, settings.data, force=force))
        return
    try:
        with bars(cli.err) as bar:
            watch = Watch(bar)
            how: Any = {"resume": resume, "force": force, "progress": watch.show, "filling": watch.filling}
            result = run(target, settings, directory, **how)
    except KeyboardInterrupt as stopped:
        if stopped.args:
            cli.err.print(*stopped.args)
        raise
    if PartialState().is_main_process:
        cli.out.print(result)
        export = f"export {shlex.quote(directory)} --out {shlex.quote(directory.rstrip('/'))}-public"
        _next_of(directory, *([export] if METHODS[result.method].layouts else []))


@cli.command(
    "synthesize --prompts 500 --out answers.jsonl",
    "synthesize --prompts 20000 --out answers.jsonl --server http://localhost:8000/v1 --batch 128",
    "synthesize --prompts 600 --kind maths --kind code --kind writing --kind turns --out answers.jsonl",
    takes="answers prompts kinds target server answer_temperatures prompt_temperature max_new_tokens "
    "written_at_once own_seed dtype device",
    max_new_tokens=512,
)
def synthesize(options: cli.Arguments) -> None:
    """Training data from nothing: the target writes prompts, from its own chat template, and answers them.

    Without a chat template it begins raw texts and goes on with them.
    """
    check_writable(options.answers, reads=cli.inputs(options.target))
    from slipstream.training.synthesize import synthesize as run

    settings = options.pick("prompts kinds prompt_temperature") | _writing(options)
    target = options.load()
    with cli.counting("writing and answering") as progress:
        answers = run(target, options.answers, **settings, progress=progress)
    _written(answers)


@cli.command(
    "regenerate prompts.jsonl --out answers.jsonl",
    "regenerate sharegpt.jsonl --out answers.jsonl --temperature 0 --server http://localhost:8000/v1 "
    "--batch 128",
    takes="prompt_file answers target server systems answer_temperatures max_new_tokens limit "
    "written_at_once own_seed dtype device",
    max_new_tokens=512,
)
def regenerate(options: cli.Arguments) -> None:
    """Let the target answer given prompts: a drafter learns what its target says, not what others said."""
    check_writable(options.answers, reads=cli.inputs(options.target, files=[options.prompt_file]))
    from slipstream.training.synthesize import conversations, regenerate as run

    rows = conversations(options.prompt_file)
    settings = options.pick("systems limit") | _writing(options)
    with cli.counting("answering") as progress:
        target = options.target if options.server is not None else options.load()
        answers = run(target, rows, options.answers, **settings, progress=progress)
    _written(answers)


def _writing(options: cli.Arguments) -> dict[str, Any]:
    """How answers are written."""
    settings = options.pick("max_new_tokens") | {"batch": options.written_at_once, "seed": options.own_seed}
    return settings | {"writer": options.server, "temperatures": options.answer_temperatures}


@cli.command(
    "data answers.jsonl",
    "data own.jsonl code.jsonl.gz --exclude gsm8k.jsonl --exclude mt_bench.jsonl --out train.jsonl",
    takes="files exclude filtered target json_path",
)
def data(options: cli.Arguments) -> None:
    """What training data holds; with --out, a file without its loops, near copies and excluded rows."""
    files, exclude, path = options.files, options.exclude, options.filtered
    check_writable(path, options.json_path, reads=cli.inputs(options.target, files=[*files, *exclude]))
    from slipstream.training.inventory import inventory

    target = options.load()
    with cli.counting("reading") as progress:
        report = inventory(target, files, exclude, path, progress)
    cli.deliver(report, options.json_path, path)


@cli.command(
    "import ./EAGLE-LLaMA3-8B --target ./llama3-8b --out drafters/llama3-eagle",
    takes="checkpoint drafter_home target tree force dtype",
    dtype="bfloat16",
)
def import_(options: cli.Arguments) -> None:
    """Make a drafter directory of a public checkpoint."""
    source, home, settings = options.checkpoint, options.drafter_home, options.pick("tree force")
    check_claim(written_to(home), ("import",), options.force, [source, *cli.inputs(options.target)])
    checkpoint_file(Path(name_of(source, "a checkpoint")).expanduser())
    from slipstream.interop.public import import_checkpoint

    cli.out.print(import_checkpoint(options.load(), source, home, **settings), soft_wrap=True)
    _next_of(home)


@cli.command(
    "export eagle --out vllm-head",
    "export runs/eagle3 --out vllm-head --layout speculators",
    takes="head checkpoint_home target layout force dtype",
    dtype="bfloat16",
)
def export(options: cli.Arguments) -> None:
    """Write a drafter in a public layout, for vLLM or SGLang: --layout says which."""
    home, settings = options.checkpoint_home, options.pick("layout force")
    check_claim(written_to(home), ("export",), options.force, cli.inputs(options.target, [options.head]))
    from slipstream.interop.public import export as run

    cli.out.print(run(options.load(), options.head, home, **settings), soft_wrap=True)


@cli.command(
    "parity eagle --questions gsm8k.jsonl --limit 20 --json parity.json",
    takes="head python target questions limit max_new_tokens draft_tokens dtype json_path",
    limit=20,
    dtype="float32",
)
def parity(options: cli.Arguments) -> None:
    """Serve the target with an exported head in vLLM: does it accept the same drafts, and say the same?

    Exit code 1 if not; the first tensor that differs is named.
    """
    check_writable(options.json_path, reads=cli.inputs(options.target, [options.head], options.questions))
    check_interpreter(options.python)
    questions = load_questions(options.questions, options.limit)
    from slipstream.interop.parity import parity as run
    from slipstream.targets.prompts import encode

    target, settings = options.load(), options.pick("python max_new_tokens draft_tokens")
    prompts = [encode(target, question.turns[0]) for question in questions]
    with cli.progress_bar(len(prompts) + 2) as progress:
        report = run(target, options.head, prompts, **settings, progress=progress)
    cli.deliver(report, options.json_path)
    if not report.agrees:
        raise typer.Exit(1)


def _next_of(drafter: str, *others: str) -> None:
    """Print what comes after a drafter is made."""
    for words in (*(f"{verb} --drafter {shlex.quote(drafter)}" for verb in ("bench", "tune")), *others):
        cli.out.print(f"next: {suggested(words)}", soft_wrap=True)


def _written(answers: "Answers") -> None:
    train = suggested(f"train eagle --data {shlex.quote(answers.path)} --out runs/eagle")
    cli.out.print(f"{answers.__rich__()}; train on them: {train}", soft_wrap=True)
