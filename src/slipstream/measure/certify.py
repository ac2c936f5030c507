"""certify: proof that drafting changes nothing on this target: every token of every answer is audited."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.core.drafter import Drafter
from slipstream.decode.audit import audit, margin_of
from slipstream.decode.generate import Generation, generate
from slipstream.decode.settings import resolve_sampling
from slipstream.drafters import load_drafter
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.files import check_counts
from slipstream.machine import heading
from slipstream.measure.baseline import hf_answer
from slipstream.measure.questions import Question
from slipstream.measure.run import Keep, first_prompts, stopped_by
from slipstream.targets.hf import Target


def certify(
    target: Target,
    drafters: Sequence[str],
    questions: Sequence[Question],
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    keep: Keep = lambda report: None,
) -> dict[str, Any]:
    """Prove on this target that drafting changes nothing: audit every answer of every drafter, and Hugging
    Face's own.

    A tree oracle that knows plain decoding's answers always runs too: it is right about every number of
    tokens in turn, under wrong siblings, so that trees and compaction are tried on this model whatever the
    drafters do.

    Args:
        keep: is given what was audited, which certifies nothing, where an error or Ctrl-C ends it early.

    Returns:
        Schema, machine, and one result per drafter and temperature; `certified` is true if no token is
        unexplained.

    Raises:
        ValueError: a drafter or a setting is unknown or out of range, or a question leaves no room for an
            answer.
    """
    check_counts(temperatures=len(temperatures))
    for temperature in temperatures:
        resolve_sampling(target, temperature=temperature, seed=seed)
    made = {name: load_drafter(name, target.ends) for name in drafters}
    for name, drafter in made.items():
        if drafter.law != "coupled" and any(temperatures):
            raise ValueError(
                f"drafter {name!r} follows the {drafter.law} law, which keeps the distribution and not the "
                f"text: certify "
                "another proposal (top-k, noise), or at --temperature 0"
            )
    prompts = first_prompts(target, questions, max_new_tokens)
    seen: dict[tuple[float, str], list[Audited]] = {}
    try:
        for temperature in dict.fromkeys(temperatures):
            for question, prompt in zip(questions, prompts, strict=True):
                settings: dict[str, Any] = {
                    "max_new_tokens": max_new_tokens,
                    "temperature": temperature,
                    "seed": seed,
                }
                for name, audited in _audited(target, made, question, prompt, settings, progress).items():
                    seen.setdefault((temperature, name), []).append(audited)
    except BaseException as error:
        if seen:
            report = _report(target, max_new_tokens, seed, seen)
            keep(report | {"certified": False, "stopped": stopped_by(error)})
        raise
    return _report(target, max_new_tokens, seed, seen)


@dataclass(frozen=True)
class Audited:
    """One answer, and where it leaves plain decoding's."""

    tokens: int
    identical: bool
    divergences: list[dict[str, Any]]


def _audited(
    target: Target,
    made: dict[str, Drafter],
    question: Question,
    prompt: list[int],
    settings: dict[str, Any],
    progress: Callable[[str], None],
) -> dict[str, Audited]:
    """A question answered by everybody, and the answers audited."""
    temperature, answers = settings["temperature"], dict[str, list[int]]()
    plain: Generation = generate(target, prompt, "vanilla", **settings)
    oracle = TreeOracle([plain.prompt + plain.tokens], target.vocab)
    for name, drafter in [*made.items(), ("tree-oracle", oracle)]:
        progress(f"T={temperature:g} {question.name} {name}")
        answers[name] = generate(target, prompt, drafter, **settings).tokens
    if temperature == 0:
        progress(f"T=0 {question.name} hf_generate")
        answers["hf_generate"] = hf_answer(target, prompt, **settings)
    found = dict[str, Audited]()
    for name, tokens in answers.items():
        same = tokens == plain.tokens  # the very same tokens are what plain decoding chose
        divergences = [] if same else audit(target, prompt, tokens, plain.sampling)
        found[name] = Audited(
            len(tokens), same, [{"question": question.name, **asdict(d)} for d in divergences]
        )
    return found


def _report(
    target: Target, max_new_tokens: int, seed: int, seen: dict[tuple[float, str], list[Audited]]
) -> dict[str, Any]:
    results = [_summary(target, name, temperature, answers) for (temperature, name), answers in seen.items()]
    return {
        **heading(target),
        "margin": margin_of(target),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "certified": all(result["unexplained"] == 0 for result in results),
        "results": results,
    }


def _summary(target: Target, name: str, temperature: float, answers: Sequence[Audited]) -> dict[str, Any]:
    divergences = [d for answer in answers for d in answer.divergences]
    margins = [d["margin"] for d in divergences]
    return {
        "drafter": name,
        "temperature": temperature,
        "questions": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        "identical": sum(answer.identical for answer in answers),
        "unexplained": sum(margin > margin_of(target) for margin in margins),
        "largest_margin": max(margins, default=0.0) if math.inf not in margins else "outside the support",
        "divergences": divergences,
    }
