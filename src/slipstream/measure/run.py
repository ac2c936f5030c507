"""bench: drafters beside both baselines, in alternation, on the same prompts."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from slipstream.command import public
from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.core.tree import PAD
from slipstream.decode.audit import Divergence, audit
from slipstream.decode.generate import Generation, generate, stream
from slipstream.decode.session import Seconds
from slipstream.decode.settings import Settings
from slipstream.drafters import load_drafter
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.vanilla import Vanilla
from slipstream.measure.baseline import hf_answer
from slipstream.measure.paired import Asked, paired
from slipstream.measure.questions import Asking, Question, alternated, load_questions
from slipstream.measure.report import BenchReport, Difference, DrafterResult, HFResult, Speed, Speedup
from slipstream.measure.tally import TINY, Answered, Tally, expected, ledger
from slipstream.results import heading
from slipstream.targets import HFTarget
from slipstream.targets.load import AnyTarget, loaded
from slipstream.targets.prompts import encode

HF = "hf_generate"
BASELINES = ("vanilla", HF)
Drafters = str | Sequence[str] | Mapping[str, Drafter]  # drafters to load, or drafters by a name


@dataclass(frozen=True)
class Contest:
    """Methods that answer the same prompts under the same settings: Hugging Face's generate, and drafters.

    Attributes:
        exactness: the target's, which it finds out before anything is timed.
    """

    target: HFTarget
    drafters: dict[str, Drafter]
    exactness: str
    max_new_tokens: int
    temperature: float
    seed: int

    @classmethod
    def of(
        cls, target: HFTarget, drafters: Drafters, max_new_tokens: int, temperature: float, seed: int
    ) -> "Contest":
        """Both baselines and the drafters. Raises ValueError for a name that is not known."""
        contestants = {"vanilla": Vanilla(), **drafters_of(drafters, target, temperature)}
        return cls(target, contestants, target.exactness, max_new_tokens, temperature, seed)

    @property
    def methods(self) -> list[str]:
        return [HF, *self.drafters]

    @property
    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed, "max_new_tokens": self.max_new_tokens}

    def warm_up(self, prompt: list[int]) -> None:
        """Ask each method once, untimed: first calls allocate and choose kernels. Raises ValueError for
        settings out of range."""
        Settings.of(self.target, self.max_new_tokens).limit(prompt)
        short = replace(self, max_new_tokens=4)
        for method in self.methods:
            short.ask(method, prompt)

    def ask(
        self, method: str, prompt: list[int], show: Callable[[list[str]], None] | None = None
    ) -> Answered:
        """One answer, timed with its prompt's pass. `show` is called after each round, with the text of each
        of its tokens."""
        began = time.perf_counter()
        if method == HF:
            tokens = hf_answer(self.target, prompt, **self.settings)
            return Answered(tokens, time.perf_counter() - began)
        drafter = self.drafters[method]
        if show is None:
            done: Generation = generate(self.target, prompt, drafter, **self.settings)
        else:
            pieces = stream(self.target, prompt, drafter, **self.settings)
            for texts in pieces.rounds:
                show(texts)
            assert pieces.generation is not None
            done = pieces.generation
        return Answered(done.tokens, time.perf_counter() - began, done.rounds, done.seconds, done.sampling)

    def promises_bits(self, method: str) -> bool:
        """Whether every token must be plain decoding's. Hugging Face's generate has attention and products of
        its own, which round otherwise, and so do trees where the target is only audited: there a near-tie
        within the precision's margin may turn."""
        return self.exactness == "bits" and method != HF

    def audited(
        self,
        method: str,
        answer: Answered,
        plain: Answered,
        question: Question,
        prompt: list[int],
        turn: int = 0,
    ) -> Answered:
        """The answer with what the audit found, where it is not plain decoding's."""
        if answer.tokens == plain.tokens:
            return answer
        found = audit(self.target, prompt, answer.tokens, plain.sampling) or [_parting(answer, plain)]
        strict, margin = self.promises_bits(method), self.target.margin
        return replace(
            answer,
            identical=False,
            differences=[Difference(question=question.name, turn=turn, **vars(each)) for each in found],
            unexplained=sum(strict or each.margin > margin for each in found),
        )


