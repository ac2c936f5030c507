"""Import and export of public checkpoints: config.json and a file of tensors, in one of the `layouts`."""

import hashlib
import json
import shlex
from contextlib import suppress
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from slipstream.core.target import Target
from slipstream.core.tree_spec import TreeSpec
from slipstream.directories import SAFE, checkpoint_file, claimed, mark_of
from slipstream.drafters import drafter_class
from slipstream.drafters.heads import EMBEDDING
from slipstream.drafters.store import (
    VOCAB,
    find_drafter,
    read_drafter,
    save_drafter,
    write_directory,
)
from slipstream.files import check_regular, first_line, name_of, read_json, understood, written_to
from slipstream.interop.layouts import Config, Layout, Tensors, close, layouts
from slipstream.interop.sizes import unread
from slipstream.methods import METHODS
from slipstream.provenance import public
from slipstream.results import Result, made
from slipstream.targets.load import AnyTarget, loaded

VLLM = {"eagle": "eagle", "medusa-vllm": "medusa"}  # what vLLM calls the heads of a layout
VLLM |= dict.fromkeys(("eagle3", "speculators", "fasteagle-vllm"), "eagle3")
MOST_DRAFTED = 3  # tokens a round, where the head leaves the choice
OURS = "slipstream"  # key of an exported config.json for what engines do not read


class Conversion(Result):
    """The directory that was written, the tensors and config keys that were used, and notes on the others.
    `serve`: the command by which vLLM serves an exported head, where it knows the layout."""

    directory: str
    used: list[str]
    notes: list[str]
    serve: str | None = None

    def __rich__(self) -> Text:
        written = f"{len(self.used)} tensors and keys used; written to {self.directory}"
        return Text("\n  ".join([written, *self.notes]) + (f"\nnext: {self.serve}" if self.serve else ""))


@public
def import_checkpoint(
    target: AnyTarget,
    source: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    tree: str | None = None,
    force: bool = False,
) -> Conversion:
    """Make a drafter directory of a public checkpoint; its tensors keep their precision.

    Args:
        target: a target, or the name of one for `load_target`.
        source: the checkpoint's directory.
        directory: the drafter directory to write.
        tree: the drafter's default; by default the layout's.
        force: write whatever the directory holds; by default it is new, empty, or an earlier import.

    Raises:
        ValueError: the directory holds something else; a file is missing or damaged, a tensor missing,
            unknown or misshapen (by name), or the head does not fit this target.
    """
    target = loaded(target)
    directory = written_to(directory)
    source = name_of(source, "a checkpoint")
    with claimed(directory, ("import",), force, (source, target.source)), understood(f"checkpoint {source}"):
        read = _read(Path(source).expanduser())
        if {"method", "version", "target"} <= read[0].keys():
            raise ValueError(f"checkpoint {source} is a drafter of Slipstream's already: use it where it is")
        try:
            method, config, tensors, used, notes = _converted(*read, target, tree)
        except ValueError as error:
            raise ValueError(f"checkpoint {source}: {error}") from error
        training = {"imported_from": Path(source).name}
        save_drafter(directory, method, target, config, tensors, training, dtype=None, force=True)
        return Conversion(**made(), directory=directory, used=used, notes=notes)


def _converted(
    config: Config, tensors: Tensors, target: Target, tree: str | None
) -> tuple[str, Config, Tensors, list[str], list[str]]:
    """Method, configuration and tensors of a drafter directory, what was used, and notes. Raises ValueError
    if they do not fit."""
    known, ours = layouts(target), config.get(OURS, {})
    # Later entries of the table are asked first.
    called = next(name for name in reversed(known) if known[name][1].knows(config, tensors))
    method, layout = known[called]
    embedding, notes = tensors.pop(EMBEDDING, None), layout.notes
    taken, flat = layout.take(tensors), layout.flat(config)
    if ids := ours.get(VOCAB):
        notes.append(f"{VOCAB}: {len(ids.split())} tokens, from config.json's key {OURS}")
        taken[VOCAB] = torch.tensor(sorted(map(int, ids.split())), dtype=torch.int32)
    sizes = layout.sizes(flat, taken)
    ignored = unread(flat, sorted(layout.keys), target.described)
    used = [*tensors, *sorted(layout.keys & set(flat))]
    if layout.embedding != "none":
        what, kept = _kept(embedding, target, layout.own_embedding(sizes))
        notes.append(f"{EMBEDDING}: {what}")
        taken |= kept
    notes.append(f"config keys kept for export that change nothing here: {', '.join(ignored) or 'none'}")
    named = asdict(sizes)
    tree = TreeSpec.parse(tree).name if tree else _tree(config, layout, sizes)
    config_json: Config = {"taps": list(named.pop("taps")), "head": named, "tree": tree, "public": config}
    config_json |= {"layout": called, "public_embedding": None if embedding is None else _about(embedding)}
    drafter_class(method, called).load(config_json, taken, target)
    return method, config_json, taken, used, notes


def _kept(embedding: Tensor | None, target: Target, trained: bool) -> tuple[str, Tensors]:
    """A note on a checkpoint's embedding, and the embedding if the drafter directory must hold it. Raises
    ValueError if it is another target's."""
    if embedding is None:
        return "absent, the target's is used", {}
    if trained:
        return "the head's own", {EMBEDDING: embedding}
    own = _embedding(target).cpu()
    if embedding.shape == own.shape and torch.equal(embedding, own.to(embedding)):
        return "the target's own, left out", {}
    if close(embedding, own):
        return "the target's up to rounding; kept for export, the target's is used", {EMBEDDING: embedding}
    raise ValueError(
        f"{EMBEDDING} ({list(embedding.shape)}) is not this target's embedding: import it for the target it "
        "was made for"
    )


