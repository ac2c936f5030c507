"""reproduce: the papers' tables and figures, measured on a target.

What tables share is measured once: along the target's recorded answers to a set of questions the acceptance
of every drafter, and in one race per set what takes time. Tables and relations follow from these cells.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.store import find_drafter, read_drafter
from slipstream.engine.replay import decoded, predict, record
from slipstream.files import check_counts, evenly, several
from slipstream.measure.bench import bench, steps
from slipstream.measure.confidence import by_question
from slipstream.measure.cost import mixtures, pass_seconds
from slipstream.measure.datasets import SHIPPED, Asking, Question, load_questions
from slipstream.measure.papers import ARMS, ENTRIES, entry_of
from slipstream.measure.papers.entry import CONFIDENCE, HF, RACE, VANILLA, Entry
from slipstream.measure.papers.evidence import Cell, Evidence, Place, place
from slipstream.measure.papers.reproduce_report import Asked, ReproduceReport, Settings, Table
from slipstream.measure.results import BenchReport, Counted
from slipstream.measure.resume import UNFINISHED, check_goes_on, fingerprint, marks, reported
from slipstream.measure.runner import first_prompts
from slipstream.provenance import public, suggested
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget, RecordedTarget
from slipstream.targets.load import AnyTarget, loaded

OWN: dict[str, tuple[str, ...]] = {  # for a set that is not given: a shipped one, or these categories of ours
    **dict.fromkeys(SHIPPED, ()),
    "gsm8k": ("math",),
    "alpaca": ("chat", "editing", "extraction"),
    "cnn_dm": ("summarization",),
    "xsum": ("summarization",),
    "cip": ("two-turn", "chat"),
}
TIMED = ("tokens", "seconds", "plain tokens", "plain seconds", "hf tokens", "hf seconds", "rounds", "levels",
         "draft seconds", "plain rounds", "plain verify")  # fmt: skip
BASELINES = (VANILLA, HF)
# Passes of one row that a token costs, with SmolLM2 on two cores: in the record, by each drafter held against
# it, and in a timed answer, by method.
RECORDED, HELD, DECODED, OURS, THEIRS = 0.3, 0.25, 0.6, 1.0, 3.0


@public
def reproduce(
    target: AnyTarget,
    names: Sequence[str] = (),
    *,
    sets: Mapping[str, Asking] | None = None,
    heads: Mapping[str, str] | None = None,
    limit: int | None = 20,
    max_new_tokens: int = 64,
    speed: bool = True,
    seed: int = 0,
    begun: ReproduceReport | None = None,
    announce: Callable[[str, int], None] = lambda _, steps: None,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[ReproduceReport], None] = lambda _: None,
) -> ReproduceReport:
    """Measure the papers' tables and figures on a target, beside the papers' figures.

    Args:
        names: of the tables and figures, such as "eagle-table-1"; default: all.
        sets: files of questions by the name of a set: mt_bench, humaneval, gsm8k, alpaca, cnn_dm, xsum, cip.
            Of those not given the first two ship; for the others questions of the project's own stand in.
        heads: directories by the name of a head, for heads that do not ship for the target, and for the arms
            of the papers' ablations (`ARMS`).
        limit: questions of each set, whose first turns are asked; max_new_tokens, seed: see `bench`.
        speed: whether what takes time is measured, too. Otherwise these figures are left out.
        begun: a run of the same settings, whose cells are not measured again, and whose other tables stay.
        announce: told before the work how long it will take, and how often `progress` will be called.
        keep: called after each step with what was measured, and where an error or Ctrl-C ends the run, with
            its tables.

    Returns:
        A table for each name, whose relations hold, do not hold, or are undecided.

    Raises:
        ValueError: a table, a set or a head is unknown, a file cannot be read, or `begun` is another run.
    """
    check_counts(max_new_tokens=max_new_tokens)
    entries, asked = wanted(names, sets or {}, heads or {}, limit)
    target = loaded(target)
    if not mixtures(target):
        entries = [replace(entry, lines=(), claims=()) if entry.experts else entry for entry in entries]
    told = {name: _asked(some) for name, some in asked.items()}
    for home in (heads or {}).values():
        read_drafter(find_drafter(home, target), target)  # before hours of measuring the others
    own = target.stamp
    settings = Settings(limit=limit, sets=told, heads=dict(heads or {}), fingerprint=own, marks={})
    run = _Run(target, entries, asked, settings, max_new_tokens, seed)
    if begun is not None:
        run.go_on(begun)
    run.plan(speed)
    announce(run.told, run.steps)
    with reported(keep, lambda reason: run.report().stopped_by(reason) if run.cells else None):
        for _ in run.pieces(progress):
            keep(run.report(UNFINISHED))
    return run.report()


def wanted(
    names: Sequence[str], given: Mapping[str, Asking], heads: Mapping[str, str], limit: int | None
) -> tuple[list[Entry], dict[str, list[Question]]]:
    """The entries of these names, default all, and the questions that they ask, by set; the first turn of
    each. Raises ValueError as `reproduce` does."""
    entries = [entry_of(name) for name in dict.fromkeys(several(names or ENTRIES))]
    known = {figure.head for entry in ENTRIES.values() for figure in entry.figures} - {*BASELINES}
    if others := [name for name in heads if name not in known]:
        raise ValueError(f"Unknown head: {others[0]!r}. Heads: {', '.join(sorted(known))}")
    if unknown := [name for name in given if name not in OWN]:
        raise ValueError(f"Unknown set: {unknown[0]!r}. Sets: {', '.join(OWN)}")
    needed = dict.fromkeys(
        name.partition("/")[0] for entry in entries for figure in entry.figures for name in figure.sets
    )
    made = {}
    for name in needed:
        if name in given or name in SHIPPED:
            found = load_questions([given.get(name, name)], limit)
        else:
            found = evenly([q for q in load_questions() if q.category in OWN[name]], limit)
        made[name] = [replace(question, turns=question.turns[:1]) for question in found]
    return entries, made


def listed(found: ReproduceReport | None = None) -> Figures:
    """All tables and figures: what each shows and costs, and what of it a run has found."""
    tables = {table.name: table for table in found.tables} if found else {}
    columns = ("shows", "predictions", "timed figures", *(["stored"] if found else []))
    table = Figures(None, "name", *columns)
    for name, entry in ENTRIES.items():
        places = {place(figure, asked) for figure in entry.figures for asked in figure.sets}
        timed = sum(how == RACE for *_, how in places)
        cells = [name, entry.shows, str(len(places) - timed), str(timed)]
        if found:
            values = tables[name].values if name in tables else []
            known = sum(value.ours is not None for value in values)
            cells.append(f"{known} of {len(values)} figures" if known else "")
        table.add_row(*cells)
    return table


def _asked(questions: Sequence[Question]) -> Asked:
    own = {question.name: question.category for question in questions}
    texts = fingerprint([question.turns for question in questions])
    return Asked(source=questions[0].file, categories=own, fingerprint=texts)


@dataclass
class _Run:
    """A run under way: the cells that there are, and the places of those that are still to be measured."""

    target: HFTarget
    entries: list[Entry]
    asked: dict[str, list[Question]]
    settings: Settings
    new: int
    seed: int
    cells: dict[Place, Cell] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)  # of an earlier run
    wanted: list[Place] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # by drafter: what to do about it
    decodes: set[str] = field(default_factory=set)  # drafters that a record cannot judge
    estimate: float = 0.0
    began: float = field(default_factory=perf_counter)

    def go_on(self, begun: ReproduceReport) -> None:
        """Take over the cells of an earlier run. Raises ValueError where it was another run."""
        ours, before = heading(self.target) | {"max_new_tokens": self.new, "seed": self.seed}, begun.settings
        sets, heads = before.sets | self.settings.sets, before.heads | self.settings.heads
        shared = {  # other sets and heads than before may come to them
            "sets": {name: sets[name] for name in before.sets},
            "heads": {name: heads[name] for name in before.heads},
            "marks": before.marks,
        }
        check_goes_on("run", begun, ours, self.settings.model_copy(update=shared))
        self.cells, self.tables = {cell.place: cell for cell in begun.cells}, begun.tables
        whole = {"sets": sets, "heads": heads, "marks": {**before.marks}}
        self.settings = self.settings.model_copy(update=whole)

    def plan(self, speed: bool) -> None:
        """Find what is to be measured, what is not here, and how long it will take. Raises ValueError where
        an earlier run's cells are of other drafters."""
        figures = dict.fromkeys(figure for entry in self.entries for figure in entry.figures)
        for drafter, head in {figure.drafter: figure.head for figure in figures}.items():
            if head not in BASELINES:
                self._meet(drafter, head)
        for figure in figures:
            if figure.drafter not in self.missing and (speed or figure.how != RACE):
                self.wanted += [place(figure, name) for name in figure.sets]
        self.wanted = [each for each in dict.fromkeys(self.wanted) if each not in self.cells]
        self.estimate = self._estimated()

    def _meet(self, drafter: str, head: str) -> None:
        """Find out whether a drafter is here, and what it is. Raises ValueError as `plan` does."""
        try:
            made = self._load(drafter, 0.0)
        except ValueError as error:
            self.missing[drafter] = self._remedy(head, error)
            return
        if made.probes is not None:
            self.decodes.add(drafter)
        mark = fingerprint(marks(made))
        if self.settings.marks.setdefault(drafter, mark) != mark:
            raise ValueError(f"this run cannot be gone on with: {drafter} has other trees or weights now")

    def _remedy(self, head: str, error: ValueError) -> str:
        train = suggested(ARMS.get(head, f"train {head} --data answers.jsonl.gz --out runs/{head}"))
        reason = "" if head in ARMS and head not in self.settings.heads else f" ({error})"
        return f"{head} is not here{reason}: {train}; then --head {head}=runs/{head}"

    def _load(self, drafter: str, temperature: float, batch: int = 1) -> Drafter:
        head, colon, tail = drafter.partition(":")
        home = self.settings.heads.get(head, head)
        return load_drafter(home + colon + tail, self.target, temperature, batch)

    def _estimated(self) -> float:
        """Seconds of what is wanted, from a pass of one row."""
        one = pass_seconds(self.target, (1,))[1] if self.wanted else 0.0
        passes = 0.0
        for (name, _, _, raced), drafters in self._steps().items():
            tokens = len(self.asked[name]) * self.new
            if raced:
                passes += tokens * (THEIRS + OURS * (1 + len({each for each, _ in drafters} - {*BASELINES})))
            else:
                held = sum(DECODED if drafter in self.decodes else HELD for drafter, _ in drafters)
                passes += tokens * (RECORDED + held)
        return one * passes

    def _steps(self) -> dict[tuple[str, float, int, bool], list[tuple[str, str]]]:
        """Drafters that are still wanted, and how, by set, temperature, batch, and whether they race; races
        come last."""
        steps: dict[tuple[str, float, int, bool], list[tuple[str, str]]] = {}
        for drafter, name, temperature, batch, how in sorted(self.wanted, key=lambda each: each[4] == RACE):
            steps.setdefault((name, temperature, batch, how == RACE), []).append((drafter, how))
        return steps

    @property
    def steps(self) -> int:
        """Calls of `progress` that are to come."""
        count = 0
        for (name, _, batch, raced), drafters in self._steps().items():
            others = len({drafter for drafter, _ in drafters} - {*BASELINES})
            count += steps(self.asked[name], others, batch) if raced else 1 + len(drafters)
        return count

    @property
    def told(self) -> str:
        """What will be done, for people."""
        held = sum(how != RACE for *_, how in self.wanted)
        minutes = f"about {self.estimate / 60:.1f} minutes"
        sizes = f"{self.settings.limit or 'all'} questions of each set, {self.new} tokens an answer"
        return f"{minutes}: {held} predictions and {len(self.wanted) - held} timed figures; {sizes}"

    def pieces(self, progress: Callable[[str], None]) -> Iterator[None]:
        """Measure what is wanted, step by step."""
        for (name, temperature, batch, raced), drafters in self._steps().items():
            if raced:
                self._time(name, temperature, batch, [drafter for drafter, _ in drafters], progress)
                yield
                continue
            progress(f"{name}, T = {temperature:g}: the target answers")
            made = {drafter: self._load(drafter, temperature) for drafter, _ in drafters}
            taps = tuple(dict.fromkeys(tap for drafter in made.values() for tap in drafter.taps))
            prompts = first_prompts(self.target, self.asked[name], self.new)
            recorded = record(self.target, prompts, self.new, taps, 20, temperature, self.seed)
            names = _rows(self.asked[name], prompts, recorded)
            for drafter, how in drafters:
                progress(f"{name}, T = {temperature:g}: {how} of {drafter}")
                counted = _judged if how == CONFIDENCE else _predicted
                self._add(drafter, name, temperature, 1, how, *counted(made[drafter], recorded, names))
                yield

    def _add(self, drafter: str, *where: Any) -> None:
        asked, temperature, batch, how, columns, questions = where
        cell = Cell(
            drafter=drafter,
            asked=asked,
            temperature=temperature,
            batch=batch,
            how=how,
            columns=columns,
            questions=questions,
        )
        self.cells[cell.place] = cell

    def _time(
        self, name: str, temperature: float, batch: int, drafters: list[str], progress: Callable[[str], None]
    ) -> None:
        """A race of plain decoding, Hugging Face and the drafters."""
        made = {each: self._load(each, temperature, batch) for each in drafters if each not in BASELINES}
        reports: list[BenchReport] = []
        how: dict[str, Any] = {"max_new_tokens": self.new, "temperature": temperature, "batch": batch}
        how["seed"] = self.seed
        told = f"{name}, T = {temperature:g}, {batch} at once: "
        how |= {"progress": lambda step: progress(told + step), "keep": reports.append}
        bench(self.target, made, self.asked[name], **how)
        turns = reports[-1].turns  # of all questions
        for method in (*BASELINES, *made):
            rows = {turn.question: _timed(turn.given, method) for turn in turns}
            self._add(method, name, temperature, batch, RACE, [*TIMED], rows)

    def report(self, stopped: str | None = None) -> ReproduceReport:
        """What was found; with its tables, unless more is to come. Those of an earlier run stand first."""
        categories = {name: asked.categories for name, asked in self.settings.sets.items()}
        evidence, entries = Evidence(self.cells, categories), [] if stopped else self.entries
        tables = [Table.of(entry, evidence, self.new, self.missing) for entry in entries]
        found = {table.name for table in tables}
        made = ReproduceReport(
            **heading(self.target),
            max_new_tokens=self.new,
            seed=self.seed,
            settings=self.settings,
            estimate_seconds=round(self.estimate, 1),
            seconds=round(perf_counter() - self.began, 1),
            cells=[*self.cells.values()],
            tables=[*(table for table in self.tables if table.name not in found), *tables],
        )
        return made if stopped is None else made.stopped_by(stopped)


