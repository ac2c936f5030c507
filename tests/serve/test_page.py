"""The playground: it needs nothing but its server, and does what its buttons say."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tiny
from slipstream.serve.page import page

EVIL = '</script><img src="https://example.com/x">'


def test_the_page_asks_nothing_of_a_network():
    assert EVIL not in page(EVIL, "auto", True)
    made = page("smollm2", "auto", True)
    names = {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}  # of kinds of elements
    assert set(re.findall(r"https?://[\w./]+", made)) == names
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', made)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_server_sends_it_without_a_key(client):
    here = client(keys=["secret"])
    status, headers, body = here.loop.run_until_complete(here.send("/", method="GET"))
    assert (status, headers[b"content-type"]) == (200, b"text/html; charset=utf-8")
    assert b"Slipstream" in body
    assert b"secret" not in body


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("chat", [True, False])
def test_without_a_chat_template_the_text_so_far_is_gone_on_with(tmp_path, chat):
    """The page asked for a chat, which such a server refuses."""
    (tmp_path / "page.html").write_text(page("tiny", "auto", True, chat))
    choice = {"delta": {"content": "upon "}} if chat else {"text": "upon "}
    script = Path(__file__).with_name("without_browser.js")
    words = ["node", str(script), str(tmp_path / "page.html"), json.dumps({"choices": [choice]})]
    first, second = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    if chat:
        assert second["path"] == "/v1/chat/completions"
        assert [turn["content"] for turn in second["messages"]] == ["Once", "upon ", "more"]
    else:
        assert (first["path"], first["prompt"]) == ("/v1/completions", "Once ")
        assert (second["prompt"], "messages" in second) == ("Once upon more", False)


def test_the_server_says_whether_its_model_has_a_chat_template(client):
    for target in (None, tiny.target("llama")):
        here = client() if target is None else client(target=target)
        _, _, body = here.loop.run_until_complete(here.send("/", method="GET"))
        assert bool(re.search(b'"chat": ?true', body)) == (target is None)


@pytest.fixture
def opened(browser, smollm2):
    """Opens it, on SmolLM2. What is asked of another server, or goes wrong, is noise."""
    url = smollm2[1]

    def call(**how):
        shown, noise = browser.new_page(**how), []
        shown.on("console", lambda message: noise.append(message.text))
        shown.on("pageerror", lambda error: noise.append(str(error)))
        shown.on("request", lambda asked: asked.url.startswith(url) or noise.append(asked.url))
        shown.goto(url)
        shown.get_by_text("Settings").click()
        shown.get_by_label("Most tokens").fill("24")
        return shown, noise

    return call


def answered(shown, count: int) -> None:
    """Wait until so many answers stand there and none is under way. The page's policy forbids conditions that
    are given as text."""
    shown.locator(".live").nth(count - 1).wait_for()
    shown.locator("#stop[disabled]").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_without_errors_or_violations(opened, scheme):
    from axe_playwright_python.sync_playwright import Axe

    shown, noise = opened(color_scheme=scheme, viewport={"width": 360, "height": 800})
    shown.get_by_label("Say something").fill("Count: 1, 2, 3, 4, 5, 6, 7, 8, 9")
    shown.keyboard.press("Enter")
    answered(shown, 1)
    shown.locator("[data-round]").first.press("Enter")
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    broken = Axe().run(shown).response["violations"]
    assert not broken, [(each["id"], each["nodes"][0]["html"]) for each in broken]
    assert noise == []
    shown.close()


def test_a_browser_chats_compares_and_draws_trees(opened):
    shown, noise = opened()
    shown.get_by_label("Say something").fill("Say: the cat, the cat, the cat, the cat.")
    shown.keyboard.press("Enter")
    answered(shown, 1)
    told = shown.locator(".answer")
    assert told.locator(".accepted").count() > 0
    shown.get_by_role("button", name="Plain decoding beside it").click()
    answered(shown, 2)
    drafted, plain = told.all_inner_texts()
    assert drafted == plain
    lines = shown.locator(".live").all_inner_texts()
    assert "auto: " in lines[0]
    assert "τ 1.00" in lines[1]
    told.first.locator("[data-round] .accepted").first.click()
    panel = shown.locator(".panel").first
    assert "Round" in panel.inner_text()
    assert panel.locator("svg .node.accepted").count() >= 1
    panel.get_by_role("button", name="Next").focus()

    shown.get_by_role("button", name="New").click()
    assert told.count() == 0
    shown.get_by_label("Most tokens").fill("2000")
    shown.get_by_label("Say something").fill("Tell me a very long story.")
    shown.keyboard.press("Enter")
    told.locator("[data-round]").nth(3).wait_for()
    shown.keyboard.press("Escape")
    answered(shown, 1)
    assert shown.locator("#status").inner_text() == "Stopped."

    schema = {"type": "object", "properties": {"a": {"const": "b"}}, "required": ["a"]}
    shown.get_by_label("JSON schema").fill(json.dumps(schema | {"additionalProperties": False}))
    shown.get_by_role("button", name="Retry").click()
    answered(shown, 1)
    assert told.inner_text() == '{"a": "b"}'
    shown.get_by_label("JSON schema").fill("{")
    shown.get_by_role("button", name="Retry").click()
    assert "JSON schema" in shown.get_by_role("alert").inner_text()
    shown.get_by_label("JSON schema").fill("")
    shown.get_by_label("Most tokens").fill("24")
    shown.get_by_role("button", name="Retry").click()  # of the question that failed, not of one before it
    answered(shown, 1)
    assert shown.get_by_role("alert").count() == 0
    assert noise == []
    shown.close()
