"""The distribution test: its arithmetic, what it finds, and what it lets pass."""

from dataclasses import replace

import pytest
import torch

import tiny
from slipstream.core import verify
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.tree import chain
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.generate import generate
from slipstream.measure.distribution_test import (
    CLASSES,
    POWER,
    SIGNIFICANCE,
    above,
    detectable,
    draw,
    drawn,
    p_value,
    places,
    power,
)

HOW = {"temperature": 1.0, "max_new_tokens": 32}
PROMPTS = tiny.prompts(5, 9, 3)


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"), [(0.0, 3, 1.0), (11.3449, 3, 0.01), (37.6973, 15, 0.001)]
)
def test_tails_are_those_of_the_tables(statistic, freedom, tail):
    assert above(statistic, freedom) == pytest.approx(tail, rel=1e-4)


def test_power_is_what_a_simulation_finds():
    """Of the hardest frequencies at that distance: half of the classes too large, half too small."""
    tokens, distance = 2000, 0.07
    off = torch.tensor([1.0, -1.0]).repeat(CLASSES // 2) * 2 * distance / CLASSES
    generator = torch.Generator().manual_seed(0)
    found = torch.multinomial((1 / CLASSES + off).expand(1000, -1), tokens, True, generator=generator)
    counts = torch.stack([(found == each).sum(1) for each in range(CLASSES)], 1)
    share = sum(p_value(row) < SIGNIFICANCE for row in counts.tolist()) / 1000
    assert share == pytest.approx(power(distance, tokens, CLASSES - 1), abs=0.04)
    assert 0.5 < share < 0.99


def test_the_stated_distance_is_found_with_the_stated_power():
    for tokens in (100, 2000, 10**6):
        assert power(detectable(tokens, 15), tokens, 15) == pytest.approx(POWER, abs=1e-6)
    assert detectable(4 * 2000, 15) == pytest.approx(detectable(2000, 15) / 2, rel=1e-6)
    assert power(0.0, 2000, 15) == pytest.approx(0.001, rel=1e-6)
    assert detectable(1, 15) == 1.0


@pytest.fixture
def target():
    return tiny.target("llama")


def test_a_place_is_the_mass_of_what_is_likelier(target):
    """Against the law at every node, one by one; penalties follow the answer."""
    how = {**HOW, "top_k": 20, "frequency_penalty": 1.5}
    made = generate(target, PROMPTS[0], "vanilla", seed=3, **how)
    found = places(target, made, torch.Generator().manual_seed(0))
    assert len(found) == len(made.tokens)
    sampling = Sampling(temperature=1.0, top_k=20, frequency_penalty=1.5)
    sampler = Sampler([sampling], [made.prompt], target.vocab)
    for i, (token, place) in enumerate(zip(made.tokens, found, strict=True)):
        text = torch.tensor([[*made.prompt, *made.tokens[:i]]])
        law = sampler.law(target(chain(text), target.new_cache(1)).logits[:, -1])[0]
        before = float(law[law > law[token]].sum())
        assert before - 1e-6 <= place <= before + float(law[token]) + 1e-6
        sampler.observe(torch.tensor([token]), torch.tensor([True]))


@pytest.mark.parametrize("law", ["coupled", "multi-round"])
def test_exact_draws_pass(target, law):
    drafter = Vanilla() if law == "coupled" else tiny.eagle(target, proposal="sampled")
    classes = draw(target, drafter, PROMPTS, 0, 64, **HOW, seed=0)
    made = drawn("a", 1.0, law, 64, classes)
    assert made.tokens > 1500
    assert made.kept
    assert sum(made.classes) == made.tokens


def test_draws_of_the_drafter_fail(target, monkeypatch):
    """Every guess is accepted: the head's law instead of the target's."""
    monkeypatch.setattr(verify, "acceptance", lambda p, q, x: torch.ones(len(x), dtype=torch.float64))
    drafter = tiny.eagle(target, proposal="sampled")
    classes = draw(target, drafter, PROMPTS, 0, 64, **HOW, seed=0)
    assert not drawn("a", 1.0, drafter.law, 64, classes).kept


def test_another_temperature_fails(target):
    """Draws at 0.7 passed for draws at 1."""
    borders, classes = torch.Generator().manual_seed(0), [0] * CLASSES
    for made in generate(target, PROMPTS * 22, "vanilla", **{**HOW, "temperature": 0.7}):
        for place in places(target, replace(made, sampling=replace(made.sampling, temperature=1.0)), borders):
            classes[int(CLASSES * place)] += 1
    assert not drawn("a", 1.0, "coupled", 66, classes).kept
