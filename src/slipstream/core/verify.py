"""verify: which guesses the target accepts, walking down from the root under one of two laws.

*Coupled*: draw the target's own token at each node and descend while a child carries it. It is exact for any
tree, and the text does not depend on the tree. *Multi-round speculative sampling* (EAGLE, Algorithm 1; on a
chain, Leviathan's rule): accept a sampled child x with probability min(1, p(x)/q(x)); after a rejection go on
with norm(max(p − q, 0)) and the next sibling. It is exact in distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.grammar import may_advance
from slipstream.core.sampling import Sampler
from slipstream.core.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """What was accepted. `path[:, :count]` are slots, root first; `next` is the target's own next token."""

    path: Int[Tensor, "B P"]  # columns from count on repeat the last slot; P: D + 1 at most
    count: Int[Tensor, " B"]
    next: Int[Tensor, " B"]


PerRow = Int[Tensor, " B"]
# (tree, node, its logits, the next token's position, sampler) -> (child slot, −1: none; token), for each row
Law = Callable[[Tree, PerRow, Float[Tensor, "B V"], PerRow, Sampler], tuple[PerRow, PerRow]]


def coupled(
    tree: Tree, node: PerRow, logits: Float[Tensor, "B V"], position: PerRow, sampler: Sampler
) -> tuple[PerRow, PerRow]:
    """The keyed draw, and the first child with it."""
    token = sampler.draw(sampler.scores(logits), position)
    return child_with(tree, node, token), token


def multi_round(
    tree: Tree, node: PerRow, logits: Float[Tensor, "B V"], position: PerRow, sampler: Sampler
) -> tuple[PerRow, PerRow]:
    """Rejection over the siblings in slot order."""
    rows = torch.arange(len(node), device=node.device)
    p = sampler.law(logits)
    q = None if tree.law is None else tree.law[rows, node].double()
    waiting, child, sibling = _children(tree, node), torch.full_like(node, -1), 0
    while bool(waiting.any()):
        judged, slot = waiting.any(1), waiting.int().argmax(1)
        x = tree.tokens[rows, slot].clamp(min=0)
        accepted = judged & sampler.accept(acceptance(p, q, x), position, sibling)
        child = torch.where(accepted, slot, child)
        rejected = (judged & ~accepted)[:, None]
        p = torch.where(rejected, residual(p, q, x), p)
        q = None if q is None else torch.where(rejected, without(q, x), q)
        waiting = waiting.scatter(1, slot[:, None], False) & ~accepted[:, None]
        sibling += 1
    token = sampler.draw(p.log(), position)
    return child, torch.where(child >= 0, tree.tokens[rows, child.clamp(min=0)], token)


def acceptance(p: Tensor, q: Tensor | None, x: Tensor) -> Float[Tensor, " B"]:
    """p(x)/q(x), the acceptance probability where it is below 1. A point mass (q None) has q(x) = 1."""
    px = p.gather(1, x[:, None])[:, 0]
    return px if q is None else px / q.gather(1, x[:, None])[:, 0].clamp(min=torch.finfo(q.dtype).tiny)


def residual(p: Tensor, q: Tensor | None, x: Tensor) -> Float[Tensor, "B V"]:
    """norm(max(p − q, 0)); for a point mass at x, p given that it is not x."""
    return without(p, x) if q is None else _normalised((p - q).clamp(min=0), otherwise=p)


def without(p: Tensor, x: Tensor) -> Float[Tensor, "B V"]:
    """p given that it is not x."""
    return _normalised(p.scatter(1, x[:, None], 0.0), otherwise=p)


def _normalised(p: Tensor, otherwise: Tensor) -> Tensor:
    """p over its mass; `otherwise` where rounding left none."""
    mass = p.sum(-1, keepdim=True)
    return torch.where(mass > 0, p / mass, otherwise)


