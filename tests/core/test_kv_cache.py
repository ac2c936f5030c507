"""KVCache against one plain list per row."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.core.kv_cache import BLOCK, BUCKET, KVCache

L, HEADS, D, DV = 2, 2, 3, 4


class Checked:
    """A cache and, beside it, a list of numbers per row: the number stands in every key and value of its
    slot."""

    def __init__(self, batch, cache=None):
        self.cache = cache or KVCache(L, batch)
        self.rows = [[] for _ in range(batch)]

    def read(self, numbers, path, count):
        """Write one pass of numbers [B, R] and keep a path of it."""
        self.cache.reserve(numbers.shape[1])
        for layer in range(L):
            key = (numbers + 0.25 * layer)[:, None, :, None]
            self.cache.write(layer, key.expand(-1, HEADS, -1, D), -key.expand(-1, HEADS, -1, DV))
        read = [self.cache.read(layer) for layer in range(L)]
        self.cache.keep(path, count)
        for b, row in enumerate(self.rows):
            slots = range(numbers.shape[1]) if path is None else path[b].tolist()
            assert self._stored(read[0][0], b, len(row) + len(slots))[: len(row)] == row  # while the pass ran
            row += [numbers[b, slot].item() for slot in slots[: count[b]]]
        self.check()

    def _stored(self, storage, b, n):
        return storage[b, 0, self.cache.prefix :][:n, 0].tolist()

    def check(self):
        assert self.cache.lengths.tolist() == [len(row) for row in self.rows]
        assert self.cache.bound >= max(map(len, self.rows), default=0)
        for b, row in enumerate(self.rows if self.cache.stored else []):
            expected = torch.tensor(row)[:, None]
            for layer in range(L):
                at = slice(self.cache.prefix, self.cache.prefix + len(row))
                for head in range(HEADS):
                    assert torch.equal(
                        self.cache.stored[0][layer, b, head, at], (expected + 0.25 * layer).expand(-1, D)
                    )
                    assert torch.equal(
                        self.cache.stored[1][layer, b, head, at], -(expected + 0.25 * layer).expand(-1, DV)
                    )


@st.composite
def passes(draw, batch):
    """Numbers, accepted path and count of one pass; columns past the count repeat the last slot, as in a
    Verdict."""
    R = draw(st.integers(1, 6))
    seeded = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    numbers = torch.randint(1, 10_000, (batch, R), generator=seeded).float()
    chosen = [[0, *sorted(draw(st.sets(st.integers(1, R - 1))))] if R > 1 else [0] for _ in range(batch)]
    width = max(map(len, chosen))
    count = torch.tensor([draw(st.integers(0, len(slots))) for slots in chosen])
    if draw(st.booleans()):
        return numbers, None, count.clamp(max=R)
    return numbers, torch.tensor([slots + slots[-1:] * (width - len(slots)) for slots in chosen]), count


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_equals_one_list_per_row(data, batch, others):
    """Rows of different lengths, paths with gaps compacted in place, rows that keep nothing, rows that leave,
    change places and are taken by other texts: one slot off and a later token attends to a rejected guess.
    """
    checked = Checked(batch + others)
    checked.cache.select(list(range(batch)))
    checked.rows = checked.rows[:batch]
    for _ in range(data.draw(st.integers(1, 4))):
        checked.read(*data.draw(passes(batch)))
        if data.draw(st.booleans()):
            checked.cache.flush([len(row) for row in checked.rows])
    order = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, unique=True))
    memory = checked.cache.stored[0].data_ptr()
    checked.cache.select(order)
    checked.rows = [checked.rows[b] for b in order]
    checked.check()
    free = batch + others - len(order)
    new = Checked(free, cache=checked.cache.window(free))
    if free:
        new.read(*data.draw(passes(free)))
        checked.check()  # the rows beside the window are as they were
        checked.cache.join(new.cache)
        checked.rows += new.rows
        checked.check()
    checked.read(*data.draw(passes(len(checked.rows))))
    assert checked.cache.stored[0].data_ptr() == memory  # in place, all of it


def test_compaction_moves_a_path_onto_slots_it_reads_from():
    """Slots 2, 3, 5 → 1, 2, 3: a copy slot by slot in the wrong order overwrites what it still needs."""
    checked = Checked(2)
    checked.read(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None, torch.tensor([2, 1]))
    path = torch.tensor([[0, 2, 3, 5], [0, 1, 4, 4]])
    checked.read(torch.arange(10.0, 22.0).view(2, 6), path, torch.tensor([4, 3]))
    assert checked.rows == [[1, 2, 10, 12, 13, 15], [3, 16, 17, 20]]


def test_a_tree_may_name_a_depth_that_its_nodes_cannot_reach():
    """A dynamic tree of budget 3 and depth 7 has a path of 8 columns over 3 slots; `depth` is an upper
    bound."""
    checked = Checked(1)
    checked.read(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0, 2, 2, 2, 2]]), torch.tensor([2]))
    assert checked.rows == [[1, 3]]


def test_a_window_may_be_the_first_that_reads():
    """An empty session that texts join: the storage is allocated by the window, for all rows."""
    whole = Checked(3)
    whole.cache.select([])
    first = Checked(2, cache=whole.cache.window(2))
    first.read(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None, torch.tensor([2, 1]))
    whole.cache.join(first.cache)
    whole.rows = first.rows
    whole.check()
    assert whole.cache.storage.stored[0].shape[1] == 3
    with pytest.raises(AssertionError, match="no rows left"):
        whole.cache.window(2)


def test_only_rows_that_change_place_are_moved():
    """A copy of the whole cache whenever one text ends."""
    cache = Checked(4)
    cache.read(torch.arange(8.0).view(4, 2), None, torch.tensor([2, 2, 2, 2]))
    cache.cache.flush([2, 2, 2, 2])
    cache.cache.storage.stored[0][:, [0, 2, 3], :, 2:] = torch.nan  # past what is used
    cache.cache.select([0, 3])
    kept = cache.cache.storage.stored[0][0, :, 0, :, 0]
    assert kept[:, :2].tolist() == [[0, 1], [6, 7], [4, 5], [6, 7]]
    assert kept[1, 2:].isfinite().all()


def test_memory_is_never_touched_and_is_in_every_row():
    """BiTA's prompts stand before the text: an offset lost anywhere writes text over them."""
    memory = torch.randn(L, 2, 5, HEADS, D)

    def prefix_intact(cache):
        kept = torch.stack(
            [cache.stored[0][:, :, :, :5], cache.stored[1][:, :, :, :5]], 1
        )  # [L, 2, B, heads, P, D]
        return torch.equal(kept, memory.transpose(2, 3)[:, :, None].expand_as(kept))

    cache = KVCache(L, 2, memory=memory)
    for count in ([3, 1], [2, 2]):  # ragged from the second pass on
        cache.reserve(3)
        for layer in range(L):
            cache.write(layer, torch.ones(2, HEADS, 3, D), torch.ones(2, HEADS, 3, D))
        cache.keep(torch.tensor([[0, 1, 2], [0, 2, 2]]), torch.tensor(count))
        assert prefix_intact(cache)
    assert cache.lengths.tolist() == [5, 3]
    assert all(cache.stored[0][0, row, 0, 5 : 5 + n, 0].all() for row, n in enumerate((5, 3)))
    cache.select([1])
    assert prefix_intact(cache)
    assert prefix_intact(cache.window(1))
    cache.reserve(BLOCK)  # and grow
    assert cache.storage.capacity == 2 * BLOCK
    assert prefix_intact(cache)


