"""bench: drafters beside both baselines, in alternation, on the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from slipstream.drafters.proposer import Proposer
from slipstream.engine.engine import Seconds
from slipstream.files import check_counts, note
from slipstream.measure.bench_report import (
    BenchReport,
    Counted,
    DrafterResult,
    HFResult,
    Settings,
    Speed,
    Speedup,
    Turn,
)
from slipstream.measure.bootstrap import Asked, paired, together
from slipstream.measure.metrics import TINY, Answered, Tally, expected, ledger
from slipstream.measure.questions import Question, Questions, batches, load_questions
from slipstream.measure.resume import UNFINISHED, check_goes_on, fingerprint, marks
from slipstream.measure.runner import BASELINES, HF, Contest, Drafters, first_prompts, prompt_of
from slipstream.provenance import public
from slipstream.results import heading
from slipstream.targets.load import AnyTarget, loaded


@public
def bench(
    target: AnyTarget,
    drafters: Drafters = "auto",
    questions: Questions = (),
    *,
    limit: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    batch: int = 1,
    seed: int = 0,
    begun: BenchReport | None = None,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[BenchReport], None] = lambda _: None,
) -> BenchReport:
    """Answer every turn of every question with plain decoding, Hugging Face generate and drafters, and
    compare. `sweep` does so for several targets, temperatures and batches.

    All methods answer a turn before the next turn is asked, in an order that rotates, so that a machine that
    slows down slows all of them. A later turn continues plain decoding's conversation, so that all methods
    read the same prompts. Answers that differ from plain decoding's are audited, which is not timed. Files
    take turns.

    Args:
        target: a target, or the name of one, which is loaded with `load_target`'s defaults.
        drafters: names or directories with options, as `load_drafter` takes them, or drafters by a name.
        questions: questions, files, or data sets (`hf:openai/gsm8k:test`); default: the project's own.
        limit: questions of each file, taken evenly over it.
        max_new_tokens: tokens per answer, at most.
        temperature, seed: see `Sampling`. Hugging Face's generate draws by torch's generator, with this seed.
        batch: questions of a file that are asked at once. They share time equally, and intervals draw them
            together. Figures of passes are one text's.
        begun: the report of a run that did not end, which is gone on with.
        progress: called with the name of each step.
        keep: called with a report over what all methods answered, whose `stopped` says why it is no whole
            one: after each group of questions, and where an error or Ctrl-C ends the run.

    Returns:
        Figures over all turns and by category, file and question.

    Raises:
        ValueError: a drafter, a file or a setting is unknown or out of range, a question leaves no room for
            an answer, or `begun` was begun under other settings, by another version or on another machine.
    """
    check_counts(batch=batch)
    asked = load_questions(questions, limit)
    target = loaded(target)
    contest = Contest.of(target, drafters, max_new_tokens, temperature, seed, batch)
    run = _Run(contest, batches(asked, batch), settings_of(contest, asked))
    if begun is not None:
        run.go_on(begun, progress)
        if begun.stopped is None:
            return begun
    progress("warming up")
    contest.warm_up(first_prompts(target, asked, max_new_tokens)[0])
    return run.through(progress, keep)


def steps(questions: Sequence[Question], drafters: int, batch: int = 1) -> int:
    """How often `bench` calls `progress`; `drafters`: beside plain decoding."""
    turns = sum(max(len(question.turns) for question in group) for group in batches(questions, batch))
    return 1 + turns * (2 + drafters)


def settings_of(contest: Contest, asked: Sequence[Question]) -> Settings:
    """What a call of `bench` asks."""
    return Settings(
        drafters=[*contest.drafters],
        questions=[question.name for question in asked],
        temperature=contest.temperature,
        batch=contest.batch,
        weights=contest.target.stamp,
        texts=fingerprint([question.turns for question in asked]),
        fingerprint=fingerprint([marks(drafter) for drafter in contest.drafters.values()]),
    )


@dataclass
class _Run:
    """A run under way: questions in groups that are asked at once, and the turns answered so far."""

    contest: Contest
    groups: list[list[Question]]
    settings: Settings
    turns: list[Turn] = field(default_factory=list)
    done: int = 0  # groups

    def go_on(self, begun: BenchReport, progress: Callable[[str], None]) -> None:
        """Take over the whole groups of an earlier run. Raises ValueError where it was another run."""
        check_goes_on("run", begun, _heading(self.contest), self.settings)
        forgetful = [name for name, drafter in self.contest.drafters.items() if drafter.remembers]
        if begun.stopped is not None and forgetful:
            note(f"the run begins anew: its file does not hold the answers that {forgetful[0]} remembers")
            return
        for number, group in enumerate(self.groups):
            found = [turn for turn in begun.turns if turn.group == number]
            if len(found) < sum(len(question.turns) for question in group):
                break
            self.turns += found
            self.done = number + 1
            for _ in range(max(len(question.turns) for question in group) * len(self.contest.methods)):
                progress("known from the unfinished run")

    def through(self, progress: Callable[[str], None], keep: Callable[[BenchReport], None]) -> BenchReport:
        """Ask what is left, group by group."""
        try:
            for number, group in enumerate(self.groups[self.done :], self.done):
                self._ask(number, group, progress)
                keep(self.report(UNFINISHED))
        except BaseException as error:
            if self.turns:
                keep(self.report(UNFINISHED).ended_by(error))
            raise
        return self.report(None)

    def _ask(self, number: int, group: list[Question], progress: Callable[[str], None]) -> None:
        """Ask all methods every turn of a group. A turn counts once all of them have answered it."""
        contest, text = self.contest, self.contest.target.text
        assert text is not None  # the first prompts were text
        talks: dict[str, list[dict[str, str]]] = {question.name: [] for question in group}
        for turn in range(max(len(question.turns) for question in group)):
            asked = [question for question in group if turn < len(question.turns)]
            prompts = []
            for question in asked:
                talks[question.name].append({"role": "user", "content": question.turns[turn]})
                told = talks[question.name] if text.has_chat else question.turns[turn]
                prompts.append(prompt_of(contest.target, question, turn, told, contest.max_new_tokens))
            for place, given in enumerate(self._answers(number, asked, prompts, turn, progress)):
                question = asked[place]
                counted = {name: answer.counted for name, answer in given.items()}
                self.turns.append(Turn(question=question.name, turn=turn, group=number, given=counted))
                said = text.decode(given["vanilla"].tokens)
                talks[question.name].append({"role": "assistant", "content": said})

    def _answers(
        self,
        number: int,
        asked: list[Question],
        prompts: list[list[int]],
        turn: int,
        progress: Callable[[str], None],
    ) -> list[dict[str, Answered]]:
        """Each question's answers, by method."""
        contest, methods = self.contest, self.contest.methods
        # Each is first as often, in first turns and in later ones, with the questions of every file.
        earlier = sum(group[0].file == asked[0].file for group in self.groups[:number])
        first = (earlier + turn) % len(methods)
        given: dict[str, list[Answered]] = {}
        for name in methods[first:] + methods[:first]:
            progress(f"{asked[0].name} {name}")
            given[name] = contest.ask_all(name, prompts)
        answers = []
        for place, (question, prompt) in enumerate(zip(asked, prompts, strict=True)):
            own = {name: given[name][place] for name in methods}
            for name in contest.drafters:
                if contest.keeps_text(name):
                    plain = own["vanilla"]
                    own[name] = contest.audited(name, own[name], plain, question, prompt, turn)
            answers.append(own)
        return answers

    def report(self, stopped: str | None) -> BenchReport:
        made = _report(self.contest, self.settings, self.turns, self.groups)
        return made if stopped is None else made.stopped_by(stopped, turns=[*self.turns])


