"""Questions in FastChat's question.jsonl form: question_id, category, turns."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.files import check_counts, evenly, parsed, read_text

OWN = files("slipstream.measure") / "questions.jsonl"


@dataclass(frozen=True)
class Question:
    """One question of one or more turns; `file` is where it came from."""

    file: str
    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.file}:{self.id}"


Asking = Question | str | PathLike[str]  # a question, or a file of them


def load_questions(given: Sequence[Asking] = (), limit: int | None = None) -> list[Question]:
    """Questions, and those of files; the project's own where none is given.

    Args:
        limit: questions of each file, and of those given as they are, taken evenly, so that a small limit
            still meets every category.

    Raises:
        ValueError: a file that cannot be read, or a malformed line (numbered).
    """
    check_counts(limit=limit)
    chosen = evenly([question for question in given if isinstance(question, Question)], limit)
    for path in given:
        if not isinstance(path, Question):
            chosen += evenly(_parsed(Path(path).name, read_text(path, "question file")), limit)
    return chosen if given else evenly(_parsed("questions.jsonl", OWN.read_text("utf-8")), limit)


def _parsed(name: str, text: str) -> list[Question]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"question file {name} is empty: give one JSON object a line")
    return [_question(name, number, line) for number, line in lines]


def alternated(questions: Sequence[Question]) -> list[Question]:
    """The first of every file, then the second of every file, and so on."""
    counters = defaultdict[str, Iterator[int]](count)
    return sorted(questions, key=lambda question: next(counters[question.file]))


def _question(file: str, number: int, line: str) -> Question:
    try:
        data: Any = parsed(line)
        turns = data["turns"]
        texts = isinstance(turns, list) and all(isinstance(turn, str) and turn.strip() for turn in turns)
        if not (texts and turns):
            raise ValueError('"turns" must be a list of non-empty texts')
    except (ValueError, KeyError, TypeError) as error:
        reason = 'it needs "turns"' if isinstance(error, (KeyError, TypeError)) else str(error)
        form = 'Each line is an object like {"question_id": 1, "turns": ["…"]}'
        raise ValueError(f"{file} line {number}: {reason}. {form}") from error
    name = str(data.get("question_id", number))
    return Question(file, name, str(data.get("category") or file), tuple(turns))
