"""Thousands of malformed requests: none breaks the server, none leaves a row, each gets OpenAI's error."""

import asyncio
import json
import random
from copy import deepcopy

import pytest
import torch
from pydantic import ValidationError

from slipstream.serve.schema import Bias, ChatCompletion, Completion, Message

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "abc"}],
    "max_tokens": 2,
    "temperature": 0.5,
    "stop": ["zz"],
    "logprobs": True,
    "top_logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
}
COMPLETION = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "n": 2, "seed": 1, "logit_bias": {"3": 1.0}}
FIELDS = [*CHAT, *COMPLETION, "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "drafter"]
FIELDS += ["frequency_penalty", "max_completion_tokens", "echo", "tools", "response_format", "bogus", "user"]
FIELDS += ["tool_choice", "trace"]


def nested(depth: int) -> list:
    made: list = []
    for _ in range(depth):
        made = [made]
    return made


JUNK = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.5, 1e308, 1e-320, "", " ", "a"]
JUNK += [
    "\ud800",
    "\x00",
    "𝔘" * 50,
    "x" * 3000,
    [],
    [[]],
    [None],
    [1, "a"],
    [63],
    [64],
    [[1], [2]],
    ["a", "b"],
]
JUNK += [{}, {"a": 1}, {"3": "x"}, {"3": 1e9}, {"-1": 1}, {"٣": 1}, [{}], [{"role": "user"}], nested(50)]
JUNK += [{"include_usage": 1}, [{"role": "user", "content": [{"type": "text"}]}], list(range(300)), "vanilla"]
JUNK += [[{"role": "user", "content": "a", "tool_calls": [{}]}], [{"role": "user", "content": "\udfff"}]]
JUNK += [{"type": "regex", "regex": r} for r in ("a{1,9}", "(", "\ud800", "(a*)*" * 30)]
JUNK += [
    {"type": "json_schema", "json_schema": {"schema": s}} for s in ({}, {"$ref": "#"}, {"type": "\udfff"})
]
JUNK += [{"type": "choice", "choice": ["a", ""]}, {"type": "grammar", "grammar": "start: start"}]
JUNK += [[{"type": "function", "function": {"name": "f", "parameters": nested(9)}}]]
RAW = [b"", b"{", b"null", b"[]", b'"a"', b"NaN", b"\xff\xfe{}", b"{" * 5000, b"[" * 100_000, b"\x00" * 100]
RAW += [b'{"model":"tiny","prompt":"a","temperature":NaN}', b'{"model":"tiny","seed":' + b"9" * 5000 + b"}"]
RAW += [b'{"model": "tiny", "prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", json.dumps(CHAT).encode("utf-16")]
HEADERS = [(b"content-type", b"text/plain"), (b"content-type", b""), (b"content-length", b"x"), (b"", b"")]
HEADERS += [(b"content-length", b"9" * 30), (b"authorization", b"\xff"), (b"content-encoding", b"gzip")]
HEADERS += [(b"content-type", b"application/json; charset=utf-99"), (b"transfer-encoding", b"chunked")]
PATHS = ["/v1/chat/completions", "/v1/completions"]


def malformed(chance: random.Random) -> tuple[str, str, bytes, list]:
    """Method, path, body and headers."""
    at = chance.randrange(2)
    path, body = PATHS[at], deepcopy((CHAT, COMPLETION)[at])
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.15:
            body.pop(chance.choice([*body]), None)
        else:
            body[chance.choice(FIELDS)] = deepcopy(chance.choice(JUNK))
    data, headers, method = json.dumps(body).encode(), [], "POST"
    kind = chance.random()
    if kind < 0.1:
        data = chance.choice(RAW)
    elif kind < 0.2:
        data = data[: chance.randrange(len(data))]
    elif kind < 0.25:
        place = chance.randrange(len(data))
        data = data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
    elif kind < 0.3:
        headers = [chance.choice(HEADERS)]
    elif kind < 0.35:
        method = chance.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"])
    elif kind < 0.4:
        path = chance.choice(["/", "/v1", "/v1/models/?", "/v1/models/../x", "//v1/completions", "/docs"])
    return method, path, data, headers


def test_malformed_requests_break_nothing(client):
    """2,400 of them, twelve at once; good ones among them are answered as before."""
    ask, chance, counts = client(context=24, queue=1000), random.Random(0), {}
    good = {"model": "tiny", "prompt": "abc", "max_tokens": 6}
    before = ask.post("/v1/completions", good)

    async def all_of(requests):
        sent = (ask.send(path, body, method, headers) for method, path, body, headers in requests)
        return await asyncio.gather(*sent)

    for _ in range(200):
        requests = [malformed(chance) for _ in range(12)]
        answers = ask.loop.run_until_complete(all_of(requests))
        for request, (status, headers, body) in zip(requests, answers, strict=True):
            counts[status] = counts.get(status, 0) + 1
            assert status < 500, request
            if status >= 400 and request[0] != "HEAD":
                message = json.loads(body)["error"]["message"]
                assert message, request
                assert "\n" not in message, request
                assert headers[b"content-type"] == b"application/json"
    assert ask.idle()
    assert counts[400] > 1200
    assert counts[200] > 100
    after = ask.post("/v1/completions", good)
    assert after[1]["choices"] == before[1]["choices"]


def test_an_answer_may_be_sent_back_as_the_openai_client_has_it():
    """After `parse` and after a stream it has fields that were refused, this server's `index` among them."""
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "1", "type": "function", "index": 0, "function": function}
    sent = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "parsed": None,
        "reasoning_content": None,
    }
    turn = Message.model_validate(sent).turn
    assert turn["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    assert (
        Message.model_validate({"role": "assistant", "content": "{}", "parsed": {"a": 1}}).turn["content"]
        == "{}"
    )


def test_a_developer_is_the_system():
    """Templates know no developer: the shipped one put its own system prompt before it."""
    assert Message(role="developer", content="Be brief.").turn == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("prompt", [[True], [1.0], ["5", 7], [["5"]]])
def test_what_looks_like_a_number_is_no_token_id(client, prompt):
    """Texts that were read as ids; true as the id 1."""
    status, told = client().post("/v1/completions", {"model": "tiny", "prompt": prompt})
    assert status == 400
    assert "Input should be a valid integer" in told["error"]["message"]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (Completion, {"prompt": "a", **dict.fromkeys(map(str, range(9)), 1)}),
        (Completion, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(9)), 1e9)}),
        (Completion, {"prompt": "a", "stream": True, "stream_options": {"a": 1, "b": 2, "c": 3}}),
        (ChatCompletion, {"messages": [{"role": "user", "content": "a", "b": 1, "c": 2}]}),
    ],
)
def test_the_first_of_many_faults_is_enough(model, body):
    """50,000 unknown fields held every stream for half a second."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"model": "tiny"} | body)
    assert caught.value.error_count() == 1


def test_logit_bias_adds_to_the_scores_of_its_tokens():
    bias = Bias.of({"2": 5.0, "0": -100.0}, 4)
    made = bias(torch.tensor([[1]]), torch.zeros(1, 4, dtype=torch.float64))
    assert made.tolist() == [[-100.0, 0.0, 5.0, 0.0]]
