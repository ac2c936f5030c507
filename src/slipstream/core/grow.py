"""How trees grow: from fixed child-rank paths, along a backbone, best-first, as beams, or by the drafter's
own confidence.

A drafter hands over candidates; what is kept is decided here, once for all drafters. `expand(tokens, origin)`
is one draft step: the children of the frontier. It receives the frontier's tokens [B, F] and, for each, the
index of its parent among the frontier of the step before (zeros at the root), and returns candidate ids [B,
F, K], best first, and their log probabilities [B, F, K].
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core import look
from slipstream.core.tree import PAD, Tree

Expand = Callable[
    [Int[Tensor, "B F"], Int[Tensor, "B F"]], tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]
]
Path = tuple[int, ...]
CPU = torch.device("cpu")


def backbone(depth: int, width: int) -> tuple[Path, ...]:
    """`width` siblings a level, all under the first of the level above (FastEagle §2.2; width 1 is a
    chain)."""
    return tuple((*(0,) * level, rank) for level in range(depth) for rank in range(width))


def static(root: Int[Tensor, " B"], paths: Sequence[Path], expand: Expand) -> Tree:
    """The tree of `paths`, each the child ranks from the root: (0,) is the best child, (0, 1) its second
    (EAGLE Fig. 9).

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
                f"the tree asks for {level.ranks} children a node and the drafter offers {ids.shape[-1]}: "
                f"narrow the tree"
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
        wrong = next(path for i, path in enumerate(paths) if not path or path in paths[:i])
        raise ValueError(
            f"tree paths must be non-empty and distinct: {list(wrong)} is {'repeated' if wrong else 'empty'}"
        )
    for path in paths:
        if path[:-1] not in known or min(path) < 0:
            raise ValueError(
                f"tree path {path} has no parent {path[:-1]}: list every prefix, with ranks from 0"
            )
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
    """EAGLE-2: expand the `width` most confident nodes of each level, then keep the `budget` best of all,
    root included.

    A node's score is the log of its path's probability, so a parent never scores below its child; a stable
    order with ties to the lower slot keeps every kept node's parent.
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


def beam(root: Int[Tensor, " B"], expand: Expand, depth: int, width: int) -> Tree:
    """Beam search: of all candidates behind a level's nodes, the `width` that end the best paths are the next
    level."""
    frontier, slots = root[:, None], torch.zeros(len(root), 1, dtype=torch.long, device=root.device)
    origin, score, offset = slots, torch.zeros(len(root), 1, device=root.device), 1
    tokens, parents = [frontier], [slots]
    for _ in range(depth):
        ids, log_q = expand(frontier, origin)
        path = (score[..., None] + log_q.float()).flatten(1)
        best = _best(path, width)
        origin, score, frontier = best // ids.shape[-1], path.gather(1, best), ids.flatten(1).gather(1, best)
        tokens.append(frontier.masked_fill(score == -torch.inf, PAD))
        parents.append(slots.gather(1, origin))
        slots = (offset + torch.arange(best.shape[1], device=root.device)).expand_as(best)
        offset += best.shape[1]
    return Tree(torch.cat(tokens, 1), torch.cat(parents, 1), depth)


def cape(
    root: Int[Tensor, " B"],
    expand: Expand,
    depth: int,
    drafted: int,
    limits: Sequence[float],
    counts: Sequence[int],
) -> Tree:
    """CAPE (GLIDE §4.2): a chain of `depth` proposals, and beside each as many of the next best candidates,
    never expanded, as its confidence p asks for: counts[i] where limits[i − 1] < p ≤ limits[i].

    Args:
        drafted: tokens in all; where they do not suffice, the deepest proposals go without.
    """
    frontier, origin = root[:, None], torch.zeros(len(root), 1, dtype=torch.long, device=root.device)
    extra = torch.tensor(counts, device=root.device)
    bounds, ranks = (
        torch.tensor(limits, device=root.device),
        torch.arange(1 + max(counts), device=root.device),
    )
    levels, wanted = list[Tensor](), list[Tensor]()
    for _ in range(depth):
        ids, log_q = expand(frontier, origin)
        few = extra[torch.bucketize(log_q[:, 0, 0].exp().to(bounds), bounds)]
        levels.append(ids[:, 0, : len(ranks)])
        wanted.append(ranks <= few[:, None])
        frontier = ids[:, 0, :1]
    first = (ranks == 0).repeat(depth)
    want, tokens = torch.cat(wanted, 1), torch.cat(levels, 1)
    want = first | (want & ((want & ~first).cumsum(1) <= drafted - depth))
    count = min(drafted, want.shape[1])
    if look.may_look(want):
        count = int(want.sum(1).max())
    kept = (~want).sort(dim=1, stable=True).indices[:, :count]
    chain = want.cumsum(1)[:, first]  # slots of the proposals: the root is slot 0
    above = torch.cat([torch.zeros_like(origin), chain[:, :-1]], 1).repeat_interleave(len(ranks), 1)
    there = want.gather(1, kept)
    drafts, parents = tokens.masked_fill(~want, PAD).gather(1, kept), above.gather(1, kept) * there
    return Tree(
        torch.cat([root[:, None], drafts], 1), torch.cat([torch.zeros_like(origin), parents], 1), depth
    )


def _best(scores: Float[Tensor, "B n"], k: int) -> Int[Tensor, "B k"]:
    """Indices of the k best, ties to the lower index (torch.topk promises no order among ties)."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
