"""Recipes: everything a training run depends on, in one typed YAML file."""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from slipstream.core.shape import Shape
from slipstream.files import read_text

Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Data(Section):
    """What is learnt from.

    Attributes:
        files: JSONL (OpenAI messages, ShareGPT, Alpaca, text) or .txt, gzipped or not.
        max_length: tokens of an example, prompt included.
        limit: rows per file, taken evenly.
        greedy: only rows marked as the target's own answers at temperature 0.
        held_out: prompts kept for the prediction of τ, at most an eighth of the examples.
        held_out_tokens: the target answers them greedily, this long.
    """

    files: list[str] = Field(default_factory=list)
    max_length: int = Field(default=1024, ge=8)
    limit: int | None = Field(default=None, ge=1)
    greedy: bool = False
    held_out: int = Field(default=32, ge=1)
    held_out_tokens: int = Field(default=96, ge=8)


class Cache(Section):
    """`disk_gib`: how much of the target's features may be kept on disk; the rest is computed when needed."""

    disk_gib: float = Field(default=8.0, ge=0)


class Head(Section):
    """The drafter's own sizes.

    Attributes:
        draft_vocab: the most frequent tokens of the data, which candidates are taken from; 0: all.
        intermediate_size: of the MLP; default: the target's.
        input_norm: of eagle: a norm before attention, which the public layout does not have.
        taps: of eagle3 and fasteagle: the states that are read; default: inputs of blocks 2, L/2 and L − 3.
            Of glide: the caches, one for each layer; default: of the last blocks.
        depth: of fasteagle: N, its layers and the tokens that it drafts; of medusa: its heads; of bita:
            its masks; of glide: its layers.
        layers: of medusa: residual blocks of a head.
        cascade: of fasteagle: each layer reads the one before it; false: parallel heads.
        start: of fasteagle: a trained eagle head, by name or directory, as which every layer begins.
        hidden_size: of glide: its own width; default: the target's.
        glimpses: of glide: it reads the target's cache; false: a decoder of the same size that does not.
        own_ends: of glide: an embedding and an LM head of its own, in place of the target's.
        published: of glide: as its public code, without a norm before cross-attention and with the text's
            first token.
        blocks: of draft-model: the target's, copies of which it begins as; default: the first two and the
            last.
        prompts: of bita: keys and values of each layer that the masks read; 0: none.
        deep: of bita: prompts are those; false: they are vectors that enter the target's first layer.
        tree: the tree that τ is predicted for, and the drafter's default.
        storage: of the weights: "bfloat16", or "int8", half of that: matrices as rows of integers with a
            scale each.
    """

    draft_vocab: int = Field(default=8192, ge=0, le=2**20)
    intermediate_size: int | None = Field(default=None, ge=1, le=2**17)
    input_norm: bool = False
    taps: list[str] | None = Field(default=None, min_length=1)
    depth: int = Field(default=7, ge=1, le=16)
    layers: int = Field(default=1, ge=1, le=16)
    cascade: bool = True
    start: str | None = None
    hidden_size: int | None = Field(default=None, ge=1, le=2**15)
    glimpses: bool = True
    own_ends: bool = False
    published: bool = False
    blocks: list[int] | None = Field(default=None, min_length=1)
    prompts: int = Field(default=16, ge=0, le=1024)
    deep: bool = True
    tree: str = "fig9"
    storage: Literal["bfloat16", "int8"] = "bfloat16"

    @field_validator("tree", mode="before")
    @classmethod
    def _paths(cls, tree: Any) -> Any:
        return json.dumps(tree) if isinstance(tree, list) else tree

    @field_validator("taps")
    @classmethod
    def _apart(cls, taps: list[str] | None) -> list[str] | None:
        if taps and len(set(taps)) < len(taps):
            raise ValueError("a state is named twice")
        return taps


