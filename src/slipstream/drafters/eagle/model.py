"""EAGLE: a head of one layer predicts the target's next feature, and the target's LM head reads it. EAGLE-1
(§3) grows static trees and EAGLE-2 dynamic ones, from the same weights."""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.drafters.heads import HeadConfig, check_one_tap, copying, randomise
from slipstream.drafters.layers import Attend, DecoderLayer
from slipstream.drafters.recursive import RecursiveDrafter, RecursiveHead

INPUTS = {  # whether tokens are read, and states
    "shifted": (True, True),  # EAGLE: each state with the token that came after it
    "unshifted": (True, True),  # each state with the token that it was made from
    "features": (False, True),
    "tokens": (True, False),
}


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """The head's sizes.

    Attributes:
        bias: the fc has a bias. vLLM ignores one without a warning, so new heads have none.
        input_norm: a norm stands before attention (variant "eagle-prenorm"); public checkpoints have none.
        inputs: what the head reads, a key of `INPUTS`; the others are for comparison (§4.3.2, Fig. 8).

    Raises:
        ValueError: there are no such inputs, or several taps.
    """

    bias: bool = False
    input_norm: bool = False
    inputs: str = "shifted"

    def __post_init__(self) -> None:
        check_one_tap(self.taps)
        if self.inputs not in INPUTS:
            raise ValueError(f"inputs is {self.inputs!r}; it must be one of {', '.join(INPUTS)}")


class EagleHead(RecursiveHead):
    """EAGLE's draft model (§3.1, Fig. 6), with the tensor names of public checkpoints."""

    sizes = EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.shifted = config.inputs != "unshifted"
        self.fc = nn.Linear(sum(INPUTS[config.inputs]) * config.hidden_size, config.hidden_size, config.bias)
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
        tokens, features = INPUTS[self.config.inputs]
        x = self.fc(torch.cat([embedded] * tokens + [hidden] * features, -1))
        return layer(x, layer.self_attn.rope(positions, x.dtype), attend)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> "EagleHead":
        """Initialise for training to f̂_{i+1} = f_i: the fc copies the feature, or the token where it reads no
        features, and the layer adds nothing."""
        randomise(self, generator)
        read = sum(INPUTS[self.config.inputs])
        self.fc.weight.copy_(copying(self.config.hidden_size, of=read - 1, among=read))
        return self

    @torch.no_grad()
    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        """Fold the scales of the training inputs into the weights, so that plain inputs are read."""
        tokens, features = INPUTS[self.config.inputs]
        scales = torch.stack([embedding] * tokens + [*taps] * features)
        self.fc.weight *= scales.repeat_interleave(self.config.hidden_size)


@final
class Eagle(RecursiveDrafter):
    """Drafts with an `EagleHead` over the target's final features, read by the target's own LM head."""

    method, module = "eagle", EagleHead

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = super().pack()
        return config | ({"variant": "eagle-prenorm"} if self.head.config.input_norm else {}), tensors
