"""Taps: states inside a pass that drafters read."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.core.drafter import CACHE, FINAL, INPUT
from slipstream.core.kv_cache import KVCache


def index_of(tap: str, blocks: int) -> int:
    """The block that a tap names. Raises ValueError."""
    name, _, block = tap.rpartition(" ")
    if f"{name} " in (INPUT, CACHE) and block.isdecimal() and int(block) < blocks:
        return int(block)
    raise ValueError(
        f"Unknown tap: {tap!r}. Available: '{FINAL}', '{INPUT}0' to '{INPUT}{blocks - 1}', '{CACHE}0' to "
        f"'{CACHE}{blocks - 1}'"
    )


def side_by_side(
    taps: Sequence[str], states: Mapping[str, Tensor], cache: KVCache, blocks: int
) -> Float[Tensor, "B R F"] | None:
    """States by tap, and what a pass wrote to its cache; None without taps. Raises ValueError for a tap that
    there is not."""
    parts = [states[tap] if tap in states else cache.written(index_of(tap, blocks)) for tap in taps]
    return torch.cat(parts, -1) if parts else None
