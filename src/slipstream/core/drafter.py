"""The Drafter protocol: three methods, which every method of drafting fits."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.kv_cache import BLOCK, KVCache
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import Tree
from slipstream.core.tree_spec import TreeSpec

FINAL, INPUT, CACHE = "final", "input of block ", "cache of block "  # taps; a block's number follows


@dataclass
class State:
    """What a drafter knows of its B rows: tensors [B, …], caches of B rows, and states of inner drafters.

    Attributes:
        by_token: names of tensors that hold a slot for each token of a text, which the tokens before it and
            itself decide. A text that begins alike takes them over, as it does caches; all else begins anew.
    """

    by_token: ClassVar[tuple[str, ...]] = ()
    root: Int[Tensor, " B"]  # chosen by the target, not yet read by it

    def held(self) -> Iterator[tuple["State", str, Any]]:
        """(owner, field's name, value) of every field of this state and of the states in it. Inner states
        themselves are left out."""
        for name, value in vars(self).items():
            if isinstance(value, State):
                yield from value.held()
            else:
                yield self, name, value

    @property
    def caches(self) -> list[KVCache]:
        return [value for _, _, value in self.held() if isinstance(value, KVCache)]

    def share_within(self, salts: Int[Tensor, " B"]) -> None:
        """What texts of other salts have said is not guessed from in these rows."""
        for value in vars(self).values():
            if isinstance(value, State):
                value.share_within(salts)

    def flush(self) -> None:
        """Read what was put off, so that every row holds what it has been told."""

    def before_copies(self) -> None:
        """Make ready for a row to be copied, for texts that begin alike."""
        self.flush()

    def place_behind(self, other: "State") -> None:
        """Let the caches, which are still empty, be windows behind another state's."""
        for (part, name, _), (_, _, value) in zip(self.held(), other.held(), strict=True):
            if isinstance(value, KVCache):
                setattr(part, name, value.window(len(self.root)))

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
        for (part, name, value), (_, _, behind) in zip(self.held(), other.held(), strict=True):
            if isinstance(value, Tensor):
                setattr(part, name, _stacked(value, behind))
            elif isinstance(value, KVCache):
                value.join(behind)


def _stacked(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() > 1 and a.shape[1] != b.shape[1]:
        a, b = (_widened(x, max(a.shape[1], b.shape[1])) for x in (a, b))
    return torch.cat([a, b])


def _widened(text: Int[Tensor, "B S"], slots: int) -> Int[Tensor, "B S1"]:
    """The same with zeros behind, by blocks, if it has fewer slots."""
    more = -(-slots // BLOCK) * BLOCK - text.shape[1]
    return torch.nn.functional.pad(text, (0, more)) if slots > text.shape[1] else text


def appended(text: Int[Tensor, "B S"], span: Span) -> Int[Tensor, "B S1"]:
    """Texts with a span's tokens behind them, in place where there is room. A text may start with no slots;
    the last slot is scratch."""
    text = _widened(text, span.cache.bound + 1)
    at = span.start[:, None] + torch.arange(span.tokens.shape[1], device=text.device)
    return text.scatter_(1, at.where(span.mask, text.shape[1] - 1), span.tokens)


class Room(NamedTuple):
    """Slots that a round may fill behind the text in each cache: the target's, and the drafter's own, which
    hold draft steps, too."""

    target: int
    own: int

    @classmethod
    def largest(cls, rooms: Iterable["Room"]) -> "Room":
        return cls(*map(max, zip(*rooms, strict=True)))


class Drafter(ABC):
    """Guesses ahead. What changes from round to round is in the `State` that `start` returns, never on the
    drafter; a subclass names its own type of state in `update` and `propose`.

    Attributes:
        taps: what `update` reads of the target: "final" (what the LM head reads), "input of block i", or
            "cache of block i" (rotated keys, and values, of all heads). A feature [F] is their concatenation.
        rows: the most rows that its own trees take in a target pass, probes included.
        depth: of its deepest own tree.
        law: how its trees are verified: "coupled", or "multi-round" for children sampled from `Tree.law`.
        uses_target_noise: its candidates depend on `sampler.noise`, so that only the coupled law is exact
            for it.
        remembers: it guesses from texts that have ended, too, which its trees then show.
        probes: vectors [M, H] that the prompt's last token hosts; later trees carry their own.
        memory: keys and values [L, 2, P, heads, D] that its probes read in the target's attention.
        rungs: trees, the bare root first, of which a policy chooses one in each round. Empty: the drafter
            always grows its own tree.
        tuned: those of the rungs that `tune` found.
        pace: seconds in which it reads a token that it put off; 0 where that is not known.
        name: the name under which the costs of its rungs are stored.
    """

    taps: tuple[str, ...] = ()
    rows: int = 1
    depth: int = 0
    law: str = "coupled"
    uses_target_noise: bool = False
    remembers: bool = False
    probes: Float[Tensor, "M H"] | None = None
    memory: Float[Tensor, "L 2 P heads D"] | None = None
    rungs: tuple[TreeSpec, ...] = ()
    tuned: tuple[TreeSpec, ...] = ()
    pace: float = 0.0
    name: str = ""

    @abstractmethod
    def start(self, batch: int, device: torch.device) -> State:
        """The state of rows that have read nothing."""

    @abstractmethod
    def update(self, span: Span, state: Any) -> None:
        """Read what the target has just read, and set the state's root to `span.root`. A drafter that sat out
        some rounds is updated with their spans later, in order."""

    @abstractmethod
    def propose(self, state: Any, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        """Guess. A drafter that reads `sampler.noise` says so (`uses_target_noise`).

        Args:
            spec: this round's tree; default: the drafter's own. A drafter that looks its guesses up takes
                the depth as a limit. One whose trees have a form of their own ignores it.

        Raises:
            ValueError: it cannot grow this spec.
        """

    def owed(self, state: Any) -> float:
        """Seconds of reading that was put off, and comes before the next tree of a head."""
        return 0.0

    def signs(self, state: Any) -> list[int]:
        """What a policy may know of each row before it chooses a tree: a kind of round, counted from 0."""
        return [0] * len(state.root)

    def room(self, spec: TreeSpec | None = None) -> Room:
        """What a round with this tree needs. Raises ValueError as `propose` does."""
        return Room(self.rows, self.rows)
