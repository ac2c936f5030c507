"""How EAGLE is trained: its recipe and its objective. EAGLE-3 shares the unrolled steps."""

from dataclasses import replace
from typing import Any, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from slipstream.drafters.eagle.model import Eagle, EagleConfig, EagleHead
from slipstream.drafters.objective import NewHead, Objective, States, Steps, Tokens
from slipstream.drafters.recipe import Recipe, StartedHead, StepsLoss, Weight


class UnrolledLoss(StepsLoss):
    # Draft steps: 1 as EAGLE, more as EAGLE-3's training-time test.
    unroll: int = Field(default=1, ge=1, le=8)


class EagleRecipe(Recipe):
    class Head(StartedHead):
        input_norm: bool = False
        inputs: Literal["shifted", "unshifted", "features", "tokens"] = "shifted"

    class Loss(UnrolledLoss):
        feature: Weight = 1.0
        token: Weight = 0.1
        noise: Weight = 0.1

    method: Literal["eagle"] = "eagle"
    head: Head = Head()
    loss: Loss = Loss()


class UnrolledObjective(Objective):
    """The first step reads the target's states, each later one the states predicted by the one before."""

    def steps(
        self, tokens: Tokens, features: States, settings: UnrolledLoss, generator: torch.Generator
    ) -> Steps:
        read = tokens[:, 1:] if self.head.shifted else tokens[:, :-1]
        embedded, inputs = self.embed(read), self.head.fuse(features)
        unrolled = Unrolled(features.shape[1], features.device)
        for _ in range(settings.unroll):
            states = self.head(embedded, inputs, unrolled.positions, unrolled.step)
            yield states
            inputs = torch.cat([inputs[:, :1], states[:, :-1]], 1)


@final
class EagleObjective(UnrolledObjective):
    """EAGLE §3.2, and with `unroll` its training through its own predictions."""

    drafts = Eagle

    @classmethod
    def new(cls, plan: NewHead) -> EagleHead:
        settings: EagleRecipe.Head = plan.settings
        config = EagleConfig(**plan.sizes, input_norm=settings.input_norm, inputs=settings.inputs)
        if plan.start is None:
            return EagleHead(config).start(plan.generator)
        bias = getattr(plan.start.head.config, "bias", False)  # imported heads may have one
        head: Any = plan.unscaled(plan.start.as_is(replace(config, bias=bias)))
        return head


class Unrolled:
    """Attention of a training-time test (EAGLE-3 §3.2, HASS): each step reads the states that the step before
    predicted.

    Row i of step j reads f̂_i, predicted j draft steps after the target's last state f_{i−j}. It attends to
    what a draft of depth j has in its cache: rows 0 … i − j of step 0, and row i − j + m of each step m ≤ j.
    """

    def __init__(self, T: int, device: torch.device) -> None:
        self.positions = torch.arange(T, device=device)[None]
        self._behind = self.positions.T - self.positions  # [row, column]: how far the column lies behind
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and mask of the next step."""
        self._keys.append(key)
        self._values.append(value)
        j = len(self._keys) - 1
        visible = torch.cat([self._behind >= j, *(self._behind == j - m for m in range(1, j + 1))], 1)
        if j:  # a row without any key is NaN; the first j rows do not count
            visible[:j, 0] = True
        return torch.cat(self._keys, 2), torch.cat(self._values, 2), visible[None, None]
