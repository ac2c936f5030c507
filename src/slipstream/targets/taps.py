"""Taps: states inside a pass that drafters read."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.core.cache import KVCache
from slipstream.core.drafter import CACHE, FINAL, INPUT
from slipstream.targets.inside import LOOKS, Blocks, View


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

    def take(self, taps: Sequence[str], cache: KVCache, view: View) -> Float[Tensor, "B R F"] | None:
        """What the pass left, side by side; None without taps."""
        for tap in taps:
            if tap not in self._states:  # of the cache, or of modules that were not called
                self._states[tap] = self._taken(tap, cache, view)
            if self._states[tap].dim() > 3 and not tap.startswith(CACHE):
                raise ValueError(
                    f"this target hands on several streams of states at {tap!r}, which no head can read: "
                    "take a drafter that reads the final states, such as eagle"
                )
        features = torch.cat([self._states[tap] for tap in taps], -1) if taps else None
        self._states.clear()
        return features

    def _taken(self, tap: str, cache: KVCache, view: View) -> Tensor:
        if tap == FINAL:
            assert view.final is not None
            return view.final
        block = self._index(tap)
        return cache.written(block) if tap.startswith(CACHE) else view.took[self._blocks[block]]

    def _hook(self, tap: str) -> None:
        states = self._states

        def after(module: nn.Module, args: Any, out: Any) -> None:
            states[FINAL] = out.last_hidden_state

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            states[tap] = args[0] if args else kwargs["hidden_states"]

        for hook in (after, before):
            setattr(hook, LOOKS, True)
        block = self._blocks[self._index(tap)] if tap != FINAL else None
        if block is None:
            self._decoder.register_forward_hook(after)
        elif not tap.startswith(CACHE):  # the cache is read after the pass
            block.register_forward_pre_hook(before, with_kwargs=True)
        self._watched.add(tap)

    def _index(self, tap: str) -> int:
        """The block that a tap names. Raises ValueError."""
        name, _, block = tap.rpartition(" ")
        if f"{name} " in (INPUT, CACHE) and block.isdecimal() and int(block) < len(self._blocks):
            return int(block)
        last = len(self._blocks) - 1
        raise ValueError(
            f"Unknown tap: {tap!r}. Available: '{FINAL}', '{INPUT}0' to '{INPUT}{last}', '{CACHE}0' to "
            f"'{CACHE}{last}'"
        )
