"""The recipe of each method. A section has the settings that the method reads, with its defaults.

docs/training.md lists the defaults that are not the papers'.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from slipstream.core.drafter import CACHE, FINAL, INPUT
from slipstream.drafters.heads import block_taps
from slipstream.training.recipe import Head, Loss, Optimizer, Recipe

Weight = Annotated[float, Field(ge=0)]
Depth = Annotated[int, Field(ge=1, le=16)]


def _distinct(taps: list[str] | None) -> list[str] | None:
    if taps and len(set(taps)) < len(taps):
        raise ValueError("a state is named twice")
    return taps


Taps = Annotated[list[str] | None, Field(min_length=1), AfterValidator(_distinct)]


class LayerHead(Head):
    """Of drafters with decoder layers; `intermediate_size`: width of their MLPs, default the target's."""

    intermediate_size: Annotated[int | None, Field(ge=1, le=2**17)] = None

    @property
    def inner(self) -> int | None:
        return self.intermediate_size


class StartedHead(LayerHead):
    """Of drafters that may begin as a trained head of the same sizes. `start` is its name, if it ships, or
    its directory. Its draft vocabulary is kept."""

    start: str | None = None

    @property
    def begins_as(self) -> str | None:
        return self.start


class StatesHead(StartedHead):
    """Of drafters that read several states, `taps`; default: the inputs of blocks 2, L//2 and L − 3."""

    taps: Taps = None

    def reads(self, blocks: int) -> tuple[str, ...]:
        taps = tuple(self.taps or dict.fromkeys(block_taps(blocks)))  # of few blocks some are the same
        if any(tap.startswith(CACHE) for tap in taps):
            raise ValueError(
                f"head.taps={list(taps)}: this drafter reads states, such as {INPUT}2 or {FINAL}, not a cache"
            )
        if FINAL in taps[:-1]:
            raise ValueError(f"head.taps={list(taps)}: {FINAL} comes last")
        return taps


class LawLoss(Loss):
    """L = feature · SmoothL1 + token · soft cross-entropy + acceptance · −log Σ min(p, q), summed over draft
    steps j = 0, 1, … (EAGLE §3.2).

    SmoothL1 is the distance to the target's next state, a mean over its width; the cross-entropy is with p,
    the target's law over the draft vocabulary. The third part is in no paper here. Over all tokens
    Σ min(p, q) is the probability that a token sampled from the drafter's law q is accepted (Leviathan et al.
    2023, Theorem 3.5).
    """

    feature: Weight = 0.0
    token: Weight = 1.0
    acceptance: Weight = 0.0

    @model_validator(mode="after")
    def _something(self) -> "LawLoss":
        if not (self.feature or self.token or self.acceptance):
            raise ValueError("feature, token and acceptance are all 0: nothing would be learnt")
        return self

    @property
    def blur(self) -> float:
        """Half the width of the uniform noise on what the drafter reads of the target."""
        return 0.0

    def weight(self, j: int) -> float:
        """The weight of draft step j."""
        return 1.0


class NoisyLoss(LawLoss):
    """Of drafters that read the target's states, to which U(−noise, noise) is added."""

    noise: Weight = 0.0

    @property
    def blur(self) -> float:
        return self.noise


class StepsLoss(NoisyLoss):
    """Of drafters that learn several draft steps: step j is weighted by decay^j."""

    decay: float = Field(default=0.8, gt=0, le=2)

    def weight(self, j: int) -> float:
        return self.decay**j


class UnrolledLoss(StepsLoss):
    """Of drafters that read their own predictions, over `unroll` draft steps. The first step reads the
    target's states, the others what the step before predicted. 1 is EAGLE's training; more are EAGLE-3's
    training-time test.
    """

    unroll: int = Field(default=1, ge=1, le=8)


class EagleRecipe(Recipe):
    """EAGLE."""

    class Head(StartedHead):
        """`input_norm`: a norm before attention, which the public layout does not have. `inputs`: what the
        head reads, for the comparison of EAGLE's Figure 8."""

        input_norm: bool = False
        inputs: Literal["shifted", "unshifted", "features", "tokens"] = "shifted"

    class Loss(UnrolledLoss):
        feature: Weight = 1.0
        token: Weight = 0.1
        noise: Weight = 0.1

    method: Literal["eagle"] = "eagle"
    head: Head = Head()
    loss: Loss = Loss()


class Eagle3Recipe(Recipe):
    """EAGLE-3."""

    class Head(StatesHead):
        tree: str = "dynamic-7x10x60"

    class Loss(UnrolledLoss):
        unroll: int = Field(default=7, ge=1, le=8)

    method: Literal["eagle3"] = "eagle3"
    head: Head = Head()
    loss: Loss = Loss()


class FastEagleRecipe(Recipe):
    """FastEagle."""

    class Head(StatesHead):
        """The cascade.

        Attributes:
            depth: N, layers, and tokens that they draft.
            cascade: each layer reads the one before it; false: all read the same, as parallel heads do.
            start: may be an eagle head, too, as which every layer begins.
            rank: of a term by which a law knows the token above it; 0: none, as in the paper.
        """

        depth: Depth = 7
        cascade: bool = True
        rank: int = Field(default=0, ge=0, le=1024)
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


class MedusaRecipe(Recipe):
    """Medusa-1."""

    class Head(Head):
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


class BitaRecipe(Recipe):
    """BiTA."""

    class Head(Head):
        """What is trained.

        Attributes:
            depth: masks, and tokens that they draft.
            prompts: keys and values of each layer that the masks read; 0: none.
            deep: prompts are those; false: they are vectors that enter the target's first layer.
        """

        depth: Depth = 3
        prompts: int = Field(default=16, ge=0, le=1024)
        deep: bool = True
        tree: str = "backbone-3x5"

    class Loss(Loss):
        """`groups`: masks are put behind so many points of an answer, at most."""

        hard: bool = True
        groups: int = Field(default=64, ge=1, le=4096)

    class Optimizer(Optimizer):
        lr: float = Field(default=3e-2, gt=0, le=1)
        clip: float = Field(default=1.0, gt=0)

    method: Literal["bita"] = "bita"
    head: Head = Head()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()


class GlideRecipe(Recipe):
    """GLIDE."""

    class Head(LayerHead):
        """The decoder.

        Attributes:
            taps: the target's caches, one for each layer; default: of its last blocks.
            depth: layers.
            hidden_size: their width; default: the target's.
            glimpses: they read the target's cache; false: a decoder of the same size that does not.
            own_ends: an embedding and an LM head of its own, in place of the target's.
            published: as the public code, without a norm before cross-attention and with the first token.
        """

        taps: Taps = None
        depth: Depth = 1
        hidden_size: Annotated[int | None, Field(ge=1, le=2**15)] = None
        glimpses: bool = True
        own_ends: bool = False
        published: bool = False
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
        """The block-wise training of §4.1.

        Attributes:
            block: tokens that are drafted ahead of what the target has read.
            offset: blocks begin at a random place of each batch; false: at the text's first token.
        """

        block: int = Field(default=5, ge=1, le=64)
        offset: bool = True

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


class DraftModelRecipe(Recipe):
    """DistillSpec, of some of the target's blocks."""

    class Head(Head):
        """`blocks`: the target's, as copies of which it begins; default: the first two and the last."""

        blocks: Annotated[list[int] | None, Field(min_length=1)] = None
        tree: str = "chain-5"

        def reads(self, blocks: int) -> tuple[str, ...]:
            return ()

    method: Literal["draft-model"] = "draft-model"
    head: Head = Head()
    loss: LawLoss = LawLoss()
