"""train, synthesize, regenerate, data, import, export, parity: make a drafter, and take it elsewhere."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.common import (
    MOST_TEXTS,
    SAME,
    Device,
    Dtype,
    Files,
    Force,
    JsonPath,
    Limit,
    MaxNewTokens,
    TargetName,
    command,
    counting,
    deliver,
    err,
    flag,
    in_64_bits,
    inputs,
    listed,
    load,
    on_machine,
    on_questions,
    on_sampling,
    option,
    out,
    progress_bar,
)
from slipstream.directories import RUN, check_claim, checkpoint_file
from slipstream.files import HANDED, check_interpreter, check_writable, name_of, written_to
from slipstream.measure.datasets import load_questions
from slipstream.methods import METHODS, TABLE
from slipstream.provenance import suggested

LAYOUTS = [layout for method in TABLE for layout in method.layouts]
PUBLIC = f"{', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}"

if TYPE_CHECKING:
    from slipstream.training.synthesize import Answers

SECTIONS = "of the recipe: data, features, head, loss, optimizer and schedule (docs/training.md)"
ANYHOW = "write into --out whatever it holds, and learn answers that another target wrote, too"
SHOW = "show what is learnt of the data, coloured, and stop"
YAML = "YAML, such as the recipe.yaml of each run"


def _trained() -> str:
    return listed("[bold]Methods[/bold]", (method for method in METHODS.values() if method.objective))


@command(
    "train eagle --data answers.jsonl --out runs/eagle",
    "train eagle --data answers.jsonl --preview",
    "train eagle --recipe recipes/equal_data.yaml --data answers.jsonl --out runs/eagle optimizer.lr=5e-4",
    "train eagle --recipe runs/eagle/recipe.yaml --out runs/eagle --resume",
    lists=_trained,
)
def train(
    method: Annotated[str, typer.Argument(help="one of those below")],
    overrides: Annotated[list[str], typer.Argument(metavar="[SECTION.KEY=VALUE]...", help=SECTIONS)] = [],
    data: Annotated[list[str], option("JSONL or .txt, gzipped or not; repeatable", "FILE", "--data")] = [],
    directory: Annotated[str | None, option("drafter, checkpoints and log go here", "DIR", "--out")] = None,
    target: TargetName = "smollm2",
    recipe: Annotated[str | None, option(YAML, "FILE", "--recipe")] = None,
    resume: Annotated[bool, flag("go on, exactly, from the last checkpoint in --out", "--resume")] = False,
    force: Annotated[bool, flag(ANYHOW, "--force")] = False,
    preview: Annotated[bool, flag(SHOW, "--preview")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Train a drafter for a target.

    The directory holds, at any time, the best drafter so far and the last checkpoint.
    """
    if preview and resume:
        raise ValueError("--preview only shows data: leave out --resume")
    if directory is None and not preview:
        raise ValueError("no place for the drafter: give --out DIR (or --preview to look at the data)")
    own = [f"{directory}/{RUN}"] if resume and recipe is None else [recipe]
    reads = [*data, *filter(None, own)]
    if directory is not None and not preview and os.environ.get("RANK", "0") == "0":  # which alone writes
        check_claim(written_to(directory), ("train",), force or resume, [target, *reads])
    inputs(target, files=reads)
    from accelerate import PartialState

    from slipstream.progress import bars
    from slipstream.training.data import read_rows
    from slipstream.training.run import Watch, preview as show_preview, recipe_of, train as run

    settled = recipe_of(method, directory, data, recipe, overrides, resume)
    for file in settled.data.files:
        if not file.startswith(HANDED):  # which are read once
            next(read_rows(file), None)
    if device == "cuda" and "LOCAL_RANK" in os.environ:  # one process a device, as accelerate launches them
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    loaded = load(target, dtype, device)
    if directory is None or preview:
        out.print(show_preview(loaded, settled.data, force=force))
        return
    try:
        with bars(err) as bar:
            watch = Watch(bar)
            how: Any = {"resume": resume, "force": force, "progress": watch.show, "filling": watch.filling}
            done = run(loaded, settled, directory, **how)
    except KeyboardInterrupt as stopped:
        if stopped.args:
            err.print(*stopped.args)
        raise
    if PartialState().is_main_process:
        out.print(done)
        _next_of(directory)
        if METHODS[done.method].layouts:
            _next(f"export {shlex.quote(directory)} --out {shlex.quote(directory.rstrip('/'))}-public")


