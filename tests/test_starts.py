"""benchmarks/starts.py with a tiny model, and where a process fails."""

import pytest

import starts
import tiny
from slipstream.kernels import ops as kernels


@pytest.mark.skipif(not kernels.available(), reason="there is no C++ compiler")
def test_starts_are_counted_behind_the_first(tmp_path):
    tiny.reference("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    (made,) = starts.measure([f"{tmp_path}:int8"], ["."], 1).starts
    assert len(made.seconds) == len(made.peak_mib) == 1
    assert 0 < made.seconds[0] < starts.LONGEST
    assert made.peak_mib[0] > 100


def test_a_start_that_fails_says_why(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere with \. did not start: .*Unknown target: './nowhere'"):
        starts.measure(["./nowhere"], ["."], 1)
