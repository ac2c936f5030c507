"""report: the page that it writes, and what it refuses."""

from pathlib import Path

RUN = str(Path(__file__).parents[2] / "benchmarks" / "results" / "bench_auto.json")


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
