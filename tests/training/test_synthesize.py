"""Data from the target itself, or from a server that holds it."""

import json
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import cycle, islice

import pytest

import tiny
from slipstream.engine.generate import generate
from slipstream.files import locked
from slipstream.targets import HFTarget
from slipstream.training.data import load_examples
from slipstream.training.generators import ServerWriter, TargetWriter, TextRequest, TextWriter, Written
from slipstream.training.synthesize import Answers, regenerate, synthesize, templated

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


def test_a_target_answers_a_batch_at_once_whatever_its_temperatures(chat, monkeypatch):
    """A conversation goes on at its own temperature. Each such question once cut the batch in two."""
    write, sizes = TargetWriter._write, []

    def counted(self, prompts, temperature, limit, seed):
        sizes.append(len(prompts))
        return write(self, prompts, temperature, limit, seed)

    monkeypatch.setattr(TargetWriter, "_write", counted)
    asked = [TextRequest(rows[:1], temperature, 0) for rows, temperature in zip(ROWS, cycle([0.0, 0.7]))]
    made = list(TargetWriter(chat).answer(asked, 8, 6))
    assert sizes == [3, 3, 1]
    greedy = [generate(chat, rows[:1], max_new_tokens=8).text.strip() for rows in ROWS[::2]]
    assert [answer.text.strip() for answer in made[::2]] == greedy


def test_a_question_is_asked_under_each_template():
    user, system = {"role": "user", "content": "q"}, {"role": "system", "content": "be brief"}
    other = {"role": "system", "content": ""}
    assert templated([[user], [system, user]], [""]) == [[user], [other, user], [system, user], [other, user]]
    assert templated([[user]], []) == [[user]]


def test_one_system_message_and_one_temperature_need_no_list(chat, tmp_path):
    how = {"max_new_tokens": 2, "limit": 2}
    one = regenerate(chat, ROWS, tmp_path / "one.jsonl", systems="be brief", temperatures=0.0, **how)
    two = regenerate(chat, ROWS, tmp_path / "two.jsonl", systems=["be brief"], temperatures=[0.0], **how)
    assert one.lines == two.lines == 4


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


@pytest.mark.parametrize("write", ["regenerate", "synthesize"])
def test_an_interrupted_run_ends_as_one_that_was_not(chat, tmp_path, write):
    """Behind an interruption rows were drawn by their place in the run that went on: other prompts, other
    answers at T > 0."""
    how = {"temperatures": [1.0, 0.0], "max_new_tokens": 24, "batch": 4, "seed": 3}
    own = {"prompts": 7, "kinds": ["any", "turns"], "prompt_temperature": 1.0}

    def run(out):
        if write == "regenerate":
            return regenerate(chat, ROWS, out, **how).lines
        return synthesize(chat, out, **how, **own).lines

    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run(whole) == 7
    text = whole.read_bytes()
    assert write == "regenerate" or {row["kind"] for row in lines(whole)} == {"any", "turns"}
    ends = [0, *(i + 1 for i, byte in enumerate(text) if byte == ord("\n"))]
    for end in (ends[3] - 7, ends[5]):
        parts.write_bytes(text[:end])
        assert run(parts) == 7
        assert parts.read_bytes() == text


def test_a_prompt_that_leaves_no_room_is_discarded(chat, tmp_path):
    """One such prompt ended every run, and each that went on with it."""
    out, long = tmp_path / "out.jsonl", "a" * (chat.window - 4)
    rows = [*ROWS[:2], [{"role": "user", "content": long}], *ROWS[2:]]
    how = {"max_new_tokens": 4, "batch": 4}
    made = regenerate(chat, rows, out, **how)
    assert (made.lines, made.discarded) == (7, 1)
    assert str(made.__rich__()).endswith("prompts that left no room for an answer were discarded: 1")
    assert [row["messages"][0] for row in lines(out)] == [row[0] for row in ROWS]
    own = tmp_path / "own.jsonl"
    made = synthesize(chat, own, prompts=3, writer=Cramped(chat, "abcd", long, "efgh", "ijkl"), **how)
    assert (made.lines, made.discarded) == (3, 1)
    assert [row["messages"][0]["content"] for row in lines(own)] == ["abcd", "efgh", "ijkl"]


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