SERVER = "let this OpenAI-compatible server write (vllm serve, …; key: $OPENAI_API_KEY)"
Server = Annotated[str | None, option(SERVER, "URL", "--server")]
IN_TURN = "temperature of the answers; several take turns; repeatable"
Temperatures = Annotated[list[float], on_sampling(IN_TURN, "T", "--temperature", min=0)]
Batch = Annotated[int, on_machine("texts written at once: all in memory", "N", min=1, max=MOST_TEXTS)]
KIND = (
    "kind of prompt; several take turns: any, maths, code, writing, questions; and about earlier answers: "
    "reading, summaries, translation, turns; repeatable"
)
Kinds = Annotated[list[str], on_questions(KIND, "NAME", "--kind")]
SENT = f"{SAME} (default: 0; a server is sent none)"
WrittenSeed = Annotated[int | None, on_sampling(SENT, "N", min=0, callback=in_64_bits)]
AnswerFile = Annotated[str, option("JSONL; an interrupted file is gone on with", "FILE", "--out")]
EXCLUDE = (
    "questions: rows that share 13 words in a row with one, or a shorter one whole, are dropped; repeatable"
)
BEHIND = "ask each question once more after this system message; repeatable"


@command(
    "synthesize --prompts 500 --out answers.jsonl",
    "synthesize --prompts 20000 --out answers.jsonl --server http://localhost:8000/v1 --batch 128",
    "synthesize --prompts 600 --kind maths --kind code --kind writing --kind turns --out answers.jsonl",
)
def synthesize(
    path: AnswerFile,
    prompts: Annotated[int, on_questions("how many to write", "N", min=1, max=10**8)] = 200,
    kinds: Kinds = ["any"],
    target: TargetName = "smollm2",
    server: Server = None,
    temperatures: Temperatures = [0.0, 0.7, 1.0],
    prompt_temperature: Annotated[float, on_sampling("temperature of the prompts", "T", min=0)] = 0.8,
    max_new_tokens: MaxNewTokens = 512,
    batch: Batch = 32,
    seed: WrittenSeed = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Training data from nothing: the target writes prompts, from its own chat template, and answers them.

    Without a chat template it begins raw texts and goes on with them.
    """
    check_writable(path, reads=inputs(target))
    from slipstream.training.synthesize import synthesize as run

    how: Any = {"writer": server, "temperatures": temperatures, "prompt_temperature": prompt_temperature}
    how |= {"max_new_tokens": max_new_tokens, "batch": batch, "seed": seed}
    loaded = load(target, dtype, device)
    with counting("writing and answering") as progress:
        made = run(loaded, path, prompts=prompts, kinds=kinds, **how, progress=progress)
    _written(made)


@command(
    "regenerate prompts.jsonl --out answers.jsonl",
    "regenerate sharegpt.jsonl --out answers.jsonl --temperature 0 --server http://localhost:8000/v1 "
    "--batch 128",
)
def regenerate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSONL in any training shape; its own answers are dropped, raw text is gone on with",
        ),
    ],
    path: AnswerFile,
    target: TargetName = "smollm2",
    server: Server = None,
    system: Annotated[list[str], option(BEHIND, "TEXT")] = [],
    temperatures: Temperatures = [0.0, 0.7, 1.0],
    max_new_tokens: MaxNewTokens = 512,
    limit: Limit = None,
    batch: Batch = 32,
    seed: WrittenSeed = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Let the target answer given prompts: a drafter learns what its target says, not what others said."""
    check_writable(path, reads=inputs(target, files=[source]))
    from slipstream.training.synthesize import conversations, regenerate as run

    rows = conversations(source)
    how: Any = {"systems": system, "limit": limit, "writer": server, "temperatures": temperatures}
    how |= {"max_new_tokens": max_new_tokens, "batch": batch, "seed": seed}
    with counting("answering") as progress:
        answering = target if server is not None else load(target, dtype, device)
        made = run(answering, rows, path, **how, progress=progress)
    _written(made)


@command(
    "data answers.jsonl",
    "data own.jsonl code.jsonl.gz --exclude gsm8k.jsonl --exclude mt_bench.jsonl --out train.jsonl",
)
def data(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="training data in any shape")],
    exclude: Annotated[list[str], option(EXCLUDE, "FILE", "--exclude")] = [],
    path: Annotated[str | None, option("write the rows that are kept here: JSONL", "FILE", "--out")] = None,
    target: TargetName = "smollm2",
    json_path: JsonPath = None,
) -> None:
    """What training data holds; with --out, a file without its loops, near copies and excluded rows."""
    check_writable(path, json_path, reads=inputs(target, files=[*files, *exclude]))
    from slipstream.training.inventory import inventory

    loaded = load(target, "auto", "cpu")
    with counting("reading") as progress:
        report = inventory(loaded, files, exclude, path, progress)
    deliver(report, json_path, path)


