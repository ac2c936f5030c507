"""report: runs of `bench`, certificates and traces of answers as one HTML page, which needs nothing else.

This module reads and condenses; the page's own script, `page/*.js`, draws.
"""

from collections.abc import Sequence
from importlib.resources import files
from operator import attrgetter
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from slipstream.engine.trace import TracedStep, drawn, read_trace
from slipstream.files import parsed, read_text
from slipstream.html import assembled
from slipstream.measure.bootstrap import Paired
from slipstream.measure.datasets import file_names
from slipstream.measure.results import BenchReport, Certificate, Sweep

R = TypeVar("R", BenchReport, Certificate, Sweep)
SCRIPTS = ("dom", "charts", "runs", "certificates", "tree", "answers", "page")  # each needs those before


def page(paths: Sequence[str]) -> str:
    """The HTML page of runs, certificates and traces, in the order given. Raises ValueError, which names the
    file, for one that cannot be read or is none of them."""
    data: dict[str, list[dict[str, Any]]] = {"runs": [], "certificates": [], "traces": []}
    for path, name in zip(paths, file_names(paths), strict=True):
        text = read_text(path, "run or trace")
        if "row" in _keys(text.split("\n", 1)[0]):  # a trace's first line is a whole object
            data["traces"].append({"name": name, **_trace(read_trace(path, text))})
        elif "certified" in (keys := _keys(text)):
            data["certificates"].append({"name": name, **_read(path, text, Certificate).stored()})
        elif "runs" in keys:
            for run in _read(path, text, Sweep).runs:
                title = f"{name}: {run.model}, T = {run.temperature:g}, {run.batch} at once"
                data["runs"].append({"name": title, **_run(run)})
        else:
            data["runs"].append({"name": name, **_run(_read(path, text, BenchReport))})
    sources = files("slipstream.measure.report") / "page"
    scripts = [sources / f"{part}.js" for part in SCRIPTS]
    title = ", ".join(file_names(paths))
    finite = from_json(to_json(data, inf_nan_mode="null"))  # JSON has no infinity
    return assembled(sources / "page.html", title, [sources / "page.css"], scripts, finite)


def _keys(text: str) -> set[str]:
    """Those of a JSON object; none for any other text."""
    try:
        value = parsed(text)
    except ValueError:
        return set()
    return {*value} if isinstance(value, dict) else set()


def _read(path: str, text: str, kind: type[R]) -> R:
    try:
        return kind.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is no run of bench, certificate or trace: {error}") from error


def _run(report: BenchReport) -> dict[str, Any]:
    """The run as it is stored, and its speed-ups by file and category where questions are known."""
    plain = next((row for row in report.results if row.drafter == "vanilla"), None)
    stored = report.stored() | {"batch": report.batch, "turns": []}  # turns are for a run that goes on
    for row, line in zip(report.results, stored["results"], strict=True):
        tasks: dict[str, Paired] = {}
        for part in ("file", "category"):
            tasks |= row.by_task(plain, attrgetter(part)) if plain else {}
        line["tasks"] = {name: vars(speedup) for name, speedup in tasks.items() if name}
        line["ms"] = row.milliseconds(report.batch)
    return stored


def _trace(answers: list[list[TracedStep]]) -> dict[str, Any]:
    """Answers round by round. Texts of tokens stand in one list, where rounds name their places."""
    places: dict[str, int] = {}
    drawings = [
        {
            "opening": rounds[0].opening.stored() if rounds[0].opening else None,
            "rounds": [drawn(step, places) for step in rounds],
        }
        for rounds in answers
    ]
    return {"answers": drawings, "texts": list(places)}
