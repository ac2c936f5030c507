"""Recursive heads, which read their own predictions: one draft step per level (EAGLE, EAGLE-3)."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.drafter import State
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import Tree
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.heads import NEAR, Head, HeadDrafter
from slipstream.drafters.layers import Attend, attend_cache
from slipstream.drafters.proposer import Draft


class RecursiveHead(Head):
    """The module of a recursive drafter."""

    shifted: bool = True  # a state is read with the token after it, not with the one that it was made from

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens: Any = None  # an embedding of its own instead of the target's

    def fuse(self, features: Float[Tensor, "B T F"]) -> Float[Tensor, "B T H"]:
        """The state that the first step reads, made of the target's taps."""
        return features

    @abstractmethod
    def forward(
        self,
        embedded: Float[Tensor, "B T H"],
        hidden: Float[Tensor, "B T H"],
        positions: Int[Tensor, "#B T"],
        attend: Attend,
    ) -> Float[Tensor, "B T H"]:
        """Row i reads (embedding of t_{i+1}, or t_i if not `shifted`, and h_i) at position i and predicts the
        target's h_{i+1}."""


@dataclass
class RecursiveState(State):
    hidden: Float[Tensor, "B H"]  # the prediction at the root, from which its children come
    length: Int[Tensor, " B"]  # tokens before the root
    cache: KVCache  # the head's own: a slot for each pair (h_i, t_{i+1}) that it read


class RecursiveDrafter(HeadDrafter):
    """Reads each drafted token together with the state that was predicted for its parent."""

    reach = NEAR

    def start(self, batch: int, device: torch.device) -> RecursiveState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        hidden = torch.zeros(batch, self.head.config.hidden_size, dtype=self.target.dtype, device=device)
        return RecursiveState(zeros, hidden, zeros.clone(), self.new_cache(1, batch))

    def update(self, span: Span, state: RecursiveState) -> None:
        assert span.features is not None
        attends, positions = attend_cache(state.cache, span.tokens.shape[1], compiles=self.compiles)
        tokens = span.nexts if self.head.shifted else span.tokens
        hidden = self.read(tokens, span.features, positions, attends=attends, more=(True,))
        state.cache.follow(span.cache, span.count)
        state.hidden, state.root, state.length = span.last(hidden), span.root, span.start + span.count

    def propose(self, state: RecursiveState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        hidden, above = state.hidden[:, None], state.root[:, None]

        def step(tokens: Tensor, origin: Tensor, seen: Tensor, level: int) -> Tensor:
            """Read the frontier: each token with the state of its parent's row."""
            nonlocal hidden, above
            n = tokens.shape[1]
            read, above = tokens if self.head.shifted else above.gather(1, origin), tokens
            parents = hidden.gather(1, origin[..., None].expand(-1, -1, hidden.shape[-1]))
            attends, _ = attend_cache(state.cache, n, seen.shape[2] - n, seen, self.compiles)
            # `repeat` and not `expand`: a tensor with strides of its own needs no graph of its own.
            positions = (state.cache.lengths + level - 1)[:, None].repeat(1, n)
            hidden = self.read(read, parents, positions, attends=attends, more=(False,))
            return self.scores(hidden)

        draft = Draft(self, self.shaped(spec), sampler)
        return draft.step_by_step(state.root, state.length, self.scores(hidden), step)

    def _read(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attends: Sequence[Attend], fresh: bool
    ) -> Float[Tensor, "B T H"]:
        """`fresh`: `hidden` holds the target's taps, not the head's own states."""
        embed = self.head.embed_tokens or self.target.embed
        return self.head(embed(tokens), self.head.fuse(hidden) if fresh else hidden, positions, attends[0])
