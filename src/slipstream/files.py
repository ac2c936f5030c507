"""Files: reading what users give, writing results atomically, locks, and the user's cache."""

import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import socket
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import distributions
from numbers import Integral
from pathlib import Path
from secrets import token_hex
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
PathName = str | os.PathLike[str]
Paths = PathName | Sequence[PathName]
STANDARD = ("-", "/dev/stdout")
HANDED = ("/dev/stdin", "/dev/fd/")  # a shell passes files and pipes under these names
LOCK = ".lock"
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half of a surrogate pair, as JSON escapes it
LOADED = ("*config.json", "*.index.json", "token*.json", "vocab.*", "merges.txt", "added_tokens.json",
          "special_tokens_map.json", "chat_template.*", "tuned.json", "*.safetensors", "*.bin", "*.gguf",
          "*.pt", "*.model", "*.yaml", "*.py")  # fmt: skip


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, such as NumPy's; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_counts(**counts: Any) -> None:
    """Raise ValueError, by name, for a count that is no whole number, or below 1."""
    for name, count in counts.items():
        if not is_whole(count):
            raise ValueError(f"{name} is {count!r}; it must be a whole number")
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")


def check_limits(**limits: Any) -> None:
    """The same for limits, where None is no limit."""
    check_counts(**{name: limit for name, limit in limits.items() if limit is not None})


def check_given(**lists: Collection[Any]) -> None:
    """Raise ValueError, by name, for a list that is empty or holds None."""
    for name, values in lists.items():
        if not len(values):
            raise ValueError(f"{name} is empty: give at least one")
        if any(value is None for value in values):
            raise ValueError(f"{name} holds None: leave it out")


def several(value: Any) -> list[Any]:
    """A list of one thing or several. None is an empty list, and a text is one thing."""
    if value is None:
        return []
    return [*value] if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]


