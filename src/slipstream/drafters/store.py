"""Drafter directories: config.json and model.safetensors, for one target."""

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.core.drafter import FINAL
from slipstream.core.target import Target
from slipstream.core.tree_spec import TreeSpec
from slipstream.directories import check_claim
from slipstream.files import cache_home, check_regular, first_line, note, read_json, understood, update_json
from slipstream.kernels.weight_packing import EIGHT
from slipstream.methods import METHODS, SHIPPED
from slipstream.provenance import suggested

VERSION = 1
VOCAB = "draft_vocab"  # target ids that a drafter takes its candidates from, sorted
STEP = ".step"  # ends the name of an int8 tensor's steps
TUNED = "tuned.json"
SCALES = ("rope_theta", "rms_norm_eps")  # a head's sizes that are finite numbers
COUNTS = ("depth", "layers")  # a head's sizes that are whole numbers from 1 to `DEEPEST`
DEEPEST = 256


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
    """Write a drafter directory, atomically file by file, the weights first: configuration and tensors of the
    drafter's `pack`, the latter `stored` as `dtype` (None: as they are), and a summary of its training. What
    `tune` found for an earlier drafter there is deleted. Raises ValueError as `check_claim` does; `force`
    writes whatever the directory holds."""
    check_claim(directory, ("train", "import"), force)
    made_for = {"name": target.name, "fingerprint": target.fingerprint}
    config = {"method": method, "version": VERSION, "target": made_for, **config, "training": training}
    write_directory(directory, config, tensors if dtype is None else stored(tensors, dtype))
    (Path(directory) / TUNED).unlink(missing_ok=True)


def stored(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors as `dtype`. With int8, matrices are integer multiples of a step, a 127th of each row's
    largest entry, and other tensors are bfloat16."""
    result, other = dict(tensors), torch.bfloat16 if dtype == torch.int8 else dtype
    for name, tensor in tensors.items():
        if dtype == torch.int8 and tensor.is_floating_point() and tensor.ndim == 2:
            step = tensor.detach().float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            result |= {name: (tensor.detach() / step).round().to(torch.int8), name + STEP: step[:, 0]}
        elif tensor.is_floating_point():
            result[name] = tensor.to(other)
    return result


def restored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `stored`: int8 matrices become float32, marked as `EIGHT`; others keep their type."""
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(STEP)}
    for name in result:
        if (step := tensors.get(name + STEP)) is not None:
            result[name] = result[name] * step[:, None]
            setattr(result[name], EIGHT, True)
    return result


def write_directory(
    directory: str | Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    name: str = "model.safetensors",
    by: str | None = None,
) -> None:
    """Write config.json and a file of tensors, which names the command `by`, each atomically, or raise
    ValueError."""
    home = Path(directory)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, ignore_cleanup_errors=True) as temporary:
            weights, text = Path(temporary) / name, Path(temporary) / "config.json"
            whole = {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}
            save_file(whole, weights, metadata={"format": "pt"} | ({"slipstream": by} if by else {}))
            text.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")
            for path in (weights, text):
                os.chmod(path, 0o644)
                os.replace(path, home / path.name)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"directory {home} cannot be written: {reason}: name a writable one") from error


def find_drafter(name: str, target: Target) -> Path:
    """The directory at a path, or of a method whose weights ship for the target. Raises ValueError."""
    method, home = METHODS.get(name), os.path.expanduser(name)
    if method is None or not method.ships:
        if os.path.isdir(home):
            return Path(home)
        raise ValueError(f"Unknown drafter: {name!r}: neither a directory nor a method whose weights ship")
    known = list[str]()
    for path in sorted(SHIPPED.glob(f"*/{name}/config.json")):
        made_for = json.loads(path.read_text("utf-8"))["target"]
        if made_for["fingerprint"] == target.fingerprint:
            return path.parent
        known.append(f"{made_for['name']} ({made_for['fingerprint']})")
    raise ValueError(
        f"no {name} weights ship for this target ({target.fingerprint}); they do for: "
        f"{', '.join(known) or 'none'}. Train a drafter ({suggested(f'train {name}')}) and give its directory"
        + (f", or write {name}:{method.needs}=…" if method.needs else "")
    )


