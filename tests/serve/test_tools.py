"""Tool calls: parted from what is said, whole and in a stream."""

import json
from copy import deepcopy

import openai
import pytest

from slipstream.drafters import load_drafter
from slipstream.serve.app import Limits, Server
from slipstream.serve.tools import Calls
from slipstream.targets import HFTarget

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.mark.parametrize(
    ("text", "said", "names"),
    [
        (f"Let me see.\n{CALL}", "Let me see.\n", ["weather"]),
        (f"{CALL}\n{CALL}", "", ["weather", "weather"]),
        (f"{CALL} I will check.", "I will check.", ["weather"]),
        ('<tool_call>{"name": "f", "parameters": {}}', "", ["f"]),
        ("a <b> <tool", "a <b> <tool", []),
        ("<tool_call>\nno JSON\n</tool_call>", "<tool_call>\nno JSON\n</tool_call>", []),
        ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
        ('<tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": "g"}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", ["f"]),
        ('<tool_call>{"name": "f", "arguments": "a"}', '<tool_call>{"name": "f", "arguments": "a"}', []),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        ("", "", []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_parted_from_what_is_said(text, said, names, size):
    parts = Calls({"weather", "f"})
    given = "".join(parts.part(text[at : at + size], False)[0] for at in range(0, len(text), size))
    rest, calls = parts.part("", True)
    assert given + rest == said
    assert [call["function"]["name"] for call in calls] == names
    assert all(json.loads(call["function"]["arguments"]) in ({"city": "Köln"}, {}) for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)


def test_the_first_call_counts_where_one_is_asked_for():
    parts = Calls({"weather"}, several=False)
    assert parts.part(f"{CALL}{CALL}", False) == ("", [])
    rest, calls = parts.part("", True)
    assert (rest, len(calls)) == ("", 1)


TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Answer with <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)


def test_openais_client_gets_calls(smollm2, listening):
    """The model is small: a grammar makes it call."""
    target = smollm2[0].target
    tokenizer = deepcopy(target.text.tokenizer)
    tokenizer.chat_template = TEMPLATE
    calling = HFTarget(target.model, tokenizer, "calling")
    server = Server(calling, load_drafter("suffix", calling), "suffix", Limits(rows=2))
    forced = {
        "type": "regex",
        "regex": 'Well[.] <tool_call>[{]"name": "weather", "arguments": [{]"city": "[A-Z][a-z]+"}}'
        "</tool_call>",
    }
    how = {"model": "calling", "tools": TOOLS, "response_format": forced, "max_tokens": 60}
    turns = [{"role": "user", "content": "How is the weather in Rome?"}]
    with listening(server) as url, openai.OpenAI(api_key="none", base_url=f"{url}/v1") as client:
        made = client.chat.completions.create(messages=turns, **how).choices[0]
        assert (made.finish_reason, made.message.content) == ("tool_calls", "Well. ")
        (call,) = made.message.tool_calls
        assert call.function.name == "weather"
        city = json.loads(call.function.arguments)["city"]
        events = list(client.chat.completions.create(messages=turns, stream=True, **how))
        assert "".join(event.choices[0].delta.content or "" for event in events) == "Well. "
        (streamed,) = events[-1].choices[0].delta.tool_calls
        assert json.loads(streamed.function.arguments)["city"] == city
        assert events[-1].choices[0].finish_reason == "tool_calls"
        turns += [made.message.model_dump(exclude_none=True)]
        turns += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        told = {"model": "calling", "tools": TOOLS, "max_tokens": 4}
        after = client.chat.completions.create(messages=turns, **told)
        assert after.choices[0].message.tool_calls is None
        read = calling.text.decode(calling.text.encode([turns[0]], TOOLS), special=True)
        assert '"weather"' in read
        turns[1]["tool_calls"][0]["function"]["arguments"] = "{"
        with pytest.raises(openai.BadRequestError, match="no JSON"):
            client.chat.completions.create(messages=turns, **told)


def test_a_template_without_tools_is_refused(smollm2):
    with openai.OpenAI(api_key="none", base_url=f"{smollm2[1]}/v1", max_retries=0) as client:
        ask = lambda **how: client.chat.completions.create(  # noqa: E731
            model="smollm2", messages=[{"role": "user", "content": "a"}], tools=TOOLS, max_tokens=2, **how
        )
        with pytest.raises(openai.BadRequestError, match="has no tools"):
            ask()
        assert ask(tool_choice="none").choices[0].finish_reason == "length"
