"""Plain decoding: a drafter that proposes a bare root, so that the baseline runs the same loop."""

from typing import final

import torch

from slipstream.core.drafter import Drafter, State
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import Tree, chain
from slipstream.core.tree_spec import TreeSpec


@final
class Vanilla(Drafter):
    """One token per target pass."""

    def start(self, batch: int, device: torch.device) -> State:
        return State(torch.zeros(batch, dtype=torch.long, device=device))

    def update(self, span: Span, state: State) -> None:
        state.root = span.root

    def propose(self, state: State, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        return chain(state.root[:, None])
