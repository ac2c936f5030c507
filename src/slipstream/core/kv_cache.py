"""KVCache: keys and values of what the target has read, in rows of a storage that is allocated once."""

from copy import copy
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.device import is_host

BUCKET = 64  # keys are read up to a multiple of this, never to capacity
BLOCK = 256  # slots by which a storage grows
NewKeys = Float[Tensor, "B heads R D"]
NewValues = Float[Tensor, "B heads R Dv"]


class LayerView(NamedTuple):
    """One layer of a cache in one round, as tensors alone, for compiled passes."""

    keys: Float[Tensor, "B heads C D"]  # to full capacity
    values: Float[Tensor, "B heads C Dv"]
    slots: Int[Tensor, "B R"]  # where `write` puts new rows
    used: Int[Tensor, " S"]  # the slots that `read` returns

    @property
    def layers(self) -> int:
        return 1

    def write(self, layer: int, key: NewKeys, value: NewValues) -> None:
        _put(self.keys, self.slots, key)
        _put(self.values, self.slots, value)

    def read(self, layer: int) -> tuple[Float[Tensor, "B heads S D"], Float[Tensor, "B heads S Dv"]]:
        S = len(self.used)
        return self.keys[:, :, :S], self.values[:, :, :S]


def _put(storage: Float[Tensor, "B heads C D"], slots: Int[Tensor, "B R"], new: NewKeys) -> None:
    """New rows into slots that may differ from text to text."""
    rows = torch.arange(len(new), device=new.device)[:, None]
    storage[rows, :, slots] = new.transpose(1, 2)


class Storage:
    """The memory behind the caches of one engine, copied only to hold longer texts. `like`: keys and values
    of one layer, of any number of rows and slots; by default the first write tells their shape and dtype."""

    def __init__(
        self,
        layers: int,
        rows: int,
        memory: Float[Tensor, "L 2 P heads D"] | None,
        like: tuple[NewKeys, NewValues] | None,
    ) -> None:
        self.layers, self.rows, self.memory, self.like = layers, rows, memory, like
        self.prefix = 0 if memory is None else memory.shape[2]  # slots that it fills at each row's beginning
        self.capacity = 0  # slots for a row's text; one more, never read, spares a full pass its own graph
        self.stored: list[Tensor] = []  # keys and values [L, rows, heads, S, D or Dv], once allocated

    def hold(self, slots: int) -> None:
        """Grow to texts of so many tokens. What is stored stays."""
        if slots > self.capacity:
            self.capacity = slots
            self.stored = [self._zeros(old, old) for old in self.stored]

    def allocate(self, key: NewKeys, value: NewValues) -> None:
        """Memory for rows like these, where there is none yet."""
        if not self.stored:
            first = (None, None) if self.memory is None else self.memory.transpose(2, 3)[:, :, None].unbind(1)
            self.stored = [self._zeros(*pair) for pair in zip((key, value), first, strict=True)]

    def _zeros(self, like: Tensor, first: Tensor | None) -> Float[Tensor, "L rows heads S D"]:
        """Zeros behind the given first slots. Masked slots enter as 0 · value, and 0 · NaN is NaN."""
        shape = self.layers, self.rows, like.shape[-3], self.prefix + self.capacity + 1, like.shape[-1]
        zeros = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if first is not None:
            zeros[..., : first.shape[-2], :] = first
        return zeros