IMPORTED = "the drafter's own tree (default: the checkpoint's, else its layout's)"
LAYOUT = f"{PUBLIC} (default: that of an imported head, else the method's first)"


@command("import ./EAGLE-LLaMA3-8B --target ./llama3-8b --out drafters/llama3-eagle", name="import")
def import_(
    source: Annotated[str, typer.Argument(metavar="DIR", help=f"a checkpoint written as {PUBLIC}")],
    directory: Annotated[str, option("the drafter directory to write", "DIR", "--out")],
    target: TargetName = "smollm2",
    tree: Annotated[str | None, option(IMPORTED, "NAME")] = None,
    force: Force = False,
    dtype: Dtype = "bfloat16",
) -> None:
    """Make a drafter directory of a public checkpoint."""
    check_claim(written_to(directory), ("import",), force, [source, *inputs(target)])
    checkpoint_file(Path(name_of(source, "a checkpoint")).expanduser())
    from slipstream.interop.public import import_checkpoint

    made = import_checkpoint(load(target, dtype, "cpu"), source, directory, tree=tree, force=force)
    out.print(made, soft_wrap=True)
    _next_of(directory)


@command("export eagle --out vllm-head", "export runs/eagle3 --out vllm-head --layout speculators")
def export(
    drafter: Annotated[str, typer.Argument(help="eagle, eagle3, fasteagle or medusa, or a directory of one")],
    directory: Annotated[str, option("the checkpoint to write", "DIR", "--out")],
    target: TargetName = "smollm2",
    layout: Annotated[str | None, option(LAYOUT, "NAME")] = None,
    force: Force = False,
    dtype: Dtype = "bfloat16",
) -> None:
    """Write a drafter in a public layout, for vLLM or SGLang: --layout says which."""
    check_claim(written_to(directory), ("export",), force, inputs(target, [drafter]))
    from slipstream.interop.public import export as run

    made = run(load(target, dtype, "cpu"), drafter, directory, layout=layout, force=force)
    out.print(made, soft_wrap=True)


@command("parity eagle --questions gsm8k.jsonl --limit 20 --json parity.json")
def parity(
    drafter: Annotated[str, typer.Argument(help="eagle, eagle3, fasteagle or medusa, or a directory of one")],
    python: Annotated[
        str, option("interpreter of vLLM's environment (make vllm)", "FILE")
    ] = ".venv-vllm/bin/python",
    target: TargetName = "smollm2",
    questions: Files = [],
    limit: Limit = 20,
    max_new_tokens: MaxNewTokens = 128,
    draft_tokens: Annotated[int, option("drafted a round", "N", min=1, max=64)] = 3,
    dtype: Dtype = "float32",
    json_path: JsonPath = None,
) -> None:
    """Serve the target with an exported head in vLLM: does it accept the same drafts, and say the same?

    Exit code 1 if not; the first tensor that differs is named.
    """
    check_writable(json_path, reads=inputs(target, [drafter], questions))
    check_interpreter(python)
    asked = load_questions(questions, limit)
    from slipstream.interop.parity import parity as run
    from slipstream.targets.prompts import encode

    loaded = load(target, dtype, "cpu")
    prompts = [encode(loaded, question.turns[0]) for question in asked]
    with progress_bar(len(prompts) + 2) as progress:
        report = run(loaded, drafter, prompts, python, max_new_tokens, draft_tokens, progress)
    deliver(report, json_path)
    if not report.agrees:
        raise typer.Exit(1)


def _next_of(drafter: str) -> None:
    """Print what comes after a drafter is made."""
    for command_ in ("bench", "tune"):
        _next(f"{command_} --drafter {shlex.quote(drafter)}")


def _next(words: str) -> None:
    out.print(f"next: {suggested(words)}", soft_wrap=True)


def _written(made: "Answers") -> None:
    train = suggested(f"train eagle --data {shlex.quote(made.path)} --out runs/eagle")
    out.print(f"{made.__rich__()}; train on them: {train}", soft_wrap=True)
