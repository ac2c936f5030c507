"""What `bench` returns, and its tables."""

import math
import os
import shlex
from typing import Any

from rich.console import Group
from rich.text import Text

from slipstream.engine.engine import Seconds
from slipstream.measure.bootstrap import Asked, Interval, Paired
from slipstream.methods import METHODS
from slipstream.provenance import commanded, suggested
from slipstream.results import Figures, Margin, Part, Report, flat

WIDE = 12  # letters of a name that fits over a column
PARTS = ("draft", "verify", "host")  # of a round
FACTORS = {"tau": "τ", "rows": "rows", "draft": "draft", "host": "host", "prompt": "prompt"}


def promise(exactness: str, margin: float) -> str:
    """What answers are held to, for people."""
    return "token for token" if exactness == "bits" else f"up to near-ties within {margin:g} logits"


class Speedup(Part):
    """Tokens per second over each baseline's."""

    vanilla: float
    hf_generate: float


class Speed(Part):
    """τ and tokens per second over some of the turns.

    Attributes:
        questions: turns.
        intervals: of the speed-up over each baseline; None where a file has one question only.
    """

    questions: int
    new_tokens: int
    tau: float
    tokens_per_second: float
    speedup: Speedup
    intervals: dict[str, Interval | None] = {}

    def over(self, baseline: str) -> str:
        """The speed-up over a baseline, for people."""
        interval = self.intervals.get(baseline)
        sure = " [{:.2f}, {:.2f}]".format(*interval) if interval else ""
        return f"{getattr(self.speedup, baseline):.2f}{sure}"


class Difference(Part):
    """A token that is not plain decoding's: `decode.audit.Divergence`, with where it was found. Where one of
    the answers has ended, its token is −1 and the margin infinite, which is null in JSON."""

    question: str
    turn: int = 0  # of the question, counted from 0; `certify` asks the first one only
    position: int
    token: int
    plain: int
    margin: Margin


class Counted(Part):
    """What figures are made of, of one answer.

    Attributes:
        wall: seconds, the prompt's pass included.
        rounds: depth drafted, tokens accepted, tokens kept, and the number of rounds that were so.
    """

    new_tokens: int
    wall: float
    rounds: list[tuple[int, int, int, int]] = []
    seconds: Seconds = Seconds()
    identical: bool = True
    differences: list[Difference] = []
    unexplained: int = 0
    memory_mib: float | None = None
    shared: float | None = None  # its share of the rounds of its batch; None: they were its own


class Turn(Part):
    """One turn of a question as all methods answered it, which a run that goes on needs.

    Attributes:
        question: its name.
        group: turns of one number were asked at once.
        given: by method.
    """

    question: str
    turn: int
    group: int
    given: dict[str, Counted]


class Settings(Part):
    """What was asked: a run goes on only under the same settings.

    Attributes:
        weights: a hash of the target's, and of its generation_config.
        texts: a hash of the questions.
        fingerprint: a hash of the drafters' trees and weights.
    """

    drafters: list[str]
    questions: list[str]
    temperature: float
    batch: int
    weights: str = ""  # older results have both in the fingerprint
    texts: str = ""
    fingerprint: str


class Expected(Part):
    """The speed-up that a draft's quality and cost promise if rows cost nothing.

    `alpha` is the share of judged tokens that is accepted. For a chain it estimates E[Σ min(p, q)], for a
    tree the chance that some child is accepted.
    """

    alpha: float
    c: float  # seconds of drafting one level of depth over those of a plain pass
    speedup: float  # the promise


class TreeStatistics(Part):
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
    ledger: TreeStatistics | None = None
    by_category: dict[str, Speed]
    by_file: dict[str, Speed] = {}
    by_question: dict[str, Asked] = {}
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
    def sameness(self) -> Text:
        """Whether every answer is plain decoding's, for people."""
        if self.unexplained:
            return Text(f"NO: {self.unexplained} unexplained", "bold red")
        if self.identical is None:
            return Text("in law", "cyan")
        return Text("yes", "green") if self.identical else Text(f"{len(self.divergences)} ties", "yellow")