def child_with(tree: Tree, node: PerRow, token: PerRow) -> PerRow:
    """Slot of the node's first child that carries the token (−1: none)."""
    if not is_host(token):
        match = _children(tree, node) & (tree.tokens == token[:, None])
        return torch.where(match.any(1), match.int().argmax(1), -1)
    parents = tree.parent_slots().expand_as(tree.tokens)
    rows = zip(*(x.tolist() for x in (tree.tokens, parents, node, token)), strict=True)
    return torch.tensor([_find(*row) for row in rows], device=token.device)


def _find(tokens: list[int], parents: list[int], node: int, token: int) -> int:
    """The same of one row, in a tenth of the time that tensors take for so little."""
    slots = range(1, len(tokens)) if token in tokens else ()
    return next((i for i in slots if tokens[i] == token and parents[i] == node), -1)


def _children(tree: Tree, node: PerRow) -> Bool[Tensor, "B N"]:
    """Which slots hold children of the node that could be accepted."""
    real = tree.tokens >= 0
    real[:, 0] = False
    return real & (tree.parent_slots() == node[:, None])


def verify(
    tree: Tree,
    logits: Float[Tensor, "B N V"],
    lengths: Int[Tensor, " B"],
    sampler: Sampler,
    law: Law = coupled,
) -> Verdict:
    """Walk down from the root while a child is accepted, and extend the histories of `sampler` on the way.
    `lengths` are tokens before the root: a node of depth d stands at position lengths + d."""
    if law is coupled and sampler.tempers_only and is_host(logits):
        return _on_host(tree, logits, lengths, sampler)
    rows = torch.arange(len(lengths), device=lengths.device)
    alive = torch.ones_like(lengths, dtype=torch.bool)
    node = token = torch.zeros_like(lengths)
    count, path = torch.ones_like(lengths), [node]
    sampler.observe(tree.tokens[:, 0], alive)
    for depth in range(tree.depth + 1):
        # A row that has stopped asks again for what it drew last, whose noise is held.
        child, drawn = law(tree, node, logits[rows, node], lengths + count, sampler)
        if any(sampler.grammar_states):
            # A token that nothing may follow is the round's last: the next one raises the error, if the text
            # has not ended there.
            walks = zip(child.tolist(), sampler.grammar_states, drawn.tolist(), strict=True)
            stuck = [
                slot >= 0 and walk is not None and may_advance(walk, x, onward=True) is None
                for slot, walk, x in walks
            ]
            child = child.masked_fill(torch.tensor(stuck, device=child.device), -1)
        token = torch.where(alive, drawn, token)
        alive = alive & (child >= 0)
        if depth == tree.depth or (is_host(alive) and not bool(alive.any())):
            break
        node = torch.where(alive, child, node)
        sampler.observe(tree.tokens[rows, node], alive)
        count = count + alive
        path.append(node)
    path += [node] * (tree.depth + 1 - len(path))
    return Verdict(torch.stack(path, 1), count, token)


def _on_host(
    tree: Tree, logits: Float[Tensor, "B N V"], lengths: Int[Tensor, " B"], sampler: Sampler
) -> Verdict:
    """The same by the coupled law for scores without a history: small tensors take five times as long."""
    paths, nexts = [], []
    texts = (x.tolist() for x in (lengths, tree.tokens, tree.parent_slots().expand_as(tree.tokens)))
    for row, (length, tokens, parents) in enumerate(zip(*texts, strict=True)):
        path, child = list[int](), 0
        while child >= 0:
            path.append(child)
            scores = sampler.scores_alone(row, logits[row, child])
            token = sampler.draw_alone(row, scores, length + len(path))
            child = _find(tokens, parents, child, token) if len(path) <= tree.depth else -1
        paths.append(path)
        nexts.append(token)
    width = max(map(len, paths))
    slots = torch.tensor([path + path[-1:] * (width - len(path)) for path in paths])
    return Verdict(slots, torch.tensor([len(path) for path in paths]), torch.tensor(nexts))
