"""TreeSpec: a tree by its name, as recipes, drafter directories and the command line give it."""

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.tree import Tree
from slipstream.core.tree_builders import Expand, Path, backbone, cape, dynamic, static, static_levels

FIG9_RANKS = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
FIG9 = tuple(tuple(map(int, path)) for path in FIG9_RANKS.split())  # EAGLE, Fig. 9: 25 nodes under the root
KINDS = (
    "chain-DEPTH, fig9, backbone-DEPTHxWIDTH, full-DEPTHxWIDTH, dynamic-DEPTHxWIDTHxNODES, "
    "best-first-DEPTHxNODES, beam-DEPTHxWIDTH, cape-DEPTH or cape-DEPTHxDRAFTED (with -COUNT@LIMIT… and a "
    "last -COUNT: cape-5x32-7@0.3-5@0.6-3@0.8-1), or child-rank paths such as [[0],[1],[0,0]]"
)
LARGEST = 1024  # number in the name of a tree or an option of a drafter
DEEPEST = 64  # at most so many draft steps a round
DRAFTED = 4096  # at most so many rows that they read
ROWS = 2048  # at most so many rows of a target pass
CAPE = "-7@0.3-5@0.6-3@0.8-1"  # GLIDE, §4.2: 7 further candidates up to a confidence of 0.3, …, 1 above 0.8


