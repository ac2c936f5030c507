"""A step captured once and replayed: on a GPU hundreds of launches become two.

Tensors that change from step to step stay where they are, because a capture fixes memory. Sizes are those
of caches filled to the next multiple of `SPAN`; a fuller cache needs another capture.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.core.drafter import State
from slipstream.core.kv_cache import KVCache
from slipstream.core.target import Target

SPAN = 256
T = TypeVar("T")
# Runs a function. Returns what the function returns, which every replay fills anew, and the replay.
Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


def cuda_graph(function: Callable[[], T], pool: Any = None) -> tuple[T, Callable[[], None]]:
    """A `Record` by a CUDA graph. Libraries and compilers set themselves up in a first run outside of it.
    `pool`: memory that it shares with other graphs, of which none runs meanwhile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = function()
    return result, partial(_replay, graph, function)


def _replay(graph: Any, reads: Callable[[], Any]) -> None:
    """Replay a graph. It reads tensors that its function holds: freed ones are soon another's memory."""
    graph.replay()


def recorder(target: Target) -> Record | None:
    """How steps with this target are captured, where they are."""
    return cuda_graph if target.captures else None


@dataclass(eq=False)
class Captured:
    """Steps over the same rows, in two halves: `propose` makes a tree, and `check` reads it with the target,
    keeps what agrees and lets the drafter update it."""

    propose: Callable[[], Any]
    check: Callable[[Any], Any]
    cache: KVCache  # it and the state are all that changes, in place or by tensors of the same shapes
    state: State
    depth: int  # of the trees
    record: Record

    def __post_init__(self) -> None:
        self.caches = [self.cache, *self.state.caches]
        self._places: list[tuple[Any, str]] = [(cache, "lengths") for cache in self.caches]
        self._places += [(owner, name) for owner, name, x in self.state.fields() if isinstance(x, Tensor)]
        self._until = -1  # the largest bound of the cache that the captures are good for
        self._held: list[Tensor] = []  # the tensors in these places that the captures read and write
        self._memory: list[list[Tensor]] = []  # keys and values of all storages

    def step(self) -> Any:
        """One step: what `check` returns, filled anew by the next one."""
        bound = self.cache.bound
        if bound > self._until or self._moved():
            self._capture(rounded(bound))
        for (owner, name), held in zip(self._places, self._held, strict=True):
            if (now := getattr(owner, name)) is not held:  # a step that was not captured came between
                held.copy_(now)
                setattr(owner, name, held)
        self._propose()
        self._check()
        for cache in self.caches:
            cache.flush([bound + self.depth + 1])
        return self._result

    def _moved(self) -> bool:
        shapes = [getattr(*place).shape for place in self._places]
        memory = zip(self.caches, self._memory, strict=True)
        return shapes != [held.shape for held in self._held] or any(
            cache.storage.stored is not old for cache, old in memory
        )

    def _capture(self, until: int) -> None:
        self._until = until
        before = [getattr(*place).clone() for place in self._places]
        for cache in self.caches:
            cache.flush([until])
        self.check(self.propose())  # storages and texts grow to what the captured steps will need
        self._memory = [cache.storage.stored for cache in self.caches]
        tree, self._propose = self.record(lambda: self._half(self.propose))
        self._propose()  # a check reads the tree before it is captured
        self._result, self._check = self.record(lambda: self._half(lambda: self.check(tree)))
        self._held = [getattr(*place) for place in self._places]
        for held, value in zip(self._held, before, strict=True):
            held[tuple(map(slice, value.shape))] = value

    def _half(self, half: Callable[[], Any]) -> Any:
        """One half at the sizes of full caches. New tensors are copied to where the old ones were."""
        for cache in self.caches:
            cache.flush([self._until])
        before = [getattr(*place) for place in self._places]
        result = half()
        for (owner, name), old in zip(self._places, before, strict=True):
            old.copy_(getattr(owner, name))
            setattr(owner, name, old)
        return result


def rounded(length: int) -> int:
    """The next multiple of `SPAN`."""
    return -(-length // SPAN) * SPAN
