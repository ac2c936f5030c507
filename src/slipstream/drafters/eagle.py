"""EAGLE: a head of one layer predicts the target's next feature, and the target's LM head reads it. EAGLE-1
(§3) grows static trees and EAGLE-2 dynamic ones, from the same weights."""

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
        bias: the fc has a bias. vLLM ignores one without a warning, so new heads have none.
        input_norm: a norm stands before attention (variant "eagle-prenorm"); public checkpoints have none.
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
        self.layers = nn.ModuleList([DecoderLayer(config, config.input_norm)])  # a list, as tensors are named

    def forward(
        self,
        embedded: Float[Tensor, "B T H"],
        hidden: Float[Tensor, "B T H"],
        positions: Int[Tensor, "#B T"],
        attend: Attend,
    ) -> Float[Tensor, "B T H"]:
        """The next features: row i reads (embedding of t_{i+1}, f_i) at position i and predicts f_{i+1}."""
        layer: Any = self.layers[0]
        x = self.fc(torch.cat([embedded, hidden], -1))
        return layer(x, layer.self_attn.rope(positions, x.dtype), attend)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> "EagleHead":
        """Initialise for training to f̂_{i+1} = f_i: the fc copies the feature, the layer adds nothing."""
        randomise(self, generator)
        self.fc.weight.copy_(copying(self.config.hidden_size, of=1, among=2))
        return self

    @torch.no_grad()
    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        """Fold the scales of the training inputs into the weights, so that plain inputs are read."""
        self.fc.weight *= torch.stack([embedding, *taps]).repeat_interleave(self.config.hidden_size)


@final
class Eagle(RecursiveDrafter):
    """Drafts with an `EagleHead` over the target's final features, read by the target's own LM head."""

    method, module = "eagle", EagleHead

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = super().pack()
        return config | ({"variant": "eagle-prenorm"} if self.head.config.input_norm else {}), tensors
