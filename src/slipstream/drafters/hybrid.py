"""A trained head and matches in one tree: what the text repeats is looked up, the rest is guessed."""

from dataclasses import dataclass, replace
from math import inf
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.drafter import Drafter, ScratchSlots, State
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.target import Target
from slipstream.core.tree import PAD, Tree
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.suffix import Suffix, SuffixState
from slipstream.spec import Spec

HEAD = "eagle"  # where none is named
SMALLEST = 8  # nodes of the default tree, at least


@dataclass
class HybridState(State):
    head: State
    matches: SuffixState


@final
class Hybrid(Drafter):
    """The most probable nodes of the head's tree and of the tree of matches, by their scores. So a round has
    as many rows as the head's tree alone.

    Raises ValueError for sampled candidates.
    """

    def __init__(self, head: Proposer, matches: Suffix) -> None:
        if head.law != "coupled":
            raise ValueError("hybrid drafts take proposal=top-k or noise: a match was drawn from no law")
        self.head, self.matches, self.taps, self.uses_target_noise = (
            head,
            matches,
            head.taps,
            head.uses_target_noise,
        )
        self.rows, self.depth = max(head.rows, matches.rows), max(head.depth, matches.depth)
        self.probes, self.memory, self.remembers = head.probes, head.memory, matches.remembers

    @classmethod
    def named(
        cls,
        target: Target,
        head: str = HEAD,
        tree: str | None = None,
        depth: int = 16,
        remember: int = 0,
        temperature: float = 0.0,
        texts: int = 1,
    ) -> "Hybrid":
        """With a head by name or directory. Raises ValueError if it grows no tree, and as `Hybrid` and
        `load_drafter` do.

        Args:
            tree: of the head; by default the one that `head` names, or that it grows alone, as `tune` chose
                it. Where the last has fewer than `SMALLEST` nodes, the best-first tree of so many, at most
                four deep.
            depth, remember: of matches, as `Suffix` takes them.
        """
        from slipstream.drafters import load_drafter

        drafter = load_drafter(head, target, temperature, texts)
        if not isinstance(drafter, Proposer):
            raise ValueError(
                f"drafter 'hybrid': {head!r} grows no tree: take a head such as fasteagle, or a drafter "
                "directory"
            )
        named = "tree" in Spec.parse(head).options
        if tree is not None or (drafter.tree_spec.nodes < SMALLEST and not named):
            default = f"best-first-{min(4, drafter.deepest or 4)}x{SMALLEST}"
            drafter.grow_as(tree or default, drafter.proposal)
        return cls(drafter, Suffix(max(2, drafter.tree_spec.nodes), depth, remember))

    def start(self, batch: int, device: torch.device) -> HybridState:
        root = torch.zeros(batch, dtype=torch.long, device=device)
        return HybridState(root, self.head.start(batch, device), self.matches.start(batch, device))

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        """Accepted matches are longer than the head's own guesses."""
        head, matches = self.head.scratch_slots(spec), self.matches.scratch_slots(spec)
        return ScratchSlots(max(head.target, matches.target), head.drafter + matches.drafter)

    def update(self, span: Span, state: HybridState) -> None:
        self.head.update(span, state.head)
        self.matches.update(span, state.matches)
        state.root = state.head.root

    def propose(self, state: HybridState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        tree = self.head.propose(state.head, sampler, spec)
        deep = spec and replace(spec, depth=spec.nodes - 1)  # its depth is that of draft steps
        matches = self.matches.propose(state.matches, sampler, deep)
        if tree.nodes == 1:  # the head guesses nothing
            return replace(matches, probes=tree.probes)
        return merged(tree, matches)


def merged(tree: Tree, other: Tree) -> Tree:
    """The most probable nodes of two trees, as many as the first has. A node of both has the larger score."""
    assert tree.scores is not None
    assert other.scores is not None
    if len(tree.tokens) == 1 and tree.probes is None and is_host(tree.tokens):
        return _merged_by_host(tree, other)
    N, known = tree.nodes, _known(tree, other)
    parents = other.parent_slots().expand_as(known)
    own = known.gather(1, parents)  # of each parent
    parents = torch.where(own >= 0, own, N - 1 + parents)[:, 1:]
    parents = torch.cat([tree.parent_slots().expand_as(tree.tokens), parents], 1)
    tokens = torch.cat([tree.tokens, other.tokens[:, 1:]], 1)
    both = tree.scores.scatter_reduce(1, known.clamp(min=0), other.scores, "amax")
    scores = torch.cat([both, other.scores.masked_fill(known >= 0, -torch.inf)[:, 1:]], 1)
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :N].sort(dim=1).values
    tokens, parents, scores = (each.gather(1, kept) for each in (tokens, parents, scores))
    nothing = scores == -torch.inf
    parents = torch.searchsorted(kept, parents).masked_fill(nothing, 0)
    probes = tree.probes
    if probes is not None:
        hosts = probes.hosts.expand(len(kept), -1)
        slots = torch.searchsorted(kept, hosts.clamp(min=0)).clamp(max=N - 1)
        probes = probes._replace(hosts=slots.where(kept.gather(1, slots) == hosts, PAD))
    depth = max(tree.depth, other.depth)
    return Tree(tokens.masked_fill(nothing, PAD), parents, depth, probes=probes, scores=scores)


def _merged_by_host(tree: Tree, other: Tree) -> Tree:
    """`merged` of one text's trees, in lists: so many small tensors take the host five times as long."""
    tokens, parents, scores, slots = list[int](), list[int](), list[float](), dict[tuple[int, int], int]()
    for each in (tree, other):
        assert each.scores is not None
        (said,), (above,), (worth,) = each.tokens.tolist(), each.parent_slots().tolist(), each.scores.tolist()
        at = list[int]()  # the place of each node among those of both
        for node, (token, score) in enumerate(zip(said, worth, strict=True)):
            parent = at[above[node]] if node else -1
            place = slots.setdefault((parent, token if token >= 0 else -1 - len(tokens)), len(tokens))
            if place < len(tokens):
                scores[place] = max(scores[place], score)
            else:
                tokens.append(token)
                parents.append(parent)
                scores.append(score)
            at.append(place)
    kept = sorted(sorted(range(len(tokens)), key=lambda place: -scores[place])[: tree.nodes])
    moved = {place: slot for slot, place in enumerate(kept)}
    nothing = {place for place in kept if scores[place] == -inf}
    device = tree.tokens.device
    return Tree(
        torch.tensor([[PAD if place in nothing else tokens[place] for place in kept]], device=device),
        torch.tensor(
            [[0 if place in nothing else moved.get(parents[place], 0) for place in kept]], device=device
        ),
        max(tree.depth, other.depth),
        scores=torch.tensor([[scores[place] for place in kept]], device=device),
    )


def _known(tree: Tree, other: Tree) -> Int[Tensor, "B M"]:
    """Of each node of `other`, the slot of the tree's node that says the same; −1 where there is none."""
    tokens, parents = (each.expand_as(tree.tokens)[:, None] for each in (tree.tokens, tree.parent_slots()))
    named = (tokens == other.tokens[..., None]) & (other.tokens >= 0)[..., None]
    named[:, :, 0] = False  # the root says what it says as the root alone
    above = other.parent_slots().expand_as(other.tokens)
    known = torch.full_like(other.tokens, -1)
    known[:, 0] = 0
    for _ in range(min(tree.depth, other.depth)):
        alike = named & (parents == known.gather(1, above)[..., None])
        known = alike.int().argmax(2).where(alike.any(2), -1)
        known[:, 0] = 0
    return known
