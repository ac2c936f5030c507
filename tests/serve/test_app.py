"""What OpenAI's own client gets from a running server is what `generate` says alone."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

from slipstream import generate
from slipstream.core.tree import chain
from slipstream.targets.prompts import encode

ASKED = [{"role": "user", "content": "What is gravity?"}]
NEW = 10


@pytest.fixture(scope="module")
def chat(smollm2):
    with openai.OpenAI(api_key="none", base_url=f"{smollm2[1]}/v1", max_retries=0) as client:

        def ask(messages=ASKED, **how):
            how = {"model": "smollm2", "max_tokens": NEW} | how
            return client.chat.completions.create(messages=messages, **how)

        ask.client = client
        yield ask


@pytest.fixture(scope="module")
def complete(chat):
    def ask(prompt, **how):
        how = {"model": "smollm2", "max_tokens": NEW} | how
        return chat.client.completions.create(prompt=prompt, **how)

    return ask


def test_a_chat_says_what_generate_says(smollm2, chat):
    made = chat()
    alone = generate(smollm2[0].target, ASKED, "vanilla", max_new_tokens=NEW)
    assert made.choices[0].message.content == alone.text
    assert made.choices[0].finish_reason == "length"
    assert made.usage.prompt_tokens == len(alone.prompt)
    assert made.usage.completion_tokens == NEW
    assert made.usage.tau >= 1
    assert made.usage.accepted_tokens <= made.usage.drafted_tokens


def test_a_stream_says_it_piece_by_piece_and_ends_with_the_usage(chat):
    events = list(chat(stream=True, stream_options={"include_usage": True}))
    pieces = [event.choices[0].delta.content or "" for event in events[:-1]]
    assert "".join(pieces) == chat().choices[0].message.content
    assert sum(map(bool, pieces)) > 2
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * (len(events) - 2) + [
        "length"
    ]
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == NEW
    assert all(event.usage is None for event in events[:-1])


def test_mixed_requests_at_once_say_what_each_says_alone(smollm2, complete):
    """Rows that trade places, a history or a seed of another request, guesses in a text decoded plainly."""
    prompts = ["The capital of France is", "def add(a, b):", "One, two, three,", "Water is"] * 2
    how = [
        {"seed": 3},
        {"seed": 4, "temperature": 1.0, "top_p": 0.9},
        {"seed": 5, "temperature": 0.7, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"seed": 6, "temperature": 1.2, "extra_body": {"top_k": 40, "min_p": 0.02, "drafter": "vanilla"}},
        {"seed": 7, "temperature": 1.0, "extra_body": {"drafter": "auto", "repetition_penalty": 1.3}},
        {"seed": 8, "extra_body": {"drafter": "vanilla"}},
        {"seed": 9, "temperature": 1.0, "n": 2},
        {"seed": 10, "stop": [" the", "\n"]},
    ]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda pair: complete(pair[0], **pair[1]), zip(prompts, how, strict=True)))
    target = smollm2[0].target
    for prompt, answer, asked in zip(prompts, answers, how, strict=True):
        settings = {**asked, **asked.pop("extra_body", {})}
        plain = [settings.pop("extra_body", None), settings.pop("drafter", None)][1] == "vanilla"
        ids = [target.text.ids(prompt, special=True)] * settings.pop("n", 1)
        alone = generate(target, ids, "vanilla", max_new_tokens=NEW, **settings)
        assert [each.text for each in answer.choices] == [each.text for each in alone]
        assert answer.usage.completion_tokens == sum(len(each.tokens) for each in alone)
        assert answer.seed == asked["seed"]
        assert not (plain and answer.usage.drafted_tokens)


def test_several_prompts_and_token_ids(smollm2, complete):
    target = smollm2[0].target
    ids = [target.text.ids(prompt) for prompt in ("Red and", "Up and")]
    alone = [each.text for each in generate(target, ids, "vanilla", max_new_tokens=4)]
    assert [each.text for each in complete(["Red and", "Up and"], max_tokens=4).choices] == alone
    assert [each.text for each in complete(ids, max_tokens=4).choices] == alone
    assert complete(ids[0], max_tokens=4).choices[0].text == alone[0]


def test_a_completion_may_echo_its_prompt(smollm2, complete):
    said = complete(["Red and", "Up and"], max_tokens=4, n=2, temperature=1.0, seed=1)
    echoed = complete(["Red and", "Up and"], max_tokens=4, n=2, temperature=1.0, seed=1, echo=True)
    prompts = ["Red and", "Red and", "Up and", "Up and"]
    assert [each.text for each in echoed.choices] == [
        prompt + each.text for prompt, each in zip(prompts, said.choices, strict=True)
    ]
    ids = smollm2[0].target.text.ids("Red and")
    events = complete(ids, max_tokens=4, echo=True, stream=True)
    assert "".join(event.choices[0].text for event in events).startswith("Red and")
    with pytest.raises(openai.BadRequestError, match="echo cannot be had with logprobs"):
        complete("Red and", echo=True, logprobs=1)


def test_a_stream_holds_the_tree_of_each_round_where_asked(chat):
    events = list(chat(stream=True, extra_body={"trace": True}))
    trees = [event.trace for event in events if getattr(event, "trace", None)]
    pieces = "".join(piece for tree in trees for piece in tree["pieces"])
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text.endswith(pieces)
    assert sum(len(tree["pieces"]) for tree in trees) == NEW - 1  # the first is the prompt's
    for tree in trees:
        assert tree["path"][0] == 0
        assert len(tree["parents"]) == len(tree["texts"]) == len(tree["p"])
        assert max(*tree["texts"], tree["own"]) < len(tree["words"])
    assert not any(getattr(event, "trace", None) for event in chat(stream=True))


def test_log_probabilities_are_the_targets_own(smollm2, chat, complete):
    """Those of another node of the tree, or of the penalised scores."""
    target = smollm2[0].target
    alone = generate(target, ASKED, "vanilla", max_new_tokens=NEW)
    cache = target.new_cache(1)
    tree = chain(torch.tensor([[*alone.prompt, *alone.tokens]]))
    with torch.inference_mode():
        logits = target(tree, cache).logits[0, len(alone.prompt) - 1 : -1].double()
    wanted = logits.log_softmax(-1)
    given = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(given) == NEW
    for entry, row, token in zip(given, wanted, alone.tokens, strict=True):
        assert math.isclose(entry.logprob, float(row[token]), abs_tol=1e-9)
        assert [e.logprob for e in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-9)
        assert entry.token == target.text.decode([token])
        assert bytes(entry.bytes).decode() == entry.token
    streamed = chat(stream=True, logprobs=True, top_logprobs=3, frequency_penalty=1e-9)
    parts = [e.choices[0].logprobs.content for e in streamed if e.choices[0].logprobs]
    assert [entry.logprob for part in parts for entry in part] == [entry.logprob for entry in given]
    legacy = complete(alone.prompt, logprobs=2).choices[0]
    assert legacy.logprobs.token_logprobs == [entry.logprob for entry in given]
    assert "".join(legacy.logprobs.tokens) == legacy.text
    assert legacy.logprobs.text_offset[3] == len("".join(legacy.logprobs.tokens[:3]))


def test_a_seed_makes_a_text_again_and_none_makes_another(chat):
    first, other = chat(temperature=1.5), chat(temperature=1.5)
    assert other.choices[0].message.content != first.choices[0].message.content
    assert (
        chat(temperature=1.5, seed=first.seed).choices[0].message.content == first.choices[0].message.content
    )


def test_a_bias_forbids_a_token(smollm2, chat):
    first = encode(smollm2[0].target, ASKED)
    token = generate(smollm2[0].target, first, "vanilla", max_new_tokens=1).tokens[0]
    said = chat(logit_bias={str(token): -100}).choices[0].message.content
    assert said != chat().choices[0].message.content
    assert said


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["natural", "légal"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def test_answers_keep_to_what_the_response_format_says(smollm2, chat, complete):
    """All kinds at once in one session, and in a stream."""
    formats = [
        (
            {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            {"json_schema": PERSON},
        ),
        ({"type": "regex", "regex": "[A-Z][a-z]{2,9}!"}, {"regex": "[A-Z][a-z]{2,9}!"}),
        ({"type": "choice", "choice": ["yes", "no, never"]}, {"choice": ["yes", "no, never"]}),
        (
            {"type": "grammar", "grammar": 'start: "(" start ")" | "o"'},
            {"grammar": 'start: "(" start ")" | "o"'},
        ),
        ({"type": "text"}, {}),
    ]
    how = {"max_tokens": 40, "temperature": 1.0, "seed": 5}
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda pair: chat(response_format=pair[0], **how), formats))
    for (_, bounds), answer in zip(formats, answers, strict=True):
        options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 5, **bounds}
        assert (
            answer.choices[0].message.content == generate(smollm2[0].target, ASKED, "vanilla", **options).text
        )
    assert sorted(json.loads(answers[0].choices[0].message.content)) == ["kind", "name"]
    assert answers[0].choices[0].finish_reason == "stop"
    assert answers[0].usage.tau > 1.5  # names of fields are drafted for nothing
    stream = chat(stream=True, response_format=formats[0][0], **how)
    pieces = [event.choices[0].delta.content or "" for event in stream]
    assert "".join(pieces) == answers[0].choices[0].message.content
    some = chat(response_format={"type": "json_object"}, **how).choices[0].message.content
    assert some.startswith("{")
    legacy = complete("Is it?", extra_body={"response_format": formats[2][0]})
    assert legacy.choices[0].text in formats[2][0]["choice"]


def test_a_grammar_without_a_way_on_is_the_requests_own_fault(chat, caplog):
    """Not the server's, whose log it filled, and no other's: the one beside it is answered."""
    dead = {"response_format": {"type": "grammar", "grammar": 'start: "ab" X\nX: /a/ & /b/'}}
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(chat, max_tokens=12)
        with pytest.raises(openai.BadRequestError, match="the grammar cannot go on"):
            chat(max_tokens=12, extra_body=dead)
        assert whole.result().choices[0].message.content
    assert not caplog.records


def test_a_conversation_goes_on_without_reading_its_past_again(smollm2, chat):
    """And says what it says alone."""
    target, turns = smollm2[0].target, [{"role": "user", "content": "Name two rivers of Asia. " * 8}]
    first = chat(turns)
    turns += [{"role": "assistant", "content": first.choices[0].message.content}]
    turns += [{"role": "user", "content": "And one of Africa?"}]
    second = chat(turns)
    known, asked = second.usage.prompt_tokens_details.cached_tokens, second.usage.prompt_tokens
    assert known > 0
    assert known % 64 == 0
    assert 0 < asked - known < 64 + 30
    alone = generate(target, turns, "vanilla", max_new_tokens=NEW)
    assert second.choices[0].message.content == alone.text


def test_models(chat):
    assert [model.id for model in chat.client.models.list()] == ["smollm2"]
    assert chat.client.models.retrieve("smollm2").exactness in ("bits", "audited")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        chat.client.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "there is no model 'gpt'"),
        ({"temperature": -1}, openai.BadRequestError, "temperature is -1.0; it must be 0"),
        ({"max_tokens": 5000}, openai.BadRequestError, "at most 4096 tokens of prompt and answer"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens: Input should be greater than"),
        ({"n": 1000}, openai.BadRequestError, "1000 texts are asked for; this server takes at most 43"),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "needs the field json_schema"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format.type: Input should"),
        (
            {"response_format": {"type": "regex", "regex": "[a"}},
            openai.BadRequestError,
            "regex cannot be read",
        ),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools.0.function: Field required"),
        ({"extra_body": {"trace": True}}, openai.BadRequestError, "trace needs stream"),
        (
            {"extra_body": {"drafter": "eagle"}},
            openai.BadRequestError,
            "this server has 'vanilla' and 'auto'",
        ),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs needs logprobs"),
        ({"stop": ""}, openai.BadRequestError, "a stop string is empty"),
        ({"logit_bias": {"a": 1}}, openai.BadRequestError, "'a', which is no token id"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "vocabulary has 0 to 49151"),
        ({"messages": []}, openai.BadRequestError, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "bard", "content": "x"}]}, openai.BadRequestError, "messages.0.role: "),
    ],
)
def test_a_mistake_is_one_clear_line(chat, asked, error, says):
    with pytest.raises(error) as raised:
        chat(**asked)
    assert says in raised.value.body["message"]
    assert "\n" not in raised.value.body["message"]
    assert raised.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"", "json", "the body is empty: send a JSON object"),
        (b"[]", "json", "the body is a list: send a JSON object"),
        (b"{", "json", "the body is no JSON: Expecting property name .* at character 1"),
        (b'"\xff"', "json", "the body is not UTF-8 text"),
        (b"[" * 9999, "json", "the body cannot be read as JSON: maximum recursion depth"),
        (b"1" * 5000, "json", r"the body cannot be read as JSON: Exceeds the limit \(4300 digits\)[^;]*"),
        (b'{"model": "tiny"}', "x-www-form-urlencoded", "send the header Content-Type: application/json"),
    ],
)
def test_a_body_that_is_no_json_object_is_called_so(client, body, kind, says):
    """It was "1: JSON decode error, not a dict", and of dictionaries where a header was missing."""
    made, headers = client(), [(b"content-type", f"application/{kind}".encode())]
    status, _, data = made.loop.run_until_complete(made.send("/v1/completions", body, headers=headers))
    error = json.loads(data)["error"]
    assert (status, error["param"]) == (400, None)
    assert re.search(says, error["message"])
    assert ";" not in error["message"]


def test_a_chat_without_a_limit_goes_on_to_its_end(client, monkeypatch):
    """It was cut off behind as many tokens as `generate` takes, where clients of OpenAI's expect all."""
    monkeypatch.setattr("slipstream.engine.sampling_params.NEW_TOKENS", 4)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a b"}], "temperature": 0}
    _, told = client().post("/v1/chat/completions", asked)
    ends, used = told["choices"][0]["finish_reason"], told["usage"]
    assert ends == "stop" or used["total_tokens"] == 128
    assert used["completion_tokens"] > 4


