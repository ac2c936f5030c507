"""Questions from a data set of the Hugging Face hub, or from a directory of one, through `datasets`."""

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.files import first_line, install, understood

HUB = "hf:"
FORM = "give hf:REPOSITORY:SPLIT, or hf:REPOSITORY:CONFIGURATION:SPLIT"
USUAL = ("default", "main")  # configurations that are taken where none is named
Row = tuple[str, tuple[str, ...]]  # category and turns


def hub_rows(name: str) -> list[Row]:
    """The questions of `hf:openai/gsm8k:test`, in the data set's order.

    The first of `COLUMNS` that a data set has is its questions. Texts to summarise get EAGLE's "Summarize: ".

    Raises:
        ValueError: `datasets` is not installed, the data set cannot be loaded, or no column is known.
    """
    rows = _loaded(name)
    columns = list(rows.column_names)
    column = next((column for column in COLUMNS if column in columns), None)
    if column is None:
        raise ValueError(
            f"data set {name} has the columns {', '.join(columns)}, and none of {', '.join(COLUMNS)}: write "
            'its questions as lines like {"question_id": 1, "turns": ["…"]}'
        )
    found = []
    for number, row in enumerate(rows, 1):
        with understood(f"data set {name}, row {number}"):
            turns = tuple(turn for turn in COLUMNS[column](row[column], row) if turn.strip())
        if not turns:
            raise ValueError(f"data set {name}, row {number}: {column} holds no text")
        found.append((str(row.get("category") or ""), turns))
    if not found:
        raise ValueError(f"data set {name} is empty: name another split")
    return found


def _loaded(name: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{name} is read by a package that is not installed: {install('datasets')}"
        ) from error
    parts = name.removeprefix(HUB).split(":")
    if len(parts) > 3 or not all(parts):
        raise ValueError(f"data set {name} is no name: {FORM}")
    repository, *config, split = parts if len(parts) > 1 else [*parts, "test"]
    datasets.disable_progress_bars()
    try:
        names = datasets.get_dataset_config_names(repository)
        own = config[0] if config else next((each for each in USUAL if each in names), names[0])
        if not config and len(names) > 1 and own not in USUAL:
            raise ValueError(f"it has the configurations {', '.join(names)}: name one of them")
        return datasets.load_dataset(repository, own, split=split)
    except Exception as error:  # of many types, by its source
        raise ValueError(f"data set {name} cannot be loaded: {first_line(error)}. {FORM}") from error


def _text(value: Any) -> str:
    """A value that is a text. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _talk(messages: Any, _: Mapping[str, Any]) -> list[str]:
    """What the user says."""
    asked = [each for each in messages if each.get("role", each.get("from")) in ("user", "human")]
    return [_text(each.get("content", each.get("value"))) for each in asked]


def _prompt(value: Any, row: Mapping[str, Any]) -> list[str]:
    """Of a text, of several turns' texts, or of messages."""
    turns = [value] if isinstance(value, str) else value
    return list(turns) if all(isinstance(turn, str) for turn in turns) else _talk(value, row)


def _instruction(value: str, row: Mapping[str, Any]) -> list[str]:
    return [f"{_text(value)}\n\n{_text(row['input'])}" if row.get("input") else _text(value)]


def _summary(value: str, _: Mapping[str, Any]) -> list[str]:
    return [f"Summarize: {_text(value)}"]


COLUMNS: dict[str, Callable[[Any, Mapping[str, Any]], list[str]]] = {
    "turns": lambda value, row: [_text(turn) for turn in value],
    "question": lambda value, row: [_text(value)],
    "instruction": _instruction,
    "prompt": _prompt,
    "messages": _talk,
    "conversations": _talk,
    "article": _summary,
    "document": _summary,
}
