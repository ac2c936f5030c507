"""Replies: clients that leave, read slowly or wait too long; what is streamed stays."""

import asyncio
import json
import socket
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from time import perf_counter, sleep
from urllib.parse import urlsplit

import httpx
import pytest

import tiny
from slipstream import GrammarLimits, generate
from slipstream.serve.replies import Form, Place
from slipstream.serve.worker import Likely
from slipstream.targets import HFTarget
from slipstream.targets.grammar import HOSTS

LONG = {"model": "tiny", "prompt": "abc", "max_tokens": 120}
SHORT = LONG | {"max_tokens": 10}


def test_a_client_that_leaves_frees_its_rows(client):
    """In the midst of a stream, and while it waits for the whole, in rows and in the queue."""
    here = client()
    for body, leaves in [(LONG | {"stream": True}, 3), (LONG, 0), (LONG | {"n": 12}, 0)]:
        data = json.dumps(body).encode()
        here.loop.run_until_complete(here.send("/v1/completions", data, leaves=leaves))
        line = json.loads(here.server.lines[-1])
        assert line["ended"] == "the client left"
        assert line["completion_tokens"] < 120
        assert here.idle()
    assert here.post("/v1/completions", SHORT)[0] == 200


def test_a_connection_that_breaks_frees_its_row(serve, listening):
    server = serve()
    with listening(server) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            body = json.dumps(LONG | {"stream": True})
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert b"200 OK" in connection.recv(2000)
        until = perf_counter() + 5
        while server.worker.running and perf_counter() < until:
            pass
        assert not server.worker.running


def grammar_processes(server) -> list[str]:
    """Of the server's process for grammars, if it has one."""
    return [
        pid
        for made in HOSTS.get(server.target, {}).values()
        for pid in Path(f"/proc/{made._process.pid}/task/{made._process.pid}/children").read_text().split()
    ]


def ends_soon(server) -> bool:
    until = perf_counter() + 20
    while grammar_processes(server) and perf_counter() < until:
        sleep(0.02)
    return not grammar_processes(server)


def test_a_grammar_that_takes_long_delays_nobody_and_ends_with_its_client(serve, listening):
    """All others timed out for an hour, and neither the client's leaving nor a signal ended it."""
    server = serve(grammar=GrammarLimits(seconds=600.0))
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 123456789}}}
    body = json.dumps(SHORT | {"response_format": bad})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    asked = f"{head}Content-Type: application/json\r\n\r\n{body}".encode()
    with ExitStack() as held, listening(server, grace=1) as url:
        place = urlsplit(url)
        bounded = SHORT | {"response_format": {"type": "choice", "choice": ["yes", "no"]}}
        answer = httpx.post(f"{url}/v1/completions", json=bounded, timeout=60)
        assert answer.json()["choices"][0]["text"] in ("yes", "no")
        assert ends_soon(server)

        with ExitStack() as leaving:
            for _ in range(3):
                connection = socket.create_connection((place.hostname, place.port))
                leaving.enter_context(connection).sendall(asked)
            until = perf_counter() + 20
            while len(grammar_processes(server)) < 3 and perf_counter() < until:
                sleep(0.02)
            assert len(grammar_processes(server)) == 3
            for body in (SHORT, bounded):
                assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
            assert len(grammar_processes(server)) >= 3
        assert ends_soon(server)
        ended = [json.loads(line).get("ended") for line in server.lines]
        assert ended.count("the client left") == 3

        held.enter_context(socket.create_connection((place.hostname, place.port))).sendall(asked)
        while not grammar_processes(server):
            sleep(0.02)
        began = perf_counter()
    assert perf_counter() - began < 20
    assert ends_soon(server)


def test_a_grammar_that_is_too_large_is_refused_by_the_limit(client):
    here = client(grammar=GrammarLimits(seconds=0.1))
    schema = {"type": "integer", "multipleOf": 123456789}
    bad = {"type": "json_schema", "json_schema": {"schema": schema}}
    status, body = here.post("/v1/completions", SHORT | {"response_format": bad})
    assert status == 400
    assert "more than 0.1 s of processor time" in body["error"]["message"]


def test_a_slow_reader_slows_nobody(client):
    """One takes 0.2 s for each piece, and gets together what waited. The other's answer comes at once."""
    here = client(rows=2)
    data = json.dumps(LONG | {"stream": True}).encode()
    times = []

    async def slowly(message):
        await asyncio.sleep(0.2)

    async def both():
        slow = asyncio.ensure_future(here.send("/v1/completions", data, reads=slowly))
        await asyncio.sleep(0.1)
        began = perf_counter()
        quick = await here.send("/v1/completions", data)
        times.append(perf_counter() - began)
        assert not slow.done()
        while here.server.worker.running:
            await asyncio.sleep(0.01)
        assert not slow.done()
        return await slow, quick

    slow, quick = here.loop.run_until_complete(both())
    texts = [said(body) for _, _, body in (slow, quick)]
    assert texts[0] == texts[1] == generate(here.server.target, tiny_ids("abc"), max_new_tokens=120).text


