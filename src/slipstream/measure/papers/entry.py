"""The papers' tables and figures: which figures are measured here, and which relations they show.

`entries.yaml` holds them. A table's part measures `kinds` of figures for each of its `sets` of questions, or
of `batches` of texts at once, a column each; each of its `rows` is a drafter and the paper's figures. A claim
compares two drafters in the same kind of figure, or two figures that say in what they differ. The `sets` of
an entry are those of its figures that name no others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from itertools import product, zip_longest
from typing import Any

import yaml

BASELINES = VANILLA, HF = "vanilla", "hf_generate"
DATA = {
    "answers": "--data answers.jsonl.gz",
    "equal": "--recipe recipes/equal_data.yaml --data answers.jsonl.gz",
    "ready-made": "--recipe recipes/equal_data.yaml --data ready_made_answers.jsonl",
}


@dataclass(frozen=True)
class Figure:
    """What is measured: one kind of figure of a drafter."""

    drafter: str  # as `load_drafter` takes it; its name may stand for a directory that the user names
    sets: tuple[str, ...]  # of questions, whose figures are averaged
    kind: str = "τ"  # a name in `KINDS` of measurements.py
    temperature: float = 0.0
    batch: int = 1  # questions that are answered at once

    @property
    def head(self) -> str:
        """The name of the drafter, without its options."""
        return self.drafter.partition(":")[0]


@dataclass(frozen=True)
class Line:
    """A cell of a table: ours, and the paper's where it gives one."""

    row: str
    column: str
    figure: Figure
    paper: float | None = None


@dataclass(frozen=True)
class Claim:
    """A relation that the paper's figures show: the left figure exceeds the right one."""

    text: str
    left: Figure
    right: Figure
    within: float | None = None  # the figures differ by no more than that, instead
    times: float = 1.0  # the left figure is so many times the right one, or more


@dataclass(frozen=True)
class Entry:
    """A table or a figure of a paper."""

    shows: str  # what it is about
    lines: Sequence[Line]
    claims: Sequence[Claim]  # what must follow
    model: str  # whose figures are quoted from the paper
    note: str  # what differs here from the paper
    experts: bool  # whether it is of a mixture of experts, and is left empty for another target

    @property
    def figures(self) -> list[Figure]:
        """All that is measured."""
        compared = [side for claim in self.claims for side in (claim.left, claim.right)]
        return list(dict.fromkeys([*(line.figure for line in self.lines), *compared]))


def known_name(name: str) -> str:
    """The same name. Raises ValueError, with the nearest name, where no entry has it."""
    if name in ENTRIES:
        return name
    nearest = get_close_matches(name.lower().replace("_", "-").replace(" ", "-"), ENTRIES, 1, 0.4)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"Unknown table or figure: {name!r}.{hint} `slipstream reproduce --list` shows all")


def _figure(of: str, kind: str, sets: Sequence[str], T: float = 0.0, batch: int = 1) -> Figure:
    """At T > 0 a drafter draws its children, as Algorithm 1 verifies them (EAGLE, appendix A.2), unless it
    names another proposal."""
    if T and of not in BASELINES and "proposal=" not in of:
        of += ",proposal=sampled"
    return Figure(of, tuple(sets), kind, T, batch)


def _lines(
    rows: Mapping[str, list[Any]],
    kinds: Sequence[str],
    sets: Sequence[str],
    batches: Sequence[int] = (1,),
    T: float = 0.0,
    columns: Sequence[str] = (),
) -> Iterator[Line]:
    """A part of a table. `columns`: their names, where they are not of what is measured."""
    measured, suffix = list(product(kinds, sets, batches)), f", T = {T:g}" if T else ""
    if len(batches) > 1:
        columns = [f"batch {batch}" for batch in batches]
    elif not columns:
        columns = [f"{name} {kind}{suffix}" if len(sets) > 1 else kind + suffix for kind, name, _ in measured]
    for row, (drafter, *paper) in rows.items():
        for column, (kind, name, batch), value in zip_longest(columns, measured, paper):
            yield Line(row, column, _figure(drafter, kind, [name], T, batch), value)


def _claim(
    text: str, left: Any, right: Any, within: float | None = None, times: float = 1.0, **shared: Any
) -> Claim:
    sides = (shared | (side if isinstance(side, dict) else {"of": side}) for side in (left, right))
    ours, theirs = (_figure(**side) for side in sides)
    return Claim(text, ours, theirs, within, times)


def _entry(
    shows: str,
    table: Sequence[Mapping[str, Any]] = (),
    claims: Mapping[str, Mapping[str, Any]] = {},
    sets: Sequence[str] = ("mt_bench",),
    model: str = "Vicuna 7B",
    note: Sequence[str] = (),
    experts: bool = False,
) -> Entry:
    lines = [line for part in table for line in _lines(**{"sets": sets, **part})]
    relations = [_claim(text, **{"sets": sets, **sides}) for text, sides in claims.items()]
    return Entry(shows, lines, relations, model, " ".join(note), experts)


def _arm(name: str, method: str, data: str, options: str = "") -> str:
    """How to train a head that no weights ship for."""
    return f"train {method} {DATA[data]} --out runs/{name} {options}".strip()


_READ = yaml.safe_load((files(__package__) / "entries.yaml").read_text("utf-8"))
ENTRIES: dict[str, Entry] = {name: _entry(**parts) for name, parts in _READ["entries"].items()}
ARMS: dict[str, str] = {name: _arm(name, *parts) for name, parts in _READ["arms"].items()}