def _rows(asked: Sequence[Question], prompts: Sequence[list[int]], recorded: RecordedTarget) -> list[str]:
    """The questions' names in the order of the record, which leaves out answers of one token."""
    names: dict[tuple[int, ...], list[str]] = {}
    for question, prompt in zip(asked, prompts, strict=True):
        names.setdefault(tuple(prompt), []).append(question.name)
    lines = zip(recorded.tokens.tolist(), recorded.prompts.tolist(), strict=True)
    return [names[tuple(tokens[:length])].pop(0) for tokens, length in lines]


Counts = tuple[list[str], dict[str, list[float]]]  # columns, and of each question their values


def _judged(drafter: Drafter, recorded: RecordedTarget, names: Sequence[str]) -> Counts:
    """Guesses and their acceptance by confidence."""
    assert isinstance(drafter, Proposer)
    columns, rows = by_question(drafter, recorded)
    return columns, dict(zip(names, rows, strict=True))


def _predicted(drafter: Drafter, recorded: RecordedTarget, names: Sequence[str]) -> Counts:
    """Tokens, rounds, and rounds that accepted d guesses or more."""
    temperature = recorded.sampling[0].temperature
    known = drafter.probes is None and not (temperature and drafter.law == "multi-round")
    found = (predict if known else decoded)(drafter, recorded)
    depths = range(1, found.depth + 1)
    per = [found.committed.sum(0), *((found.committed > d).sum(0) for d in (0, *depths))]
    rows = torch.stack(per).double().T.tolist()
    columns = ["tokens", "rounds", *map(str, depths)]
    return columns, {name: row for name, row in zip(names, rows, strict=True) if row[1]}


def _timed(given: Mapping[str, Counted], method: str) -> list[float]:
    """The columns `TIMED` of one answer."""
    ours, plain, hf = given[method], given[VANILLA], given[HF]
    rounds = [(drafted, times) for drafted, _, _, times in ours.rounds]
    sums = (
        *(figure for each in (ours, plain, hf) for figure in (each.new_tokens, each.wall)),
        sum(times for _, times in rounds),
        sum(drafted * times for drafted, times in rounds),
        ours.seconds.draft,
        sum(times for *_, times in plain.rounds),
        plain.seconds.verify,
    )
    return [round(float(figure), 5) for figure in sums]
