"""report: runs of `bench`, certificates and traces of answers as one HTML page, which needs nothing else.

This module reads and condenses; the page's own script, `page/*.js`, draws.
"""

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, TypeVar

from slipstream.engine.trace import Round, drawn, read_trace
from slipstream.files import parsed, read_text
from slipstream.html import assembled
from slipstream.measure.results import BenchReport, DrafterResult
from slipstream.measure.bootstrap import Asked, paired
from slipstream.measure.certify import Certificate
from slipstream.measure.datasets import file_names
from slipstream.measure.sweep import Sweep

R = TypeVar("R", BenchReport, Certificate, Sweep)
SCRIPTS = ("dom", "charts", "runs", "certificates", "tree", "answers", "page")  # each needs those before


def page(paths: Sequence[str]) -> str:
    """The HTML page of runs, certificates and traces, in the order given. Raises ValueError, which names the
    file, for one that cannot be read or is none of them."""
    runs, certificates, traces = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for path, name in zip(paths, file_names(paths), strict=True):
        text = read_text(path, "run or trace")
        if _is_trace(text):
            traces.append({"name": name, **_trace(read_trace(path, text))})
        elif _holds("certified", text):
            certificates.append({"name": name, **_read(path, text, Certificate).stored()})
        elif _holds("runs", text):
            for run in _read(path, text, Sweep).runs:
                place = f"{run.model}, T = {run.temperature:g}, {run.batch} at once"
                runs.append({"name": f"{name}: {place}", **_run(run)})
        else:
            runs.append({"name": name, **_run(_read(path, text, BenchReport))})
    sources = files("slipstream.measure.report") / "page"
    scripts = [sources / f"{part}.js" for part in SCRIPTS]
    data = _finite({"runs": runs, "certificates": certificates, "traces": traces})
    return assembled(
        sources / "page.html", ", ".join(file_names(paths)), [sources / "page.css"], scripts, data
    )


def _is_trace(text: str) -> bool:
    """A trace's first line is an object with a row; a run's is the beginning of one."""
    try:
        first = parsed(text.split("\n", 1)[0])
    except ValueError:
        return False
    return isinstance(first, dict) and "row" in first


def _holds(key: str, text: str) -> bool:
    try:
        return key in parsed(text)
    except (ValueError, TypeError):
        return False


def _read(path: str, text: str, kind: type[R]) -> R:
    try:
        return kind.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is no run of bench, certificate or trace: {error}") from error


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run(report: BenchReport) -> dict[str, Any]:
    """The run as it is stored, and the speed-up by file with its interval where questions are known."""
    plain = next((row for row in report.results if row.drafter == "vanilla"), None)
    stored = report.stored() | {"batch": report.batch, "turns": []}  # which only a run that goes on needs
    for row, line in zip(report.results, stored["results"], strict=True):
        line |= {"tasks": {} if plain is None else _tasks(row, plain), "ms": row.milliseconds(report.batch)}
    return stored


def _tasks(row: DrafterResult, plain: DrafterResult) -> dict[str, Any]:
    """By file, and by category where questions have one."""

    def by(part: str, result: DrafterResult) -> dict[str, dict[str, Asked]]:
        parts: dict[str, dict[str, Asked]] = {}
        for name, asked in result.by_question.items():
            parts.setdefault(getattr(asked, part), {})[name] = asked
        return {key: some for key, some in parts.items() if key}

    ours, theirs = (by("file", each) | by("category", each) for each in (row, plain))
    return {key: vars(paired(asked, theirs[key])) for key, asked in ours.items()}


def _trace(answers: list[list[Round]]) -> dict[str, Any]:
    """Answers round by round. Texts of tokens stand in one list, where rounds name their places."""
    places: dict[str, int] = {}
    told = [
        {
            "opening": rounds[0].opening.stored() if rounds[0].opening else None,
            "rounds": [drawn(each, places) for each in rounds],
        }
        for rounds in answers
    ]
    return {"answers": told, "texts": list(places)}