def _parting(answer: Answered, plain: Answered) -> Divergence:
    """Where an answer leaves plain decoding's, though each of its tokens is what the audit chooses, too. No
    rounding makes it end elsewhere."""
    pairs = enumerate(zip_longest(answer.tokens, plain.tokens, fillvalue=PAD))
    at, (token, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return Divergence(at, token, other, math.inf if PAD in (token, other) else 0.0)


Turns = list[tuple[Question, Answered]]
Answers = dict[str, Turns]  # by method


@public
def bench(
    target: AnyTarget,
    drafters: Drafters = "auto",
    questions: Sequence[Asking] = (),
    *,
    limit: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[BenchReport], None] = lambda _: None,
) -> BenchReport:
    """Answer every turn of every question with plain decoding, Hugging Face generate and drafters, and
    compare.

    All methods answer a turn before the next turn is asked, in an order that rotates, so that a machine that
    slows down slows all of them. A later turn continues plain decoding's conversation, so that all methods
    read the same prompts. Answers that differ from plain decoding's are audited, which is not timed. Files
    take turns.

    Args:
        target: a target, or the name of one, which is loaded with `load_target`'s defaults.
        drafters: names or directories with options, as `load_drafter` takes them, or drafters by a name.
        questions: questions, or files of them; default: the project's own.
        limit: questions of each file, taken evenly over it.
        max_new_tokens: tokens per answer, at most.
        progress: called with the name of each step.
        keep: called where an error or Ctrl-C ends the run, with a report over the turns that all methods
            answered. Its `stopped` names the error.

    Returns:
        Figures over all turns and by category, file and question.

    Raises:
        ValueError: a drafter, a file or a setting is unknown or out of range, or a question leaves no room
            for an answer.
    """
    asked = load_questions(questions, limit)
    target = loaded(target)
    contest = Contest.of(target, drafters, max_new_tokens, temperature, seed)
    progress("warming up")
    contest.warm_up(first_prompts(target, asked, max_new_tokens)[0])
    answers: Answers = {name: [] for name in contest.methods}
    try:
        for question in alternated(asked):
            _ask(contest, question, answers, progress)
    except BaseException as error:
        if answers[HF]:
            keep(_report(contest, answers).ended_by(error))
        raise
    return _report(contest, answers)


def _ask(contest: Contest, question: Question, answers: Answers, progress: Callable[[str], None]) -> None:
    """Ask all methods every turn of a question. A turn counts once all of them have answered it."""
    methods, text = contest.methods, contest.target.text
    assert text is not None  # the first prompts were text
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(question.turns):
        messages.append({"role": "user", "content": turn})
        prompt = encode(contest.target, messages if text.has_chat else turn)
        given: dict[str, Answered] = {}
        first = len(answers[HF]) % len(methods)
        for name in methods[first:] + methods[:first]:
            progress(f"{question.name} {name}")
            given[name] = contest.ask(name, prompt)
        plain = given["vanilla"]
        for name, drafter in contest.drafters.items():
            if drafter.law == "coupled":
                given[name] = contest.audited(name, given[name], plain, question, prompt, number)
        for name in methods:
            answers[name].append((question, given[name]))
        messages.append({"role": "assistant", "content": text.decode(plain.tokens)})


def drafters_of(given: Drafters, target: HFTarget, temperature: float = 0.0) -> dict[str, Drafter]:
    """Drafters by name, loaded where they are only named. Raises ValueError for an unknown one."""
    if isinstance(given, Mapping):
        return dict(given)
    names = dict.fromkeys([given] if isinstance(given, str) else given)
    return {name: load_drafter(name, target, temperature) for name in names}