class HFResult(Part):
    """Hugging Face generate's figures."""

    tokens_per_second: float
    new_tokens: int
    memory_mib: float | None = None
    by_question: dict[str, Asked] = {}


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
    settings: Settings | None = None
    hf_generate: HFResult
    results: list[DrafterResult]
    turns: list[Turn] = []

    def __rich__(self) -> Group:
        """One line per drafter, one per category and drafter, and where the time went."""
        title = f"{self.model}, T = {self.temperature:g}, {self.hardware['cpu']}"
        title += f", {self.batch} texts at once" if self.batch > 1 else ""
        title += f"; held to plain decoding {promise(self.exactness, self.margin)}"
        main = Figures(title, "drafter", "τ", "tok/s", "× plain", "× HF", "draft", "verify", "host", "same")
        for row in self.results:
            speed, ratios = f"{row.tokens_per_second:.1f}", (row.over("vanilla"), row.over("hf_generate"))
            parts = (row.seconds.draft, row.seconds.verify, row.seconds.host)
            shares = (f"{part / max(sum(parts), 1e-9):.1%}" for part in parts)
            main.add_row(row.drafter, f"{row.tau:.2f}", speed, *ratios, *shares, row.sameness)
        hf = f"{self.hf_generate.tokens_per_second:.1f}"
        main.add_row("HF generate", "1.00", hf, "", "1.00", "", "", "", "", style="dim")
        return Group(main, _by_part(self.results), *_notes(self.results), *self.verdicts())

    def _rows(self) -> list[dict[str, Any]]:
        return [flat(row) for row in self.results]

    def plot(self, path: str | None = None) -> Any:
        """Speed-up by task, acceptance by depth, accepted lengths and the time split of a round, as one
        matplotlib Figure, which a notebook shows and `path` (.svg or .png) keeps."""
        from slipstream.measure.report.pictures import draw_run

        return draw_run(self, path)

    def verdicts(self) -> list[Text]:
        """A sentence for each drafter: whether it is faster than plain decoding here, and what to try."""
        told = []
        for row in self.results:
            of, tip = f"{row.over('vanilla')} times plain decoding", ""
            if row.faster is None:
                what, style = "undecided", "yellow"
                tip = ": the interval holds 1" if row.intervals.get("vanilla") else ": that is one question"
                tip += ", ask more of them (--limit, --questions)"
            else:
                what, style = ("faster", "green") if row.faster else ("slower here", "yellow")
            if row.faster is False:
                with commanded(self.command):
                    tip = f": try {_remedy(row.drafter)}"
            if row.drafter != "vanilla":
                told.append(Text(f"{row.drafter} is {what}, {of}{tip}", style))
        return told


def _remedy(drafter: str) -> str:
    """What may make a drafter quicker."""
    name = drafter.partition(":")[0]
    if METHODS[name].tunes if name in METHODS else os.path.isdir(os.path.expanduser(name)):
        return suggested(f"tune --drafter {shlex.quote(drafter)}")
    return "--drafter auto, which guesses where it pays"


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
    depths, ledgers = [], []
    for row in results:
        if rates := row.acceptance_by_depth:
            by_depth = " ".join(f"{rate:.2f}" for rate in rates)
            given = " ".join(f"{rate:.2f}" for rate in row.acceptance_by_depth_conditional)
            depths.append(f"{row.drafter}: accepted by depth {by_depth}; where drafted that far {given}")
        if rates and (of := row.expected):
            promise = f"{of.speedup:.2f} × expected if rows cost nothing"
            depths.append(f"{row.drafter}: α {of.alpha:.2f}, c {of.c:.3f}: {promise}")
        if row.drafter != "vanilla" and (made := row.ledger):
            factors = " × ".join(f"{name} {getattr(made, key):.2f}" for key, name in FACTORS.items())
            measured = f"measured {made.measured:.2f}, {made.remainder:+.1%} unexplained"
            ledgers.append(f"{row.drafter}: {factors} = {made.predicted:.2f}; {measured}")
    return [Text(line) for line in depths + ledgers]