class KVCache:
    """Keys and values of L layers for B texts: the rows [first, first + B) of a `Storage`.

    A round reserves slots (`reserve`), which the target's layers fill (`write`). What was accepted is moved
    to the front (`keep`). Slots past `lengths` are scratch.

    Args:
        batch: B, and the rows of the storage.
        memory: what only probes read (BiTA's prompts), in the first P slots of every row, at no position.
        like: see `Storage`.
    """

    lengths: Int[Tensor, " B"]  # tokens of each text
    texts: Int[Tensor, " B"]  # the number of the text in each row, which an engine counts
    bound: int  # on `lengths`, from above, known to the host; exact after `flush`
    view: int  # slots that a pass reads: memory, text and the reserved rows, up to the next bucket
    used: Int[Tensor, " S"]  # these slots, counted from 0
    slots: Int[Tensor, "B R"]  # the reserved ones of each row
    stored: list[Tensor]  # keys and values of these rows; empty before they are allocated

    def __init__(
        self,
        layers: int,
        batch: int,
        device: torch.device | str = "cpu",
        memory: Float[Tensor, "L 2 P heads D"] | None = None,
        like: tuple[NewKeys, NewValues] | None = None,
    ) -> None:
        self.storage, self.layers = Storage(layers, batch, memory, like), layers
        self.first = self.bound = self.view = 0
        self.prefix = self.storage.prefix
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.texts, self.used = torch.arange(batch, device=device), torch.arange(0, device=device)
        self.slots = self.lengths[:, None]
        self._start: int | None = None  # first slot of this round where all rows agree
        self._refresh()

    def _refresh(self) -> None:
        """Take this cache's rows of the storage, which may have grown or been allocated by another."""
        rows = slice(self.first, self.first + len(self.lengths))
        whole = len(self.lengths) == self.storage.rows
        self.stored = [x if whole else x[:, rows] for x in self.storage.stored]

    def window(self, rows: int) -> "KVCache":
        """An empty cache for new texts, in the storage's rows behind these."""
        window = copy(self)
        window.first = self.first + len(self.lengths)
        assert window.first + rows <= self.storage.rows, "the storage has no rows left"
        window.lengths, window.bound = self.lengths.new_zeros(rows), 0
        window.texts = torch.arange(rows, device=self.texts.device)
        return window

    def join(self, other: "KVCache") -> None:
        """Append a window behind these rows. Where rows between them have gone, it moves down."""
        first = self.first + len(self.lengths)
        assert other.storage is self.storage and other.first >= first
        if other.first > first:
            rows = torch.arange(len(other.lengths), device=self.lengths.device)
            used = slice(self.prefix, self.prefix + other.bound)
            for stored in self.storage.stored:  # the right side is a copy: rows may be among the goals
                stored[:, first + rows, :, used] = stored[:, other.first + rows, :, used]
            other.first = first
            other._refresh()
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.texts = torch.cat([self.texts, other.texts])
        self.bound = max(self.bound, other.bound)
        self._refresh()

    def select(self, order: list[int]) -> None:
        """Keep some of the rows, in that order. Only rows that change place are moved."""
        self._refresh()
        if moves := [(goal, row) for goal, row in enumerate(order) if goal != row]:
            goals, rows = torch.tensor(moves, device=self.lengths.device).T
            used = slice(self.prefix, self.prefix + self.bound)
            for stored in self.stored:  # the right side is a copy: rows may change places
                stored[:, goals, :, used] = stored[:, rows, :, used]
        index = torch.tensor(order, dtype=torch.long, device=self.lengths.device)
        self.lengths, self.texts = self.lengths[index], self.texts[index]
        self._refresh()

    def wipe(self, rows: list[int]) -> None:
        """Zero all slots of some rows. What is not finite would reach the next text there, though masked."""
        self._refresh()
        for stored in self.stored:
            stored[:, rows, :, self.prefix :] = 0

    def row(self, row: int) -> list[Float[Tensor, "L heads T _"]]:
        """A copy of one text's keys and values; none where nothing is allocated."""
        self._refresh()
        used = slice(self.prefix, self.prefix + int(self.lengths[row]))
        return [stored[:, row, :, used].clone() for stored in self.stored]

    def fill(self, row: int, stored: list[Float[Tensor, "L heads T _"]], count: int) -> None:
        """Let a text that has read nothing go on behind the first `count` tokens of another's `row`."""
        if not stored or not count:
            return
        self._hold(count, *stored)
        for own, other in zip(self.stored, stored, strict=True):
            own[:, row, :, self.prefix : self.prefix + count] = other[:, :, :count]
        self.lengths[row] = count
        self.bound = max(self.bound, count)

    def _hold(self, slots: int, *like: Tensor) -> None:
        """Let the storage grow by blocks, and allocate it if the shape of its layers is known."""
        if slots > self.storage.capacity:
            self.storage.hold(-(-slots // BLOCK) * BLOCK)
        if like:
            self.storage.allocate(*like)
        self._refresh()

    def reserve(self, rows: int, after: int = 0) -> None:
        """Set aside `rows` more slots of every row, behind `after` slots of the round's passes so far."""
        needed = self.bound + after + rows
        self._hold(needed, *(self.storage.like or ()))
        filled = -(-(self.prefix + needed) // BUCKET) * BUCKET
        self.view = min(filled, self.prefix + self.storage.capacity)
        first = self.prefix + after + self.lengths[:, None]
        self.slots = first + torch.arange(rows, device=self.lengths.device)
        if not is_host(self.lengths):
            self.used, self._start = torch.arange(self.view, device=self.lengths.device), None
            return
        if len(self.used) != self.view:
            self.used = torch.arange(self.view)
        length, *others = self.lengths.tolist()
        self._start = self.prefix + after + length if all(n == length for n in others) and rows else None

    def allocate(self, key: NewKeys, value: NewValues) -> None:
        """Memory for rows like these, where there is none yet."""
        if not self.stored:
            self.storage.allocate(key, value)
            self._refresh()

    def write(self, layer: int, key: NewKeys, value: NewValues) -> None:
        """Fill the reserved slots of one layer."""
        self.allocate(key, value)
        for stored, new in zip(self.stored, (key, value), strict=True):
            if self._start is not None:  # a plain copy: a third of the cost of index_put_
                stored[layer][:, :, self._start : self._start + new.shape[2]] = new
            else:
                _put(stored[layer], self.slots, new)

    def read(self, layer: int) -> tuple[Float[Tensor, "B heads S D"], Float[Tensor, "B heads S Dv"]]:
        """Keys and values of one layer, `view` slots."""
        keys, values = self.stored
        return keys[layer][:, :, : self.view], values[layer][:, :, : self.view]

    def written(self, layer: int) -> Float[Tensor, "B R W"]:
        """What this round's reserved slots of one layer hold: keys of all heads, then values."""
        rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
        return torch.cat([stored[layer][rows, :, self.slots].flatten(2) for stored in self.stored], -1)

    def layer(self, layer: int) -> LayerView:
        """This round's view of one layer; something must have been written before."""
        keys, values = self.stored
        return LayerView(keys[layer], values[layer], self.slots, self.used)

    def keep(self, path: Int[Tensor, "B D1"] | None, count: Int[Tensor, " B"]) -> None:
        """Keep the `count` reserved rows named by `path` (`None`: the first ones), and forget the others."""
        width = self.slots.shape[1]
        if path is not None:  # a tree may name a depth that its nodes cannot reach
            path = path[:, :width]
            width = path.shape[1]
            if self.stored and not (is_host(path) and _in_place(path, count)):
                rows = torch.arange(len(path), device=path.device)[:, None]
                source, goal = self.slots.gather(1, path), self.slots[:, :width]
                for stored in self.stored:  # path[j] >= j and the right side is a copy: safe
                    stored[:, rows, :, goal] = stored[:, rows, :, source]
        self.lengths = self.lengths + count
        self.bound += width

    def follow(self, other: "KVCache", count: Int[Tensor, " B"], ahead: int = 0) -> None:
        """Keep the first `count` reserved rows of texts that the other cache has read. These are `ahead`
        tokens longer at most, so the other's bound limits this one's."""
        self.keep(None, count)
        self.bound = min(self.bound, other.bound + ahead)

    def flush(self, lengths: list[int]) -> None:
        """Make the bound exact, from lengths that the host knows."""
        self.bound = max(lengths, default=0)


def _in_place(paths: Int[Tensor, "B D1"], counts: Int[Tensor, " B"]) -> bool:
    """Whether every kept row is where it belongs already."""
    rows = zip(paths.tolist(), counts.tolist(), strict=True)
    return all(path[:n] == list(range(len(path[:n]))) for path, n in rows)
