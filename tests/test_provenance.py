"""The commands that hints show: for the model that the command under way was given."""

import typer
from typer.main import get_command

from slipstream.cli.common import app
from slipstream.provenance import KEPT, TAKES, commanded, suggested


def test_a_hint_repeats_the_model_and_how_it_is_loaded():
    """`synthesize --target X` said how to train on its rows for another model, the default: 190 seconds."""
    line = "slipstream synthesize --prompts 9 --target './my model' --dtype=float64 --device cuda:1 --batch 4"
    with commanded(line):
        assert suggested("train eagle") == (
            "slipstream train eagle --target './my model' --dtype float64 --device cuda:1"
        )
        assert suggested("data a.jsonl") == "slipstream data a.jsonl --target './my model'"
        assert suggested("bench --target b --dtype auto") == (
            "slipstream bench --target b --dtype auto --device cuda:1"
        )
    with commanded("slipstream --plugin mine chat --compile --quantize int8"):
        assert suggested("tune --drafter eagle") == (
            "slipstream --plugin mine tune --drafter eagle --compile --quantize int8"
        )
        assert suggested("train eagle") == "slipstream --plugin mine train eagle"


def test_a_hint_in_python_names_no_options():
    with commanded("slipstream.train(target='it's, data=[])"):
        assert suggested("train eagle") == "slipstream train eagle"


def test_hints_know_which_options_each_command_takes():
    """An option that a command does not take made its hint a command that fails."""
    group = get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for verb, command in group.commands.items():
        options = {name for parameter in command.params for name in parameter.opts}
        assert {*KEPT} & options == {*KEPT} & TAKES[verb], verb


def test_a_hint_names_a_program_that_is_not_on_the_path_by_its_own(monkeypatch):
    """`make demo` ended in a command that the shell did not find."""
    monkeypatch.setattr("sys.argv", [".venv/bin/slipstream", "demo"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert suggested("generate x") == ".venv/bin/slipstream generate x"
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/slipstream")
    assert suggested("generate x") == "slipstream generate x"
    monkeypatch.setattr("sys.argv", ["notebook.py"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert suggested("generate x") == "slipstream generate x"