Turns = list[tuple[Question, int, Counted]]  # of one method, with the number of the group


def _heading(contest: Contest) -> dict[str, Any]:
    return {
        **heading(contest.target),
        "exactness": contest.exactness,
        "margin": contest.target.margin,
        **contest.settings,
        "batch": contest.batch,
    }


def _report(
    contest: Contest, settings: Settings, turns: Sequence[Turn], groups: Sequence[list[Question]]
) -> BenchReport:
    questions = {question.name: question for group in groups for question in group}
    answers = {
        method: [(questions[turn.question], turn.group, turn.given[method]) for turn in turns]
        for method in contest.methods
    }
    hf = _all(answers[HF])
    asked = {name: _by_question(turns, contest.batch) for name, turns in answers.items()}
    return BenchReport(
        **_heading(contest),
        prompts=list(asked[HF]),
        settings=settings,
        hf_generate=HFResult(
            tokens_per_second=round(hf.tokens_per_second, 2),
            new_tokens=hf.new_tokens,
            memory_mib=hf.memory_mib,
            by_question=asked[HF],
        ),
        results=[_result(contest, name, answers, asked) for name in contest.drafters],
    )


def _result(
    contest: Contest, name: str, answers: dict[str, Turns], asked: dict[str, dict[str, Asked]]
) -> DrafterResult:
    drafter, methods = contest.drafters[name], [answers[method] for method in (name, *BASELINES)]
    tally, plain = _all(methods[0]), _all(methods[1])
    figures = _Speeds(methods, [asked[method] for method in (name, *BASELINES)])
    decoding = tally.seconds.total - tally.seconds.prefill
    return DrafterResult(
        drafter=name,
        **dict(figures.of(lambda _: True)),
        tree=drafter.tree_spec.name if isinstance(drafter, Proposer) else None,
        rows=drafter.rows,
        target_passes=len(tally.rounds),
        shared_rounds=None if tally.shared is None else round(tally.shared, 2),
        acceptance_by_depth=tally.acceptance(conditional=False),
        acceptance_by_depth_conditional=tally.acceptance(conditional=True),
        law=drafter.law,
        identical=all(answer.identical for answer in tally.answers) if contest.keeps_text(name) else None,
        unexplained=tally.unexplained,
        divergences=tally.differences,
        seconds=Seconds(**{part: round(seconds, 3) for part, seconds in vars(tally.seconds).items()}),
        host_share=round(tally.seconds.host / decoding, 4) if decoding else 0.0,
        memory_mib=tally.memory_mib,
        expected=expected(tally, plain),
        ledger=ledger(tally, plain),
        by_category=figures.by(attrgetter("category")),
        by_file=figures.by(attrgetter("file")),
        by_question=asked[name],
        of_files={baseline: paired(asked[name], asked[baseline]) for baseline in BASELINES},
    )


