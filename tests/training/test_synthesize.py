"""Data from the target itself, or from a server that holds it."""

import json
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import tiny
from slipstream.decode.generate import generate
from slipstream.files import locked
from slipstream.targets import HFTarget
from slipstream.training.data import load_examples
from slipstream.training.synthesize import (
    Answers,
    opening_of,
    regenerate,
    synthesize,
    synthesize_prompts,
    templated,
)
from slipstream.training.writers import ServerWriter, Writer, Written

ROWS = [
    [{"role": "user", "content": c * 3}, {"role": "assistant", "content": "to be dropped"}] for c in "abcdefg"
]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own(chat, tmp_path):
    out = tmp_path / "out.jsonl"
    answers = regenerate(chat, ROWS, out, temperatures=[0.0, 0.7], max_new_tokens=8, batch=3)
    assert (answers.lines, answers.path) == (7, str(out))
    assert answers.command.startswith("slipstream.regenerate(target=")
    assert Answers.from_json(answers.to_json()) == answers
    made = lines(out)
    assert [row["temperature"] for row in made] == [0.0] * 3 + [0.7] * 3 + [0.0]
    for row, asked in zip(made, ROWS, strict=True):
        assert row["messages"][0] == asked[0]
    plain = generate(chat, "aaa", max_new_tokens=8, temperature=0.0)
    assert made[0]["messages"][1]["content"] == plain.text.strip()
    assert made[0]["finished"] == (plain.finish == "eos")
    assert load_examples([str(out)], chat, 64)[0].greedy


def test_a_question_is_asked_under_each_template():
    user, system = {"role": "user", "content": "q"}, {"role": "system", "content": "be brief"}
    other = {"role": "system", "content": ""}
    assert templated([[user], [system, user]], [""]) == [[user], [other, user], [system, user], [other, user]]
    assert templated([[user]], []) == [[user]]


def test_an_interrupted_file_is_gone_on_with(chat, tmp_path):
    """Answers written twice, lost, or glued to half a line."""
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    how = {"temperatures": [0.0], "max_new_tokens": 6, "batch": 3}
    regenerate(chat, ROWS, whole, **how)
    text = whole.read_text()
    parts.write_text(text[: text.index("\n", text.index("\n") + 1) + 20])  # two lines, and a bit of the third
    regenerate(chat, ROWS, parts, **how)
    assert parts.read_text() == text
    told = []
    regenerate(chat, ROWS, parts, **how, progress=lambda *counts: told.append(counts))
    assert told == [(7, 7)]
    with pytest.raises(ValueError, match="holds answers to other questions"):
        regenerate(chat, ROWS[1:], parts, **how)


def test_a_file_is_gone_on_with_as_it_was_begun(chat, tmp_path):
    """Another target's answers, or other settings', behind the first ones, and nobody could tell."""
    out, how = tmp_path / "out.jsonl", {"temperatures": [0.0], "max_new_tokens": 4, "batch": 3, "seed": 0}
    regenerate(chat, ROWS[:3], out, **how)
    begun = out.read_text()
    made = lines(out)[0]["made"]
    assert (made["target"], made["fingerprint"], made["max_new_tokens"]) == ("tiny-chat", chat.fingerprint, 4)
    for changed, says in [
        ({"max_new_tokens": 5}, "max_new_tokens 4, not max_new_tokens 5"),
        ({"seed": 1, "batch": 2}, "batch 3, seed 0, not batch 2, seed 1"),
        ({"temperatures": [0.7]}, "temperatures"),
    ]:
        with pytest.raises(ValueError, match=f"was made with {says}"):
            regenerate(chat, ROWS, out, **how | changed)
    other = deepcopy(tiny.reference("qwen3"))
    with pytest.raises(ValueError, match=r"was made with fingerprint llama-.*, not fingerprint qwen3-"):
        regenerate(HFTarget(other, chat.text.tokenizer, "tiny-chat"), ROWS, out, **how)
    with pytest.raises(ValueError, match=r"prompt_temperature none, not prompt_temperature 0\.8"):
        synthesize(chat, out, prompts=9, **how)
    assert out.read_text() == begun
    out.write_text(begun.replace(json.dumps(made), "1").replace('"made": 1, ', ""))
    with pytest.raises(ValueError, match="does not say how it was made"):
        regenerate(chat, ROWS, out, **how)
    assert len(load_examples([str(out)], chat, 64)) == 3  # and is trained on


