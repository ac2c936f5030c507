"""Calls that people make, replayed in a process of its own, as many as take less than three minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny

SCRIPT = Path(__file__).parent / "replay.py"


@pytest.mark.skipif(tiny.COMPILED, reason="a graph for every call")
def test_no_call_ends_in_a_traceback_a_wrong_result_or_a_lost_file():
    """A traceback; a run that does not end; success on a wrong result; a file changed that nobody named."""
    env = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(SCRIPT), "--within", "150"]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    count = int(done.stdout.splitlines()[-1].split()[0])
    assert count > 200, done.stdout[-200:]
