"""Resuming: checkpoints of training, and files of answers that grow line by line.

Both record what made them. Only a run with the same record continues them.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from slipstream.files import check_regular, first_line, locked, parsed
from slipstream.training.recipe import stored_recipe

Row = dict[str, Any]
SOURCE = {"source": "self"}  # every row of answers begins with this
# How the record of a checkpoint differs from that of the run, by its key.
OTHERWISE = {
    "target": "for {was}, and this target is {now}",
    "dtype": "in {was}, not {now}: give --dtype {was}",
    "processes": "by {was} processes, and here are {now}: an exact continuation needs as many",
    "recipe": "by another recipe ({changed} differ): resume with {recipe}",
}


def changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys in which two records differ."""
    return [name for name in dict.fromkeys([*now, *was]) if now.get(name) != was.get(name)]


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint over the last one, which stays if that fails. Raises ValueError."""
    temporary = path.with_name(f".{path.name}")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        reason = getattr(error, "strerror", None) or first_line(error)
        fix = "the last one stays; free the disk, --resume"
        raise ValueError(f"checkpoint {path} cannot be written: {reason}: {fix}") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path, made_by: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """The checkpoint that a run with the record `made_by` (keys of `OTHERWISE`) continues. `recipe` is the
    file of the checkpoint's own. Raises ValueError: it cannot be read, or another run made it."""
    try:
        check_regular(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        before = {name: state[name] for name in made_by}
    except Exception as error:  # damaged files raise errors of many types
        reason = first_line(error)
        if isinstance(error, UnpicklingError):  # whose own message says how to load it unsafely
            reason = "it holds other things than tensors, or is damaged"
        raise ValueError(f"checkpoint {path} cannot be read: {reason}") from error
    with suppress(ValueError):  # as this version would have stored it
        before["recipe"] = stored_recipe(before["recipe"], str(path)).model_dump(mode="json")
    if names := changed(before, made_by):
        was, now = before[names[0]], made_by[names[0]]
        sections = ", ".join(changed(was, now)) if names[0] == "recipe" else ""
        otherwise = OTHERWISE[names[0]].format(was=was, now=now, changed=sections, recipe=recipe)
        raise ValueError(f"checkpoint {path} was made {otherwise}")
    return state


@contextmanager
def answer_file(path: str, made_by: dict[str, Any]) -> Iterator[tuple[list[Row], Callable[[Row], None]]]:
    """The rows of a locked file of answers, and a function that appends a row to the file and to them.
    Raises ValueError: the file holds something else, has another record, is written by another process, or
    cannot be written."""
    with locked(path):
        rows = _read_answers(path)
        for row in rows:
            if not isinstance(before := row.get("made"), dict):
                fix = "train on it, and name another file"
                raise ValueError(f"{path} does not say how it was made, as earlier versions did not: {fix}")
            # Earlier versions did not record a generation_config. A target may have several names.
            before = {"generation_config": made_by.get("generation_config"), **before}
            if names := [name for name in changed(before, made_by) if name != "target"]:
                was, now = (
                    ", ".join(f"{name} {record.get(name, 'none')}" for name in names)
                    for record in (before, made_by)
                )
                fix = "go on with what it was made with, or name another file"
                raise ValueError(f"{path} was made with {was}, not {now}: {fix}")

        def append(row: Row) -> None:
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            except OSError as error:
                fix = "what is there stays; run it again"
                raise ValueError(f"output {path} cannot be written: {error.strerror}: {fix}") from error
            rows.append(row)

        yield rows, append


def _read_answers(path: str) -> list[Row]:
    """The rows of a file of answers, if there is one. An incomplete last line is cut off."""
    try:
        if not os.path.exists(path):
            return []
        with open(path, "rb+") as file:
            *lines, incomplete = file.read().split(b"\n")
            rows = [parsed(line.decode()) for line in lines]
            begin = json.dumps(SOURCE)[:-1].encode()
            if incomplete[: len(begin)] != begin[: len(incomplete)] or not all(map(_is_answer, rows)):
                raise ValueError("not written by synthesize or regenerate")
            file.truncate(sum(len(line) + 1 for line in lines))
            return rows
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}: name another file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds something else than answers: name another file") from error


def _is_answer(row: Row) -> bool:
    messages = row.get("messages", ())
    own = row.items() >= SOURCE.items() and bool(messages or row["prompt"])
    return own and all({*message} >= {"role", "content"} for message in messages)
