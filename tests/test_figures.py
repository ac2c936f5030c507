"""Every measured figure of README.md and docs/ stands in a stored result, which stores its command.

A figure is a number with a decimal point or with commas between its thousands. Some number of the
results that its paragraph names must round to it, or of all that its section links where the paragraph
names none. A figure before %, M or MiB is a share, millions or mebibytes of a stored number. A figure
has names: what its sentence has in `code`, and in a table the cells of its row, the row's first cell,
and what its column's head has in `code`. A stored number has names, too: the keys on its way from the
root and the texts beside them. Where names meet, only numbers with these names count.

What needs arithmetic is stored under `derived`; benchmarks/derive.py computes it again here.

These are no figures of ours: what stands in `code` (settings, commands), versions (Python 3.11), and what a
paper says, if the text names the paper: "the paper's 1.27", "(paper: 2.29, 2.01)", a column headed "paper".
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import derive
import figures as picturing
from table import write_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MADE = ROOT / "docs" / "tables.md"  # the whole page follows from a result
PAGES = [
    ROOT / "README.md",
    *sorted(
        path for path in (ROOT / "docs").glob("*.md") if path.name not in ("api.md", "log.md", MADE.name)
    ),
]

NUMBER = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+)(?:\s?(%|MiB|M\b))?(?!\w|[.,]\d)")
LINK, RESULT = re.compile(r"benchmarks/results/(\w+)\.json"), re.compile(r"`(\w+)\.json`")
SCALES = {"": 1, "%": 100, "M": 1e-6, "MiB": 2**-20}
SKIPPED = {
    "by_question",
    "divergences",
    "bins",
    "budgets",
    "versions",
    "hardware",
    "recipe",
    "schema",
    "seed",
}
NOT_OURS = (
    r"<!--.*?-->",
    r"\]\([^)]*\)",  # where links lead
    r"(?:Python|vLLM|EAGLE) \d[\d.]*",
    r"paper's [\d.,]+",
    r"\(paper[^)]*\)",
)


class Figure(NamedTuple):
    """A number of a page, and what it is said of."""

    value: float
    digits: int  # behind the point
    unit: str
    names: frozenset[str]
    results: frozenset[str]  # that it may stand in


class Leaf(NamedTuple):
    """A number of a result, and its names."""

    value: float
    names: frozenset[str]


def sections(page: Path) -> Iterator[tuple[str, str]]:
    """(heading, text) of a page without fenced code."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.S | re.M)
    parts = re.split(r"^(#+ .*)$", text, flags=re.M)
    yield from zip(["", *parts[1::2]], parts[::2], strict=True)


def figures(text: str) -> list[Figure]:
    """Every figure of ours in a section."""
    found, linked = [], frozenset(LINK.findall(text))
    for pattern in NOT_OURS:
        text = re.sub(pattern, " ", text, flags=re.S)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*] )", text):
        results = frozenset(RESULT.findall(block)) & linked or linked
        for sentence, named in sentences(block):
            spans = re.findall(r"`([^`]*)`", sentence)
            names = frozenset(name for name in (*spans, *named) if re.search("[a-z]", name))
            for number, unit in NUMBER.findall(re.sub(r"`[^`]*`", " ", sentence)):
                plain = number.replace(",", "")
                digits = len(plain.partition(".")[2])
                found.append(Figure(float(plain), digits, unit, names, results))
    return found


def sentences(block: str) -> Iterator[tuple[str, list[str]]]:
    """Sentences of prose, and cells of a table with the texts of their row and the head of their column."""
    lines = [line for line in block.split("\n") if line.startswith("|")]
    if not lines:
        yield from ((sentence, []) for sentence in re.split(r"(?<=[.:;])\s", block))
        return
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    first = ""
    for row in rows:
        first = row[0] or first
        bare = [re.sub(r"[`*]", "", cell) for cell in (first, *row)]
        spans = [span for cell in (first, *row) for span in re.findall(r"`([^`]*)`", cell)]
        for title, cell in zip(head, row, strict=True):
            if "paper" not in title:
                yield cell, [*bare, *spans, *re.findall(r"`([^`]*)`", title)]


