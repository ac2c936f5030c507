"""bench, reproduce and report: several runs, runs that go on, and the page of them."""

import json
from pathlib import Path

import pytest

from slipstream.measure.results import BenchReport, Sweep

RUN = str(Path(__file__).parents[2] / "benchmarks" / "results" / "bench_auto.json")


@pytest.fixture
def asked(tmp_path) -> str:
    """Spec-Bench's and MT-bench's form: categories, several turns, and keys that are not read."""
    path = tmp_path / "question.jsonl"
    lines = [
        {"question_id": i, "category": "ab"[i % 2], "turns": ["abc " * i], "reference": []} for i in (1, 2, 3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_several_runs_make_one_file_and_a_page(run, tiny_options, asked, tmp_path):
    path, page = str(tmp_path / "sweep.json"), str(tmp_path / "page.html")
    how = ["bench", *tiny_options, "--questions", asked, "--drafter", "ngram", "--json", path]
    code, out, _ = run(*how, "--temperature", "0", "--temperature", "1", "--batch", "1", "--batch", "2")
    assert code == 0
    assert out.count("ngram") == 5  # a line of each run, and the verdict
    made = Sweep.read(path)
    assert [(each.temperature, each.batch) for each in made.runs] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    code, _, err = run(*how, "--temperature", "0.5", "--resume")  # one run more: "no BenchReport", it said
    assert code == 0, err
    assert [each.temperature for each in Sweep.read(path).runs] == [0, 0, 1, 1, 0.5]
    assert made.command.startswith("slipstream bench")
    assert run("report", path, "--out", page)[0] == 0
    text = Path(page).read_text()
    assert "T = 1, 2 at once" in text
    assert '"tasks":{"question.jsonl":' in text
    assert '"a":{"mean"' in text


def test_a_killed_bench_goes_on(run, tiny_options, asked, tmp_path, monkeypatch):
    path = str(tmp_path / "bench.json")
    how = ["bench", *tiny_options, "--questions", asked, "--drafter", "ngram", "--json", path]
    stored, write = [], BenchReport.write
    monkeypatch.setattr(BenchReport, "write", lambda self, to: (write(self, to), stored.append(self)))
    assert run(*how, "--resume")[0] == 0
    assert [each.stopped for each in stored] == ["not finished"] * 3 + [None]
    assert not stored[-1].turns
    write(stored[0], path)  # as after kill -9
    stored.clear()
    code, out, _ = run(*how, "--resume")
    assert (code, "ngram" in out, len(stored)) == (0, True, 3)
    assert BenchReport.read(path).prompts == [f"question.jsonl:{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        (None, (), "--resume goes on with the run in --json: give --json FILE"),
        ('{"schema": 2}', (), "it has schema 2"),
        ('{"runs": []}', (), "this JSON is no BenchReport"),
        ('{"results": []}', ("--batch", "1", "--batch", "2"), "this JSON is no Sweep"),
        ("", ("--seed", "1"), "seed was 0, and is 1"),
    ],
)
def test_what_bench_cannot_go_on_with(run, tiny_options, asked, tmp_path, text, more, says):
    path = tmp_path / "bench.json"
    how = ["bench", *tiny_options, "--questions", asked, "--limit", "1", "--drafter", "ngram"]
    if text == "":
        assert run(*how, "--json", str(path))[0] == 0
    elif text:
        path.write_text(text)
    code, _, err = run(*how, *more, "--resume", *(["--json", str(path)] if text is not None else []))
    assert (code, err.count("\n")) == (2, 1), err
    assert says in err


def test_reproduce_prints_writes_and_lists(run, tiny_options, asked, tmp_path):
    path = str(tmp_path / "tables.json")
    how = ["reproduce", "bita-table-2", *tiny_options, "--set", f"mt_bench={asked}", "--json", path]
    code, out, err = run(*how)
    assert code == 0, err
    assert "about" in err
    assert "Lookahead" in out
    assert "bita is not here" in out
    assert "not measured: BiTA is faster than Lookahead" in out.replace("\n", " ")
    code, out, _ = run("reproduce", "--list", "--json", path)
    assert code == 0
    assert "1 of 4 figures" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["eagle-table-9"], "Unknown table or figure: 'eagle-table-9'. Did you mean 'eagle-table-"),
        (["--set", "gsm8k"], "--set gsm8k: give NAME=PATH"),
        (
            ["--set", "xsum=a.jsonl", "--set", "xsum=b.jsonl"],
            "--set xsum is given twice, a.jsonl and b.jsonl",
        ),
        (["--set", "gsm=mt_bench"], "Unknown set: 'gsm'"),
        (["eagle-table-1", "--set", "gsm8k=missing.jsonl"], "missing.jsonl cannot be read"),
        (["--head", "egle=eagle"], "Unknown head: 'egle'"),
        (["--resume"], "give --json FILE"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_bad_words_of_reproduce(run, words, says):
    code, _, err = run("reproduce", *words)
    assert (code, err.count("\n")) == (2, 1), err
    assert says in err


def test_report_writes_a_page_of_a_run_and_an_answer(run, tiny_options, tmp_path):
    trace, out = tmp_path / "answer.jsonl", tmp_path / "report.html"
    code, _, _ = run("generate", "abc abc", *tiny_options, "--trace", str(trace))
    assert code == 0
    code, _, err = run("report", RUN, str(trace), "--out", str(out))
    assert (code, str(out) in err.replace("\n", "")) == (0, True)
    made = out.read_text()
    assert made.startswith("<!doctype html>")
    assert "bench_auto.json, answer.jsonl" in made
    code, shown, _ = run("report", RUN, str(trace), "--out", "-")
    assert (code, shown) == (0, made)


def test_a_mistake_is_one_line_and_leaves_the_page_alone(run, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("earlier")
    odd = tmp_path / "odd.json"
    odd.write_text('{"schema": 99}')
    for given, says in (
        (str(odd), "schema 99"),
        (str(tmp_path / "none"), "cannot be read"),
        (str(tmp_path), "directory"),
    ):
        code, _, err = run("report", RUN, given, "--out", str(out))
        assert (code, says in err, err.strip().count("\n")) == (2, True, 0)
    code, _, err = run("report", str(odd), "--out", str(odd))
    assert (code, "read by this command" in err) == (2, True)
    assert out.read_text() == "earlier"
