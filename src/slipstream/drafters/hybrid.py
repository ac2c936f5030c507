"""A trained head and n-gram matches in one tree: what the text repeats is looked up, the rest is guessed."""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.drafter import Drafter, State
from slipstream.core.sampling import Sampler
from slipstream.core.shape import Shape
from slipstream.core.span import Span
from slipstream.core.target import Target
from slipstream.core.tree import PAD, Tree
from slipstream.core.verify import child_with
from slipstream.drafters.ngram import NGram, NGramState
from slipstream.drafters.proposer import Proposer

SMALLEST = 8  # nodes of the default tree, at least


@dataclass
class HybridState(State):
    head: State
    ngram: NGramState


@final
class Hybrid(Drafter):
    """The head's tree, whose least probable nodes make room for the continuation of a match, where there is
    one. So a round has as many rows as the head's tree alone. Tokens that the match and the tree begin with
    alike are drafted once.

    Raises:
        ValueError: sampled candidates, or a tree without room for a match.
    """

    def __init__(self, head: Proposer, ngram: NGram) -> None:
        if head.law != "coupled":
            raise ValueError("hybrid drafts take proposal=top-k or noise: a match was drawn from no law")
        if head.shape.nodes <= ngram.depth + 1:
            raise ValueError(
                f"a tree of {head.shape.nodes} nodes has no room for a match of {ngram.depth} tokens beside "
                "a guess: name a larger tree, or a smaller depth"
            )
        self.head, self.ngram, self.taps, self.peeks = head, ngram, head.taps, head.peeks
        self.rows, self.depth = head.rows, max(head.depth, ngram.depth)
        self.probes, self.memory = head.probes, head.memory

    @classmethod
    def named(
        cls,
        target: Target,
        head: str = "eagle",
        tree: str | None = None,
        depth: int | None = None,
        temperature: float = 0.0,
    ) -> "Hybrid":
        """With a head by name or directory. Raises ValueError if it grows no tree, and as `Hybrid` and
        `load_drafter` do.

        Args:
            tree: of the head; by default the tree that it grows alone, as `tune` chose it, or where that has
                fewer than `SMALLEST` nodes the best-first tree of so many, at most four deep.
            depth: of a match; by default half the tree's nodes, at most six.
        """
        from slipstream.drafters import load_drafter

        drafter = load_drafter(head, target, temperature)
        if not isinstance(drafter, Proposer):
            raise ValueError(
                f"drafter 'hybrid': {head!r} grows no tree: take a head such as fasteagle, or a drafter "
                "directory"
            )
        if tree is not None or drafter.shape.nodes < SMALLEST:
            default = f"best-first-{min(4, drafter.deepest or 4)}x{SMALLEST}"
            drafter.grow_as(tree or default, drafter.proposal)
        match = max(1, min(6, drafter.shape.nodes // 2)) if depth is None else depth
        return cls(drafter, NGram(match))

    def start(self, batch: int, device: torch.device) -> HybridState:
        root = torch.zeros(batch, dtype=torch.long, device=device)
        return HybridState(root, self.head.start(batch, device), self.ngram.start(batch, device))

    def room(self, shape: Shape | None = None) -> int:
        return self.head.room(shape) + self.ngram.depth

    def absorb(self, span: Span, state: HybridState) -> None:
        self.head.absorb(span, state.head)
        self.ngram.absorb(span, state.ngram)
        state.root = state.head.root

    def propose(self, state: HybridState, sampler: Sampler, shape: Shape | None = None) -> Tree:
        tree = self.head.propose(state.head, sampler, shape)
        match = self.ngram.propose(state.ngram, sampler)
        if shape is not None:  # room for a guess beside the match
            match = match.clip(max(0, shape.nodes - 2))
        if tree.nodes <= match.nodes:  # a bare root: nothing is guessed
            return replace(match, probes=tree.probes)
        return joined(tree, match.tokens[:, 1:])


def least_last(tree: Tree, last: int) -> Tree:
    """The same tree with its `last` least probable nodes in the last slots. Parents stand before children."""
    assert tree.scores is not None
    best = tree.scores.sort(dim=1, descending=True, stable=True).indices[:, : tree.nodes - last]
    order = torch.ones_like(tree.tokens).scatter(1, best, 0).sort(dim=1, stable=True).indices
    slots = order.argsort(1)  # of each node, its new one
    parents = slots.gather(1, tree.parent_slots().expand(len(slots), -1).gather(1, order))
    probes = tree.probes
    if probes is not None:
        moved = slots.gather(1, probes.hosts.clamp(min=0).expand(len(slots), -1))
        probes = probes._replace(hosts=moved.where(probes.hosts >= 0, PAD))
    tokens, scores = tree.tokens.gather(1, order), tree.scores.gather(1, order)
    return replace(tree, tokens=tokens, parents=parents, probes=probes, scores=scores)


def joined(tree: Tree, match: Int[Tensor, "B D"]) -> Tree:
    """The tree with a chain behind its root in the place of its least probable nodes; a row of `PAD` leaves
    them.

    Token d of the chain takes slot N − D + d, unless the tree's other nodes say the chain up to it already.
    """
    if not match.shape[1]:
        return tree
    tree = least_last(tree, match.shape[1])
    tokens, (N, D) = tree.tokens.clone(), (tree.nodes, match.shape[1])
    parents = tree.parent_slots().expand(len(tokens), -1).clone()
    first = N - D
    kept = Tree(tokens.clone(), parents.clone(), tree.depth)
    kept.tokens[:, first:] = PAD
    node, alike = torch.zeros_like(match[:, 0]), torch.ones_like(match[:, 0], dtype=torch.bool)
    for d, token in enumerate(match.unbind(1)):
        there, known = token >= 0, child_with(kept, node, token)
        alike = alike & (known >= 0)
        new = there & ~alike
        tokens[:, first + d] = torch.where(new, token, tokens[:, first + d])
        parents[:, first + d] = torch.where(new, node, parents[:, first + d])
        node = torch.where(alike, known, torch.where(there, first + d, node))
    return replace(tree, tokens=tokens, parents=parents, depth=max(tree.depth, D))