def test_a_request_may_take_so_long(client):
    """Without a reader, too: one that never reads holds nothing for ever."""
    here = client(seconds=0.05)
    long = json.dumps(LONG).encode()
    status, headers, body = here.loop.run_until_complete(here.send("/v1/completions", long))
    assert (status, json.loads(body)["error"]["type"]) == (504, "timeout")
    assert headers[b"x-should-retry"] == b"false"  # OpenAI's client asked three times
    assert here.idle()

    async def never(message):
        await asyncio.sleep(60)

    began = perf_counter()
    data = json.dumps(LONG | {"stream": True}).encode()
    here.loop.run_until_complete(here.send("/v1/completions", data, reads=never))
    assert perf_counter() - began < 5
    assert here.idle()


def test_a_seed_is_a_number_that_javascript_has(client):
    """What it rounds made another text."""
    here = client()
    seeds = [here.post("/v1/completions", SHORT)[1]["seed"] for _ in range(8)]
    assert len(set(seeds)) == 8
    assert max(seeds) < 2**53


def test_a_trace_shows_nothing_of_other_requests(client):
    """Guesses from what is remembered are another client's words."""
    traced = SHORT | {"stream": True, "trace": True}
    status, made = client(drafter="suffix:remember=1").post("/v1/completions", traced)
    assert (status, made["error"]["param"]) == (400, "trace")
    here = client(drafter="suffix")
    assert here.loop.run_until_complete(here.send("/v1/completions", json.dumps(traced).encode()))[0] == 200


def test_a_generation_config_that_cannot_be_honoured_is_refused_at_the_start(serve, chatting):
    """Every request got a 400 that told the client to change the server's model."""
    beams = HFTarget(deepcopy(chatting.model), chatting.text.tokenizer)
    beams.model.generation_config.num_beams = 4
    with pytest.raises(ValueError, match="num_beams"):
        serve(target=beams)


def test_a_full_server_says_when_to_come_again(client):
    here = client(rows=1, queue=1)

    async def three():
        data = json.dumps(LONG).encode()
        return await asyncio.gather(*(here.send("/v1/completions", data) for _ in range(3)))

    answers = here.loop.run_until_complete(three())
    assert sorted(status for status, _, _ in answers) == [200, 200, 429]
    [(_, headers, body)] = [each for each in answers if each[0] == 429]
    assert int(headers[b"retry-after"]) >= 1
    assert json.loads(body)["error"]["type"] == "rate_limit_error"


def test_no_piece_is_taken_back(client):
    """A stop string that begins in one round and ends in another, and one that begins and does not end."""
    here = client(drafter="vanilla")
    text = generate(here.server.target, tiny_ids("abc"), max_new_tokens=40).text
    stop = text[20:23]
    cut = text[: text.index(stop)]
    body = LONG | {"stream": True, "max_tokens": 40, "stop": [stop, text[5:8] + "#"], "logprobs": 0}
    _, _, data = here.loop.run_until_complete(here.send("/v1/completions", json.dumps(body).encode()))
    assert said(data) == cut
    choices = [choice for event in events(data) for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "stop"
    assert "".join(token for choice in choices for token in choice["logprobs"]["tokens"]) == cut


def test_a_failure_in_the_midst_of_a_stream_is_an_event(client, monkeypatch):
    here, calls = client(), []
    decode = here.server.worker.engine.decode

    def fails(*args):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("no more")
        return decode(*args)

    monkeypatch.setattr(here.server.worker.engine, "decode", fails)
    data = json.dumps(LONG | {"stream": True}).encode()
    status, _, body = here.loop.run_until_complete(here.send("/v1/completions", data))
    assert status == 200
    assert json.loads(body.decode().strip().rsplit("data: ", 1)[1])["error"]["message"].endswith("no more")
    assert here.post("/v1/completions", SHORT)[0] == 200


def test_parts_of_a_character_have_its_bytes(smollm2):
    """Clients join them. Completions name such tokens by their bytes; they begin where the character does."""
    text = smollm2[0].target.text
    tokens = text.ids("a😀é")
    entries = [Form(True, "smollm2", 0, "", text)._entry(token, -1.0) for token in tokens]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "a😀é"
    assert len(tokens) > 3
    told = [Likely(token, -1.0, [(other, -2.0) for other in tokens]) for token in tokens]
    given = Form(False, "smollm2", 0, "", text).likely(told, Place())
    assert given["tokens"][0] == "a"
    assert given["tokens"][1].startswith("bytes:\\xf0")
    assert all(len(top) == len({*tokens}) for top in given["top_logprobs"])
    assert given["text_offset"][:3] == [0, 1, 1]
    assert given["text_offset"][-1] == 2


def events(data: bytes) -> list:
    parts = data.decode().strip().split("\n\n")
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def said(data: bytes) -> str:
    return "".join(choice["text"] for event in events(data) for choice in event["choices"])


def tiny_ids(text: str) -> list[int]:
    return [tiny.LETTERS.index(letter) for letter in text]
