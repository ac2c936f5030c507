"""What `bench`, `sweep` and `certify` return and store, their tables and pictures."""

import math
import os
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from rich.console import Group
from rich.text import Text

from slipstream.engine.engine import Seconds
from slipstream.measure.bootstrap import Interval, Paired, QuestionResult, paired
from slipstream.methods import METHODS
from slipstream.plotting import picture
from slipstream.provenance import commanded, suggested
from slipstream.results import Figures, Margin, Part, Report, Result, flat

HF = "hf_generate"
BASELINES = ("vanilla", HF)
PARTS = ("draft", "verify", "host")  # of a round
FACTORS = {"tau": "τ", "rows": "rows", "draft": "draft", "host": "host", "prompt": "prompt"}
WIDE = 12  # letters of a name that fits over a column
MARKED: dict[str, Any] = {"marker": "o", "markersize": 4}
SHADES = ("#0072B2", "#E69F00", "#999999")  # dark, light and grey, also without colour


def promise(exactness: str, margin: float) -> str:
    """What answers are held to, for people."""
    return "token for token" if exactness == "bits" else f"up to near-ties within {margin:g} logits"


class Speedup(Part):
    """Tokens per second over each baseline's."""

    vanilla: float
    hf_generate: float


class Speed(Part):
    """τ and tokens per second over some of the turns."""

    questions: int  # turns
    new_tokens: int
    tau: float
    tokens_per_second: float
    speedup: Speedup
    intervals: dict[str, Interval | None] = {}  # over each baseline; None where a file has one question only

    def over(self, baseline: str) -> str:
        """The speed-up over a baseline, for people."""
        return str(Paired(getattr(self.speedup, baseline), self.intervals.get(baseline)))


class Difference(Part):
    """A token that is not plain decoding's (`engine.audit.Divergence`), and where. Where one of the answers
    has ended, its token is −1 and the margin infinite, which is null in JSON."""

    question: str
    turn: int = 0  # of the question, counted from 0; `certify` asks the first one only
    position: int
    token: int
    plain: int
    margin: Margin


class Counted(Part):
    """What figures are computed from, of one answer."""

    new_tokens: int
    wall: float  # seconds, the prompt's pass included
    rounds: list[tuple[int, int, int, int]] = []  # tokens drafted, accepted and kept; how many rounds were so
    seconds: Seconds = Seconds()
    identical: bool = True
    differences: list[Difference] = []
    unexplained: int = 0
    memory_mib: float | None = None
    shared: float | None = None  # its share of the rounds of its batch; None: they were its own


class Turn(Part):
    """One turn of a question as all methods answered it, which a run that goes on needs."""

    question: str  # its name
    turn: int
    group: int  # turns of one number were asked at once
    given: dict[str, Counted]  # by method


class BenchSettings(Part):
    """What was asked: a run goes on only under the same settings."""

    drafters: list[str]
    questions: list[str]
    temperature: float
    batch: int
    weights: str = ""  # a hash of the target's, and of its generation_config
    texts: str = ""  # a hash of the questions; older results have both in the fingerprint
    fingerprint: str  # a hash of the drafters' trees and weights


class Expected(Part):
    """The speed-up that a draft's quality and cost promise if rows cost nothing."""

    # The share accepted of judged tokens: of a chain E[Σ min(p, q)], of a tree the chance of some child.
    alpha: float
    c: float  # seconds of drafting one level of depth over those of a plain pass
    speedup: float  # the promise


class Factors(Part):
    """A speed-up over plain decoding, factor by factor."""

    tau: float  # tokens a round
    rows: float  # seconds of plain decoding's pass over those of the tree's
    draft: float  # seconds of the pass over those of pass and draft
    host: float  # the share of a round that is not the host's, over plain decoding's share
    prompt: float  # the share of time and of tokens after the prompt's pass, over plain decoding's
    predicted: float  # the product
    measured: float  # tokens per second over plain decoding's
    remainder: float  # by how much `measured` exceeds `predicted`


