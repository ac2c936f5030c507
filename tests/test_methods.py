"""The table of methods: what it names is there, and it is read without loading torch."""

import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.interop.layouts import Layout
from slipstream.methods import METHODS, Method, register
from slipstream.training.objective import Objective
from slipstream.training.recipe import Recipe, recipe_class
from slipstream.training.recipes import LayerHead, StepsLoss


def test_reading_the_table_imports_no_torch():
    """`slipstream --help` that takes seconds."""
    heavy = "{'torch', 'transformers', 'pydantic', 'slipstream.drafters'} & set(sys.modules)"
    program = f"import sys, slipstream.methods, slipstream.cli; sys.exit(str({heavy} or ''))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("name", METHODS)
def test_what_an_entry_names_is_there(name):
    method = METHODS[name]
    assert method.name == name
    assert method.make or method.drafter
    if method.make:
        assert callable(resolve_name(method.make))
    if method.drafter:
        drafter = resolve_name(method.drafter)
        assert issubclass(drafter, Drafter)
        assert drafter.method == name
    assert (method.objective is None) == (method.recipe is None) == (method.drafter is None)
    if method.objective:
        assert issubclass(resolve_name(method.objective), Objective)
        assert issubclass(resolve_name(method.recipe), Recipe)
        assert recipe_class(name, "")().method == name
    assert all(issubclass(resolve_name(layout), Layout) for layout in method.layouts.values())


def test_a_line_of_help_fits_beside_its_name():
    """A list of drafters whose lines are folded at 80 columns."""
    for method in METHODS.values():
        suffix = f"; ships for {', '.join(method.shipped)}" if method.shipped else ""
        assert len(method.name) <= 16
        assert len(method.help + suffix) <= 57, method.name


def test_the_name_of_a_trained_method_stands_for_weights_that_ship():
    """A name without weights; `draft-model` with a model of the user's, taken for the one that ships."""
    trained = [method for method in METHODS.values() if method.drafter]
    assert all(method.ships and method.shipped == ["smollm2"] for method in trained)
    assert not any(method.made(()) for method in trained)
    assert METHODS["draft-model"].made({"model": "DIR"})
    assert not METHODS["ngram"].ships


def test_a_method_is_added_by_one_call(monkeypatch):
    monkeypatch.setitem(METHODS, "short", Method("short", "…", make="slipstream.drafters.ngram:NGram"))
    assert load_drafter("short:depth=2").depth == 2
    with pytest.raises(ValueError, match="there is a method 'short' already: choose another name"):
        register(METHODS["short"])
    with pytest.raises(ValueError, match=r"Unknown drafter: 'sort'.*Did you mean 'short'\?"):
        load_drafter("sort")


def test_the_guide_lists_every_method_with_its_settings():
    """A method or a setting that docs/training.md leaves out, or has of another method."""
    guide = (Path(__file__).parents[1] / "docs" / "training.md").read_text("utf-8")
    rows = {line.split("`")[1]: line for line in reversed(guide.splitlines()) if line.startswith("| `")}
    shared = set(LayerHead.model_fields) | set(StepsLoss.model_fields) - {"noise"}
    for method in METHODS.values():
        if method.recipe is not None:
            _, _, help, settings, _ = rows[method.name].split("|")
            kind = recipe_class(method.name, "")
            fields = {part: kind.section(part).model_fields.keys() - shared for part in ("head", "loss")}
            own = {f"{part}.{name}" for part, names in fields.items() for name in names}
            assert help.strip() == method.help
            assert set(settings.split("`")[1::2]) == own
