"""llguidance beside XGrammar: the time of a mask, what reading a schema takes, and which keywords of JSON
schemas each keeps. XGrammar is no dependency: pip install xgrammar to run this.

Masks are timed along answers that validate: each token of each answer is one mask. A keyword is kept if its
valid value is accepted and its invalid one is not.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Protocol

import llguidance
import typer

from common import digits, run
from schemas import Schema, pairs, record
from slipstream import generate
from slipstream.cli import common as cli
from slipstream.files import check_writable, write_json
from slipstream.results import heading
from slipstream.targets import HFTarget, load_target
from slipstream.targets.grammar import written
from slipstream.targets.grammar_worker import LAYOUT, read_tokenizer

# what it is -> schema, a valid value, an invalid one
KEYWORDS: dict[str, tuple[Schema, Any, Any]] = {
    "type": ({"type": "integer"}, 3, "a"),
    "several types": ({"type": ["integer", "null"]}, None, "a"),
    "enum": ({"enum": ["a", 2]}, 2, 3),
    "const": ({"const": "é"}, "é", "e"),
    "minimum": ({"type": "integer", "minimum": 17}, 17, 16),
    "maximum": ({"type": "integer", "maximum": 170}, 170, 171),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 2}, 2.5, 2),
    "minimum of a number": ({"type": "number", "minimum": 1.5}, 1.5, 1.4),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 25, 26),
    "minLength": ({"type": "string", "minLength": 3}, "abc", "ab"),
    "maxLength": ({"type": "string", "maxLength": 3}, "日本語", "abcd"),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, "abc", "abd"),
    "pattern without anchors": ({"type": "string", "pattern": "b"}, "abc", "aaa"),
    "pattern and maxLength": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aa", "aaa"),
    "format date": ({"type": "string", "format": "date"}, "2026-11-24", "2026-13-24"),
    "format time": ({"type": "string", "format": "time"}, "10:20:30Z", "25:00:00Z"),
    "format date-time": ({"type": "string", "format": "date-time"}, "2026-11-24T10:20:30Z", "yesterday"),
    "format email": ({"type": "string", "format": "email"}, "a@b.org", "a"),
    "format uuid": ({"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", "12"),
    "format ipv4": ({"type": "string", "format": "ipv4"}, "10.0.0.1", "10.0.0.300"),
    "items": ({"type": "array", "items": {"type": "integer"}}, [1, 2], ["a"]),
    "minItems": ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1, 2], [1]),
    "maxItems": ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [1, 2], [1, 2, 3]),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [1], ["a"]),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 2], [1, 1]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [1], [2]),
    "required": (record({"a": {"type": "integer"}}), {"a": 1}, {}),
    "additionalProperties false": (record({"a": {}}, []), {}, {"b": 1}),
    "additionalProperties schema": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"x": 1},
        {"x": "a"},
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        {"n_a": 1},
        {"n_a": "x"},
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[ab]+$"}}, {"ab": 1}, {"c": 1}),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, 1, "a"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}, 1, 3),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, 3, 2),
    "not": ({"type": "integer", "not": {"const": 3}}, 4, 3),
    "if then else": ({"if": {"const": 1}, "then": {"const": 1}, "else": {"const": 2}}, 2, 3),
    "$ref with others": (
        {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer"}}},
        5,
        6,
    ),
    "recursion": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
        [[], [[]]],
        [1],
    ),
    "$anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "integer"}}}, 1, "a"),
    "false": ({"type": "object", "properties": {"a": False}}, {}, {"a": 1}),
}


class Walked(Protocol):
    """A text within a schema: `mask` before each token that it takes."""

    def mask(self) -> None: ...
    def take(self, token: int) -> bool: ...
    def ended(self) -> bool: ...


class Guidance:
    """llguidance, as this package uses it."""

    def __init__(self, target: HFTarget, eos: int) -> None:
        assert target.text is not None
        self.words = read_tokenizer(written(target.text), target.vocab, [eos])

    def read(self, schema: Schema) -> "Guidance":
        """A text of the schema. Raises ValueError if it cannot be read."""
        made = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=LAYOUT)
        self.matcher = llguidance.LLMatcher(self.words, made, log_level=0)
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())
        return self

    def mask(self) -> None:
        self.matcher.compute_bitmask()

    def take(self, token: int) -> bool:
        return bool(self.matcher.validate_tokens([token])) and bool(self.matcher.consume_token(token))

    def ended(self) -> bool:
        return bool(self.matcher.is_accepting())


class XGrammar:
    """XGrammar, with the same layout."""

    def __init__(self, target: HFTarget, eos: int) -> None:
        import xgrammar

        self.xg: Any = xgrammar
        assert target.text is not None
        info = self.xg.TokenizerInfo.from_huggingface(
            target.text.tokenizer, vocab_size=target.vocab, stop_token_ids=[eos]
        )
        self.compiler = self.xg.GrammarCompiler(info, cache_enabled=False)
        self.bits = self.xg.allocate_token_bitmask(1, target.vocab)

    def read(self, schema: Schema) -> "XGrammar":
        """A text of the schema. Raises if it cannot be read."""
        how: Any = {"any_whitespace": False, "separators": (", ", ": "), "strict_mode": False}
        self.matcher = self.xg.GrammarMatcher(self.compiler.compile_json_schema(json.dumps(schema), **how))
        return self

    def mask(self) -> None:
        self.matcher.fill_next_token_bitmask(self.bits)

    def take(self, token: int) -> bool:
        return bool(self.matcher.accept_token(token))

    def ended(self) -> bool:
        return bool(self.matcher.is_completed())


ENGINES: dict[str, Callable[[HFTarget, int], Any]] = {"llguidance": Guidance, "xgrammar": XGrammar}


def said(target: HFTarget, engine: Any, schema: Schema, value: Any) -> bool:
    """Whether an engine lets this value be said, as json.dumps writes it."""
    assert target.text is not None
    text: Walked = engine.read(schema)
    return all(map(text.take, target.text.ids(json.dumps(value, ensure_ascii=False)))) and text.ended()


def keeps(target: HFTarget, engine: Any) -> dict[str, str]:
    """Of every keyword: kept; refused, with an error; or what goes wrong in silence."""
    found = {}
    for name, (schema, valid, invalid) in KEYWORDS.items():
        try:
            yes, no = (said(target, engine, schema, value) for value in (valid, invalid))
        except Exception:  # each engine has errors of its own
            found[name] = "refused"
            continue
        found[name] = "kept" if yes and not no else "forbids valid values" if not yes else "ignored"
    return found


def timed(engine: Any, schemas: Sequence[Schema], texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Milliseconds to read a schema, and microseconds of a mask, behind a round that is not timed."""
    reading, masks, refused = list[float](), list[float](), 0
    for schema, tokens in zip(schemas, texts, strict=True):
        began = perf_counter()
        try:
            text: Walked = engine.read(schema)
        except Exception:
            refused += 1
            continue
        reading.append(1e3 * (perf_counter() - began))
        masks += _masks(text, tokens)
    ordered = sorted(masks)
    figures = {"median": median(ordered), "mean": sum(ordered) / len(ordered)}
    figures |= {"99 %": ordered[len(ordered) * 99 // 100], "most": ordered[-1]}
    read = {"median": median(reading), "most": max(reading)}
    return {
        "read_ms": digits(read),
        "mask_us": digits(figures),
        "masks": len(masks),
        "schemas_refused": refused,
    }


def _masks(text: Walked, tokens: Sequence[int]) -> Iterator[float]:
    for token in tokens:
        began = perf_counter()
        text.mask()
        yield 1e6 * (perf_counter() - began)
        if not text.take(token):  # the engines differ in how they write a value
            break


def compare(target: HFTarget, count: int, new: int) -> dict[str, Any]:
    """Both engines, over answers of the target to the first pairs."""
    asked = list(islice(pairs(300), count))
    texts = []
    for pair in asked:
        how: Any = {"json_schema": pair.schema, "max_new_tokens": new, "temperature": 1.0, "seed": 3}
        made = generate(target, pair.prompt, "suffix", **how)
        texts.append([token for token in made.tokens if token != target.generation_config.eos_token_id])
    found = {}
    for name, make in ENGINES.items():
        engine = make(target, target.generation_config.eos_token_id)
        timed(engine, [pair.schema for pair in asked[:5]], texts[:5])
        kept = keeps(target, engine)
        counts = {word: list(kept.values()).count(word) for word in sorted(set(kept.values()))}
        every = timed(engine, [pair.schema for pair in asked], texts)
        found[name] = every | {"keywords": len(kept), "counts": counts, "by_keyword": kept}
    return found


def main(
    target: Annotated[str, typer.Argument()],
    json: Annotated[str, cli.option("the result", "FILE")],
    limit: Annotated[int, cli.option("answers along which masks are timed", "N")] = 60,
    max_new_tokens: Annotated[int, cli.option("of an answer", "N")] = 80,
    dtype: Annotated[str, cli.option("of the target", "NAME")] = "bfloat16",
) -> None:
    """Compare, print, store."""
    check_writable(json)
    loaded = load_target(target, dtype)
    found = compare(loaded, limit, max_new_tokens)
    versions = {name: version(name) for name in ENGINES}
    write_json(json, heading(loaded) | {"engines": versions, "results": found})
    cli.out.print(found)


if __name__ == "__main__":
    run(main)
