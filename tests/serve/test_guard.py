"""The guard: keys, sizes, and logs that say nothing of prompts."""

import asyncio
import json

import pytest

ASKED = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 5}
BODY = json.dumps(ASKED).encode()


@pytest.mark.parametrize("given", [None, b"Bearer wrong", b"Basic secret", b"secret", b"Bearer \xff"])
def test_without_the_key_there_is_no_answer(client, given):
    here = client(key="secret")
    headers = [] if given is None else [(b"authorization", given)]
    for path in ("/v1/completions", "/v1/nothing"):
        status, _, body = here.loop.run_until_complete(here.send(path, BODY, headers=headers))
        assert status == 401
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
    health, _, _ = here.loop.run_until_complete(here.send("/health", method="GET"))
    assert health == 200


def test_with_the_key_there_is_one(client):
    here = client(key="secret")
    assert here.post("/v1/completions", ASKED, headers=[(b"authorization", b"Bearer secret")])[0] == 200


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
