"""What the scripts share: their command line, prompts by file, and records of the target's answers."""

import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from slipstream.cli import common as cli
from slipstream.engine.replay import Prediction, record
from slipstream.measure.bootstrap import SAMPLES, interval
from slipstream.measure.datasets import Asking, load_questions
from slipstream.measure.resume import check_same
from slipstream.measure.runner import first_prompts
from slipstream.provenance import commanded
from slipstream.targets import HFTarget, RecordedTarget

Prompts = dict[str, list[list[int]]]  # by file of questions
Turn = tuple[int, float]  # tokens and seconds
Plot = Annotated[str | None, cli.option("draw it, as SVG", "FILE")]


def run(command: Callable[..., None]) -> None:
    """Run the command line of a script, whose docstring is its help. Results store the command line. A user's
    mistake is one line, with exit code 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    about = sys.modules[command.__module__].__doc__ or ""
    app.command(help="\b\n" + about.replace("\n\n", "\n\n\b\n"))(command)
    with commanded(shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])):
        try:
            app()
        except ValueError as error:
            cli.err.print(f"{Path(sys.argv[0]).name}: {error}", style="red", soft_wrap=True)
            sys.exit(2)


def cells_in(path: str, kind: Any, **settings: Any) -> list[Any]:
    """The cells that a result of this kind holds; none where there is no file. Raises ValueError for another
    file, and for one whose `settings` are others."""
    if not Path(path).exists():
        return []
    try:
        report = kind.read(path)
        check_same("result", {name: (getattr(report, name), now) for name, now in settings.items()})
    except ValueError as error:
        raise ValueError(f"{path} cannot be gone on with: {error}; name another file for --json") from error
    cells: list[Any] = report.cells
    return cells


def prompts_by_file(target: HFTarget, questions: Sequence[Asking], limit: int | None) -> Prompts:
    """The first turn of every question, as tokens; `limit`: of each file. Raises ValueError."""
    asked, by_file = load_questions(questions, limit), Prompts()
    for question, prompt in zip(asked, first_prompts(target, asked), strict=True):
        by_file.setdefault(question.file, []).append(prompt)
    return by_file


def texts_behind(prompts: list[list[int]], count: int, context: int) -> list[list[int]]:
    """`count` prompts of `context` tokens each: a question behind as much of the others as is needed. Raises
    ValueError where there are too few to differ."""
    if len(prompts) < 2:
        raise ValueError("one question: give two at least, which stand behind each other")
    lines = []
    for lap, i in (divmod(i, len(prompts)) for i in range(count)):
        others = [token for other in prompts[i + 1 :] + prompts[:i] for token in other]
        others = others[lap % len(others) :] + others[: lap % len(others)]  # another text each time
        filler = (others * (1 + context // len(others)))[-context:]
        lines.append([*filler, *prompts[i]][-context:])
    return lines


def shortest(prompts: Prompts) -> list[int]:
    """The prompt behind which rounds are timed."""
    return min((prompt for prompts in prompts.values() for prompt in prompts), key=len)


def records(
    target: HFTarget, prompts: Prompts, new: int, taps: Sequence[str], temperature: float = 0.0
) -> dict[str, RecordedTarget]:
    """The target's answers of at most `new` tokens, one record a file: rows of a record are padded, and the
    prompts of different files differ in length."""
    return {
        file: record(target, asked, new, tuple(dict.fromkeys(taps)), batch=20, temperature=temperature)
        for file, asked in prompts.items()
    }


def pooled(parts: Mapping[str, Prediction]) -> Prediction:
    """The texts of all files in one."""
    committed, depth = [part.committed for part in parts.values()], next(iter(parts.values())).depth
    rounds = max(map(len, committed))
    return Prediction(torch.cat([F.pad(each, (0, 0, 0, rounds - len(each))) for each in committed], 1), depth)


def compiled(target: HFTarget) -> HFTarget:
    """A compiled target over the same weights."""
    return HFTarget(target.model, target.text and target.text.tokenizer, target.name, compile=True)


def digits(value: Any) -> Any:
    """Four digits behind the point, through dictionaries, lists and tensors."""
    if isinstance(value, dict):
        return {key: digits(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return digits(value.tolist())
    return [digits(each) for each in value] if isinstance(value, list | tuple) else round(value, 4)


def drawn_of(count: int) -> Int[Tensor, "draws drawn"]:
    """Which of so many are in each draw of a bootstrap: one less, as `paired` explains."""
    return torch.randint(count, (SAMPLES, max(1, count - 1)), generator=torch.Generator().manual_seed(0))


def between(figures: Float[Tensor, " draws"], count: int) -> tuple[float, float]:
    """The 95 % interval of a figure from its draws of so many; of one alone it is a point."""
    return interval(figures, max(1, count - 1))


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> list[float]:
    """The ratio of two speeds, and the ends of the bootstrap's 95 % of it over two turns or more."""
    a, b = (torch.tensor(some, dtype=torch.float64) for some in (ours, theirs))
    drawn = drawn_of(len(a))
    ratios = [x.sum(-2)[..., 0] / x.sum(-2)[..., 1] for x in (a, b, a[drawn], b[drawn])]
    low, high = between((ratios[2] / ratios[3]).log(), len(a))
    return [round(float(each), 3) for each in (ratios[0] / ratios[1], math.exp(low), math.exp(high))]
