"""The report's page: what it holds, what it refuses, and how it behaves in a browser.

`make test-browser` runs the last in headless Chromium, with axe-core; without them it is skipped.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tiny
from slipstream.measure.certify import certify
from slipstream.measure.datasets import Question
from slipstream.measure.distribution_test import drawn
from slipstream.measure.report.page import page

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RUNS = [
    str(RESULTS / name) for name in ("bench_auto.json", "bench_fp32.json")
]  # of now, and of an old version
CERTIFICATE = str(RESULTS / "exactness.json")
EVIL = "</script><script>document.title = 'evil'</script><img src=https://example.com/x>"
OPENING = {
    "schema": 1,
    "command": f"slipstream generate '{EVIL}'",
    "hardware": {"cpu": "a", "threads": 2},
    "versions": {"slipstream": "0"},
    "target": "smollm2",
    "dtype": "float32",
    "compiled": False,
    "temperature": 0.0,
    "seed": 0,
    "text": EVIL,
    "first": "Well",
    "prefill": 0.1,
}
PATHS = [[0], [0, 1], [0, 1, 3]]


def line(number: int, nodes: int = 4) -> dict:
    """A round whose tree is binary: nothing, one token and then two tokens are accepted, in turn."""
    parents = [max(0, (slot - 1) // 2) for slot in range(nodes)]
    texts = [f" t{(number * nodes + slot) % 4000}" for slot in range(nodes)]
    path = PATHS[number % 3]
    made = {"row": 0, "round": number, "tokens": [*range(nodes)], "parents": parents, "accepted": path}
    made |= {
        "next": 9,
        "texts": texts,
        "p": [None] + [0.1234] * (nodes - 1),
        "next_text": EVIL,
        "next_p": 0.5,
    }
    made |= {"q": [None] + [0.2345] * (nodes - 1), "pieces": [*(texts[slot] for slot in path[1:]), EVIL]}
    made |= {"seconds": {"draft": 0.001, "verify": 0.02, "host": 0.003}}
    return made | ({"opening": OPENING} if number == 0 else {})


def trace(path: Path, rounds: int, nodes: int = 4) -> str:
    path.write_text("".join(json.dumps(line(number, nodes)) + "\n" for number in range(rounds)))
    return str(path)


def held(made: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', made)[1])


def test_the_page_holds_runs_and_traces(tmp_path):
    made = held(page([*RUNS, trace(tmp_path / "answer.jsonl", 6)]))
    assert [run["name"] for run in made["runs"]] == ["bench_auto.json", "bench_fp32.json"]
    stored = json.loads(Path(RUNS[0]).read_text())
    for row, line in zip(stored["results"], made["runs"][0]["results"], strict=True):
        assert {key: line[key] for key in row} == row
        for file, task in line["tasks"].items():  # the same questions, once more
            assert task["mean"] == pytest.approx(row["by_file"][file]["speedup"]["vanilla"], abs=2e-3)
    [answer] = made["traces"][0]["answers"]
    assert [each["kind"] for each in answer["rounds"]] == ["corrected", "corrected", "bonus"] * 2
    assert [made["traces"][0]["texts"][i] for i in answer["rounds"][0]["texts"]] == [
        " t0",
        " t1",
        " t2",
        " t3",
    ]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_script_shows_every_run(tmp_path):
    """A name that stood for two things ended it, which only a browser saw."""
    path = tmp_path / "page.html"
    path.write_text(page([*RUNS, CERTIFICATE, trace(tmp_path / "answer.jsonl", 6)]), "utf-8")
    words = ["node", str(Path(__file__).with_name("stand_in.js")), str(path)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for row in json.loads(Path(RUNS[0]).read_text())["results"]:
        assert f"{row['speedup']['hf_generate']:.2f}" in shown
    assert 'width="' in shown
    assert "NaN" not in shown
    assert "undefined" not in shown


def test_a_file_that_is_given_twice_gets_a_number():
    runs = held(page([RUNS[0]] * 2))["runs"]
    assert [run["name"] for run in runs] == ["bench_auto.json", "bench_auto.json (2)"]


def test_a_name_of_other_bytes_than_utf_8_is_shown(tmp_path):
    """The page could not be written."""
    made = page([trace(tmp_path / "answer \udcff.jsonl", 3)])
    assert held(made)["traces"][0]["name"] == "answer ?.jsonl"
    made.encode()


def test_the_page_holds_certificates(tmp_path):
    """Of now, and of an old version, which tested no draws."""
    made = certify(tiny.target("llama"), "ngram", [Question("f", "1", "chat", ("a b",))], max_new_tokens=8)
    now = tmp_path / "now.json"
    made.write(str(now))
    old, new = held(page([CERTIFICATE, str(now)]))["certificates"]
    assert old == {"name": "exactness.json", **json.loads(Path(CERTIFICATE).read_text())}
    assert new["distribution"][0]["detectable"] == made.distribution[0].detectable


def test_nodes_that_are_no_guesses_are_left_out(tmp_path):
    odd = line(0)
    odd |= {
        "tokens": [0, -1, 5, -1],
        "parents": [0, 0, 0, 1],
        "texts": ["a", "", "b", ""],
        "accepted": [0, 2],
    }
    odd |= {"p": [None, None, 0.5, None], "q": [None] * 4}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(odd))
    [answer] = held(page([str(path)]))["traces"][0]["answers"]
    made = answer["rounds"][0]
    assert (made["parents"], made["p"], made["q"], made["path"]) == ([0, 0], [None, 5000], None, [0, 1])
    assert made["kind"] == "bonus"


def test_a_thousand_rounds_take_less_than_two_megabytes(tmp_path):
    """Of 64 nodes each, four times as many as the trees that ship have."""
    made = page([trace(tmp_path / "answer.jsonl", 1000, nodes=64)])
    assert len(made.encode()) < 2e6


def test_no_text_becomes_markup(tmp_path):
    """An answer that ends the element which holds it."""
    made = page([trace(tmp_path / "<b>.jsonl", 3)])
    assert "<img" not in made
    assert "&lt;b&gt;" in made
    assert made.count("</script>") == 2
    assert "http" not in made.replace("http://www.w3.org/", "").replace("http-equiv", "").replace(
        "https://example.com", ""
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no run of bench, certificate or trace"),
        ("[1]", "is no run"),
        ('{"schema": 2}', "schema 2"),
        ('{"schema": 1, "certified": true}', "no Certificate: hardware"),
        ('{"row": 0}', "line 1: round: Field required"),
    ],
)
def test_other_files_are_refused_by_name(text, says, tmp_path):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as refused:
        page([RUNS[0], str(path)])
    assert "odd.json" in str(refused.value)


def certificate(home: Path) -> str:
    """One with a failed test and a token without explanation."""
    stored = json.loads(Path(CERTIFICATE).read_text())
    stored["distribution"] = [vars(drawn("vanilla", 1.0, "coupled", 64, [100] * 15 + [200]))]
    stored["results"][0] |= {"unexplained": 1, "largest_margin": 0.25}
    path = home / "certificate.json"
    path.write_text(json.dumps(stored | {"certified": False}))
    return str(path)


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """Opens a page with runs, a certificate and a trace. Nothing is logged or asked of a network."""
    home = tmp_path_factory.mktemp("page")
    files = [*RUNS, certificate(home), trace(home / "answer.jsonl", 30, nodes=16)]
    (home / "report.html").write_text(page(files))

    def call(**how):
        shown, noise = browser.new_page(**how), []
        shown.on("console", lambda message: noise.append(message.text))
        shown.on("pageerror", lambda error: noise.append(str(error)))
        shown.on("request", lambda request: noise.append(request.url))
        address = f"file://{home}/report.html"
        shown.goto(address)
        return shown, lambda: [each for each in noise if each != address]

    return call


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_a_browser_shows_it_without_errors_requests_or_violations(opened, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    shown, noise = opened(color_scheme=scheme, viewport={"width": width, "height": 900})
    assert shown.locator("main section").count() == 5
    assert shown.title() != "evil"
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    shown.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    broken = Axe().run(shown).response["violations"]
    assert not broken, [(each["id"], each["nodes"][0]["html"]) for each in broken]
    assert noise() == []
    shown.close()


def test_a_browser_sorts_compares_and_draws_trees(opened):
    shown, noise = opened()
    head = shown.locator("main section").first.locator("thead th").nth(1)
    cells = shown.locator("main section").first.locator("table").first.locator("tbody td:first-of-type")
    speeds = [float(text.split()[0]) for text in cells.all_inner_texts() if text != "–"]
    assert head.get_attribute("aria-sort") == "descending"
    assert speeds == sorted(speeds, reverse=True)
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(text.split()[0]) for text in cells.all_inner_texts() if text != "–"] == sorted(speeds)
    assert "run 1 (bench_auto.json) and run 2 (bench_fp32.json)" in shown.locator("#compare").inner_text()

    rounds = shown.get_by_role("toolbar").get_by_role("button")
    rounds.nth(1).click()
    panel = shown.locator(".panel")
    assert "Round 2 of 30" in panel.inner_text()
    assert panel.locator("svg .node").count() == 17  # 16 and the target's own
    assert panel.locator("svg .node.accepted").count() == 2
    rounds.nth(1).press("ArrowRight")
    assert "Round 3 of 30" in panel.inner_text()
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Round 3")
    shown.locator("[data-round='9'] span").first.click()
    assert "Round 10 of 30" in panel.inner_text()
    assert noise() == []
    shown.close()


def test_a_browser_says_what_was_certified(opened):
    shown, noise = opened()
    part = shown.locator("main section").nth(3)
    assert "Not certified. 1 token without explanation, and 1 failed distribution test." in part.inner_text()
    assert part.locator("figure rect").count() == 16
    assert noise() == []
    shown.close()