@pytest.mark.parametrize("messages", [1, "a", ["a"], [1], [{"role": "user"}], {"role": "user"}])
def test_a_file_of_something_else_is_not_gone_on_with(chat, tmp_path, messages):
    out, how = tmp_path / "out.jsonl", {"temperatures": [0.0], "max_new_tokens": 4, "batch": 3}
    regenerate(chat, ROWS[:1], out, **how)
    row = json.dumps(lines(out)[0] | {"messages": messages}) + "\n"
    out.write_text(row)
    with pytest.raises(ValueError, match="holds something else than answers: name another file"):
        regenerate(chat, ROWS, out, **how)
    assert out.read_text() == row


def test_a_file_is_gone_on_with_under_the_generation_config_that_it_was_begun(chat, tmp_path, monkeypatch):
    """A penalty that was set meanwhile. What earlier versions wrote does not say under which it was."""
    out, how = tmp_path / "out.jsonl", {"max_new_tokens": 8, "batch": 2}
    regenerate(chat, ROWS[:4], out, **how)
    monkeypatch.setattr(chat.generation_config, "repetition_penalty", 1.5)
    with pytest.raises(ValueError, match="was made with generation_config"):
        regenerate(chat, ROWS, out, **how)
    rows = lines(out)
    for row in rows:
        del row["made"]["generation_config"]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert regenerate(chat, ROWS, out, **how).lines == 7


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
        ({"temperatures": []}, "temperatures is empty: give at least one"),
        ({"temperatures": [-1.0]}, "temperature is -1"),
        ({"source": []}, "hold no question"),
        ({"source": [[], [{"role": "assistant", "content": "a"}]]}, "2 conversations hold no question"),
        ({"source": [[{"role": "user", "content": "a" * 999}]]}, "none of 1 questions leaves room"),
        ({"source": [*ROWS, [{"role": "user", "content": [1]}]]}, "question 8: a message holds"),
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
    out = tmp_path / "out.jsonl"
    for n in (2, 3):
        writer = Known("abcd", "efgh", "ijkl")
        assert synthesize(chat, out, prompts=n, writer=writer, max_new_tokens=8, batch=2).lines == n
    assert [row["messages"][0]["content"] for row in lines(out)] == ["abcd", "efgh", "ijkl"]
    assert lines(out)[2]["messages"][1]["content"] == "to ijkl"


class Known(TextWriter):
    """A writer whose prompts are known."""

    def __init__(self, *texts: str) -> None:
        self.texts = cycle(texts)

    def answer(self, asked, limit, batch):
        for each in asked:
            yield Written(f"to {each.messages[-1]['content']}", True)

    def go_on(self, texts, temperature, limit, seed):
        return [Written(text, True) for text in islice(self.texts, len(texts))]


class Cramped(Known):
    """One that answers as a target does."""

    def __init__(self, target, *texts: str) -> None:
        super().__init__(*texts)
        self.target = TargetWriter(target)

    def answer(self, asked, limit, batch):
        return self.target.answer(asked, limit, batch)


@pytest.fixture
def server():
    """An OpenAI-compatible server that says what it was asked. Its address, the bodies of requests, and the
    codes with which it refuses the first ones."""
    asked: list[dict] = []
    starting: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if starting:
                self.send_error(starting.pop())
                return
            self._say({"data": [{"id": "tiny"}]})

        def do_POST(self):
            if starting:
                code = starting.pop()
                assert (self.headers["Authorization"] == "Bearer abc") == (code != 401)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(b"the context\n is too short")
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            if self.path == "/v1/chat/completions":
                content = f"{body['messages'][-1]['content']} at {body['temperature']}"
                self._say({"choices": [{"message": {"content": content}, "finish_reason": "length"}]})
            else:
                self._say({"choices": [{"text": f" {body['prompt']} again ", "finish_reason": "stop"}]})

        def _say(self, reply):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1", asked, starting
        http.shutdown()


