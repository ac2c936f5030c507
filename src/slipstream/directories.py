"""Directories that commands read and write, drafters and checkpoints: looked at before torch is imported."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

from safetensors import SafetensorError, safe_open

from slipstream.catalog import find_target
from slipstream.files import LOCK, locked, read_json
from slipstream.methods import METHODS
from slipstream.spec import Named, Spec

RUN = "recipe.yaml"  # of a run of `slipstream train`
RUN_MARK = "# of a run of slipstream train"  # the first line of `RUN`
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
SAFE = ("model.safetensors", "medusa_lm_head.safetensors")


def check_drafter(drafter: Named) -> None:
    """Raise ValueError for a drafter that is neither a method nor a directory with a config.json, and for a
    head or a model in its options that is not there."""
    spec = Spec.parse(drafter)
    home = Path(spec.name).expanduser()
    if spec.name not in METHODS:
        if not os.path.isdir(home):
            similar = get_close_matches(spec.name, METHODS, 1)
            hint = f" Did you mean {similar[0]!r}?" if similar else ""
            known = f"{', '.join(METHODS)}, or a drafter directory"
            raise ValueError(f"Unknown drafter: {spec.name!r}. Available: {known}.{hint}")
        read_json(home / "config.json", "drafter's")
    if spec.name in ("auto", "hybrid") and "head" in spec.options:
        check_drafter(spec.options["head"])
    if spec.name == "draft-model" and "model" in spec.options:
        find_target(spec.options["model"])


def checkpoint_file(home: Path) -> Path:
    """The file of tensors in a public checkpoint's directory. Raises ValueError where it, or config.json, is
    missing."""
    names = [name for name in (*SAFE, *PICKLES) if (home / name).exists()]
    if {*SAFE} <= {*names}:
        both = " and ".join(SAFE)
        raise ValueError(f"checkpoint {home} holds {both}: leave the one that config.json describes")
    lacks = "config.json" if not (home / "config.json").exists() else None if names else SAFE[0]
    if lacks:
        fix = f"give a directory with config.json and {' or '.join((*SAFE, *PICKLES))}"
        raise ValueError(f"checkpoint {home} has no {lacks}: {fix}")
    return home / names[0]


@contextmanager
def claimed(
    directory: str | Path, by: Sequence[str], force: bool, reads: Sequence[str | Path]
) -> Iterator[None]:
    """Make and lock a directory that `check_claim` allows. A new one that stays empty is removed again.
    Raises ValueError as that does, and if another process writes in it."""
    new = not os.path.lexists(directory)
    check_claim(directory, by, force, reads)
    Path(directory).mkdir(parents=True, exist_ok=True)
    try:
        with locked(directory):
            yield
    finally:
        if new:
            with suppress(OSError):  # it is not empty
                os.rmdir(directory)


def check_claim(
    directory: str | Path, by: Sequence[str], force: bool = False, reads: Sequence[str | Path] = ()
) -> None:
    """Look whether a directory may be written in. It must be new, empty, or written before by one of the
    commands `by` (train, import, export). `force` allows a directory that holds anything, but none that the
    command reads (`reads`). Raises ValueError if it holds something else, or cannot be written."""
    home = Path(directory)
    try:
        if not str(directory) or "\0" in str(directory):
            raise OSError(0, "that is no name")
        with suppress(FileNotFoundError):
            os.stat(home)  # a name may be too long, or lead through a file
        names = [name for name in sorted(os.listdir(home)) if name != LOCK] if os.path.lexists(home) else []
        if names and any(os.path.exists(source) and os.path.samefile(home, source) for source in reads):
            raise ValueError(f"directory {home} is read by this command: name another one to write")
        if names and not force and (writer := made_by(home)) not in by:
            files = f"other files ({', '.join(names[:3])}, …)"
            what = f"what `slipstream {writer}` wrote" if writer else files
            fix = "name a new or empty one, or give --force to write into it"
            raise ValueError(f"directory {home} holds {what}: {fix}")
        parent = next(place for place in (home, *home.absolute().parents) if os.path.lexists(place))
        with tempfile.TemporaryFile(dir=parent):  # where it stands, or will
            pass
    except OSError as error:
        raise ValueError(
            f"directory {str(directory)!r} cannot be written: {error.strerror}: name a writable one"
        ) from error


def made_by(home: Path) -> str | None:
    """The command that wrote a directory: train, import or export, or None if that is not known."""
    with suppress(OSError, ValueError), open(home / RUN, encoding="utf-8") as file:
        if file.readline().rstrip() == RUN_MARK:
            return "train"
    try:
        config = read_json(home / "config.json", "")
        if isinstance(config.get("target"), dict) and "fingerprint" in config["target"]:
            return "import" if "imported_from" in config.get("training", {}) else "train"
        return mark_of(next(home.glob("*.safetensors")))
    except (OSError, ValueError, TypeError, StopIteration, SafetensorError):
        return None


def mark_of(path: Path) -> str | None:
    """The command that wrote a file of tensors, if it says so. Raises OSError and SafetensorError."""
    with safe_open(path, "np") as tensors:  # without torch
        return (tensors.metadata() or {}).get("slipstream")
