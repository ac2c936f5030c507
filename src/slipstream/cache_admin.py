"""Slipstream's entries in the user's cache. All of them can be made again."""

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.files import cache_home

KINDS = {
    "fetched": "models that fetch brought",
    "models": "models converted from GGUF, quantised ones, and descriptions of models",
    "features": "targets' features of training data",
    "compiled": "compiled passes",
    "kernels": "compiled attention and products",
    "tuned": "trees that tune chose",
    "costs": "measured costs of passes, and of the rounds of auto with what they brought",
    "peers": "environments and models of other engines",
}


@dataclass(frozen=True)
class Entry:
    """One entry: its size in `bytes`, and the time when it was last `used`, in seconds since 1970."""

    kind: str
    path: Path
    bytes: int
    used: float

    @property
    def name(self) -> str:
        return str(self.path.relative_to(cache_home()))


def entries(kinds: Sequence[str] = (), unused_since: float | None = None) -> list[Entry]:
    """The entries of some kinds (default: all), largest first. Links and files of others are not listed.

    Args:
        unused_since: leave out entries that were used since then, in seconds since 1970.
    """
    paths = [(kind, path) for kind in kinds or KINDS for path in _paths(kind)]
    known = (_entry(kind, path) for kind, path in paths if path.exists() and not path.is_symlink())
    kept = [entry for entry in known if unused_since is None or entry.used < unused_since]
    return sorted(kept, key=lambda entry: -entry.bytes)


def clear(some: Iterable[Entry]) -> None:
    """Delete entries; the targets of links in them stay. Raises ValueError for one that cannot be deleted."""
    for entry in some:
        try:
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"{error.filename or entry.path} cannot be deleted: {error.strerror}") from error


def _paths(kind: str) -> list[Path]:
    home = cache_home()
    if kind == "models":  # NAME-HASH
        files = home.glob(f"*-{'[0-9a-f]' * 16}/*.json")
        return [path.parent for path in files if path.name in ("config.json", "target.json")]
    if kind in ("features", "fetched", "tuned"):
        return [] if (home / kind).is_symlink() else list((home / kind).glob("*"))
    if kind == "costs":
        return [home / "costs.json", home / "rounds.json"]
    return [home / kind]


def _entry(kind: str, path: Path) -> Entry:
    # Directories do not count: listing one changes its time of access.
    names = [Path(home, name) for home, _, names in os.walk(path) for name in names]
    files = list[os.stat_result]()
    for name in names if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # a process that works here has deleted it meanwhile
            files.append(name.lstat())
    used = max((max(file.st_atime, file.st_mtime) for file in files), default=path.stat().st_mtime)
    return Entry(kind, path, sum(file.st_size for file in files), used)
