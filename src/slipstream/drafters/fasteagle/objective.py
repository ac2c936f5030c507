"""How FastEagle is trained: its recipe and its objective."""

from dataclasses import replace
from typing import Any, Literal, final

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from slipstream.core.drafter import FINAL
from slipstream.drafters.eagle.model import EagleConfig, EagleHead
from slipstream.drafters.fasteagle.model import FastEagle, FastEagleConfig, FastEagleHead
from slipstream.drafters.objective import Logits, NewHead, Objective, States, Steps, Tokens, shifted_steps
from slipstream.drafters.recipe import Depth, Recipe, StatesHead, StepsLoss, Weight


class FastEagleRecipe(Recipe):
    class Head(StatesHead):
        """The cascade. It may `start` as an eagle head, too, as which every layer begins."""

        depth: Depth = 7  # N: layers, and tokens that they draft
        cascade: bool = True  # each layer reads the one before it; false: all the same, as parallel heads do
        rank: int = Field(default=0, ge=0, le=1024)  # of a term of the token above; 0: none, as in the paper
        tree: str = "backbone-7x10"

        def layers_built(self, width: int) -> tuple[int, int]:
            return self.depth, width

    class Loss(StepsLoss):
        """The paper's w_i = 0.9^{N−i}, in another unit: deep layers count more."""

        feature: Weight = 1.0
        token: Weight = 0.1
        decay: float = Field(default=1 / 0.9, gt=0, le=2)

    method: Literal["fasteagle"] = "fasteagle"
    head: Head = Head()
    loss: Loss = Loss()


@final
class FastEagleObjective(Objective):
    """FastEagle §2.3: every layer's state and law, end to end."""

    drafts = FastEagle

    @classmethod
    def new(cls, plan: NewHead) -> FastEagleHead:
        settings: FastEagleRecipe.Head = plan.settings
        sizes = {**plan.sizes, "depth": settings.depth, "cascade": settings.cascade, "rank": settings.rank}
        sizes["draft_vocab_size"] = plan.vocab if settings.rank else 0
        if plan.start is None:
            return FastEagleHead(FastEagleConfig(**sizes)).start(plan.generator)
        other = plan.start.head
        norm = isinstance(other, EagleHead | FastEagleHead) and other.config.input_norm
        config = FastEagleConfig(**sizes, input_norm=norm)
        if isinstance(other, FastEagleHead):
            new = {"depth": config.depth}
            if not other.config.rank:
                new |= {"rank": config.rank, "draft_vocab_size": config.draft_vocab_size}
            fits = replace(other.config, **new) == config
        else:
            eagle = EagleConfig(**{**plan.sizes, "taps": (FINAL,)}, input_norm=norm, bias=False)
            fits = isinstance(other, EagleHead) and other.config == eagle and config.taps[-1] == FINAL
        if not fits:
            raise ValueError(
                f"head.start={settings.start!r}: a fasteagle head begins as an eagle head without fc.bias, "
                f'if the last of head.taps is "{FINAL}", or as a fasteagle head of the same taps and '
                "cascade, and of the same head.rank if it has one; their layers are as wide as its own "
                "(head.intermediate_size)"
            )
        head: Any = plan.unscaled(FastEagleHead(config).start_as(other, plan.generator))
        return head

    def steps(self, tokens: Tokens, features: States, settings: Any, generator: torch.Generator) -> Steps:
        at = torch.arange(features.shape[1], device=features.device)
        causal = (at <= at[:, None])[None, None]
        attends = [lambda key, value: (key, value, causal)] * self.head.config.depth
        return shifted_steps(self.head(self.embed(tokens[:, 1:]), features, at[None], attends))

    def student(self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]) -> Logits:
        """The first law needs no term: its state has read the token above."""
        logits = super().student(states, j, above)
        if j == 0 or self.head.above is None:
            return logits
        return logits + self.head.above(states, self.embed(above[None])[0])
