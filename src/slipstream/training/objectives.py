"""The objective of each method, as its paper trains it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.drafter import CACHE, FINAL
from slipstream.drafters.draft_model import DraftModel, Part
from slipstream.drafters.eagle import Eagle, EagleConfig, EagleHead
from slipstream.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Head
from slipstream.drafters.fasteagle import FastEagle, FastEagleConfig, FastEagleHead
from slipstream.drafters.glide import Glide, GlideConfig, GlideHead, Glimpse, apart, rotates_pairs
from slipstream.drafters.heads import rows_of
from slipstream.drafters.medusa import Medusa, MedusaConfig, MedusaHead
from slipstream.drafters.store import restored, stored
from slipstream.training.objective import Given, Objective, States, Steps, Tokens, size_of
from slipstream.training.recipes import EagleRecipe, FastEagleRecipe, GlideRecipe, MedusaRecipe, UnrolledLoss
from slipstream.training.warm_start import Start


class _Recursion(Objective):
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
class EagleObjective(_Recursion):
    """EAGLE §3.2, and with `unroll` its training through its own predictions."""

    drafts = Eagle

    @classmethod
    def new(cls, given: Given) -> EagleHead:
        recipe: EagleRecipe.Head = given.recipe
        config = EagleConfig(**given.sizes, input_norm=recipe.input_norm, inputs=recipe.inputs)
        if given.start is None:
            return EagleHead(config).start(given.generator)
        bias = getattr(given.start.head.config, "bias", False)  # imported heads may have one
        head: Any = given.start.as_is(replace(config, bias=bias), given.gains)
        return head


@final
class Eagle3Objective(_Recursion):
    """EAGLE-3's training-time test: soft cross-entropy over the draft vocabulary, over `unroll` steps."""

    drafts = Eagle3

    @classmethod
    def new(cls, given: Given) -> Eagle3Head:
        config = Eagle3Config(**given.sizes, draft_vocab_size=given.vocab)
        if given.start is not None:
            begun: Any = given.start.as_is(config, given.gains)
            return begun
        head = Eagle3Head(config)
        read, final = given.states[len(given.sizes["taps"]) - 1], given.states[-1]
        normed = F.rms_norm(read, read.shape[-1:])
        scale = final.pow(2).mean(0).sqrt() / normed.pow(2).mean(0).sqrt().clamp(min=1e-6)
        return head.start(given.generator, rows_of(given.lm_head, final), scale)

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """As it is: the head norms it."""
        return self._target.embed(tokens).detach().to(next(self.head.parameters()).dtype)

    def student(
        self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]
    ) -> Float[Tensor, "n Vd"]:
        return self.head.logits(states)


@final
class FastEagleObjective(Objective):
    """FastEagle §2.3: every layer's state and law, end to end. The paper's w_i = 0.9^{N−i} is decay =
    1/0.9."""

    drafts = FastEagle

    @classmethod
    def new(cls, given: Given) -> FastEagleHead:
        recipe: FastEagleRecipe.Head = given.recipe
        sizes = {**given.sizes, "depth": recipe.depth, "cascade": recipe.cascade, "rank": recipe.rank}
        sizes["draft_vocab_size"] = given.vocab if recipe.rank else 0
        if given.start is None:
            return FastEagleHead(FastEagleConfig(**sizes)).start(given.generator)
        other = given.start.head
        norm = isinstance(other, EagleHead | FastEagleHead) and other.config.input_norm
        config = FastEagleConfig(**sizes, input_norm=norm)
        eagle = EagleConfig(**{**given.sizes, "taps": (FINAL,)}, input_norm=norm, bias=False)
        if isinstance(other, FastEagleHead):
            new = {"depth": config.depth}
            if not other.config.rank:
                new |= {"rank": config.rank, "draft_vocab_size": config.draft_vocab_size}
            fits = replace(other.config, **new) == config
        else:
            fits = isinstance(other, EagleHead) and other.config == eagle and config.taps[-1] == FINAL
        if not fits:
            raise ValueError(
                f"head.start={recipe.start!r}: a fasteagle head begins as an eagle head without fc.bias, if "
                f'the last of head.taps is "{FINAL}", or as a fasteagle head of the same taps and cascade, '
                "and of the same head.rank if it has one; their layers are as wide as its own "
                "(head.intermediate_size)"
            )
        head: Any = Start.unscaled(FastEagleHead(config).start_as(other, given.generator), given.gains)
        return head

    def steps(self, tokens: Tokens, features: States, settings: Any, generator: torch.Generator) -> Steps:
        at = torch.arange(features.shape[1], device=features.device)
        causal = (at <= at[:, None])[None, None]
        attends = [lambda key, value: (key, value, causal)] * self.head.config.depth
        return deeper(self.head(self.embed(tokens[:, 1:]), features, at[None], attends))

    def student(
        self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]
    ) -> Float[Tensor, "n Vd"]:
        """The first law needs no term: its state has read the token above."""
        logits = super().student(states, j, above)
        if j == 0 or self.head.above is None:
            return logits
        return logits + self.head.above(states, self.embed(above[None])[0])