@cache
def stored(name: str) -> tuple[Leaf, ...]:
    """Every number of a result that a page may quote."""
    return tuple(_leaves(json.loads((RESULTS / f"{name}.json").read_text("utf-8")), frozenset()))


def _leaves(value: Any, names: frozenset[str]) -> Iterator[Leaf]:
    if isinstance(value, dict):
        texts = [text for text in value.values() if isinstance(text, str)]
        names = names.union(*map(_parts, texts))
        for key, each in value.items():
            if key not in SKIPPED:
                yield from _leaves(each, names | _parts(key))
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each, names)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield Leaf(abs(value), names)


def _parts(name: str) -> set[str]:
    """A name, and of "a:tree=b,c=d over e" what stands between the marks."""
    drafters = name.split(" over ")
    trees = [drafter.partition("tree=")[2] for drafter in drafters]
    return {name, name.partition(",")[0], *drafters, *trees, *re.split(r" over |, |[:=]|,(?=\w+=)", name)}


def stands(figure: Figure) -> bool:
    """Some number of the figure's results, under its names, rounds to it."""
    found = [(leaves, _under(leaves, figure.names)) for leaves in map(stored, sorted(figure.results))]
    named = [under for _, under in found if under] or [leaves for leaves, _ in found]
    half = 0.5000001 * 10**-figure.digits
    return any(
        abs(leaf.value * SCALES[figure.unit] - figure.value) <= half for leaves in named for leaf in leaves
    )


def _under(leaves: tuple[Leaf, ...], names: frozenset[str]) -> list[Leaf]:
    """The numbers of a result that have all of the names that it knows, or else any of them."""
    named = [leaf for leaf in leaves if leaf.names & names]
    known = frozenset().union(*(leaf.names for leaf in named)) & names
    return [leaf for leaf in named if known <= leaf.names] or named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_stand_in_the_results_that_their_section_links(page):
    missing = []
    for heading, text in sections(page):
        for figure in figures(text):
            if not stands(figure):
                number = f"{figure.value:.{figure.digits}f} {figure.unit}"
                missing.append(f"{heading.strip('# ')}: {number} (of {', '.join(sorted(figure.results))})")
    assert not missing, "\n".join([f"{page.name}: not in a linked result:", *missing])


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_store_their_command_and_a_page_speaks_of_them(path):
    result = json.loads(path.read_text("utf-8"))
    command = result["command"]
    script = re.search(r"python (benchmarks/\w+\.py)", command)
    assert command.startswith("slipstream ") or script, command
    assert script is None or (ROOT / script[1]).exists(), f"{script[1]} is not here"
    assert path.name in command, "the command writes another file"
    assert not re.search(r"(?<![\w.])/\w", command), "a machine's path"
    assert "+changes" not in result["versions"]["commit"], "made from a tree that no commit holds"
    pages = [*PAGES, MADE, ROOT / "docs" / "log.md"]
    assert any(path.name in page.read_text("utf-8") for page in pages), "no page speaks of it"


@pytest.mark.parametrize(("name", "result"), picturing.TABLES.items())
def test_tables_are_those_of_their_result(name, result, tmp_path):
    """A run that was made anew, beside the tables of before. `make figures` writes them."""
    page, shown = tmp_path / name, (ROOT / "docs" / name).read_bytes()
    page.write_bytes(shown)
    write_tables(str(RESULTS / result), str(page))
    assert page.read_bytes() == shown


def test_derived_figures_follow_from_their_results():
    derived = {
        path.name for path in RESULTS.glob("*.json") if "derived" in json.loads(path.read_text("utf-8"))
    }
    assert derived == set(derive.FORMULAS)
    for name, formula in derive.FORMULAS.items():
        result = json.loads((RESULTS / name).read_text("utf-8"))
        assert derive.digits(formula(result)) == result["derived"], f"{name}: run benchmarks/derive.py"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_drawn_from_their_results(path, tmp_path):
    """A result that was measured anew, beside the picture of before. `make figures` draws all."""
    shown = any(path.name in page.read_text("utf-8") for page in [*PAGES, ROOT / "docs" / "log.md"])
    assert shown, "no page shows it"
    assert "http://www.w3.org" in (text := path.read_text("utf-8"))
    assert "url(" not in text.replace("url(#", ""), "it asks a network"
    if path.name in picturing.BY_HAND:
        return
    result, draw = picturing.PICTURES[path.name]
    draw(RESULTS / result, str(tmp_path / "now.svg"))
    assert (tmp_path / "now.svg").read_text("utf-8") == text, "make figures"
    assert len(text) < 40_000


