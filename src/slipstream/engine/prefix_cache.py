"""Prefixes: what was read of ended texts, kept for prompts that begin alike.

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
    """What was read of one text.

    Attributes:
        tokens: those that the target has read.
        salt: texts of another salt do not share it.
        parts: of the target's cache and then of what the drafter holds by token: how many tokens it holds
            more than the target's, and copies of its row.
    """

    tokens: list[int]
    salt: int
    parts: list[tuple[int, list[Tensor]]]

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens a prompt may take: those that both begin with, without the last. A drafter may
        know, with each token, the one behind it; and the prompt's last token must be read."""
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, prompt, strict=False))
        return sum(1 for _ in pairs) - 1


class Prefixes:
    """The prefixes of a session, those that were used last.

    Args:
        most: tokens of all of them together, at most.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: list[Prefix] = []  # the one that was used last stands last

    @property
    def tokens(self) -> int:
        """Of all of them together."""
        return sum(len(each.tokens) for each in self._kept)

    def put(self, tokens: list[int], salt: int, cache: KVCache, state: State, row: int) -> None:
        """Keep what was read of the text in a row: its `tokens`."""
        if not LEAST <= len(tokens) <= self.most:
            return
        state.before_copies()
        parts = [(_more(each, tokens, row), _row(each, row)) for _, _, each in _held(cache, state)]
        self._kept = [
            each for each in self._kept if each.salt != salt or each.tokens != tokens[: len(each.tokens)]
        ]
        self._kept.append(Prefix(tokens, salt, parts))
        while self.tokens > self.most:
            del self._kept[0]

    def take(self, prompt: Sequence[int], salt: int, cache: KVCache, state: State, row: int) -> int:
        """Fill a row, which has read nothing, with what is known of a prompt's beginning. Returns how many
        tokens need not be read."""
        own = [each for each in self._kept if each.salt == salt]
        best = max(own, key=lambda each: each.shared(prompt), default=None)
        if best is None or (shared := best.shared(prompt)) < LEAST:
            return 0
        self._kept.remove(best)
        self._kept.append(best)
        held = list(_held(cache, state))
        for (owner, name, value), (more, stored) in zip(held, best.parts, strict=True):
            if isinstance(value, KVCache):
                value.fill(row, stored, max(0, shared + more))
            else:
                setattr(owner, name, _filled(value, row, stored[0][:shared]))
        return shared


def _more(held: KVCache | Tensor, tokens: Sequence[int], row: int) -> int:
    """How many tokens a drafter's cache holds more than the target's."""
    return int(held.lengths[row]) - len(tokens) if isinstance(held, KVCache) else 0


def _held(cache: KVCache, state: State) -> Iterator[tuple[Any, str, KVCache | Tensor]]:
    """The target's cache, and of a drafter's state what it holds by token, with owners and names. What else
    it holds may be of tokens that another text does not share: nobody guesses from those."""
    yield None, "", cache
    for owner, name, value in state.fields():
        if isinstance(value, KVCache) or name in owner.by_token:
            yield owner, name, value


def _row(held: KVCache | Tensor, row: int) -> list[Tensor]:
    """A copy of one row."""
    return held.row(row) if isinstance(held, KVCache) else [held[row].clone()]


def _filled(held: Tensor, row: int, stored: Tensor) -> Tensor:
    """The same with another row, widened where that one is longer."""
    if (more := len(stored) - held.shape[1]) > 0:
        held = torch.cat([held, held.new_zeros(len(held), more, *held.shape[2:])], 1)
    held[row, : len(stored)] = stored
    return held
