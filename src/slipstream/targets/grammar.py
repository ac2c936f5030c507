"""Grammars over a target's tokens, by llguidance: JSON schemas, regular expressions, Lark, choices."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import llguidance
import llguidance.hf
import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from slipstream.core.grammar import DeadEnd, Grammar, Walk
from slipstream.core.target import Target
from slipstream.files import parsed
from slipstream.targets.prompts import HFText, check_readable

LARGEST = 2**18  # characters of a grammar
WORDS = "words of grammars"  # where a target keeps its tokens as llguidance reads them
# As json.dumps writes it, so that what stands between values is known beforehand.
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@final
class LLWalk(Walk):
    """A walk of llguidance's; `matcher` is None where the text has ended, as tokens of `eos` do."""

    def __init__(self, matcher: llguidance.LLMatcher | None, vocab: int, eos: frozenset[int]) -> None:
        self._matcher, self._vocab, self._eos = matcher, vocab, eos
        self._behind: dict[int, Walk | None] = {}  # drafts and the walk of verification ask for the same

    @cached_property
    def allowed(self) -> Bool[Tensor, " V"] | None:
        if self._matcher is None:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check(self._matcher)
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()
        if mask.count_nonzero() == 1 and not self._bears(int(mask.int().argmax())):
            others = (token not in self._eos and self._bears(token) for token in range(self._vocab))
            mask = torch.tensor(list(others))
        if not mask.any():
            raise DeadEnd("the grammar cannot go on: it allows no token behind what it led to")
        return torch.nn.functional.pad(mask, (0, max(0, self._vocab - len(mask))))[: self._vocab]

    @cached_property
    def forced(self) -> list[int]:
        if self._matcher is None:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check(self._matcher)
        return tokens[: self._matcher.validate_tokens(tokens)]

    def behind(self, token: int) -> Walk | None:
        if self._matcher is None:
            return self
        if token not in self._behind:
            self._behind[token] = self._step(token)
        return self._behind[token]

    def _step(self, token: int) -> Walk | None:
        assert self._matcher is not None
        if token in self._eos:
            ends = self.allowed is not None and bool(self.allowed[token])
            return LLWalk(None, self._vocab, self._eos) if ends else None
        if not self._matcher.validate_tokens([token]):
            self._check(self._matcher)
            return None
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)
        self._check(matcher)
        return LLWalk(matcher, self._vocab, self._eos)

    def _bears(self, token: int) -> bool:
        """Whether a token that is allowed alone may come. A forced text goes through the tokenizer, which may
        write another: it composes accents, or drops what it has no tokens for."""
        assert self._matcher is not None
        return token in self._eos or self._matcher.validate_tokens([token]) == 1

    def _check(self, matcher: llguidance.LLMatcher) -> None:
        if matcher.is_error():
            raise DeadEnd(f"the grammar cannot go on: {_line(matcher.get_error())}")


