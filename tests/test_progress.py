"""Progress bars."""

import io

import pytest
from rich.console import Console

from slipstream import provenance as command
from slipstream.progress import bars
from slipstream.training.run import Watch
from slipstream.training.trainer import StepFigures


@pytest.mark.parametrize("width", [44, 60, 80, 120])
def test_a_bar_is_read_at_any_width(width):
    """At 80 columns the bar was one dash and the time left "…"."""
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    shown = bars(console)
    watch = Watch(shown)
    watch.filling("answering held-out prompts", 1_048_576)(1_000_000)
    watch.show(StepFigures(0, 1000, 4567, 3.1234, 0.456, 12345.6, 2.31))
    console.print(shown.get_renderable())
    words, filling, note, stage = console.file.getvalue().splitlines()
    assert words.startswith("answering held-out prompts")
    assert note.startswith("stage 1  predicted τ 2.31  loss 3.123")
    for bar, count in ((filling, "1000000/1048576"), (stage, "1000/4567")):
        assert count in bar
        assert bar.count("━") >= 3
        assert bar.count(":") == 4  # time passed and left
        assert len(bar) <= width


def test_a_notebook_gets_a_bar_unless_the_caller_has_one(monkeypatch, capsys):
    """Minutes without a word below a cell. The caller's own `progress` is called instead, and elsewhere
    nothing is shown."""

    @command.public
    def work(progress=lambda *_: None):
        progress("a step")
        progress(3, 8)
        progress(StepFigures(0, 5, 10, 3.1234, 0.456, 12345.6, 2.31))

    work()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(command, "in_notebook", lambda: True)
    work()
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("work", "a step", "3/8", "5/10", "predicted τ 2.31"))
    own = []
    work(progress=lambda *news: own.append(news))
    work(progress=None)
    assert (len(own), capsys.readouterr().err) == (3, "")
