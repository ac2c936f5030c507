"""Taps: states inside a pass that drafters read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.core.cache import KVCache
from slipstream.core.drafter import CACHE, FINAL, INPUT
from slipstream.targets.inside import LOOKS, Blocks


class Taps:
    """The taps of one model, which are named as `Drafter.taps` says. Hugging Face's own recorder keeps the
    states of all layers, by hooks inside them, which cannot be compiled.

    Args:
        decoder: it says the final states.
        blocks: the layers.
    """

    def __init__(self, decoder: nn.Module, blocks: Blocks) -> None:
        self._decoder, self._blocks = decoder, blocks
        self._states, self._watched = dict[str, Tensor](), set[str]()

    def watch(self, taps: Sequence[str]) -> None:
        """Let the next pass leave its states. Raises ValueError for a tap that there is not."""
        for tap in set(taps) - self._watched:
            self._hook(tap)
        self._states.clear()  # of a pass that failed

    def take(self, taps: Sequence[str], cache: KVCache) -> Float[Tensor, "B R F"] | None:
        """What the pass left, side by side; None without taps."""
        for tap in taps:
            if tap in self._states and self._states[tap].dim() > 3:
                raise ValueError(
                    f"this target hands on several streams of states at {tap!r}, which no head can read: "
                    "take a drafter that reads the final states, such as eagle"
                )
        features = side_by_side(taps, self._states, cache, len(self._blocks))
        self._states.clear()
        return features

    def _hook(self, tap: str) -> None:
        states = self._states

        def after(module: nn.Module, args: Any, out: Any) -> None:
            states[FINAL] = out.last_hidden_state

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            states[tap] = args[0] if args else kwargs["hidden_states"]

        for hook in (after, before):
            setattr(hook, LOOKS, True)
        block = self._blocks[index_of(tap, len(self._blocks))] if tap != FINAL else None
        if block is None:
            self._decoder.register_forward_hook(after)
        elif not tap.startswith(CACHE):  # the cache is read after the pass
            block.register_forward_pre_hook(before, with_kwargs=True)
        self._watched.add(tap)


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
