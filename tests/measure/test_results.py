"""The verdicts that bench ends with."""

import pytest

from slipstream.measure.results import BenchReport, DrafterResult, Speedup, Sweep


def _row(drafter: str, *interval: float) -> DrafterResult:
    return DrafterResult.model_construct(
        drafter=drafter,
        speedup=Speedup(vanilla=sum(interval) / 2 if interval else 1.5, hf_generate=1.0),
        intervals={"vanilla": interval or None},
    )


def _report(command: str, *rows: DrafterResult) -> BenchReport:
    return BenchReport.model_construct(command=command, results=[_row("vanilla", 1, 1), *rows])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (("auto", 1.7, 2.1), "auto is faster, 1.90 [1.70, 2.10] times plain decoding"),
        (
            ("auto", 0.9, 1.1),
            "auto is undecided, 1.00 [0.90, 1.10] times plain decoding: the interval holds 1",
        ),
        (("auto",), "auto is undecided, 1.50 times plain decoding: that is one question, ask more"),
        (
            ("eagle:tree=fig9", 0.7, 0.9),
            "slower here, 0.80 [0.70, 0.90] times plain decoding: try slipstream",
        ),
        (("ngram", 0.7, 0.9), "try --drafter auto"),
        (("one of Python's", 0.7, 0.9), "try --drafter auto"),
    ],
)
def test_bench_ends_with_a_verdict(row, says):
    """A table of figures left it to the reader to say whether 0.94 [0.80, 1.07] is good news."""
    (told,) = _report("", _row(*row)).verdicts()
    assert says in told.plain


def test_what_to_try_is_for_the_model_that_was_measured():
    (told,) = _report("slipstream bench --target ./m --quantize int8", _row("eagle", 0.7, 0.9)).verdicts()
    assert told.plain.endswith("try slipstream tune --drafter eagle --target ./m --quantize int8")


def test_a_sweep_counts_its_verdicts():
    runs = [_report("", _row("auto", *each)) for each in ((1.7, 2.1), (1.2, 1.4), (0.9, 1.1))]
    (told,) = Sweep.model_construct(runs=runs).verdicts()
    assert told.plain == "auto is faster than plain decoding in 2 of 3 runs, slower in 0, undecided in 1"
