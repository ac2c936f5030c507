"""The Drafter protocol: three methods, which every method of drafting fits."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.cache import BLOCK, KVCache
from slipstream.core.sampling import Sampler
from slipstream.core.shape import Shape
from slipstream.core.span import Span
from slipstream.core.tree import Tree

FINAL, INPUT, CACHE = "final", "input of block ", "cache of block "  # taps; a block's number follows


@dataclass
class State:
    """What a drafter knows of its B rows. Its fields are tensors that lead with B, caches of B rows, and the
    states of the drafters that it is made of."""

    root: Int[Tensor, " B"]  # chosen by the target, not yet read by it

    @property
    def parts(self) -> list["State"]:
        """This state and all that are in it."""
        inner = [value for value in vars(self).values() if isinstance(value, State)]
        return [self, *(part for state in inner for part in state.parts)]

    @property
    def caches(self) -> list[KVCache]:
        """The caches of all parts."""
        return [value for part in self.parts for value in vars(part).values() if isinstance(value, KVCache)]

    def place_behind(self, other: "State") -> None:
        """Let the caches, which are still empty, be windows behind another state's."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            for name, value in vars(theirs).items():
                if isinstance(value, KVCache):
                    setattr(mine, name, value.window(len(self.root)))

    def select(self, order: list[int]) -> None:
        """Go on with some of the rows, in that order."""
        index = torch.tensor(order, dtype=torch.long, device=self.root.device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[index])
            elif isinstance(value, KVCache | State):
                value.select(order)

    def join(self, other: "State") -> None:
        """Take in the rows of another state, whose caches are windows behind this one's."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, _stacked(value, vars(other)[name]))
            elif isinstance(value, KVCache | State):
                value.join(vars(other)[name])


def _stacked(a: Tensor, b: Tensor) -> Tensor:
    """The rows of both. Columns that one of two texts has no room for yet are zeros."""
    if a.dim() > 1 and a.shape[1] != b.shape[1]:
        a, b = (_widened(x, max(a.shape[1], b.shape[1])) for x in (a, b))
    return torch.cat([a, b])


def _widened(text: Int[Tensor, "B S"], slots: int) -> Int[Tensor, "B S1"]:
    """The same with zeros behind, by blocks, if it has fewer slots."""
    if slots <= text.shape[1]:
        return text
    return torch.nn.functional.pad(text, (0, -(-slots // BLOCK) * BLOCK - text.shape[1]))


def appended(text: Int[Tensor, "B S"], span: Span) -> Int[Tensor, "B S1"]:
    """Texts with a span's tokens behind them, in place where there is room. A text may start with no slots;
    the last slot is scratch."""
    text = _widened(text, span.cache.bound + 1)
    at = span.start[:, None] + torch.arange(span.tokens.shape[1], device=text.device)
    return text.scatter_(1, at.where(span.mask, text.shape[1] - 1), span.tokens)


class Drafter(ABC):
    """Guesses ahead. What changes from round to round is in its `State`, never on the drafter. What it has
    learned is one `forward`, which training and drafting share.

    Attributes:
        taps: what `absorb` reads of the target, named exactly: "final" (what the LM head reads), "input of
            block i", or "cache of block i" (keys, turned, and values of all heads). A feature is their
            concatenation; of states its width is F = taps·H.
        rows: the most rows that its own trees take in a target pass, probes included.
        depth: the deepest of its own trees.
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
    def start(self, batch: int, device: torch.device) -> State:
        """A state for `batch` rows that have read nothing. Whatever holds a text grows with it."""

    @abstractmethod
    def absorb(self, span: Span, state: State) -> None:
        """Read what the target has just read; afterwards `state.root` is the last of `span.nexts`. A drafter
        that sat out some rounds absorbs their spans later, in order."""

    @abstractmethod
    def propose(self, state: State, sampler: Sampler, shape: Shape | None = None) -> Tree:
        """Guess. A drafter that reads `sampler.noise` says so (`peeks`).

        Args:
            shape: the tree to grow in this round; default: the drafter's own. One that looks its guesses up
                takes the depth as a limit, and one whose trees have a form of their own ignores it.

        Raises:
            ValueError: it cannot grow this shape.
        """

    def room(self, shape: Shape | None = None) -> int:
        """Slots of a cache that a round may fill behind the text. Raises ValueError as `propose` does."""
        return self.rows
