"""Laws through arms that were made by them are found again, and arms of one size are told from others."""

import numpy as np
import pytest

import growth

TOKENS = np.array([6e4, 1.2e5, 2.4e5, 4.8e5, 9.6e5])


def test_laws_are_those_that_made_the_points():
    found, law = growth.steady(TOKENS, 1 + 0.1 * np.log2(TOKENS / 6e4))
    assert found == pytest.approx({"gain": 0.1})
    assert law(np.array([1.92e6])) == pytest.approx([1.5])
    found, law = growth.levelling(TOKENS, 3 - 1.2 * (TOKENS / 1e6) ** -0.2)
    assert found == pytest.approx({"limit": 3, "power": 0.2})
    assert law(np.array([1e6])) == pytest.approx([1.8])


def test_the_longest_arms_are_asked_of_the_shorter_ones(monkeypatch):
    """Seeds, whose shuffles leave other numbers of tokens, taken for arms of their own."""
    tokens = np.append(TOKENS, 0.98 * TOKENS[-1])
    taus = np.append(1 + 0.1 * np.log2(TOKENS / 6e4), 1.5)
    taus[-2] = 1.42
    monkeypatch.setattr(growth.HeadsReport, "model_validate", lambda result: result)
    monkeypatch.setattr(growth, "arms", lambda report: [("eagle", "chain-3", tokens, taus)])
    laws = growth.growth({})["eagle"]["chain-3"]
    assert laws["spread_of_seeds"] == pytest.approx(0.08)
    assert laws["steady"]["miss"] == pytest.approx(1.4 - 1.46, abs=0.01)
