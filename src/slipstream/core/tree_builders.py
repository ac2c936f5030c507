"""How trees grow: from fixed child-rank paths, along a backbone, best-first, as beams, or by confidence.

A drafter offers candidates; these functions decide which of them a tree keeps. `expand(tokens, origin)` is
one draft step. It takes the tokens [B, F] of a frontier and the index of each one's parent in the frontier
before (0 at the root). It returns candidate ids [B, F, K], best first, and their log probabilities.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.tree import PAD, Tree

Expand = Callable[
    [Int[Tensor, "B F"], Int[Tensor, "B F"]], tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]
]
Path = tuple[int, ...]
CPU = torch.device("cpu")


def backbone(depth: int, width: int) -> tuple[Path, ...]:
    """Paths of `width` siblings per level, under the first node of the level above (FastEagle §2.2)."""
    return tuple((*(0,) * level, rank) for level in range(depth) for rank in range(width))


def static(root: Int[Tensor, " B"], paths: Sequence[Path], expand: Expand) -> Tree:
    """The tree of `paths`, which are child ranks from the root: (0, 1) is the best child's second best
    (EAGLE, Fig. 9). Raises ValueError for paths that make no tree, and for too few candidates."""
    frontier, origin, score = _begin(root)
    tokens, slots, scores = [frontier], [origin[0]], [score]
    for level in static_levels(tuple(paths), root.device):
        ids, log_q = expand(frontier, origin)
        if level.ranks > ids.shape[-1]:
            raise ValueError(
                f"the tree asks for {level.ranks} children a node and the drafter offers {ids.shape[-1]}: "
                "narrow the tree"
            )
        path = (score[..., None] + _certain(log_q))[:, level.under, level.rank]
        children = ids[:, level.under, level.rank].masked_fill(path == -torch.inf, PAD)
        tokens.append(children)
        slots.append(level.parent)
        scores.append(path)
        frontier = children[:, level.grown].clamp(min=0)
        score = scores[-1][:, level.grown]
        origin = level.under[level.grown].expand(len(root), -1)
    parents = torch.cat(slots).expand(len(root), -1)
    return Tree(torch.cat(tokens, 1), parents, len(tokens) - 1, scores=torch.cat(scores, 1))


class Level(NamedTuple):
    """One level of a static tree: `n` nodes, of which `g` have children."""

    parent: Int[Tensor, " n"]  # slot of each node's parent in the tree
    under: Int[Tensor, " n"]  # index of each node's parent in the frontier that this level expands
    rank: Int[Tensor, " n"]  # rank of each node among its siblings
    grown: Int[Tensor, " g"]  # nodes of this level that the next one expands
    ranks: int  # the largest number of children of one node


@lru_cache
def static_levels(paths: tuple[Path, ...], device: torch.device = CPU) -> tuple[Level, ...]:
    """Index tensors of a static tree, level by level; slots in breadth-first order, siblings by rank."""
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
    for _, group in groupby(order, key=len):
        level = list(group)
        columns = (
            [slot[path[:-1]] for path in level],
            [expanded.index(path[:-1]) for path in level],
            [path[-1] for path in level],
            [i for i, path in enumerate(level) if path in inner],
        )
        parent, under, rank, grown = (torch.tensor(c, dtype=torch.long, device=device) for c in columns)
        levels.append(Level(parent, under, rank, grown, ranks=1 + max(columns[2])))
        expanded = [path for path in level if path in inner]
    return tuple(levels)


def dynamic(
    root: Int[Tensor, " B"], expand: Expand, depth: int, width: int, budget: int | None = None
) -> Tree:
    """EAGLE-2: expand the `width` most confident nodes of each level, then keep the `budget` best nodes.
    Without a budget, beam search: the expanded nodes are the tree. A node's score is the log probability of
    its path; the lower slot wins a tie. So the parent of every kept node is kept."""
    frontier, origin, score = _begin(root)
    slots = origin
    tokens, parents, scores = [frontier], [slots], [score]  # no node scores above the root, which stays
    for _ in range(depth):
        ids, log_q = expand(frontier, origin)
        K, offset = ids.shape[-1], sum(t.shape[1] for t in tokens)
        path = (score[..., None] + _certain(log_q)).flatten(1)
        ids = ids.flatten(1).masked_fill(path == -torch.inf, PAD)
        best = _best(path, width)
        origin, score, chosen = best // K, path.gather(1, best), ids.gather(1, best)
        tokens.append(ids if budget else chosen)
        parents.append(slots.repeat_interleave(K, 1) if budget else slots.gather(1, origin))
        scores.append(path if budget else score)
        frontier = chosen.clamp(min=0)
        slots = offset + (best if budget else torch.arange(best.shape[1], device=best.device).expand_as(best))
    nodes, above, paths = (torch.cat(levels, 1) for levels in (tokens, parents, scores))
    if budget:
        members = _best(paths, budget).sort(1).values
        nodes, above, paths = (x.gather(1, members) for x in (nodes, above, paths))
        above = torch.searchsorted(members, above)
    return Tree(nodes, above, depth, scores=paths)


def best_first(
    root: Int[Tensor, " B"], ids: Int[Tensor, "B L K"], log_q: Float[Tensor, "B L K"], nodes: int
) -> Tree:
    """The tree that `dynamic` grows of as many candidates as it may have nodes, where all nodes of a level
    have the same. The host finds it by a heap: tensors take several times as long for so little."""
    texts = zip(root.tolist(), ids.tolist(), _certain(log_q).tolist(), strict=True)
    trees = [_likeliest(*text, nodes) for text in texts]
    columns = ([[node[i] for node in tree] for tree in trees] for i in range(3))
    tokens, parents, scores = (torch.tensor(column, device=root.device) for column in columns)
    return Tree(tokens, parents, ids.shape[1], scores=scores)


def _likeliest(
    root: int, ids: list[list[int]], log_q: list[list[float]], nodes: int
) -> list[tuple[int, int, float]]:
    """Token, parent and score of one text's nodes, in the order of `dynamic`."""
    best: list[tuple[int, int, int, float, int]] = []  # level, parent's place, rank, score, parent
    places = [0] * len(ids)  # nodes of each level so far: the next one's place among them
    heap: list[tuple[float, int, int, int, int, float]] = []

    def offer(level: int, place: int, rank: int, parent: int, above: float) -> None:
        if level < len(ids) and rank < len(ids[level]):
            heappush(heap, (-above - log_q[level][rank], level, place, rank, parent, above))

    offer(0, 0, 0, -1, 0.0)
    while heap and heap[0][0] < torch.inf and len(best) < nodes - 1:
        cost, level, place, rank, parent, above = heappop(heap)
        best.append((level, place, rank, -cost, parent))
        offer(level, place, rank + 1, parent, above)
        offer(level + 1, places[level], 0, len(best) - 1, -cost)
        places[level] += 1
    ordered = sorted(enumerate(best), key=lambda item: item[1][:3])
    slots = {-1: 0} | {i: slot for slot, (i, _) in enumerate(ordered, 1)}
    below = [(ids[level][rank], slots[parent], score) for _, (level, _, rank, score, parent) in ordered]
    return [(root, 0, 0.0), *below, *[(PAD, 0, -torch.inf)] * (nodes - 1 - len(best))]


