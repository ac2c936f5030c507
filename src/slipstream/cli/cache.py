"""cache: show what is in the user's cache, and delete it."""

import sys
import time
from itertools import compress
from typing import Annotated

import typer

from slipstream.cli.common import JsonPath, beside, command, flag, option

DAY = 86_400
DELETE = "delete what would be shown"
Action = Annotated[str, typer.Argument(metavar="clean", show_default=False, help=DELETE)]


@command(
    "cache",
    "cache --older-than 30",
    "cache clean --older-than 30",
    "cache clean --features --models --yes",
    "cache --json cache.json",
)
def cache(
    action: Action = "show",
    models: Annotated[bool, flag("only models converted from GGUF, or quantised", "--models")] = False,
    fetched: Annotated[bool, flag("only models that fetch brought", "--fetched")] = False,
    features: Annotated[bool, flag("only targets' features of training data", "--features")] = False,
    compiled: Annotated[bool, flag("only compiled passes", "--compiled")] = False,
    kernels: Annotated[bool, flag("only compiled attention and products", "--kernels")] = False,
    tuned: Annotated[bool, flag("only trees that tune chose", "--tuned")] = False,
    costs: Annotated[bool, flag("only measured costs of passes and rounds", "--costs")] = False,
    peers: Annotated[bool, flag("only environments and models of other engines", "--peers")] = False,
    older_than: Annotated[float | None, option("only what was not used for this long", "DAYS", min=0)] = None,
    yes: Annotated[bool, flag("delete without asking", "--yes")] = False,
    json_path: JsonPath = None,
) -> None:
    """Show what is kept where, or delete it. All of it can be made again; files outside the cache stay."""
    from slipstream.cache_admin import KINDS, clear, entries
    from slipstream.files import cache_home, check_writable, write_json

    if action not in ("show", "clean"):
        raise ValueError(
            f"Unknown action: {action!r}. Show what is kept, or delete it: slipstream cache clean"
        )
    check_writable(json_path)
    from slipstream.results import Figures

    kinds = [*compress(KINDS, (fetched, models, features, compiled, kernels, tuned, costs, peers))]
    shown = entries(kinds, None if older_than is None else time.time() - older_than * DAY)
    table = Figures(None, "kept", "kind", "size", "last used")
    for entry in shown:
        table.add_row(entry.name, entry.kind, _size(entry.bytes), _ago(entry.used))
    told = beside(json_path)
    if shown:
        told.print(table)
    total = f"{_size(sum(entry.bytes for entry in shown))} in {cache_home()}"
    told.print(total, soft_wrap=True)
    if json_path is not None:
        listed = [
            {"kind": e.kind, "path": str(e.path), "bytes": e.bytes, "last_used": _iso(e.used)} for e in shown
        ]
        write_json(json_path, {"schema": 1, "home": str(cache_home()), "entries": listed})
    if action == "clean" and shown:
        if not yes and not sys.stdin.isatty():
            raise ValueError(f"{total} would be deleted and nobody can be asked: give --yes")
        if yes or typer.confirm("delete this?"):
            clear(shown)
            told.print("deleted")


def _size(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _ago(moment: float) -> str:
    days = int((time.time() - moment) // DAY)
    return "today" if days <= 0 else f"{days} days ago" if days > 1 else "yesterday"


def _iso(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
