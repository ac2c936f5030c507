"""Here no time decides: a drafter that offers several trees gets them in turn, whatever they cost."""

import pytest

import tiny
from slipstream.decode import generate
from slipstream.targets import HFTarget


@pytest.fixture(autouse=True)
def restless(monkeypatch):
    monkeypatch.setattr(
        generate, "policy", lambda target, drafter, texts: tiny.Restless(drafter) if drafter.rungs else None
    )


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny.target("llama")
