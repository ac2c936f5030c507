"""Values of the wrong type from Python and from the shell: one line, or what was meant."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from tests import tiny

import slipstream
from slipstream.measure.datasets import Question

QUESTION = Question("f", "1", "chat", ("a b c a b",))


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama")


def refused(code: str) -> list[str]:
    """What a fresh process says, in which the annotations are not checked."""
    given = [sys.executable, "-c", f"import slipstream, slipstream.files as files\n{code}"]
    return subprocess.run(given, capture_output=True, timeout=120, text=True).stdout.splitlines()


def test_a_number_is_no_path():
    """It would be taken for a descriptor: 1 closed the standard output."""
    said = refused(
        "for use in (slipstream.Certificate.read, lambda p: files.write_json(p, {}), files.check_writable):\n"
        "    for path in (1, True, 5.0):\n"
        "        try: use(path)\n"
        "        except ValueError as error: print(error)"
    )
    assert len(said) == 9
    assert all("is named by a " in line for line in said)


def test_none_among_temperatures():
    said = refused(
        "for call in (slipstream.certify, slipstream.tune, slipstream.sweep):\n"
        "    try: call('nowhere', temperatures=[0.0, None])\n"
        "    except ValueError as error: print(error)"
    )
    assert said == ["temperatures holds None: leave it out"] * 3


def test_seeds_of_numpy_and_no_progress(target):
    how = {"max_new_tokens": 4, "temperatures": [1.0], "draws": 1, "progress": None}
    made = [slipstream.certify(target, "ngram", [QUESTION], seed=seed, **how) for seed in (np.int64(3), 3)]
    assert made[0].seed == 3
    assert made[0].results == made[1].results


def test_a_target_is_copied_but_not_pickled(target):
    assert copy.copy(target).shadow_model is target.shadow_model
    with pytest.raises(ValueError, match="cannot be pickled: load it in each process"):
        pickle.dumps(target)


def test_a_text_too_long_for_a_tokenizer(tmp_path, target):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "' + "a" * (2**22 + 1) + '"}\n')
    with pytest.raises(ValueError, match=r"line 1 \(it has a text of 4,194,305 characters: give at most"):
        slipstream.inventory(target, str(rows))
    with pytest.raises(ValueError, match="the prompt has a text of 4,194,305 characters"):
        slipstream.generate(target, "a" * (2**22 + 1), "ngram")


@pytest.mark.parametrize("stderr", ["/dev/full", "closed pipe"])
def test_a_run_whose_messages_cannot_be_written_goes_on(tmp_path, stderr):
    code = (
        "import sys; from slipstream.cli import main; from slipstream.cli.common import err, out\n"
        "import slipstream.cli as cli\n"
        "def app(**how): err.print('working'); print('result'); err.print('done'); return 0\n"
        "cli.app = app; main()"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") if stderr == "/dev/full" else os.fdopen(writer, "w") as stream:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stream, timeout=120
        )
    assert (ended.returncode, ended.stdout) == (0, b"result\n")


def test_a_host_of_invalid_bytes():
    command = [sys.executable, "-m", "slipstream", "serve", "--host", b"\xff\xfe", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, timeout=120)
    assert ended.returncode == 2
    assert b"Traceback" not in ended.stderr
    assert ended.stderr.count(b"\n") == 1
    assert b"cannot listen at" in ended.stderr