def test_a_server_may_write(server, tmp_path):
    url, _, _ = server
    writer = ServerWriter(url)
    assert writer.model == "tiny"
    path = str(tmp_path / "out.jsonl")
    regenerate("never loaded", ROWS, path, writer=url, temperatures=[0.5], max_new_tokens=8, batch=2)
    made = lines(tmp_path / "out.jsonl")
    assert [row["messages"][-1]["content"] for row in made] == [f"{c * 3} at 0.5" for c in "abcdefg"]
    assert not any(row["finished"] for row in made)
    assert [w.text for w in writer.go_on(["u a", "u b"], 0.5, 9, 0)] == [" u a again ", " u b again "]


def test_a_server_is_sent_seeds_only_where_they_are_asked_for(server, tmp_path, chat):
    """vLLM's CPU engine ended on them: CPU Generator does not use offset."""
    url, asked, _ = server
    for name, seed in [("drawn", None), ("seeded", 7)]:
        how = {"writer": url, "temperatures": [0.5], "max_new_tokens": 8, "batch": 2, "seed": seed}
        regenerate("never loaded", ROWS, tmp_path / f"{name}.jsonl", **how)
        synthesize(chat, tmp_path / f"{name} prompts.jsonl", prompts=1, **how)
        seeds = [body.get("seed") for body in asked]
        assert len(seeds) >= len(ROWS) + 3
        if seed is None:
            assert not any("seed" in body for body in asked)
        else:
            assert sorted(seeds[: len(ROWS)]) == [*range(7, 7 + len(ROWS))]
        made = lines(tmp_path / f"{name}.jsonl")[0]["made"]
        assert made.get("seed") == seed
        asked.clear()


def test_a_target_is_seeded_by_default(chat, tmp_path):
    regenerate(chat, ROWS[:1], tmp_path / "out.jsonl", max_new_tokens=4)
    assert lines(tmp_path / "out.jsonl")[0]["made"]["seed"] == 0


def test_a_server_that_refuses_a_question_says_why(server, tmp_path, monkeypatch):
    """The advice was to give another address. A full queue ended the run, too."""
    url, _, refusals = server
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    writer = ServerWriter(url)
    refusals += [429]
    how = {"writer": writer, "temperatures": [0.5], "max_new_tokens": 8, "batch": 1}
    assert regenerate("never loaded", ROWS[:1], tmp_path / "out.jsonl", **how).lines == 1
    refusals += [400]
    with pytest.raises(ValueError, match="400: Bad Request: the context is too short; it was asked 'aaa'"):
        regenerate("never loaded", ROWS[:1], tmp_path / "other.jsonl", **how)
    monkeypatch.delenv("OPENAI_API_KEY")
    refusals += [401]
    with pytest.raises(ValueError, match="put its key into OPENAI_API_KEY"):
        writer.go_on(["u"], 0.5, 9, 0)
    refusals += [404]
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    with pytest.raises(ValueError, match="give the base of an OpenAI-compatible server"):
        writer.go_on(["u"], 0.5, 9, 0)


def test_what_waits_for_a_full_server_ends_with_its_run(server):
    """Ctrl-C went on asking for an hour."""
    url, _, refusals = server
    writer = ServerWriter(url)
    answers = writer.answer([TextRequest(ROWS[i % len(ROWS)], 0.5, None) for i in range(3)], 8, 1)
    next(answers)
    refusals += [429] * 60
    answers.close()
    assert len(refusals) > 50


def test_a_starting_server_is_waited_for(server, monkeypatch, capsys):
    url, _, starting = server
    starting += [503, 503]
    waits = []
    monkeypatch.setattr("slipstream.training.generators.time.sleep", waits.append)
    monkeypatch.setattr("slipstream.training.generators.STARTING", 60)
    assert ServerWriter(url).model == "tiny"
    assert len(waits) == 2
    assert capsys.readouterr().err == f"server {url} is not ready: waiting up to 60 seconds for its start\n"
    starting.append(404)
    with pytest.raises(ValueError, match="Not Found"):
        ServerWriter(url)


def test_a_long_answer_holds_up_no_others(tmp_path, monkeypatch):
    """Answers are kept in order, and are in the file before the last one is there."""
    go, path = threading.Event(), tmp_path / "out.jsonl"

    def write(self, path, body, seed):
        if body["messages"][-1]["content"] == "ccc":
            assert go.wait(20)
        elif body["messages"][-1]["content"] == "fff":
            go.set()  # sent although the third has no answer yet
        return Written(body["messages"][-1]["content"], True)

    monkeypatch.setattr(ServerWriter, "_write", write)
    writer = ServerWriter("http://nowhere", "tiny")
    regenerate("never loaded", ROWS, path, writer=writer, max_new_tokens=8, batch=2)
    assert [row["messages"][-1]["content"] for row in lines(path)] == [c * 3 for c in "abcdefg"]