def read_drafter(directory: str | Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a drafter directory. Raises ValueError if it is none, cannot be
    read, or was made for another target."""
    home, source = Path(directory).expanduser(), f"drafter directory {directory}"
    config = read_json(home / "config.json", "drafter's")
    try:
        made_for, version = config["target"]["fingerprint"], config["version"]
    except (KeyError, TypeError) as error:
        fix = f"`{suggested('import')}` reads public checkpoints"
        raise ValueError(f"{source}: config.json is not Slipstream's: {fix}") from error
    if version != VERSION:
        raise ValueError(f"{source} has version {version}; Slipstream reads {VERSION}")
    if made_for != target.fingerprint:
        raise ValueError(
            f"drafter {directory} was made for target {made_for} "
            f"({config['target'].get('name', 'unnamed')}), and this target is {target.fingerprint}: load the "
            f"target it was made for, or train one ({suggested('train')})"
        )
    tensors = _read_tensors(home / "model.safetensors", f"{source}: model.safetensors")
    largest = max(target.vocab, DEEPEST, *(size for tensor in tensors.values() for size in tensor.shape))
    _check_config(config, largest, f"{source}: config.json")
    return config, tensors


def _read_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """The tensors of a drafter. Raises ValueError, also for numbers that are not finite."""
    try:
        check_regular(path)
        with understood(source):
            tensors = restored(load_file(path))
            bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{source} cannot be read: {error}") from error
    if bad:
        names = f"{bad[0]} and {len(bad) - 1} more" if len(bad) > 1 else bad[0]
        why = "it is damaged, or its training failed: train the drafter again"
        raise ValueError(f"{source} does not fit: {names} holds numbers that are not finite: {why}")
    if (vocab := tensors.get(VOCAB)) is not None and vocab.ndim != 1:
        raise ValueError(f"{source} does not fit: {VOCAB} has shape {list(vocab.shape)}; it must be a list")
    return tensors


def _check_config(config: dict[str, Any], largest: int, source: str) -> None:
    """Refuse what would only fail in use, and sizes above `largest`, which no tensor has and no memory holds.
    Raises ValueError."""
    head, taps = config.get("head", {}), config.get("taps", [])
    if not isinstance(head, dict):
        raise ValueError(f"{source}: head is {head!r}; it must be an object")
    if not (isinstance(taps, list) and all(isinstance(tap, str) for tap in taps)):
        raise ValueError(f"{source} does not fit: taps is {taps!r}; it must be a list such as [{FINAL!r}]")

    def fits(name: str, value: Any) -> bool:
        if name in SCALES:
            return isinstance(value, (int, float)) and 0 <= value < math.inf
        if name in COUNTS and not (isinstance(value, int) and 0 < value <= DEEPEST):
            return False
        return not isinstance(value, int) or abs(value) <= largest

    if wrong := [f"{name} is {value!r}" for name, value in head.items() if not fits(name, value)]:
        fix = f"sizes are at most {largest}, and {' and '.join(COUNTS)} from 1 to {DEEPEST}"
        raise ValueError(f"{source} does not fit: {', '.join(wrong)}: {fix}")


def read_tuned(directory: str | Path, place: str, temperature: float, texts: int = 1) -> dict[str, str]:
    """The options that `tune` chose for this drafter in this place; none if it has not run."""
    entry = _tuned_entry(directory, place, temperature, texts)
    return {key: str(entry[key]) for key in ("skip", "tree", "proposal") if key in entry}


def read_rungs(directory: str | Path, place: str, temperature: float, texts: int = 1) -> tuple[TreeSpec, ...]:
    """The trees among which `auto` shall choose, as `tune` found them, the smallest first; none if it has not
    run."""
    trees = _tuned_entry(directory, place, temperature, texts).get("rungs", [])
    return tuple(sorted(map(TreeSpec.parse, trees), key=lambda spec: spec.nodes))


def save_tuned(directory: str | Path, place: str, chosen: dict[float, Any], texts: int = 1) -> Path:
    """Store the entries that `tune` chose for so many texts at once, by temperature. Raises ValueError if
    they cannot be written."""
    path = tuned_file(directory)
    update_json(path, {place: {_setting(temperature, texts): entry for temperature, entry in chosen.items()}})
    return path


def _tuned_entry(directory: str | Path, place: str, temperature: float, texts: int) -> dict[str, Any]:
    """The entry for this temperature and the nearest number of texts; empty if there is none. A damaged file
    is ignored, with one line."""
    path, by_texts = tuned_file(directory), dict[int, Any]()
    try:
        entries = read_json(path, "file").get(place, {}) if path.exists() else {}
        for name, entry in entries.items():
            number = re.search(r", ([1-9]\d*) texts$", name)
            n = int(number[1]) if number else 1
            if name == _setting(temperature, n):
                by_texts[n] = entry
        nearest = by_texts[min(by_texts, key=lambda n: abs(math.log2(n / texts)))] if by_texts else {}
        for tree in [*filter(None, [nearest.get("tree")]), *nearest.get("rungs", [])]:
            TreeSpec.parse(tree)
        return dict(nearest)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        note(f"{path} is damaged and ignored: {first_line(error)}: delete it, and run tune again")
        return {}


def tuned_file(directory: str | Path) -> Path:
    """The file of tuned options: beside the weights, or in the user's cache for weights that ship."""
    home = Path(directory).expanduser().resolve()
    if SHIPPED.resolve() in home.parents:
        home = cache_home() / "tuned" / home.relative_to(SHIPPED.resolve())
    return home / TUNED


def _setting(temperature: float, texts: int) -> str:
    return f"T {'>' if temperature else '='} 0{f', {texts} texts' * (texts > 1)}"


def load_weights(module: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Load tensors into a module. Raises ValueError, which names those that are missing, unknown or of
    another shape."""
    wanted = module.state_dict()
    wrong = [f"{name} is missing" for name in wanted if name not in tensors]
    wrong += [f"{name} is not known" for name in tensors if name not in wanted]
    for name in (name for name in tensors if name in wanted):
        if (stored := list(tensors[name].shape)) != (own := list(wanted[name].shape)):
            wrong.append(f"{name} has shape {stored} and should have {own}")
    if wrong:
        raise ValueError(f"{source} does not fit: {'; '.join(wrong)}")
    module.load_state_dict(tensors, assign=True)  # they keep their own precision
    for name, parameter in module.named_parameters():
        if hasattr(tensors[name], EIGHT):
            setattr(parameter, EIGHT, True)
