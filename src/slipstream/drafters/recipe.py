"""The sections of a recipe, and those that several methods share. A method's own stand beside its objective.
docs/training.md lists the defaults that are not the papers'."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from slipstream.core.drafter import CACHE, FINAL, INPUT
from slipstream.drafters.heads import block_taps


def _distinct(taps: list[str] | None) -> list[str] | None:
    if taps and len(set(taps)) < len(taps):
        raise ValueError("a state is named twice")
    return taps


Beta = Annotated[float, Field(ge=0, lt=1)]
Depth = Annotated[int, Field(ge=1, le=16)]
Precision = Annotated[  # YAML reads a bare `no` as false
    Literal["no", "bf16"], BeforeValidator(lambda value: "no" if value is False else value)
]
Taps = Annotated[list[str] | None, Field(min_length=1), AfterValidator(_distinct)]
Weight = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A part of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Data(Section):
    """What is learnt from."""

    files: list[str] = []  # JSONL (OpenAI messages, ShareGPT, Alpaca, text) or .txt, gzipped or not
    max_length: int = Field(default=1024, ge=8)  # tokens of an example, prompt included
    limit: int | None = Field(default=None, ge=1)  # rows per file, taken evenly
    greedy: bool = False  # only rows marked as the target's own answers at temperature 0
    held_out: int = Field(default=32, ge=1)  # prompts to predict τ from, at most an eighth of the examples
    held_out_tokens: int = Field(default=96, ge=8)  # of the target's greedy answers to them


class Cache(Section):
    """`disk_gib`: how much of the target's features may be kept on disk; the rest is computed when needed."""

    disk_gib: float = Field(default=8.0, ge=0, le=2**20)


class HeadSettings(Section):
    """Settings of every drafter."""

    draft_vocab: int = Field(default=8192, ge=0, le=2**20)  # the data's most frequent tokens; 0: all tokens
    tree: str = "fig9"  # the drafter's default, for which τ is predicted
    storage: Literal["bfloat16", "int8"] = "bfloat16"  # "int8" is half of it: integers, and a scale for a row

    @field_validator("tree", mode="before")
    @classmethod
    def _paths(cls, tree: Any) -> Any:
        return json.dumps(tree) if isinstance(tree, list) else tree

    def reads(self, blocks: int) -> tuple[str, ...]:
        """The taps that the drafter reads of a target of so many blocks. Raises ValueError."""
        return (FINAL,)

    def layers_built(self, width: int) -> tuple[int, int]:
        """How many layers the drafter has and how wide they are, for a target of that width."""
        return 1, width


class LayerHead(HeadSettings):
    """Of drafters with decoder layers; `intermediate_size`: width of their MLPs, default the target's."""

    intermediate_size: Annotated[int | None, Field(ge=1, le=2**17)] = None


class StartedHead(LayerHead):
    """Of drafters that may begin as a trained head of the same sizes. `start` is its name, if it ships, or
    its directory. Its draft vocabulary is kept."""

    start: str | None = None


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


class Loss(Section):
    """Settings of every loss; `hard`: labels are the text's own tokens, not the target's laws."""

    hard: bool = False


class LawLoss(Loss):
    """L = feature · SmoothL1 + token · soft cross-entropy + acceptance · −log Σ min(p, q), summed over draft
    steps j = 0, 1, … (EAGLE §3.2).

    SmoothL1 is the distance to the target's next state, a mean over its width; p is the target's law over the
    draft vocabulary. The third part is in no paper here: Σ min(p, q) is the probability that a token sampled
    from the drafter's law q is accepted (Leviathan et al. 2023, Theorem 3.5).
    """

    feature: Weight = 0.0
    token: Weight = 1.0
    acceptance: Weight = 0.0

    @model_validator(mode="after")
    def _learns_something(self) -> "LawLoss":
        if not (self.feature or self.token or self.acceptance):
            raise ValueError("feature, token and acceptance are all 0: nothing would be learnt")
        return self


class NoisyLoss(LawLoss):
    """Of drafters that read the target's states, to which U(−noise, noise) is added."""

    noise: Weight = 0.0


class StepsLoss(NoisyLoss):
    """Of drafters that learn several draft steps: step j is weighted by decay^j."""

    decay: float = Field(default=0.8, gt=0, le=2)


class Optimizer(Section):
    """AdamW, with a rate that rises linearly and falls as a cosine."""

    lr: float = Field(default=1e-3, gt=0, le=1)  # the largest
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=0.5, gt=0)  # bound of the gradient's norm
    warmup: float = Field(default=0.03, ge=0, le=1)  # share of the steps over which the rate rises
    floor: float = Field(default=0.05, ge=0, le=1)  # the last rate, over `lr`


class Schedule(Section):
    """How long, how much at once, how often to evaluate."""

    epochs: float = Field(default=1.0, gt=0, le=1e6)
    batch_tokens: int = Field(default=2048, ge=64)  # padded, per process
    evaluate_every: int = Field(default=100, ge=1)  # steps
    save_every: int = Field(default=50, ge=1)  # steps
    precision: Precision = "no"  # float32, or "bf16", as Accelerate's mixed_precision
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)  # what torch takes


class Recipe(Section):
    """All settings of one run; each method has its own class."""

    method: str
    data: Data = Data()
    features: Cache = Cache()
    head: HeadSettings = HeadSettings()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    # These override sections one after another; each stage begins with the weights of the one before.
    stages: list[dict[Literal["data", "loss", "optimizer", "schedule"], dict[str, Any]]] = []

    @classmethod
    def section(cls, name: str) -> type[Section]:
        kind: Any = cls.model_fields[name].annotation
        return kind

    def staged(self) -> list["Recipe"]:
        """One recipe without stages for each stage. Raises ValueError for stages of several precisions."""
        base = self.model_dump(exclude={"stages"})
        merged = [{name: {**base[name], **stage[name]} for name in stage} for stage in self.stages or [{}]]
        staged = [self.model_validate({**base, **sections}) for sections in merged]
        own = self.schedule.precision
        if others := {stage.schedule.precision for stage in staged} - {own}:
            raise ValueError(
                f"a stage has schedule.precision={others.pop()}, and the run {own}: all stages share one, so "
                "give it outside of stages"
            )
        return staged
