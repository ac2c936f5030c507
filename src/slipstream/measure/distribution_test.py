"""The distribution test: are drawn tokens drawn from plain decoding's law?

Where a draft must not change the text, the audit compares tokens. The distribution itself is tested here: of
plain decoding's own draws, and of drafters whose law keeps the distribution and not the text.

Every token falls into one of `CLASSES` classes by its place in the target's law, the likeliest tokens first.
Each class has the same probability, and a token on a border falls on either side at random. So the classes of
exact draws are uniform and independent, whatever was drawn before (Rosenblatt's transform), and Pearson's χ²
test counts them.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampler
from slipstream.core.target import Target
from slipstream.core.tree import chain
from slipstream.engine.generate import Generation, generate
from slipstream.measure.results import Drawn

CLASSES = 16
SIGNIFICANCE = 1e-3
POWER = 0.95
DISTANCES = (0.01, 0.02, 0.05, 0.1, 0.2)
BATCH = 8  # answers that are drawn at once, and kept at once
LENGTH = 32  # tokens of an answer, at most


def drawn(drafter: str, temperature: float, law: str, answers: int, classes: Sequence[int]) -> Drawn:
    """The test of tokens that were counted by class."""
    tokens, freedom = sum(classes), len(classes) - 1
    return Drawn(
        drafter=drafter,
        temperature=temperature,
        law=law,
        answers=answers,
        tokens=tokens,
        classes=list(classes),
        p_value=p_value(classes),
        significance=SIGNIFICANCE,
        power=POWER,
        detectable=round(detectable(tokens, freedom), 4),
        powers={f"{distance:g}": round(power(distance, tokens, freedom), 4) for distance in DISTANCES},
    )


def draw(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], first: int, count: int, **options: Any
) -> list[int]:
    """Tokens by class of `count` answers from the first-th on, which ask the prompts in turn. `options` are
    `generate`'s; each batch of answers has a seed of its own, counted from `seed`."""
    asked = [list(prompts[i % len(prompts)]) for i in range(first, first + count)]
    options["seed"] = (options["seed"] + 1 + first) % 2**63
    borders = torch.Generator().manual_seed(options["seed"])
    classes = [0] * CLASSES
    for answer in generate(target, asked, drafter, **options):
        for place in places(target, answer, borders):
            classes[min(int(CLASSES * place), CLASSES - 1)] += 1
    return classes


@torch.inference_mode()
def places(target: Target, answer: Generation, borders: torch.Generator) -> list[float]:
    """Of each token of an answer, the mass of what is likelier in plain decoding's law, and a random part of
    the token's own."""
    text, start = [*answer.prompt, *answer.tokens[:-1]], len(answer.prompt) - 1
    rows = torch.arange(start, len(text), device=target.device)[None]
    tokens = torch.tensor([text], device=target.device)
    logits = target(chain(tokens), target.new_cache(1), rows=rows).logits[0]
    sampler = Sampler([answer.sampling], [answer.prompt], target.vocab, target.device)
    masses = []
    for token, row in zip(answer.tokens, logits, strict=True):
        law = sampler.law(row[None])[0]
        mass = law[token]
        equal = torch.arange(len(law), device=law.device)[law == mass]
        before = law[law > mass].sum() + mass * (equal < token).sum()
        masses.append(float(before + mass * torch.rand((), generator=borders, dtype=torch.float64)))
        sampler.observe(torch.tensor([token], device=target.device), torch.ones(1, dtype=torch.bool))
    return masses


def p_value(classes: Sequence[int]) -> float:
    """Pearson's: the chance that exact draws are spread over the classes at least as unevenly."""
    expected = sum(classes) / len(classes)
    return above(sum((count - expected) ** 2 for count in classes) / expected, len(classes) - 1)


def above(statistic: float, freedom: int) -> float:
    """The chance that χ² exceeds a statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def power(distance: float, tokens: int, freedom: int) -> float:
    """The least chance with which the test finds a distance: the statistic's law is then the noncentral χ²,
    and of all frequencies at one distance those that are all off by as much are the hardest to find. Their
    noncentrality is 4 · tokens · distance²."""
    half = 2 * tokens * distance**2
    k = torch.arange(int(half + 12 * math.sqrt(half) + 60), dtype=torch.float64)
    weights = (k * math.log(max(half, 1e-300)) - half - torch.lgamma(k + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + k, torch.full_like(k, critical(freedom) / 2))
    return min(1.0, float(weights @ tails))


@cache
def critical(freedom: int) -> float:
    """The statistic above which draws fail."""
    return _root(lambda x: SIGNIFICANCE - above(x, freedom), 1e4)


def detectable(tokens: int, freedom: int) -> float:
    """The least distance that is found with probability `POWER`; 1 if none is."""
    return _root(lambda distance: power(distance, tokens, freedom) - POWER, 1.0)


def _root(rising: Callable[[float], float], high: float) -> float:
    """Where a rising function crosses 0 between 0 and `high`."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return high
