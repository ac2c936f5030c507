"""Progress bars that are read at any width."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text


class Bars(Progress):
    """Two lines for each task: what is under way, and the bar with counts and times."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            words = [task.description, task.fields["note"]]
            yield Text("  ".join(filter(None, words)), no_wrap=True, overflow="ellipsis")
            yield self.make_tasks_table([task])


def bars(console: Console, transient: bool = False) -> Bars:
    """Bars whose tasks have a `note`: what is said of them now. Times are those that have passed and are
    left."""
    times = (TimeElapsedColumn(), TextColumn("<"), TimeRemainingColumn())
    bar = BarColumn(None, table_column=Column(ratio=1))  # what the others leave
    quiet = not console.is_terminal  # a log
    return Bars(
        bar, MofNCompleteColumn(), *times, console=console, transient=transient, expand=True, disable=quiet
    )
