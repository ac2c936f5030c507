"""Shapes and types are checked in every test; nothing reaches for the network or the user's cache, compiled
passes and kernels apart; one thread, the quickest for tiny models.

With TEST_COMPILED=1 (`make test-compiled`) all targets are compiled; the checks cannot be, and are left out.
"""

import os
import shutil
import sys

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import jaxtyping
import pytest
import torch
from jaxtyping import config, install_import_hook


def jaxtyped(typechecker, decorate=jaxtyping.jaxtyped):
    """The hook's decorator, which leaves functions inside functions alone. Their checks would be compiled
    whenever they are made, half of the suite's time. They say no shapes, and mypy looks at their types."""
    checked = decorate(typechecker=typechecker)
    return lambda fn: fn if "<locals>" in getattr(fn, "__qualname__", "") else checked(fn)


jaxtyping.jaxtyped = jaxtyped

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for kernels/triton.py, where Triton is installed
if not os.environ.get("TEST_COMPILED"):
    install_import_hook("slipstream", "beartype.beartype")  # before anything imports slipstream
torch.set_num_threads(1)


def pytest_configure():
    """Kernels are compiled once, and not in half a minute of every run."""
    from slipstream.kernels import ops

    ops.load()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    from slipstream.files import cache_home

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("cache")
        (home / "slipstream").mkdir()
        (home / "slipstream" / "kernels").symlink_to(cache_home() / "kernels")  # for other processes
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield


@pytest.fixture
def unchecked():
    """Types are not checked, as in a user's process: what is refused there is refused by our own words."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line in this process; returns exit code, standard output and standard error."""
    from slipstream import cli

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()  # what the test itself has printed
        monkeypatch.setattr(sys, "argv", ["slipstream", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        shown = capsys.readouterr()
        return int(exit_.value.code or 0), shown.out, shown.err

    return call


BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium; `make test-browser` installs what drives it. No other loop runs beside it."""
    reason = "needs playwright, axe-core and Chromium: make test-browser"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    pytest.importorskip("axe_playwright_python.sync_playwright", reason=reason)
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and not os.environ.get("PLAYWRIGHT_BROWSERS_PATH"):
        pytest.skip(reason)
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=found)
