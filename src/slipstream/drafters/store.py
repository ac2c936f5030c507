"""Drafter directories: config.json and model.safetensors, for one target."""

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.core.target import Target
from slipstream.files import LOCK, cache_home, check_regular, locked, read_json, update_json
from slipstream.methods import METHODS, SHIPPED

VERSION = 1
VOCAB = "draft_vocab"  # target ids that a drafter takes its candidates from, sorted
STEP = ".step"  # beside a tensor of int8
TUNED = "tuned.json"
SCALES, COUNTS, DEEPEST = ("rope_theta", "rms_norm_eps"), ("depth", "layers"), 256  # numbers of a head
RUN, RUN_MARK = "recipe.yaml", "# of a run of slipstream train"  # how the recipe of a run begins


@contextmanager
def claimed(
    directory: str | Path, by: Sequence[str], force: bool, reads: Sequence[str | Path]
) -> Iterator[None]:
    """A directory that `check_claim` allows, made where there is none, and held against other processes. If
    nothing is written into a new one it is taken away again.

    Raises:
        ValueError: it is not allowed, cannot be written, or another process writes in it.
    """
    new = not os.path.lexists(directory)
    check_claim(directory, by, force, reads)
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
    """Make a directory to write in: it is new, empty, or was written by the same command before.

    Args:
        by: commands, of train, import and export, whose earlier output may be replaced.
        force: anything may be, but
        reads: what the command reads.

    Raises:
        ValueError: it holds something else, or cannot be written.
    """
    home = Path(directory)
    try:
        if not str(directory) or "\0" in str(directory):
            raise OSError(0, "that is no name")
        held = [name for name in sorted(os.listdir(home)) if name != LOCK] if os.path.lexists(home) else []
        if held and any(os.path.exists(source) and os.path.samefile(home, source) for source in reads):
            raise ValueError(f"directory {home} is read by this command: name another one to write")
        if held and not force and (writer := made_by(home)) not in by:
            found = (
                f"what `slipstream {writer}` wrote" if writer else f"other files ({', '.join(held[:3])}, …)"
            )
            raise ValueError(
                f"directory {home} holds {found}: name a new or empty one, or give --force to write into it"
            )
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise ValueError(
            f"directory {str(directory)!r} cannot be written: {error.strerror}: name a writable one"
        ) from error


def made_by(home: Path) -> str | None:
    """The command that wrote a directory: train, import or export; None where that is not known."""
    try:
        with open(home / RUN, encoding="utf-8") as file:
            if file.readline().rstrip() == RUN_MARK:
                return "train"
    except (OSError, ValueError):
        pass
    try:
        config = read_json(home / "config.json", "")
        if isinstance(config.get("target"), dict) and "fingerprint" in config["target"]:
            return "import" if "imported_from" in config.get("training", {}) else "train"
        with safe_open(next(home.glob("*.safetensors")), "pt") as weights:
            return (weights.metadata() or {}).get("slipstream")
    except (OSError, ValueError, TypeError, StopIteration, SafetensorError):
        return None


def save_drafter(
    directory: str | Path,
    method: str,
    target: Target,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    training: dict[str, Any],
    dtype: torch.dtype | None = torch.bfloat16,
    force: bool = False,
) -> None:
    """Write a drafter directory; each file beside and renamed, the weights first.

    Args:
        config, tensors: what the drafter's `pack` gave. They are `stored` as `dtype` (None: as they are).
        training: a summary of how it was made.
        force: whatever the directory holds; by default only a drafter is replaced. What `tune` found for it
            goes with it.

    Raises:
        ValueError: the directory holds something else, or cannot be written.
    """
    check_claim(directory, ("train", "import"), force)
    about = {
        "method": method,
        "version": VERSION,
        "target": {"name": target.name, "fingerprint": target.fingerprint},
    }
    if dtype is not None:
        tensors = stored(tensors, dtype)
    write_directory(directory, {**about, **config, "training": training}, tensors)
    (Path(directory) / TUNED).unlink(missing_ok=True)


def stored(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors as `dtype`; int8: matrices in steps of a 127th of each row's largest entry, the rest
    as bfloat16."""
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if dtype == torch.int8 and tensor.is_floating_point() and tensor.ndim == 2:
            step = tensor.detach().float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            kept |= {name: (tensor.detach() / step).round().to(torch.int8), name + STEP: step[:, 0]}
        elif tensor.is_floating_point():
            kept[name] = tensor.to(torch.bfloat16 if dtype == torch.int8 else dtype)
        else:
            kept[name] = tensor
    return kept


def restored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `stored` kept, as floating tensors: integers with steps as float32, the others as they are."""
    steps = {name.removesuffix(STEP): tensor for name, tensor in tensors.items() if name.endswith(STEP)}
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith(STEP)}
    return {
        name: tensor * steps[name][:, None] if name in steps else tensor for name, tensor in whole.items()
    }


def write_directory(
    directory: str | Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    name: str = "model.safetensors",
    by: str | None = None,
) -> None:
    """config.json and a file of tensors, which says the command `by` that wrote it, each beside and renamed.
    Raises ValueError where they cannot be written."""
    home, whole = Path(directory), {key: t.contiguous().cpu() for key, t in tensors.items()}
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, ignore_cleanup_errors=True) as beside:
            weights, text = Path(beside) / name, Path(beside) / "config.json"
            save_file(whole, weights, metadata={"format": "pt"} | ({"slipstream": by} if by else {}))
            text.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")
            for path in (weights, text):
                os.chmod(path, 0o644)
                os.replace(path, home / path.name)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"directory {home} cannot be written: {reason}: name a writable one") from error


