"""The objective of each method: what the papers train, step by step."""

from collections.abc import Iterator
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.drafter import CACHE, FINAL
from slipstream.drafters import load_drafter
from slipstream.drafters.draft_model import DraftModel, Part
from slipstream.drafters.eagle import Eagle, EagleConfig, EagleHead
from slipstream.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Head
from slipstream.drafters.fasteagle import FastEagle, FastEagleConfig, FastEagleHead
from slipstream.drafters.glide import Glide, GlideConfig, GlideHead, Glimpse, apart
from slipstream.drafters.heads import rows_of
from slipstream.drafters.layers import LayerConfig
from slipstream.drafters.medusa import Medusa, MedusaConfig, MedusaHead
from slipstream.drafters.store import restored, stored
from slipstream.training.objective import Given, Objective, size_of, states_read
from slipstream.training.recipe import Loss, Recipe
from slipstream.training.recipes import (
    DraftModelRecipe,
    Eagle3Recipe,
    EagleRecipe,
    FastEagleRecipe,
    GlideRecipe,
    MedusaRecipe,
    UnrolledLoss,
)


class _Recursion(Objective):
    """Each step reads what the step before said, and the first one the target's states."""

    def steps(
        self,
        tokens: Int[Tensor, "B T1"],
        features: Float[Tensor, "B T F"],
        settings: Loss,
        generator: torch.Generator,
    ) -> Iterator[Float[Tensor, "B T H"]]:
        assert isinstance(settings, UnrolledLoss)
        embedded, inputs = self.embed(tokens[:, 1:]), self.head.fuse(features)
        unrolled = Unrolled(features.shape[1], features.device)
        for _ in range(settings.unroll):
            said = self.head(embedded, inputs, unrolled.positions, unrolled.step)
            yield said
            inputs = torch.cat([inputs[:, :1], said[:, :-1]], 1)


@final
class EagleObjective(_Recursion):
    """EAGLE §3.2, and with `unroll` its training through its own predictions."""

    drafts = Eagle

    @classmethod
    def new(cls, given: Given) -> EagleHead:
        assert isinstance(given.recipe, EagleRecipe.Head)
        return EagleHead(EagleConfig(**given.sizes, input_norm=given.recipe.input_norm)).start(
            given.generator
        )


@final
class Eagle3Objective(_Recursion):
    """EAGLE-3's training-time test: soft cross-entropy over the draft vocabulary, for several of its own
    steps."""

    drafts = Eagle3

    @classmethod
    def reads(cls, recipe: Recipe, layers: int) -> tuple[str, ...]:
        assert isinstance(recipe, Eagle3Recipe)
        return states_read(recipe.head.taps, recipe.method, layers)

    @classmethod
    def new(cls, given: Given) -> Eagle3Head:
        head = Eagle3Head(Eagle3Config(**given.sizes, draft_vocab_size=given.vocab))
        read, final = given.states[len(given.sizes["taps"]) - 1], given.states[-1]
        normed = F.rms_norm(read, read.shape[-1:])
        scale = final.pow(2).mean(0).sqrt() / normed.pow(2).mean(0).sqrt().clamp(min=1e-6)
        return head.start(given.generator, rows_of(given.lm_head, final), scale)

    def student(self, said: Float[Tensor, "n H"], j: int) -> Float[Tensor, "n Vd"]:
        return self.head.logits(said)


