"""Five ways of a new user (`make new-user`), as far as they hold without an environment of their own."""

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
import tiny
from slipstream import generate

ROOT = Path(__file__).parent.parent
HERE = ROOT / "examples" / "new_user"
README = (ROOT / "README.md").read_text("utf-8")


def code(cell: dict) -> str:
    return "".join(cell["source"]) if cell["cell_type"] == "code" else ""


def test_the_commands_of_the_readme_way_stand_in_the_readme():
    script = (HERE / "readme.sh").read_text("utf-8")
    assert "slipstream demo" in (ROOT / "Makefile").read_text("utf-8")  # make demo
    commands = re.findall(r"^(slipstream (?!demo).+|curl http.+|    -d .+)$", script, re.M)
    assert len(commands) >= 4
    for command in commands:
        assert command.strip() in README, command
    [cuts] = re.findall(r"^ +sed '(.+)'", script, re.M)
    for cut in re.findall(r"s/([^/]+)/", cuts):
        assert cut in README, f"{cut!r} is cut down, and README has it no more"


def test_every_method_that_can_be_trained_is_trained_on_a_model_of_ones_own():
    script = (HERE / "own_model.sh").read_text("utf-8")
    [methods] = re.findall(r"^for method in (.+); do$", script.partition("slipstream tune")[0], re.M)
    trained = {name for name, method in slipstream.METHODS.items() if method.objective}
    assert trained <= {*methods.split()}


@pytest.mark.parametrize("name", ["readme.sh", "own_model.sh"])
def test_scripts_are_bash(name):
    subprocess.run(["bash", "-n", HERE / name], check=True)


def test_a_method_of_ones_own_changes_no_text():
    target = tiny.target("llama")
    sys.path.insert(0, str(HERE))
    try:
        import own_method  # noqa: F401

        prompts, how = tiny.prompts(5, 9, 12), {"max_new_tokens": 24}
        plain = [each.tokens for each in generate(target, prompts, "vanilla", **how)]
        made = generate(target, prompts, "recent:depth=3", **how)
        assert [each.tokens for each in made] == plain
        assert max(each.tau for each in made) > 1
    finally:
        sys.path.remove(str(HERE))
        slipstream.METHODS.pop("recent", None)


def test_the_cells_of_the_notebook_are_python_without_outputs():
    cells = json.loads((HERE / "notebook.ipynb").read_text("utf-8"))["cells"]
    lines = "\n".join(map(code, cells))
    used = {node.attr for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Attribute)}
    assert {"generate", "stream", "bench", "certify"} <= used
    assert not any(cell.get("outputs") for cell in cells)


def test_a_way_that_fails_is_told(tmp_path, monkeypatch, capsys):
    run = runpy.run_path(str(HERE / "run.py"))
    ways = {"good": ["true"], "bad": ["sh", "-c", "echo oh; exit 3"]}
    monkeypatch.setitem(run["main"].__globals__, "WAYS", ways)
    for way, code in (("good", 0), ("bad", 1)):
        monkeypatch.setattr(sys, "argv", ["run.py", "--keep", "--home", str(tmp_path), way])
        assert run["main"]() == code
    said = capsys.readouterr().out
    assert "good: ok" in said
    assert "bad: FAILED" in said
    assert "oh" in said
