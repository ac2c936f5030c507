"""Checkpoints: all that an exact continuation needs, in one file, written atomically."""

import os
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from slipstream.drafters.recipe import Recipe
from slipstream.files import check_regular, first_line
from slipstream.training.recipe import stored_recipe


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint over the last one, which stays if that fails. Raises ValueError."""
    beside = path.with_name(f".{path.name}")
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(
            f"checkpoint {path} cannot be written: {reason}: the last one stays; free the disk, --resume"
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def read_checkpoint(
    path: Path, target: str, dtype: str, processes: int, recipe: Recipe, kept: Path
) -> dict[str, Any]:
    """The checkpoint that a run on the target of this fingerprint continues from; `kept` is the file of the
    checkpoint's own recipe, which an error names. Raises ValueError: it cannot be read, or another run made
    it."""
    try:
        check_regular(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        made_for, made_in, made_by, made = (state[key] for key in ("target", "dtype", "processes", "recipe"))
    except Exception as error:  # damaged files raise errors of many types
        reason = first_line(error)
        if isinstance(error, UnpicklingError):  # whose own message says how to load it unsafely
            reason = "it holds other things than tensors, or is damaged"
        raise ValueError(f"checkpoint {path} cannot be read: {reason}") from error
    new = recipe.model_dump(mode="json")
    with suppress(ValueError):
        made = stored_recipe(made, str(path)).model_dump(mode="json")
    if made_for != target:
        how = f"for {made_for}, and this target is {target}"
    elif made_in != dtype:
        how = f"in {made_in}, not {dtype}: give --dtype {made_in}"
    elif made_by != processes:
        how = f"by {made_by} processes, and here are {processes}: an exact continuation needs as many"
    elif made != new:
        changed = ", ".join(key for key in new if new[key] != made.get(key))
        how = f"by another recipe ({changed} differ): resume with {kept}"
    else:
        return state
    raise ValueError(f"checkpoint {path} was made {how}")