def first_prompts(target: Target, questions: Sequence[Question], max_new_tokens: int = 1) -> list[list[int]]:
    """The first turn of every question, as tokens. Raises ValueError, by name, for one that leaves no room
    for an answer."""
    if not questions:
        raise ValueError("no questions: give one at least")
    prompts = []
    for question in questions:
        try:
            prompts.append(encode(target, question.turns[0]))
            Settings.of(target, max_new_tokens).limit(prompts[-1])
        except ValueError as error:
            raise ValueError(f"question {question.name}: {error}") from error
    return prompts


def _report(contest: Contest, answers: Answers) -> BenchReport:
    hf = _all(answers[HF])
    speed = round(hf.tokens_per_second, 2)
    asked = {name: _by_question(turns) for name, turns in answers.items()}
    return BenchReport(
        **heading(contest.target),
        exactness=contest.exactness,
        margin=contest.target.margin,
        **contest.settings,
        prompts=list(asked[HF]),
        hf_generate=HFResult(tokens_per_second=speed, new_tokens=hf.new_tokens, by_question=asked[HF]),
        results=[_result(contest, name, answers, asked) for name in contest.drafters],
    )


def _result(
    contest: Contest, name: str, answers: Answers, asked: dict[str, dict[str, Asked]]
) -> DrafterResult:
    drafter, methods = contest.drafters[name], [answers[method] for method in (name, *BASELINES)]
    tally, plain, hf = map(_all, methods)
    decoding = tally.seconds.total - tally.seconds.prefill
    return DrafterResult(
        drafter=name,
        **dict(_speed(tally, plain, hf)),
        tree=drafter.shape.name if isinstance(drafter, Proposer) else None,
        rows=drafter.rows,
        target_passes=len(tally.rounds),
        acceptance_by_depth=tally.acceptance(conditional=False),
        acceptance_by_depth_conditional=tally.acceptance(conditional=True),
        law=drafter.law,
        identical=all(answer.identical for answer in tally.answers) if drafter.law == "coupled" else None,
        unexplained=tally.unexplained,
        divergences=tally.differences,
        seconds=Seconds(**{part: round(seconds, 3) for part, seconds in vars(tally.seconds).items()}),
        host_share=round(tally.seconds.host / decoding, 4) if decoding else 0.0,
        expected=expected(tally, plain),
        ledger=ledger(tally, plain),
        by_category=_speeds(methods, attrgetter("category")),
        by_file=_speeds(methods, attrgetter("file")),
        by_question=asked[name],
        of_files={baseline: paired(asked[name], asked[baseline]) for baseline in BASELINES},
    )


def _all(turns: Turns) -> Tally:
    return Tally(answer for _, answer in turns)


def _by_part(turns: Turns, part: Callable[[Question], str]) -> dict[str, Tally]:
    answers: dict[str, list[Answered]] = {}
    for question, answer in turns:
        answers.setdefault(part(question), []).append(answer)
    return {key: Tally(some) for key, some in answers.items()}


def _by_question(turns: Turns) -> dict[str, Asked]:
    files = {question.name: question.file for question, _ in turns}
    return {
        name: Asked(file=files[name], new_tokens=tally.new_tokens, seconds=round(tally.wall, 4))
        for name, tally in _by_part(turns, attrgetter("name")).items()
    }


def _speeds(methods: Sequence[Turns], part: Callable[[Question], str]) -> dict[str, Speed]:
    """By part of the questions. The methods are a drafter and both baselines."""
    ours, plain, hf = (_by_part(turns, part) for turns in methods)
    return {key: _speed(tally, plain[key], hf[key]) for key, tally in ours.items()}


def _speed(tally: Tally, plain: Tally, hf: Tally) -> Speed:
    """τ, speed, and ratios of tokens per second, so that answers of different length compare."""
    speed = tally.tokens_per_second
    over = (round(speed / max(base.tokens_per_second, TINY), 3) for base in (plain, hf))
    return Speed(
        questions=len(tally.answers),
        new_tokens=tally.new_tokens,
        tau=round(tally.tau, 4),
        tokens_per_second=round(speed, 2),
        speedup=Speedup(**dict(zip(BASELINES, over, strict=True))),
    )
