"""What commands share: the version, names on the screen, results on standard output and on a full disk."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import slipstream
import tiny


def test_the_version_is_the_packages(run):
    code, out, _ = run("--version")
    assert (code, out) == (0, f"slipstream {slipstream.__version__}\n")
    assert slipstream.__version__ == version("slipstream")


def test_a_draft_model_is_autos_head(run, tiny_options, questions, model, tmp_path):
    path, words = tmp_path / "run.json", [*tiny_options, "--draft-model", model]
    code, said, _ = run("generate", "abc", *words)
    assert (code, said) == (0, run("generate", "abc", *tiny_options, "--drafter", "vanilla")[1])
    assert run("bench", "--questions", questions, *words, "--json", str(path))[0] == 0
    named = [each["drafter"] for each in json.loads(path.read_text())["results"]]
    assert named == ["vanilla", f"auto:head=draft-model:model={model}"]


def test_names_are_no_markup(run, tmp_path, tiny_options):
    """A traceback of rich's for `[/]` in a name, and colours where somebody wrote [red]."""
    home = tmp_path / "[red]odd[/] :eyes:"
    tiny.reference("llama").save_pretrained(home)
    tiny.tokenizer().save_pretrained(home)
    asked = tmp_path / "[b].jsonl"
    asked.write_text(
        '{"question_id": "[/b]", "category": "[/cat] :eyes:", "turns": ["a [/] b [red] :eyes:"]}\n'
    )
    words = ["--target", str(home), *tiny_options[2:], "--questions", str(asked)]
    code, out, _ = run("demo", *words, "--drafter", "ngram")
    assert (code, "[/cat] :eyes:" in out, "a [/] b [red] :eyes:" in out, "green" in out) == (
        0,
        True,
        True,
        False,
    )
    for command in ("bench", "certify"):
        code, out, _ = run(command, *words, "--drafter", "ngram")
        assert (code, "[red]odd[/] :eyes:" in out.replace("\n", "")) == (0, True)
    code, _, err = run("generate", "abc", "--target", str(tmp_path / "[/]"))
    assert (code, len(err.strip().splitlines()), "[/]" in err) == (2, 1, True)


def test_json_has_standard_output_for_itself(run, tiny_options, questions):
    """`--json -` was a file of that name."""
    for words in (
        ["bench", "--questions", questions],
        ["certify", "--questions", questions],
        ["generate", "abc"],
    ):
        code, out, err = run(*words, *tiny_options, "--json", "-")
        assert code == 0
        assert json.loads(out)
        assert "τ" in err or "certified" in err
    code, out, _ = run("bench", "--questions", questions, *tiny_options, "--plot", "-")
    assert (code, out.startswith("<?xml")) == (0, True)
    code, out, err = run("generate", "abc", *tiny_options, "--trace", "-")
    assert all("accepted" in json.loads(line) for line in out.splitlines())


def test_names_that_are_no_utf8_lose_no_results(run, tiny_options, questions, tmp_path):
    """The stored command and the questions' names could not be written, behind all of the work."""
    odd = tmp_path / os.fsdecode(b"q\xe9.jsonl")
    odd.write_bytes(Path(questions).read_bytes())
    path = tmp_path / "made.json"
    code, _, _ = run("bench", *tiny_options, "--questions", str(odd), "--json", str(path))
    assert code == 0
    made = json.loads(path.read_text())
    assert "q?.jsonl" in made["command"]
    assert made["prompts"] == ["q?.jsonl:1"]


def test_results_that_cannot_be_written_are_printed_and_kept(
    run, tiny_options, questions, tmp_path, monkeypatch
):
    """The disk was full at the end: an hour's table was not even printed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = run("bench", *tiny_options, "--questions", questions, "--json", "/dev/full")
    assert code == 2
    assert "vanilla" in out
    assert "No space left on device; the results are in" in err
    assert json.loads(next(tmp_path.glob("slipstream-*.json")).read_text())["results"]
