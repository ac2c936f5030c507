"""How Medusa is trained: its recipe and its objective."""

from typing import Any, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.drafters.heads import rows_of
from slipstream.drafters.medusa.model import Medusa, MedusaConfig, MedusaHead
from slipstream.drafters.objective import Logits, NewHead, Objective, States, Steps, Tokens, shifted_steps
from slipstream.drafters.recipe import Depth, HeadSettings, Recipe, StepsLoss


class MedusaRecipe(Recipe):
    class Head(HeadSettings):
        """`depth`: heads, each of `layers` residual blocks."""

        depth: Depth = 4
        layers: Depth = 1
        tree: str = "best-first-4x16"

        def layers_built(self, width: int) -> tuple[int, int]:
            return self.depth * self.layers, width

    class Loss(StepsLoss):
        hard: bool = True

    method: Literal["medusa"] = "medusa"
    head: Head = Head()
    loss: Loss = Loss()


@final
class MedusaObjective(Objective):
    """Medusa-1 (§2.2.1): the tokens of a text, each head its own, weighted by 0.8^k."""

    drafts = Medusa

    @classmethod
    def new(cls, plan: NewHead) -> MedusaHead:
        settings: MedusaRecipe.Head = plan.settings
        head = MedusaHead(MedusaConfig(plan.target.width, plan.vocab, settings.depth, settings.layers))
        return head.start(rows_of(plan.lm_head, plan.states[-1]))

    def student(self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]) -> Logits:
        return self.head.lm_heads[j](states)

    def steps(self, tokens: Tokens, features: States, settings: Any, generator: torch.Generator) -> Steps:
        return shifted_steps(self.head(features))