def cape(
    root: Int[Tensor, " B"],
    expand: Expand,
    depth: int,
    drafted: int,
    limits: Sequence[float],
    counts: Sequence[int],
) -> Tree:
    """CAPE (GLIDE §4.2): a chain of `depth` proposals, each with further candidates, which are not expanded:
    counts[i] for a probability p, where limits[i − 1] < p ≤ limits[i]. At most `drafted` tokens stand below
    the root; the deepest levels lose candidates first."""
    frontier, origin, score = _begin(root)
    steps = [(limit, b - a) for limit, (a, b) in zip(limits, pairwise(counts), strict=True)]
    ranks = torch.arange(1 + max(counts), device=root.device)
    levels, wanted, scores = list[Tensor](), list[Tensor](), list[Tensor]()
    for _ in range(depth):
        ids, log_q = expand(frontier, origin)
        p = log_q[:, 0, 0].exp().float()
        count = sum(((p > limit) * step for limit, step in steps), torch.full_like(p, counts[0]))
        scores.append(score + _certain(log_q[:, 0, : len(ranks)]))
        levels.append(ids[:, 0, : len(ranks)].masked_fill(scores[-1] == -torch.inf, PAD))
        wanted.append(ranks <= count[:, None])
        score = scores[-1][:, :1]
        frontier = ids[:, 0, :1].clamp(min=0)
    first = (ranks == 0).repeat(depth)
    want = torch.cat(wanted, 1)
    want = first | (want & ((want & ~first).cumsum(1) <= drafted - depth))
    nodes = int(want.sum(1).max()) if is_host(want) else min(drafted, want.shape[1])
    members = (~want).sort(dim=1, stable=True).indices[:, :nodes]
    chain = want.cumsum(1)[:, :: len(ranks)]  # slots of the proposals; the root is slot 0
    above = torch.cat([origin, chain[:, :-1]], 1).repeat_interleave(len(ranks), 1)
    parents = above.gather(1, members) * want.gather(1, members)
    tokens = torch.cat(levels, 1).masked_fill(~want, PAD).gather(1, members)
    paths = torch.cat(scores, 1).masked_fill(~want, -torch.inf).gather(1, members)
    paths = torch.cat([torch.zeros_like(paths[:, :1]), paths], 1)
    return Tree(torch.cat([root[:, None], tokens], 1), torch.cat([origin, parents], 1), depth, scores=paths)


def _begin(root: Int[Tensor, " B"]) -> tuple[Int[Tensor, "B 1"], Int[Tensor, "B 1"], Float[Tensor, "B 1"]]:
    """(frontier, origin, score) of the root alone."""
    frontier = root[:, None]
    return frontier, torch.zeros_like(frontier), torch.zeros(frontier.shape, device=root.device)


def _certain(log_q: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Log probabilities. NaN of a damaged head would stand above the root."""
    return log_q.float().clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def _best(scores: Float[Tensor, "B n"], k: int) -> Int[Tensor, "B k"]:
    """Indices of the k best; the lower index wins a tie (torch.topk promises no order among ties)."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
