"""How GLIDE is trained: its recipe and its objective."""

from typing import Annotated, Any, Literal, final

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from slipstream.core.drafter import CACHE
from slipstream.drafters.glide.model import Glide, GlideConfig, GlideHead, Glimpse, rotates_pairs, split_kv
from slipstream.drafters.objective import Logits, NewHead, Objective, States, Steps, Tokens, median_rms
from slipstream.drafters.recipe import Depth, LayerHead, NoisyLoss, Recipe, Taps


class GlideRecipe(Recipe):
    class Head(LayerHead):
        taps: Taps = None  # the target's caches, one for each layer; default: of its last blocks
        depth: Depth = 1  # layers
        hidden_size: Annotated[int | None, Field(ge=1, le=2**15)] = None  # default: the target's
        glimpses: bool = True  # it reads the target's cache; false: a decoder of the same size that does not
        own_ends: bool = False  # an embedding and an LM head of its own, in place of the target's
        published: bool = False  # as the public code: no norm before cross-attention, and the first token
        tree: str = "cape-5x32"

        def reads(self, blocks: int) -> tuple[str, ...]:
            taps = self.taps or [f"{CACHE}{max(i, 0)}" for i in range(blocks - self.depth, blocks)]
            if len(taps) != self.depth or not all(tap.startswith(CACHE) for tap in taps):
                raise ValueError(
                    f"head.taps={taps}: each of the {self.depth} layers of glide reads a cache, such as "
                    f"{CACHE}{blocks - 1}"
                )
            return tuple(taps) if self.glimpses else ()

        def layers_built(self, width: int) -> tuple[int, int]:
            return self.depth, self.hidden_size or width

    class Loss(NoisyLoss):
        """The block-wise training of §4.1."""

        block: int = Field(default=5, ge=1, le=64)  # tokens drafted ahead of what the target has read
        offset: bool = True  # blocks begin at a random place of each batch; false: at the first token

    @model_validator(mode="after")
    def _comparable(self) -> "GlideRecipe":
        if self.head.own_ends and self.head.hidden_size is not None and self.loss.feature:
            raise ValueError(
                "loss.feature holds the decoder's states against the target's, which have another width "
                "under head.own_ends and head.hidden_size: set loss.feature=0"
            )
        return self

    method: Literal["glide"] = "glide"
    head: Head = Head()
    loss: Loss = Loss()


@final
class GlideObjective(Objective):
    """GLIDE §4.1 with soft labels: drafts a block ahead of what it sees of the target."""

    drafts = Glide

    @classmethod
    def new(cls, plan: NewHead) -> GlideHead:
        plan.check_cache()
        settings: GlideRecipe.Head = plan.settings
        target, sizes = plan.target, dict(plan.sizes)
        other: dict[str, Any] = {
            "target_size": sizes["hidden_size"],
            "target_heads": sizes["num_attention_heads"],
            "target_head_dim": sizes["head_dim"],
            "target_rope": tuple(target.rope(int(tap.removeprefix(CACHE))) for tap in sizes["taps"]),
            "target_pairs": bool(sizes["taps"]) and rotates_pairs(target),
            "cross_norm": not settings.published,
            "first_token": settings.published,
        }
        if settings.hidden_size:
            heads = max(1, settings.hidden_size // sizes["head_dim"])
            sizes |= {"hidden_size": settings.hidden_size, "num_attention_heads": heads}
            sizes["num_key_value_heads"] = heads
        if settings.own_ends:
            other |= {"vocab_size": target.vocab, "draft_vocab_size": plan.vocab}
        config = GlideConfig(**sizes, **other, depth=settings.depth)
        return GlideHead(config).start(plan.generator, median_rms(plan.states[-1]))

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        own = self.head.embed_tokens
        return super().embed(tokens) if own is None else own(tokens)

    def student(self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]) -> Logits:
        return self.head.logits(states) if self.head.own_lm_head else super().student(states, j, above)

    def steps(
        self, tokens: Tokens, features: States, settings: GlideRecipe.Loss, generator: torch.Generator
    ) -> Steps:
        config, T = self.head.config, features.shape[1]
        lead = int(config.first_token)
        at, rows = (torch.arange(first, T, device=features.device) for first in (0, -lead))
        causal = (rows <= rows[:, None])[None, None]
        drawn = torch.randint(settings.block, (), generator=generator, device=features.device)
        first = drawn if settings.offset else 0
        block = (rows - first).div(settings.block, rounding_mode="floor") * settings.block + first
        # Row i drafts i − block[i] steps after the last state that it sees.
        visible = (at <= block.clamp(min=0)[:, None])[None, None]
        glimpses: list[Glimpse | None] = [None] * config.depth
        for i, part in enumerate(features.chunk(len(config.taps), -1) if config.taps else ()):
            glimpses[i] = (*split_kv(part, config.target_head_dim), visible)
        attends = [lambda key, value: (key, value, causal)] * config.depth
        yield self.head(self.embed(tokens[:, 1 - lead :]), rows[None] + 1, attends, glimpses)[:, lead:]
