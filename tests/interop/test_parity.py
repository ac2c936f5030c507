"""Parity with vLLM: what its worker is given, and how its errors are told. vLLM itself is not run."""

import json
import re
from pathlib import Path

import pytest

import tiny
from slipstream.drafters.store import save_drafter
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


def test_answers_of_one_token_cannot_be_compared(target, head, tmp_path):
    python = tmp_path / "python"
    python.touch()
    with pytest.raises(ValueError, match="give a larger max_new_tokens"):
        parity(target, head, tiny.prompts(9), str(python), max_new_tokens=1)
