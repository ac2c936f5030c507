"""`train`: one run, from its recipe to its curve, and what it displays."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from os import PathLike, fspath
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress import Progress
from rich.text import Text

from slipstream.core.target import Target
from slipstream.drafters.recipe import Data, Recipe
from slipstream.files import Paths, several, written_to
from slipstream.plotting import picture
from slipstream.provenance import public
from slipstream.results import Result, made
from slipstream.targets.load import AnyTarget, loaded
from slipstream.training.data import load_examples
from slipstream.training.recipe import load_recipe
from slipstream.training.trainer import LOG, RECIPE, Evaluation, Filling, StepFigures, Trainer

LEARNT, READ = "black on green", "dim"


class TrainingRun(Result):
    """A drafter directory that `train` wrote, with a checkpoint to resume from.

    Attributes:
        tree: the tree for which τ was predicted.
        tau: the highest predicted τ. The weights of that evaluation are kept.
        trained_tokens: number of tokens trained on, over all stages.
        minutes: time spent on training steps, over all stages.
        history: all evaluations.
    """

    directory: str
    method: str
    tree: str
    tau: float
    trained_tokens: int
    minutes: float
    history: list[Evaluation]

    def __rich__(self) -> Text:
        tokens = f"{self.trained_tokens:,} tokens"
        return Text(f"predicted τ {self.tau:.2f} ({self.tree}) after {tokens}, in {self.directory}")

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(evaluation) for evaluation in self.history]

    def plot(self, path: str | None = None) -> Any:
        """Predicted τ and acceptance by depth against the tokens trained on: a matplotlib Figure, which a
        notebook shows and `path` (.svg or .png) keeps."""
        return draw(self.history, path)


@public
def train(
    target: AnyTarget,
    method: str | Recipe,
    directory: str | PathLike[str],
    *,
    data: Paths = (),
    recipe: str | None = None,
    overrides: str | Sequence[str] = (),
    resume: bool = False,
    force: bool = False,
    progress: Callable[[StepFigures], None] = lambda _: None,
    filling: Filling = lambda what, total: lambda n: None,
) -> TrainingRun:
    """Train a drafter for a target.

    The directory always holds the best drafter so far and the last checkpoint. When the run ends or stops,
    the curve is drawn there.

    Args:
        target: a target, or the name of one for `load_target`.
        method: such as "eagle", or a whole recipe; then no data, recipe or overrides are given.
        directory: new, empty, or left by a run that saved nothing.
        data, recipe, overrides, resume: see `recipe_of`; `resume` goes on from the last checkpoint.
        force: write into any directory, whatever it holds, and learn answers of another target, too.
        progress: called with the figures of each step.
        filling: called with a name and a number of tokens when long work begins; it returns a function to
            call with each number of tokens done.

    Raises:
        ValueError: the recipe, the data, the directory or the checkpoint does not fit, or training diverges.
        KeyboardInterrupt: Ctrl-C ended the run; it names the checkpoint, if there is one. SIGTERM leaves one.
    """
    directory = written_to(directory)
    if not isinstance(method, Recipe):
        method = recipe_of(method, directory, data, recipe, overrides, resume)
    elif data or recipe or overrides:
        raise ValueError("a whole recipe is given as method: put data, recipe and overrides into it")
    trainer: Trainer | None = None
    try:
        trainer = Trainer(loaded(target), method, directory, resume, force)
        trainer.prepare(filling)
        state = trainer.run(progress)
    except BaseException as stopped:
        with suppress(ValueError):  # no picture on a full disk: what ended the run says more
            _draw_curve(trainer, directory)
        if not isinstance(stopped, KeyboardInterrupt) or trainer is None or trainer.checkpoint is None:
            raise
        where = f"checkpoint at {trainer.checkpoint} in {directory}"
        raise KeyboardInterrupt(f"{where}: go on with --resume") from stopped
    _draw_curve(trainer, directory)
    return TrainingRun(
        **made(),
        directory=directory,
        method=method.method,
        tree=method.head.tree,
        tau=state.best,
        trained_tokens=state.trained,
        minutes=state.minutes,
        history=state.history,
    )


def recipe_of(
    method: str,
    directory: str | None,
    data: Paths = (),
    recipe: str | None = None,
    overrides: str | Sequence[str] = (),
    resume: bool = False,
) -> Recipe:
    """The recipe of a YAML file, by default that of a resumed run, with other files of examples (`data`) and
    `overrides` such as "section.key=value". Raises ValueError as `load_recipe` does, and where a file that is
    read would be written over."""
    if directory is not None:
        directory = written_to(directory)
    if resume and recipe is None and directory is not None:
        recipe = f"{directory}/{RECIPE}"
    sections = {"data": {"files": [*map(fspath, several(data))]}} if data else {}
    settings = load_recipe(recipe, several(overrides), method=method, **sections)
    if directory is not None and not resume:
        writes = [os.path.realpath(f"{directory}/{name}") for name in (RECIPE, LOG)]
        for file in (*settings.data.files, recipe):
            if file is not None and os.path.realpath(file) in writes:
                raise ValueError(f"{file} is read by this run, which would write over it: name another --out")
    return settings


def preview(target: Target, data: Data, count: int = 3, force: bool = False) -> Group:
    """The first examples, with what the drafter learns to predict in green; `force` as `train` takes it."""
    assert target.text is not None
    examples = load_examples(data.files, target, data.max_length, data.limit, data.greedy, force)
    panels = []
    for i, example in enumerate(examples[:count]):
        text = Text()
        for token, learnt in zip(example.tokens, example.loss, strict=True):
            text.append(target.text.decode([token], special=True), LEARNT if learnt else READ)
        title = f"example {i + 1}: {sum(example.loss)} of {len(example.tokens)} tokens are learnt"
        panels.append(Panel(text, title=title))
    counts = "  · a token counts as an assistant's, or as its end"
    return Group(*panels, Text.assemble(("learnt", LEARNT), "  ", ("only read", READ), counts))


def _draw_curve(trainer: Trainer | None, directory: str) -> None:
    if trainer is not None and trainer.leads and trainer.progress.history:
        draw(trainer.progress.history, f"{directory}/curve.svg")


def draw(history: Sequence[Evaluation], path: str | None) -> Any:
    """Draw predicted τ and acceptance by depth against the tokens trained on. Returns the figure."""
    trained = [entry.trained / 1e6 for entry in history]
    with picture(path, 2, "; log.jsonl has the figures") as (left, right):
        left.plot(trained, [entry.tau for entry in history], marker="o", markersize=3)
        left.set(xlabel="tokens trained on (millions)", ylabel="predicted τ")
        for depth, rates in enumerate(zip(*(entry.acceptance for entry in history), strict=True), 1):
            right.plot(trained, rates, marker="o", markersize=3, label=f"depth {depth}")
        right.set(xlabel="tokens trained on (millions)", ylabel="share of rounds that accept this deep")
        right.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return left.figure


class Watch:
    """Progress bars of a run. `Trainer` calls `filling` and `show`."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._logged_tau = bar, 0.0
        self._stages = dict[int, Any]()  # the task of each

    def filling(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a bar for long work, and return what advances it by a number of tokens."""
        task = self._bar.add_task(what, total=total, note="(tokens)")
        return lambda n: self._bar.update(task, advance=n)

    def show(self, step: StepFigures) -> None:
        """Update the stage's bar with the latest figures."""
        stage, console = f"stage {step.stage + 1}", self._bar.console
        if step.stage not in self._stages:
            self._stages[step.stage] = self._bar.add_task(stage, total=step.of, note="")
        note = f"predicted τ {step.tau:.2f}  loss {step.loss:.3f}  agree {step.agree:.0%}"
        note += f"  {step.tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._stages[step.stage], completed=step.step, note=note)
        if not console.is_terminal and step.tau != self._logged_tau:  # a line per prediction in a log
            self._logged_tau = step.tau
            console.print(f"{stage}, step {step.step} of {step.of}: {note}", soft_wrap=True)
