"""Reads recipes: everything a training run depends on, in one typed YAML file."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml
from pydantic import ValidationError

from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.recipe import Recipe
from slipstream.files import read_text
from slipstream.methods import METHODS
from slipstream.provenance import suggested

# Settings that recipes once had for every method, with their defaults of then. One that the method does not
# read is dropped at these, and at any value where a run wrote the recipe with all of them.
ONCE = yaml.safe_load(Path(__file__).with_name("earlier_settings.yaml").read_text())


def load_recipe(path: str | None, overrides: Sequence[str] = (), **settings: Any) -> Recipe:
    """The recipe of a file (default: all defaults), `section.key=value` overrides, and what the caller gives.
    Raises ValueError: it cannot be read, a key is unknown (the nearest is offered), the method does not read
    it, or a value is out of range."""
    values: Any = {}
    if path is not None:
        values = _yaml(read_text(path, "recipe"), f"recipe {path}") or {}
        if not isinstance(values, dict):
            what = type(values).__name__
            raise ValueError(f"recipe {path} is a {what}: write sections such as data: and loss:")
    in_file, asked = values.get("method"), settings.get("method")
    if None not in (in_file, asked) and in_file != asked:
        fix = f"{suggested(f'train {in_file}')}, or a recipe for {asked!r}"
        raise ValueError(f"recipe {path} is for {in_file!r}: {fix}")
    kind = recipe_class(asked or in_file or "eagle", "train" if asked else f"recipe {path}")
    values = _without_others(values, kind)
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot or section == "method":
            raise ValueError(f"override {override!r}: write section.key=value, such as optimizer.lr=3e-4")
        _put(values, section, {name: _yaml(text, f"override {override!r}")})
    for section, value in sorted(settings.items(), key=lambda item: item[0] == "stages"):  # stages override
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
