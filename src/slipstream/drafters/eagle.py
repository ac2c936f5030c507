"""EAGLE: a one-layer head guesses the target's next feature, and the target's own LM head reads tokens off
it.

EAGLE-1 (papers/eagle, §3) with static trees, and EAGLE-2's dynamic trees: the weights are the same.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.drafters.heads import HeadConfig, copying, randomise
from slipstream.drafters.layers import Attend, DecoderLayer
from slipstream.drafters.recursive import RecursiveDrafter, RecursiveHead


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """The head's sizes.

    Attributes:
        bias: the fc has one; vLLM drops it without a word, so a new head has none.
        input_norm: a norm before attention, which public checkpoints do not have (variant "eagle-prenorm").
    """

    bias: bool = False
    input_norm: bool = False


class EagleHead(RecursiveHead):
    """EAGLE's draft model (§3.1, Fig. 6), with the tensor names of public checkpoints."""

    sizes = EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, config.bias)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, config.input_norm)]
        )  # a list for the sake of the tensors' names

    def forward(
        self,
        embedded: Float[Tensor, "B T H"],
        hidden: Float[Tensor, "B T H"],
        positions: Int[Tensor, "#B T"],
        attend: Attend,
    ) -> Float[Tensor, "B T H"]:
        """The features after: row i reads (embedding of t_{i+1}, f_i) at position i and says f̂_{i+1}."""
        return self.layers[0](self.fc(torch.cat([embedded, hidden], -1)), positions, attend)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> "EagleHead":
        """Before training f̂_{i+1} = f_i: the fc copies the feature, and the layer adds nothing."""
        randomise(self, generator)
        self.fc.weight.copy_(copying(self.config.hidden_size, of=1, among=2))
        return self

    @torch.no_grad()
    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        """Read what was trained on scaled inputs from plain ones."""
        self.fc.weight *= torch.stack([embedding, *taps]).repeat_interleave(self.config.hidden_size)


@final
class Eagle(RecursiveDrafter):
    """Drafts with an `EagleHead` over the target's final features, read by the target's own LM head."""

    method, module = "eagle", EagleHead

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        about, tensors = super().pack()
        return about | ({"variant": "eagle-prenorm"} if self.head.config.input_norm else {}), tensors