def test_a_wrong_digit_is_found():
    """Of the pages as they are, with a last digit that is three off: most such figures are in no result."""
    wrong = [
        stands(figure._replace(value=figure.value + off * 10**-figure.digits))
        for page in PAGES
        for _, text in sections(page)
        for figure in figures(text)
        for off in (-3, 3)
    ]
    assert sum(wrong) < len(wrong) / 2, f"{sum(wrong)} of {len(wrong)} wrong figures pass"


def test_what_is_no_figure_of_ours_is_passed_over():
    text = "vLLM 0.32, `decay=0.9`, the paper's 1.27 (paper: 2.29; 2.01), [x](a_1.5.json) and 1.43."
    assert [figure.value for figure in figures(text)] == [1.43]
    table = "| tree | paper |\n|---|---|\n| a | 3.94 |\n\n| b |\n|---|\n| 99.5 % of 1,046,115 |"
    assert [figure[:3] for figure in figures(table)] == [(99.5, 1, "%"), (1046115.0, 0, "")]


VERDICT = re.compile(r"\*\*([^*]*?\b(shown|refuted|undecided)\b[^*]*)\*\*([^*]*)")
INTERVAL = re.compile(r"\[([−-]?\d+\.\d+), ([−-]?\d+\.\d+)\]")
PAPERS = re.compile(r"paper's (\d+\.\d+) times")
SEED = {0.0: 0.03, 1.0: 0.05}  # what one seed does not show, of a difference and of a ratio


def verdict(low: float, high: float, against: float | None = None, seeds: bool = False) -> str:
    """What an interval says of a difference, or of a ratio; `against` the paper's ratio, if that is given.
    `seeds`: there are several."""
    if against is not None:
        return "undecided" if low <= against <= high else "refuted"
    nothing = 1.0 if low > 0.5 else 0.0
    least = 0.0 if seeds else SEED[nothing]
    return "undecided" if low <= nothing <= high or abs((low + high) / 2 - nothing) < least else "decided"


def verdicts(text: str) -> list[tuple[str, str, str]]:
    """Each claim of a page, its verdict, and what the first interval behind it says."""
    found = []
    for paragraph in re.split(r"\n\n|\n(?=- )", text):
        for claim, word, behind in VERDICT.findall(" ".join(paragraph.split())):
            low, high = (float(n.replace("−", "-")) for n in INTERVAL.findall(behind)[0])
            against = PAPERS.search(claim)
            seeds = "three seeds" in claim
            found.append((claim, word, verdict(low, high, float(against[1]) if against else None, seeds)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_verdicts_of_the_pages_are_what_their_intervals_say(page):
    words = {"shown": "decided", "refuted": "decided", "undecided": "undecided"}
    for claim, word, says in verdicts(page.read_text()):
        assert says in (word, words[word]), claim


def test_a_verdict_follows_from_its_interval():
    """One that crosses nothing, one within what a seed moves, and one that leaves out the paper's figure."""
    assert verdicts("**A above B: shown.** It has 1.06 [1.02, 1.10] times.")[0][2] == "decided"
    assert verdicts("**A above B: shown.** It adds 0.05 [−0.01, 0.11].")[0][2] == "undecided"
    assert verdicts("**A above B: undecided.** It has 1.01 [1.00, 1.02] times.")[0][2] == "undecided"
    assert verdicts("**A above B: shown, one seed.** It has 1.04 [1.03, 1.05] times.")[0][2] == "undecided"
    assert verdicts("**A above B: shown, three seeds.** It has 1.04 [1.03, 1.05] times.")[0][2] == "decided"
    assert (
        verdicts("**A, the paper's 1.5 times: refuted.** It has 1.01 [1.00, 1.02] times.")[0][2] == "refuted"
    )
    with pytest.raises(IndexError):
        verdicts("**A above B: shown.** No interval.")
