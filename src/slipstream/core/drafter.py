"""The Drafter protocol: three methods, which every method of drafting fits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import Tree

S = TypeVar("S", bound="State")


@dataclass
class State:
    """What a drafter knows of its B rows. Every tensor field leads with B, so that rows come and go."""

    root: Int[Tensor, " B"]  # chosen by the target, not yet read by it

    def select(self: S, rows: Sequence[int]) -> S:
        """The state of some of the rows."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.root.device)
        return replace(self, **{name: value[index] for name, value in self._tensors().items()})

    def insert(self: S, other: S) -> S:
        """The state of these rows followed by another's."""
        theirs = other._tensors()
        return replace(self, **{name: torch.cat([mine, theirs[name]]) for name, mine in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


class Drafter(ABC):
    """Guesses ahead. State lives in `State`, never on the drafter; its learned maths is one `forward` of its own.

    Attributes:
        taps: what `absorb` wants to see of the target, named exactly: "final" (what the LM head reads) or
            "input of block i". Their concatenation is the feature, F = taps·H.
        rows: the most rows that a tree of this drafter takes in a target pass, probes included.
        depth: the deepest tree it proposes.
        probes: vectors [M, H] that the prompt's last token hosts; later trees carry their own.
        memory: keys and values [L, 2, P, heads, D] that its probes read in the target's attention.
    """

    taps: tuple[str, ...] = ()
    rows: int = 1
    depth: int = 0
    probes: Float[Tensor, "M H"] | None = None
    memory: Float[Tensor, "L 2 P heads D"] | None = None

    @abstractmethod
    def start(self, batch: int, capacity: int, device: torch.device) -> State:
        """A state for `batch` rows that will hold at most `capacity` tokens each."""

    @abstractmethod
    def absorb(self, span: Span, state: State) -> None:
        """Read what the target has just read; afterwards `state.root` is the last of `span.nexts`. A drafter that sat
        out some rounds absorbs their spans later, in order."""

    @abstractmethod
    def propose(self, state: State, sampler: Sampler) -> Tree:
        """Guess. `sampler.noise` may be looked at under the coupled law; candidates must then not carry `Tree.law`."""
