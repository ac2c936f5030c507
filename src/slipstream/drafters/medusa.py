"""Medusa: one small head for every token ahead, all of which read the target's last state (Cai et al.
2024)."""

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.compiled import freed
from slipstream.core.drafter import FINAL, State
from slipstream.core.span import Span
from slipstream.drafters.heads import Head
from slipstream.drafters.parallel import ParallelDrafter, ParallelState


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes.

    Attributes:
        draft_vocab_size: Vd, of each head's own LM head.
        depth: heads, and tokens drafted.
        layers: residual blocks of a head.
        bias: of their linear layers.
        shared: the target's LM head in the place of their own.
    """

    hidden_size: int
    draft_vocab_size: int
    depth: int = 3
    layers: int = 1
    bias: bool = True
    shared: bool = False
    taps: tuple[str, ...] = (FINAL,)


class MedusaHead(Head):
    """Head k: x += SiLU(linear(x)), `layers` times, and an LM head of its own (Medusa §2.1.1)."""

    sizes = MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config, H = config, config.hidden_size
        self.blocks: Any = nn.ModuleList(
            [
                nn.ModuleList([nn.Linear(H, H, config.bias) for _ in range(config.layers)])
                for _ in range(config.depth)
            ]
        )
        own = 0 if config.shared else config.depth
        self.lm_heads: Any = nn.ModuleList(
            [nn.Linear(H, config.draft_vocab_size, bias=False) for _ in range(own)]
        )

    @property
    def own_lm_head(self) -> bool:  # type: ignore[override]
        return not self.config.shared

    def forward(self, features: Float[Tensor, "B T H"]) -> Float[Tensor, "B T N H"]:
        """What the LM heads read: of row i, head k's is to say t_{i+1+k}, where t_{i+1} is the target's
        own."""
        said = []
        for layers in self.blocks:
            x = features
            for layer in layers:
                x = x + F.silu(layer(x))
            said.append(x)
        return torch.stack(said, 2)

    def logits(self, hidden: Float[Tensor, "... N H"]) -> Float[Tensor, "... N Vd"]:
        """Of the first N depths, each by its own LM head."""
        parts = zip(self.lm_heads, hidden.unbind(-2), strict=False)
        return torch.stack([lm_head(x) for lm_head, x in parts], -2)

    @torch.no_grad()
    def start(self, lm_head: Float[Tensor, "Vd H"]) -> "MedusaHead":
        """Before training every head says what the target's LM head says."""
        for p in self.blocks.parameters():
            p.zero_()
        for own in self.lm_heads:
            own.weight.copy_(lm_head)
        return self

    @torch.no_grad()
    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        """Nothing to fold: embeddings are not read, and the final state is as large as itself."""


@final
class Medusa(ParallelDrafter):
    """Drafts with a `MedusaHead`."""

    method, module = "medusa", MedusaHead

    def absorb(self, span: Span, state: State) -> None:
        assert isinstance(state, ParallelState) and span.features is not None
        last = span.last(span.features)[:, None]  # nothing else is read: no cache
        state.hidden = (self._compiled_read(freed(last)) if self.ends.compiles else self._read(last))[:, 0]
        state.root, state.length = span.last(span.nexts), span.start + span.count

    def _read(self, features: Float[Tensor, "B 1 H"]) -> Float[Tensor, "B 1 N H"]:
        return self.head(features)