class Loss(Section):
    """EAGLE §3.2: L = feature · SmoothL1 + token · soft cross-entropy, over draft steps j = 0, 1, … weighted
    by decay^j.

    Attributes:
        acceptance: beyond the papers, of a third part, −log Σ min(p, q): the chance that a token sampled from
            the head's law q is accepted by the target's p (Leviathan et al. 2023, Theorem 3.5).
        hard: the text's own tokens take the place of the target's laws.
        noise: features are blurred by U(−noise, noise).
        unroll: of eagle and eagle3: steps, of which the first reads the target's states and the others what
            the head said (1: as in EAGLE; more: EAGLE-3's training-time test). fasteagle takes one for each
            of its layers.
        groups: of bita: points of an answer that masks are put behind, at most.
        block: of glide: tokens that are drafted ahead of what the target has read.
        offset: of glide: blocks begin at a random place in each batch; false: at the text's first token.
    """

    feature: float = Field(default=1.0, ge=0)
    token: float = Field(default=0.1, ge=0)
    acceptance: float = Field(default=0.0, ge=0)
    hard: bool = False
    noise: float = Field(default=0.1, ge=0)
    unroll: int = Field(default=1, ge=1, le=8)
    groups: int = Field(default=64, ge=1, le=4096)
    block: int = Field(default=5, ge=1, le=64)
    offset: bool = True
    decay: float = Field(default=0.8, gt=0, le=2)

    @model_validator(mode="after")
    def _something(self) -> "Loss":
        if not (self.feature or self.token or self.acceptance):
            raise ValueError("feature, token and acceptance are all 0: nothing would be learnt")
        return self


class Optimizer(Section):
    """AdamW with a cosine schedule; `clip` bounds the gradient's norm."""

    lr: float = Field(default=1e-3, gt=0, le=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=0.5, gt=0)
    warmup: float = Field(default=0.03, ge=0, le=1)
    floor: float = Field(
        default=0.05, ge=0, le=1, description="the last learning rate, as a share of the first"
    )


class Schedule(Section):
    """How long, how much at once, and how often to look.

    Attributes:
        batch_tokens: padded tokens of a batch, per process.
        evaluate_every, save_every: steps.
        precision: "no" (float32) or "bf16", as Accelerate's mixed_precision.
    """

    epochs: float = Field(default=1.0, gt=0, le=1e6)
    batch_tokens: int = Field(default=2048, ge=64)
    evaluate_every: int = Field(default=100, ge=1)
    save_every: int = Field(default=50, ge=1)
    precision: Literal["no", "bf16"] = "no"
    seed: int = 0


# what the papers of the other methods say, where a recipe does not; fasteagle's decay as measured
# (docs/fasteagle.md)
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "eagle3": {
        "loss": {"feature": 0.0, "token": 1.0, "noise": 0.0, "unroll": 7},
        "head": {"tree": "dynamic-7x10x60"},
    },
    "glide": {
        "loss": {"feature": 0.0, "token": 1.0, "noise": 0.0},
        "head": {"depth": 1, "tree": "cape-5x32"},
    },
    "draft-model": {"loss": {"feature": 0.0, "token": 1.0, "noise": 0.0}, "head": {"tree": "chain-5"}},
    "medusa": {
        "loss": {"feature": 0.0, "token": 1.0, "noise": 0.0, "hard": True},
        "head": {"depth": 4, "tree": "best-first-4x16"},
    },
    "bita": {
        "loss": {"feature": 0.0, "token": 1.0, "noise": 0.0, "hard": True},
        "head": {"depth": 3, "tree": "backbone-3x5"},
        "optimizer": {"lr": 3e-2, "clip": 1.0},
    },
    "fasteagle": {"loss": {"noise": 0.0, "decay": 0.9}, "head": {"tree": "backbone-7x10"}},
}


