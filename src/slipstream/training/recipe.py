"""Recipes: everything a training run depends on, in one typed YAML file."""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from slipstream.core.drafter import FINAL
from slipstream.core.tree_spec import TreeSpec
from slipstream.files import read_text
from slipstream.methods import METHODS
from slipstream.provenance import suggested

Beta = Annotated[float, Field(ge=0, lt=1)]
Precision = Annotated[  # YAML reads a bare `no` as false
    Literal["no", "bf16"], BeforeValidator(lambda given: "no" if given is False else given)
]


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
        held_out_tokens: length of the target's greedy answers to them.
    """

    files: list[str] = []
    max_length: int = Field(default=1024, ge=8)
    limit: int | None = Field(default=None, ge=1)
    greedy: bool = False
    held_out: int = Field(default=32, ge=1)
    held_out_tokens: int = Field(default=96, ge=8)


class Cache(Section):
    """`disk_gib`: how much of the target's features may be kept on disk; the rest is computed when needed."""

    disk_gib: float = Field(default=8.0, ge=0, le=2**20)


class Head(Section):
    """Settings of every drafter.

    Attributes:
        draft_vocab: size of the draft vocabulary, the most frequent tokens of the data; 0: all tokens.
        tree: the drafter's default tree, for which τ is predicted.
        storage: precision of the weights. "int8" takes half of "bfloat16": each row of a matrix is integers
            with a scale.
    """

    draft_vocab: int = Field(default=8192, ge=0, le=2**20)
    tree: str = "fig9"
    storage: Literal["bfloat16", "int8"] = "bfloat16"

    @field_validator("tree", mode="before")
    @classmethod
    def _paths(cls, tree: Any) -> Any:
        return json.dumps(tree) if isinstance(tree, list) else tree

    def reads(self, blocks: int) -> tuple[str, ...]:
        """The taps that the drafter reads of a target of so many blocks. Raises ValueError."""
        return (FINAL,)

    @property
    def inner(self) -> int | None:
        """Width of the MLPs; None: the target's."""
        return None

    @property
    def begins_as(self) -> str | None:
        """Name or directory of a trained head, as which it begins."""
        return None

    def layers_built(self, width: int) -> tuple[int, int]:
        """How many layers the drafter has and how wide they are, for a target of that width."""
        return 1, width


class Loss(Section):
    """Settings of every loss; `hard`: labels are the text's own tokens, not the target's laws."""

    hard: bool = False


class Optimizer(Section):
    """AdamW, with a rate that rises linearly and falls as a cosine.

    Attributes:
        lr: the largest rate.
        clip: bound of the gradient's norm.
        warmup: share of the steps over which the rate rises.
        floor: the last rate, over `lr`.
    """

    lr: float = Field(default=1e-3, gt=0, le=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=0.5, gt=0)
    warmup: float = Field(default=0.03, ge=0, le=1)
    floor: float = Field(default=0.05, ge=0, le=1)


class Schedule(Section):
    """How long, how much at once, how often to evaluate.

    Attributes:
        batch_tokens: padded tokens of a batch, per process.
        evaluate_every, save_every: steps.
        precision: "no" (float32) or "bf16", as Accelerate's mixed_precision.
    """

    epochs: float = Field(default=1.0, gt=0, le=1e6)
    batch_tokens: int = Field(default=2048, ge=64)
    evaluate_every: int = Field(default=100, ge=1)
    save_every: int = Field(default=50, ge=1)
    precision: Precision = "no"
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)  # what torch takes


class Recipe(Section):
    """All settings of one run; each method has its own class. `stages` override sections one after another;
    each stage begins with the weights of the one before."""

    method: str
    data: Data = Data()
    features: Cache = Cache()
    head: Head = Head()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    stages: list[dict[Literal["data", "loss", "optimizer", "schedule"], dict[str, Any]]] = []

    @classmethod
    def section(cls, name: str) -> type[Section]:
        """The class of a section."""
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


# Recipes once had every setting for every method, most of them without effect. A setting that the method does
# not read is dropped at its defaults of then, and at any value where a run wrote the recipe with all of them.
ONCE: dict[str, dict[str, tuple[Any, ...]]] = {
    "head": {
        **dict.fromkeys(("intermediate_size", "taps", "start", "hidden_size", "blocks"), (None,)),
        **dict.fromkeys(("input_norm", "own_ends", "published"), (False,)),
        **dict.fromkeys(("cascade", "glimpses", "deep"), (True,)),
        **{"depth": (7,), "layers": (1,), "prompts": (16,)},
    },
    "loss": {
        **{"feature": (1.0, 0.0), "token": (0.1, 1.0), "acceptance": (0.0,), "noise": (0.1, 0.0)},
        **{"unroll": (1,), "groups": (64,), "block": (5,), "offset": (True,), "decay": (0.8,)},
    },
}


