"""bench: drafters beside both baselines, in alternation, on the same prompts."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.command import public
from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.decode.audit import audit
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
from slipstream.measure.tally import Answered, Tally, expected, ledger
from slipstream.results import heading
from slipstream.targets import HFTarget
from slipstream.targets.load import AnyTarget, loaded
from slipstream.targets.prompts import encode

HF = "hf_generate"
BASELINES = ("vanilla", HF)


@dataclass(frozen=True)
class Contest:
    """Methods that answer the same prompts under the same settings: Hugging Face, plain decoding, and the
    drafters."""

    target: HFTarget
    drafters: dict[str, Drafter]
    max_new_tokens: int
    temperature: float
    seed: int

    @classmethod
    def of(
        cls,
        target: HFTarget,
        drafters: str | Sequence[str] | Mapping[str, Drafter],
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> "Contest":
        """Both baselines and the drafters. Raises ValueError for a name that is not known."""
        named = {"vanilla": Vanilla(), **drafters_of(drafters, target, temperature)}
        return cls(target, named, max_new_tokens, temperature, seed)

    @property
    def methods(self) -> list[str]:
        return [HF, *self.drafters]

    def warm_up(self, prompt: list[int]) -> None:
        """First calls allocate and choose kernels; they are not timed. Raises ValueError for settings out of
        range."""
        Settings.of(self.target, self.max_new_tokens).limit(prompt)
        short = replace(self, max_new_tokens=4)
        for method in self.methods:
            short.ask(method, prompt)

    def ask(
        self, method: str, prompt: list[int], show: Callable[[list[str]], None] | None = None
    ) -> Answered:
        """One answer, timed from the prompt's first token to the answer's last; `show` is called after each
        round, with the text that each of its tokens brought."""
        settings: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        began = time.perf_counter()
        if method == HF:
            tokens = hf_answer(self.target, prompt, **settings)
            return Answered(tokens, time.perf_counter() - began)
        if show is None:
            done: Generation = generate(self.target, prompt, self.drafters[method], **settings)
        else:
            pieces = stream(self.target, prompt, self.drafters[method], **settings)
            for texts in pieces.rounds:
                show(texts)
            assert pieces.generation is not None
            done = pieces.generation
        return Answered(done.tokens, time.perf_counter() - began, done.rounds, done.seconds, done.sampling)


Place = tuple[str, str, str]  # a question's file, category and name
Tallies = dict[str, dict[Place, Tally]]  # by method and question


@public
def bench(
    target: AnyTarget,
    drafters: str | Sequence[str] | Mapping[str, Drafter] = "ngram",
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

    Each turn is asked of all methods in turn, in an order that rotates, so that a machine that slows down
    slows all of them. A later turn continues plain decoding's conversation, so all methods read the same
    prompts. Answers that differ from plain decoding's are audited after the clock has stopped. Files take
    turns.

    Args:
        target: a target, or the name of one, which is loaded with `load_target`'s defaults.
        drafters: names or directories with options, as `load_drafter` takes them, or drafters by a name.
        questions: questions, or files of them; default: the project's own.
        limit: questions of each file, taken evenly over it.
        max_new_tokens: tokens per answer, at most.
        progress: told what is under way.
        keep: given the figures of the turns that all methods answered where an error or Ctrl-C ends the run;
            `stopped` then names the error.

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
    tallies: Tallies = {name: {} for name in contest.methods}
    try:
        for question in alternated(asked):
            _ask(contest, question, tallies, progress)
    except BaseException as error:
        if tallies[HF]:
            keep(_report(contest, tallies).ended_by(error))
        raise
    return _report(contest, tallies)


def _ask(contest: Contest, question: Question, tallies: Tallies, progress: Callable[[str], None]) -> None:
    """Ask all methods every turn of a question. A turn counts once all of them have answered it."""
    target, methods, words = contest.target, contest.methods, contest.target.text
    assert words is not None  # the first prompts were text
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(question.turns):
        messages.append({"role": "user", "content": turn})
        prompt = encode(target, messages if words.has_chat else turn)
        answers: dict[str, Answered] = {}
        first = sum(tally.questions for tally in tallies[HF].values()) % len(methods)
        for name in methods[first:] + methods[:first]:
            progress(f"{question.name} {name}")
            answers[name] = contest.ask(name, prompt)
        plain = answers["vanilla"].tokens
        differences: dict[str, list[Difference]] = {}
        for name in contest.drafters:
            if answers[name].tokens != plain and contest.drafters[name].law == "coupled":
                audited = audit(target, prompt, answers[name].tokens, answers[name].sampling)
                differences[name] = [
                    Difference(question=question.name, turn=number, **vars(each)) for each in audited
                ]
        for name, answered in answers.items():
            place = (question.file, question.category, question.name)
            tallies[name].setdefault(place, Tally()).add(answered, differences.get(name, ()))
        messages.append({"role": "assistant", "content": words.decode(plain)})


def drafters_of(
    given: str | Sequence[str] | Mapping[str, Drafter], target: HFTarget, temperature: float = 0.0
) -> dict[str, Drafter]:
    """Drafters by name, loaded where they are only named. Raises ValueError for an unknown one."""
    if isinstance(given, Mapping):
        return dict(given)
    names = dict.fromkeys([given] if isinstance(given, str) else given)
    return {name: load_drafter(name, target, temperature) for name in names}


def first_prompts(target: Target, questions: Sequence[Question], max_new_tokens: int = 1) -> list[list[int]]:
    """The first turn of every question, as tokens. Raises ValueError for one that leaves no room for an
    answer, by name."""
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


def _report(contest: Contest, tallies: Tallies) -> BenchReport:
    hf = sum(tallies[HF].values(), Tally())
    asked = {name: _by_question(of) for name, of in tallies.items()}
    return BenchReport(
        **heading(contest.target),
        margin=contest.target.margin,
        temperature=contest.temperature,
        seed=contest.seed,
        max_new_tokens=contest.max_new_tokens,
        prompts=list(asked[HF]),
        hf_generate=HFResult(
            tokens_per_second=round(hf.tokens_per_second, 2), new_tokens=hf.new_tokens, by_question=asked[HF]
        ),
        results=[_result(contest, name, tallies, asked) for name in contest.drafters],
    )


def _result(
    contest: Contest, name: str, tallies: Tallies, asked: dict[str, dict[str, Asked]]
) -> DrafterResult:
    tally, plain, hf = (sum(tallies[method].values(), Tally()) for method in (name, *BASELINES))
    decoding, drafter = tally.seconds.total - tally.seconds.prefill, contest.drafters[name]
    return DrafterResult(
        drafter=name,
        **dict(_speed(tally, plain, hf)),
        tree=drafter.shape.name if isinstance(drafter, Proposer) else None,
        rows=drafter.rows,
        target_passes=len(tally.rounds),
        acceptance_by_depth=tally.acceptance(conditional=False),
        acceptance_by_depth_conditional=tally.acceptance(conditional=True),
        law=drafter.law,
        identical=not tally.differences if drafter.law == "coupled" else None,
        unexplained=sum(each.margin > contest.target.margin for each in tally.differences),
        divergences=tally.differences,
        seconds=Seconds(**{part: round(seconds, 3) for part, seconds in vars(tally.seconds).items()}),
        host_share=round(tally.seconds.host / decoding, 4) if decoding else 0.0,
        expected=expected(tally, plain),
        ledger=ledger(tally, plain),
        by_category=_by_part(name, tallies, 1),
        by_file=_by_part(name, tallies, 0),
        by_question=asked[name],
        of_files={baseline: paired(asked[name], asked[baseline]) for baseline in BASELINES},
    )


def _by_question(tallies: dict[Place, Tally]) -> dict[str, Asked]:
    return {
        name: Asked(file=file, new_tokens=tally.new_tokens, seconds=round(tally.wall, 4))
        for (file, _, name), tally in tallies.items()
    }


def _by_part(name: str, tallies: Tallies, field: int) -> dict[str, Speed]:
    """Speed by a field of `Place`: the file (0) or the category (1)."""

    def part(method: str, key: str) -> Tally:
        of_part = (tally for place, tally in tallies[method].items() if place[field] == key)
        return sum(of_part, Tally())

    keys = dict.fromkeys(place[field] for place in tallies[name])
    return {key: _speed(*(part(method, key) for method in (name, *BASELINES))) for key in keys}


def _speed(tally: Tally, plain: Tally, hf: Tally) -> Speed:
    """τ, speed, and ratios of tokens per second, so that answers of different length compare."""
    speed = tally.tokens_per_second
    over = (round(speed / max(base.tokens_per_second, 1e-9), 3) for base in (plain, hf))
    return Speed(
        questions=tally.questions,
        new_tokens=tally.new_tokens,
        tau=round(tally.tau, 4),
        tokens_per_second=round(speed, 2),
        speedup=Speedup(**dict(zip(BASELINES, over, strict=True))),
    )
