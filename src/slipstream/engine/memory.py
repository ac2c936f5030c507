"""Memory that keys and values of texts take, in the target's cache and the drafter's, and how many fit."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.core.drafter import Drafter
from slipstream.core.kv_cache import KVCache
from slipstream.core.target import Target
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request

GIB = 2**30


@dataclass(frozen=True)
class TextMemory:
    """Bytes of the keys and values of one text of so many tokens, the rows of a step included."""

    tokens: int
    target: int
    drafter: int

    def __str__(self) -> str:
        parts = f"{self.target / 2**20:.1f} MiB in the target, {self.drafter / 2**20:.1f} MiB in the drafter"
        return f"Keys and values of a text of {self.tokens:,} tokens: {parts}"

    @property
    def text(self) -> int:
        """Bytes in all."""
        return self.target + self.drafter

    def batch(self, gib: float, other: float = 0.0) -> int:
        """The most texts that so much memory holds beside `other` GiB. Raises ValueError where it is none."""
        if not 0 < gib < math.inf or (batch := int((gib - other) * GIB // self.text)) < 1:
            least = f"{self.text / GIB + other:.2g} GiB"
            raise ValueError(f"memory is {gib:g} GiB. {self}: give at least {least}")
        return batch


def memory(target: Target, drafter: Drafter, tokens: int) -> TextMemory:
    """What a text of `tokens` tokens takes, answer included, as the caches of a small engine show."""
    engine = Engine(target, drafter, specs=drafter.candidate_trees)
    engine.admit(Request([0]))
    engine.step(spec=drafter.candidate_trees[-1] if drafter.candidate_trees else None)

    def size(caches: Iterable[KVCache], scratch: int) -> int:
        stored = [(x, cache.prefix) for cache in caches for x in cache.storage.stored]
        return sum(x.nbytes // x.shape[3] * (prefix + tokens + scratch + 1) for x, prefix in stored)

    return TextMemory(
        tokens,
        size([engine.cache], engine.scratch_slots.target),
        size(engine.state.caches, engine.scratch_slots.drafter),
    )
