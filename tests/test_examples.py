"""The example program: it runs, and its types are checked as a stranger's would be."""

import ast
import os
import runpy
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import slipstream
import tiny
from slipstream.measure.doctor import doctor
from world import TEMPLATE

ROOT = Path(__file__).parent.parent
TOUR = ROOT / "examples" / "tour.py"
STRANGER = """
[mypy]
strict = True
follow_imports = silent
ignore_missing_imports = True
[mypy-torch.*,transformers.*]
follow_imports = skip
"""  # reading the types of these two takes half a minute


def test_the_tour_runs(tmp_path, monkeypatch, capsys):
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    tiny.reference("llama").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = [str(tmp_path / "model"), str(tmp_path / "out"), "--dtype", "float64"]
    monkeypatch.setattr(sys, "argv", [str(TOUR), *words])
    monkeypatch.delitem(doctor.CHECKS, "uncompiled")  # types are checked here, which cannot be compiled
    try:
        runpy.run_path(str(TOUR), run_name="__main__")
    finally:
        slipstream.METHODS.pop("stutter", None)
    assert "mine: " in capsys.readouterr().out


def test_the_tour_uses_every_public_name():
    used = set()
    for node in ast.walk(ast.parse(TOUR.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used |= {node.attr} if node.value.id == "slipstream" else set()
        elif isinstance(node, ast.ImportFrom) and node.module == "slipstream":
            used |= {alias.name for alias in node.names}
    assert set(slipstream.__all__) <= used


def test_mypy_finds_nothing_in_the_tour(tmp_path):
    """Public names without types, or names that are not exported."""
    (tmp_path / "mypy.ini").write_text(STRANGER)
    words = [sys.executable, "-m", "mypy", "--config-file", str(tmp_path / "mypy.ini"), str(TOUR)]
    env = os.environ | {"MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