def test_prompts_are_answered_while_more_are_written(chat, tmp_path):
    """A run that was cut short after minutes held no answers."""

    class Cut(Known):
        _ended = threading.Event()

        def go_on(self, texts, temperature, limit, seed):
            if (tmp_path / "out.jsonl").exists():
                raise KeyboardInterrupt
            return super().go_on(texts, temperature, limit, seed)

        def answer(self, asked, limit, batch):
            return ServerWriter.answer(self, asked, limit, batch)

        def _write(self, path, body, seed):
            return Written("an answer", True)

    with pytest.raises(KeyboardInterrupt):
        synthesize(
            chat, tmp_path / "out.jsonl", prompts=9, writer=Cut(*(c * 4 for c in "abcdefghi")), batch=3
        )
    assert lines(tmp_path / "out.jsonl")


def test_a_server_that_is_not_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("slipstream.training.generators.STARTING", 0)
    with pytest.raises(ValueError, match="give the base of an OpenAI-compatible server"):
        ServerWriter("http://127.0.0.1:9/v1")


def test_raw_texts_are_gone_on_with_and_what_follows_is_learnt(tmp_path):
    """A model without a chat template could not write data: each hint pointed to the next, in a circle."""
    target = tiny.target("llama")
    source, out = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"text": "abc"}\n{"prompt": "cde "}\n{"prompt": "ef", "completion": "to be dropped"}\n'
    )
    how = {"temperatures": [0.0], "max_new_tokens": 6, "batch": 2}
    assert regenerate(target, source, out, **how).lines == 3
    made = lines(out)
    assert [row["prompt"] for row in made] == ["abc", "cde ", "ef"]
    for row, example in zip(made, load_examples([str(out)], target, 64), strict=True):
        plain = generate(target, row["prompt"], max_new_tokens=6, temperature=0.0)
        assert row["completion"] == plain.text
        ends = [target.text.eos] if row["finished"] else []
        assert example.tokens == target.text.ids(row["prompt"]) + target.text.ids(plain.text) + ends
        assert example.prompt == target.text.ids(row["prompt"])
        assert example.greedy
    whole = out.read_text()
    out.write_text(whole[: whole.index("\n") + 9])  # interrupted
    regenerate(target, str(source), out, **how)
    assert out.read_text() == whole
    assert regenerate(target, ["abc", "cde "], tmp_path / "two.jsonl", **how).lines == 2


def test_a_prompt_without_what_follows_it_teaches_nothing(tmp_path):
    """Its end would have been learnt right behind it."""
    source = tmp_path / "texts.jsonl"
    source.write_text('{"prompt": "abc"}\n')
    with pytest.raises(ValueError, match=r"no assistant text to learn from.*slipstream regenerate"):
        load_examples([str(source)], tiny.target("llama"), 64)


def test_a_target_without_a_chat_template_writes_data_of_its_own(tmp_path):
    target, out = tiny.target("llama"), tmp_path / "out.jsonl"
    how = {
        "prompts": 5,
        "kinds": ["any", "maths"],
        "temperatures": [0.0, 0.7],
        "max_new_tokens": 6,
        "batch": 2,
    }
    assert synthesize(target, out, **how).lines == 5
    made = lines(out)
    assert [row["kind"] for row in made] == ["any", "maths", "any", "maths", "any"]
    assert len({row["prompt"] for row in made}) == 5
    assert len(load_examples([str(out)], target, 64)) == 5
    whole = out.read_text()
    for count in (1, 2, 3):
        out.write_text("".join(whole.splitlines(keepends=True)[:count]))
        synthesize(target, out, **how)
        assert out.read_text() == whole
    with pytest.raises(ValueError, match="turns needs a chat template, which llama lacks: any, maths"):
        synthesize(target, tmp_path / "b.jsonl", **how | {"kinds": ["any", "turns"]})
