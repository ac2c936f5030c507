"""reproduce: the papers' tables and figures, measured on a target.

What tables share is measured once: along the target's recorded answers to a set of questions the acceptance
of every drafter, and in one race per set what takes time. Tables and relations follow from these cells.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.drafters.store import find_drafter, read_drafter
from slipstream.engine.replay import decoded, predict, record
from slipstream.files import check_counts, evenly, several
from slipstream.measure.bench import bench, steps
from slipstream.measure.confidence import by_question
from slipstream.measure.cost import mixtures, pass_seconds
from slipstream.measure.datasets import SHIPPED, Asking, Question, load_questions
from slipstream.measure.papers.entry import ARMS, BASELINES, ENTRIES, HF, VANILLA, Entry, known_name
from slipstream.measure.papers.measurements import CONFIDENCE, RACE, Cell, CellKey, Measurements
from slipstream.measure.papers.reproduce_report import QuestionSet, ReproduceReport, ReproduceSettings, Table
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
RACE_COLUMNS = ["tokens", "seconds", "plain tokens", "plain seconds", "hf tokens", "hf seconds", "rounds",
                "levels", "draft seconds", "plain rounds", "plain verify"]  # fmt: skip
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
    sets, heads = sets or {}, dict(heads or {})
    entries, questions = wanted(names, sets, heads, limit)
    target = loaded(target)
    if not mixtures(target):
        entries |= {
            name: replace(entry, lines=(), claims=()) for name, entry in entries.items() if entry.experts
        }
    for home in heads.values():
        read_drafter(find_drafter(home, target), target)  # before hours of measuring the others
    settings = ReproduceSettings(
        limit=limit,
        sets={
            name: QuestionSet(
                source=asked[0].file,
                categories={question.name: question.category for question in asked},
                fingerprint=fingerprint([question.turns for question in asked]),
            )
            for name, asked in questions.items()
        },
        heads=heads,
        fingerprint=target.stamp,
        marks={},
    )
    run = _Reproduction(target, entries, questions, settings, max_new_tokens, seed)
    if begun is not None:
        run.go_on(begun)
    run.plan(speed)
    announce(run.outlook, run.steps)
    with reported(keep, lambda reason: run.report().stopped_by(reason) if run.cells else None):
        for _ in run.measure(progress):
            keep(run.report(UNFINISHED))
    return run.report()


def wanted(
    names: Sequence[str], files: Mapping[str, Asking], heads: Mapping[str, str], limit: int | None
) -> tuple[dict[str, Entry], dict[str, list[Question]]]:
    """The entries of these names, default all, and the questions that they ask, by set; the first turn of
    each. Raises ValueError as `reproduce` does."""
    entries = {name: ENTRIES[name] for name in map(known_name, several(names or ENTRIES))}
    known = {figure.head for entry in ENTRIES.values() for figure in entry.figures} - {*BASELINES}
    if unknown := [name for name in heads if name not in known]:
        raise ValueError(f"Unknown head: {unknown[0]!r}. Heads: {', '.join(sorted(known))}")
    if unknown := [name for name in files if name not in OWN]:
        raise ValueError(f"Unknown set: {unknown[0]!r}. Sets: {', '.join(OWN)}")
    questions: dict[str, list[Question]] = {}
    for name in dict.fromkeys(cell.asked for cell in _cells(entries.values())):
        if name in files or name in SHIPPED:
            chosen = load_questions([files.get(name, name)], limit)
        else:
            chosen = evenly([q for q in load_questions() if q.category in OWN[name]], limit)
        questions[name] = [replace(question, turns=question.turns[:1]) for question in chosen]
    return entries, questions


def _cells(entries: Iterable[Entry]) -> list[CellKey]:
    """Those that entries need."""
    figures = [figure for entry in entries for figure in entry.figures]
    return list(dict.fromkeys(CellKey.of(figure, name) for figure in figures for name in figure.sets))


def listed(report: ReproduceReport | None = None) -> Figures:
    """All tables and figures: what each shows and costs, and what of it a run has found."""
    tables = {table.name: table for table in report.tables} if report else {}
    columns = ("shows", "predictions", "timed figures", *(["stored"] if report else []))
    figures = Figures(None, "name", *columns)
    for name, entry in ENTRIES.items():
        needed = _cells([entry])
        timed = sum(cell.how == RACE for cell in needed)
        row = [name, entry.shows, str(len(needed) - timed), str(timed)]
        if report:
            values = tables[name].values if name in tables else []
            known = sum(value.ours is not None for value in values)
            row.append(f"{known} of {len(values)} figures" if known else "")
        figures.add_row(*row)
    return figures


@dataclass
class _Reproduction:
    """A run under way: the cells that there are, and those that are still to be measured."""

    target: HFTarget
    entries: dict[str, Entry]
    questions: dict[str, list[Question]]
    settings: ReproduceSettings
    new_tokens: int
    seed: int
    cells: dict[CellKey, Cell] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)  # of an earlier run
    # What is to be measured together: cells of a set, temperature and batch, by whether they are raced.
    groups: dict[tuple[str, float, int, bool], list[CellKey]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # by drafter: what to do about it
    decodes: set[str] = field(default_factory=set)  # drafters that a record cannot judge
    steps: int = 0  # calls of `progress` that are to come
    estimate: float = 0.0  # seconds of what is wanted
    began: float = field(default_factory=perf_counter)

    def go_on(self, begun: ReproduceReport) -> None:
        """Take over the cells of an earlier run. Raises ValueError where it was another run."""
        now = heading(self.target) | {"max_new_tokens": self.new_tokens, "seed": self.seed}
        before = begun.settings
        sets, heads = before.sets | self.settings.sets, before.heads | self.settings.heads
        shared = {  # other sets and heads than before may come to them
            "sets": {name: sets[name] for name in before.sets},
            "heads": {name: heads[name] for name in before.heads},
            "marks": before.marks,
        }
        check_goes_on("run", begun, now, self.settings.model_copy(update=shared))
        self.cells, self.tables = {cell.key: cell for cell in begun.cells}, begun.tables
        every = {"sets": sets, "heads": heads, "marks": {**before.marks}}
        self.settings = self.settings.model_copy(update=every)

    def plan(self, speed: bool) -> None:
        """Find what is to be measured, what is not here, and how long it will take. Raises ValueError where
        an earlier run's cells are of other drafters."""
        needed = _cells(self.entries.values())
        for drafter in dict.fromkeys(cell.drafter for cell in needed):
            if drafter not in BASELINES:
                self._check(drafter)
        for cell in sorted(needed, key=lambda cell: cell.how == RACE):  # races come last
            raced = cell.how == RACE
            if cell.drafter not in self.missing and cell not in self.cells and (speed or not raced):
                key = cell.asked, cell.temperature, cell.batch, raced
                self.groups.setdefault(key, []).append(cell)
        passes = 0.0
        for (asked, _, batch, raced), group in self.groups.items():
            tokens = len(self.questions[asked]) * self.new_tokens
            if raced:
                racing = len(_drafters(group))
                self.steps += steps(self.questions[asked], racing, batch)
                passes += tokens * (THEIRS + OURS * (1 + racing))
            else:
                self.steps += 1 + len(group)
                held = sum(DECODED if cell.drafter in self.decodes else HELD for cell in group)
                passes += tokens * (RECORDED + held)
        self.estimate = passes * pass_seconds(self.target, (1,))[1] if passes else 0.0

    def _check(self, name: str) -> None:
        """Find out whether a drafter is here, and what it is. Raises ValueError as `plan` does."""
        try:
            drafter = self._load(name, 0.0)
        except ValueError as error:
            head = name.partition(":")[0]
            train = suggested(ARMS.get(head, f"train {head} --data answers.jsonl.gz --out runs/{head}"))
            reason = "" if head in ARMS and head not in self.settings.heads else f" ({error})"
            self.missing[name] = f"{head} is not here{reason}: {train}; then --head {head}=runs/{head}"
            return
        if drafter.probes is not None:
            self.decodes.add(name)
        mark = fingerprint(marks(drafter))
        if self.settings.marks.setdefault(name, mark) != mark:
            raise ValueError(f"this run cannot be gone on with: {name} has other trees or weights now")

    def _load(self, drafter: str, temperature: float, batch: int = 1) -> Drafter:
        head, colon, options = drafter.partition(":")
        home = self.settings.heads.get(head, head)
        return load_drafter(home + colon + options, self.target, temperature, batch)

    @property
    def outlook(self) -> str:
        """What will be done, for people."""
        counts = {False: 0, True: 0}
        for (*_, raced), group in self.groups.items():
            counts[raced] += len(group)
        minutes = f"about {self.estimate / 60:.1f} minutes"
        sizes = f"{self.settings.limit or 'all'} questions of each set, {self.new_tokens} tokens an answer"
        return f"{minutes}: {counts[False]} predictions and {counts[True]} timed figures; {sizes}"

    def measure(self, progress: Callable[[str], None]) -> Iterator[None]:
        """Measure what is wanted, step by step."""
        for (*_, raced), group in self.groups.items():
            yield from (self._race if raced else self._predict)(group, progress)

    def _predict(self, group: Sequence[CellKey], progress: Callable[[str], None]) -> Iterator[None]:
        """Hold the drafters against the target's recorded answers."""
        _, name, temperature, _, _ = group[0]
        progress(f"{name}, T = {temperature:g}: the target answers")
        drafters = {cell.drafter: self._load(cell.drafter, temperature) for cell in group}
        taps = tuple(dict.fromkeys(tap for drafter in drafters.values() for tap in drafter.taps))
        prompts = first_prompts(self.target, self.questions[name], self.new_tokens)
        recorded = record(self.target, prompts, self.new_tokens, taps, 20, temperature, self.seed)
        names = _names(self.questions[name], prompts, recorded)
        for cell in group:
            progress(f"{name}, T = {temperature:g}: {cell.how} of {cell.drafter}")
            counted = by_question if cell.how == CONFIDENCE else _predicted
            columns, rows = counted(drafters[cell.drafter], recorded)
            some = {q: row for q, row in zip(names, rows, strict=True) if cell.how == CONFIDENCE or any(row)}
            self.cells[cell] = Cell(**cell._asdict(), columns=columns, questions=some)
            yield

    def _race(self, group: Sequence[CellKey], progress: Callable[[str], None]) -> Iterator[None]:
        """A race of plain decoding, Hugging Face and the drafters."""
        _, name, temperature, batch, _ = group[0]
        drafters = {drafter: self._load(drafter, temperature, batch) for drafter in _drafters(group)}
        reports: list[BenchReport] = []
        bench(
            self.target,
            drafters,
            self.questions[name],
            max_new_tokens=self.new_tokens,
            temperature=temperature,
            batch=batch,
            seed=self.seed,
            progress=lambda step: progress(f"{name}, T = {temperature:g}, {batch} at once: {step}"),
            keep=reports.append,
        )
        for method in (*BASELINES, *drafters):
            rows = {turn.question: _timed(turn.given, method) for turn in reports[-1].turns}
            cell = group[0]._replace(drafter=method)
            self.cells[cell] = Cell(**cell._asdict(), columns=RACE_COLUMNS, questions=rows)
        yield

    def report(self, stopped: str | None = None) -> ReproduceReport:
        """What was found; with its tables, unless more is to come. Those of an earlier run stand first."""
        categories = {name: questions.categories for name, questions in self.settings.sets.items()}
        entries = {} if stopped else self.entries
        about = Measurements(self.cells, categories), self.new_tokens, self.missing
        tables = [Table.of(name, entry, *about) for name, entry in entries.items()]
        report = ReproduceReport(
            **heading(self.target),
            max_new_tokens=self.new_tokens,
            seed=self.seed,
            settings=self.settings,
            estimate_seconds=round(self.estimate, 1),
            seconds=round(perf_counter() - self.began, 1),
            cells=[*self.cells.values()],
            tables=[*(table for table in self.tables if table.name not in entries), *tables],
        )
        return report.stopped_by(stopped)


