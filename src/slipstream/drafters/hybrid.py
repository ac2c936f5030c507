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
    """The most probable nodes of the head's tree and of the tree of matches, by their scores. So a step has
    as many rows as the head's tree alone. Raises ValueError for sampled candidates."""

    def __init__(self, head: Proposer, matches: Suffix) -> None:
        if head.law != "coupled":
            raise ValueError("hybrid drafts take proposal=top-k or noise: a match was drawn from no law")
        self.head, self.matches = head, matches
        self.taps, self.uses_target_noise = head.taps, head.uses_target_noise
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
        """With a head by name or directory, and `depth` and `remember` of matches as `Suffix` takes them.

        Its tree is by default the one that `head` names, or that it grows alone, as `tune` chose it. Where
        the last has fewer than `SMALLEST` nodes, it is the best-first tree of so many, at most four deep.
        Raises ValueError for a head that grows no tree, and as `Hybrid` and `load_drafter` do.
        """
        from slipstream.drafters import load_drafter

        drafter = load_drafter(head, target, temperature, texts)
        if not isinstance(drafter, Proposer):
            fix = "take a head such as fasteagle, or a drafter directory"
            raise ValueError(f"drafter 'hybrid': {head!r} grows no tree: {fix}")
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
    N, same = tree.nodes, _same_nodes(tree, other)
    above = other.parent_slots().expand_as(same)
    parents = torch.where((own := same.gather(1, above)) >= 0, own, N - 1 + above)[:, 1:]
    parents = torch.cat([tree.parent_slots().expand_as(tree.tokens), parents], 1)
    tokens = torch.cat([tree.tokens, other.tokens[:, 1:]], 1)
    both = tree.scores.scatter_reduce(1, same.clamp(min=0), other.scores, "amax")
    scores = torch.cat([both, other.scores.masked_fill(same >= 0, -torch.inf)[:, 1:]], 1)
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :N].sort(dim=1).values
    tokens, parents, scores = (x.gather(1, chosen) for x in (tokens, parents, scores))
    absent = scores == -torch.inf
    parents = torch.searchsorted(chosen, parents).masked_fill(absent, 0)
    probes = tree.probes
    if probes is not None:
        hosts = probes.hosts.expand(len(chosen), -1)
        slots = torch.searchsorted(chosen, hosts.clamp(min=0)).clamp(max=N - 1)
        probes = probes._replace(hosts=slots.where(chosen.gather(1, slots) == hosts, PAD))
    depth = max(tree.depth, other.depth)
    return Tree(tokens.masked_fill(absent, PAD), parents, depth, probes=probes, scores=scores)


def _same_nodes(tree: Tree, other: Tree) -> Int[Tensor, "B M"]:
    """Of each node of `other`, the slot of the tree's node with the same path; −1 where there is none."""
    tokens, parents = (x.expand_as(tree.tokens)[:, None] for x in (tree.tokens, tree.parent_slots()))
    named = (tokens == other.tokens[..., None]) & (other.tokens >= 0)[..., None]
    named[:, :, 0] = False  # no other node is the root
    above = other.parent_slots().expand_as(other.tokens)
    same = torch.full_like(other.tokens, -1)
    same[:, 0] = 0
    for _ in range(min(tree.depth, other.depth)):
        alike = named & (parents == same.gather(1, above)[..., None])
        same = alike.int().argmax(2).where(alike.any(2), -1)
        same[:, 0] = 0
    return same


def _merged_by_host(tree: Tree, other: Tree) -> Tree:
    """`merged` of one text's trees, in lists: so many small tensors take the host five times as long."""
    scores, places = list[float](), dict[tuple[int, int], int]()  # of the nodes of both, by parent and token
    for part in (tree, other):
        assert part.scores is not None
        lines = (x[0].tolist() for x in (part.tokens, part.parent_slots(), part.scores))
        of_slot = list[int]()
        for token, parent, score in zip(*lines, strict=True):
            above = of_slot[parent] if of_slot else -1
            place = places.setdefault((above, token if token >= 0 else -1 - len(places)), len(places))
            if place == len(scores):
                scores.append(score)
            scores[place] = max(scores[place], score)
            of_slot.append(place)
    chosen = sorted(sorted(range(len(scores)), key=lambda place: -scores[place])[: tree.nodes])
    slots, nodes, columns = {place: slot for slot, place in enumerate(chosen)}, [*places], []
    for (above, token), score in ((nodes[place], scores[place]) for place in chosen):
        absent = score == -inf
        columns.append((PAD if absent else max(token, PAD), 0 if absent else slots.get(above, 0), score))
    tokens, parents, best = (torch.tensor([line]) for line in zip(*columns, strict=True))
    return Tree(tokens, parents, max(tree.depth, other.depth), scores=best)
