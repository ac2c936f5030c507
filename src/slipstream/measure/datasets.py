"""Questions: those that ship, files in FastChat's form (question_id, category, turns), and data sets of the
Hugging Face hub, or directories of one, through `datasets`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import chain, zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

from slipstream.files import (
    check_limits,
    evenly,
    first_line,
    install,
    name_of,
    parsed,
    printable,
    read_text,
    several,
    understood,
)

SETS = files("slipstream.measure") / "sets"
SHIPPED = ("mt_bench", "humaneval")  # other people's, by name
HUB = "hf:"
HUB_FORM = "give hf:REPOSITORY:SPLIT, or hf:REPOSITORY:CONFIGURATION:SPLIT"
USUAL = ("default", "main")  # configurations that are taken where none is named
CHATS, ARTICLES = ("messages", "conversations"), ("article", "document")
COLUMNS = ("turns", "question", "instruction", "prompt", *CHATS, *ARTICLES)  # of a data set's questions


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
    `hf:openai/gsm8k:test` is a split of a data set, `hf:openai/gsm8k:socratic:test` one of a configuration.

    Args:
        limit: questions of each file, and of those given as they are, taken evenly, so that a small limit
            still meets every category.

    Raises:
        ValueError: a file that cannot be read, or a malformed line (numbered).
    """
    check_limits(limit=limit)
    given = several(given)
    if not given:
        return evenly(_parsed("questions.jsonl", (SETS / "own.jsonl").read_text("utf-8")), limit)
    questions = evenly([question for question in given if isinstance(question, Question)], limit)
    paths = [name_of(path, "a question file") for path in given if not isinstance(path, Question)]
    for path, name in zip(paths, file_names(paths), strict=True):
        if path.startswith(HUB):
            asked = _of_hub(path, name)
        elif is_set(path):
            asked = _parsed(name, (SETS / f"{path}.jsonl").read_text("utf-8"))
        else:
            asked = _parsed(name, read_text(path, "question file"))
        questions += evenly(_distinct(asked), limit)
    return _distinct(questions)


def is_set(path: str) -> bool:
    """Whether a name is a data set's, not a file's: of the hub, or one that ships."""
    return path.startswith(HUB) or (path in SHIPPED and not Path(path).is_file())


def file_names(paths: Sequence[str]) -> list[str]:
    """The files' names; where several are the same, with as much before them as tells them apart, as in
    mt_bench/question.jsonl. A file that is given twice gets a number."""
    names = {path: _short_name(path, 1) for path in paths}
    for parts in range(2, max([3, *(len(Path(path).parts) for path in paths)]) + 1):
        times = Counter(names.values())
        names |= {path: _short_name(path, parts) for path, name in names.items() if times[name] > 1}
    return _numbered([names[path] for path in paths])


def batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """The first `size` of every file, then the next of every file, and so on."""
    files: dict[str, list[Question]] = {}
    for question in questions:
        files.setdefault(question.file, []).append(question)
    groups = ([own[i : i + size] for i in range(0, len(own), size)] for own in files.values())
    return [group for group in chain.from_iterable(zip_longest(*groups)) if group]


def _short_name(path: str, parts: int) -> str:
    """The last parts of a path; of a data set first the repository's, then all."""
    if path.startswith(HUB) and parts > 2:
        return path.removeprefix(HUB)
    bare = path.split(":")[1] if path.startswith(HUB) else path
    return printable(Path(*Path(bare).parts[-parts:]).as_posix())


def _numbered(names: Sequence[str]) -> list[str]:
    """Names, the second and later ones of each with a count behind them."""
    times, distinct = Counter[str](), dict[str, None]()
    for name in names:
        numbered = name
        while numbered in distinct:
            times[name] += 1
            numbered = f"{name} ({1 + times[name]})"
        distinct[numbered] = None
    return [*distinct]


def _distinct(questions: list[Question]) -> list[Question]:
    """Questions of one name are told apart, as where files were joined."""
    names = _numbered([question.name for question in questions])
    pairs = zip(questions, names, strict=True)
    return [replace(question, id=name.removeprefix(f"{question.file}:")) for question, name in pairs]


def _parsed(file: str, text: str) -> list[Question]:
    questions = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
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
        name, category = str(data.get("question_id", number)), str(data.get("category") or file)
        questions.append(Question(file, name, category, tuple(turns)))
    if not questions:
        raise ValueError(f"question file {file} is empty: give one JSON object a line")
    return questions


def _of_hub(path: str, file: str) -> list[Question]:
    """A data set's questions, in its order: those of the first of `COLUMNS` that it has."""
    rows = _hub_rows(path)
    column = next((column for column in COLUMNS if column in rows.column_names), None)
    if column is None:
        known = f"has the columns {', '.join(rows.column_names)}, and none of {', '.join(COLUMNS)}"
        form = 'write its questions as lines like {"question_id": 1, "turns": ["…"]}'
        raise ValueError(f"data set {path} {known}: {form}")
    questions = []
    for number, row in enumerate(rows, 1):
        with understood(f"data set {path}, row {number}"):
            turns = tuple(turn for turn in _turns(column, row) if turn.strip())
        if not turns:
            raise ValueError(f"data set {path}, row {number}: {column} holds no text")
        questions.append(Question(file, str(number), str(row.get("category") or file), turns))
    if not questions:
        raise ValueError(f"data set {path} is empty: name another split")
    return questions


def _hub_rows(path: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path} is read by a package that is not installed: {install('datasets')}"
        ) from error
    parts = path.removeprefix(HUB).split(":")
    if len(parts) > 3 or not all(parts):
        raise ValueError(f"data set {path} is no name: {HUB_FORM}")
    repository, *config, split = parts if len(parts) > 1 else [*parts, "test"]
    datasets.disable_progress_bars()
    try:
        names = datasets.get_dataset_config_names(repository)
        own = config[0] if config else next((name for name in USUAL if name in names), names[0])
        if not config and len(names) > 1 and own not in USUAL:
            raise ValueError(f"it has the configurations {', '.join(names)}: name one of them")
        return datasets.load_dataset(repository, own, split=split)
    except Exception as error:  # of many types, by its source
        raise ValueError(f"data set {path} cannot be loaded: {first_line(error)}. {HUB_FORM}") from error


def _turns(column: str, row: Mapping[str, Any]) -> list[str]:
    """A row's question by its column. Raises errors of many types for values of another form."""
    value = row[column]
    turns = [*value] if column == "turns" or (column == "prompt" and not isinstance(value, str)) else [value]
    if column in CHATS or (column == "prompt" and not all(isinstance(turn, str) for turn in turns)):
        asked = [turn for turn in value if turn.get("role", turn.get("from")) in ("user", "human")]
        turns = [turn.get("content", turn.get("value")) for turn in asked]
    elif column == "instruction" and row.get("input"):
        turns.append(row["input"])
    for turn in turns:
        if not isinstance(turn, str):
            raise TypeError(f"{str(turn)[:40]!r} is no text")
    if column in ARTICLES:
        return [f"Summarize: {turns[0]}"]  # as EAGLE asks
    return ["\n\n".join(turns)] if column == "instruction" else turns
