"""`train`: one run, from its recipe to its curve."""

from collections.abc import Callable, Sequence
from os import PathLike, fspath

from rich.text import Text

from slipstream.command import public
from slipstream.results import Result, made
from slipstream.targets.load import AnyTarget, loaded
from slipstream.training.progress import Evaluation, Filling, Seen
from slipstream.training.recipe import Recipe, load_recipe
from slipstream.training.show import draw
from slipstream.training.trainer import RECIPE, Trainer


class TrainingRun(Result):
    """A drafter directory that `train` wrote, with a checkpoint to resume from.

    Attributes:
        tree, tau: the tree that τ was predicted for, and the highest prediction, whose weights are kept.
        trained_tokens, minutes: learnt from, and spent on steps, over all stages.
        history: all predictions.
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


@public
def train(
    target: AnyTarget,
    method: str | Recipe,
    directory: str | PathLike[str],
    *,
    data: Sequence[str] = (),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    force: bool = False,
    progress: Callable[[Seen], None] = lambda _: None,
    filling: Filling = lambda what, total: lambda n: None,
) -> TrainingRun:
    """Train a drafter for a target.

    The directory always holds the best drafter so far and the last checkpoint. When the run ends or stops,
    the curve is drawn there.

    Args:
        target: a target, or the name of one, which is loaded with `load_target`'s defaults.
        method: such as "eagle", or a whole recipe.
        directory: new, empty, or left by a run that saved nothing.
        data, recipe, overrides, resume: see `recipe_of`; `resume` goes on from the last checkpoint.
        force: write whatever the directory holds.
        progress: called with the figures of each step.
        filling: see `Trainer.prepare`.

    Raises:
        ValueError: the recipe, the data, the directory or the checkpoint does not fit, or training diverges.
        KeyboardInterrupt: Ctrl-C or SIGTERM ended the run; it names the checkpoint, if there is one.
    """
    directory = fspath(directory)
    settled = method
    if isinstance(settled, str):
        settled = recipe_of(settled, directory, data, recipe, overrides, resume)
    trainer: Trainer | None = None
    try:
        trainer = Trainer(loaded(target), settled, directory, resume, force)
        trainer.prepare(filling)
        done = trainer.run(progress)
    except KeyboardInterrupt as stopped:
        if trainer is None or trainer.checkpoint is None:
            raise
        where = f"checkpoint at step {trainer.checkpoint} in {directory}"
        raise KeyboardInterrupt(f"{where}: go on with --resume") from stopped
    finally:
        if trainer is not None and trainer.leads and trainer.progress.history:
            draw(trainer.progress.history, f"{directory}/curve.svg")
    return TrainingRun(
        **made(),
        directory=directory,
        method=settled.method,
        tree=settled.head.tree,
        tau=done.best,
        trained_tokens=done.trained,
        minutes=round(done.seconds / 60, 1),
        history=done.history,
    )


def recipe_of(
    method: str,
    directory: str | None,
    data: Sequence[str] = (),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> Recipe:
    """The recipe of a file, with what else is given; a resumed run's own by default.

    Args:
        data: files of examples, in the place of the recipe's.
        recipe: a YAML file; see the recipe.yaml that each run leaves.
        overrides: "section.key=value".

    Raises:
        ValueError: it cannot be read, a key is unknown or a value is out of range.
    """
    if resume and recipe is None and directory is not None:
        recipe = f"{directory}/{RECIPE}"
    given = {"data": {"files": list(data)}} if data else {}
    return load_recipe(recipe, overrides, method=method, **given)