def find_drafter(name: str, target: Target) -> Path:
    """A drafter directory, by the name of a method whose weights ship or as a path. Raises ValueError."""
    home = os.path.expanduser(name)
    return shipped(name, target) if _ships(name) or not os.path.isdir(home) else Path(home)


def read_drafter(directory: str | Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a drafter directory.

    Raises:
        ValueError: it is none, it cannot be read, or it was made for another target.
    """
    home = Path(directory).expanduser()
    config = read_json(home / "config.json", "drafter's")
    try:
        made_for, version = config["target"]["fingerprint"], config["version"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"drafter directory {directory}: config.json is not Slipstream's: `slipstream import` reads "
            f"public checkpoints"
        ) from error
    if version != VERSION:
        raise ValueError(
            f"drafter directory {directory} has version {version}; this Slipstream reads {VERSION}"
        )
    if made_for != target.fingerprint:
        raise ValueError(
            f"drafter {directory} was made for target {made_for} "
            f"({config['target'].get('name', 'unnamed')}), and this target is {target.fingerprint}: load "
            f"the target it was made for, or train one (slipstream train)"
        )
    _check_sizes(config, f"drafter directory {directory}: config.json")
    try:
        check_regular(home / "model.safetensors")
        return config, restored(load_file(home / "model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"drafter directory {directory}: model.safetensors cannot be read: {error}"
        ) from error


def _check_sizes(config: dict[str, Any], source: str) -> None:
    """Refuse what would show itself in use only, or would be built for ever. Raises ValueError."""
    head = config.get("head", {})
    if not isinstance(head, dict):
        raise ValueError(f"{source}: head is {head!r}; it must be an object")
    wrong = [
        f"{name} is {value!r}"
        for name, value in head.items()
        if (name in SCALES and not (isinstance(value, (int, float)) and 0 <= value < math.inf))
        or (name in COUNTS and not (isinstance(value, int) and 0 < value <= DEEPEST))
    ]
    if config.get("taps", [""]) == [] and config.get("method") != "glide":
        wrong.append("taps is []")
    if wrong:
        raise ValueError(f"{source} does not fit: {', '.join(wrong)}")


def read_tuned(directory: str | Path, place: str, temperature: float) -> dict[str, str]:
    """The tree and the proposal that `tune` found best for this drafter here; nothing where it was not
    asked."""
    try:
        found = read_json(tuned_file(directory), "tuned")[place][_heat(temperature)]
        return {key: str(found[key]) for key in ("skip", "tree", "proposal") if key in found}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def save_tuned(directory: str | Path, place: str, chosen: dict[float, dict[str, Any]]) -> Path:
    """Keep what `tune` chose, by temperature. Raises ValueError where it cannot be written."""
    path = tuned_file(directory)
    update_json(path, place, {_heat(temperature): entry for temperature, entry in chosen.items()})
    return path


def tuned_file(directory: str | Path) -> Path:
    """Beside the weights; for those that ship, which belong to the package, in the user's cache."""
    home = Path(directory).expanduser().resolve()
    if SHIPPED.resolve() in home.parents:
        home = cache_home() / "tuned" / home.relative_to(SHIPPED.resolve())
    return home / TUNED


def _heat(temperature: float) -> str:
    return "T > 0" if temperature else "T = 0"


def shipped(method: str, target: Target) -> Path:
    """The directory of the weights that ship for a method and a target.

    Raises:
        ValueError: none do.
    """
    if not _ships(method):
        raise ValueError(f"Unknown drafter: {method!r}: neither a directory nor a method whose weights ship")
    homes = {
        home: json.loads(home.read_text("utf-8")) for home in sorted(SHIPPED.glob(f"*/{method}/config.json"))
    }
    for home, config in homes.items():
        if config["target"]["fingerprint"] == target.fingerprint:
            return home.parent
    known = ", ".join(
        f"{config['target']['name']} ({config['target']['fingerprint']})" for config in homes.values()
    )
    raise ValueError(
        f"no {method} weights ship for this target ({target.fingerprint}); they do for: {known or 'none'}. "
        f"Train a drafter "
        f"(slipstream train {method}) and give its directory"
    )


def _ships(name: str) -> bool:
    return name in METHODS and METHODS[name].ships


def load_weights(module: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Fill a module, every tensor named and of its shape.

    Raises:
        ValueError: tensors are missing, left over or misshapen, by name.
    """
    wanted = module.state_dict()
    wrong = [f"{name} is missing" for name in wanted if name not in tensors]
    wrong += [f"{name} is not known" for name in tensors if name not in wanted]
    wrong += [
        f"{name} has shape {list(t.shape)} and should have {list(wanted[name].shape)}"
        for name, t in tensors.items()
        if name in wanted and t.shape != wanted[name].shape
    ]
    if wrong:
        raise ValueError(f"{source} does not fit: {'; '.join(wrong)}")
    module.load_state_dict(tensors, assign=True)  # in their own precision
