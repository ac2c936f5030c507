"""The guard: keys, sizes, and logs that say nothing of prompts."""

import asyncio
import json

import pytest

ASKED = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 5}
BODY = json.dumps(ASKED).encode()


@pytest.mark.parametrize("given", [None, b"Bearer wrong", b"Basic secret", b"secret", b"Bearer \xff"])
def test_without_the_key_there_is_no_answer(client, given):
    here = client(keys=["other", "secret"])
    headers = [] if given is None else [(b"authorization", given)]
    for path in ("/v1/completions", "/v1/nothing"):
        status, _, body = here.loop.run_until_complete(here.send(path, BODY, headers=headers))
        assert status == 401
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
    health, _, _ = here.loop.run_until_complete(here.send("/health", method="GET"))
    assert health == 200


def test_with_the_key_there_is_one(client):
    here = client(keys=["other", "secret"])
    assert here.post("/v1/completions", ASKED, headers=[(b"authorization", b"Bearer secret")])[0] == 200


LOCAL = [b"127.0.0.1:8000", b"localhost", b"LOCALHOST.:80", b"[::1]:8000", b"127.9.9.9", b"own.example:1"]
STRANGE = [
    b"evil.example",
    b"127.0.0.1.evil.example",
    b"localhost.evil.example:8000",
    b"0.0.0.0",
    b"[::1",
    b"",
]


@pytest.mark.parametrize("host", LOCAL)
def test_names_of_the_loopback_and_those_allowed_are_answered(client, host):
    here = client(hosts=["own.example"])
    for headers in ([(b"host", host)], [(b"host", host), (b"origin", b"http://" + host)]):
        assert here.post("/v1/completions", ASKED, headers=headers)[0] == 200


@pytest.mark.parametrize("host", STRANGE)
def test_other_names_are_not_answered(client, host):
    """By DNS rebinding, a page of any site could read what a server on the loopback says."""
    here, anywhere = client(hosts=[]), client()
    pages = [b"http://" + host, b"null", b"file://"]
    asked = [
        (421, [(b"host", host)]),
        *((403, [(b"host", b"localhost"), (b"origin", page)]) for page in pages),
    ]
    for wanted, headers in asked:
        for path, method in (("/v1/completions", "POST"), ("/metrics", "GET"), ("/", "GET")):
            how = {"method": method, "headers": headers}
            status, _, body = here.loop.run_until_complete(here.send(path, BODY, **how))
            assert status == wanted
            assert "--allowed-host" in json.loads(body)["error"]["message"]
        assert anywhere.post("/v1/completions", ASKED, headers=headers)[0] == 200


@pytest.mark.parametrize("told", [True, False])
def test_a_body_may_be_so_large(client, told):
    """Also where its length is not given beforehand."""
    here = client(body=1000)
    headers = [(b"content-length", b"1001")] if told else []
    large = json.dumps(ASKED | {"prompt": "a" * 1000}).encode()
    status, _, body = here.loop.run_until_complete(here.send("/v1/completions", large, headers=headers))
    assert status == 413
    assert "at most 1,000 bytes" in json.loads(body)["error"]["message"]
    assert here.post("/v1/completions", ASKED)[0] == 200


def test_a_body_must_come_soon(client):
    here = client(seconds=0.05)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")], "raw_path": b"", "http_version": "1.1"}
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    here.loop.run_until_complete(here.server.app(scope, receive, send))
    assert sent[0]["status"] == 408


def test_a_log_has_a_line_for_each_request_and_no_prompts(client):
    here = client()
    _, made = here.post("/v1/completions", ASKED | {"drafter": "vanilla"})
    here.post("/v1/completions", ASKED | {"prompt": 5})
    here.loop.run_until_complete(here.send("/health", method="GET"))
    assert len(here.server.lines) == 2
    first, second = map(json.loads, here.server.lines)
    assert (first["status"], second["status"]) == (200, 400)
    assert (first["prompt_tokens"], first["completion_tokens"]) == (9, 5)
    assert {"tau", "drafted_tokens", "accepted_tokens", "queued", "seconds", "finish"} <= first.keys()
    for line in here.server.lines:
        assert "abc" not in line
        assert made["choices"][0]["text"] not in line
