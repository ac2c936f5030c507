"""demo, generate, bench, certify, tune and doctor: what they print and write."""

import json
from functools import partial

import pytest
import torch

from slipstream.engine.generate import LAWS
from slipstream.measure import cost
from slipstream.measure.doctor import machine_checks
from slipstream.measure.doctor.diagnosis import Diagnosis
from slipstream.measure.results import Certificate


def test_generate_prints_the_answer_and_writes_json_and_trace(run, tiny_options, tmp_path):
    out_json, trace = tmp_path / "out.json", tmp_path / "trace.jsonl"
    code, out, err = run("generate", "abc abc", *tiny_options, "--json", str(out_json), "--trace", str(trace))
    made = json.loads(out_json.read_text())
    assert code == 0
    assert out == made["text"] + "\n"
    assert len(made["tokens"]) == 8
    assert "τ" in err
    assert len(trace.read_text().splitlines()) == made["target_passes"]


def test_generate_prints_nothing_of_a_stop_string(run, tiny_options, tmp_path):
    """The string that ended an answer, and what came with it, stood on the screen and not in the text."""
    code, whole, _ = run("generate", "abc abc", *tiny_options)
    assert code == 0
    code, out, err = run("generate", "abc abc", *tiny_options, "--stop", whole[3:5])
    assert (code, out) == (0, whole[: whole.index(whole[3:5])] + "\n")
    assert "(stop)" in err


def test_generate_keeps_to_a_grammar(run, tiny_options, tmp_path):
    """Of all four kinds, and what is wrong with one is a line."""
    schema, lark, wrong = tmp_path / "schema.json", tmp_path / "sum.lark", tmp_path / "wrong.json"
    schema.write_text('{"enum": [12, 345]}')
    lark.write_text('start: "x" start "y" | "z"')
    wrong.write_text('{"type": "objekt"}')
    for option, value, allowed in (
        ("--json-schema", str(schema), ("12", "345")),
        ("--grammar", str(lark), tuple("x" * n + "z" + "y" * n for n in range(4))),
        ("--regex", "(ab|cd)e?", ("ab", "cd", "abe", "cde")),
        ("--choice", "no", ("no", "maybe")),
    ):
        more = ["--choice", "maybe"] if option == "--choice" else []
        code, out, err = run("generate", "abc abc", *tiny_options, option, value, *more)
        assert code == 0, err
        assert any(text.startswith(out.strip()) for text in allowed), out
    for words, says in (
        (["--json-schema", str(wrong)], "json_schema cannot be read"),
        (["--json-schema", str(tmp_path / "none.json")], "none.json cannot be read"),
        (["--regex", "a", "--choice", "b"], "regex and choice are given"),
    ):
        code, _, err = run("generate", "abc abc", *tiny_options, *words)
        assert (code, says in err) == (2, True), err


def test_sampling_without_a_temperature_is_said(run, tiny_options):
    """Options that change nothing, in silence."""
    _, _, err = run("generate", "abc abc", *tiny_options, "--top-p", "0.5")
    assert "at temperature 0 nothing is sampled: --top-p without effect" in err
    _, _, err = run("generate", "abc abc", *tiny_options, "--top-p", "0.5", "--temperature", "1")
    assert "without effect" not in err


