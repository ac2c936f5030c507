"""certify: proof that drafting changes nothing on this target. Every token of every answer is audited, and
what is drawn is tested against plain decoding's law."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Group
from rich.text import Text

from slipstream.core.drafter import Drafter
from slipstream.core.tree import PAD
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.sampling_params import resolve_sampling
from slipstream.files import check_counts, check_given, several
from slipstream.measure.bench_report import Difference, promise
from slipstream.measure.distribution_test import (
    BATCH,
    CLASSES,
    LENGTH,
    POWER,
    SIGNIFICANCE,
    Drawn,
    draw,
    drawn,
)
from slipstream.measure.metrics import Answered
from slipstream.measure.questions import Question, Questions, load_questions
from slipstream.measure.resume import UNFINISHED, check_goes_on, fingerprint, marks
from slipstream.measure.runner import HF, ORACLE, Contest, Drafters, drafters_of, first_prompts
from slipstream.provenance import public
from slipstream.results import Figures, Part, Report, flat, heading
from slipstream.targets import HFTarget
from slipstream.targets.load import AnyTarget, loaded

Pairs = list[tuple[Question, list[int]]]  # questions and their prompts
Loaded = dict[bool, dict[str, Drafter]]  # by name, for greedy answers and for drawn ones


class Certified(Part):
    """One drafter at one temperature."""

    drafter: str
    temperature: float
    questions: int  # answers
    tokens: int
    identical: int  # answers that are plain decoding's token for token
    unexplained: int  # tokens that the promise does not allow
    largest_margin: float | str  # in logits
    divergences: list[Difference]


class Settings(Part):
    """What was asked: a run goes on only under the same settings."""

    drafters: list[str]
    temperatures: list[float]
    questions: list[str]
    fingerprint: str  # of the target as it answers, the prompts, the drafters' trees and weights
    draws: int  # answers of each distribution test

    @classmethod
    def of(
        cls,
        target: HFTarget,
        drafters: Loaded,
        temperatures: Sequence[float],
        asked: Pairs,
        draws: int,
    ) -> "Settings":
        """What a call of `certify` asks."""
        prompts, some = [prompt for _, prompt in asked], [*drafters.values()]
        told = [marks(drafter) for of in some for drafter in of.values()]
        return cls(
            drafters=[*some[0]],
            temperatures=[float(temperature) for temperature in dict.fromkeys(temperatures)],
            questions=[question.name for question, _ in asked],
            fingerprint=fingerprint(target.stamp, prompts, told),
            draws=draws,
        )


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
    settings: Settings | None = None
    results: list[Certified]
    distribution: list[Drawn] = []

    def __rich__(self) -> Group:
        """One line per drafter and temperature, and the verdict."""
        strict, near = (promise(exactness, self.margin) for exactness in (self.exactness, "audited"))
        title = f"{self.model}; held to plain decoding {strict}"
        theirs = any(row.drafter == HF for row in self.results)
        title += f", hf_generate {near}" if theirs and strict != near else ""
        columns = ("T", "answers", "same", "tokens", "ties", "max margin", "unexplained")
        table = Figures(title, "drafter", *columns)
        for row in self.results:
            margin, wrong = row.largest_margin, row.unexplained
            counts = (row.questions, row.identical, row.tokens, len(row.divergences) - wrong)
            largest = f"{margin:.2g}" if isinstance(margin, float) else margin
            verdict = Text(str(wrong), "bold red" if wrong else "green")
            table.add_row(row.drafter, f"{row.temperature:g}", *counts, largest, verdict)
        return Group(table, *self._tests(), self._verdict())

    def _rows(self) -> list[dict[str, Any]]:
        return [flat(row) for row in self.results]

    def _tests(self) -> Iterator[Figures]:
        if self.distribution:
            title = f"draws against plain decoding's law, at the {SIGNIFICANCE:.1%} level"
            table = Figures(title, "drafter", "T", "law", "tokens", "p", f"finds with {POWER:.0%}")
            for row in self.distribution:
                verdict = Text(f"{row.p_value:.3f}", "green" if row.kept else "bold red")
                least = f"distance {row.detectable:.3f}"
                table.add_row(row.drafter, f"{row.temperature:g}", row.law, row.tokens, verdict, least)
            yield table

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


@dataclass
class _Run:
    """A run under way: what is asked of whom, and what was found so far."""

    contest: Contest
    drafters: Loaded
    settings: Settings
    asked: Pairs
    results: dict[tuple[str, float], Certified] = field(default_factory=dict)
    distribution: dict[tuple[str, float], Drawn] = field(default_factory=dict)

    def go_on(self, begun: Certificate) -> None:
        """Take over what an earlier run found. Raises ValueError where it was another run."""
        check_goes_on("certificate", begun, self.report(None).stored(), self.settings)
        self.results = {(row.drafter, row.temperature): row for row in begun.results}
        self.distribution = {(row.drafter, row.temperature): row for row in begun.distribution}

    def pieces(self, progress: Callable[[str], None]) -> Iterator[None]:
        """Do what is left, piece by piece."""
        for temperature in self.settings.temperatures:
            contest = self.contest = replace(self.contest, temperature=temperature)
            done = self.results[ORACLE, temperature].questions if (ORACLE, temperature) in self.results else 0
            for question, prompt in self.asked[done:]:
                answers = _audit(contest, self.coupled(temperature), question, prompt, progress)
                self.results |= {
                    (name, temperature): self._with(name, answer) for name, answer in answers.items()
                }
                yield
            for name, drafter in self.tested.items() if temperature else ():
                before = self.distribution.get((name, temperature))
                for first in range(before.answers if before else 0, self.settings.draws, BATCH):
                    progress(f"T={temperature:g} drawing {name}")
                    self._draw(name, drafter, first)
                    yield

    def coupled(self, temperature: float) -> dict[str, Drafter]:
        """Drafters whose text must be plain decoding's: greedy text does not depend on the law."""
        known = self.drafters[temperature > 0].items()
        return {name: each for name, each in known if not temperature or each.law == "coupled"}

    @property
    def tested(self) -> dict[str, Drafter]:
        """Whose draws are tested: plain decoding's stand for those of every drafter with the same text."""
        others = {name: each for name, each in self.drafters[True].items() if each.law != "coupled"}
        return {"vanilla": Vanilla(), **others}

    def _with(self, name: str, answer: Answered) -> Certified:
        """A drafter's row with one more answer."""
        temperature = self.contest.temperature
        row = self.results.get((name, temperature))
        found = [*(row.divergences if row else ()), *answer.differences]
        return Certified(
            drafter=name,
            temperature=temperature,
            questions=(row.questions if row else 0) + 1,
            tokens=(row.tokens if row else 0) + len(answer.tokens),
            identical=(row.identical if row else 0) + answer.identical,
            unexplained=(row.unexplained if row else 0) + answer.unexplained,
            largest_margin=_beyond(found) or max((each.margin for each in found), default=0.0),
            divergences=found,
        )

    def _draw(self, name: str, drafter: Drafter, first: int) -> None:
        contest, temperature = self.contest, self.contest.temperature
        row = self.distribution.get((name, temperature))
        count = min(BATCH, self.settings.draws - first)
        how = {**contest.settings, "max_new_tokens": min(LENGTH, contest.max_new_tokens)}
        prompts = [prompt for _, prompt in self.asked]
        more = draw(contest.target, drafter, prompts, first, count, **how)
        classes = [a + b for a, b in zip(row.classes if row else [0] * CLASSES, more, strict=True)]
        self.distribution[name, temperature] = drawn(name, temperature, drafter.law, first + count, classes)

    def report(self, stopped: str | None) -> Certificate:
        results, distribution = [*self.results.values()], [*self.distribution.values()]
        right = all(row.unexplained == 0 for row in results) and all(row.kept for row in distribution)
        made = Certificate(
            **heading(self.contest.target),
            exactness=self.contest.exactness,
            margin=self.contest.target.margin,
            max_new_tokens=self.contest.max_new_tokens,
            seed=self.contest.seed,
            certified=stopped is None and right,
            settings=self.settings,
            results=results,
            distribution=distribution,
        )
        return made if stopped is None else made.stopped_by(stopped)