@final
class LLGrammar(Grammar):
    """A grammar that llguidance has read."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int, eos: frozenset[int]) -> None:
        self._matcher, self._vocab, self._eos = matcher, vocab, eos

    def begin(self) -> Walk:
        return LLWalk(self._matcher.deep_copy(), self._vocab, self._eos)


def read_grammar(target: Target, kind: str, source: Any, eos: Iterable[int]) -> Grammar:
    """A grammar for a target's answers.

    Args:
        kind: "json_schema": a JSON schema, as a dictionary or as text; "regex": a regular expression that
            the whole answer matches; "grammar": in Lark's form, or llama.cpp's (GBNF); "choice": texts, one
            of which is the answer.
        eos: tokens that end an answer.

    Raises:
        ValueError: it cannot be read, or allows no text; the target has no tokenizer, or one whose tokens are
            not bytes of text; nothing would end an answer.
    """
    try:
        text = _written(kind, source)
    except RecursionError as error:
        raise ValueError(f"{kind} is nested too deeply") from error
    eos = sorted(token for token in eos if token < target.vocab)
    if not eos:
        raise ValueError(f"{kind} needs a token that ends an answer: give eos_token_ids")
    matcher = llguidance.LLMatcher(words(target, eos), text, log_level=0)
    if matcher.is_error():
        raise ValueError(f"{kind} cannot be read: {_line(matcher.get_error())}")
    grammar = LLGrammar(matcher, target.vocab, frozenset(eos))
    try:
        _ = grammar.begin().allowed
    except DeadEnd as error:
        raise ValueError(f"{kind} cannot be read: it allows no text") from error
    return grammar


def _written(kind: str, source: Any) -> str:
    """The grammar as llguidance reads it. Raises ValueError."""
    check_readable(source, kind)
    given = source if isinstance(source, str) else json.dumps(source, default=repr)
    if len(given) > LARGEST:
        raise ValueError(f"{kind} has {len(given):,} characters: at most {LARGEST:,} are read")
    if kind == "json_schema":
        schema = _parsed(source) if isinstance(source, str) else source
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, Mapping):
            raise ValueError(f"json_schema is a {type(schema).__name__}: give a JSON object")
        made: str = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=LAYOUT)
        return made
    if kind == "choice":
        listed = isinstance(source, Sequence) and not isinstance(source, str)
        if not listed or not source or not all(isinstance(each, str) and each for each in source):
            raise ValueError(f"choice is {source!r:.60}: give a list of texts, none of them empty")
        return "start: " + " | ".join(map(json.dumps, source))
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{kind} is {source!r:.60}: give it as text")
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(source))
    try:
        return llguidance.grammar_from("grammar", source)
    except Exception as error:  # of many types, from the reader of llama.cpp's form
        raise ValueError(f"grammar cannot be read: {_line(str(error))}") from error


def _parsed(text: str) -> Any:
    try:
        return parsed(text)
    except ValueError as error:  # a long number's has advice for programmers behind a semicolon
        raise ValueError(f"json_schema is no JSON: {str(error).split(';')[0]}") from error


def _line(message: str) -> str:
    """The first line of a message, shortened; of a regular expression's, the reason behind what it quotes."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    reasons = [line.removeprefix("error") for line in lines[1:] if line.startswith("error: ")]
    return "".join([*(lines or ["no reason is given"])[:1], *reasons[:1]]).replace("::", ":")[:200]


def words(target: Target, eos: Sequence[int]) -> llguidance.LLTokenizer:
    """The target's tokens, read once and kept with it. Raises ValueError."""
    kept: dict[Any, llguidance.LLTokenizer] = vars(target).setdefault(WORDS, {})
    key = target.vocab, tuple(eos)
    if key not in kept:
        if not isinstance(target.text, HFText):
            raise ValueError(f"target {target.name} has no tokenizer: a grammar needs its tokens' text")
        try:
            fast: Any = target.text.tokenizer
            made = llguidance.hf.from_tokenizer(fast, target.vocab, list(eos))
        except ValueError:  # its decoder is of another kind
            made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Plain(target.text, target.vocab, eos)))
        kept[key] = made
    return kept[key]


class Plain:
    """A tokenizer whose tokens' texts, one behind the other, are the text. Raises ValueError for others."""

    def __init__(self, text: HFText, vocab: int, eos: Sequence[int]) -> None:
        self._text = text
        words = [text.decode([token], special=True) for token in range(vocab)]
        pairs = [text.decode([token, (7 * token + 1) % vocab], special=True) for token in range(vocab)]
        if pairs != [word + words[(7 * token + 1) % vocab] for token, word in enumerate(words)]:
            raise ValueError(
                f"target {text.name} has tokens that are not bytes of text: grammars cannot be kept"
            )
        self.eos_token_id, self.bos_token_id = eos[0], None
        self.special_token_ids = sorted({*eos, *text.tokenizer.all_special_ids})
        self.tokens = [word.encode() for word in words]

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of text."""
        return self._text.ids(text if isinstance(text, str) else text.decode("utf-8", "ignore"))