def test_a_mistake_leaves_an_earlier_trace_alone(run, tiny_options, tmp_path):
    """A trace opened for writing before the prompt was looked at: the earlier one was gone."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("earlier\n")
    code, _, _ = run("generate", " ", *tiny_options, "--trace", str(trace))
    assert code == 2
    assert trace.read_text() == "earlier\n"
    assert list(tmp_path.iterdir()) == [trace]


def test_bench_and_certify_write_json_and_print_a_table(run, tiny_options, questions, tmp_path):
    path = tmp_path / "bench.json"
    code, out, _ = run(
        "bench", *tiny_options, "--questions", questions, "--drafter", "ngram", "--json", str(path)
    )
    assert code == 0
    assert "ngram" in out
    assert [row["drafter"] for row in json.loads(path.read_text())["results"]] == ["vanilla", "ngram"]
    path = tmp_path / "certificate.json"
    code, out, _ = run("certify", *tiny_options, "--questions", questions, "--json", str(path))
    assert code == 0
    assert "certified" in out
    assert json.loads(path.read_text())["certified"] is True


def test_a_killed_certify_goes_on(run, tiny_options, questions, tmp_path, monkeypatch):
    """kill -9 lets nothing be written at the end: each piece is in the file before the next begins."""
    path = tmp_path / "certificate.json"
    how = ["certify", *tiny_options, "--questions", questions, "--drafter", "ngram", "--draws", "16"]
    how += ["--json", str(path)]
    stored = []
    write = Certificate.write
    monkeypatch.setattr(Certificate, "write", lambda self, to: (write(self, to), stored.append(self)))
    assert run(*how, "--resume")[0] == 0  # there is no file yet: it begins
    assert [each.stopped for each in stored] == ["not finished"] * 4 + [None]
    write(stored[1], str(path))
    stored.clear()
    code, out, _ = run(*how, "--resume")
    assert (code, "certified" in out, len(stored)) == (0, True, 3)
    assert Certificate.read(path).certified


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        (None, (), "--resume goes on with the run in --json: give --json FILE"),
        ('{"schema": 2}', (), "it has schema 2"),
        ('{"results": []}', (), "this JSON is no Certificate"),
        ("", ("--seed", "1"), "seed was 0, and is 1"),
        ("", ("--drafter", "suffix"), "drafters are others"),
    ],
)
def test_what_certify_cannot_go_on_with(run, tiny_options, questions, tmp_path, text, more, says):
    path = tmp_path / "certificate.json"
    how = ["certify", *tiny_options, "--questions", questions, "--drafter", "ngram", "--draws", "8"]
    if text == "":
        assert run(*how, "--json", str(path))[0] == 0
    elif text:
        path.write_text(text)
    code, _, err = run(*how, *more, "--resume", *(["--json", str(path)] if text is not None else []))
    assert (code, err.count("\n")) == (2, 1), err
    assert says in err


def test_certify_fails_where_a_token_is_not_explained(run, tiny_options, questions, monkeypatch):
    def gullible(tree, node, logits, position, sampler):
        """Accepts whatever is drafted."""
        token = sampler.draw(sampler.scores(logits), position)
        drafted = (tree.parent_slots() == node[:, None]) & (torch.arange(tree.nodes) > 0) & (tree.tokens >= 0)
        slot = drafted.int().argmax(1)
        return torch.where(drafted.any(1), slot, -1), torch.where(
            drafted.any(1), tree.tokens[:, slot[0]], token
        )

    monkeypatch.setitem(LAWS, "coupled", gullible)
    code, out, _ = run("certify", *tiny_options, "--questions", questions)
    assert code == 1
    assert "NOT certified" in out


def test_demo_shows_both_answers_and_the_figures(run, tiny_options, questions):
    code, out, _ = run("demo", *tiny_options, "--questions", questions)
    assert code == 0
    assert all(word in out for word in ("plain", "auto", "the same text", "τ", "× plain", "× HF generate"))
    _, said, _ = run("generate", "abc abc", *tiny_options)
    assert out.count(f"\n{said}") == 2  # to the letter, in as many colours as rounds
    assert out.endswith(f'next: slipstream generate "What is gravity?" {" ".join(tiny_options[:4])}\n')


def test_demo_shows_questions_that_are_read_in_parts(run, tiny_options, questions, monkeypatch):
    """A prompt of more than 512 tokens ended it: its first parts bring no token to show."""
    monkeypatch.setattr("slipstream.engine.engine.CHUNK", 2)
    code, out, _ = run("demo", *tiny_options, "--questions", questions, "--drafter", "ngram")
    assert code == 0
    assert "the same text" in out


def test_a_malformed_question_names_its_line(run, model, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"turns": ["fine"]}\n{"turns": 3}\n')
    code, _, err = run("bench", "--target", model, "--questions", str(file))
    assert code == 2
    assert "bad.jsonl line 2" in err


def test_what_was_measured_is_kept_for_each_machine(run, model, tmp_path, monkeypatch):
    """One machine's or precision's costs in the place of another's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "cost_curve", partial(cost.cost_curve, contexts=(16,), batches=(1,)))
    path, plot = tmp_path / "slipstream" / "costs.json", tmp_path / "costs.svg"
    path.parent.mkdir()
    path.write_text('{"another machine": {"a model": {"passes": []}}}')
    code, out, _ = run("tune", "--measure", "--target", model, "--dtype", "float64", "--plot", str(plot))
    assert code == 0
    assert "rows" in out
    (_, others), (place, here) = json.loads(path.read_text()).items()
    assert others == {"a model": {"passes": []}}
    assert place.endswith("float64")
    assert here[model]["passes"]
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    "given", [("--batch", "8"), ("--context", "64"), ("--drafter", "ngram"), ("--limit", "4")]
)
def test_what_measuring_does_not_heed_is_refused(run, model, given):
    """Passes of eight texts were asked for, and those of one and four were shown."""
    code, _, err = run("tune", "--measure", "--target", model, *given)
    assert code == 2
    assert "leave --drafter, --questions, --limit, --batch and --context out" in err


def test_doctor_exits_with_1_where_it_finds_a_fault(run, tiny_options, questions, monkeypatch, tmp_path):
    """A script that asks whether a set-up is sound reads the exit code."""
    monkeypatch.setattr(machine_checks, "_ticks", lambda: (0.0, 0.0))
    monkeypatch.setattr(Diagnosis, "small_pass", lambda self, dtype=None, compile=None: 1.0)
    asked = (*tiny_options, "--questions", questions, "--drafter", "ngram")
    code, out, err = run("doctor", *asked)
    assert (code, err) == (0, "")
    assert "nothing found" in out
    monkeypatch.setattr(
        Diagnosis, "small_pass", lambda self, dtype=None, compile=None: 1.0 if compile else 2.0
    )
    path = tmp_path / "found.json"
    code, out, _ = run("doctor", *asked, "--json", str(path))
    assert code == 1
    assert "uncompiled" in out
    assert "--compile" in out
    assert [each["verdict"] for each in json.loads(path.read_text())["findings"]].count("found") == 1
    code, _, err = run("doctor", *asked, "--context", "4096")
    assert code == 2
    assert "context is 4,096" in err
