"""Questions in FastChat's question.jsonl form: question_id, category, turns."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import chain, zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.files import check_limits, evenly, name_of, parsed, printable, read_text, several
from slipstream.measure.hf_datasets import HUB, hub_rows

SETS = files("slipstream.measure") / "sets"
OWN = SETS / "own.jsonl"
SHIPPED = ("mt_bench", "humaneval")  # other people's, by name


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


Asking = Question | str | PathLike[str]  # a question, a file of them, or a data set by name
Questions = Asking | Sequence[Asking]


def load_questions(given: Questions = (), limit: int | None = None) -> list[Question]:
    """Questions, those of files, and those of data sets; the project's own where none is given.

    Files are in FastChat's form, as those of MT-bench and Spec-Bench are. `mt_bench` and `humaneval` ship.
    `hf:openai/gsm8k:test` is a split of a data set, `hf:openai/gsm8k:socratic:test` one of a configuration
    (`measure.hub`).

    Args:
        limit: questions of each file, and of those given as they are, taken evenly, so that a small limit
            still meets every category.

    Raises:
        ValueError: a file that cannot be read, or a malformed line (numbered).
    """
    check_limits(limit=limit)
    given = several(given)
    chosen = evenly([question for question in given if isinstance(question, Question)], limit)
    paths = [name_of(path, "a question file") for path in given if not isinstance(path, Question)]
    for path, name in zip(paths, file_names(paths), strict=True):
        chosen += evenly(_distinct(_read(path, name)), limit)
    return _distinct(chosen) if given else evenly(_parsed("questions.jsonl", OWN.read_text("utf-8")), limit)


def _read(path: str, name: str) -> list[Question]:
    if path.startswith(HUB):
        rows = enumerate(hub_rows(path), 1)
        return [Question(name, str(i), category or name, turns) for i, (category, turns) in rows]
    if is_set(path):
        return _parsed(name, (SETS / f"{path}.jsonl").read_text("utf-8"))
    return _parsed(name, read_text(path, "question file"))


def is_set(path: str) -> bool:
    """Whether a name is a data set's, not a file's: of the hub, or one that ships."""
    return path.startswith(HUB) or (path in SHIPPED and not Path(path).is_file())


def file_names(paths: Sequence[str]) -> list[str]:
    """The files' names; where several are the same, with as much before them as tells them apart, as in
    mt_bench/question.jsonl. A file that is given twice gets a number."""
    names = {path: _named(path, 1) for path in paths}
    for parts in range(2, max([3, *(len(Path(path).parts) for path in paths)]) + 1):
        times = Counter(names.values())
        names |= {path: _named(path, parts) for path, name in names.items() if times[name] > 1}
    return _numbered([names[path] for path in paths])


def _named(path: str, parts: int) -> str:
    """The last parts of a path; of a data set first the repository's, then all."""
    if path.startswith(HUB) and parts > 2:
        return path.removeprefix(HUB)
    bare = path.split(":")[1] if path.startswith(HUB) else path
    return printable(Path(*Path(bare).parts[-parts:]).as_posix())


def _distinct(questions: list[Question]) -> list[Question]:
    """Questions of one name are told apart, as where files were joined."""
    names = _numbered([question.name for question in questions])
    pairs = zip(questions, names, strict=True)
    return [replace(question, id=name.removeprefix(f"{question.file}:")) for question, name in pairs]


def _numbered(names: Sequence[str]) -> list[str]:
    """Names, the second and later ones of each with a count behind them."""
    seen, told = Counter[str](), dict[str, None]()
    for name in names:
        called = name
        while called in told:
            seen[name] += 1
            called = f"{name} ({1 + seen[name]})"
        told[called] = None
    return [*told]


def _parsed(name: str, text: str) -> list[Question]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"question file {name} is empty: give one JSON object a line")
    return [_question(name, number, line) for number, line in lines]


def batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """The first `size` of every file, then the next of every file, and so on."""
    files: dict[str, list[Question]] = {}
    for question in questions:
        files.setdefault(question.file, []).append(question)
    groups = ([own[i : i + size] for i in range(0, len(own), size)] for own in files.values())
    return [group for group in chain.from_iterable(zip_longest(*groups)) if group]


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
