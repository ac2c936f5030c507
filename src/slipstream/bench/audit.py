"""The audit: is every token of an answer the one that plain decoding would have chosen?

A pass over a tree and a pass over one row round differently, so in low precision equality has an exception: a token whose
score is within a stated margin of the best is a tie that rounding may turn. Everything else is an error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slipstream.bench.machine import heading
from slipstream.bench.questions import Question
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.tree import chain
from slipstream.decode.generate import generate, resolve_sampling
from slipstream.decode.round import Decoder
from slipstream.drafters import load_drafter
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.drafters.vanilla import Vanilla
from slipstream.targets.hf import Target

MARGINS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}  # in logits


@dataclass(frozen=True)
class Divergence:
    """A token that plain decoding, forced along the answer up to there, would not have chosen.

    Attributes:
        position: index into the answer.
        token, plain: what was emitted, and what plain decoding chooses.
        margin: how far the emitted token's score lies below the best, in logits; infinite outside the support.
    """

    position: int
    token: int
    plain: int
    margin: float


def margin_of(target: Target) -> float:
    """The stated margin of the target's precision, in logits."""
    return MARGINS[target.dtype]


@torch.inference_mode()
def audit(target: Target, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> list[Divergence]:
    """Teacher-force plain decoding, one row a pass, over an answer; all tokens that differ from its choice.

    Supports are compared with slack: a token counts as inside if a top-k, top-p or min-p boundary moved by the margin
    would have let it in, and only tokens inside a narrowed support can outrank it.
    """
    sampler = Sampler([sampling], [prompt], target.vocab, target.device)
    decoder = Decoder.start(target, Vanilla(), sampler, len(prompt) + len(answer))
    one = torch.ones(1, dtype=torch.long, device=target.device)
    slack = margin_of(target)
    unit = sampling.temperature or 1.0  # scores are logits over temperature
    last, found = decoder.prefill([prompt]).logits, []
    for i, token in enumerate(answer):
        if i:
            fed = one * answer[i - 1]
            sampler.observe(fed, one.bool())
            last = target(chain(fed[None]), decoder.cache).logits
            decoder.cache.keep(None, one)
        assert last is not None
        position = one * (len(prompt) + i)
        noise, logits = sampler.noise(position), last[:, -1]
        plain = int((sampler.scores(logits) + noise).argmax())
        if plain != token:
            mine = (sampler.scores(logits, slack / unit) + noise)[0, token]
            best = (sampler.scores(logits, -slack / unit) + noise).max()
            behind = float(best - mine) * unit if mine > -torch.inf else math.inf  # both may be −inf, and NaN passes for 0
            found.append(Divergence(i, token, plain, max(0.0, behind)))
    return found


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
    made = {name: load_drafter(name) for name in drafters}
    results = []
    for temperature in temperatures:
        runs: dict[str, list[tuple[list[int], list[int], list[int]]]] = {}
        for question in questions:
            prompt = target.encode(question.turns[0])
            settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
            plain = generate(target, prompt, "vanilla", **settings)
            oracle = TreeOracle([plain.prompt + plain.tokens], target.vocab)
            for name, drafter in [*made.items(), ("tree-oracle", oracle)]:
                progress(f"T={temperature:g} {question.name} {name}")
                answer = generate(target, prompt, drafter, **settings)
                runs.setdefault(name, []).append((prompt, answer.tokens, plain.tokens))
            if temperature == 0:
                progress(f"T=0 {question.name} hf_generate")
                ids = torch.tensor([prompt], device=target.device)
                theirs = target.hf_generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0, len(prompt) :].tolist()
                runs.setdefault("hf_generate", []).append((prompt, theirs, plain.tokens))
        for name, answers in runs.items():
            progress(f"T={temperature:g} audit of {name}")
            results.append(_summary(target, name, temperature, seed, answers, questions))
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
    seed: int,
    answers: Sequence[tuple[list[int], list[int], list[int]]],
    questions: Sequence[Question],
) -> dict[str, Any]:
    sampling = resolve_sampling(target, temperature=temperature, seed=seed)
    divergences = []
    for (prompt, tokens, plain), question in zip(answers, questions, strict=True):
        if tokens != plain:  # the very same tokens are what plain decoding chose
            divergences += [{"question": question.name, **asdict(d)} for d in audit(target, prompt, tokens, sampling)]
    margins = [d["margin"] for d in divergences]
    return {
        "drafter": name,
        "temperature": temperature,
        "questions": len(answers),
        "tokens": sum(len(tokens) for _, tokens, _ in answers),
        "identical": sum(tokens == plain for _, tokens, plain in answers),
        "unexplained": sum(margin > margin_of(target) for margin in margins),
        "largest_margin": max(margins, default=0.0) if math.inf not in margins else "outside the support",
        "divergences": divergences,
    }
