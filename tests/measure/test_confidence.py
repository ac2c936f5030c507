"""Guesses by confidence, text by text, against the bins over all of them."""

import pytest

import tiny
from confidence import calibrate
from slipstream.engine.replay import record
from slipstream.measure.confidence import BINS, by_question
from slipstream.measure.datasets import Question
from slipstream.measure.runner import first_prompts

ASKED = [Question("f", str(i), "c", (f"abc {i}",)) for i in range(3)]


def test_texts_add_up_to_the_bins():
    target = tiny.target("llama")
    head = tiny.eagle(target, "chain-3")
    whole = calibrate(target, {"eagle": head}, ASKED, max_new_tokens=10).drafters["eagle"]
    recorded = record(target, first_prompts(target, ASKED), 10, head.taps, batch=20)
    columns, rows = by_question(head, recorded)
    assert len(rows) == 3
    sums = {name: sum(row[i] for row in rows) for i, name in enumerate(columns)}
    assert sum(sums[f"judged {b}"] for b in range(BINS)) == whole.tokens
    off = sum(abs(sums[f"confidence {b}"] - sums[f"accepted {b}"]) for b in range(BINS))
    assert off / whole.tokens == pytest.approx(whole.calibration_error, abs=1e-3)
