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
        by_token: names of tensors that hold a slot for each token of a text, which depends on the tokens up
            to it alone. A text that begins as another did takes over these slots and those of caches.
    """

    by_token: ClassVar[tuple[str, ...]] = ()
    root: Int[Tensor, " B"]  # chosen by the target, not yet read by it

    def fields(self) -> Iterator[tuple["State", str, Any]]:
        """(owner, name, value) of every field of this state and of its inner states, which are left out."""
        for name, value in vars(self).items():
            if isinstance(value, State):
                yield from value.fields()
            else:
                yield self, name, value

    @property
    def caches(self) -> list[KVCache]:
        return [value for _, _, value in self.fields() if isinstance(value, KVCache)]

    def set_salts(self, salts: Int[Tensor, " B"]) -> None:
        """Guess in these rows only from texts of the same salt."""
        for value in vars(self).values():
            if isinstance(value, State):
                value.set_salts(salts)

    def flush(self) -> None:
        """Read what was put off, so that every row is up to date."""

    def before_copies(self) -> None:
        """Make ready for a row to be copied, for texts that begin alike."""
        self.flush()

    def share_storage(self, other: "State") -> None:
        """Give the caches, which are still empty, the rows behind another state's in its storages."""
        for (owner, name, _), (_, _, value) in zip(self.fields(), other.fields(), strict=True):
            if isinstance(value, KVCache):
                setattr(owner, name, value.window(len(self.root)))

    def select(self, order: list[int]) -> None:
        """Keep some of the rows, in that order."""
        index = torch.tensor(order, dtype=torch.long, device=self.root.device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[index])
            elif isinstance(value, KVCache | State):
                value.select(order)

    def join(self, other: "State") -> None:
        """Append the rows of another state, whose caches share storages with this one's."""
        for (owner, name, value), (_, _, more) in zip(self.fields(), other.fields(), strict=True):
            if isinstance(value, Tensor):
                if value.dim() > 1 and value.shape[1] != more.shape[1]:
                    value, more = _widened(value, more.shape[1]), _widened(more, value.shape[1])
                setattr(owner, name, torch.cat([value, more]))
            elif isinstance(value, KVCache):
                value.join(more)


def _widened(text: Int[Tensor, "B S"], slots: int) -> Int[Tensor, "B S1"]:
    """The same with zeros behind, by blocks, if it has fewer slots."""
    more = -(-slots // BLOCK) * BLOCK - text.shape[1]
    return torch.nn.functional.pad(text, (0, more)) if slots > text.shape[1] else text


def appended(text: Int[Tensor, "B S"], span: Span) -> Int[Tensor, "B S1"]:
    """Texts with a span's tokens behind them, in place where they fit. The last slot is scratch."""
    text = _widened(text, span.cache.bound + 1)
    at = span.start[:, None] + torch.arange(span.tokens.shape[1], device=text.device)
    return text.scatter_(1, at.where(span.mask, text.shape[1] - 1), span.tokens)


class ScratchSlots(NamedTuple):
    """Slots that a round may fill behind the text, in the target's cache and in the drafter's own."""

    target: int
    drafter: int

    @classmethod
    def largest(cls, all_of_them: Iterable["ScratchSlots"]) -> "ScratchSlots":
        return cls(*map(max, zip(*all_of_them, strict=True)))


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
        remembers: it also guesses from texts that have ended, which its trees then show.
        probes: vectors [M, H] that the prompt's last token hosts; later trees carry their own.
        memory: keys and values [L, 2, P, heads, D] that its probes read in the target's attention.
        candidate_trees: trees, the bare root first, of which a policy chooses one in each round. Empty: the
            drafter always grows its own tree.
        tuned: those of the candidate trees that `tune` found.
        catch_up_per_token: seconds in which it reads a token that it put off; 0 where that is not known.
        name: the name under which the costs of its candidate trees are stored.
    """

    taps: tuple[str, ...] = ()
    rows: int = 1
    depth: int = 0
    law: str = "coupled"
    uses_target_noise: bool = False
    remembers: bool = False
    probes: Float[Tensor, "M H"] | None = None
    memory: Float[Tensor, "L 2 P heads D"] | None = None
    candidate_trees: tuple[TreeSpec, ...] = ()
    tuned: tuple[TreeSpec, ...] = ()
    catch_up_per_token: float = 0.0
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
            ValueError: it cannot grow this tree.
        """

    def catch_up_cost(self, state: Any) -> float:
        """Seconds of reading that was put off, and comes before the next tree of a head."""
        return 0.0

    def match_buckets(self, state: Any) -> list[int]:
        """By row, how long a match is known before a policy chooses a tree: a bucket, counted from 0."""
        return [0] * len(state.root)

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        """What a round with this tree needs. Raises ValueError as `propose` does."""
        return ScratchSlots(self.rows, self.rows)