def load_recipe(path: str | None, overrides: Sequence[str] = (), **given: Any) -> Recipe:
    """The recipe of a file (default: all defaults), `section.key=value` overrides, and what the caller gives.

    Raises:
        ValueError: it cannot be read, a key is unknown (the nearest is offered), the method does not read it,
            or a value is out of range.
    """
    values: Any = {}
    if path is not None:
        values = _yaml(read_text(path, "recipe"), f"recipe {path}") or {}
        if not isinstance(values, dict):
            what = type(values).__name__
            raise ValueError(f"recipe {path} is a {what}: write sections such as data: and loss:")
    in_file, asked = values.get("method"), given.get("method")
    if None not in (in_file, asked) and in_file != asked:
        raise ValueError(
            f"recipe {path} is for {in_file!r}: {suggested(f'train {in_file}')}, or a recipe for {asked!r}"
        )
    kind = recipe_class(asked or in_file or "eagle", "train" if asked else f"recipe {path}")
    values = _without_others(values, kind)
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot or section == "method":
            raise ValueError(f"override {override!r}: write section.key=value, such as optimizer.lr=3e-4")
        _put(values, section, {name: _yaml(text, f"override {override!r}")})
    for section, value in sorted(given.items(), key=lambda item: item[0] == "stages"):  # stages override
        if isinstance(value, dict):
            _put(values, section, value)
        else:
            values[section] = value
    try:
        recipe = kind.model_validate(values)
        recipe.staged()
        TreeSpec.parse(recipe.head.tree)
    except ValidationError as error:
        complaints = "; ".join(_complaint(problem, kind) for problem in error.errors())
        raise ValueError(f"recipe {path or 'overrides'}: {complaints}") from error
    return recipe


def _put(values: dict[str, Any], section: str, settings: dict[str, Any]) -> None:
    """Set some keys of a section, also where stages set them."""
    values[section] = {**_dict(values.get(section)), **settings}
    stages = values.get("stages")
    for stage in stages if isinstance(stages, list) else ():
        if isinstance(own := _dict(stage).get(section), dict):
            stage[section] = {name: value for name, value in own.items() if name not in settings}


def recipe_class(method: Any, source: str) -> type[Recipe]:
    """The class of a method's recipes. Raises ValueError."""
    known = {name: entry.recipe for name, entry in METHODS.items() if entry.recipe is not None}
    if not isinstance(method, str) or method not in known:
        raise ValueError(f"{source}: method is {method!r}. Available: {', '.join(known)}")
    return resolve_name(known[method])


def stored_recipe(values: dict[str, Any], source: str) -> Recipe:
    """The recipe that a run stored. Raises ValueError."""
    kind = recipe_class(values.get("method"), source)
    return kind.model_validate(_without_others(values, kind))


def _without_others(values: dict[str, Any], kind: type[Recipe]) -> dict[str, Any]:
    """The values of a file without settings of other methods, see `ONCE`."""
    dumped = ONCE["head"].keys() <= _dict(values.get("head")).keys()

    def own(sections: Any) -> Any:
        if not isinstance(sections, dict):
            return sections
        result = dict(sections)
        for section in ONCE.keys() & result.keys():
            others = ONCE[section].keys() - kind.section(section).model_fields.keys()
            if isinstance(settings := result[section], dict):
                gone = {k for k in others & settings.keys() if dumped or settings[k] in ONCE[section][k]}
                result[section] = {key: value for key, value in settings.items() if key not in gone}
        return result

    stages = values.get("stages")
    return own(values) | ({"stages": [*map(own, stages)]} if isinstance(stages, list) else {})


def _yaml(text: str, what: str) -> Any:
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # such as a day that no month has
        raise ValueError(f"{what} is no YAML: {error}") from error


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _complaint(error: Any, kind: type[Recipe]) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{where} is {error['input']!r}: {error['msg']}"
    *sections, key = map(str, error["loc"])
    fields = (kind.section(sections[0]) if sections else kind).model_fields
    kinds = {name: recipe_class(name, "") for name, method in METHODS.items() if method.recipe is not None}
    if readers := [m for m in kinds if sections and key in kinds[m].section(sections[0]).model_fields]:
        own = kind.model_fields["method"].default
        return f"{where}={error['input']} is read by {', '.join(readers)}, not by {own}: leave it out"
    nearest = get_close_matches(key, fields, 1)
    hint = f", did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown key {where}{hint} (known: {', '.join(fields)})"
