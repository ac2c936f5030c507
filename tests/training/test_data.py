"""Training data: what is learnt is what decoding will be asked for, to the token."""

import gzip
import json
from copy import deepcopy
from dataclasses import replace

import pytest

import tiny
from slipstream.targets import HFTarget
from slipstream.targets.prompts import encode
from slipstream.training.data import hold_out, load_examples, read_rows


def write(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def learnt(target, example) -> str:
    return target.text.tokenizer.decode(
        [t for t, own in zip(example.tokens, example.loss, strict=True) if own]
    )


OPENAI = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]}
ALPACA = {"instruction": "ab", "input": "", "output": "cd"}
MIXED = {"id": "7", "conversations": OPENAI["messages"]}
PARTS = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "cd"}], "refusal": None, "tool_calls": []},
    ]
}
CALLING = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + '' + c.function.arguments.x }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


@pytest.fixture(scope="module")
def calling():
    """A target whose template writes calls of tools."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = CALLING
    return HFTarget(tiny.reference("llama"), tokenizer, "calling")


def test_all_shapes_say_the_same(chat, tmp_path):
    examples = load_examples([write(tmp_path / "a.jsonl", OPENAI, SHAREGPT, ALPACA, MIXED, PARTS)], chat, 64)
    assert examples == examples[:1] * 5
    assert chat.text.tokenizer.decode(examples[0].tokens) == "u ab a cd</s> "
    assert learnt(chat, examples[0]) == "cd</s>"


def called(arguments):
    return [{"id": "1", "type": "function", "function": {"name": "gh", "arguments": arguments}}]


@pytest.mark.parametrize("arguments", ['{"x": "ij"}', {"x": "ij"}], ids=["JSON", "values"])
def test_calls_of_tools_and_what_tools_say_are_read(calling, tmp_path, arguments):
    """Content of null beside calls, and the role `tool`, ended every data set of calls at its first line."""
    turns = [
        OPENAI["messages"][0],
        {"role": "assistant", "content": None, "tool_calls": called(arguments)},
        {"role": "tool", "content": "kl", "tool_call_id": "1"},
        OPENAI["messages"][1],
    ]
    (example,) = load_examples([write(tmp_path / "a.jsonl", {"messages": turns})], calling, 64)
    assert calling.text.tokenizer.decode(example.tokens) == "u ab a ghij</s> t kl a cd</s> "
    assert learnt(calling, example) == "ghij</s>cd</s>"


def test_an_answer_of_weight_0_is_read_and_not_learnt(chat, tmp_path):
    """OpenAI's word for it was dropped: the answer that was not to be learnt was."""
    turns = [
        *OPENAI["messages"],
        {"role": "user", "content": "ef"},
        {"role": "assistant", "content": "gh", "weight": 1},
    ]
    turns[1] = {**turns[1], "weight": 0}
    (example,) = load_examples([write(tmp_path / "a.jsonl", {"messages": turns})], chat, 64)
    assert chat.text.tokenizer.decode(example.tokens) == "u ab a cd</s> u ef a gh</s> "
    assert learnt(chat, example) == "gh</s>"
    with pytest.raises(ValueError, match="no assistant text to learn from"):
        load_examples([write(tmp_path / "b.jsonl", {**OPENAI, "weight": 0})], chat, 64)


def test_a_system_message_beside_the_turns_is_read(chat, tmp_path):
    rows = [{"system": "yz", **row} for row in (SHAREGPT, ALPACA)]
    first, second = load_examples([write(tmp_path / "a.jsonl", *rows)], chat, 64)
    assert chat.text.tokenizer.decode(first.tokens) == "s yz u ab a cd</s> "
    assert first == second


TOOL = {"type": "function", "function": {"name": "gh", "description": "", "parameters": {}}}
CALLED = {"role": "assistant", "content": "cd", "tool_calls": called({"x": "ij"})}
REASONED = {"role": "assistant", "content": "cd", "reasoning_content": "ef"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**OPENAI, "tools": [TOOL]}, "the chat template of tiny-chat has no tools"),
        ({"messages": [OPENAI["messages"][0], CALLED]}, "tiny-chat does not write calls of tools"),
        ({"messages": [OPENAI["messages"][0], REASONED]}, "tiny-chat does not write reasoning_content"),
    ],
    ids=["tools", "calls", "reasons"],
)
def test_what_the_chat_template_would_leave_out_is_refused(chat, tmp_path, row, says):
    """The rest was learnt: answers to tools that nobody had offered, and thoughts that were none."""
    with pytest.raises(ValueError, match=f"line 1: .*{says}"):
        load_examples([write(tmp_path / "a.jsonl", row)], chat, 64)


