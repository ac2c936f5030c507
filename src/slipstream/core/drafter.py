"""The Drafter protocol: three methods, which every method of drafting fits."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.cache import KVCache
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import Tree

S = TypeVar("S", bound="State")
FINAL, INPUT, CACHE = "final", "input of block ", "cache of block "  # taps; a block's number follows


@dataclass
class State:
    """What a drafter knows of its B rows. Every tensor field leads with B, so that rows come and go; so do
    caches, and the states of drafters that it is made of."""

    root: Int[Tensor, " B"]  # chosen by the target, not yet read by it

    @property
    def parts(self) -> list["State"]:
        """This state and all that are in it."""
        return [
            self,
            *(part for value in vars(self).values() if isinstance(value, State) for part in value.parts),
        ]

    def select(self: S, rows: Sequence[int]) -> S:
        """The state of some of the rows."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.root.device)
        kept: dict[str, Any] = {
            name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        kept |= {
            name: value.select(list(rows))
            for name, value in vars(self).items()
            if isinstance(value, KVCache | State)
        }
        return replace(self, **kept)

    def insert(self: S, other: S) -> S:
        """The state of these rows followed by another's."""
        pairs = [(name, value, vars(other)[name]) for name, value in vars(self).items()]
        joined: dict[str, Any] = {
            name: torch.cat([mine, theirs]) for name, mine, theirs in pairs if isinstance(mine, Tensor)
        }
        joined |= {
            name: mine.insert(theirs) for name, mine, theirs in pairs if isinstance(mine, KVCache | State)
        }
        return replace(self, **joined)


@dataclass(frozen=True)
class Ends:
    """What a drafter borrows from its target: the two ends of the model, and how it is called.

    Attributes:
        embed: token ids to vectors, H wide.
        head: the LM head's weight; `bias` where it has one.
        config: the target's own configuration.
        fingerprint: what a drafter directory is held against.
        compiles: the target's passes are compiled, and the drafter's own shall be.
        place: the machine, precision and compile setting, as `machine.place` says it: what a tuned tree is
            good for.
        tokenizer: what a draft model must read and write alike.
        part: some of the target's blocks between the same ends, as a model of its own (`Target.part`).
    """

    embed: torch.nn.Module
    head: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None
    config: Any
    fingerprint: str
    compiles: bool = False
    place: str = ""
    tokenizer: Any = None
    part: Callable[..., Any] | None = None


class Drafter(ABC):
    """Guesses ahead. State lives in `State`, never on the drafter; its learned maths is one `forward` of its
    own.

    Attributes:
        taps: what `absorb` wants to see of the target, named exactly: "final" (what the LM head reads),
            "input of block i", or "cache of block i" (its keys, turned, and values, of all heads). Their
            concatenation is the feature; of states F = taps·H.
        rows: the most rows that a tree of this drafter takes in a target pass, probes included.
        depth: the deepest tree it proposes.
        law: how its trees are verified: "coupled", or "multi-round" for children sampled from a law on the
            tree.
        peeks: its candidates depend on `sampler.noise`, so that only the coupled law is exact for it.
        probes: vectors [M, H] that the prompt's last token hosts; later trees carry their own.
        memory: keys and values [L, 2, P, heads, D] that its probes read in the target's attention.
    """

    taps: tuple[str, ...] = ()
    rows: int = 1
    depth: int = 0
    law: str = "coupled"
    peeks: bool = False
    probes: Float[Tensor, "M H"] | None = None
    memory: Float[Tensor, "L 2 P heads D"] | None = None

    @abstractmethod
    def start(self, batch: int, capacity: int, device: torch.device) -> State:
        """A state for `batch` rows that will hold at most `capacity` tokens each."""

    @abstractmethod
    def absorb(self, span: Span, state: State) -> None:
        """Read what the target has just read; afterwards `state.root` is the last of `span.nexts`. A drafter
        that sat out some rounds absorbs their spans later, in order."""

    @abstractmethod
    def propose(self, state: State, sampler: Sampler) -> Tree:
        """Guess. A drafter that looks at `sampler.noise` says so (`peeks`)."""
