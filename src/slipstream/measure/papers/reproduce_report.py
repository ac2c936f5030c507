"""What `reproduce` returns, and its tables."""

from collections import Counter
from typing import Any

from rich.console import Group
from rich.text import Text

from slipstream.measure.bootstrap import Interval
from slipstream.measure.papers.entry import Entry
from slipstream.measure.papers.measurements import ABSENT, FAILS, HOLDS, OPEN, Cell, Measurements
from slipstream.results import Figures, Part, Report, flat

QUESTIONS, TOKENS = 20, 64  # of fewer a table says little, and is marked
STYLES = {HOLDS: "green", FAILS: "bold red", OPEN: "yellow", ABSENT: "yellow"}


class QuestionSet(Part):
    """A set of questions."""

    source: str
    categories: dict[str, str]  # of those that were asked, by name
    fingerprint: str  # of their texts


class ReproduceSettings(Part):
    """What was asked: a run goes on only under the same settings."""

    limit: int | None
    sets: dict[str, QuestionSet]
    heads: dict[str, str]
    fingerprint: str  # of the target and its generation_config
    marks: dict[str, str] = {}  # by drafter: a fingerprint of its trees and weights


class Value(Part):
    """A cell of a table: ours, its interval over questions, and the paper's figure."""

    row: str
    column: str
    ours: float | None
    interval: Interval | None
    paper: float | None

    def __str__(self) -> str:
        ours = "–" if self.ours is None else f"{self.ours:.2f}"
        interval = " [{:.2f}, {:.2f}]".format(*self.interval) if self.interval else ""
        return ours + interval + (f" ({self.paper:g})" if self.paper is not None else "")


class Relation(Part):
    """A relation of the paper's, and whether it holds here."""

    claim: str
    verdict: str  # a key of `STYLES`
    difference: float | None  # what decides
    interval: Interval | None  # over questions

    @property
    def text(self) -> str:
        """What was claimed, and what decides."""
        interval = " [{:+.2f}, {:+.2f}]".format(*self.interval) if self.interval else ""
        return self.claim + ("" if self.difference is None else f" (by {self.difference:+.2f}{interval})")


class Table(Part):
    """A table or a figure of a paper."""

    name: str
    shows: str
    model: str  # whose figures are the paper's
    smoke: bool  # fewer than 20 questions a set, or 64 tokens an answer
    values: list[Value]
    relations: list[Relation]
    missing: list[str]  # heads that are not here, and how to train them
    note: str

    @classmethod
    def of(cls, name: str, entry: Entry, cells: Measurements, new: int, missing: dict[str, str]) -> "Table":
        """An entry's table. `new`: tokens of each answer; `missing`: by drafter, what to do about it."""
        values, relations = [], []
        for line in entry.lines:
            ours, interval = cells.value(line.figure)
            row, column, paper = line.row, line.column, line.paper
            values.append(Value(row=row, column=column, ours=ours, interval=interval, paper=paper))
        for claim in entry.claims:
            verdict, by, interval = cells.verdict(claim)
            relations.append(Relation(claim=claim.text, verdict=verdict, difference=by, interval=interval))
        counts = [count for figure in entry.figures if (count := cells.questions(figure))]
        absent = [missing[figure.drafter] for figure in entry.figures if figure.drafter in missing]
        return cls(
            name=name,
            shows=entry.shows,
            model=entry.model,
            smoke=new < TOKENS or min(counts, default=QUESTIONS) < QUESTIONS,
            values=values,
            relations=relations,
            missing=list(dict.fromkeys(absent)),
            note=entry.note,
        )

    def __rich__(self) -> Group:
        smoke = "; SMOKE: too few questions or tokens to say much" if self.smoke else ""
        title = f"{self.name}: {self.shows}; in parentheses the paper's, {self.model}{smoke}"
        columns = list(dict.fromkeys(value.column for value in self.values))
        parts: list[Figures | Text] = [Text(title, "bold")]
        if columns:
            table = Figures(None, "", *columns)
            for row in dict.fromkeys(value.row for value in self.values):
                cells = {value.column: str(value) for value in self.values if value.row == row}
                table.add_row(row, *(cells.get(column, "") for column in columns))
            parts.append(table)
        for relation in self.relations:
            style = STYLES.get(relation.verdict, "")
            parts.append(Text.assemble((relation.verdict, style), f": {relation.text}"))
        parts += [Text(line, "dim") for line in (*self.missing, self.note) if line]
        return Group(*parts, Text(""))


class ReproduceReport(Report):
    """What `reproduce` found.

    Attributes:
        settings: what was asked.
        estimate_seconds, seconds: the time that was told before the work, and the time of it, in this call.
        cells: what was measured; a run goes on from them.
        tables: what follows.
    """

    max_new_tokens: int
    seed: int
    settings: ReproduceSettings
    estimate_seconds: float
    seconds: float
    cells: list[Cell]
    tables: list[Table]

    def __rich__(self) -> Group:
        """Every table, and how many relations hold."""
        sizes = [len(questions.categories) for questions in self.settings.sets.values()]
        counts = " to ".join(map(str, sorted({min(sizes), max(sizes)}))) if sizes else "no"
        title = f"{self.model}, {self.hardware['cpu']}: "
        title += f"{counts} questions of each set, {self.max_new_tokens} tokens"
        sources = ", ".join(f"{name} is {questions.source}" for name, questions in self.settings.sets.items())
        verdicts = Counter(relation.verdict for table in self.tables for relation in table.relations)
        relations = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in STYLES)
        return Group(
            Text(title, "bold"), Text(sources, "dim"), *self.tables, Text(f"relations: {relations}", "bold")
        )

    def _rows(self) -> list[dict[str, Any]]:
        return [{"table": table.name} | flat(value) for table in self.tables for value in table.values]
