"""The site of `make docs`: what it asks of a network, where its links lead, and which pages it has."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site)
BASES = ("DecoderTarget", "Result", "Report")  # of what is exported
NAV = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]


@pytest.mark.parametrize(
    "text",
    [
        "<script src=https://a.b/c.js></script>",
        '<script defer src="//a.b/c.js"></script>',
        '<link rel="stylesheet" href="https://fonts.googleapis.com/css?family=Roboto">',
        '<link href="https://a.b" rel="preconnect" crossorigin>',
        "<img alt='x' src='http://a.b/c.png'>",
        '@font-face { src: url("https://a.b/c.woff2") }',
        "@import 'https://a.b/c.css';",
    ],
)
def test_what_asks_a_network_is_found(text):
    assert len(site.asked(f"<p>before</p>{text}<p>after</p>")) == 1


def test_what_waits_for_a_click_is_not():
    text = '<a href="https://a.b">x</a> <svg xmlns="http://www.w3.org/2000/svg"><use href="#a"/></svg>'
    assert site.asked(text + '<link rel="canonical" href="https://a.b"><img src="assets/x.png">') == []


@pytest.mark.parametrize(
    ("home", "given", "made", "files"),
    [
        ("", "[a](docs/auto.md#x)", "[a](auto.md#x)", []),
        ("docs", "[a](auto.md#x)", "[a](auto.md#x)", []),
        ("docs", "[a](../README.md#start)", "[a](index.md#start)", []),
        ("docs", "![a](round.svg)", "![a](round.svg)", []),
        ("docs", "[a](https://a.b/c)", "[a](https://a.b/c)", []),
        ("docs", "[a](#b)", "[a](#b)", []),
        (
            "docs",
            "[a](../src/slipstream/methods.py)",
            "[a](files/src/slipstream/methods.py.txt)",
            ["src/slipstream/methods.py"],
        ),
        (
            "",
            "[a](benchmarks/results/peers.json)",
            "[a](files/benchmarks/results/peers.json)",
            ["benchmarks/results/peers.json"],
        ),
    ],
)
def test_links_lead_into_the_site(home, given, made, files):
    assert site.linked(given, home) == (made, files)


def test_every_page_stands_in_the_navigation_once():
    named = re.findall(r"(\w+\.md)$", NAV, re.M)
    assert sorted(named) == sorted(site.pages())


def test_the_api_page_is_what_the_code_says():
    """A page of `:::` that only the site could read, or one that an older docstring wrote."""
    code = "import sys; sys.path.insert(0, 'docs'); import api; sys.stdout.reconfigure(encoding='utf-8')"
    command = [sys.executable, "-I", "-S", "-c", f"{code}; print(api.page(), end='')"]  # no packages
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert done.stdout == text, done.stderr or "run python3 docs/api.py"
    named = re.findall(r"^### (\w+)$", text, re.M)
    assert sorted(named) == sorted([*slipstream.__all__, *BASES])
    assert "\n    json_schema: Mapping[str, Any] | str | None = None,\n" in text
    assert "\n- `batch`: answers under way at once, default all." in text
    assert not re.search(r"^(Args|Returns|Raises|Attributes):$|^:::", text, re.M)


def test_the_site_is_built(tmp_path):
    """Without a warning. The build itself ends where a page asks a network."""
    pytest.importorskip("material", reason="needs the extra docs: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "files" / "benchmarks" / "results" / "peers.json").exists()
    assert "Hugging Face" in (tmp_path / "index.html").read_text("utf-8")
