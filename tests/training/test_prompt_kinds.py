"""Prompts of kinds, from writers whose words are known."""

from collections import Counter
from itertools import islice

import pytest

import tiny
from slipstream.targets import HFTarget
from slipstream.training.generators import TextRequest, TextWriter, Writing, Written
from slipstream.training.prompt_kinds import (
    ABOUT,
    FREE,
    KINDS,
    TURNS,
    check_kinds,
    opening_of,
    synthesize_prompts,
)

LONG = " ".join(f"word{i}" for i in range(80))


class Known(TextWriter):
    """A writer whose continuations are known; those that end in ! were cut."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.seeds, self.begun = texts, [], []

    def answer(self, asked, limit, batch):
        raise NotImplementedError

    def go_on(self, texts, temperature, limit, seed):
        self.seeds += [] if seed is None else range(seed, seed + len(texts))
        self.begun += texts
        written = (self.texts * len(texts))[: len(texts)]
        return [Written(text, not text.endswith("!")) for text in written]


class Counting(Known):
    """One that never writes the same twice."""

    def go_on(self, texts, temperature, limit, seed):
        assert texts  # no target goes on with nothing
        super().go_on(texts, temperature, limit, seed)
        first = len(self.begun) - len(texts)
        return [Written(f" thing {first + i}", True) for i in range(len(texts))]


def prompts(target, writer, n, batch, seed, rows, kinds=("any",)):
    return synthesize_prompts(target, Writing(writer, [0.0], 8, batch, seed, 0.8, kinds), n, rows, [])


def answered(question, answer=LONG, temperature=0.7, finished=True):
    messages = [*question.messages, {"role": "assistant", "content": answer}]
    if question.temperature is not None:
        temperature = question.temperature
    return {"kind": question.kind, "temperature": temperature, "finished": finished, "messages": messages}


def test_unusable_prompts_are_thrown_away(chat):
    writer = Known("abcd", "", "ab", "abcd", "cut off!", "efgh")
    made = prompts(chat, writer, 2, 6, 0, [])
    assert [question.messages for question in made] == [
        [{"role": "user", "content": text}] for text in ("abcd", "efgh")
    ]


def test_a_target_that_writes_nothing_usable_is_said_so(chat):
    with pytest.raises(ValueError, match="wrote 0 usable prompts"):
        list(prompts(chat, Known(""), 2, 6, 0, []))


def test_prompts_begin_where_the_template_lets_a_user_speak(chat, monkeypatch):
    assert opening_of(chat, []) == "u "
    before = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    assert opening_of(chat, before) == "u b a c</s> u "
    with pytest.raises(ValueError, match="no chat template"):
        opening_of(HFTarget(tiny.reference("llama")), [])
    shouts = "{% for turn in messages %}{{ turn.content | upper }}{% endfor %}"
    monkeypatch.setattr(chat.text.tokenizer, "chat_template", shouts)
    with pytest.raises(ValueError, match="template changes a user's words"):  # was "substring not found"
        opening_of(chat, [])


def test_no_seed_is_used_twice(chat):
    """A server seeds text j with seed + j, so that seeds in steps of one write the same texts again. A run
    that goes on began with a seed that the one before it had come past."""
    writer, rows = Counting(), []
    for n in (4, 12, 30):
        rows += map(answered, prompts(chat, writer, n, 4, 7, rows))
    assert len(rows) == 30
    assert len(writer.seeds) == len(set(writer.seeds)) >= 30
    unseeded = Counting()
    list(prompts(chat, unseeded, 5, 4, None, []))
    assert unseeded.begun
    assert not unseeded.seeds


@pytest.fixture
def wide(chat, monkeypatch):
    """Letters are tokens of the tiny target, and whole texts too many."""
    monkeypatch.setattr("slipstream.training.prompt_kinds.LONGEST", 10_000)
    monkeypatch.setattr("slipstream.training.prompt_kinds.WORDS", (4, 1000))
    monkeypatch.setattr(chat, "window", 10_000)
    return chat


def test_kinds_are_balanced_and_steered(wide):
    rows = []
    for question in prompts(wide, Counting(), 90, 9, 0, rows, [*KINDS]):
        rows.append(answered(question))
    assert set(Counter(row["kind"] for row in rows).values()) == {10}
    for row in rows:
        *before, asked, _ = row["messages"]
        words, kind = asked["content"], row["kind"]
        if kind in FREE:
            assert any(words.startswith(start.strip()) for start in FREE[kind])
        elif kind in ABOUT:
            assert words.startswith("word0 word1 ")
            assert any(start in words for start in ABOUT[kind])
        assert bool(before) == (kind in TURNS)


def test_a_conversation_goes_on_once_and_at_its_temperature(wide):
    rows, made = [], ["any", "turns"]
    for question in prompts(wide, Counting(), 40, 4, 0, rows, made):
        assert question.temperature == (0.7 if question.kind == "turns" else None)
        rows.append(answered(question))
    begun = [str(row["messages"][:-2]) for row in rows if row["kind"] == "turns"]
    assert len(begun) == len(set(begun)) == 20


@pytest.mark.parametrize("bad", [{"finished": False}, {"answer": "la la la " * 40}])
def test_nothing_is_written_about_answers_that_were_cut_or_loop(wide, bad):
    rows = []
    for question in prompts(wide, Counting(), 30, 6, 0, rows, ["writing", "summaries", "turns"]):
        rows.append(answered(question, **bad))
    assert {row["kind"] for row in rows} == {"writing"}


def test_a_prompt_that_is_too_long_is_left_out(wide, monkeypatch):
    monkeypatch.setattr("slipstream.training.prompt_kinds.LONGEST", 100)
    rows = []
    for question in islice(prompts(wide, Counting(), 30, 6, 0, rows, ["any", "summaries"]), 12):
        rows.append(answered(question))
    assert {row["kind"] for row in rows} == {"any"}


def test_an_opening_that_fills_the_window_is_left_out(chat):
    """The run ended there, with the advice to shorten a prompt that nobody gave."""
    rows = [
        answered(TextRequest([{"role": "user", "content": f"q {i}"}], kind="any"), LONG + " abcdefgh" * 8)
        for i in range(9)
    ]
    writer = Counting()
    made = [*prompts(chat, writer, 9 + 6, 4, 0, rows, ["any", "turns"])]
    assert {question.kind for question in made} == {"any"}
    assert max(len(chat.text.ids(text)) for text in writer.begun) <= chat.window // 2


def test_where_no_opening_of_a_batch_fits_the_next_is_written(chat):
    """The run ended with the word that there were no prompts."""
    rows = [answered(TextRequest([{"role": "user", "content": "q"}], kind="any"), LONG + " abcdefgh" * 8)]
    made = prompts(chat, Counting(), 4, 1, 0, rows, ["any", "turns"])
    assert {question.kind for question in made} == {"any"}


def test_kinds_must_be_known_and_one_must_need_no_text():
    with pytest.raises(ValueError, match=r"unknown kind 'poems'\. Available: any, maths"):
        check_kinds(["any", "poems"])
    with pytest.raises(ValueError, match="summaries, turns: add one that needs no text: any"):
        check_kinds(["summaries", "turns"])
    with pytest.raises(ValueError, match="kind reading are about answers of others"):
        check_kinds(["maths", "reading"])  # no prompt of it was ever written


def test_nothing_is_written_about_an_answer_that_writes_a_special_token(chat):
    """In the raw text that the target goes on with it would have ended the earlier turn."""
    rows = [answered(TextRequest([{"role": "user", "content": "q"}], kind="any"), "ab</s>")]
    writer = Counting()
    made = [*prompts(chat, writer, 5, 1, 0, rows, ["any", "turns"])]
    assert {question.kind for question in made} == {"any"}
    assert not any("</s>" in text for text in writer.begun)
