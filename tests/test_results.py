"""Results: every stored file is read, and written again as it was."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

import tiny
from slipstream import machine
from slipstream.engine.engine import Seconds
from slipstream.engine.generate import Generation
from slipstream.interop.parity import ParityReport
from slipstream.measure.cost import CostReport, cost_curve
from slipstream.measure.results import BenchReport, Certificate
from slipstream.measure.tune_report import TuneReport
from slipstream.training.synthesize import Answers

STORED = Path(__file__).parent.parent / "benchmarks" / "results"
KINDS = {"bench": BenchReport, "drafters": BenchReport, "tune": TuneReport}
KINDS |= {"exactness": Certificate, "certificate": Certificate}
FILES = {
    path.name: kind
    for name, kind in {**KINDS, "vllm_parity": ParityReport}.items()
    for path in sorted(STORED.glob(f"{name}*.json"))
    if path.name != "drafters_proposals.json"
}


@pytest.mark.parametrize(("name", "kind"), FILES.items(), ids=FILES)
def test_a_stored_result_is_read_and_written_as_it_was(name, kind):
    """Keys that changed their names, or that older versions did not write and newer ones would."""
    text = (STORED / name).read_text()
    result = kind.read(STORED / name)
    assert json.loads(result.to_json()) == json.loads(text)
    assert result.target in str(result) or kind is TuneReport


def test_every_kind_has_a_stored_result():
    assert len(FILES) > 15
    assert {*FILES.values()} == {BenchReport, Certificate, TuneReport, ParityReport}


@pytest.mark.parametrize("name", ["bench.json", "certificate.json", "vllm_parity.json", "tune_fp32.json"])
def test_a_notebook_shows_the_table_and_pandas_has_its_rows(name):
    """A wall of text at the end of a cell."""
    result = FILES[name].read(STORED / name)
    shown = ElementTree.fromstring(f"<body>{result._repr_html_()}</body>")
    (head,), body = shown.findall(".//thead/tr")[:1], shown.findall(".//tbody/tr")
    assert len(head) > 2
    assert body
    frame = pytest.importorskip("pandas") and result.to_pandas()
    assert len(frame) >= 1
    assert not any(isinstance(value, dict) for row in frame.to_dict("records") for value in row.values())
    if name == "bench.json":
        assert [*frame["drafter"]] == [row.drafter for row in result.results]
        assert [*frame["speedup.vanilla"]] == [row.speedup.vanilla for row in result.results]


def test_what_a_notebook_shows_is_escaped():
    """A question's or a model's name that is a script."""
    result = BenchReport.read(STORED / "bench.json").model_copy(update={"target": "<script>1</script>"})
    assert "<script" not in result._repr_html_()
    assert "&lt;script&gt;" in result._repr_html_()
    made = Generation([1], [2], "<b>&", "eos", [], Seconds())
    assert "&lt;b&gt;&amp;" in made._repr_html_()
    assert "prompt" not in repr(made)


def test_a_result_without_rows_is_one_row_and_pandas_may_be_missing(monkeypatch):
    made = Answers(schema=1, command="c", path="a.jsonl", lines=3)
    assert made._rows()[0]["lines"] == 3
    assert "<p" in made._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match="needs pandas, which is not installed: pip install pandas"):
        made.to_pandas()


def test_a_result_is_plotted_in_a_notebook(tmp_path):
    """The figure without a file; with a path, the file as well."""
    for name in ("bench.json", "tune_fp32.json"):
        figure = FILES[name].read(STORED / name).plot()
        assert figure._repr_png_().startswith(b"\x89PNG")
        assert figure.axes[0].get_xlabel()
    FILES[name].read(STORED / name).plot(str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_a_result_prints_its_table_and_is_read_back(tmp_path, capsys):
    report = cost_curve(tiny.target("llama"), contexts=(16,), batches=(1,))
    Console(width=100).print(report)
    print(report)
    shown = capsys.readouterr().out
    assert shown.count("one row reads weights at") == 2
    report.write(str(tmp_path / "costs.json"))
    assert CostReport.read(tmp_path / "costs.json") == report


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "it: "),
        ("{}", "schema: Field required"),
        ('{"schema": 1}', "Field required"),
        ("{", "Expecting"),
    ],
)
def test_another_file_is_refused_in_one_line(text, says):
    with pytest.raises(ValueError, match=says) as refused:
        BenchReport.from_json(text)
    assert "\n" not in str(refused.value)


def test_the_commit_is_never_that_of_the_work_around_an_installed_package(tmp_path, monkeypatch):
    """An environment inside a project's checkout: results named the project's commit, and its next commit
    kept a run from going on."""
    installed = tmp_path / ".venv" / "slipstream"
    installed.mkdir(parents=True)
    (installed / "machine.py").write_text("")
    (tmp_path / ".gitignore").write_text(".venv\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "work"]):
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(machine, "__file__", str(installed / "machine.py"))
    assert machine.versions()["commit"] == "unknown"
    subprocess.run(["git", "add", "-f", "."], cwd=tmp_path, check=True)
    assert machine.versions()["commit"].endswith("+changes")
