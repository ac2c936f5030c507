"""How trees grow: from fixed child-rank paths, along a backbone, best-first, or by the drafter's own confidence.

A drafter hands over candidates; what is kept is decided here, once for all drafters. `expand(tokens, origin)` is one
draft step: the children of the frontier. It receives the frontier's tokens [B, F] and, for each, the index of its parent
among the frontier of the step before (zeros at the root), and returns candidate ids [B, F, K], best first, and their log
probabilities [B, F, K].
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.tree import PAD, Tree

Expand = Callable[[Int[Tensor, "B F"], Int[Tensor, "B F"]], tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]]
Path = tuple[int, ...]
CPU = torch.device("cpu")


def backbone(depth: int, width: int) -> tuple[Path, ...]:
    """`width` siblings a level, all under the first of the level above (FastEagle §2.2; width 1 is a chain)."""
    return tuple((*(0,) * level, rank) for level in range(depth) for rank in range(width))


def static(root: Int[Tensor, " B"], paths: Sequence[Path], expand: Expand) -> Tree:
    """The tree of `paths`, each the child ranks from the root: (0,) is the best child, (0, 1) its second (EAGLE Fig. 9).

    Raises:
        ValueError: a path is empty, repeated, or its parent is missing.
    """
    B, device = len(root), root.device
    tokens, slots = [root[:, None]], [torch.zeros(1, dtype=torch.long, device=device)]
    frontier, origin = root[:, None], torch.zeros(B, 1, dtype=torch.long, device=device)
    for level in static_levels(tuple(paths), device):
        ids, _ = expand(frontier, origin)
        if level.ranks > ids.shape[-1]:
            raise ValueError(
                f"the tree asks for {level.ranks} children a node and the drafter offers {ids.shape[-1]}: narrow the tree"
            )
        kids = ids[:, level.under, level.rank]
        tokens.append(kids)
        slots.append(level.parent)
        frontier, origin = kids[:, level.grown], level.under[level.grown].expand(B, -1)
    return Tree(torch.cat(tokens, 1), torch.cat(slots).expand(B, -1), len(tokens) - 1)


class Level(NamedTuple):
    """One depth of a static tree; `n` nodes, of which `g` have children."""

    parent: Int[Tensor, " n"]  # slot of the parent in the whole tree
    under: Int[Tensor, " n"]  # index of the parent among the nodes that were expanded to make this level
    rank: Int[Tensor, " n"]
    grown: Int[Tensor, " g"]  # the nodes of this level that are expanded next
    ranks: int  # children wanted of a node, at most


@lru_cache
def static_levels(paths: tuple[Path, ...], device: torch.device = CPU) -> tuple[Level, ...]:
    """Index tensors of a static tree, level by level; slots are breadth-first, siblings by rank."""
    known = {(), *paths}
    if () in paths or len(set(paths)) != len(paths):
        raise ValueError(f"tree paths must be non-empty and distinct, got {list(paths)}")
    for path in paths:
        if path[:-1] not in known or min(path) < 0:
            raise ValueError(f"tree path {path} has no parent {path[:-1]}: list every prefix, with ranks from 0")
    order = sorted(paths, key=lambda path: (len(path), path))
    slot = {path: i for i, path in enumerate([(), *order])}
    inner = {path[:-1] for path in paths}
    levels: list[Level] = []
    expanded: list[Path] = [()]
    for depth in range(1, max(map(len, paths), default=0) + 1):
        here = [path for path in order if len(path) == depth]
        parent, under, rank, grown = (
            torch.tensor(column, dtype=torch.long, device=device)
            for column in (
                [slot[path[:-1]] for path in here],
                [expanded.index(path[:-1]) for path in here],
                [path[-1] for path in here],
                [i for i, path in enumerate(here) if path in inner],
            )
        )
        levels.append(Level(parent, under, rank, grown, ranks=1 + max(path[-1] for path in here)))
        expanded = [path for path in here if path in inner]
    return tuple(levels)


def dynamic(root: Int[Tensor, " B"], expand: Expand, depth: int, width: int, budget: int) -> Tree:
    """EAGLE-2: expand the `width` most confident nodes of each level, then keep the `budget` best of all, root included.

    A node's score is the log of its path's probability, so a parent never scores below its child; a stable order with
    ties to the lower slot keeps every kept node's parent.
    """
    B, device = len(root), root.device
    frontier, origin = root[:, None], torch.zeros(B, 1, dtype=torch.long, device=device)
    slots, score = origin, torch.zeros(B, 1, device=device)
    tokens, parents = [frontier], [slots]
    scores = [torch.full((B, 1), torch.inf, device=device)]  # the root always stays
    for _ in range(depth):
        ids, log_q = expand(frontier, origin)
        K, offset = ids.shape[-1], sum(t.shape[1] for t in tokens)
        path = (score[..., None] + log_q.float().clamp(max=0)).flatten(1)
        tokens.append(ids.flatten(1).masked_fill(path == -torch.inf, PAD))
        parents.append(slots.repeat_interleave(K, 1))
        scores.append(path)
        best = _best(path, width)
        frontier, score = tokens[-1].gather(1, best).clamp(min=0), path.gather(1, best)
        slots, origin = offset + best, best // K
    kept = _best(torch.cat(scores, 1), budget).sort(1).values
    above = torch.cat(parents, 1).gather(1, kept)
    return Tree(torch.cat(tokens, 1).gather(1, kept), torch.searchsorted(kept, above), depth)


def _best(scores: Float[Tensor, "B n"], k: int) -> Int[Tensor, "B k"]:
    """Indices of the k best, ties to the lower index (torch.topk promises no order among ties)."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
