"""The verdicts that bench ends with, and pictures of runs: what they say, and their sizes."""

from pathlib import Path

import matplotlib
import pytest

import tiny
from slipstream.cli import main
from slipstream.measure.bench import bench, sweep
from slipstream.measure.datasets import Question
from slipstream.measure.results import BenchReport, DrafterResult, Speedup, Sweep

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "bench_auto.json"
ASKED = [Question("f", str(i), "ab"[i % 2], (f"a b {i}",)) for i in range(4)]


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


def test_a_run_is_drawn_by_task_depth_and_round(tmp_path):
    """Of a stored run without categories by file, and of a run of now by category."""
    BenchReport.read(STORED).plot(str(tmp_path / "old.svg"))
    text = (tmp_path / "old.svg").read_text()
    words = ("Speed-up by task", "Acceptance by depth", "Accepted lengths", "Time split", "gsm8k.jsonl")
    assert all(word in text for word in words)
    assert len(text) < 40_000
    bench(tiny.target("llama"), "ngram", ASKED, max_new_tokens=6).plot(str(tmp_path / "new.png"))
    assert (tmp_path / "new.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_picture_of_another_form_is_refused_before_the_work(command, tmp_path, monkeypatch, capsys):
    """What was called .pdf held SVG."""
    path = str(tmp_path / "made.pdf")
    monkeypatch.setattr("sys.argv", ["slipstream", command, "--plot", path])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"picture {path} is to be .pdf: give a name that ends in .svg or .png" in capsys.readouterr().err


def test_pictures_leave_the_callers_own_style_and_backend(tmp_path):
    """A notebook that showed nothing behind `report.draw`."""
    before = {name: matplotlib.rcParams._get(name) for name in matplotlib.rcParams}
    BenchReport.read(STORED).plot(str(tmp_path / "old.svg"))
    assert {name: matplotlib.rcParams._get(name) for name in matplotlib.rcParams} == before


def test_a_sweep_is_drawn_by_texts_at_once(tmp_path):
    made = sweep([tiny.target("llama")], "ngram", ASKED, batches=[1, 2], max_new_tokens=6)
    made.plot(str(tmp_path / "sweep.svg"))
    text = (tmp_path / "sweep.svg").read_text()
    assert all(word in text for word in ("Throughput", "texts at once", "ngram, T = 0"))
    assert len(text) < 60_000
    with pytest.raises(ValueError, match="cannot be written"):
        made.plot("/proc/none.svg")
