"""BiTA: the target drafts for itself, by mask tokens that ride behind its own rows (papers/bita)."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from slipstream.core.device import is_host
from slipstream.core.drafter import FINAL, ScratchSlots
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.target import Target
from slipstream.core.tree import PAD, Probes, Tree, chain
from slipstream.core.tree_builders import Path
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.heads import Head
from slipstream.drafters.parallel import ParallelDrafter, ParallelState
from slipstream.drafters.proposer import Vocab


@dataclass(frozen=True)
class BitaConfig:
    """Sizes of a `BitaHead`; `layers`, `heads` and `head_dim` are those of the target's cache."""

    hidden_size: int
    layers: int
    heads: int
    head_dim: int
    depth: int = 3  # M: mask tokens, and tokens that they draft
    prompts: int = 16  # P, of each layer; 0: there are only masks
    taps: tuple[str, ...] = (FINAL,)


class BitaHead(Head):
    """All that is trained: M masks, which are vectors in place of embeddings, and P keys and values per
    layer, which only masks read. These keys have no position and are not rotated (§3.1)."""

    sizes = BitaConfig

    def __init__(self, config: BitaConfig) -> None:
        super().__init__()
        self.config = config
        self.masks = nn.Parameter(torch.zeros(config.depth, config.hidden_size))
        shape = config.layers, 2, config.prompts, config.heads, config.head_dim
        self.memory = nn.Parameter(torch.zeros(shape))


@dataclass
class BitaState(ParallelState):
    known: Int[Tensor, " B"]  # depths that the masks have predicted


@final
class Bita(ParallelDrafter):
    """Drafts with a `BitaHead`: the masks behind a node predict the tokens after its next one, in the pass
    that verifies it.

    The efficient tree of §3.2 is "backbone-3x5", the full one with k = 2 "full-3x2"; the public code's is
    triangular, [[0],[1],…] with 5, 4 and 3 children. Fig. 4 decodes with `hosts=1` and a chain.

    Args:
        hosts: how many nodes carry masks: those likeliest to end the accepted path, which in a static tree
            are those of low ranks and depths; 0: all. A pass has nodes + hosts · M rows; where rows cost time
            four hosts pay more than all (docs/bita.md). For a path that ends elsewhere, the masks of its last
            host give the draft, without the tokens that have been chosen since.
    """

    method, module = "bita", BitaHead

    def __init__(
        self,
        head: BitaHead,
        target: Target,
        vocab: Vocab | None = None,
        tree: str | TreeSpec = "backbone-3x5",
        proposal: str = "top-k",
        hosts: int = 4,
    ) -> None:
        self.hosts = hosts
        super().__init__(head, target, vocab, tree, proposal)
        self.memory = self.head.memory if self.head.config.prompts else None

    def grow_as(self, tree: str | TreeSpec, proposal: str = "top-k") -> None:
        super().grow_as(tree, proposal)
        self.probes = self.head.masks[: self.depth]
        self.rows = self.scratch_slots().target

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        spec = self.shaped(spec)
        rows = spec.nodes + min(self.hosts or spec.nodes, spec.nodes) * spec.depth
        return ScratchSlots(rows, rows)

    def start(self, batch: int, device: torch.device) -> BitaState:
        known = torch.zeros(batch, dtype=torch.long, device=device)
        return BitaState(**vars(super().start(batch, device)), known=known)

    def update(self, span: Span, state: BitaState) -> None:
        if span.probed is None:
            state.known = torch.zeros_like(state.known)  # no masks rode in this pass
        else:
            features, since = span.probed
            M = features.shape[1]
            state.known = torch.where(since < 0, 0, M - since).clamp(min=0)
            depths = torch.arange(state.hidden.shape[1], device=since.device)
            later = (depths + since[:, None]).clamp(0, M - 1)
            state.hidden = features.gather(1, later[..., None].expand_as(state.hidden))
        state.root, state.length = span.root, span.start + span.count

    def propose(self, state: ParallelState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        assert isinstance(state, BitaState)
        spec = self.shaped(spec)
        masks = self.head.masks[: spec.depth]
        if is_host(state.known) and not bool(state.known.any()):
            bare = chain(state.root[:, None])
            return replace(bare, probes=Probes(masks, torch.zeros_like(bare.tokens)))
        tree = super().propose(state, sampler, spec)
        known = tree.layout().depths <= state.known[:, None]
        tree = replace(tree, tokens=tree.tokens.masked_fill(~known, PAD))
        if spec.paths:
            return replace(tree, probes=Probes(masks, static_hosts(spec.paths, self.hosts, known.device)))
        return replace(tree, probes=Probes(masks, likeliest_ends(tree, self.hosts or spec.nodes)))


@lru_cache
def static_hosts(paths: tuple[Path, ...], count: int, device: torch.device) -> Int[Tensor, "1 G"]:
    """Slots of the first `count` nodes (0: all) of a static tree by low ranks and depths."""
    ordered = [(), *sorted(paths, key=lambda path: (len(path), path))]
    slots = sorted(range(len(ordered)), key=lambda slot: sum(ordered[slot]) + len(ordered[slot]))
    return torch.tensor([sorted(slots[: count or None])], device=device)


def likeliest_ends(tree: Tree, count: int) -> Int[Tensor, "B G"]:
    """Slots of the nodes at which the accepted path most probably ends: a node is reached and none of its
    children agrees."""
    assert tree.scores is not None
    reached = tree.scores.exp().masked_fill(tree.tokens < 0, 0.0)
    parents = tree.parent_slots().expand_as(tree.tokens)
    further = torch.zeros_like(reached).scatter_add(1, parents[:, 1:], reached[:, 1:])
    ends = (reached - further).masked_fill(tree.tokens < 0, -1.0)
    return ends.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
