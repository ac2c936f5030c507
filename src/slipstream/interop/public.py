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
from slipstream.drafters.store import VOCAB, find_drafter, read_drafter, save_drafter, write_directory
from slipstream.files import check_regular, first_line, name_of, read_json, understood, written_to
from slipstream.interop.layouts import FOR_ITS_TARGET, Config, Layout, Tensors, close, layouts, unread
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
        config, tensors = _read(Path(source).expanduser())
        if {"method", "version", "target"} <= config.keys():
            raise ValueError(f"checkpoint {source} is a drafter of Slipstream's already: use it where it is")
        try:
            drafter, about = _converted(config, tensors, target, tree)
        except ValueError as error:
            raise ValueError(f"checkpoint {source}: {error}") from error
        save_drafter(directory, *drafter, {"imported_from": Path(source).name}, dtype=None, force=True)
        return Conversion(**made(), directory=directory, **about)


def _converted(
    config: Config, tensors: Tensors, target: Target, tree: str | None
) -> tuple[tuple[str, Target, Config, Tensors], dict[str, Any]]:
    """Method, target, configuration and tensors of a drafter; and what was used, and notes."""
    known = layouts(target)
    # Later entries of the table are asked first.
    name = next(name for name in reversed(known) if known[name][1].knows(config, tensors))
    method, layout = known[name]
    embedding, notes = tensors.pop(EMBEDDING, None), layout.notes
    drafter_tensors, flat = layout.take(tensors), layout.flat(config)
    if ids := config.get(OURS, {}).get(VOCAB):
        notes.append(f"{VOCAB}: {len(ids.split())} tokens, from config.json's key {OURS}")
        drafter_tensors[VOCAB] = torch.tensor(sorted(map(int, ids.split())), dtype=torch.int32)
    sizes = layout.sizes(flat, drafter_tensors)
    ignored = unread(flat, sorted(layout.keys), target.described)
    about = {"used": [*tensors, *sorted(layout.keys & set(flat))], "notes": notes}
    if layout.embedding != "none":
        note, keeps = _embedding_note(embedding, target, getattr(sizes, "vocab_size", 0) > 0)
        notes.append(f"{EMBEDDING}: {note}")
        if embedding is not None and keeps:
            drafter_tensors[EMBEDDING] = embedding
    notes.append(f"config keys kept for export that change nothing here: {', '.join(ignored) or 'none'}")
    head = asdict(sizes)
    drafter_config: Config = {
        "taps": list(head.pop("taps")),
        "head": head,
        "tree": TreeSpec.parse(tree).name if tree else _tree(config, layout, sizes),
        "public": config,
        "layout": name,
        "public_embedding": None if embedding is None else _digest(embedding),
    }
    drafter_class(method, name).load(drafter_config, drafter_tensors, target)
    return (method, target, drafter_config, drafter_tensors), about


def _embedding_note(embedding: Tensor | None, target: Target, trained: bool) -> tuple[str, bool]:
    """A note on a checkpoint's embedding, and whether the drafter directory must hold it."""
    if embedding is None:
        return "absent, the target's is used", False
    if trained:
        return "the head's own", True
    own = _embedding(target).cpu()
    if embedding.shape == own.shape and torch.equal(embedding, own.to(embedding)):
        return "the target's own, left out", False
    if close(embedding, own):
        return "the target's up to rounding; kept for export, the target's is used", True
    shape = list(embedding.shape)
    raise ValueError(f"{EMBEDDING} ({shape}) is not this target's embedding: {FOR_ITS_TARGET}")


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
        config, tensors = read_drafter(home, target)
        imported, layout = _layout_names(name, config, layout)
        writer = layouts(target)[layout][1]
        head = drafter_class(config["method"], name).load(config, tensors, target).head.config
        public_tensors, in_config = _exported(name, config, tensors, target, writer)
        if layout == imported and "public" in config:
            public_config = config["public"]
            if _tree(public_config, writer, head) != config["tree"]:
                public_config |= {OURS: public_config.get(OURS, {}) | {"tree": config["tree"]}}
        else:
            public_config = {**writer.config(head, config["target"]["name"]), OURS: in_config}
        write_directory(directory, public_config, public_tensors, writer.file, by="export")
        for path in (Path(directory) / other for other in SAFE if other != writer.file):
            with suppress(OSError, SafetensorError):  # most often there is none
                if mark_of(path) == "export":  # tensors of an earlier export in another layout
                    path.unlink()
        serve = _serving(target, directory, layout, getattr(head, "depth", MOST_DRAFTED))
        about: Any = {"used": [*public_tensors], "notes": writer.notes, "serve": serve}
        return Conversion(**made(), directory=directory, **about)


def _layout_names(name: str, config: Config, layout: str | None) -> tuple[str, str]:
    """The layout that a drafter was imported from, or its method's first, and the one to write it in."""
    method = config["method"]
    available = list(METHODS[method].layouts) if method in METHODS else []
    if not available:
        others = ", ".join(other for other, entry in METHODS.items() if entry.layouts)
        raise ValueError(f"drafter {name}: no public layout exists for {method} drafters, only for {others}")
    imported = config.get("layout", available[0])
    layout = imported if layout is None else layout
    if layout not in available:
        unknown = f"Unknown layout for {method} drafters: {layout!r}"
        raise ValueError(f"drafter {name}: {unknown}. Available: {', '.join(available)}")
    return imported, layout


def _exported(
    name: str, config: Config, tensors: Tensors, target: Target, writer: Layout
) -> tuple[Tensors, Config]:
    """A drafter's tensors in a layout, and what config.json holds under our own key."""
    in_config, embedding = {"tree": config["tree"]}, tensors.pop(EMBEDDING, None)
    if not writer.vocabulary and (vocab := tensors.pop(VOCAB, None)) is not None:
        in_config[VOCAB] = " ".join(map(str, vocab.tolist()))
        theirs = f"engines take candidates from all tokens, not these {len(vocab)}"
        writer.notes.append(f"{VOCAB}: in config.json, where import finds it; {theirs}")
    public_tensors = writer.give(tensors)
    copied = _digest(_embedding(target)) if writer.embedding == "copy" else None
    stored = config.get("public_embedding", copied)
    if embedding is not None:
        public_tensors[EMBEDDING] = embedding
        writer.notes.append(f"{EMBEDDING}: as it was imported")
    elif stored is not None:
        copy = _embedding(target).to(getattr(torch, stored["dtype"])).cpu().contiguous()
        if _digest(copy) != stored:
            fix = "load the target in the precision this head was imported with (--dtype)"
            raise ValueError(f"drafter {name}: {fix}")
        public_tensors[EMBEDDING] = copy
        writer.notes.append(f"{EMBEDDING}: a copy of the target's")
    return public_tensors, in_config


def _serving(target: Target, directory: str, layout: str, depth: int) -> str | None:
    """The command for vLLM, where it reads the layout. Its Medusa drafts a token with each head."""
    if (method := VLLM.get(layout)) is None:
        return None
    tokens = depth if method == "medusa" else min(depth, MOST_DRAFTED)
    config = {"method": method, "model": directory, "num_speculative_tokens": tokens}
    return shlex.join(("vllm", "serve", target.source or "MODEL", "--speculative-config", json.dumps(config)))


def _tree(config: Config, layout: Layout, sizes: Any) -> str:
    """The tree that a checkpoint's config.json says, or else its layout."""
    return TreeSpec.parse(config.get(OURS, {}).get("tree") or layout.tree.format(**asdict(sizes))).name


def _digest(embedding: Tensor) -> dict[str, str]:
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