class DrafterResult(Speed):
    """One drafter's figures, over all turns and over parts of them."""

    drafter: str
    tree: str | None = None
    rows: int | None = None  # of a target pass
    target_passes: int  # of each text, with others or alone
    shared_rounds: float | None = None  # of several texts at once, each counted once
    acceptance_by_depth: list[float]  # the share of passes that accepted d drafted tokens or more
    acceptance_by_depth_conditional: list[float]  # of the passes that drafted d and accepted d − 1
    law: str = "coupled"
    identical: bool | None  # every answer is plain decoding's; None where only the distribution is kept
    unexplained: int  # differences that the promise does not allow
    divergences: list[Difference]
    seconds: Seconds
    host_share: float  # of the time behind the prompts
    memory_mib: float | None = None  # the most that the process held, the target included
    expected: Expected | None = None
    ledger: Factors | None = None
    by_category: dict[str, Speed]
    by_file: dict[str, Speed] = {}
    by_question: dict[str, QuestionResult] = {}
    of_files: dict[str, Paired] = {}  # over each baseline, as means of files

    def milliseconds(self, batch: int) -> dict[str, float]:
        """Of a mean round, by part. Older results do not say how many rounds texts shared: of those all are
        taken to have had `batch` texts."""
        rounds = self.shared_rounds or self.target_passes / batch
        return {part: 1e3 * getattr(self.seconds, part) / max(rounds, 1) for part in PARTS}

    @property
    def faster(self) -> bool | None:
        """Whether it is faster than plain decoding; None where the interval holds 1, or there is none."""
        low, high = self.intervals.get("vanilla") or (0.0, math.inf)
        return low > 1 if low > 1 or high < 1 else None

    @property
    def kinds(self) -> dict[str, Speed]:
        """By category, without the questions that have none, which have their file's name."""
        return {name: part for name, part in self.by_category.items() if name not in self.by_file}

    @property
    def speeds(self) -> tuple[str, ...]:
        """τ, tokens per second, and over both baselines, for people."""
        return f"{self.tau:.2f}", f"{self.tokens_per_second:.1f}", self.over("vanilla"), self.over(HF)

    @property
    def sameness(self) -> Text:
        """Whether every answer is plain decoding's, for people."""
        if self.unexplained:
            return Text(f"NO: {self.unexplained} unexplained", "bold red")
        if self.identical is None:
            return Text("in law", "cyan")
        return Text("yes", "green") if self.identical else Text(f"{len(self.divergences)} ties", "yellow")

    def by_task(self, plain: "DrafterResult", task: Callable[[QuestionResult], str]) -> dict[str, Paired]:
        """Speed over plain decoding's by the task of a question, with intervals over its questions."""
        tasks: dict[str, dict[str, QuestionResult]] = {}
        for question, answer in self.by_question.items():
            tasks.setdefault(task(answer), {})[question] = answer
        return {name: paired(answers, plain.by_question) for name, answers in tasks.items()}

    def verdict(self) -> Text:
        """Whether it is faster than plain decoding here, and what to try."""
        of = f"{self.over('vanilla')} times plain decoding"
        if self.faster:
            return Text(f"{self.drafter} is faster, {of}", "green")
        if self.faster is not None:
            return Text(f"{self.drafter} is slower here, {of}: try {_remedy(self.drafter)}", "yellow")
        why = "the interval holds 1" if self.intervals.get("vanilla") else "that is one question"
        more = "ask more of them (--limit, --questions)"
        return Text(f"{self.drafter} is undecided, {of}: {why}, {more}", "yellow")


def _remedy(drafter: str) -> str:
    """What may make a drafter quicker."""
    name = drafter.partition(":")[0]
    if METHODS[name].tunes if name in METHODS else os.path.isdir(os.path.expanduser(name)):
        return suggested(f"tune --drafter {shlex.quote(drafter)}")
    return "--drafter auto, which guesses where it pays"


class HFResult(Part):
    """Hugging Face generate's figures."""

    tokens_per_second: float
    new_tokens: int
    memory_mib: float | None = None
    by_question: dict[str, QuestionResult] = {}