def test_calls_in_a_history_are_refused_where_no_template_writes_them(chat):
    with pytest.raises(ValueError, match="tiny-chat does not write calls of tools"):
        encode(chat, [OPENAI["messages"][0], CALLED, {"role": "tool", "content": "kl"}])


@pytest.mark.parametrize("write_tools", [list, json.dumps], ids=["values", "JSON"])
def test_tools_and_reasons_are_learnt_as_the_template_writes_them(tmp_path, write_tools):
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = (
        "{% for t in tools or [] %}t {{ t.function.name }} {% endfor %}"
        "{% for m in messages %}{{ m.role[0] }} {{ m.reasoning_content }}{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>{% endif %} {% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    target = HFTarget(tiny.reference("llama"), tokenizer, "thinking")
    row = {"messages": [OPENAI["messages"][0], REASONED], "tools": write_tools([TOOL])}
    (example,) = load_examples([write(tmp_path / "a.jsonl", row)], target, 64)
    assert target.text.tokenizer.decode(example.tokens) == "t gh u ab a efcd</s> "
    assert learnt(target, example) == "efcd</s>"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "a", "weight": 0.5}, "weight 0.5: give 0, of what is read and not learnt, or 1"),
        ({"content": "a", "function_call": {"name": "f"}}, "write tool_calls"),
        ({"content": None}, "content is a NoneType: give text"),
        ({"content": None, "tool_calls": called("{")}, "the arguments of a call are no JSON"),
        ({"content": None, "tool_calls": "f"}, "tool_calls are no list"),
        ({"content": [{"type": "image_url", "image_url": "x"}]}, "a part of type 'image_url'"),
    ],
    ids=["weight", "function_call", "null", "arguments", "no calls", "a picture"],
)
def test_what_is_no_message_is_said_so(tmp_path, message, says):
    turns = [OPENAI["messages"][0], {"role": "assistant", **message}]
    with pytest.raises(ValueError, match=f"line 1 .*{says}"):
        list(read_rows(write(tmp_path / "a.jsonl", {"messages": turns})))


@pytest.mark.parametrize("row", [OPENAI, SHAREGPT, ALPACA, MIXED])
def test_turns_are_read_although_they_stand_beside_their_text(chat, tmp_path, row):
    """The sets of the hub that hold both were learnt without the chat template, questions and all."""
    rows = write(tmp_path / "a.jsonl", {**row, "text": "Below ab Response cd"})
    assert learnt(chat, load_examples([rows], chat, 64)[0]) == "cd</s>"


def test_a_prompt_is_read_as_decoding_reads_it(chat, tmp_path):
    """Templates and loss masks that are off by one: good losses, and drafts that nobody accepts."""
    example = load_examples([write(tmp_path / "a.jsonl", OPENAI)], chat, 64)[0]
    prompt = encode(chat, OPENAI["messages"][:1])
    assert example.tokens[: len(prompt)] == prompt
    assert example.loss.index(True) == len(prompt)


def test_every_turn_of_an_assistant_counts(chat, tmp_path):
    turns = [*OPENAI["messages"], {"role": "user", "content": "ef"}, {"role": "assistant", "content": "gh"}]
    example = load_examples([write(tmp_path / "a.jsonl", {"messages": turns})], chat, 64)[0]
    assert chat.text.tokenizer.decode(example.tokens) == "u ab a cd</s> u ef a gh</s> "
    assert learnt(chat, example) == "cd</s>gh</s>"


def test_an_answer_that_was_cut_does_not_teach_an_end(chat, tmp_path):
    example = load_examples([write(tmp_path / "a.jsonl", {**OPENAI, "finished": False})], chat, 64)[0]
    assert learnt(chat, example) == "cd"


def test_answers_before_the_one_that_was_cut_keep_their_ends(chat, tmp_path):
    """A text that decoding never meets: a question right behind an answer without its end."""
    turns = [*OPENAI["messages"], {"role": "user", "content": "ef"}, {"role": "assistant", "content": "gh"}]
    rows = [write(tmp_path / "a.jsonl", {"messages": turns, "finished": False})]
    example = load_examples(rows, chat, 64)[0]
    assert chat.text.tokenizer.decode(example.tokens) == "u ab a cd</s> u ef a gh"
    assert learnt(chat, example) == "cd</s>gh"


def test_raw_text_is_learnt_whole(chat, tmp_path):
    (tmp_path / "a.txt").write_text("abc\n\ndef\n")
    rows = [write(tmp_path / "b.jsonl", {"text": "abc"}), str(tmp_path / "a.txt")]
    assert [learnt(chat, example) for example in load_examples(rows, chat, 64)] == ["abc", "abc", "def"]


