"""certify: proof that drafting changes nothing on this target. Every token of every answer is audited."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from slipstream.command import public
from slipstream.core.drafter import Drafter
from slipstream.decode.audit import audit
from slipstream.decode.generate import generate
from slipstream.decode.settings import resolve_sampling
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.files import check_counts
from slipstream.measure.baseline import hf_answer
from slipstream.measure.questions import Asking, Question, load_questions
from slipstream.measure.report import Difference
from slipstream.measure.run import HF, drafters_of, first_prompts
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget
from slipstream.targets.load import AnyTarget, loaded


class Certified(Part):
    """One drafter at one temperature.

    Attributes:
        questions, identical: answers, and those that are plain decoding's token for token.
        unexplained: tokens beyond the precision's margin.
        largest_margin: in logits.
    """

    drafter: str
    temperature: float
    questions: int
    tokens: int
    identical: int
    unexplained: int
    largest_margin: float | str
    divergences: list[Difference]


class Certificate(Report):
    """What `certify` found.

    Attributes:
        margin: the precision's, in logits: by so much rounding may turn a near-tie.
        certified: no token is unexplained, and the run came to its end.
    """

    margin: float
    max_new_tokens: int
    seed: int
    certified: bool
    results: list[Certified]

    def __rich__(self) -> Group:
        """One line per drafter and temperature, and the verdict."""
        title = f"{self.target}, {self.dtype}, margin {self.margin:g} in logits"
        columns = ("T", "answers", "same", "tokens", "ties", "max margin", "unexplained")
        table = Figures(title, "drafter", *columns)
        for row in self.results:
            margin = row.largest_margin
            table.add_row(
                row.drafter,
                f"{row.temperature:g}",
                str(row.questions),
                str(row.identical),
                str(row.tokens),
                str(len(row.divergences) - row.unexplained),
                f"{margin:.2g}" if isinstance(margin, float) else margin,
                Text(str(row.unexplained), "bold red" if row.unexplained else "green"),
            )
        return Group(table, self._verdict())

    def _verdict(self) -> Text:
        if self.stopped is not None:
            return Text(f"not certified: stopped early: {self.stopped}", "yellow")
        if self.certified:
            same = "every token is plain decoding's, near-ties within the margin aside"
            return Text(f"certified: {same}", "bold green")
        wrong = "some tokens are not plain decoding's; please report this with the JSON"
        return Text(f"NOT certified: {wrong}", "bold red")


@dataclass(frozen=True)
class Audited:
    """One answer, and where it leaves plain decoding's."""

    tokens: int
    identical: bool
    differences: list[Difference]


Answers = dict[tuple[float, str], list[Audited]]  # by temperature and drafter


@public
def certify(
    target: AnyTarget,
    drafters: str | Sequence[str] | Mapping[str, Drafter] = "ngram",
    questions: Sequence[Asking] = (),
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    limit: int | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[Certificate], None] = lambda _: None,
) -> Certificate:
    """Prove on a target that drafting changes nothing: audit every answer of every drafter, and Hugging
    Face's own at T = 0.

    A tree oracle that knows plain decoding's answers always runs too: it is right about every number of
    tokens in turn, under wrong siblings, so that trees and compaction are tried on this model whatever the
    drafters do.

    Args:
        target, drafters, questions, limit, max_new_tokens, progress: as `bench` takes them. Only the first
            turn of a question is asked.
        keep: given what was audited where an error or Ctrl-C ends the run, which certifies nothing.

    Returns:
        One result per drafter and temperature; `certified` is true if no token is unexplained.

    Raises:
        ValueError: a drafter, a file or a setting is unknown or out of range, or a question leaves no room
            for an answer.
    """
    check_counts(temperatures=len(temperatures))
    asked = load_questions(questions, limit)
    target = loaded(target)
    for temperature in temperatures:
        resolve_sampling(target, temperature=temperature, seed=seed)
    contestants = drafters_of(drafters, target)
    _check_laws(contestants, temperatures)
    prompts = first_prompts(target, asked, max_new_tokens)
    answers: Answers = {}
    try:
        for temperature in dict.fromkeys(temperatures):
            settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
            for question, prompt in zip(asked, prompts, strict=True):
                audited = _audited(target, contestants, question, prompt, settings, progress)
                for name, answer in audited.items():
                    answers.setdefault((temperature, name), []).append(answer)
    except BaseException as error:
        if answers:
            keep(_report(target, max_new_tokens, seed, answers, ended=True).ended_by(error))
        raise
    return _report(target, max_new_tokens, seed, answers)


def _check_laws(drafters: dict[str, Drafter], temperatures: Sequence[float]) -> None:
    """Raises ValueError for a drafter that does not keep the text."""
    for name, drafter in drafters.items():
        if drafter.law != "coupled" and any(temperatures):
            raise ValueError(
                f"drafter {name!r} follows the {drafter.law} law, which keeps the distribution and not the "
                "text: certify another proposal (top-k, noise), or at --temperature 0"
            )


def _audited(
    target: HFTarget,
    drafters: dict[str, Drafter],
    question: Question,
    prompt: list[int],
    settings: dict[str, Any],
    progress: Callable[[str], None],
) -> dict[str, Audited]:
    """A question answered by everybody, and the answers audited."""
    temperature, answers = settings["temperature"], dict[str, list[int]]()
    plain = generate(target, prompt, "vanilla", **settings)
    oracle = TreeOracle([plain.prompt + plain.tokens], target.vocab)
    for name, drafter in [*drafters.items(), ("tree-oracle", oracle)]:
        progress(f"T={temperature:g} {question.name} {name}")
        answers[name] = generate(target, prompt, drafter, **settings).tokens
    if temperature == 0:
        progress(f"T=0 {question.name} {HF}")
        answers[HF] = hf_answer(target, prompt, **settings)
    audited = {}
    for name, tokens in answers.items():
        identical = tokens == plain.tokens
        divergences = [] if identical else audit(target, prompt, tokens, plain.sampling)
        differences = [Difference(question=question.name, **vars(each)) for each in divergences]
        audited[name] = Audited(len(tokens), identical, differences)
    return audited


def _report(
    target: HFTarget, max_new_tokens: int, seed: int, answers: Answers, ended: bool = False
) -> Certificate:
    results = [_certified(target, name, temperature, of) for (temperature, name), of in answers.items()]
    return Certificate(
        **heading(target),
        margin=target.margin,
        max_new_tokens=max_new_tokens,
        seed=seed,
        certified=not ended and all(result.unexplained == 0 for result in results),
        results=results,
    )


def _certified(target: HFTarget, name: str, temperature: float, answers: Sequence[Audited]) -> Certified:
    differences = [each for answer in answers for each in answer.differences]
    margins = [each.margin for each in differences]
    return Certified(
        drafter=name,
        temperature=temperature,
        questions=len(answers),
        tokens=sum(answer.tokens for answer in answers),
        identical=sum(answer.identical for answer in answers),
        unexplained=sum(margin > target.margin for margin in margins),
        largest_margin=max(margins, default=0.0) if math.inf not in margins else "outside the support",
        divergences=differences,
    )