class BenchReport(Report):
    """What `bench` found.

    Attributes:
        exactness: the promise that drafters were held to, as in `Certificate`.
        margin: how close two scores of a near-tie are at most, in logits (`Target.margin`).
        batch: number of prompts that were answered at once.
        prompts: names of the questions that all methods answered.
        settings: the arguments of the run. None in reports of older versions.
        results: the figures of plain decoding, then those of each drafter.
        turns: the answers so far of a run that has not ended, which `begun` needs.
    """

    exactness: str = "audited"
    margin: float
    temperature: float
    seed: int
    max_new_tokens: int
    batch: int = 1
    prompts: list[str]
    settings: BenchSettings | None = None
    hf_generate: HFResult
    results: list[DrafterResult]
    turns: list[Turn] = []

    def __rich__(self) -> Group:
        """One line per drafter, one per category and drafter, and where the time went."""
        title = f"{self.model}, T = {self.temperature:g}, {self.hardware['cpu']}"
        title += f", {self.batch} texts at once" if self.batch > 1 else ""
        title += f"; held to plain decoding {promise(self.exactness, self.margin)}"
        main = Figures(title, "drafter", "τ", "tok/s", "× plain", "× HF", *PARTS, "same")
        for row in self.results:
            parts = [getattr(row.seconds, part) for part in PARTS]
            shares = (f"{part / max(sum(parts), 1e-9):.1%}" for part in parts)
            main.add_row(row.drafter, *row.speeds, *shares, row.sameness)
        hf = f"{self.hf_generate.tokens_per_second:.1f}"
        main.add_row("HF generate", "1.00", hf, "", "1.00", "", "", "", "", style="dim")
        return Group(main, _by_part(self.results), *_notes(self.results), *self.verdicts())

    def _rows(self) -> list[dict[str, Any]]:
        return [flat(row) for row in self.results]

    def plot(self, path: str | None = None) -> Any:
        """Speed-up by task, acceptance by depth, accepted lengths and the time split of a round, as one
        matplotlib Figure, which a notebook shows and `path` (.svg or .png) keeps. Raises ValueError where it
        cannot be written."""
        drafters = [row for row in self.results if row.drafter != "vanilla"] or self.results
        with picture(path, 4) as (tasks, depths, lengths, times):
            _draw_tasks(tasks, self.results[0], drafters)
            for row in drafters:
                reached = [1.0, *row.acceptance_by_depth, 0.0]
                depths.plot(range(1, len(reached) - 1), reached[1:-1], label=row.drafter, **MARKED)
                shares = [share - deeper for share, deeper in pairwise(reached)]
                lengths.plot(range(len(shares)), shares, **MARKED)
            depths.set(title="Acceptance by depth", xlabel="depth", ylabel="share of rounds", ylim=(0, 1))
            lengths.set(title="Accepted lengths", xlabel="tokens accepted", ylabel="share of rounds")
            lengths.set_ylim(0, None)
            _draw_times(times, self.results, self.batch)
            for axes in (depths, lengths):
                axes.xaxis.get_major_locator().set_params(integer=True)
            depths.legend(frameon=False, fontsize="x-small")
        return tasks.figure

    def verdicts(self) -> list[Text]:
        """A sentence for each drafter: whether it is faster than plain decoding here, and what to try."""
        with commanded(self.command):
            return [row.verdict() for row in self.results if row.drafter != "vanilla"]


def _by_part(results: list[DrafterResult]) -> Figures:
    drafters = [row for row in results if row.drafter != "vanilla"] or results
    names = [row.drafter for row in drafters]
    title = "τ, and speed × plain"
    if max(map(len, names)) > WIDE:
        title += "".join(f"; #{number} {name}" for number, name in enumerate(names, 1))
        names = [f"#{number}" for number in range(1, 1 + len(names))]
    table = Figures(title, "questions", "turns", *names)
    for parts in ([row.kinds for row in drafters], [row.by_file for row in drafters]):
        for key, first in parts[0].items():
            cells = (f"{part[key].tau:.2f}  {part[key].over('vanilla')}×" for part in parts)
            table.add_row(key, first.questions, *cells)
        table.add_section()
    means = [row.of_files["vanilla"] for row in drafters if row.of_files]
    if means:
        table.add_row("mean of the files", "", *(f"{mean.mean:.2f}×" for mean in means))
    intervals = [mean.interval for mean in means if mean.interval]
    if intervals:
        table.add_row("95 % interval", "", *(f"{low:.2f}–{high:.2f}×" for low, high in intervals))
    return table


