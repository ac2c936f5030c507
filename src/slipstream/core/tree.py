"""Tree: the guesses that one target pass checks. Its topology is tensors, never control flow."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.core.device import is_host

PAD = -1  # a token id that no draw can match
SHARED = 64  # most nodes of trees whose layouts are cached


class TreeLayout(NamedTuple):
    """Positions of the R = N + G·M rows of a pass, and which rows each of them reads."""

    depths: Int[Tensor, "#B R"]  # position of a row = cache length + depth
    visible: Bool[Tensor, "#B R R"]  # visible[b, i, j]: row i may read row j


class SharedLayout(TreeLayout):
    """A cached layout of many passes, which nobody may change."""

    def __init__(self, *_: Tensor) -> None:
        self.derived: dict[Hashable, Any] = {}  # values computed from it


class Probes(NamedTuple):
    """Vectors that follow every host. They read it and its ancestors and are never accepted (BiTA §3.1)."""

    vectors: Float[Tensor, "M H"]
    hosts: Int[Tensor, "#B G"]  # slots of any nodes; `PAD` stands for no host


@dataclass(frozen=True)
class Tree:
    """Guesses for B rows of N nodes. Node 0 is the root: a chosen token, which the target has not read yet.

    Attributes:
        tokens: token ids; a node whose token is `PAD` can never be accepted.
        parents: slot of each node's parent, which stands before it; the root is its own. `None`: a chain.
        depth: upper bound on the depth of any node (root: 0), known without reading a tensor.
        law: for sampled drafts, the law q from which the children of each node were drawn, without
            replacement and in slot order. `None`: candidates are point masses (top-k).
        probes: vectors that ride behind some of the nodes, in the same pass; `None`: there are none.
        scores: the drafter's log probability of the path to each node; the root's is 0.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "#B N"] | None
    depth: int
    law: Float[Tensor, "B N V"] | None = None
    probes: Probes | None = None
    scores: Float[Tensor, "B N"] | None = None

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    @property
    def rows(self) -> int:
        """Rows of a target pass over this tree: its nodes and all probes."""
        if self.probes is None:
            return self.nodes
        return self.nodes + self.probes.hosts.shape[1] * len(self.probes.vectors)

    def parent_slots(self) -> Int[Tensor, "#B N"]:
        """`parents`, also for a chain."""
        if self.parents is not None:
            return self.parents
        return (torch.arange(self.nodes, device=self.tokens.device) - 1).clamp(min=0)[None]

    def layout(self) -> TreeLayout:
        """Depths and visibility of all rows."""
        if is_host(self.tokens) and self.nodes <= SHARED:
            above = None if self.parents is None else tuple(map(tuple, self.parents.tolist()))
            layout: TreeLayout = _shared_layout(self.nodes, above, self.depth)
        else:
            layout = _layout(self.nodes, self.parents, self.depth, self.tokens.device)
        if self.probes is None:
            return layout
        return _with_probes(*layout, self.probes.hosts, M=len(self.probes.vectors))

    def clip(self, depth: int) -> "Tree":
        """The same tree without nodes deeper than `depth`, for the end of the window."""
        if depth >= self.depth:
            return self
        if self.parents is None:
            law, probes = self.law, self.probes
            law = None if law is None else law[:, : depth + 1]
            if probes is not None:
                probes = probes._replace(hosts=probes.hosts.masked_fill(probes.hosts > depth, PAD))
            return Tree(self.tokens[:, : depth + 1], None, depth, law, probes)
        deep = replace(self, probes=None).layout().depths > depth
        tokens, parents = self.tokens.masked_fill(deep, PAD), self.parents.masked_fill(deep, 0)
        return replace(self, tokens=tokens, parents=parents, depth=max(depth, 1))


@lru_cache(1024)
@torch.inference_mode(False)
def _shared_layout(nodes: int, parents: tuple[tuple[int, ...], ...] | None, depth: int) -> SharedLayout:
    """Cached: the host takes long over such small tensors, and most trees recur."""
    return SharedLayout(*_layout(nodes, None if parents is None else torch.tensor(parents), depth))


def _layout(
    nodes: int, parents: Int[Tensor, "#B N"] | None, depth: int, device: torch.device | None = None
) -> TreeLayout:
    """A tree takes `depth` steps up to the parents, a chain (None) none."""
    if parents is None:
        depths = torch.arange(nodes, device=device)[None]
        return TreeLayout(depths, depths[:, None, :] <= depths[:, :, None])
    ancestors = torch.eye(nodes, dtype=torch.bool, device=device).repeat(len(parents), 1, 1)
    up = parents
    for _ in range(depth):
        ancestors.scatter_(2, up[..., None], True)
        up = parents.gather(1, up)
    return TreeLayout(ancestors.sum(-1) - 1, ancestors)


def _with_probes(depths: Tensor, ancestors: Tensor, hosts: Tensor, M: int) -> TreeLayout:
    """Append G groups of M probes. Probe j of a host stands j + 1 positions behind it and reads the host,
    what the host reads, and the earlier probes of its group; without a host (`PAD`), the group alone."""
    B, N, G = max(len(depths), len(hosts)), ancestors.shape[-1], hosts.shape[1]
    depths, ancestors, hosts = depths.expand(B, N), ancestors.expand(B, N, N), hosts.expand(B, G)
    present = (hosts >= 0).repeat_interleave(M, 1)  # [B, G·M]
    of_host = hosts.clamp(min=0).repeat_interleave(M, 1)
    j = torch.arange(G * M, device=depths.device)
    visible = ancestors.new_zeros(B, N + G * M, N + G * M)
    visible[:, :N, :N] = ancestors
    inherited = ancestors.gather(1, of_host[..., None].expand(-1, -1, N))
    visible[:, N:, :N] = inherited & present[..., None]
    visible[:, N:, N:] = (j[:, None] // M == j // M) & (j[:, None] >= j)
    return TreeLayout(torch.cat([depths, depths.gather(1, of_host) + 1 + j % M], 1), visible)


def chain(tokens: Int[Tensor, "B N"], law: Float[Tensor, "B N V"] | None = None) -> Tree:
    """root → t1 → t2 → …; `tokens[:, :1]` is a bare root, which is plain decoding."""
    return Tree(tokens, None, tokens.shape[1] - 1, law)
