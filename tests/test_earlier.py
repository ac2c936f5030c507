"""Drafter directories, recipes and options of 30 November 2026 (`earlier/`) are read for ever.
Stored results are held by `test_results.py`."""

import io
import json
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import tiny
from slipstream.cli.common import app
from slipstream.drafters import load_drafter
from slipstream.engine.generate import generate
from slipstream.training.recipe import load_recipe

EARLIER = Path(__file__).parent / "earlier"
WANTED = json.loads((EARLIER / "wanted.json").read_text("utf-8"))


@pytest.mark.parametrize("name", WANTED["trees"])
def test_a_drafter_drafts_as_then(name):
    """A key or a tensor that changed its name or meaning: the head would load, and guess otherwise."""
    target, trace = tiny.target("llama"), io.StringIO()
    drafter = load_drafter(EARLIER / "drafters" / name, target)
    prompt = tiny.prompts(11)[0]
    generate(target, prompt, drafter, max_new_tokens=24, trace=trace, **tiny.ENDLESS)
    trees = [json.loads(line)["tokens"] for line in trace.getvalue().splitlines()]
    assert trees[: len(WANTED["trees"][name])] == WANTED["trees"][name]


def held(wanted, given) -> bool:
    """Whether all that is wanted stands in what is given, in every depth."""
    if isinstance(wanted, dict):
        return all(key in given and held(value, given[key]) for key, value in wanted.items())
    return wanted == given


@pytest.mark.parametrize("path", sorted((EARLIER / "recipes").iterdir()), ids=lambda path: path.stem)
def test_a_recipe_says_what_it_said(path):
    """A setting that went: a run could not be continued, or would go on otherwise."""
    recipe = load_recipe(str(path))
    assert held(yaml.safe_load(path.read_text("utf-8")), recipe.model_dump(mode="json"))


@pytest.mark.parametrize("command", WANTED["options"])
def test_a_command_takes_its_options(command):
    """A script that worked."""
    parameters = get_command(app).commands[command].params
    options = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {*WANTED["options"][command]} <= options