def test_reads_a_bucket_and_never_to_capacity():
    """Attention over unused slots costs as much as over used ones; slots that are needed must all be
    there."""
    cache = KVCache(1, 2)
    cache.storage.hold(10 * BUCKET + 7)
    cache.flush([3, BUCKET])
    for rows, view in (
        (1, 2 * BUCKET),
        (BUCKET, 2 * BUCKET),
        (BUCKET + 1, 3 * BUCKET),
        (9 * BUCKET, 10 * BUCKET),
    ):
        cache.reserve(rows)
        assert cache.view == view
    cache.flush([0, 10 * BUCKET])
    cache.reserve(7)
    assert cache.view == cache.storage.capacity
    behind_memory = KVCache(1, 1, memory=torch.zeros(1, 2, 5, 1, 1))
    behind_memory.flush([BUCKET - 5])
    behind_memory.reserve(1)
    assert behind_memory.view == 2 * BUCKET


def test_a_storage_grows_by_blocks_and_keeps_what_it_holds():
    """Writing past the capacity would raise deep inside a layer, or (ragged) land in another slot; and a
    window that still saw the old memory would read another text."""
    checked = Checked(2)
    checked.cache.select([0])
    checked.rows = [[]]
    checked.read(torch.ones(1, 3), None, torch.tensor([3]))
    assert checked.cache.storage.capacity == BLOCK
    window = Checked(1, cache=checked.cache.window(1))
    window.read(torch.arange(1.0, 2 * BLOCK + 2)[None], None, torch.tensor([2 * BLOCK + 1]))
    assert window.cache.storage.capacity == checked.cache.storage.capacity == 3 * BLOCK
    checked.check()
    checked.cache.join(window.cache)
    checked.rows += window.rows
    checked.read(torch.full((2, 5), 7.0), torch.tensor([[0, 4], [0, 2]]), torch.tensor([2, 1]))
    assert checked.cache.storage.capacity == 3 * BLOCK
