"""certify: proof that drafting changes nothing on this target. Every token of every answer is audited, and
what is drawn is tested against plain decoding's law."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from slipstream.core.drafter import Drafter
from slipstream.core.tree import PAD
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.sampling_params import resolve_sampling
from slipstream.files import check_counts, check_given, several
from slipstream.measure.datasets import Question, Questions, load_questions
from slipstream.measure.distribution_test import BATCH, CLASSES, LENGTH, draw, drawn
from slipstream.measure.metrics import Answered
from slipstream.measure.results import HF, Certificate, Certified, CertifySettings, Difference, Drawn
from slipstream.measure.resume import UNFINISHED, check_goes_on, fingerprint, marks, reported
from slipstream.measure.runner import ORACLE, Drafters, Runner, drafters_of, first_prompts
from slipstream.provenance import public
from slipstream.results import heading
from slipstream.targets.load import AnyTarget, loaded


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
    # As they draft for greedy answers, and for drawn ones: other trees and proposals are tuned.
    last = {temperature > 0: temperature for temperature in temperatures}
    by_kind = {samples: drafters_of(drafters, target, temperature) for samples, temperature in last.items()}
    prompts = first_prompts(target, asked, max_new_tokens)
    settings = CertifySettings(
        drafters=[*next(iter(by_kind.values()))],
        temperatures=[float(temperature) for temperature in dict.fromkeys(temperatures)],
        questions=[question.name for question in asked],
        fingerprint=fingerprint(
            target.stamp, prompts, [marks(drafter) for kind in by_kind.values() for drafter in kind.values()]
        ),
        draws=draws,
    )
    runner = Runner.of(target, {}, max_new_tokens, 0.0, seed)
    run = _Certification(runner, by_kind, settings, [*zip(asked, prompts, strict=True)])
    if begun is not None:
        run.go_on(begun)
    with reported(keep, lambda reason: run.report(reason) if run.results else None):
        for _ in run.pieces(progress):
            keep(run.report(UNFINISHED))
    return run.report()


@dataclass
class _Certification:
    """A run under way, and what it has found by drafter and temperature."""

    runner: Runner
    drafters: dict[bool, dict[str, Drafter]]  # by name, for greedy answers (False) and for drawn ones (True)
    settings: CertifySettings
    asked: list[tuple[Question, list[int]]]  # questions and their prompts
    results: dict[tuple[str, float], Certified] = field(default_factory=dict)
    tests: dict[tuple[str, float], Drawn] = field(default_factory=dict)

    def go_on(self, begun: Certificate) -> None:
        check_goes_on("certificate", begun, self.report().stored(), self.settings)
        self.results = {(row.drafter, row.temperature): row for row in begun.results}
        self.tests = {(row.drafter, row.temperature): row for row in begun.distribution}

    def pieces(self, progress: Callable[[str], None]) -> Iterator[None]:
        for temperature in self.settings.temperatures:
            runner = replace(self.runner, temperature=temperature)
            before = self.results.get((ORACLE, temperature))
            for question, prompt in self.asked[before.questions if before else 0 :]:
                for name, answer in self._answers(runner, question, prompt, progress).items():
                    self._count(name, temperature, answer)
                yield
            if not temperature:
                continue
            # Plain decoding's draws stand for those of every drafter with the same text.
            others = {name: one for name, one in self.drafters[True].items() if one.law != "coupled"}
            options = {**runner.settings, "max_new_tokens": min(LENGTH, runner.max_new_tokens)}
            prompts = [prompt for _, prompt in self.asked]
            for name, drafter in {"vanilla": Vanilla(), **others}.items():
                test = self.tests.get((name, temperature))
                classes = test.classes if test else [0] * CLASSES
                for first in range(test.answers if test else 0, self.settings.draws, BATCH):
                    progress(f"T={temperature:g} drawing {name}")
                    count = min(BATCH, self.settings.draws - first)
                    more = draw(runner.target, drafter, prompts, first, count, **options)
                    classes = [a + b for a, b in zip(classes, more, strict=True)]
                    row = drawn(name, temperature, drafter.law, first + count, classes)
                    self.tests[name, temperature] = row
                    yield

    def _answers(
        self, runner: Runner, question: Question, prompt: list[int], progress: Callable[[str], None]
    ) -> dict[str, Answered]:
        """Everybody's answer to a question, audited."""
        temperature, target = runner.temperature, runner.target
        plain = runner.ask("vanilla", prompt)
        runner = replace(runner, drafters=self.drafters[temperature > 0])
        drafters = {name: drafter for name, drafter in runner.drafters.items() if runner.keeps_text(name)}
        drafters[ORACLE] = TreeOracle([prompt + plain.tokens], target.vocab)
        runner = replace(runner, drafters=drafters)
        # Rounding inputs to 8 bits turns a difference in the last bit into one of a step, beyond any margin.
        outside = [] if temperature or target.quantize is not None else [HF]
        answers = {}
        for name in [*drafters, *outside]:
            progress(f"T={temperature:g} {question.name} {name}")
            answers[name] = runner.ask(name, prompt)
        return {name: runner.audited(name, a, plain, question, prompt) for name, a in answers.items()}

    def _count(self, name: str, temperature: float, answer: Answered) -> None:
        row = self.results.get((name, temperature)) or Certified(drafter=name, temperature=temperature)
        divergences = [*row.divergences, *answer.differences]
        sums = {
            "questions": row.questions + 1,
            "tokens": row.tokens + len(answer.tokens),
            "identical": row.identical + answer.identical,
            "unexplained": row.unexplained + answer.unexplained,
            "largest_margin": _largest_margin(divergences),
            "divergences": divergences,
        }
        self.results[name, temperature] = row.model_copy(update=sums)

    def report(self, stopped: str | None = None) -> Certificate:
        results, tests = [*self.results.values()], [*self.tests.values()]
        right = all(row.unexplained == 0 for row in results) and all(row.kept for row in tests)
        report = Certificate(
            **heading(self.runner.target),
            exactness=self.runner.exactness,
            margin=self.runner.target.margin,
            max_new_tokens=self.runner.max_new_tokens,
            seed=self.runner.seed,
            certified=stopped is None and right,
            settings=self.settings,
            results=results,
            distribution=tests,
        )
        return report.stopped_by(stopped)


def _largest_margin(differences: Sequence[Difference]) -> float | str:
    """In words where it is infinite."""
    infinite = [one for one in differences if one.margin == math.inf]
    if any(PAD not in (one.token, one.plain) for one in infinite):
        return "outside the support"
    return "one has ended" if infinite else max((one.margin for one in differences), default=0.0)