@final
class FastEagleObjective(Objective):
    """FastEagle §2.3: every layer's state and law, end to end. The paper's w_i = 0.9^{N−i} is decay =
    1/0.9."""

    drafts = FastEagle

    @classmethod
    def reads(cls, recipe: Recipe, layers: int) -> tuple[str, ...]:
        assert isinstance(recipe, FastEagleRecipe)
        return states_read(recipe.head.taps, recipe.method, layers)

    @classmethod
    def new(cls, given: Given) -> FastEagleHead:
        recipe = given.recipe
        assert isinstance(recipe, FastEagleRecipe.Head)
        about = {**given.sizes, "depth": recipe.depth, "cascade": recipe.cascade}
        if recipe.start is None:
            return FastEagleHead(FastEagleConfig(**about)).start(given.generator)
        eagle: Any = load_drafter(recipe.start, given.target)
        sizes = vars(LayerConfig(**{name: size for name, size in given.sizes.items() if name != "taps"}))
        alike = isinstance(eagle, Eagle) and all(
            getattr(eagle.head.config, name) == sizes[name] for name in sizes
        )
        if not alike or eagle.head.config.bias or given.sizes["taps"][-1] != FINAL:
            raise ValueError(
                f"head.start={recipe.start!r}: a fasteagle head begins as an eagle head without fc.bias, "
                "whose layer is as "
                f'wide as its own (head.intermediate_size), and the last of head.taps is "{FINAL}"'
            )
        head = FastEagleHead(FastEagleConfig(**about, input_norm=eagle.head.config.input_norm)).start_as(
            eagle.head
        )
        head.scale_inputs(1 / given.gains[0], 1 / given.gains[1:])
        return head

    def steps(
        self,
        tokens: Int[Tensor, "B T1"],
        features: Float[Tensor, "B T F"],
        settings: Loss,
        generator: torch.Generator,
    ) -> Iterator[Float[Tensor, "B T H"]]:
        T = features.shape[1]
        at = torch.arange(T, device=features.device)
        causal = (at <= at[:, None])[None, None]
        attends = [lambda key, value: (key, value, causal)] * self.head.config.depth
        yield from deeper(self.head(self.embed(tokens[:, 1:]), features, at[None], attends))


@final
class MedusaObjective(Objective):
    """Medusa-1 (§2.2.1): the tokens of a text, each head its own, weighted by 0.8^k."""

    drafts = Medusa

    @classmethod
    def new(cls, given: Given) -> MedusaHead:
        recipe = given.recipe
        assert isinstance(recipe, MedusaRecipe.Head)
        head = MedusaHead(MedusaConfig(given.target.width, given.vocab, recipe.depth, recipe.layers))
        return head.start(rows_of(given.lm_head, given.states[-1]))

    def student(self, said: Float[Tensor, "n H"], j: int) -> Float[Tensor, "n Vd"]:
        logits: Tensor = self.head.lm_heads[j](said)
        return logits

    def steps(
        self,
        tokens: Int[Tensor, "B T1"],
        features: Float[Tensor, "B T F"],
        settings: Loss,
        generator: torch.Generator,
    ) -> Iterator[Float[Tensor, "B T H"]]:
        yield from deeper(self.head(features))


