"""Pictures of runs: what they say, and their sizes."""

from pathlib import Path

import matplotlib
import pytest

import tiny
from slipstream.cli import main
from slipstream.measure.bench import bench, sweep
from slipstream.measure.datasets import Question
from slipstream.measure.report.pictures import draw_run, draw_sweep
from slipstream.measure.results import BenchReport

STORED = Path(__file__).parents[3] / "benchmarks" / "results" / "bench_auto.json"
ASKED = [Question("f", str(i), "ab"[i % 2], (f"a b {i}",)) for i in range(4)]


def test_a_run_is_drawn_by_task_depth_and_round(tmp_path):
    """Of a stored run without categories by file, and of a run of now by category."""
    draw_run(BenchReport.read(STORED), str(tmp_path / "old.svg"))
    text = (tmp_path / "old.svg").read_text()
    words = ("Speed-up by task", "Acceptance by depth", "Accepted lengths", "Time split", "gsm8k.jsonl")
    assert all(word in text for word in words)
    assert len(text) < 40_000
    draw_run(bench(tiny.target("llama"), "ngram", ASKED, max_new_tokens=6), str(tmp_path / "new.png"))
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
    draw_run(BenchReport.read(STORED), str(tmp_path / "old.svg"))
    assert {name: matplotlib.rcParams._get(name) for name in matplotlib.rcParams} == before


def test_a_sweep_is_drawn_by_texts_at_once(tmp_path):
    made = sweep([tiny.target("llama")], "ngram", ASKED, batches=[1, 2], max_new_tokens=6)
    draw_sweep(made, str(tmp_path / "sweep.svg"))
    text = (tmp_path / "sweep.svg").read_text()
    assert all(word in text for word in ("Throughput", "texts at once", "ngram, T = 0"))
    assert len(text) < 60_000
    with pytest.raises(ValueError, match="cannot be written"):
        draw_sweep(made, "/proc/none.svg")