def test_one_run_writes_a_file(chat, tmp_path):
    """Two on one --out: both said success over a mixed file."""
    out = str(tmp_path / "out.jsonl")
    with locked(out), pytest.raises(ValueError, match="is being written by process"):
        regenerate(chat, ROWS, out, max_new_tokens=4)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"temperatures": []}, "temperatures is 0"),
        ({"temperatures": [-1.0]}, "temperature is -1"),
        ({"source": []}, "hold no question"),
        ({"source": [[], [{"role": "assistant", "content": "a"}]]}, "2 conversations hold no question"),
        ({"source": [*ROWS, [{"role": "user", "content": "a" * 999}]]}, "question 8: the prompt has"),
        ({"out": "/dev/null"}, "is no file"),
        ({"out": "-"}, "is no file"),
    ],
)
def test_nothing_is_written_where_nothing_can_be(chat, tmp_path, changed, says):
    """0 answers, and success."""
    settings = {
        "source": ROWS,
        "out": str(tmp_path / "out.jsonl"),
        "temperatures": [0.0],
        "max_new_tokens": 4,
        "batch": 3,
    } | changed
    with pytest.raises(ValueError, match=says):
        regenerate(chat, **settings)
    assert not list(tmp_path.iterdir())


def test_synthesis_goes_on_with_what_is_there(chat, tmp_path):
    """Prompts written twice, or lost with the process."""

    class Both(Known):
        def answer(self, prompts, temperature, limit, seed):
            return [Written(f"to {prompt[0]['content']}", True) for prompt in prompts]

    out = tmp_path / "out.jsonl"
    for n in (2, 3):
        writer = Both("abcd", "efgh", "ijkl")
        assert synthesize(chat, out, prompts=n, writer=writer, max_new_tokens=8, batch=2).lines == n
    assert [row["messages"][0]["content"] for row in lines(out)] == ["abcd", "efgh", "ijkl"]
    assert lines(out)[2]["messages"][1]["content"] == "to ijkl"


def test_prompts_begin_where_the_template_lets_a_user_speak(chat):
    assert opening_of(chat) == "u "
    with pytest.raises(ValueError, match="no chat template"):
        opening_of(tiny.target("llama"))


class Known(Writer):
    """A writer whose prompts are known; those that end in ! were cut."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def answer(self, prompts, temperature, limit, seed):
        raise NotImplementedError

    def go_on(self, text, n, temperature, limit, seed):
        return [Written(text, not text.endswith("!")) for text in self.texts]


def test_unusable_prompts_are_thrown_away(chat):
    made = list(synthesize_prompts(chat, Known("abcd", "", "ab", "abcd", "cut off!", "efgh"), 2, 0.8, 6))
    assert made == ["abcd", "efgh"]


def test_a_target_that_writes_nothing_usable_is_said_so(chat):
    with pytest.raises(ValueError, match="wrote 0 usable prompts"):
        list(synthesize_prompts(chat, Known(""), 2, 0.8, 6))


@pytest.fixture
def server():
    """An OpenAI-compatible server that says what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._say({"data": [{"id": "tiny"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/v1/chat/completions":
                content = f"{body['messages'][-1]['content']} at {body['temperature']}"
                self._say({"choices": [{"message": {"content": content}, "finish_reason": "length"}]})
            else:
                self._say(
                    {
                        "choices": [
                            {"text": f"{body['prompt']}{i} ", "finish_reason": "stop"}
                            for i in range(body["n"])
                        ]
                    }
                )

        def _say(self, reply):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()


def test_a_server_may_write(server, tmp_path):
    writer = ServerWriter(server)
    assert writer.model == "tiny"
    path = str(tmp_path / "out.jsonl")
    regenerate("never loaded", ROWS, path, writer=server, temperatures=[0.5], max_new_tokens=8, batch=4)
    made = lines(tmp_path / "out.jsonl")
    assert [row["messages"][-1]["content"] for row in made] == [f"{c * 3} at 0.5" for c in "abcdefg"]
    assert not any(row["finished"] for row in made)
    assert [w.text for w in writer.go_on("u ", 2, 0.8, 9, 0)] == ["u 0", "u 1"]


def test_a_server_that_is_not_there_is_one_clear_error():
    with pytest.raises(ValueError, match="give the base of an OpenAI-compatible server"):
        ServerWriter("http://127.0.0.1:9/v1")
