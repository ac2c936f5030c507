"""Here no time decides: a drafter that offers several trees gets them in turn, whatever they cost."""

import pytest

import tiny
from slipstream.engine import generate
from slipstream.targets import HFTarget


@pytest.fixture(autouse=True)
def restless(monkeypatch):
    monkeypatch.setattr(
        generate, "policy", lambda target, drafter, texts: tiny.Restless(drafter) if drafter.candidate_trees else None
    )


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny.target("llama")


@pytest.fixture(scope="module")
def answer(target: HFTarget) -> list[int]:
    """What plain decoding says to the first of `tiny.PROMPTS`, 40 tokens of it."""
    how = tiny.SAMPLED | tiny.ENDLESS
    return generate.generate(target, tiny.PROMPTS[0], max_new_tokens=40, **how).tokens
