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
    """What was read of one text. Its `parts` are of the target's cache, then of what the drafter holds by
    token: how many tokens it holds more than the target's, and copies of its row."""

    tokens: list[int]
    salt: int
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
        """Keep what was read of the text in a row: its `tokens`."""
        if not LEAST <= len(tokens) <= self.most:
            return
        state.before_copies()
        parts = []
        for _, _, value in _by_token(cache, state):
            if isinstance(value, KVCache):
                parts.append((int(value.lengths[row]) - len(tokens), value.row(row)))
            else:
                parts.append((0, [value[row].clone()]))
        self._prefixes = [
            old for old in self._prefixes if old.salt != salt or old.tokens != tokens[: len(old.tokens)]
        ]
        self._prefixes.append(Prefix(tokens, salt, parts))
        while self.tokens > self.most:
            del self._prefixes[0]

    def take(self, prompt: Sequence[int], salt: int, cache: KVCache, state: State, row: int) -> int:
        """Fill a row, which has read nothing, with what is known of a prompt's beginning. Returns how many
        tokens need not be read."""
        own = [prefix for prefix in self._prefixes if prefix.salt == salt]
        best = max(own, key=lambda prefix: prefix.shared(prompt), default=None)
        if best is None or (shared := best.shared(prompt)) < LEAST:
            return 0
        self._prefixes.remove(best)
        self._prefixes.append(best)
        for (owner, name, value), (more, stored) in zip(
            list(_by_token(cache, state)), best.parts, strict=True
        ):
            if isinstance(value, KVCache):
                value.fill(row, stored, max(0, shared + more))
            else:
                setattr(owner, name, _filled(value, row, stored[0][:shared]))
        return shared


def _by_token(cache: KVCache, state: State) -> Iterator[tuple[Any, str, KVCache | Tensor]]:
    """The target's cache, and of a drafter's state what it holds by token, with owners and names. What else
    it holds may be of tokens that another text does not share: nobody guesses from those."""
    yield None, "", cache
    for owner, name, value in state.fields():
        if isinstance(value, KVCache) or name in owner.by_token:
            yield owner, name, value


def _filled(held: Tensor, row: int, stored: Tensor) -> Tensor:
    """The same with another row, widened where that one is longer."""
    if (more := len(stored) - held.shape[1]) > 0:
        held = torch.cat([held, held.new_zeros(len(held), more, *held.shape[2:])], 1)
    held[row, : len(stored)] = stored
    return held