@dataclass(frozen=True)
class TreeSpec:
    """A tree to grow by a drafter's `expand`."""

    name: str
    paths: tuple[Path, ...]  # of a static tree: child ranks from the root
    depth: int  # of the deepest node; also the number of draft steps, the root's own included
    nodes: int  # of the tree, root included
    width: int  # nodes expanded at each level of a tree that is not static
    children: int  # candidates wanted for each expanded node
    beam: bool = False  # the expanded nodes are the tree
    # Of CAPE: beside each token of a chain, counts[i] further candidates up to a confidence of limits[i], and
    # the last count above.
    limits: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @classmethod
    def parse(cls, name: str) -> "TreeSpec":
        """The tree of that name. Raises ValueError if there is none."""
        text, name = name.strip(), shortened(name)
        numbers = [int(n[:9]) for n in re.findall(r"\d+", text)]
        if max(numbers, default=0) > LARGEST:
            raise ValueError(f"tree {name!r}: its numbers go up to {LARGEST}")
        if text == "fig9":
            return cls._static(text, FIG9)
        plain = re.fullmatch(r"([a-z-]+)-\d+(x\d+)*", text)
        match plain[1] if plain and 0 not in numbers else None, numbers:
            case ("chain", [depth]) | ("backbone", [depth, _]):
                width = [*numbers, 1][1]
                check_affordable(text, depth, 1 + depth * width, depth - 1)
                return cls._static(text, backbone(depth, width))
            case "full", [depth, width]:
                if depth * math.log2(max(width, 2)) > 10:
                    raise ValueError(f"tree {name!r} has {width}^{depth} leaves: 1024 at most")
                levels = (product(range(width), repeat=d + 1) for d in range(depth))
                return cls._static(text, tuple(chain.from_iterable(levels)))
            case "dynamic", [depth, width, nodes]:
                check_affordable(text, depth, nodes, width * (depth - 1))
                return cls(text, (), depth, min(nodes, 1 + width + (depth - 1) * width**2), width, width)
            case "best-first", [depth, nodes]:  # nothing outside the best `nodes` is expanded
                check_affordable(text, depth, nodes, (nodes - 1) * (depth - 1))
                return cls(text, (), depth, nodes, max(nodes - 1, 1), max(nodes - 1, 1))
            case "beam", [depth, width]:
                check_affordable(text, depth, 1 + depth * width, width * (depth - 1))
                return cls(text, (), depth, 1 + depth * width, width, width, beam=True)
        if match := re.fullmatch(r"cape-([1-9]\d*)(?:x([1-9]\d*))?((?:-\d+@[01]?\.\d+)*-\d+)?", text):
            return cls._cape(text, int(match[1]), int(match[2] or 32), match[3] or CAPE)
        if re.fullmatch(r"\[\s*(\[[\d\s,]*\][\s,]*)*\]", text):
            with suppress(json.JSONDecodeError):
                paths = json.loads(text)
                check_affordable(name, max(map(len, paths), default=0), 1 + len(paths))
                return cls._static(text, tuple(map(tuple, paths)))
        raise ValueError(f"Unknown tree: {name!r}. Available: {KINDS}")

    @classmethod
    def _static(cls, name: str, paths: tuple[Path, ...]) -> "TreeSpec":
        levels = static_levels(paths)
        if not levels:
            raise ValueError(f"tree {name!r} has no nodes: plain decoding is the drafter 'vanilla'")
        return cls(name, paths, len(levels), 1 + len(paths), 0, max(level.ranks for level in levels))

    @classmethod
    def _cape(cls, name: str, depth: int, drafted: int, steps: str) -> "TreeSpec":
        *below, last = [step.split("@") for step in steps[1:].split("-")]
        limits = tuple(float(limit) for _, limit in below)
        counts = tuple(int(count) for count, *_ in (*below, last))
        if list(limits) != sorted(set(limits)) or drafted < depth:
            raise ValueError(
                f"tree {name!r}: limits must rise, and {depth} tokens or more be drafted (cape-5x32{CAPE})"
            )
        check_affordable(name, depth, 1 + drafted, depth - 1)
        children = 1 + max(counts)
        nodes = 1 + min(drafted, depth * children)
        return cls(name, (), depth, nodes, 1, children, limits=limits, counts=counts)

    @property
    def scratch(self) -> int:
        """Rows that are expanded below the root in a round."""
        if self.paths:
            return sum(len(level.grown) for level in static_levels(self.paths))
        return self.width * (self.depth - 1)

    @property
    def best_first(self) -> bool:
        """The best nodes of all: every node may have as many children as there are nodes below the root."""
        return not self.paths and self.width == self.children == self.nodes - 1 > 0

    @property
    def is_chain(self) -> bool:
        """A static tree that does not branch."""
        return bool(self.paths) and self.nodes == self.depth + 1

    @property
    def keeps_first_children(self) -> bool:
        """A static tree whose nodes have their most likely children."""
        return bool(self.paths or not self.depth) and all(
            path[-1] == 0 or (*path[:-1], path[-1] - 1) in self.paths for path in self.paths
        )

    def inner(self, device: torch.device) -> Int[Tensor, " n"]:
        """Of a static tree: the slots that are expanded, in the order of expansion."""
        return _inner(self.paths, device)

    def grow(self, root: Int[Tensor, " B"], expand: Expand) -> Tree:
        """The tree, in `depth` calls of `expand`; the first one expands the root."""
        if self.counts:
            return cape(root, expand, self.depth, self.nodes - 1, self.limits, self.counts)
        if not self.paths:
            return dynamic(root, expand, self.depth, self.width, None if self.beam else self.nodes)
        tree = static(root, self.paths, expand)
        return replace(tree, parents=None) if self.is_chain else tree


PLAIN = TreeSpec("plain", (), 0, 1, 0, 0)  # a bare root: plain decoding


@lru_cache
def _inner(paths: tuple[Path, ...], device: torch.device) -> Int[Tensor, " n"]:
    """See `TreeSpec.inner`. Cached, because a captured round cannot wait for it."""
    return torch.cat([level.parent for level in static_levels(paths)]).unique().to(device)


def check_affordable(name: str, depth: int, rows: int, drafted: int = 0) -> None:
    """Raises ValueError if a round would cost too many draft steps, rows in them, or rows of the target's."""
    if depth > DEEPEST or drafted > DRAFTED or rows > ROWS:
        raise ValueError(
            f"tree {name!r} costs {depth:,} draft steps a round, which read {drafted:,} rows, and a target "
            f"pass over {rows:,}; at most are {DEEPEST}, {DRAFTED:,} and {ROWS:,}: name a smaller tree"
        )


def shortened(name: str) -> str:
    """A name as an error shows it."""
    return name if len(name) <= 80 else f"{name[:79]}…"
