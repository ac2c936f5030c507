"""Medusa (Cai et al. 2024): one small head per token ahead; all heads read the target's final state."""

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.core.drafter import FINAL
from slipstream.core.span import Span
from slipstream.drafters.heads import Head, check_one_tap
from slipstream.drafters.parallel import ParallelDrafter, ParallelState


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes. Raises ValueError if there are several taps."""

    hidden_size: int
    draft_vocab_size: int  # Vd, of each head's own LM head
    depth: int = 3  # heads, and tokens drafted
    layers: int = 1  # residual blocks per head
    bias: bool = True  # of the blocks' linear layers
    shared: bool = False  # the target's LM head takes the place of the heads' own
    taps: tuple[str, ...] = (FINAL,)

    def __post_init__(self) -> None:
        check_one_tap(self.taps)


class MedusaHead(Head):
    """Head k is x += SiLU(linear(x)), `layers` times, and an LM head of its own (Medusa §2.1.1)."""

    sizes = MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config, self.own_lm_head, H = config, not config.shared, config.hidden_size
        blocks = [[nn.Linear(H, H, config.bias) for _ in range(config.layers)] for _ in range(config.depth)]
        self.blocks: Any = nn.ModuleList(map(nn.ModuleList, blocks))
        lm_heads = range(config.depth if self.own_lm_head else 0)
        self.lm_heads: Any = nn.ModuleList([nn.Linear(H, config.draft_vocab_size, False) for _ in lm_heads])

    def forward(self, features: Float[Tensor, "B T H"], depth: int | None = None) -> Float[Tensor, "B T N H"]:
        """The inputs of the first `depth` LM heads, by default of all. Head k of row i is to
        predict t_{i+1+k}; t_{i+1} is the target's token."""
        states = []
        for layers in self.blocks[:depth]:
            x = features
            for layer in layers:
                x = x + F.silu(layer(x))
            states.append(x)
        return torch.stack(states, 2)

    def logits(self, hidden: Float[Tensor, "... N H"]) -> Float[Tensor, "... N Vd"]:
        """Of the first N depths, each by its own LM head."""
        return torch.stack(
            [lm_head(x) for lm_head, x in zip(self.lm_heads, hidden.unbind(-2), strict=False)], -2
        )

    @torch.no_grad()
    def start(self, lm_head: Float[Tensor, "Vd H"]) -> "MedusaHead":
        """Initialise for training: every head predicts what the target's LM head predicts."""
        for p in self.blocks.parameters():
            p.zero_()
        for own in self.lm_heads:
            own.weight.copy_(lm_head)
        return self


@final
class Medusa(ParallelDrafter):
    method, module, reach = "medusa", MedusaHead, 1

    def update(self, span: Span, state: ParallelState) -> None:
        assert span.features is not None
        last = span.last(span.features)[:, None]  # nothing else is read, so there is no cache
        hidden = self.run(self.head.forward, last, state.hidden.shape[1])[:, 0]
        state.hidden, state.root, state.length = hidden, span.root, span.start + span.count
