"""Predicted τ is what the record says: figures that an earlier prediction, without a session, gave."""

import pytest
import torch

import tiny
from slipstream.drafters.suffix import NGram
from slipstream.engine.generate import generate
from slipstream.engine.replay import decoded, predict, record
from slipstream.engine.request import mean_accepted_length

PROMPTS = tiny.prompts(9, 4, 14, 6)
# drafter: temperature, committed tokens, rounds, and rounds that accept as deep as 1, 2, …
KNOWN = {
    "eagle": (0.0, 144, 131, [13, 0, 0]),
    "fasteagle": (0.0, 144, 137, [6, 1, 0]),
    "ngram": (0.0, 144, 126, [10, 4, 2, 1, 1, 0, 0]),
    "glide": (0.0, 144, 129, [15, 0, 0]),
    "draft model": (0.0, 144, 143, [1, 0, 0]),
    "eagle, noise": (1.0, 120, 106, [13, 1, 0, 0, 0]),
    "fasteagle, noise": (1.0, 120, 112, [8, 0, 0]),
}


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama")


def made(name, target):
    return {
        "eagle": lambda: tiny.eagle(target, "dynamic-3x4x14"),
        "fasteagle": lambda: tiny.fasteagle(target, "backbone-3x4"),
        "ngram": lambda: NGram(shortest=1),
        "glide": lambda: tiny.glide(target),
        "draft model": lambda: tiny.draft_model(target, "chain-3"),
        "eagle, noise": lambda: tiny.eagle(target, "fig9", "noise"),
        "fasteagle, noise": lambda: tiny.fasteagle(target, "best-first-3x8", "noise"),
    }[name]()


@pytest.mark.parametrize("name", KNOWN)
def test_predictions_are_those_of_the_rounds_that_they_replaced(target, name):
    """Another count of tokens past an answer's end, other noise, or the features of another row."""
    temperature, committed, rounds, reached = KNOWN[name]
    drafter = made(name, target)
    recorded = record(target, PROMPTS, 40, drafter.taps, 3, temperature)
    predicted = predict(drafter, recorded)
    assert (int(predicted.committed.sum()), predicted.rounds) == (committed, rounds)
    assert predicted.acceptance == [n / rounds for n in reached]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_over_a_record_are_those_of_decoding(target, temperature):
    """Texts of different length leave the session at different rounds."""
    drafter = tiny.eagle(target, "dynamic-3x4x14", "noise" if temperature else "top-k")
    recorded = record(target, PROMPTS, 30, drafter.taps, 4, temperature)
    answers = generate(target, PROMPTS, drafter, max_new_tokens=30, temperature=temperature)
    predicted, again = predict(drafter, recorded), decoded(drafter, recorded)
    assert torch.equal(predicted.committed, again.committed)
    assert predicted.tau == pytest.approx(mean_accepted_length([r for a in answers for r in a.rounds]))


def test_what_a_record_cannot_judge_is_refused(target):
    """A known text matches Σ p·q of what is sampled, of which Σ min(p, q) is accepted."""
    sampled = tiny.eagle(target, "chain-3", "sampled")
    recorded = record(target, PROMPTS[:2], 8, sampled.taps, temperature=1.0)
    with pytest.raises(
        ValueError, match=r"proposal=sampled accepts .*judge it by decoding \(bench\)"
    ) as error:
        predict(sampled, recorded)
    assert "\n" not in str(error.value)
    assert decoded(sampled, recorded).rounds > 0
    greedy = record(target, PROMPTS[:2], 8, sampled.taps)
    assert predict(sampled, greedy).tau == predict(tiny.eagle(target, "chain-3"), greedy).tau
    with pytest.raises(ValueError, match="guesses in the target's own passes"):
        predict(tiny.bita(target), recorded)


def test_a_record_needs_an_answer_of_two_tokens(target):
    with pytest.raises(ValueError, match="every prompt is answered by the end token at once"):
        record(target, PROMPTS[:1], 1, ())
