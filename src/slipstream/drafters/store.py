"""Drafter directories: config.json and model.safetensors, for one target."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.core.drafter import Ends
from slipstream.files import cache_home, update_json

VERSION = 1
TRAINED = ("eagle", "eagle3", "fasteagle", "medusa", "bita", "glide")  # methods whose weights may ship
VOCAB = "draft_vocab"  # target ids that a drafter takes its candidates from, sorted
STEP = ".step"  # beside a tensor of int8
TUNED = "tuned.json"
SHIPPED = Path(__file__).parent.parent / "weights"


def save_drafter(
    directory: str | Path,
    method: str,
    target: str,
    ends: Ends,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    training: dict[str, Any],
    dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """Write a drafter directory; each file beside and renamed, the weights first.

    Args:
        target: what the target is called, for people; `ends.fingerprint` is what is checked.
        config, tensors: what the drafter's `pack` gave. They are `stored` as `dtype` (None: as they are).
        training: a summary of how it was made.

    Raises:
        ValueError: the directory cannot be written.
    """
    about = {"method": method, "version": VERSION, "target": {"name": target, "fingerprint": ends.fingerprint}}
    if dtype is not None:
        tensors = stored(tensors, dtype)
    write_directory(directory, {**about, **config, "training": training}, tensors)


def stored(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors as `dtype`; int8: matrices in steps of a 127th of each row's largest entry, the rest as bfloat16."""
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
    return {name: tensor * steps[name][:, None] if name in steps else tensor for name, tensor in whole.items()}


def write_directory(
    directory: str | Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors"
) -> None:
    """config.json and a file of tensors, each beside and renamed. Raises ValueError where they cannot be written."""
    home, whole = Path(directory), {key: t.contiguous().cpu() for key, t in tensors.items()}
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, ignore_cleanup_errors=True) as beside:
            weights, text = Path(beside) / name, Path(beside) / "config.json"
            save_file(whole, weights, metadata={"format": "pt"})
            text.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n")
            for path in (weights, text):
                os.chmod(path, 0o644)
                os.replace(path, home / path.name)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"directory {home} cannot be written: {reason}: name a writable one") from error


def find_drafter(name: str, ends: Ends) -> Path:
    """A drafter directory, by the name of a method whose weights ship or as a path. Raises ValueError."""
    if name in TRAINED or not Path(name).expanduser().is_dir():
        return shipped(name, ends)
    return Path(name).expanduser()


def read_drafter(directory: str | Path, ends: Ends) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a drafter directory.

    Raises:
        ValueError: it is none, it cannot be read, or it was made for another target.
    """
    home = Path(directory).expanduser()
    try:
        config = json.loads((home / "config.json").read_text("utf-8"))
        made_for, version = config["target"]["fingerprint"], config["version"]
    except OSError as error:
        raise ValueError(f"drafter directory {directory}: config.json cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"drafter directory {directory}: config.json is not Slipstream's: `slipstream import` reads public checkpoints"
        ) from error
    if version != VERSION:
        raise ValueError(f"drafter directory {directory} has version {version}; this Slipstream reads {VERSION}")
    if made_for != ends.fingerprint:
        raise ValueError(
            f"drafter {directory} was made for target {made_for} ({config['target'].get('name', 'unnamed')}), and this "
            f"target is {ends.fingerprint}: load the target it was made for, or train one (slipstream train)"
        )
    try:
        return config, restored(load_file(home / "model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"drafter directory {directory}: model.safetensors cannot be read: {error}") from error


def read_tuned(directory: str | Path, place: str, temperature: float) -> dict[str, str]:
    """The tree and the proposal that `tune` found best for this drafter here; nothing where it was not asked."""
    try:
        found = json.loads(_tuned(directory).read_text("utf-8"))[place][_heat(temperature)]
        return {key: str(found[key]) for key in ("skip", "tree", "proposal") if key in found}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def save_tuned(directory: str | Path, place: str, chosen: dict[float, dict[str, Any]]) -> Path:
    """Keep what `tune` chose, by temperature. Raises ValueError where it cannot be written."""
    path = _tuned(directory)
    update_json(path, place, {_heat(temperature): entry for temperature, entry in chosen.items()})
    return path


def _tuned(directory: str | Path) -> Path:
    """Beside the weights; for those that ship, which belong to the package, in the user's cache."""
    home = Path(directory).expanduser().resolve()
    if SHIPPED.resolve() in home.parents:
        home = cache_home() / "tuned" / home.relative_to(SHIPPED.resolve())
    return home / TUNED


def _heat(temperature: float) -> str:
    return "T > 0" if temperature else "T = 0"


def shipped(method: str, ends: Ends) -> Path:
    """The directory of the weights that ship for a method and a target.

    Raises:
        ValueError: none do.
    """
    if method not in TRAINED:
        raise ValueError(f"Unknown drafter: {method!r}: neither a directory nor a method whose weights ship")
    homes = {home: json.loads(home.read_text("utf-8")) for home in sorted(SHIPPED.glob(f"*/{method}/config.json"))}
    for home, config in homes.items():
        if config["target"]["fingerprint"] == ends.fingerprint:
            return home.parent
    known = ", ".join(f"{config['target']['name']} ({config['target']['fingerprint']})" for config in homes.values())
    raise ValueError(
        f"no {method} weights ship for this target ({ends.fingerprint}); they do for: {known or 'none'}. Train a drafter "
        f"(slipstream train {method}) and give its directory"
    )


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
