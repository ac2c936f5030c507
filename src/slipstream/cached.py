"""What Slipstream keeps in the user's cache, and how it is cleared: all of it can be made again."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.files import cache_home

KINDS = {
    "models": "models converted from GGUF",
    "features": "what targets say of training data",
    "compiled": "compiled passes",
    "tuned": "trees that tune chose",
    "costs": "what passes cost here",
}


@dataclass(frozen=True)
class Entry:
    """One thing that is kept: `bytes` on disk, and when any of it was last `used`, in seconds since 1970."""

    kind: str
    path: Path
    bytes: int
    used: float

    @property
    def name(self) -> str:
        return str(self.path.relative_to(cache_home()))


def entries(kinds: Sequence[str] = (), unused_since: float | None = None) -> list[Entry]:
    """What is kept of some kinds (default: all), the largest first. What else lies in the directory is not
    ours, nor is what a link there points to.

    Args:
        unused_since: only what was not used since then, in seconds since 1970.
    """
    paths = [(kind, path) for kind in kinds or KINDS for path in _paths(kind)]
    found = [_entry(kind, path) for kind, path in paths if path.exists() and not path.is_symlink()]
    return sorted(
        (e for e in found if unused_since is None or e.used < unused_since), key=lambda entry: -entry.bytes
    )


def clear(some: Iterable[Entry]) -> None:
    """Delete them; what links in them point to stays.

    Raises:
        ValueError: one cannot be deleted.
    """
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
    if kind == "models":  # NAME-KEY, of a hash
        return [path.parent for path in home.glob(f"*-{'[0-9a-f]' * 16}/config.json")]
    if kind in ("features", "tuned"):
        return [] if (home / kind).is_symlink() else list((home / kind).glob("*"))
    return [home / ("costs.json" if kind == "costs" else kind)]


def _entry(kind: str, path: Path) -> Entry:
    seen = [
        file.lstat() for file in (path, *path.rglob("*")) if not file.is_dir()
    ]  # looking at one uses a directory
    used = max((max(about.st_atime, about.st_mtime) for about in seen), default=path.stat().st_mtime)
    return Entry(kind, path, sum(about.st_size for about in seen), used)
