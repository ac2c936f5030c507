"""How a draft model of some of the target's blocks is trained: its recipe and its objective."""

from typing import Annotated, Any, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from slipstream.drafters.draft_model.model import DraftModel, LayerSubset
from slipstream.drafters.objective import NewHead, Objective, States, Steps, Tokens
from slipstream.drafters.recipe import HeadSettings, LawLoss, Recipe
from slipstream.drafters.store import restored, stored


class DraftModelRecipe(Recipe):
    class Head(HeadSettings):
        """`blocks`: the target's, as copies of which it begins; default: the first two and the last."""

        blocks: Annotated[list[int] | None, Field(min_length=1)] = None
        tree: str = "chain-5"

        def reads(self, blocks: int) -> tuple[str, ...]:
            return ()

    method: Literal["draft-model"] = "draft-model"
    head: Head = Head()
    loss: LawLoss = LawLoss()


@final
class DraftModelObjective(Objective):
    """DistillSpec (Zhou et al. 2024): forward KL on the target's own texts, for some of its blocks."""

    drafts = DraftModel

    @classmethod
    def new(cls, plan: NewHead) -> LayerSubset:
        L = plan.target.sizes.blocks
        blocks = tuple(plan.settings.blocks or sorted({0, min(1, L - 1), L - 1}))
        return LayerSubset(blocks, plan.target).float().requires_grad_()

    def steps(self, tokens: Tokens, features: States, settings: Any, generator: torch.Generator) -> Steps:
        at = torch.arange(tokens.shape[1], device=tokens.device)[None]
        model = self.head.model
        yield model.states(model.embed(tokens), at, at[:, :, None] >= at[:, None], at)[0][:, 1:]

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return stored(self.head.state_dict(), dtype)

    def drafter(self, tree: str, dtype: torch.dtype) -> DraftModel:
        part = LayerSubset(self.head.config.blocks, self._target, self._vocab)
        return part.drafter(restored(self.weights(dtype)), self._target, self._vocab, tree=tree)
