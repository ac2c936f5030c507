"""chat, by a person at a terminal: what is typed goes through a pty."""

import codecs
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from copy import deepcopy
from functools import partial
from time import monotonic, sleep

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

import tiny
from slipstream.cli.chat import Chat, editor, plainly, wrapping
from slipstream.engine.chat_session import ChatSession

BEGINS = r"\x1b\[\?2004l(?s:.*)\x1b\[\?2004h(?s:.*)[a-zA-Z0-9]"  # an answer, behind its prompt
ANSWER = 4096  # tokens, of seconds
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny Llama with a chat template, whose answers are long enough to be interrupted on any machine."""
    path = tmp_path_factory.mktemp("chatting")
    reference = deepcopy(tiny.reference("llama"))
    reference.config.max_position_embeddings = 2 * ANSWER
    reference.generation_config.min_new_tokens = ANSWER
    reference.save_pretrained(path)
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


class Terminal:
    """`slipstream chat` in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        main, side = pty.openpty()
        environment = os.environ | {
            "TERM": "xterm",
            "COLUMNS": "100",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-m", "slipstream", "chat", *words]
        how = {"stdin": side, "stdout": side, "stderr": side, "env": environment, "start_new_session": True}
        # Tests in the background inherit an ignored one.
        heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(command, **how, preexec_fn=heeds)
        os.close(side)
        self.main, self.seen = main, ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may come in parts

    def until(self, pattern: str, seconds: float = 90) -> str:
        """What was printed since the last time, up to a match."""
        end = monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                self.seen += self.decoder.decode(os.read(self.main, 65536))
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def says(self, line: str, pattern: str = r"tokens read") -> str:
        os.write(self.main, f"{line}\n".encode())
        return self.until(pattern)


def shown(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_conversation_in_a_terminal(model):
    """Every command, an answer that is stopped, and a chat that goes on."""
    options = ["--target", model, "--dtype", "float32", "--drafter", "suffix", "--temperature", "0"]
    here = Terminal(*options, "--max-new-tokens", str(ANSWER))
    try:
        here.until("›")
        os.write(here.main, b"abc abc abc\n")
        here.until(BEGINS)
        sleep(0.3)
        os.killpg(here.process.pid, signal.SIGINT)
        stopped = shown(here.until("interrupted"))
        assert "…" in stopped
        assert int(re.search(r"(\d+) tokens   ", stopped)[1]) < ANSWER
        assert "suffix   τ" in stopped
        first = int(re.search(r"(\d+) of (\d+) tokens read", stopped)[1])
        assert first == 11

        assert "there is no /bogus" in here.says("/bogus", "lists what there is")
        assert "/retry" in here.says("/help", "green")
        assert "round" in shown(here.says("/tree 1", "the target's own"))
        assert "rounds 1 to" in here.says("/tree 9999", "/tree 1")
        assert "decoding plainly" in here.says("/plain", "plainly")
        os.write(here.main, b"xyz\n")
        here.until(BEGINS)
        sleep(0.3)
        os.write(here.main, b"/QQ-bogus\r")
        sleep(0.3)
        os.killpg(here.process.pid, signal.SIGINT)
        second = shown(here.until("interrupted"))
        assert "QQ" not in second  # it is not shown among the answer, and waits
        assert "there is no /QQ-bogus" in shown(here.until("lists what there is"))
        assert "plain   τ 1.00" in second
        read, of = map(int, re.search(r"(\d+) of (\d+) tokens read", second).groups())
        assert read < 10 < of  # what was said before is known
        assert "drafting with ngram" in here.says("/drafter ngram", "with ngram")
        assert "Unknown drafter" in here.says("/drafter what", "directory")
        assert "ngram   τ" in shown(here.says("/edit q"))  # to its end
        assert "another conversation" in here.says("/new", "conversation")
        assert "nothing was said yet" in here.says("/retry", "yet")
        os.write(here.main, b"/quit\n")
        assert here.process.wait(60) == 0
    finally:
        here.process.kill()
        here.process.wait()
        os.close(here.main)


def test_an_exchange_stays_if_another_answer_fails(chat, monkeypatch):
    """The question and its answer were gone."""

    def refuse(turns, seed):
        raise ValueError("the prompt has too many tokens")

    monkeypatch.setattr(chat.talk, "answer", refuse)
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat.turns = [*before]
    for command in ("/retry", "/edit longer"):
        with pytest.raises(ValueError, match="too many"):
            chat.take(command)
        assert (chat.turns, chat.seed) == (before, 0)


def test_a_model_without_a_template_cannot_chat(run, tmp_path):
    tiny.reference("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    code, _, err = run("chat", "--target", str(tmp_path), "--drafter", "ngram")
    assert (code, "has no chat template" in err) == (2, True)


@pytest.mark.parametrize(
    ("typed", "turns"),
    [
        ("one\r", ["one"]),
        (
            "\x1b[200~def f(x):\n    return x\r\n\x1b[201~what is this?\r",
            ["def f(x):\n    return x\nwhat is this?"],
        ),
        ("one\x1b\rtwo\r", ["one\ntwo"]),
        ("one\\\rtwo\\\rthree\r", ["one\ntwo\nthree"]),
        ("a\\b\r", ["a\\b"]),
        ("one\rtwo\r", ["one", "two"]),
    ],
    ids=["a line", "pasted", "Alt+Enter", "backslash", "a backslash within", "ahead"],
)
def test_a_turn_may_have_several_lines(typed, turns):
    """Ten pasted lines were ten turns, each answered."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        ask = editor()
        pipe.send_text(typed)
        assert [ask("") for _ in turns] == turns


def test_what_was_said_may_be_changed():
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text("!\r")
        assert editor()("said") == "said!"


def test_plain_lines_without_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\\\ntwo\nthree\\\n"))
    assert [plainly("") for _ in range(2)] == ["one\ntwo", "three\\"]
    with pytest.raises(EOFError):
        plainly("")


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["one two", " three fo", "ur"], "one two\nthree four"),
        (["aaaa ", "bbbb", "bbbbbb"], "aaaa\nbbbbbbbbbb"),
        (["x" * 25], "x" * 25),
        (["  indented\n\n", "  again"], "  indented\n\n  again"),
        (["東京は", "日本の首都"], "東京は日本の首都"),
        (["1234567890", " next"], "1234567890\nnext"),
    ],
)
def test_words_wrap_at_a_terminal(pieces, shown):
    """They were cut wherever the line ended."""
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=10, force_terminal=terminal, color_system=None)
        with wrapping(console) as show:
            for piece in pieces:
                show(piece, "")
        written = console.file.getvalue()
        assert written == (shown if terminal else "".join(pieces))


@pytest.fixture
def chat(model):
    """A conversation with a tiny model."""
    from slipstream import load_target

    talk = ChatSession(load_target(model, "float64"), "ngram", max_new_tokens=8)
    return Chat(talk, "ngram", None, 0)


def test_an_answer_says_why_it_ended(chat, capsys):
    chat.take("abc")
    assert capsys.readouterr().err.strip().endswith("length: --max-new-tokens is 8")
    chat.talk.options["stop"] = [chat.turns[-1]["content"][2:4]]
    chat.take("/retry")
    told = capsys.readouterr().err
    assert "at temperature 0 no seed changes an answer: it will be the same" in told
    assert told.strip().endswith("stop")
    chat.take("/temperature 0.7")
    chat.take("/retry")
    assert "it will be the same" not in capsys.readouterr().err


def test_the_system_and_the_temperature_change_under_way(chat, capsys):
    chat.take("/system be brief\nand kind")
    chat.take("abc")
    assert chat.turns[0] == {"role": "system", "content": "be brief\nand kind"}
    chat.take("/system")
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"]
    capsys.readouterr()
    chat.take("/temperature 1.5")
    chat.take("/temperature")
    assert capsys.readouterr().out == "temperature 1.5\n" * 2
    chat.take("abc")
    assert chat.talk.last.sampling.temperature == 1.5
    for wrong, says in (("warm", "temperature is 'warm'; it must be a number"), ("-1", "temperature is -1")):
        with pytest.raises(ValueError, match=says):
            chat.take(f"/temperature {wrong}")
        assert chat.talk.temperature == 1.5


def test_a_conversation_is_saved_as_training_data(chat, tmp_path):
    path, other = tmp_path / "talk.jsonl", tmp_path / "other"
    other.write_text("a thesis")
    chat.take("/system be brief")
    for _ in range(2):  # over what it saved itself
        chat.take("abc")
        chat.take(f"/save {path}")
    assert json.loads(path.read_text()) == {"messages": chat.turns}
    assert [turn["role"] for turn in chat.turns] == ["system", *("user", "assistant") * 2]
    for wrong, says in (
        (str(other), "is there already"),
        ("", "name a file"),
        ("/proc/x", "cannot be written"),
    ):
        with pytest.raises(ValueError, match=says):
            chat.take(f"/save {wrong}")
    assert other.read_text() == "a thesis"