# settings that would pass without a word where a method does not read them; the sizes that most share may
READ_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "head": {
        "input_norm": ("eagle",),
        "taps": ("eagle3", "fasteagle", "glide"),
        "depth": ("fasteagle", "medusa", "bita", "glide"),
        "layers": ("medusa",),
        "cascade": ("fasteagle",),
        "start": ("fasteagle",),
        **dict.fromkeys(("hidden_size", "glimpses", "own_ends", "published"), ("glide",)),
        "blocks": ("draft-model",),
        **dict.fromkeys(("prompts", "deep"), ("bita",)),
    },
    "loss": {"unroll": ("eagle", "eagle3"), "groups": ("bita",), "block": ("glide",), "offset": ("glide",)},
}


class Recipe(Section):
    """One run. `stages` override sections in turn; each stage goes on from the weights of the one before."""

    method: Literal["eagle", "eagle3", "fasteagle", "medusa", "bita", "glide", "draft-model"] = "eagle"
    data: Data = Data()
    features: Cache = Cache()
    head: Head = Head()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    stages: list[dict[Literal["data", "loss", "optimizer", "schedule"], dict[str, Any]]] = Field(
        default_factory=list
    )

    def staged(self) -> list["Recipe"]:
        """One recipe without stages for each stage."""
        base = self.model_dump(exclude={"stages"})
        return [
            Recipe.model_validate(
                {**base, **{name: {**base[name], **values} for name, values in stage.items()}}
            )
            for stage in self.stages or [{}]
        ]


def load_recipe(path: str | None, overrides: Sequence[str] = (), **given: Any) -> Recipe:
    """The recipe of a file (default: all defaults), `section.key=value` overrides, and what the caller gives.

    Raises:
        ValueError: it cannot be read, a key is unknown (the nearest is offered) or a value is out of range.
    """
    values: Any = {}
    if path is not None:
        values = _yaml(read_text(path, "recipe"), f"recipe {path}") or {}
        if not isinstance(values, dict):
            raise ValueError(
                f"recipe {path} is a {type(values).__name__}: write sections such as data: and loss:"
            )
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            raise ValueError(f"override {override!r}: write section.key=value, such as optimizer.lr=3e-4")
        value = _yaml(text, f"override {override!r}")
        values = {**values, section: {**_dict(values.get(section)), name: value}}
    own, asked = values.get("method"), given.get("method")
    if None not in (own, asked) and own != asked:
        raise ValueError(f"recipe {path} is for {own!r}: slipstream train {own}, or a recipe for {asked!r}")
    for section, named in given.items():
        values = {
            **values,
            section: {**_dict(values.get(section)), **named} if isinstance(named, dict) else named,
        }
    for section, published in PUBLISHED.get(str(values.get("method")), {}).items():
        values = {**values, section: {**published, **_dict(values.get(section))}}
    try:
        recipe = Recipe.model_validate(values)
        for stage in recipe.staged():
            Shape.parse(stage.head.tree)
            _check_read(stage)
    except ValidationError as error:
        raise ValueError(
            f"recipe {path or 'overrides'}: {'; '.join(map(_complaint, error.errors()))}"
        ) from error
    return recipe


def _yaml(text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # such as a day that no month has
        raise ValueError(f"{what} is no YAML: {error}") from error


def _check_read(recipe: Recipe) -> None:
    """Raises ValueError for a setting that the method does not read and that is not its default."""
    for section, names in READ_BY.items():
        given = getattr(recipe, section)
        for name, methods in names.items():
            value = getattr(given, name)
            if recipe.method not in methods and value != type(given).model_fields[name].default:
                raise ValueError(
                    f"{section}.{name}={value} is read by {', '.join(methods)}, not by {recipe.method}: "
                    f"leave it out"
                )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _complaint(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{where} is {error['input']!r}: {error['msg']}"
    fields: Any = Recipe.model_fields
    if len(error["loc"]) > 1:
        fields = Recipe.model_fields[str(error["loc"][0])].annotation.model_fields  # type: ignore[union-attr]
    near = get_close_matches(str(error["loc"][-1]), fields, 1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return f"unknown key {where}{hint} (known: {', '.join(fields)})"
