"""Intervals of speed-ups."""

import pytest
import torch

from slipstream.measure.paired import Asked, interval, paired


def result(*questions):
    """By file, millions of tokens, and seconds."""
    return {
        f"{f}:{i}": Asked(file=f, new_tokens=round(1e6 * n), seconds=s)
        for i, (f, n, s) in enumerate(questions)
    }


def test_the_mean_is_of_the_files_ratios():
    """However many questions or tokens a file has."""
    ours = result(("a", 10, 1.0), ("a", 30, 1.0), ("b", 100, 10.0))
    theirs = result(("a", 10, 2.0), ("a", 10, 2.0), ("b", 100, 10.0))
    assert paired(ours, theirs).mean == pytest.approx((20 / 5 + 1) / 2)


def test_pairs_that_agree_are_sure_however_much_questions_differ():
    theirs = result(("a", 8, 1.0), ("a", 80, 2.0), ("a", 30, 5.0))
    ours = result(("a", 8, 0.5), ("a", 80, 1.0), ("a", 30, 2.5))
    found = paired(ours, theirs)
    assert found.interval == pytest.approx((2, 2))
    assert str(found) == "2.00 [2.00, 2.00]"


def test_the_interval_is_as_wide_as_a_means():
    """Of independent speeds it is 1.96 standard errors to either side, of few questions and of two files,
    too."""
    generator = torch.Generator().manual_seed(0)
    speeds = [(1.5 + 0.3 * torch.randn(count, generator=generator)) for count in (8, 40)]
    ours = result(*(("ab"[f], s, 1.0) for f, file in enumerate(speeds) for s in file.tolist()))
    theirs = result(*(("ab"[f], 1, 1.0) for f, file in enumerate(speeds) for _ in file.tolist()))
    low, high = paired(ours, theirs).interval
    error = sum(float(file.var()) / len(file) for file in speeds) ** 0.5 / 2
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_one_question_says_nothing_of_others():
    assert (
        paired(
            result(("a", 8, 1.0), ("b", 8, 1.0), ("b", 9, 1.0)),
            result(*[("a", 8, 2.0), ("b", 8, 1.0), ("b", 9, 1.0)]),
        ).interval
        is None
    )
    assert interval(torch.arange(101.0)) == pytest.approx((2.5, 97.5))
