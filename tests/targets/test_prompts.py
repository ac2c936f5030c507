"""Prompts: every form in which people hold one, and one line for what is none."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import config as checks
from transformers import BatchEncoding

import tiny
from slipstream.targets import HFTarget
from slipstream.targets.prompts import encode, read_prompts

IDS = [5, 3, 9]
CHAT = "{% for m in messages %}{% if m.role == 'system' %}"
CHAT += "{{ raise_exception('System role not supported') }}{% endif %}"
CHAT += "{{ m.role[0] + m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def unchecked():
    """Arguments of wrong types are to reach our own errors."""
    checks.update("jaxtyping_disable", True)
    yield
    checks.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny.target("llama")


@pytest.fixture(scope="module")
def chatting() -> HFTarget:
    """A target with a chat template that takes no system message, as Gemma's."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = CHAT
    return HFTarget(tiny.reference("llama"), tokenizer, "chatting")


PADDED = {"input_ids": [[1, 1, *IDS], [*IDS, 7, 8]], "attention_mask": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]}
FORMS = {
    "ids": (IDS, [IDS], True),
    "a tuple": (tuple(IDS), [IDS], True),
    "NumPy's integers": ([np.int64(i) for i in IDS], [IDS], True),
    "an array": (np.array(IDS), [IDS], True),
    "arrays": ([np.array(IDS, np.uint8), np.array([4])], [IDS, [4]], False),
    "a tensor of another integer type": (torch.tensor(IDS, dtype=torch.int32), [IDS], True),
    "rows of a tensor": (torch.tensor([IDS, IDS]), [IDS, IDS], False),
    "tensors": ([torch.tensor(IDS), torch.tensor([4])], [IDS, [4]], False),
    "what a tokenizer returns": (BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1]}), [IDS], True),
    "without a mask": ({"input_ids": IDS}, [IDS], True),
    "padding left and right": (BatchEncoding(PADDED), [IDS, [*IDS, 7]], False),
    "padding in tensors": (
        {name: torch.tensor(rows) for name, rows in PADDED.items()},
        [IDS, [*IDS, 7]],
        False,
    ),
    "padding in arrays": ({name: np.array(rows) for name, rows in PADDED.items()}, [IDS, [*IDS, 7]], False),
    "several of them": (
        [{"input_ids": IDS, "attention_mask": [0, 1, 1]}, {"input_ids": IDS}],
        [IDS[1:], IDS],
        False,
    ),
}


@pytest.mark.parametrize(("given", "ids", "single"), FORMS.values(), ids=FORMS)
def test_ids_in_every_form(target, given, ids, single):
    """`generate(target, tokenizer(…))` answered the words "input_ids" and "attention_mask", and padding was
    read."""
    assert read_prompts(target, given) == (ids, single)
    assert all(type(token) is int for row in read_prompts(target, given)[0] for token in row)


def test_a_tokenizers_output_is_what_it_says(target):
    assert read_prompts(target, target.text.tokenizer("abc")) == ([encode(target, "abc")], True)


def test_messages_and_their_parts_of_text(chatting):
    """Content parts, as OpenAI's clients send them, broke the template."""
    want = chatting.text.tokenizer("uabc")["input_ids"]
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    for prompt in ("abc", [{"role": "user", "content": "abc"}], [{"role": "user", "content": parts}]):
        assert read_prompts(chatting, prompt) == ([want], True)
    conversation = [{"role": "user", "content": parts}]
    assert read_prompts(chatting, [conversation, conversation]) == ([want, want], False)


