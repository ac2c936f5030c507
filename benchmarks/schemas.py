"""Pairs of a JSON schema and a prompt, from a seed: flat, nested, enums, arrays, unicode, recursion."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

Schema = dict[str, Any]
THINGS = [
    "a person",
    "a river",
    "a recipe",
    "a small town",
    "a machine",
    "an old book",
    "a song",
    "a journey",
]
NAMES = ["name", "title", "city", "colour", "author", "maker", "origin", "note", "kind", "owner"]
NUMBERS = ["age", "year", "count", "height", "price", "weight", "rating", "distance"]
UNICODE = {  # name of a field -> values
    "größe": ["klein", "mittel", "groß"],
    "名前": ["山田", "佐藤", "鈴木"],
    "цвет": ["красный", "синий", "зелёный"],
    "naïveté": ["élevée", "faible"],
    "emoji": ["🙂", "🌊", "🍎"],
}
ENUMS = [
    ["red", "green", "blue"],
    ["low", "medium", "high", "very high"],
    ["north", "south", "east", "west"],
    [1, 2, 3, "many"],
    [True, False, None],
]


class Pair(NamedTuple):
    """What is asked, and what the answer must be."""

    kind: str
    schema: Schema
    prompt: str


def pairs(count: int, seed: int = 0) -> list[Pair]:
    """So many pairs, the kinds in turn. The same for the same seed."""
    chance, kinds = random.Random(seed), list(KINDS.items())
    made = []
    for i in range(count):
        kind, write = kinds[i % len(kinds)]
        schema = write(chance)
        thing = chance.choice(THINGS)
        asked = f"Describe {thing} as JSON that follows this schema: {_said(schema)}"
        made.append(Pair(kind, schema, asked))
    return made


def _said(schema: Schema) -> str:
    """The names of the fields, as a person would ask for them."""
    body = next(iter(schema.get("$defs", {}).values()), schema)
    names = list(body.get("properties", {})) or [str(body.get("type", "any value"))]
    return ", ".join(names)


def record(fields: Schema, needed: list[str] | None = None) -> Schema:
    """An object of exactly these fields; all are `needed` by default."""
    required = list(fields) if needed is None else needed
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def text(chance: random.Random) -> Schema:
    return {"type": "string", "maxLength": chance.choice([12, 20, 40])}


def number(chance: random.Random) -> Schema:
    low = chance.choice([0, 1, -40, 1900])
    whole = {"type": "integer", "minimum": low, "maximum": low + chance.choice([9, 100, 120])}
    return chance.choice([whole, {"type": "number", "minimum": 0, "maximum": 1000}, {"type": "integer"}])


def value(chance: random.Random) -> Schema:
    made = chance.choice([text, number, enum, boolean, formatted])
    return made(chance)


def enum(chance: random.Random) -> Schema:
    return {"enum": chance.choice(ENUMS)}


def boolean(chance: random.Random) -> Schema:
    return {"type": "boolean"}


def formatted(chance: random.Random) -> Schema:
    return chance.choice(
        [
            {"type": "string", "format": "date"},
            {"type": "string", "format": "time"},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
            {"type": "string", "pattern": "^(north|south) [a-z]{3,8}$"},
            {"const": "version 2"},
        ]
    )


def flat(chance: random.Random) -> Schema:
    fields = {name: text(chance) for name in chance.sample(NAMES, chance.randint(1, 3))}
    fields |= {name: number(chance) for name in chance.sample(NUMBERS, chance.randint(1, 3))}
    return record(fields)


def enums(chance: random.Random) -> Schema:
    fields = {name: enum(chance) for name in chance.sample(NAMES, chance.randint(2, 4))}
    return record(fields | {"valid": {"type": "boolean"}})


def arrays(chance: random.Random) -> Schema:
    least = chance.randint(0, 2)
    some = {"type": "array", "items": value(chance), "minItems": least, "maxItems": least + 3}
    pair = {"type": "array", "prefixItems": [text(chance), number(chance)], "items": False, "minItems": 2}
    return record({"items": some, "pair": pair, chance.choice(NAMES): text(chance)})


def nested(chance: random.Random, depth: int = 3) -> Schema:
    fields = {name: value(chance) for name in chance.sample(NAMES, chance.randint(1, 2))}
    if depth:
        fields[chance.choice(["part", "inside", "details"])] = nested(chance, depth - 1)
    return record(fields)


def unicode(chance: random.Random) -> Schema:
    names = chance.sample(list(UNICODE), 3)
    fields: Schema = {name: {"enum": UNICODE[name]} for name in names}
    return record(fields | {"straße 7": text(chance), 'quoted "name"\n': boolean(chance)})


def optional(chance: random.Random) -> Schema:
    fields = {name: value(chance) for name in chance.sample([*NAMES, *NUMBERS], 4)}
    return record(fields, needed=list(fields)[:1])


def either(chance: random.Random) -> Schema:
    by_name = record({"by": {"const": "name"}, "name": text(chance)})
    by_number = record({"by": {"const": "number"}, "number": number(chance)})
    choice = {"anyOf": [by_name, by_number, {"type": "null"}]}
    return record({"key": choice, "other": {"anyOf": [text(chance), number(chance)]}})


def tree(chance: random.Random) -> Schema:
    node = record(
        {"label": {"type": "string", "maxLength": 12}, "children": {"type": "array", "maxItems": 2}}
    )
    node["properties"]["children"]["items"] = {"$ref": "#/$defs/node"}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def linked(chance: random.Random) -> Schema:
    step = record({chance.choice(NAMES): value(chance)})
    step["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/step"}]}
    step["required"].append("next")
    return {"$defs": {"step": step}, "$ref": "#/$defs/step"}


def mapping(chance: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"id": number(chance)},
        "required": ["id"],
        "additionalProperties": value(chance),
        "maxProperties": 4,
    }


KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "flat": flat,
    "enums": enums,
    "arrays": arrays,
    "nested": nested,
    "unicode": unicode,
    "optional": optional,
    "either": either,
    "tree": tree,
    "linked": linked,
    "mapping": mapping,
}
