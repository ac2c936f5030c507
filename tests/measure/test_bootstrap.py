"""Intervals of speed-ups."""

import math

import pytest
import torch

from slipstream.measure.bootstrap import QuestionResult, interval, paired, student


def result(*questions):
    """By file, millions of tokens, and seconds."""
    return {
        f"{f}:{i}": QuestionResult(file=f, new_tokens=round(1e6 * n), seconds=s)
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
    """Of independent speeds it is as many standard errors to either side as Student's t has it, of few
    questions and of two files, too."""
    generator = torch.Generator().manual_seed(0)
    speeds = [(1.5 + 0.3 * torch.randn(count, generator=generator)) for count in (8, 40)]
    ours = result(*(("ab"[f], s, 1.0) for f, file in enumerate(speeds) for s in file.tolist()))
    theirs = result(*(("ab"[f], 1, 1.0) for f, file in enumerate(speeds) for _ in file.tolist()))
    low, high = paired(ours, theirs).interval
    error = sum(float(file.var()) / len(file) for file in speeds) ** 0.5 / 2
    assert high - low == pytest.approx(2 * 2.01 * error, rel=0.05)


@pytest.mark.parametrize(("count", "files"), [(3, 1), (5, 1), (3, 4)])
def test_it_holds_as_often_as_it_says(count, files):
    """Of three questions 95 % covered 74 %."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(200):
        speeds = (0.3 * torch.randn(files, count, generator=generator)).exp()
        asked = [(str(f), each) for f, file in enumerate(speeds) for each in file.tolist()]
        low, high = paired(
            result(*((f, 1, 1 / each) for f, each in asked)), result(*((f, 1, 1.0) for f, _ in asked))
        ).interval
        held += low <= math.exp(-(0.3**2) / 2) <= high
    assert held >= 0.86 * 200


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (8, 2.306), (60, 2.0)]
)
def test_students_quantiles_are_those_of_tables(freedom, quantile):
    assert student(freedom) == pytest.approx(quantile, rel=2e-3)


def test_one_question_says_nothing_of_others():
    assert (
        paired(
            result(("a", 8, 1.0), ("b", 8, 1.0), ("b", 9, 1.0)),
            result(("a", 8, 2.0), ("b", 8, 1.0), ("b", 9, 1.0)),
        ).interval
        is None
    )
    assert interval(torch.arange(101.0), 10**6) == pytest.approx((2.5, 97.5), rel=1e-4)
