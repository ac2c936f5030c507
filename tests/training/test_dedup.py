"""Loops, near copies, and words of question sets."""

import json
import random

import pytest

from slipstream.training.dedup import excluded_words, holds, loops, near_copies, shingles

WORDS = [f"word{i}" for i in range(400)]


def text(n: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def test_shingles_are_words_in_a_row_whatever_their_case():
    assert len(shingles("a b c", 4)) == 0
    assert [*shingles("The cat, sat.", 3)] == [*shingles("the CAT sat", 3)]
    assert len({*shingles("a b a b a", 2).tolist()}) == 2
    assert shingles("a b", 2)[0] != shingles("b a", 2)[0]


@pytest.mark.parametrize(
    ("passage", "looping"),
    [
        (text(200), False),
        (text(30) + " and so on" * 12, True),
        ((text(40, 1) + ". ") * 3, True),
        ((text(40, 1) + ". ") * 2, False),
        ("\n".join(f"{i}. Use a spoon to stir the soup." for i in range(1, 20)), True),
        ("\n".join(f"| {i} | {i * i} | {i**3} |" for i in range(20)), False),
        ("yes " * 20, False),  # too short to be sure
        ("no " * 40, True),
        ("", False),
    ],
)
def test_loops_are_found(passage, looping):
    assert loops(passage) == looping


def test_near_copies_are_found_and_others_kept():
    base = text(120)
    words = base.split()
    near = " ".join([*words[:60], "other", *words[61:]])  # 5 of 116 shingles differ
    half = " ".join([*words[:60], *text(60, 9).split()])
    texts = [base, near, half, base.upper(), text(120, 3), "so short", "so short", "So short"]
    assert [*near_copies(texts)] == [False, True, False, True, False, False, True, False]


def test_thousands_of_texts_are_compared_in_seconds():
    texts = [text(150, i) for i in range(1500)]
    assert sum(near_copies([*texts, *texts[:300]])) == 300


def test_thirteen_words_in_a_row_are_recognised(tmp_path):
    path = tmp_path / "questions.jsonl"
    asked = text(20)
    path.write_text(
        json.dumps({"question_id": 1, "turns": ["a", asked], "reference": [text(15, 7)]}) + "\n\n"
    )
    words = excluded_words([path])
    inside = asked.split()
    assert holds("Before it: " + " ".join(inside[3:16]).upper() + "! And behind it.", words)
    assert not holds("Before it: " + " ".join(inside[3:15]) + " and behind it there are others.", words)
    assert holds(text(15, 7), words)
    path.write_text(json.dumps({"turns": ["What is the capital?", "of it"]}))
    words = excluded_words([path])
    assert holds("what is the capital", words)
    assert not holds("So what is the capital?", words)
    assert not holds("of it", words)  # three words say nothing
    path.write_text("{\n")
    with pytest.raises(ValueError, match=r"question file .*: '{' is no JSON object"):
        excluded_words([path])
    with pytest.raises(ValueError, match="cannot be read"):
        excluded_words([tmp_path / "none.jsonl"])
