"""Prefix cache: what was read of ended texts, kept for prompts that begin alike.

A prompt that begins as a kept text did takes that text's keys and values, and those of its drafter, and reads
only what is new. Its text stays the same: a token's keys and values depend on the tokens before it alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from slipstream.core.drafter import State
from slipstream.core.kv_cache import KVCache

LEAST = 8  # tokens that are worth to be copied


@dataclass(frozen=True)
class Prefix:
    """What was read of one text."""

    tokens: list[int]
    salt: int
    # Of the target's cache, then of what the drafter holds by token: how many tokens it holds more than the
    # target's, and copies of its row.
    parts: list[tuple[int, list[Tensor]]]

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens a prompt may take: those that both begin with, without the last. A drafter may
        know, with each token, the one behind it; and the prompt's last token must be read."""
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, prompt, strict=False))
        return sum(1 for _ in pairs) - 1


class PrefixCache:
    """The prefixes that were used last, of `most` tokens together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._prefixes: list[Prefix] = []  # the one that was used last stands last

    @property
    def tokens(self) -> int:
        """Of all of them together."""
        return sum(len(prefix.tokens) for prefix in self._prefixes)

    def put(self, tokens: list[int], salt: int, cache: KVCache, state: State, row: int) -> None:
        """Keep what was read of the text in a row, its `tokens`, if there is memory."""
        if not LEAST <= len(tokens) <= self.most:
            return
        parts = []
        try:
            state.before_copies()
            for _, _, value in _by_token(cache, state):
                if isinstance(value, KVCache):
                    parts.append((int(value.lengths[row]) - len(tokens), value.row(row)))
                else:
                    parts.append((0, [value[row].clone()]))
        except (MemoryError, torch.OutOfMemoryError):
            return
        old = [x for x in self._prefixes if x.salt != salt or x.tokens != tokens[: len(x.tokens)]]
        self._prefixes = [*old, Prefix(tokens, salt, parts)]
        while self.tokens > self.most:
            del self._prefixes[0]

    def take(self, prompt: Sequence[int], salt: int, cache: KVCache, state: State, row: int) -> int:
        """Fill an empty row with what is known of a prompt's beginning. Returns how many tokens that are."""
        own = [prefix for prefix in self._prefixes if prefix.salt == salt]
        best = max(own, key=lambda prefix: prefix.shared(prompt), default=None)
        if best is None or (shared := best.shared(prompt)) < LEAST:
            return 0
        self._prefixes.remove(best)
        self._prefixes.append(best)
        places = list(_by_token(cache, state))
        for (owner, name, value), (more, stored) in zip(places, best.parts, strict=True):
            if isinstance(value, KVCache):
                value.fill(row, stored, max(0, shared + more))
                continue
            known = stored[0][:shared]
            if (wider := len(known) - value.shape[1]) > 0:
                value = torch.cat([value, value.new_zeros(len(value), wider, *value.shape[2:])], 1)
            value[row, : len(known)] = known
            setattr(owner, name, value)
        return shared


def _by_token(cache: KVCache, state: State) -> Iterator[tuple[Any, str, KVCache | Tensor]]:
    """The target's cache, and of a drafter's state what it holds by token, with owners and names. What else
    it holds may be of tokens that another text does not share: nobody guesses from those."""
    yield None, "", cache
    for owner, name, value in state.fields():
        if isinstance(value, KVCache) or name in owner.by_token:
            yield owner, name, value
