"""Progress bars that can be read at any width of the terminal."""

from collections.abc import Iterable

from rich import progress
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
