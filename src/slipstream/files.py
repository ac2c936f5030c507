"""Files: some rows of one, where results go, whole or not at all, and where what can be made again is kept."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

T = TypeVar("T")


def evenly(rows: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` of the rows, taken evenly over all of them; None: all."""
    n = len(rows) if limit is None else min(limit, len(rows))
    return [rows[i * len(rows) // n] for i in range(n)]


def cache_home() -> Path:
    """The user's cache: converted models, cached features, what was tuned and measured here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def check_writable(*paths: str | None) -> None:
    """Refuse output paths before the work, not after it; None is an output that nobody asked for.

    Raises:
        ValueError: nothing can be written there.
    """
    for path in (path for path in paths if path is not None):
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target.parent):
                pass
            if target.is_dir():
                raise IsADirectoryError(0, "it is a directory")
        except OSError as error:
            raise ValueError(
                f"output {path} cannot be written: {error.strerror}: name a file in a writable directory"
            ) from error


@contextmanager
def replacing(path: str) -> Iterator[TextIO]:
    """A file to write, put in the place of `path` once it is whole: what was there stays until then.

    Raises:
        ValueError: it cannot be written.
    """
    place = Path(path)
    if place.is_file() or not place.exists():
        place = place.resolve()  # a link stays one
        beside = place.with_name(f".{place.name}.{os.getpid()}")
    else:
        beside = place  # nothing takes the place of /dev/stdout
    try:
        with open(beside, "w", encoding="utf-8") as file:
            yield file
        if beside != place:
            os.replace(beside, place)
    except BrokenPipeError:  # somebody else's output
        raise
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from error
    finally:
        if beside != place:
            beside.unlink(missing_ok=True)


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Where files from elsewhere are read: what they cannot be read for is said in one line.

    Raises:
        ValueError: values of another type, out of range, or missing.
    """
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{what} does not fit: {type(error).__name__}{': ' if reason else ''}{reason}") from error


def write_json(path: str, data: dict[str, Any]) -> None:
    """Results, whole or not at all. Raises ValueError where they cannot be written."""
    with replacing(path) as file:
        file.write(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def update_json(path: Path, key: str, entries: dict[str, Any]) -> None:
    """Put entries under a key of a file of results, whose others stay. Raises ValueError where it cannot be written."""
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        known = {}
    check_writable(str(path))
    write_json(str(path), {**known, key: known.get(key, {}) | entries})