def _all(turns: Turns) -> Tally:
    return Tally(answer for *_, answer in turns)


def _by_question(turns: Turns, batch: int) -> dict[str, Asked]:
    """One method's answers, all turns of a question together."""
    answers: dict[str, list[Counted]] = {}
    for question, _, answer in turns:
        answers.setdefault(question.name, []).append(answer)
    made = {}
    for question, group, _ in turns:
        tally = Tally(answers[question.name])
        own: dict[str, Any] = {"new_tokens": tally.new_tokens, "seconds": round(tally.wall, 4)}
        if question.category != question.file:
            own["category"] = question.category
        if batch > 1:
            own["group"] = group
        made[question.name] = Asked(file=question.file, **own)
    return made


def _is(part: Callable[[Question], str], key: str, question: Question) -> bool:
    return part(question) == key


@dataclass(frozen=True)
class _Speeds:
    """Speeds over some of the questions. `methods`, `asked`: of a drafter and both baselines."""

    methods: list[Turns]
    asked: list[dict[str, Asked]]

    def by(self, part: Callable[[Question], str]) -> dict[str, Speed]:
        """By part of the questions."""
        parts = dict.fromkeys(part(question) for question, *_ in self.methods[0])
        return {key: self.of(partial(_is, part, key)) for key in parts}

    def of(self, chosen: Callable[[Question], bool]) -> Speed:
        """τ, speed, and ratios of tokens per second, so that answers of different length compare."""
        tally, *bases = (_all([turn for turn in turns if chosen(turn[0])]) for turns in self.methods)
        names = dict.fromkeys(question.name for question, *_ in self.methods[0] if chosen(question))
        ours, *theirs = ({name: asked[name] for name in names} for asked in self.asked)
        speed = tally.tokens_per_second
        over = (round(speed / max(base.tokens_per_second, TINY), 3) for base in bases)
        return Speed(
            questions=len(tally.answers),
            new_tokens=tally.new_tokens,
            tau=round(tally.tau, 4),
            tokens_per_second=round(speed, 2),
            speedup=Speedup(**dict(zip(BASELINES, over, strict=True))),
            intervals={name: together(ours, base) for name, base in zip(BASELINES, theirs, strict=True)},
        )
