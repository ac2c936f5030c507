"""Progress bars that can be read at any width of the terminal."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import get_console, progress
from rich.console import Console, RenderableType
from rich.table import Column
from rich.text import Text


class Bars(progress.Progress):
    """Two lines for each task: its description and note, and the bar with counts and times."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            title = "  ".join(filter(None, [task.description, task.fields["note"]]))
            yield Text(title, no_wrap=True, overflow="ellipsis")
            yield self.make_tasks_table([task])


def bars(console: Console, transient: bool = False) -> Bars:
    """Bars with the time passed < the time left. Each task has a field `note`, the latest news of it."""
    bar = progress.BarColumn(None, table_column=Column(ratio=1))  # takes the width that the others leave
    times = (progress.TimeElapsedColumn(), progress.TextColumn("<"), progress.TimeRemainingColumn())
    columns = (bar, progress.MofNCompleteColumn(), *times)
    quiet = not console.is_terminal  # no bars in a log
    return Bars(
        *columns,
        console=console,
        speed_estimate_period=600,  # seconds: a step may take a minute
        transient=transient,
        expand=True,
        disable=quiet,
    )


def in_notebook() -> bool:
    """Whether this process answers a notebook's cells."""
    return get_console().is_jupyter


@contextmanager
def notebook_bar(name: str) -> Iterator[Callable[..., None]]:
    """A bar below a notebook's cell, of text: it needs no widgets. Yields what takes the reports of
    `progress`: the step under way, a count and its total, or `training.trainer.StepFigures`."""
    from tqdm.std import tqdm

    with tqdm(desc=name) as bar:

        def show(*news: Any) -> None:
            if isinstance(news[0], str):
                bar.set_postfix_str(news[0], refresh=False)
                bar.update()
                return
            done, bar.total = news if len(news) == 2 else (news[0].step, news[0].of)
            if len(news) == 1:
                bar.set_postfix_str(f"predicted τ {news[0].tau:.2f}, loss {news[0].loss:.3f}", refresh=False)
            bar.n = done
            bar.refresh()

        yield show
