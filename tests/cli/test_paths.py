"""Paths are looked at first: what is wrong with one is said before torch, which takes seconds."""

import json
import subprocess
import sys

import pytest

TARGET = ("--target", "./none")
PATHS = {
    "demo": [["--target", "./none"], ["--drafter", "runs/none"], ["--questions", "none.jsonl"]],
    "generate": [
        ["x", "--target", "models/llama/none"],
        ["x", "--drafter", "hybrid:head=runs/none"],
        ["x", "--json", "file/x.json"],
        ["x", "--trace", "file/x.jsonl"],
        ["x", "--json-schema", "none.json"],
        ["x", "--grammar", "none.lark"],
    ],
    "chat": [["--target", "none.gguf"], ["--drafter", "runs/none"], ["--draft-model", "./none"]],
    "serve": [["--target", "empty"], ["--drafter", "runs/none"], ["--draft-model", "./none"]],
    "bench": [
        ["--target", "smollm2", "--target", "~/none-at-all"],
        ["--drafter", "ngram", "--drafter", "empty"],
        ["--questions", "none.jsonl"],
        ["--questions", "broken.jsonl"],
        ["--json", "file/x.json"],
        ["--plot", "file/x.svg"],
        ["--plot", "x.pdf"],
        ["--resume"],
    ],
    "certify": [
        ["--target", "./none"],
        ["--drafter", "runs/none"],
        ["--questions", "none.jsonl"],
        ["--json", "file/x"],
    ],
    "reproduce": [
        ["--target", "./none"],
        ["--set", "gsm8k=none.jsonl"],
        ["--head", "eagle=runs/none"],
        ["--json", "file/x"],
        ["--resume"],
    ],
    "report": [["none.json"], ["good.json", "--out", "file/x.html"], ["good.json", "--out", "good.json"]],
    "tune": [
        ["--target", "./none"],
        ["--drafter", "runs/none"],
        ["--questions", "none.jsonl"],
        ["--plot", "file/x.svg"],
    ],
    "doctor": [
        ["--target", "./none"],
        ["--drafter", "runs/none"],
        ["--questions", "none.jsonl"],
        ["--json", "file/x"],
    ],
    "train": [
        ["eagle", "--target", "./none", "--data", "good.jsonl", "--out", "run"],
        ["eagle", "--data", "none.jsonl", "--out", "run"],
        ["eagle", "--data", "good.jsonl", "--out", "file/run"],
        ["eagle", "--data", "good.jsonl", "--out", "other"],
        ["eagle", "--data", "good.jsonl", "--out", "run", "--recipe", "none.yaml"],
        ["eagle", "--out", "run", "--resume"],
    ],
    "synthesize": [["--target", "./none", "--out", "x.jsonl"], ["--out", "file/x.jsonl"]],
    "regenerate": [
        ["none.jsonl", "--out", "x.jsonl"],
        ["good.jsonl", "--out", "file/x.jsonl"],
        ["good.jsonl", "--out", "good.jsonl"],
        ["good.jsonl", "--out", "x.jsonl", "--target", "./none"],
    ],
    "data": [
        ["none.jsonl"],
        ["good.jsonl", "--exclude", "none.jsonl"],
        ["good.jsonl", "--out", "file/x.jsonl"],
        ["good.jsonl", "--target", "./none"],
    ],
    "import": [
        ["nosuch", "--out", "x"],
        ["empty", "--out", "x"],
        ["checkpoint", "--out", "file/x"],
        ["checkpoint", "--out", "other"],
        ["checkpoint", "--out", "x", "--target", "./none"],
    ],
    "export": [
        ["runs/none", "--out", "x"],
        ["eagle", "--out", "file/x"],
        ["eagle", "--out", "other"],
        ["eagle", "--out", "x", "--target", "./none"],
    ],
    "parity": [
        ["runs/none"],
        ["eagle", "--python", "none/python"],
        ["eagle", "--python", sys.executable, "--questions", "none.jsonl"],
        ["eagle", "--python", sys.executable, "--json", "file/x"],
        ["eagle", "--python", sys.executable, "--target", "./none"],
    ],
    "cache": [["--json", "file/x"]],
    "fetch": [["none"]],
}
RUN = """if True:
    import contextlib, io, json, sys
    from slipstream.cli import main
    found = []
    for words in json.loads(sys.argv[1]):
        sys.argv, said, code = ["slipstream", *words], io.StringIO(), None
        from slipstream.cli.common import err
        err.file = said
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        loaded = [name for name in ("torch", "transformers") if name in sys.modules]
        found.append((words, code, said.getvalue(), loaded))
        if loaded:
            break
    print(json.dumps(found))
"""


def test_wrong_paths_are_said_before_torch_is_imported(tmp_path):
    """`import nosuch` took 77 s: the target was loaded first."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "checkpoint" / "model.safetensors").write_text("")
    (tmp_path / "good.json").write_text("{}")
    (tmp_path / "good.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "broken.jsonl").write_text('{"turns": ["a"]}\n{"turns"\n')
    lines = [[command, *words] for command, each in PATHS.items() for words in each]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(lines)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for words, code, said, loaded in found:
        assert (code, said.count("\n"), loaded) == (2, 1, []), (words, said)
    assert len(found) == len(lines)
    names = {path.name for path in tmp_path.iterdir()}  # nothing is left behind
    assert names == {"file", "empty", "other", "checkpoint", "good.json", "good.jsonl", "broken.jsonl"}


def test_every_command_is_here(run):
    """A command that is new says what its paths are."""
    from slipstream.cli.common import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names == {*PATHS}


def test_data_are_read_before_the_target(run, tmp_path, monkeypatch):
    """A malformed line was found behind the loading of the model."""
    monkeypatch.setattr("slipstream.targets.load_target", lambda *_, **__: pytest.fail("loaded"))
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "a"}\n{"text"\n')
    for words in (
        ["train", "eagle", "--out", str(tmp_path / "run")],
        ["regenerate", "--out", str(file) + "l"],
    ):
        given = ["--data", str(file)] if words[0] == "train" else [str(file)]
        code, _, err = run(*words, *given)
        assert (code, err.count("\n"), "line 2" in err) == (2, 1, True), err
