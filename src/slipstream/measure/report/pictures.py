"""Pictures of runs of `bench`: what a run's drafters brought, and throughput against texts at once."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from slipstream.measure.bootstrap import Interval, Paired, QuestionResult, paired
from slipstream.measure.results import PARTS, BenchReport, DrafterResult, Sweep
from slipstream.plotting import picture

MARKED: dict[str, Any] = {"marker": "o", "markersize": 4}
SHADES = ("#0072B2", "#E69F00", "#999999")  # dark, light and grey, also without colour


def by_task(
    row: DrafterResult, plain: DrafterResult, task: Callable[[QuestionResult], str]
) -> dict[str, Paired]:
    """Speed over plain decoding's by the task of a question, with intervals over its questions."""
    tasks: dict[str, dict[str, QuestionResult]] = {}
    for question, answer in row.by_question.items():
        tasks.setdefault(task(answer), {})[question] = answer
    return {name: paired(answers, plain.by_question) for name, answers in tasks.items()}


def draw_run(run: BenchReport, path: str | None) -> Any:
    """Speed-up by task with intervals, acceptance by depth, accepted lengths, and the time split of a round.
    Returns the figure. Raises ValueError where the file cannot be written."""
    drafters = [row for row in run.results if row.drafter != "vanilla"] or run.results
    with picture(path, 4) as (tasks, depths, lengths, times):
        _tasks(tasks, run.results[0], drafters)
        for row in drafters:
            reached = [1.0, *row.acceptance_by_depth, 0.0]
            depths.plot(range(1, len(reached) - 1), reached[1:-1], label=row.drafter, **MARKED)
            shares = [share - deeper for share, deeper in pairwise(reached)]
            lengths.plot(range(len(shares)), shares, **MARKED)
        depths.set(title="Acceptance by depth", xlabel="depth", ylabel="share of rounds", ylim=(0, 1))
        lengths.set(
            title="Accepted lengths", xlabel="tokens accepted", ylabel="share of rounds", ylim=(0, None)
        )
        _times(times, run.results, run.batch)
        for axes in (depths, lengths):
            axes.xaxis.get_major_locator().set_params(integer=True)
        depths.legend(frameon=False, fontsize="x-small")
    return tasks.figure


def _tasks(axes: Any, plain: DrafterResult, drafters: list[DrafterResult]) -> None:
    """× plain of each drafter, by category where there are several, else by file."""
    answers = plain.by_question.values()
    several = len({answer.category or answer.file for answer in answers}) > 1

    def task(answer: QuestionResult) -> str:
        return (several and answer.category) or answer.file

    names = sorted({task(answer) for answer in answers})
    for i, row in enumerate(drafters):
        at = [place + (i - (len(drafters) - 1) / 2) * 0.7 / len(drafters) for place in range(len(names))]
        by_name = by_task(row, plain, task)
        speedups = [by_name[name] for name in names]
        means = [speedup.mean for speedup in speedups]
        off = _errors(means, [speedup.interval for speedup in speedups])
        axes.errorbar(means, at, xerr=off, linestyle="", label=row.drafter, **MARKED)
    axes.axvline(1.0, color="gray", linestyle="--", linewidth=1)
    axes.set(title="Speed-up by task, 95 % over questions", xlabel="× plain decoding")
    axes.set_yticks(range(len(names)), names, fontsize="x-small")


def _errors(means: Sequence[float], intervals: Sequence[Interval | None]) -> list[list[float]]:
    """How far intervals reach below and above the means; nowhere where there is none."""
    ends = [interval or (mean, mean) for mean, interval in zip(means, intervals, strict=True)]
    return [[abs(mean - end[side]) for mean, end in zip(means, ends, strict=True)] for side in (0, 1)]


def _times(axes: Any, rows: list[DrafterResult], batch: int) -> None:
    left = [0.0] * len(rows)
    for part, shade in zip(PARTS, SHADES, strict=True):
        ms = [row.milliseconds(batch)[part] for row in rows]
        axes.barh(range(len(rows)), ms, left=left, label=part, color=shade)
        left = [start + more for start, more in zip(left, ms, strict=True)]
    axes.set(title="Time split of a round", xlabel="milliseconds")
    axes.set_yticks(range(len(rows)), [row.drafter for row in rows], fontsize="x-small")
    axes.set_ylim(-0.6, len(rows) + 0.2)  # room for the legend above the bars
    axes.legend(frameon=False, fontsize="x-small", loc="upper center", ncol=len(PARTS))


def draw_sweep(sweep: Sweep, path: str | None) -> Any:
    """Tokens a second, and speed over plain decoding, against texts at once; a line for each target as it was
    run, temperature and drafter. Returns the figure. Raises ValueError where the file cannot be written."""
    lines: dict[tuple[str, float, str], list[tuple[int, DrafterResult]]] = {}
    for run in sweep.runs:
        for row in run.results:
            lines.setdefault((run.model, run.temperature, row.drafter), []).append((run.batch, row))
    targets = {target for target, _, _ in lines}
    with picture(path, 2) as (speeds, ratios):
        for (target, temperature, name), rows in lines.items():
            rows.sort(key=itemgetter(0))
            label = f"{f'{target}, ' * (len(targets) > 1)}{name}, T = {temperature:g}"
            batches = [batch for batch, _ in rows]
            speeds.plot(batches, [row.tokens_per_second for _, row in rows], label=label, **MARKED)
            means = [row.speedup.vanilla for _, row in rows]
            off = _errors(means, [row.intervals.get("vanilla") for _, row in rows])
            ratios.errorbar(batches, means, yerr=off, **MARKED)
        speeds.set(title="Throughput", xlabel="texts at once", ylabel="tokens/s", ylim=(0, None))
        ratios.set(title="Speed-up, 95 % over questions", xlabel="texts at once", ylabel="× plain decoding")
        for axes in (speeds, ratios):
            axes.xaxis.get_major_locator().set_params(integer=True)
        speeds.legend(frameon=False, fontsize="x-small")
    return speeds.figure