@public
def certify(
    target: AnyTarget,
    drafters: Drafters = "auto",
    questions: Questions = (),
    *,
    temperatures: float | Sequence[float] = (0.0, 1.0),
    limit: int | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    draws: int = 64,
    begun: Certificate | None = None,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[Certificate], None] = lambda _: None,
) -> Certificate:
    """Prove on a target that drafting changes nothing: audit every answer of every drafter, and Hugging
    Face's own at T = 0, unless the target is quantised. At T > 0 test that draws follow the target's law.

    Where the target's `exactness` is "bits", a drafter's answer must be plain decoding's, token for token.
    Elsewhere, and in Hugging Face's answers, near-ties within the precision's margin may turn. A drafter of
    another law than the coupled one keeps the distribution and not the text: at T > 0 its draws are tested.

    A tree oracle that knows plain decoding's answers always runs too. Its drafts are right for every number
    of tokens in turn, among wrong siblings, so that trees and compaction are tested whatever the drafters do.

    Args:
        target, drafters, questions, limit, max_new_tokens, progress: as `bench` takes them. Only the first
            turn of a question is asked.
        temperatures, seed: every drafter answers at each temperature, and draws by the seed (`Sampling`).
        draws: answers of each distribution test, of 32 tokens at most. `Drawn` says what so many would find.
        begun: the certificate of a run that did not end, which is gone on with.
        keep: called after each piece of work, and where an error or Ctrl-C ends the run, with what was found
            until then; it certifies nothing.

    Returns:
        Results by drafter and temperature, and tests. `certified`: all tokens are explained, no test failed.

    Raises:
        ValueError: a drafter, a file or a setting is unknown or out of range, a question leaves no room for
            an answer, or `begun` has other settings, or is another version's or another machine's.
    """
    asked, temperatures = load_questions(questions, limit), several(temperatures)
    check_given(temperatures=temperatures)
    check_counts(draws=draws)
    target = loaded(target)
    for temperature in temperatures:
        resolve_sampling(target, temperature=temperature, seed=seed)
    contestants = _loaded(drafters, target, temperatures)
    pairs = [*zip(asked, first_prompts(target, asked, max_new_tokens), strict=True)]
    settings = Settings.of(target, contestants, temperatures, pairs, draws)
    run = _Run(Contest.of(target, {}, max_new_tokens, 0.0, seed), contestants, settings, pairs)
    if begun is not None:
        run.go_on(begun)
    try:
        for _ in run.pieces(progress):
            keep(run.report(UNFINISHED))
    except BaseException as error:
        if run.results:
            keep(run.report(UNFINISHED).ended_by(error))
        raise
    return run.report(None)