def _drafters(race: Sequence[CellKey]) -> list[str]:
    """Those of a race; the baselines always run."""
    return list(dict.fromkeys(cell.drafter for cell in race if cell.drafter not in BASELINES))


def _names(
    questions: Sequence[Question], prompts: Sequence[list[int]], recorded: RecordedTarget
) -> list[str]:
    """The questions' names in the order of the record, which leaves out answers of one token."""
    by_prompt: dict[tuple[int, ...], list[str]] = {}
    for question, prompt in zip(questions, prompts, strict=True):
        by_prompt.setdefault(tuple(prompt), []).append(question.name)
    rows = zip(recorded.tokens.tolist(), recorded.prompts.tolist(), strict=True)
    return [by_prompt[tuple(tokens[:length])].pop(0) for tokens, length in rows]


def _predicted(drafter: Drafter, recorded: RecordedTarget) -> tuple[list[str], list[list[float]]]:
    """Of each text tokens, rounds, and rounds that accepted d guesses or more: their names and values, zeros
    where it had no round."""
    temperature = recorded.sampling[0].temperature
    known = drafter.probes is None and not (temperature and drafter.law == "multi-round")
    prediction = (predict if known else decoded)(drafter, recorded)
    committed, depths = prediction.committed, range(1, prediction.depth + 1)
    counts = torch.stack([committed.sum(0), *((committed > depth).sum(0) for depth in (0, *depths))])
    return ["tokens", "rounds", *map(str, depths)], counts.double().T.tolist()


def _timed(by_method: Mapping[str, Counted], method: str) -> list[float]:
    """The columns `RACE_COLUMNS` of one answer."""
    ours, plain, hf = by_method[method], by_method[VANILLA], by_method[HF]
    rounds = [(drafted, times) for drafted, _, _, times in ours.rounds]
    sums = (
        *(figure for answer in (ours, plain, hf) for figure in (answer.new_tokens, answer.wall)),
        sum(times for _, times in rounds),
        sum(drafted * times for drafted, times in rounds),
        ours.seconds.draft,
        sum(times for *_, times in plain.rounds),
        plain.seconds.verify,
    )
    return [round(float(figure), 5) for figure in sums]