def _notes(results: list[DrafterResult]) -> list[Text]:
    """Below the tables: acceptance by depth, the speed-up to expect, and what the measured one is made of."""
    depths, products = [], []
    for row in results:
        if row.acceptance_by_depth:
            rates = (row.acceptance_by_depth, row.acceptance_by_depth_conditional)
            all_passes, drafted = (" ".join(f"{rate:.2f}" for rate in by_depth) for by_depth in rates)
            depths.append(f"{row.drafter}: accepted by depth {all_passes}; where drafted that far {drafted}")
        if row.acceptance_by_depth and (of := row.expected):
            speedup = f"{of.speedup:.2f} × expected if rows cost nothing"
            depths.append(f"{row.drafter}: α {of.alpha:.2f}, c {of.c:.3f}: {speedup}")
        if row.drafter != "vanilla" and (of_all := row.ledger):
            product = " × ".join(f"{name} {getattr(of_all, key):.2f}" for key, name in FACTORS.items())
            measured = f"measured {of_all.measured:.2f}, {of_all.remainder:+.1%} unexplained"
            products.append(f"{row.drafter}: {product} = {of_all.predicted:.2f}; {measured}")
    return [Text(line) for line in depths + products]


def _draw_tasks(axes: Any, plain: DrafterResult, drafters: list[DrafterResult]) -> None:
    """× plain of each drafter, by category where there are several, else by file."""
    answers = plain.by_question.values()
    several = len({answer.category or answer.file for answer in answers}) > 1

    def task(answer: QuestionResult) -> str:
        return (several and answer.category) or answer.file

    names = sorted({task(answer) for answer in answers})
    for i, row in enumerate(drafters):
        at = [place + (i - (len(drafters) - 1) / 2) * 0.7 / len(drafters) for place in range(len(names))]
        by_name = row.by_task(plain, task)
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


def _draw_times(axes: Any, rows: list[DrafterResult], batch: int) -> None:
    left = [0.0] * len(rows)
    for part, shade in zip(PARTS, SHADES, strict=True):
        ms = [row.milliseconds(batch)[part] for row in rows]
        axes.barh(range(len(rows)), ms, left=left, label=part, color=shade)
        left = [start + more for start, more in zip(left, ms, strict=True)]
    axes.set(title="Time split of a round", xlabel="milliseconds")
    axes.set_yticks(range(len(rows)), [row.drafter for row in rows], fontsize="x-small")
    axes.set_ylim(-0.6, len(rows) + 0.2)  # room for the legend above the bars
    axes.legend(frameon=False, fontsize="x-small", loc="upper center", ncol=len(PARTS))


class Sweep(Result):
    """What `sweep` found: one run of `bench` for each target, temperature and number of texts.

    Attributes:
        stopped: the error that ended the sweep early; the runs are those until then.
    """

    stopped: str | None = None
    runs: list[BenchReport]

    def __rich__(self) -> Group:
        """A line for each drafter of each run, and in how many each is faster than plain decoding."""
        columns = ("texts", "drafter", "τ", "tok/s", "× plain", "× HF", "MiB", "same")
        table = Figures("slipstream report shows each run", "target", "T", *columns)
        for run in self.runs:
            for row in run.results:
                memory = "" if row.memory_mib is None else f"{row.memory_mib:.0f}"
                place = (run.model, f"{run.temperature:g}", run.batch, row.drafter)
                table.add_row(*place, *row.speeds, memory, row.sameness)
            table.add_section()
        return Group(table, *self.verdicts())

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"target": run.model, "temperature": run.temperature, "batch": run.batch} | row
            for run in self.runs
            for row in run._rows()
        ]

    def plot(self, path: str | None = None) -> Any:
        """Tokens a second and speed-up against texts at once, a line for each target as it was run,
        temperature and drafter: one matplotlib Figure, which a notebook shows and `path` (.svg or .png)
        keeps. Raises ValueError where it cannot be written."""
        lines: dict[tuple[str, float, str], list[tuple[int, DrafterResult]]] = {}
        for run in self.runs:
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
            ratios.set(title="Speed-up, 95 % over questions")
            ratios.set(xlabel="texts at once", ylabel="× plain decoding")
            for axes in (speeds, ratios):
                axes.xaxis.get_major_locator().set_params(integer=True)
            speeds.legend(frameon=False, fontsize="x-small")
        return speeds.figure

    def verdicts(self) -> list[Text]:
        """A sentence for each drafter."""
        outcomes: dict[str, list[bool | None]] = {}
        for row in (row for run in self.runs for row in run.results if row.drafter != "vanilla"):
            outcomes.setdefault(row.drafter, []).append(row.faster)
        return [
            Text(
                f"{name} is faster than plain decoding in {runs.count(True)} of {len(runs)} runs, "
                f"slower in {runs.count(False)}, undecided in {runs.count(None)}"
            )
            for name, runs in outcomes.items()
        ]