def _beyond(differences: Sequence[Difference]) -> str | None:
    """What an infinite margin among them stands for; None where there is none."""
    infinite = [each for each in differences if each.margin == math.inf]
    if any(PAD not in (each.token, each.plain) for each in infinite):
        return "outside the support"
    return "one has ended" if infinite else None


def _loaded(drafters: Drafters, target: HFTarget, temperatures: Sequence[float]) -> Loaded:
    """Drafters as they draft for greedy answers, and for drawn ones: other trees and proposals are tuned."""
    last = {temperature > 0: temperature for temperature in temperatures}
    return {samples: drafters_of(drafters, target, temperature) for samples, temperature in last.items()}


def _audit(
    contest: Contest,
    drafters: dict[str, Drafter],
    question: Question,
    prompt: list[int],
    progress: Callable[[str], None],
) -> dict[str, Answered]:
    """Let everybody answer a question. Returns the answers, audited."""
    temperature, target = contest.temperature, contest.target
    plain = replace(contest, drafters={"vanilla": Vanilla()}).ask("vanilla", prompt)
    oracle = TreeOracle([prompt + plain.tokens], target.vocab)
    contest = replace(contest, drafters={**drafters, ORACLE: oracle})
    given = {}
    # Rounding inputs to 8 bits turns a difference in the last bit into one of a step, beyond any margin.
    theirs = [] if temperature or target.quantize is not None else [HF]
    for name in [*contest.drafters, *theirs]:
        progress(f"T={temperature:g} {question.name} {name}")
        given[name] = contest.ask(name, prompt)
    return {name: contest.audited(name, answer, plain, question, prompt) for name, answer in given.items()}
