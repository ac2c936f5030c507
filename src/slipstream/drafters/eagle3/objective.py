"""How EAGLE-3 is trained: its recipe and its objective."""

from typing import Any, Literal, final

import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from slipstream.drafters.eagle.objective import UnrolledLoss, UnrolledObjective
from slipstream.drafters.eagle3.model import Eagle3, Eagle3Config, Eagle3Head
from slipstream.drafters.heads import rows_of
from slipstream.drafters.objective import Logits, NewHead
from slipstream.drafters.recipe import Recipe, StatesHead


class Eagle3Recipe(Recipe):
    class Head(StatesHead):
        tree: str = "dynamic-7x10x60"

    class Loss(UnrolledLoss):
        unroll: int = Field(default=7, ge=1, le=8)

    method: Literal["eagle3"] = "eagle3"
    head: Head = Head()
    loss: Loss = Loss()


@final
class Eagle3Objective(UnrolledObjective):
    """EAGLE-3's training-time test: soft cross-entropy over the draft vocabulary, over `unroll` steps."""

    drafts = Eagle3

    @classmethod
    def new(cls, plan: NewHead) -> Eagle3Head:
        config = Eagle3Config(**plan.sizes, draft_vocab_size=plan.vocab)
        if plan.start is not None:
            begun: Any = plan.unscaled(plan.start.as_is(config))
            return begun
        read, final = plan.states[len(plan.sizes["taps"]) - 1], plan.states[-1]
        normed = F.rms_norm(read, read.shape[-1:])
        scale = final.pow(2).mean(0).sqrt() / normed.pow(2).mean(0).sqrt().clamp(min=1e-6)
        return Eagle3Head(config).start(plan.generator, rows_of(plan.lm_head, final), scale)

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """As it is: the head norms it."""
        return self._target.embed(tokens).detach().to(next(self.head.parameters()).dtype)

    def student(self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]) -> Logits:
        return self.head.logits(states)
