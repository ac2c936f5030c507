"""The table of methods: what it names is there, and it is read without loading torch."""

import subprocess
import sys
from pkgutil import resolve_name

import pytest

from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.interop.layouts import Layout
from slipstream.methods import METHODS, Method, register
from slipstream.training.objective import Objective


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
    assert all(issubclass(resolve_name(layout), Layout) for layout in method.layouts.values())


def test_a_line_of_help_fits_beside_its_name():
    """A list of drafters whose lines are folded at 80 columns."""
    for method in METHODS.values():
        suffix = f"; ships for {', '.join(method.shipped)}" if method.shipped else ""
        assert len(method.name) <= 16
        assert len(method.help + suffix) <= 57, method.name
    assert METHODS["eagle"].shipped == ["smollm2"]
    assert not METHODS["eagle3"].shipped


def test_a_method_is_added_by_one_call(monkeypatch):
    monkeypatch.setitem(METHODS, "short", Method("short", "…", make="slipstream.drafters.ngram:NGram"))
    assert load_drafter("short:depth=2").depth == 2
    with pytest.raises(ValueError, match="there is a method 'short' already: choose another name"):
        register(METHODS["short"])
    with pytest.raises(ValueError, match=r"Unknown drafter: 'sort'.*Did you mean 'short'\?"):
        load_drafter("sort")