MISTAKES = {
    "no prompts": ([], "there are no prompts: give at least one"),
    "an empty one among others": ([IDS, []], "the prompt is empty"),
    "nothing but padding": ({"input_ids": [IDS], "attention_mask": [[0, 0, 0]]}, "the prompt is empty"),
    "None": (None, "prompts is a NoneType: give text, messages, token ids"),
    "a number": (7, "prompts is a int: give text"),
    "a generator": ((i for i in IDS), "prompts is a generator: give text"),
    "bytes": (b"abc", "the prompt is a bytes: give text"),
    "a path": (Path("a/b.txt"), r"the prompt is the path 'a/b.txt': give what the file says"),
    "a path among others": (["abc", Path("b.txt")], "the prompt is the path 'b.txt'"),
    "fractions": ([1.5, 2.0], "the prompt holds '1.5', a float, as a token id: give integers"),
    "a tensor of fractions": (torch.tensor([1.0, 2.0]), "holds '1.0', a float"),
    "an array of NaN": (np.array([np.nan]), "holds 'nan', a float"),
    "truth values": ([True, False], "holds 'True', a bool"),
    "too many dimensions": (torch.zeros(1, 1, 2, dtype=torch.long), r"holds '\[0, 0\]', a list"),
    "outside the vocabulary": ([1, 64], "holds the token id 64; the target's vocabulary has 0 to 63"),
    "negative": ([1, -1], "holds the token id -1"),
    "text among ids": ([1, "a"], "holds 'a', a str"),
    "a mask of another shape": (
        {"input_ids": IDS, "attention_mask": [1, 1]},
        "attention_mask does not fit input_ids",
    ),
    "half of a surrogate pair": ("a\ud800", "the prompt is no Unicode text"),
    "the same in a batch": (["ab", "a\ud800"], "the prompt is no Unicode text"),
    "no chat template": (
        [{"role": "user", "content": "hi"}],
        "target llama has no chat template: give the prompt as text",
    ),
}


@pytest.mark.parametrize(("given", "says"), MISTAKES.values(), ids=MISTAKES)
def test_what_is_no_prompt_is_refused_in_one_line(target, given, says):
    with pytest.raises(ValueError, match=says) as error:
        read_prompts(target, given)
    assert "\n" not in str(error.value)


BAD_MESSAGES = {
    "a system message": (
        [{"role": "system", "content": "a"}],
        "chatting does not take these messages: System role not supp",
    ),
    "no role": ([{"content": "a"}], 'a message has content: it needs "role" and "content"'),
    "no content": ([{"role": "user"}], 'a message has role: it needs "role" and "content"'),
    "a picture": ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part of type 'image'"),
    "a number": ([{"role": "user", "content": 3}], "content is a int: give text"),
    "a role that is none": ([{"role": 3, "content": "a"}], "chatting does not take these messages"),
    "a surrogate in a part": (
        [{"role": "user", "content": [{"type": "text", "text": "\udc80"}]}],
        "no Unicode text",
    ),
    "a surrogate in a role": ([{"role": "\udc80", "content": "a"}], "no Unicode text"),
    "a message that is none": ([{"role": "user", "content": "a"}, "b"], "as a token id"),
}


@pytest.mark.parametrize(("given", "says"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_messages_that_cannot_be_read_are_refused_in_one_line(chatting, given, says):
    """A template's own exception, through everything that called it."""
    with pytest.raises(ValueError, match=says) as error:
        read_prompts(chatting, given)
    assert "\n" not in str(error.value)


def test_a_message_outside_a_list_is_refused(chatting):
    """The dictionary's keys were read as prompts."""
    with pytest.raises(ValueError, match="prompts is a dict: give text, messages"):
        read_prompts(chatting, {"role": "user", "content": "abc"})


def test_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="has no tokenizer: give the prompt as token ids"):
        read_prompts(HFTarget(tiny.reference("llama"), name="bare"), "abc")


def test_a_template_that_fails_in_python_refuses_the_turns():
    """`train` reads its data by `render`, and ended in a TypeError from within Jinja."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{{ 1 + messages[0]['content'] }}"
    text = HFTarget(tiny.reference("llama"), tokenizer, "failing").text
    with pytest.raises(ValueError, match="failing does not take these messages: unsupported operand"):
        text.render([{"role": "user", "content": "abc"}], ask=True)


@pytest.mark.parametrize(
    ("call", "known"),
    [
        ("<tool_call>\n{{ call.function | tojson }}\n</tool_call>", True),
        ("<tool_call>\n<function={{ call.function.name }}></function>\n</tool_call>", False),
        ("{{ call.function | tojson }}", False),
    ],
    ids=["JSON", "XML", "bare"],
)
def test_tools_are_for_templates_whose_calls_can_be_read(call, known):
    """XML between the same tags was sent as the answer."""
    tokenizer = deepcopy(tiny.tokenizer())
    turns = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}" + call
    tokenizer.chat_template = "{{ tools }} <tool_call>" + turns + "{% endfor %}{% endfor %}"
    assert HFTarget(tiny.reference("llama"), tokenizer, "calling").text.calls_tools == known
