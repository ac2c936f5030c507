"""A server among requests of strangers: a part of what `benchmarks/hostile.py` sends, to a tiny model."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from time import monotonic, sleep
from urllib.request import Request, urlopen

import pytest

import hostile
from hostile_requests import KINDS, OUT_OF_TIME, Hostile, bound, completion, generated, send
from slipstream.core.grammar import GrammarLimits
from slipstream.serve import run
from slipstream.serve.app import Server

EVERY = {
    "fields": 5,
    "deep grammars": 7,
    "costly grammars": 9,
}  # of so many requests one is sent: they are many
SLOW = ("40,000 biases", "a stream: slow")


def part(kind: str) -> list[Hostile]:
    """Requests of a kind."""
    asked = [each for each in KINDS[kind]("tiny") if not each.name.endswith(SLOW)]
    return asked[:: EVERY.get(kind, 1)]


def faults(port: int, requests: list[Hostile]) -> dict[str, str]:
    """What is wrong with the answers, eight requests at a time."""
    at_once = asyncio.Semaphore(8)

    async def one(request: Hostile) -> str | None:
        async with at_once:
            return request.fault(await send(port, request, 20))

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*map(one, requests))

    found = asyncio.run(all_of_them())
    return {each.name: fault for each, fault in zip(requests, found, strict=True) if fault}


def text(url: str) -> str:
    """A proper answer."""
    body = json.dumps(completion("tiny", prompt="abcabc", seed=1, max_tokens=8)).encode()
    asked = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urlopen(asked, timeout=20) as answer:
        return json.load(answer)["choices"][0]["text"]


@pytest.mark.parametrize(
    "kind",
    ["deep grammars", "costly grammars", "prompts", "hosts", "bodies", "fields", "connections", "generated"],
)
def test_a_server_refuses_what_is_hostile_and_goes_on(serve, listening, monkeypatch, kind):
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.5)
    asked = list(generated("tiny", 60, seed=3)) if kind == "generated" else part(kind)
    server = serve(hosts=[], seconds=2.0)
    with listening(server) as url:
        before = text(url)
        assert faults(int(url.rpartition(":")[2]), asked) == {}
        assert text(url) == before
        assert server.worker.alive
        assert (server.worker.running, server.worker.waiting) == (0, 0)


def test_a_grammar_takes_no_longer_than_a_request_may(serve, listening, monkeypatch):
    """On a busy machine the process that reads it waits for long, and so did its client, without end."""
    left = threading.Event()
    monkeypatch.setattr(
        Server, "_read_grammar", lambda self, *what: left.set() if what[-1].wait(20) else None
    )
    [asked] = [each for each in KINDS["costly grammars"]("tiny") if each.name == "a regex: many stars"]
    with listening(serve(seconds=0.5)) as url:
        assert asyncio.run(send(int(url.rpartition(":")[2]), asked, 10)) == 504
        assert left.wait(5)
        assert text(url)


@pytest.mark.parametrize(
    "source",
    [
        bound("tiny", "regex", "((("),
        bound("tiny", "json_schema", {"type": "integer", "multipleOf": 123456789}),
    ],
)
def test_the_process_of_a_refused_grammar_ends_with_its_request(serve, listening, source):
    """Errors held their frames, and these the processes, until the next collection: 20 stood there."""
    refused = Hostile("grammars", "a", source, wants=(400,))
    with listening(serve(grammar=GrammarLimits(seconds=0.1))) as url:
        port = int(url.rpartition(":")[2])
        assert faults(port, [refused]) == {}  # the process from which the others are forked
        gc.collect()
        before = len(hostile.processes(os.getpid()))
        gc.disable()
        try:
            assert faults(port, [refused] * 6) == {}
            until = monotonic() + 10
            while len(hostile.processes(os.getpid())) > before and monotonic() < until:
                sleep(0.05)
            assert len(hostile.processes(os.getpid())) <= before
        finally:
            gc.enable()


def test_what_counts_as_a_fault():
    """A suite that finds nothing wrong with anything would pass for ever."""
    refused = Hostile("bodies", "a", b"", wants=(413,))
    assert refused.fault(413) is None
    assert "status 200" in refused.fault(200)
    assert "status 500" in Hostile("bodies", "a", b"").fault(500)
    assert Hostile("bodies", "a", b"").fault(OUT_OF_TIME) == "no answer"
    assert Hostile("bodies", "a", b"", "leaves").fault(OUT_OF_TIME) is None


def test_requests_are_many_and_the_same_for_a_seed():
    named = [each for make in KINDS.values() for each in make("tiny")]
    ways = Counter(each.way for each in named)
    assert len(named) > 900
    assert min(ways.values()) >= 2
    assert len(ways) == 7
    assert [*generated("a", 50, 1)] == [*generated("a", 50, 1)] != [*generated("a", 50, 2)]


FOUND = {
    "beside_small_grammars_ms": {"token": 20.0, "answer": 30.0},
    "rounds": [
        {"deep grammars": {"longest_ms": {"token": 100.0, "answer": 40.0}}},
        {"fields": {"longest_ms": {"token": 999.0}}},
        {"costly grammars": {"longest_ms": {"token": 90.0, "answer": 280.0}}},
    ],
    "memory_mib": [100.0, 104.0],
    "faults": [],
    "failed_clients": {},
    "lives": True,
    "sigterm": {"idle": {"seconds": 0.2, "exit_code": 0}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, None),
        ({"beside_small_grammars_ms": {"token": 20.0, "answer": 20.0}}, "nobody waits"),
        ({"memory_mib": [100.0, 106.0]}, "memory"),
        ({"faults": [{}]}, "every answer"),
        ({"lives": False}, "the server lives"),
        ({"failed_clients": {"stream: cut off": 1}}, "no other client"),
        ({"sigterm": {"idle": {"seconds": 30.0, "exit_code": None}}}, "SIGTERM"),
    ],
)
def test_a_run_is_judged(changed, failing):
    """A token may come 250 ms late, but a wait while other kinds are sent is no grammar's."""
    holds = hostile.judged(FOUND | changed, 250.0, 5)
    assert [name.startswith(failing or "-") for name, ok in holds.items() if not ok] == [True] * bool(failing)


def test_memory_is_that_of_all_processes():
    """The compilers of grammars are processes of their own."""
    alone = hostile.memory(os.getpid())
    words = "x = bytearray(b'a' * 10**8); print(len(x), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert hostile.memory(os.getpid()) > alone + 80
        child.communicate(b"\n")
    assert child.pid not in hostile.processes(os.getpid())