class Certified(Part):
    """One drafter at one temperature."""

    drafter: str
    temperature: float
    questions: int = 0  # answers
    tokens: int = 0
    identical: int = 0  # answers that are plain decoding's token for token
    unexplained: int = 0  # tokens that the promise does not allow
    largest_margin: float | str = 0.0  # in logits
    divergences: list[Difference] = []


class Drawn(Part):
    """The tokens that one drafter drew at one temperature, and their test.

    A distance is the total variation between the classes' frequencies and the uniform law. It is at most the
    mean total variation between the laws that drew and plain decoding's: what moves within a class, or evens
    out over contexts, is not seen.
    """

    drafter: str
    temperature: float
    law: str
    answers: int
    tokens: int
    classes: list[int]  # tokens in each, the likeliest first
    p_value: float
    significance: float  # the chance that exact draws fail: their p is less
    power: float
    detectable: float  # the least distance that is found with a chance of `power`
    powers: dict[str, float]  # the chance with which a distance is found, at least

    @property
    def kept(self) -> bool:
        """Whether the draws pass."""
        return self.p_value >= self.significance


class CertifySettings(Part):
    """What was asked: a run goes on only under the same settings."""

    drafters: list[str]
    temperatures: list[float]
    questions: list[str]
    fingerprint: str  # of the target as it answers, the prompts, the drafters' trees and weights
    draws: int  # answers of each distribution test


class Certificate(Report):
    """What `certify` found.

    Attributes:
        exactness: the promise that was checked. "bits": every token is plain decoding's; "audited": a
            near-tie within the margin may turn. Hugging Face's generate is always audited.
        margin: how close two scores of a near-tie are at most, in logits (`Target.margin`).
        certified: no token is unexplained, no distribution test failed, and the run was complete.
        settings: the arguments of the run. None in certificates of older versions.
        distribution: the tests at T > 0. Empty in certificates of older versions.
    """

    exactness: str = "audited"
    margin: float
    max_new_tokens: int
    seed: int
    certified: bool
    settings: CertifySettings | None = None
    results: list[Certified]
    distribution: list[Drawn] = []

    def __rich__(self) -> Group:
        """One line per drafter and temperature, and the verdict."""
        own, near = (promise(exactness, self.margin) for exactness in (self.exactness, "audited"))
        title = f"{self.model}; held to plain decoding {own}"
        title += f", {HF} {near}" if own != near and any(row.drafter == HF for row in self.results) else ""
        columns = ("T", "answers", "same", "tokens", "ties", "max margin", "unexplained")
        table = Figures(title, "drafter", *columns)
        for row in self.results:
            margin, wrong = row.largest_margin, row.unexplained
            counts = (row.questions, row.identical, row.tokens, len(row.divergences) - wrong)
            largest = f"{margin:.2g}" if isinstance(margin, float) else margin
            unexplained = Text(str(wrong), "bold red" if wrong else "green")
            table.add_row(row.drafter, f"{row.temperature:g}", *counts, largest, unexplained)
        tests = [_tests(self.distribution)] if self.distribution else []
        return Group(table, *tests, self._verdict())

    def _rows(self) -> list[dict[str, Any]]:
        return [flat(row) for row in self.results]

    def _verdict(self) -> Text:
        if self.stopped is not None:
            return Text(f"not certified: stopped early: {self.stopped}", "yellow")
        if self.certified:
            same = "every token is plain decoding's, near-ties within the margin aside"
            if self.exactness == "bits":
                same = "every answer is plain decoding's, token for token"
            return Text(f"certified: {same}", "bold green")
        wrong = "some tokens are not plain decoding's"
        if not any(row.unexplained for row in self.results):
            wrong = "draws do not follow plain decoding's law"
        return Text(f"NOT certified: {wrong}; please report this with the JSON", "bold red")


def _tests(distribution: list[Drawn]) -> Figures:
    title = f"draws against plain decoding's law, at the {distribution[0].significance:.1%} level"
    finds = f"finds with {distribution[0].power:.0%}"
    table = Figures(title, "drafter", "T", "law", "tokens", "p", finds)
    for row in distribution:
        p_value = Text(f"{row.p_value:.3f}", "green" if row.kept else "bold red")
        distance = f"distance {row.detectable:.3f}"
        table.add_row(row.drafter, f"{row.temperature:g}", row.law, row.tokens, p_value, distance)
    return table
