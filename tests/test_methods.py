"""The table of methods: what it names is there, and it is read without loading torch."""

import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.drafters.objective import Objective
from slipstream.drafters.recipe import LayerHead, Recipe, StepsLoss
from slipstream.interop.layouts import Layout
from slipstream.methods import METHODS, Method, Methods, load_plugin, register
from slipstream.training.recipe import recipe_class


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
    assert not any(method.makes(()) for method in trained)
    assert METHODS["draft-model"].makes({"model": "DIR"})
    assert not METHODS["ngram"].ships


def test_a_method_is_added_by_one_call(monkeypatch):
    monkeypatch.setitem(METHODS, "short", Method("short", "…", make="slipstream.drafters.suffix:NGram"))
    assert load_drafter("short:depth=2").depth == 2
    with pytest.raises(ValueError, match="there is a method 'short' already: choose another name"):
        register(METHODS["short"])
    with pytest.raises(ValueError, match=r"Unknown drafter: 'sort'.*Did you mean 'short'\?"):
        load_drafter("sort")


REPEAT = """
from slipstream.methods import Method, register
register(Method("repeat", "says the last words again", make="repeat_drafter.drafter:Repeat"))
"""
DRAFTER = """
from slipstream import NGram
class Repeat(NGram):
    pass
"""


def package(home: Path, name: str, plugin: str, code: str) -> None:
    """Lay out a package as pip does, with an entry point for the plugin."""
    (home / name).mkdir(parents=True)
    (home / name / "__init__.py").write_text("")
    (home / name / f"{plugin}.py").write_text(code)
    (home / name / "drafter.py").write_text(DRAFTER)
    about = home / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[slipstream.methods]\nany = {name}.{plugin}\n")


@pytest.fixture
def table(monkeypatch):
    """What is registered is forgotten afterwards."""
    monkeypatch.setattr(METHODS, "known", dict(METHODS))
    before = set(sys.modules)
    path = [*sys.path]
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_installed_package_adds_a_method_at_the_first_look(tmp_path, monkeypatch, table, caplog):
    """Its module is imported once, when the table is looked at; a broken package costs its methods alone."""
    package(tmp_path, "repeat_drafter", "plugin", REPEAT)
    package(tmp_path, "broken_drafter", "plugin", "import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    fresh = Methods()
    monkeypatch.setattr("slipstream.methods.METHODS", fresh)
    assert "repeat_drafter.plugin" not in sys.modules
    assert fresh["repeat"].help == "says the last words again"
    assert "repeat" in dict(fresh)
    assert [record.message for record in caplog.records] == [
        "plugin 'broken_drafter.plugin' cannot be imported: ModuleNotFoundError: No module named "
        "'no_such_module', of broken_drafter: its methods are left out"
    ]
    assert "repeat_drafter.drafter" not in sys.modules


def test_an_installed_package_is_known_to_a_new_process(tmp_path):
    """In help, and to `load_drafter`; --help of other commands imports no plugin."""
    package(tmp_path, "repeat_drafter", "plugin", REPEAT)
    program = (
        "import sys, slipstream.cli as cli\n"
        "assert 'repeat_drafter.plugin' not in sys.modules\n"
        "from slipstream import load_drafter\n"
        "assert type(load_drafter('repeat')).__name__ == 'Repeat'\n"
        "sys.argv[1:] = ['generate', '--help']\n"
        "cli.main()\n"
    )
    path = [str(tmp_path), str(Path(__file__).parents[1] / "src")]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stderr
    assert "says the last words again" in done.stdout


def test_a_plugin_that_cannot_be_imported_says_what_to_do(tmp_path, monkeypatch, table):
    with pytest.raises(ValueError, match=r"plugin 'succesor' cannot be imported: there is none: name an"):
        load_plugin("succesor")
    with pytest.raises(ValueError, match=r"none\.py' cannot be imported: there is none$"):
        load_plugin(str(tmp_path / "none.py"))
    (tmp_path / "wrong.py").write_text("x = = 1")
    with pytest.raises(ValueError, match=r"wrong\.py' cannot be imported: SyntaxError: invalid syntax"):
        load_plugin(str(tmp_path / "wrong.py"))
    (tmp_path / "json.py").write_text("")
    with pytest.raises(ValueError, match=r"the module 'json' is .*json/__init__\.py: rename the file"):
        load_plugin(str(tmp_path / "json.py"))


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
