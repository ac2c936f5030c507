"""certify: proof that drafting changes nothing on this target. Every token of every answer is audited."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Group
from rich.text import Text

from slipstream.command import public
from slipstream.core.drafter import Drafter
from slipstream.decode.settings import resolve_sampling
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.drafters.vanilla import Vanilla
from slipstream.files import check_counts
from slipstream.measure.questions import Asking, Question, load_questions
from slipstream.measure.report import Difference, promise
from slipstream.measure.run import HF, Contest, Drafters, drafters_of, first_prompts
from slipstream.measure.tally import Answered, Tally
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets.load import AnyTarget, loaded


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


class Certificate(Report):
    """What `certify` found.

    Attributes:
        exactness: the promise that was checked. "bits": every token is plain decoding's; "audited": a
            near-tie within the margin may turn. Hugging Face's generate is always audited.
        margin: the precision's, in logits: rounding may turn a near-tie within it.
        certified: no token is unexplained, and the run was complete.
    """

    exactness: str = "audited"
    margin: float
    max_new_tokens: int
    seed: int
    certified: bool
    results: list[Certified]

    def __rich__(self) -> Group:
        """One line per drafter and temperature, and the verdict."""
        strict, near = (promise(exactness, self.margin) for exactness in (self.exactness, "audited"))
        title = f"{self.target}, {self.dtype}; held to plain decoding {strict}"
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
        return Group(table, self._verdict())

    def _verdict(self) -> Text:
        if self.stopped is not None:
            return Text(f"not certified: stopped early: {self.stopped}", "yellow")
        if self.certified:
            same = "every token is plain decoding's, near-ties within the margin aside"
            if self.exactness == "bits":
                same = "every answer is plain decoding's, token for token"
            return Text(f"certified: {same}", "bold green")
        wrong = "some tokens are not plain decoding's; please report this with the JSON"
        return Text(f"NOT certified: {wrong}", "bold red")


Answers = dict[tuple[str, float], list[Answered]]  # by drafter and temperature


@public
def certify(
    target: AnyTarget,
    drafters: Drafters = "auto",
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
    Face's own at T = 0, unless the target is quantised.

    Where the target's `exactness` is "bits", a drafter's answer must be plain decoding's, token for token.
    Elsewhere, and in Hugging Face's answers, near-ties within the precision's margin may turn.

    A tree oracle that knows plain decoding's answers always runs too. Its drafts are right for every number
    of tokens in turn, among wrong siblings, so that trees and compaction are tested whatever the drafters do.

    Args:
        target, drafters, questions, limit, max_new_tokens, progress: as `bench` takes them. Only the first
            turn of a question is asked.
        keep: called where an error or Ctrl-C ends the run, with what was audited; it certifies nothing.

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
    for name, drafter in contestants.items():
        if drafter.law != "coupled" and any(temperatures):
            raise ValueError(
                f"drafter {name!r} follows the {drafter.law} law, which keeps the distribution and not the "
                "text: certify another proposal (top-k, noise), or at --temperature 0"
            )
    prompts = first_prompts(target, asked, max_new_tokens)
    contest = Contest.of(target, {}, max_new_tokens, 0.0, seed)
    answers: Answers = {}
    try:
        for temperature in dict.fromkeys(temperatures):
            contest = replace(contest, temperature=temperature)
            for question, prompt in zip(asked, prompts, strict=True):
                _audit(contest, contestants, question, prompt, answers, progress)
    except BaseException as error:
        if answers:
            keep(_report(contest, answers, ended=True).ended_by(error))
        raise
    return _report(contest, answers)


def _audit(
    contest: Contest,
    drafters: dict[str, Drafter],
    question: Question,
    prompt: list[int],
    answers: Answers,
    progress: Callable[[str], None],
) -> None:
    """Let everybody answer a question, and add the answers, audited, to `answers`."""
    heat, target = contest.temperature, contest.target
    plain = replace(contest, drafters={"vanilla": Vanilla()}).ask("vanilla", prompt)
    oracle = TreeOracle([prompt + plain.tokens], target.vocab)
    contest = replace(contest, drafters={**drafters, "tree-oracle": oracle})
    given = {}
    # Rounding inputs to 8 bits turns a difference in the last bit into one of a step, beyond any margin.
    theirs = [] if heat or target.quantize is not None else [HF]
    for name in [*contest.drafters, *theirs]:
        progress(f"T={heat:g} {question.name} {name}")
        given[name] = contest.ask(name, prompt)
    for name, answer in given.items():
        audited = contest.audited(name, answer, plain, question, prompt)
        answers.setdefault((name, heat), []).append(audited)


def _report(contest: Contest, answers: Answers, ended: bool = False) -> Certificate:
    results = []
    for (name, temperature), some in answers.items():
        tally = Tally(some)
        margins = [each.margin for each in tally.differences]
        row = Certified(
            drafter=name,
            temperature=temperature,
            questions=len(some),
            tokens=tally.new_tokens,
            identical=sum(answer.identical for answer in some),
            unexplained=tally.unexplained,
            largest_margin=max(margins, default=0.0) if math.inf not in margins else "outside the support",
            divergences=tally.differences,
        )
        results.append(row)
    return Certificate(
        **heading(contest.target),
        exactness=contest.exactness,
        margin=contest.target.margin,
        max_new_tokens=contest.max_new_tokens,
        seed=contest.seed,
        certified=not ended and all(result.unexplained == 0 for result in results),
        results=results,
    )