@public
def export(
    target: AnyTarget,
    drafter: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    layout: str | None = None,
    force: bool = False,
) -> Conversion:
    """Write a drafter directory in a public layout, for vLLM, SGLang or the reference code.

    Args:
        target: a target, or the name of one for `load_target`.
        drafter: a drafter directory, or a method whose weights ship.
        directory: the checkpoint to write.
        layout: the name of one; default: the one that it was imported from, or its method's first.
        force: write whatever the directory holds; by default it is new, empty, or an earlier export.

    Raises:
        ValueError: it is no drafter for this target, or one that the layout cannot express; the directory
            holds something else, or is the drafter's own.
    """
    target = loaded(target)
    directory = written_to(directory)
    name = name_of(drafter, "a drafter")
    home = find_drafter(name, target)
    with claimed(directory, ("export",), force, (home, target.source)), understood(f"drafter {name}"):
        return _export(name, home, target, layout, directory)


def _export(source: str, home: Path, target: Target, layout: str | None, directory: str) -> Conversion:
    config, tensors = read_drafter(home, target)
    method = config["method"]
    fitting = list(METHODS[method].layouts) if method in METHODS else []
    if not fitting:
        public = ", ".join(name for name, each in METHODS.items() if each.layouts)
        raise ValueError(
            f"drafter {source}: no public layout exists for {method} drafters, only for {public}"
        )
    imported = config.get("layout", fitting[0])
    layout = imported if layout is None else layout
    if layout not in fitting:
        raise ValueError(
            f"drafter {source}: Unknown layout for {method} drafters: {layout!r}. Available: "
            f"{', '.join(fitting)}"
        )
    _, written = layouts(target)[layout]
    notes = written.notes
    drafter = drafter_class(method, source).load(config, tensors, target)
    copied = _about(_embedding(target)) if written.embedding == "copy" else None
    stored = config.get("public_embedding", copied)
    embedding, ours = tensors.pop(EMBEDDING, None), {"tree": config["tree"]}
    if not written.vocabulary and (vocab := tensors.pop(VOCAB, None)) is not None:
        ours[VOCAB] = " ".join(map(str, vocab.tolist()))
        notes.append(
            f"{VOCAB}: in config.json, where import finds it; engines take candidates from all tokens, not "
            f"these {len(vocab)}"
        )
    given = written.give(tensors)
    if embedding is not None:
        given[EMBEDDING] = embedding
        notes.append(f"{EMBEDDING}: as it was imported")
    elif stored is not None:
        given[EMBEDDING] = _embedding(target).to(getattr(torch, stored["dtype"])).cpu().contiguous()
        if _about(given[EMBEDDING]) != stored:
            raise ValueError(
                f"drafter {source}: load the target in the precision this head was imported with (--dtype)"
            )
        notes.append(f"{EMBEDDING}: a copy of the target's")
    if layout == imported and "public" in config:
        config_json = config["public"]
        if _tree(config_json, written, drafter.head.config) != config["tree"]:
            config_json = config_json | {OURS: config_json.get(OURS, {}) | {"tree": config["tree"]}}
    else:
        config_json = {**written.config(drafter.head.config, config["target"]["name"]), OURS: ours}
    write_directory(directory, config_json, given, written.file, by="export")
    _remove_others(Path(directory), written.file)
    serve = _serving(target, directory, layout, getattr(drafter.head.config, "depth", MOST_DRAFTED))
    return Conversion(**made(), directory=directory, used=list(given), notes=notes, serve=serve)


def _serving(target: Target, directory: str, layout: str, depth: int) -> str | None:
    """The command for vLLM, where it reads the layout. Its Medusa drafts a token with each head."""
    if layout not in VLLM:
        return None
    tokens = depth if VLLM[layout] == "medusa" else min(depth, MOST_DRAFTED)
    config = {"method": VLLM[layout], "model": directory, "num_speculative_tokens": tokens}
    words = ("vllm", "serve", target.source or "MODEL", "--speculative-config", json.dumps(config))
    return shlex.join(words)


def _tree(config: Config, layout: Layout, sizes: Any) -> str:
    """The tree that a checkpoint's config.json says, or else its layout."""
    return TreeSpec.parse(config.get(OURS, {}).get("tree") or layout.tree(sizes)).name


def _remove_others(home: Path, written: str) -> None:
    """Remove an earlier export's tensors in a layout that names their file otherwise."""
    for path in (home / name for name in SAFE if name != written):
        with suppress(OSError, SafetensorError):  # there is none
            if mark_of(path) == "export":
                path.unlink()


def _about(embedding: Tensor) -> dict[str, str]:
    """Enough to know an embedding again."""
    data = embedding.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {"dtype": str(embedding.dtype).removeprefix("torch."), "sha256": hashlib.sha256(data).hexdigest()}


def _embedding(target: Target) -> Tensor:
    return target.embed(torch.arange(target.vocab, device=target.device)).detach()


def _read(home: Path) -> tuple[Config, Tensors]:
    path = checkpoint_file(home)
    try:
        config = read_json(home / "config.json", "file")
        check_regular(path)
        if path.name in SAFE:
            return config, load_file(path)
        return config, torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged and harmful files raise errors of many types
        reason = first_line(error)
        if isinstance(error, UnpicklingError):  # torch would have the reader run what the file says
            reason = f"{path.name} holds other things than tensors, or is damaged: convert it to safetensors"
        raise ValueError(f"checkpoint {home} cannot be read: {reason}") from error