def evenly(rows: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` rows (None: all), spread evenly over them. Raises ValueError for a limit below 1."""
    check_limits(limit=limit)
    n = len(rows) if limit is None else min(limit, len(rows))
    return [rows[i * len(rows) // n] for i in range(n)]


def install(extra: str) -> str:
    """The command that installs an extra, by how Slipstream itself was installed: from a checkout that pip
    links (`-e`), or as a wheel."""
    origins = (package.read_text("direct_url.json") for package in distributions(name="slipstream"))
    linked = any(json.loads(origin).get("dir_info", {}).get("editable") for origin in origins if origin)
    return f"pip install -e '.[{extra}]'" if linked else f"pip install 'slipstream[{extra}]'"


def cache_home() -> Path:
    """The directory of the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def name_of(path: Any, what: str) -> str:
    """A name or a path as text. Raises ValueError for anything else, and for an empty name."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{what} is named by a {type(path).__name__}: give a name or a path")
    if not (name := os.fspath(path)):
        raise ValueError(f"{what} is named by an empty text: give a name or a path")
    return name


def written_to(path: Any) -> str:
    """The name of an output. Raises ValueError for none."""
    return os.path.expanduser(name_of(path, "an output"))


def check_regular(path: PathName) -> None:
    """Raise OSError for anything but a file. Reading from a device may never end."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(0, "it is a directory, not a file")
    if not stat.S_ISREG(mode) and not str(path).startswith(HANDED):
        raise OSError(0, "it is no regular file")


def check_file(path: PathName, what: str) -> None:
    """Raise ValueError, as `read_text` does, for a file that cannot be read."""
    with _reading(path, what):
        if not os.access(path, os.R_OK):
            raise PermissionError(0, "it is read-protected")


@contextmanager
def _reading(path: PathName, what: str) -> Iterator[None]:
    """Check a file that is read in this context, and turn errors over it into a ValueError of one line."""
    try:
        check_regular(path)
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else _reason(error)
        raise ValueError(f"{what} {path} cannot be read: {reason}") from error


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def check_interpreter(python: str) -> None:
    """Raise ValueError where vLLM's interpreter is not there."""
    if not os.path.isfile(python):
        raise ValueError(f"no interpreter {python}: run `make vllm`, or name vLLM's with --python")


def read_text(path: PathName, what: str) -> str:
    """The text of a user's file, plain or gzipped, with or without a byte-order mark. Raises ValueError,
    which says `what` it is, such as "recipe", if it is no regular file that can be read, or not UTF-8."""
    name_of(path, what)  # a number would be a descriptor
    with _reading(path, what), open(path, "rb") as raw:
        gzipped = raw.peek(2)[:2] == b"\x1f\x8b"
        with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if gzipped else raw, "utf-8-sig") as file:
            return file.read()


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if it is invalid, too deep, or escapes half a character."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if HALF.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError if the file cannot be read or holds anything else."""
    text = read_text(path, what)
    try:
        value = parsed(text)
    except ValueError as error:
        raise ValueError(f"{what} {path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} {path} holds a {type(value).__name__}, not a JSON object")
    return value


def check_writable(*paths: str | None, reads: Iterable[str] = ()) -> None:
    """Raise ValueError, before the work begins, for an output (None: there is none) that cannot be written,
    is given twice, or would overwrite what the command `reads`: a file, or a model's or a drafter's in a
    directory."""
    outputs = [path and name_of(path, "an output") for path in paths if path is not None]
    taken: dict[str, str] = {}
    sources = {os.path.realpath(source) for source in reads if os.path.exists(source)}
    for path in outputs:
        try:
            place = STANDARD[0] if path in STANDARD else _writable(path)
        except (OSError, ValueError) as error:
            fix = "name a file in a writable directory"
            raise ValueError(f"output {path} cannot be written: {_reason(error)}: {fix}") from error
        home, name = os.path.split(place)
        part = home in sources and os.path.exists(place) and any(fnmatch(name, kind) for kind in LOADED)
        if place in sources or part:
            raise ValueError(f"output {path} is read by this command: name another file")
        if place in taken:
            raise ValueError(f"outputs {taken[place]} and {path} are the same file: name two")
        taken[place] = path


def _writable(path: str) -> str:
    """The real path of an output. Raises OSError or ValueError if no file can be written there."""
    if not path:
        raise OSError(0, "its name is empty")
    place = os.path.realpath(path)
    mode = stat.S_IFREG
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(0, "it is a directory")
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "it is write-protected")
    if stat.S_ISREG(mode):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with tempfile.TemporaryFile(dir=os.path.dirname(place)):
            pass
    return place


@contextmanager
def replacing(path: str) -> Iterator[TextIO]:
    """A file to write, which replaces `path` once it is complete, and keeps its permissions; "-" is standard
    output. Raises ValueError where it cannot be written."""
    place = temporary = Path(name_of(path, "an output"))  # a pipe is written directly
    if path not in STANDARD and (place.is_file() or not place.exists()):
        place = Path(os.path.realpath(place))  # a link stays a link, and its file is replaced
        temporary = place.with_name(f".{place.name[:40]}.{token_hex(8)}")  # two containers may share a pid
    try:
        with nullcontext(sys.stdout) if path in STANDARD else open(temporary, "w", encoding="utf-8") as file:
            yield file
            file.flush()
        if temporary != place:
            with suppress(OSError):  # there is no such file yet
                temporary.chmod(stat.S_IMODE(place.stat().st_mode))
            os.replace(temporary, place)
    except BrokenPipeError:  # the reader of our output has ended; the command line handles it
        raise
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from error
    finally:
        if temporary != place:
            with suppress(OSError):
                temporary.unlink()


@contextmanager
def locked(path: str | Path, wait: bool = False) -> Iterator[None]:
    """Lock a file or a directory in this context. A process that dies lets go of it. Raises ValueError where
    it cannot be locked, or, unless told to `wait`, where another process holds it, which is named."""
    place = Path(os.path.realpath(path))
    name = place.name
    if len(name.encode(errors="replace")) > 200:  # file systems allow 255 bytes
        name = name[:40] + hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    lock = place / LOCK if place.is_dir() else place.with_name(f".{name}{LOCK}")
    try:
        file = _lock(lock, wait)
    except BlockingIOError as error:
        holder = str(error) or "another process"
        raise ValueError(f"{path} is being written by {holder}: wait for its end, or name another") from None
    except OSError as error:
        fix = "name a place in a writable directory"
        raise ValueError(f"{path} cannot be locked: {error.strerror}: {fix}") from error
    with file:
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        file.flush()
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _lock(lock: Path, wait: bool) -> TextIO:
    """The locked file. Raises BlockingIOError with its text where another process holds it, or OSError."""
    while True:
        file = open(lock, "a+", encoding="utf-8")  # noqa: SIM115  it is locked as long as it is open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            with file:
                file.seek(0)
                raise BlockingIOError(file.read()) from None
        with suppress(FileNotFoundError):  # the last holder may just have removed it
            if os.path.samefile(file.fileno(), lock):
                return file
        file.close()


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__


@cache
def note(text: str) -> None:
    """Print a line on standard error, once in a process. Nothing happens where it cannot be printed."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Turn errors over a foreign file's contents into a ValueError of one line. A failed assertion is our own
    mistake, and passes through."""
    try:
        yield
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        reasons = dict.fromkeys((type(error).__name__, first_line(error)))
        raise ValueError(f"{what} does not fit: {': '.join(reasons)}") from error


def printable(text: str) -> str:
    """A text in which bytes that are no UTF-8, as of a file's name, are question marks: results hold it."""
    return text.encode(errors="replace").decode()


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write results as JSON, atomically. Raises ValueError, which names the file that holds them instead."""
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    try:
        with replacing(path) as file:
            file.write(text)
    except ValueError as error:
        number, instead = tempfile.mkstemp(prefix="slipstream-", suffix=".json")
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        raise ValueError(f"{error}; the results are in {instead}") from error


def read_results(path: Path) -> dict[str, Any]:
    """The entries that `update_json` wrote to a file, by key. A missing file has none. Raises ValueError."""
    try:
        results = read_json(path, "file of results") if os.path.lexists(path) else {}
    except ValueError as error:
        raise ValueError(f"{error}: move it away") from error
    if not all(isinstance(entries, dict) for entries in results.values()):
        raise ValueError(f"file of results {path} holds something else: move it away")
    return results


def update_json(path: Path, news: Mapping[str, dict[str, Any]]) -> None:
    """Add entries under keys of a file of results, atomically. Its other entries stay, also those that other
    processes write meanwhile. Raises ValueError."""
    check_writable(str(path))
    with locked(path, wait=True):
        known = read_results(path)
        write_json(str(path), known | {key: known.get(key, {}) | entries for key, entries in news.items()})