@final
class MedusaObjective(Objective):
    """Medusa-1 (§2.2.1): the tokens of a text, each head its own, weighted by 0.8^k."""

    drafts = Medusa

    @classmethod
    def new(cls, given: Given) -> MedusaHead:
        recipe: MedusaRecipe.Head = given.recipe
        head = MedusaHead(MedusaConfig(given.target.width, given.vocab, recipe.depth, recipe.layers))
        return head.start(rows_of(given.lm_head, given.states[-1]))

    def student(
        self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]
    ) -> Float[Tensor, "n Vd"]:
        return self.head.lm_heads[j](states)

    def steps(self, tokens: Tokens, features: States, settings: Any, generator: torch.Generator) -> Steps:
        return deeper(self.head(features))


@final
class GlideObjective(Objective):
    """GLIDE §4.1 with soft labels: drafts a block ahead of what they see of the target."""

    drafts = Glide

    @classmethod
    def new(cls, given: Given) -> GlideHead:
        recipe: GlideRecipe.Head = given.recipe
        given.check_cache()
        target, sizes = given.target, dict(given.sizes)
        extra: dict[str, Any] = {"target_size": sizes["hidden_size"], "target_head_dim": sizes["head_dim"]}
        extra["target_heads"] = sizes["num_attention_heads"]
        extra["target_rope"] = tuple(target.rope(int(tap.removeprefix(CACHE))) for tap in sizes["taps"])
        extra["target_pairs"] = bool(sizes["taps"]) and rotates_pairs(target)
        if recipe.hidden_size:
            heads = max(1, recipe.hidden_size // sizes["head_dim"])
            sizes |= {"hidden_size": recipe.hidden_size, "num_attention_heads": heads}
            sizes["num_key_value_heads"] = heads
        if recipe.own_ends:
            extra |= {"vocab_size": target.vocab, "draft_vocab_size": given.vocab}
        extra |= {"cross_norm": not recipe.published, "first_token": recipe.published}
        config = GlideConfig(**sizes, depth=recipe.depth, **extra)
        return GlideHead(config).start(given.generator, size_of(given.states[-1]))

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        own = self.head.embed_tokens
        return super().embed(tokens) if own is None else own(tokens)

    def student(
        self, states: Float[Tensor, "n H"], j: int, above: Int[Tensor, " n"]
    ) -> Float[Tensor, "n Vd"]:
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
            glimpses[i] = (*apart(part, config.target_head_dim), visible)
        attends = [lambda key, value: (key, value, causal)] * config.depth
        yield self.head(self.embed(tokens[:, 1 - lead :]), rows[None] + 1, attends, glimpses)[:, lead:]


@final
class DistillObjective(Objective):
    """DistillSpec (Zhou et al. 2024): forward KL on the target's own texts, for some of its blocks."""

    drafts = DraftModel

    @classmethod
    def new(cls, given: Given) -> Part:
        L, recipe = given.target.sizes.blocks, given.recipe
        blocks = tuple(recipe.blocks or sorted({0, min(1, L - 1), L - 1}))
        return Part(blocks, given.target).float().requires_grad_()

    def steps(self, tokens: Tokens, features: States, settings: Any, generator: torch.Generator) -> Steps:
        at = torch.arange(tokens.shape[1], device=tokens.device)[None]
        model = self.head.model
        yield model.states(model.embed(tokens), at, at[:, :, None] >= at[:, None], at)[0][:, 1:]

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return stored(self.head.state_dict(), dtype)

    def drafter(self, tree: str, dtype: torch.dtype) -> DraftModel:
        weights = restored(self.weights(dtype))
        part = Part(self.head.config.blocks, self._target, self._vocab).fill(weights)
        return DraftModel(part.model, self._target, tree, vocab=self._vocab, part=part)


def deeper(states: Float[Tensor, "B T N H"]) -> Iterator[Float[Tensor, "B T H"]]:
    """The steps of a head that predicts N states in one pass: its j-th at row i is step j's of row i + j."""
    T = states.shape[1]
    for j in range(min(states.shape[2], T)):
        yield F.pad(states[:, : T - j, j], (0, 0, j, 0))


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