def test_what_clients_look_for_in_an_error(client):
    made = client()
    status, told = made.post("/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 9999})
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
    long = {"model": "tiny", "prompt": [5] * (2 * made.server.target.window)}  # had no code
    status, told = made.post("/v1/completions", long)
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
    two = {"model": "tiny", "max_tokens": 3, "max_completion_tokens": 5}  # one was dropped
    status, told = made.post("/v1/chat/completions", two | {"messages": [{"role": "user", "content": "a"}]})
    assert status == 400
    assert "give one of them" in told["error"]["message"]
    made.server.worker.close()  # a traceback each
    status, told = made.post("/v1/completions", {"model": "tiny", "prompt": "abc"})
    assert (status, told["error"]["type"]) == (503, "server_error")
    status, headers, _ = made.loop.run_until_complete(made.send("/v1/models", b"", method="PUT"))
    assert (status, dict(headers)[b"allow"]) == (405, b"GET")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "messages: Field required"),
        ({"messages": []}, "messages: List should have at least 1 item after validation, not 0"),
        ({"messages": [{"role": "user"}]}, "messages.0: a message needs content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content: only parts of type 'text' can be read, not 'image_url'",
        ),
        (
            {"messages": ASKED, "stop": 5},
            "stop.str: Input should be a valid string, not 5; "
            "stop.list[str]: Input should be a valid list, not 5",
        ),
        (
            {"messages": ASKED, "response_format": {"type": "regex", "regex": "\ud800"}},
            "regex is no Unicode text (bytes that are not UTF-8?): give it as UTF-8",
        ),
    ],
)
def test_a_fault_of_a_field_is_told_whole(client, asked, says):
    status, told = client().post("/v1/chat/completions", {"model": "tiny", **asked})
    assert (status, told["error"]["message"]) == (400, says)


