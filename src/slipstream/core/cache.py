"""KVCache: what the target has read, per row, preallocated. Slots past `lengths` are scratch."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.compiled import freed
from slipstream.core import look

BUCKET = 64  # keys are read up to a multiple of this, never to capacity


class LayerView(NamedTuple):
    """A round's view of one layer of a cache as tensors alone, for passes that are compiled: the same `write`
    and `read`.

    Attributes:
        keys, values: to full capacity.
        slots: where the new rows go.
        used: the slots that are read.
    """

    keys: Float[Tensor, "B heads C D"]
    values: Float[Tensor, "B heads C Dv"]
    slots: Int[Tensor, "B R"]
    used: Int[Tensor, " S"]

    @property
    def layers(self) -> int:
        return 1

    def write(
        self, layer: int, key: Float[Tensor, "B heads R D"], value: Float[Tensor, "B heads R Dv"]
    ) -> None:
        """Fill the reserved slots."""
        _put(self.keys, self.slots, key)
        _put(self.values, self.slots, value)

    def read(self, layer: int) -> tuple[Float[Tensor, "B heads S D"], Float[Tensor, "B heads S Dv"]]:
        """All keys and values that the round sees."""
        S = len(self.used)
        return self.keys[:, :, :S], self.values[:, :, :S]


def _put(
    storage: Float[Tensor, "B heads C D"], slots: Int[Tensor, "B R"], new: Float[Tensor, "B heads R D"]
) -> None:
    """New rows into slots that may differ from text to text."""
    rows = torch.arange(len(new), device=new.device)[:, None]
    storage[rows, :, slots] = new.transpose(1, 2)


class KVCache:
    """Keys and values of L layers for B rows of `capacity` slots.

    A round reserves slots for its rows (`reserve`), the target's layers write into them (`write`), and what
    was accepted is moved to the front and kept (`keep`). Storage appears with the first write, in the layers'
    own shape and dtype.

    Args:
        layers: L.
        batch: B.
        capacity: slots per row: the longest text and one round's rows.
        memory: keys and values [L, 2, P, heads, D] that only probes read (BiTA's prompts). They fill the
            first P slots, stand at no position, and are written once instead of being concatenated in every
            layer of every pass.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        memory: Float[Tensor, "L 2 P heads D"] | None = None,
    ) -> None:
        self.layers, self.capacity, self.memory = layers, capacity, memory
        self.lengths: Int[Tensor, " B"] = torch.zeros(batch, dtype=torch.long, device=device)
        self.bound = 0  # host-side upper bound on lengths, exact after `settle`
        self.keys: Float[Tensor, "L B heads S D"] | None = None
        self.values: Float[Tensor, "L B heads S D"] | None = None
        self._slots: Int[Tensor, "B R"] = self.lengths[:, None]
        self._after = 0
        self.used: Int[Tensor, " S"] = torch.arange(0, device=device)  # the slots that this round reads
        self._start: int | None = None  # first slot of this round where all rows agree

    @property
    def prefix(self) -> int:
        """P, the slots that memory takes."""
        return 0 if self.memory is None else self.memory.shape[2]

    @property
    def view(self) -> int:
        """Slots that a pass reads: memory, text and the reserved rows, up to the next bucket."""
        used = self.prefix + self.bound + self._after + self._slots.shape[1]
        return min(-(-used // BUCKET) * BUCKET, self.prefix + self.capacity)

    def reserve(self, rows: int, after: int = 0) -> None:
        """Set aside the next `rows` slots of every row, `after` scratch slots that an earlier pass of the
        round filled.

        Raises:
            ValueError: the capacity does not hold them.
        """
        if self.bound + after + rows > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} slots a row, of which {self.bound + after} are used; a "
                f"pass of {rows} "
                "rows does not fit: allocate more, or draft a smaller tree"
            )
        first = self.prefix + after + self.lengths[:, None]
        self._slots, self._after = first + torch.arange(rows, device=self.lengths.device), after
        self.used = torch.arange(self.view, device=self.lengths.device)
        uniform = look.may_look(self.lengths) and bool((self.lengths == self.lengths[0]).all())
        self._start = int(self._slots[0, 0]) if uniform and rows else None

    def write(
        self, layer: int, key: Float[Tensor, "B heads R D"], value: Float[Tensor, "B heads R Dv"]
    ) -> None:
        """Fill the reserved slots of one layer."""
        if self.keys is None or self.values is None:
            self._allocate(key, value)
        assert self.keys is not None and self.values is not None
        for storage, new in ((self.keys[layer], key), (self.values[layer], value)):
            if self._start is not None:  # a plain copy: a third of the cost of index_put_
                storage[:, :, self._start : self._start + new.shape[2]] = new
            else:
                _put(storage, self._slots, new)

    def read(self, layer: int) -> tuple[Float[Tensor, "B heads S D"], Float[Tensor, "B heads S Dv"]]:
        """Keys and values of one layer, `view` slots."""
        assert self.keys is not None and self.values is not None
        return self.keys[layer][:, :, : self.view], self.values[layer][:, :, : self.view]

    def written(self, layer: int) -> Float[Tensor, "B R W"]:
        """What this round's reserved slots of one layer hold: keys of all heads, then values."""
        assert self.keys is not None and self.values is not None
        rows = torch.arange(len(self._slots), device=self._slots.device)[:, None]
        return torch.cat(
            [stored[layer][rows, :, self._slots].flatten(2) for stored in (self.keys, self.values)], -1
        )

    def layer(self, layer: int) -> LayerView:
        """This round's view of one layer; something must have been written before."""
        assert self.keys is not None and self.values is not None
        keys, values = freed(self.keys[layer], 0, 2), freed(self.values[layer], 0, 2)
        return LayerView(keys, values, freed(self._slots), freed(self.used, 0))

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        # one slot that is never read: a graph is not to be made for the case that a pass reads all there are
        shape = (self.layers, len(self.lengths), key.shape[1], self.prefix + self.capacity + 1)
        # zeros, not empty: masked slots still enter 0 · value, and 0 · NaN is NaN
        self.keys = torch.zeros(*shape, key.shape[-1], dtype=key.dtype, device=key.device)
        self.values = torch.zeros(*shape, value.shape[-1], dtype=value.dtype, device=value.device)
        if self.memory is not None:
            for storage, memory in zip((self.keys, self.values), self.memory.unbind(1), strict=True):
                storage[..., : self.prefix, :] = memory.transpose(1, 2)[:, None]

    def keep(self, path: Int[Tensor, "B D1"] | None, count: Int[Tensor, " B"]) -> None:
        """Keep the `count` reserved rows named by `path` (`None`: the first ones), in place, and forget the
        others."""
        if path is not None:
            path = path[:, : self._slots.shape[1]]  # a tree may name a depth that its nodes cannot reach
        width = self._slots.shape[1] if path is None else path.shape[1]
        if path is not None and self.keys is not None and self.values is not None:
            steps = torch.arange(width, device=path.device)
            if not look.may_look(path) or bool(((path != steps) & (steps < count[:, None])).any()):
                rows = torch.arange(len(path), device=path.device)[:, None]
                source, goal = self._slots.gather(1, path), self._slots[:, :width]
                for storage in (
                    self.keys,
                    self.values,
                ):  # path[j] >= j and the right side is a copy: safe in place
                    storage[:, rows, :, goal] = storage[:, rows, :, source]
        self.lengths = self.lengths + count
        self.bound += width

    def settle(self, lengths: list[int]) -> None:
        """Tell the host-side bound what the round's one copy to the host showed."""
        self.bound = max(lengths, default=0)

    def select(self, rows: list[int]) -> "KVCache":
        """A cache of some of the rows, in that order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.lengths.device)
        new = KVCache(self.layers, len(rows), self.capacity, self.lengths.device, self.memory)
        new.lengths, new.bound = self.lengths[index], self.bound
        if self.keys is not None and self.values is not None:
            new.keys, new.values = self.keys[:, index], self.values[:, index]
        return new

    def insert(self, other: "KVCache") -> "KVCache":
        """A cache of these rows followed by another's; capacities must agree."""
        assert self.capacity == other.capacity and self.prefix == other.prefix
        new = KVCache(
            self.layers,
            len(self.lengths) + len(other.lengths),
            self.capacity,
            self.lengths.device,
            self.memory,
        )
        new.lengths, new.bound = torch.cat([self.lengths, other.lengths]), max(self.bound, other.bound)
        for empty, full in ((self, other), (other, self)):
            if empty.keys is None and full.keys is not None and full.values is not None:
                empty._allocate(full.keys[0], full.values[0])
        if (
            self.keys is not None
            and self.values is not None
            and other.keys is not None
            and other.values is not None
        ):
            new.keys = torch.cat([self.keys, other.keys], 1)
            new.values = torch.cat([self.values, other.values], 1)
        return new
