"""Parity with vLLM: what its worker is given, and how its errors are told. vLLM itself is not run."""

import json
import re
from copy import deepcopy
from pathlib import Path

import pytest

import slipstream.interop.parity as module
import tiny
from slipstream.drafters import load_drafter
from slipstream.drafters.store import save_drafter
from slipstream.engine.generate import generate
from slipstream.interop.parity import WORKER, parity


@pytest.fixture
def head(target, tmp_path) -> str:
    drafter = tiny.eagle(target, "chain-2")
    save_drafter(tmp_path / "head", "eagle", target, *drafter.pack(), {}, dtype=None)
    return str(tmp_path / "head")


def test_the_worker_is_given_all_that_it_reads(target, head, tmp_path):
    """It read a precision that nobody gave, and said no word of it."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncp $2 {tmp_path}/job.json\necho engine failed >&2\nexit 3\n")
    python.chmod(0o755)
    prompts = tiny.prompts(9, 5)
    with pytest.raises(ValueError, match=r"stopped with exit code 3: engine failed"):
        parity(target, head, prompts, str(python), max_new_tokens=7)
    job = json.loads((tmp_path / "job.json").read_text())
    assert {*re.findall(r'job\["(\w+)"\]', Path(WORKER).read_text())} <= job.keys()
    assert job["dtype"] == target.dtype_name
    assert job["window"] >= 9 + 7 + 3


@pytest.mark.parametrize(
    ("off", "other", "agrees"),
    [
        (0.0, False, True),
        (0.02, False, True),
        (0.03, False, False),
        (-0.03, False, False),
        (0.0, True, False),
    ],
)
def test_parity_is_of_acceptance_and_of_texts(target, head, tmp_path, monkeypatch, off, other, agrees):
    """Neither a position that accepts 0.03 more or less passes, nor one token that is no tie."""
    prompts, drafter = tiny.prompts(9, 5), load_drafter(head, target)
    texts = [generate(target, prompt, drafter, max_new_tokens=7).tokens for prompt in prompts]
    said = deepcopy(texts)
    said[1][-1] = (said[1][-1] + other) % target.vocab
    python = tmp_path / "python"
    python.touch()
    monkeypatch.setattr(module, "_accepted", lambda *_: (5, [0.6, 0.4 + off]))
    served = {"tokens": said, "acceptance": [0.6, 0.4], "drafts": 5}
    monkeypatch.setattr(module, "_served", lambda *_: ({"tokens": texts}, served, {}))
    monkeypatch.setattr(module, "first_difference", lambda *_: None)
    report = parity(target, head, prompts, str(python), max_new_tokens=7, draft_tokens=2)
    assert report.agrees == agrees
    assert report.difference == [0.0, off]
    strayed = [(each.answer, each.question, each.position) for each in report.divergences]
    assert strayed == ([("vLLM with the head", 1, len(texts[1]) - 1)] if other else [])


def test_answers_of_one_token_cannot_be_compared(target, head, tmp_path):
    python = tmp_path / "python"
    python.touch()
    with pytest.raises(ValueError, match="give a larger max_new_tokens"):
        parity(target, head, tiny.prompts(9), str(python), max_new_tokens=1)