@final
class GlideObjective(Objective):
    """GLIDE §4.1 with soft labels: drafts a block ahead of what they see of the target."""

    drafts = Glide

    @classmethod
    def reads(cls, recipe: Recipe, layers: int) -> tuple[str, ...]:
        assert isinstance(recipe, GlideRecipe)
        depth = recipe.head.depth
        taps = recipe.head.taps or [f"{CACHE}{max(i, 0)}" for i in range(layers - depth, layers)]
        if len(taps) != depth or not all(tap.startswith(CACHE) for tap in taps):
            raise ValueError(
                f"head.taps={taps}: each of the {depth} layers of glide reads a cache, such as "
                f"{CACHE}{layers - 1}"
            )
        return tuple(taps) if recipe.head.glimpses else ()

    @classmethod
    def new(cls, given: Given) -> GlideHead:
        recipe, target, sizes = given.recipe, given.target, dict(given.sizes)
        assert isinstance(recipe, GlideRecipe.Head)
        about: dict[str, Any] = {"target_size": sizes["hidden_size"], "target_head_dim": sizes["head_dim"]}
        about |= {"target_heads": sizes["num_attention_heads"]}
        about["target_rope"] = tuple(target.rope(int(tap.removeprefix(CACHE))) for tap in sizes["taps"])
        if recipe.hidden_size:
            heads = max(1, recipe.hidden_size // sizes["head_dim"])
            sizes |= {
                "hidden_size": recipe.hidden_size,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
            }
        if recipe.own_ends:
            about |= {"vocab_size": target.vocab, "draft_vocab_size": given.vocab}
        about |= {"cross_norm": not recipe.published, "first_token": recipe.published}
        config = GlideConfig(**sizes, depth=recipe.depth, **about)
        return GlideHead(config).start(given.generator, size_of(given.states[-1]))

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        own = self.head.embed_tokens
        return super().embed(tokens) if own is None else own(tokens)

    def student(self, said: Float[Tensor, "n H"], j: int) -> Float[Tensor, "n Vd"]:
        return self.head.logits(said) if self.head.own_lm_head else super().student(said, j)

    def steps(
        self,
        tokens: Int[Tensor, "B T1"],
        features: Float[Tensor, "B T F"],
        settings: Loss,
        generator: torch.Generator,
    ) -> Iterator[Float[Tensor, "B T H"]]:
        assert isinstance(settings, GlideRecipe.Loss)
        config, T = self.head.config, features.shape[1]
        lead = int(config.first_token)
        at, rows = (torch.arange(first, T, device=features.device) for first in (0, -lead))
        causal = (rows <= rows[:, None])[None, None]
        first = int(torch.randint(settings.block, (), generator=generator)) if settings.offset else 0
        block = (rows - first).div(settings.block, rounding_mode="floor") * settings.block + first
        seen = (at <= block.clamp(min=0)[:, None])[
            None, None
        ]  # row i drafts i − block steps behind the block's first
        glimpses: list[Glimpse | None] = [None] * config.depth
        for i, part in enumerate(features.chunk(len(config.taps), -1) if config.taps else ()):
            glimpses[i] = (*apart(part, config.target_head_dim), seen)
        attends = [lambda key, value: (key, value, causal)] * config.depth
        yield self.head(self.embed(tokens[:, 1 - lead :]), rows[None] + 1, attends, glimpses)[:, lead:]


@final
class DistillObjective(Objective):
    """DistillSpec (Zhou et al. 2024), forward KL on the target's own texts: some of the target's blocks,
    trained to say what all of them say."""

    drafts = DraftModel

    @classmethod
    def reads(cls, recipe: Recipe, layers: int) -> tuple[str, ...]:
        return ()

    @classmethod
    def new(cls, given: Given) -> Part:
        assert isinstance(given.recipe, DraftModelRecipe.Head)
        L = given.target.sizes.blocks
        return (
            Part(tuple(given.recipe.blocks or sorted({0, min(1, L - 1), L - 1})), given.target)
            .float()
            .requires_grad_()
        )

    def steps(
        self,
        tokens: Int[Tensor, "B T1"],
        features: Float[Tensor, "B T F"],
        settings: Loss,
        generator: torch.Generator,
    ) -> Iterator[Float[Tensor, "B T H"]]:
        at = torch.arange(tokens.shape[1], device=tokens.device)[None]
        model = self.head.model
        yield model.states(model.embed(tokens), at, at[:, :, None] >= at[:, None], at)[0][:, 1:]

    def drafter(self, tree: str, dtype: torch.dtype) -> DraftModel:
        part = Part(self.head.config.blocks, self._target, self._vocab).fill(
            restored(stored(self.head.state_dict(), dtype))
        )
        return DraftModel(part.model, self._target, tree, vocab=self._vocab, part=part)


def deeper(said: Float[Tensor, "B T N H"]) -> Iterator[Float[Tensor, "B T H"]]:
    """What one pass says of every depth, as steps: the j-th of row i speaks of the token j rows on."""
    T = said.shape[1]
    for j in range(min(said.shape[2], T)):
        yield F.pad(said[:, : T - j, j], (0, 0, j, 0))


class Unrolled:
    """Attention of a training-time test (EAGLE-3 §3.2, HASS): each step reads the features that the step
    before guessed.

    In step j row i reads f̂_i as guessed j draft steps after the target's last feature, f_{i−j}. So it sees
    the pairs of step 0 up to row i − j, and of step m = 1 … j row i − j + m: the ones a draft j deep would
    have in its cache.
    """

    def __init__(self, T: int, device: torch.device) -> None:
        self.positions = torch.arange(T, device=device)[None]
        self._behind = self.positions.T - self.positions  # [row, column]: how far the column lies behind
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`Attend` of the next step."""
        self._keys.append(key)
        self._values.append(value)
        j = len(self._keys) - 1
        seen = torch.cat([self._behind >= j, *(self._behind == j - m for m in range(1, j + 1))], 1)
        if j:  # the first j rows count for nothing, but a row that sees nothing is NaN
            seen[:j, 0] = True
        return torch.cat(self._keys, 2), torch.cat(self._values, 2), seen[None, None]