def test_a_raw_text_is_judged_behind_its_first_half(chat, tmp_path):
    """Behind its first token, which is the same of all texts where a tokenizer begins with one of its own."""
    example = load_examples([write(tmp_path / "a.jsonl", {"text": "abcdefgh"})], chat, 64)[0]
    assert [chat.text.tokenizer.decode(part) for part in (example.prompt, example.answer)] == ["abcd", "efgh"]


def test_long_examples_are_cut_and_limits_are_even(chat, tmp_path):
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(9)) for i in range(10)]
    path = write(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    examples = load_examples([path], chat, 5, limit=3)
    assert [chat.text.tokenizer.decode(e.tokens) for e in examples] == [texts[i][:5] for i in (0, 3, 6)]


def test_gzip_is_read(chat, tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(OPENAI) + "\n")
    assert len(load_examples([str(tmp_path / "a.jsonl.gz")], chat, 64)) == 1


def test_malformed_lines_are_numbered(chat, tmp_path):
    rows = [
        "{",
        OPENAI,
        {"question": "x"},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user"}]},
    ]
    with pytest.raises(
        ValueError, match=r"line 1 \(no JSON.*line 3 \(keys \['question'\]\).*line 4 \(role 'robot'\).*line 5"
    ):
        list(read_rows(write(tmp_path / "a.jsonl", *rows)))
    many = ["{"] * 9
    with pytest.raises(ValueError, match="and 4 more"):
        list(read_rows(write(tmp_path / "b.jsonl", *many)))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"text": "\\ud800"}', r"line 2 \(.*surrogates not allowed"),
        ("[" * 100_000, r"line 2 \(nested too deeply"),
        ('{"messages": 3}', r"line 2 \("),
        ("3", r"line 2 \("),
    ],
)
def test_rows_that_no_tokenizer_takes_are_numbered(tmp_path, row, says):
    """Half a character, or JSON that is nested 100,000 times: tracebacks."""
    with pytest.raises(ValueError, match=says):
        list(read_rows(write(tmp_path / "a.jsonl", "\ufeff" + json.dumps(OPENAI), row)))


def test_data_without_an_assistants_text_is_refused(chat, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": OPENAI["messages"][:1]})
    with pytest.raises(ValueError, match=r"no assistant text to learn from.*slipstream regenerate"):
        load_examples([path], chat, 64)


@pytest.mark.parametrize("name", ["missing.jsonl", "broken.jsonl.gz", "binary.jsonl"])
def test_a_file_that_cannot_be_read_is_named(chat, tmp_path, name):
    if name != "missing.jsonl":
        (tmp_path / name).write_bytes(b"\x1f\x8b\x08\xff\xfe")
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        load_examples([str(tmp_path / name)], chat, 64)


def test_a_target_without_a_template_takes_raw_text_only(tmp_path):
    with pytest.raises(ValueError, match="line 1: target llama has no chat template"):
        load_examples([write(tmp_path / "a.jsonl", OPENAI)], tiny.target("llama"), 64)


def test_held_out_examples_are_not_trained_on(chat, data):
    examples = load_examples([data], chat, 64)
    train, held_out = hold_out(examples, 32)
    assert (len(train), len(held_out)) == (35, 5)
    assert not any(example in train for example in held_out)


def test_greedy_answers_are_held_out_and_change_no_question(chat, data):
    """Some greedy rows more, and what had been learnt was held out."""
    drawn = [replace(example, greedy=False) for example in load_examples([data], chat, 64)]
    _, held_out = hold_out(drawn, 5)
    greedy = [replace(example, greedy=True) for example in drawn[::2]]
    _, again = hold_out(drawn + greedy, 5)
    assert {e.question for e in again} == {e.question for e in held_out}
    asked = {e.question for e in greedy}
    assert [e.greedy for e in again] == [e.question in asked for e in again]


def test_a_head_that_goes_on_with_more_data_has_not_learnt_what_judges_it(chat, data):
    """The best of a run that began as a trained head: that head, whose τ was of texts that it had learnt."""
    examples = load_examples([data], chat, 64)
    for begun in (examples[:20], examples[5:25], examples[20:] + examples[:9]):
        learnt, _ = hold_out(begun, 2)
        _, held_out = hold_out(examples, 2)
        assert {e.question for e in held_out}.isdisjoint(e.question for e in learnt)
    _, held_out = hold_out(examples[:2] * 20, 4)
    assert sorted(map(id, held_out)) == sorted(map(id, examples[:2]))  # each of another question


def test_an_answer_is_what_follows_the_first_question(chat, tmp_path):
    """The question of a second turn, held against drafts as if the target had said it."""
    turns = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)
    ]
    (example,) = load_examples([write(tmp_path / "a.jsonl", {"messages": turns})], chat, 64)
    assert chat.text.tokenizer.decode(example.answer) == "b</s>"
    assert example.prompt == encode(chat, "a")