def test_what_changes_nothing_is_taken(chat):
    harmless = {"user": "me", "metadata": {"a": "b"}, "tools": [], "response_format": {"type": "text"}}
    harmless |= {"reasoning_effort": "none", "verbosity": "medium", "extra_body": {"of_another_server": None}}
    assert chat(**harmless, n=None, stop=None).choices[0].message.content == chat().choices[0].message.content


MANY = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "asked", "fault"),
    [
        ("completions", {"prompt": ["a"] * 100_000}, "100000 texts are asked for"),
        ("completions", {"prompt": ["a"] * 4, "n": 4}, "16 texts are asked for"),
        ("completions", {"prompt": [[1]] * 100_000}, "100000 texts are asked for"),
        ("completions", {"prompt": "a" * 100_000}, "tokens at least"),
        ("completions", {"prompt": [1] * 129}, "the prompt has 129 tokens at least"),
        ("chat/completions", {"messages": MANY, "n": 13}, "13 texts are asked for"),
        ("chat/completions", {"messages": MANY * 129}, "the prompt has 129 tokens at least"),
        ("chat/completions", {"messages": [MANY[0] | {"content": "a" * 100_000}]}, "tokens at least"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_tokenised(client, monkeypatch, path, asked, fault):
    """100,000 prompts held the one thread that reads prompts for nine seconds."""
    here = client()
    for name in ("ids", "encode"):
        monkeypatch.setattr(here.server.text, name, lambda *a, **how: pytest.fail("it is tokenised"))
    status, body = here.post(f"/v1/{path}", {"model": "tiny", **asked})
    assert status == 400
    assert fault in body["error"]["message"]


def test_what_is_known_is_told_within_one_key_and_in_blocks(client):
    """A secret of another client's prompt was found, token by token, by what the usage said."""
    here = client(keys=["a", "b"])

    def known(key: bytes, prompt: list[int], **more) -> int:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 1, **more}
        _, body = here.post("/v1/completions", asked, headers=[(b"authorization", b"Bearer " + key)])
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    prompt = [7 * i % 50 for i in range(100)]
    assert known(b"a", prompt) == 0
    assert known(b"b", prompt) == 0
    assert known(b"a", prompt, prompt_cache_key="c") == 0
    assert known(b"a", prompt, prompt_cache_key="d") == 0
    assert known(b"a", prompt) == known(b"b", prompt, prompt_cache_key=None) == 64
    assert known(b"a", prompt, prompt_cache_key="c") == 64
    assert known(b"b", prompt, prompt_cache_key="c") == 0
    assert known(b"a", [*prompt[:60], 1]) == 0
    shown = here.loop.run_until_complete(here.send("/metrics", method="GET"))[2].decode()
    assert "prompt_tokens_cached_total 192.0" in shown


def test_a_model_goes_by_the_name_that_it_is_served_under(client):
    """A client had to send the path of a directory."""
    here = client(name="mine")
    asked = {"prompt": "abc", "max_tokens": 2}
    status, body = here.post("/v1/completions", {"model": "mine", **asked})
    assert (status, body["model"]) == (200, "mine")
    assert here.post("/v1/completions", {"model": "tiny", **asked})[0] == 404
    body = json.loads(here.loop.run_until_complete(here.send("/v1/models", method="GET"))[2])
    assert [each["id"] for each in body["data"]] == ["mine"]
