"""certify: proof that drafting changes nothing on this target: every token of every answer is audited."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from slipstream.bench.baseline import hf_answer
from slipstream.bench.questions import Question
from slipstream.decode.audit import audit, margin_of
from slipstream.decode.generate import Generation, generate
from slipstream.drafters import load_drafter
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.machine import heading
from slipstream.targets.hf import Target


def certify(
    target: Target,
    drafters: Sequence[str],
    questions: Sequence[Question],
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Prove on this target that drafting changes nothing: audit every answer of every drafter, and Hugging Face's own.

    A tree oracle that knows plain decoding's answers always runs too: it is right about every number of tokens in turn,
    under wrong siblings, so that trees and compaction are tried on this model whatever the drafters do.

    Returns:
        Schema, machine, and one result per drafter and temperature; `certified` is true if no token is unexplained.
    """
    made = {name: load_drafter(name, target.ends) for name in drafters}
    for name, drafter in made.items():
        if drafter.law != "coupled" and any(temperatures):
            raise ValueError(
                f"drafter {name!r} follows the {drafter.law} law, which keeps the distribution and not the text: certify "
                "another proposal (top-k, noise), or at --temperature 0"
            )
    results = []
    for temperature in temperatures:
        runs: dict[str, list[tuple[list[int], Generation]]] = {}  # what was said, and what plain decoding says
        for question in questions:
            prompt = target.encode(question.turns[0])
            settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
            plain: Generation = generate(target, prompt, "vanilla", **settings)
            oracle = TreeOracle([plain.prompt + plain.tokens], target.vocab)
            for name, drafter in [*made.items(), ("tree-oracle", oracle)]:
                progress(f"T={temperature:g} {question.name} {name}")
                answer = generate(target, prompt, drafter, **settings)
                runs.setdefault(name, []).append((answer.tokens, plain))
            if temperature == 0:
                progress(f"T=0 {question.name} hf_generate")
                runs.setdefault("hf_generate", []).append((hf_answer(target, prompt, **settings), plain))
        for name, answers in runs.items():
            progress(f"T={temperature:g} audit of {name}")
            results.append(_summary(target, name, temperature, answers, questions))
    return {
        **heading(target),
        "margin": margin_of(target),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "certified": all(result["unexplained"] == 0 for result in results),
        "results": results,
    }


def _summary(
    target: Target,
    name: str,
    temperature: float,
    answers: Sequence[tuple[list[int], Generation]],
    questions: Sequence[Question],
) -> dict[str, Any]:
    divergences = []
    for (tokens, plain), question in zip(answers, questions, strict=True):
        if tokens != plain.tokens:  # the very same tokens are what plain decoding chose
            found = audit(target, plain.prompt, tokens, plain.sampling)
            divergences += [{"question": question.name, **asdict(d)} for d in found]
    margins = [d["margin"] for d in divergences]
    return {
        "drafter": name,
        "temperature": temperature,
        "questions": len(answers),
        "tokens": sum(len(tokens) for tokens, _ in answers),
        "identical": sum(tokens == plain.tokens for tokens, plain in answers),
        "unexplained": sum(margin > margin_of(target) for margin in margins),
        "largest_margin": max(margins, default=0.0) if math.inf not in margins else "outside the support",
        "divergences": divergences,
    }
