"""chat, by a person at a terminal: what is typed goes through a pty."""

import codecs
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

import tiny
from slipstream.cli.chat import Chat

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny Llama with a chat template and a window of 4096 tokens."""
    path = tmp_path_factory.mktemp("chatting")
    reference = deepcopy(tiny.reference("llama"))
    reference.config.max_position_embeddings = 4096
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
    options = ["--target", model, "--dtype", "float32", "--drafter", "suffix", "--max-new-tokens", "2000"]
    here = Terminal(*options, "--temperature", "0")
    try:
        here.until("› ")
        os.write(here.main, b"abc abc abc\n")
        here.until("abc abc abc\r\n")
        here.until("[a-zA-Z0-9]{3}")
        sleep(0.3)  # those may be what was typed, shown again
        os.killpg(here.process.pid, signal.SIGINT)
        stopped = shown(here.until("tokens read"))
        assert "…" in stopped
        assert int(re.search(r"(\d+) tokens   ", stopped)[1]) < 2000
        assert "suffix   τ" in stopped
        first = int(re.search(r"(\d+) of (\d+) tokens read", stopped)[1])
        assert first == 11

        assert "there is no /bogus" in here.says("/bogus", "lists what there is")
        assert "/retry" in here.says("/help", "green")
        assert "round" in shown(here.says("/tree 1", "the target's own"))
        assert "rounds 1 to" in here.says("/tree 9999", "/tree 1")
        assert "decoding plainly" in here.says("/plain", "plainly")
        os.write(here.main, b"xyz\n")
        here.until("xyz\r\n")
        here.until("[a-zA-Z0-9]{3}")
        sleep(0.3)  # those may be what was typed, shown again
        os.killpg(here.process.pid, signal.SIGINT)
        second = shown(here.until("tokens read"))
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


def test_an_exchange_stays_if_another_answer_fails():
    """The question and its answer were gone."""

    class Refusing:
        def answer(self, turns, seed):
            raise ValueError("the prompt has too many tokens")

    chat = Chat(Refusing(), "ngram", None, 3)
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat.turns = [*before]
    for command in ("/retry", "/edit longer"):
        with pytest.raises(ValueError, match="too many"):
            chat.take(command)
        assert (chat.turns, chat.seed) == (before, 3)


def test_a_model_without_a_template_cannot_chat(run, tmp_path):
    tiny.reference("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    code, _, err = run("chat", "--target", str(tmp_path), "--drafter", "ngram")
    assert (code, "has no chat template" in err) == (2, True)
