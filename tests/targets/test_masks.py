"""What each row of a pass reads: lists of keys and dense masks, both against a plain rule."""

from itertools import product

import pytest
import torch
from torch import Tensor

from slipstream.core.kv_cache import KVCache
from slipstream.core.tree import PAD, Probes, Tree, TreeLayout, chain
from slipstream.targets.masks import dense, key_lists

WINDOWS = {"full_attention": None, "sliding_attention": 4}
LENGTHS = [9, 0, 5]
P = 3  # slots of memory


def cache_of(rows: int, after: int = 0, prefix: int = 0, lengths: list[int] = LENGTHS) -> KVCache:
    """A cache of ragged texts with room for a pass, which holds only numbers of slots."""
    memory = torch.zeros(1, 2, prefix, 1, 1) if prefix else None
    cache = KVCache(1, len(lengths), memory=memory)
    cache.lengths = torch.tensor(lengths)
    cache.flush(lengths)
    cache.reserve(rows, after)
    return cache


def random_tree(seed: int, batch: int, nodes: int, probes: bool) -> Tree:
    """A tree of any form for each text, with two groups of probes behind nodes or none."""
    generator = torch.Generator().manual_seed(seed)
    below = torch.arange(nodes).clamp(min=1)
    parents = (torch.rand(batch, nodes, generator=generator) * below).long()
    depth = nodes - 1 if seed % 2 else 3
    steps = torch.zeros(batch, nodes, dtype=torch.long)
    for i in range(1, nodes):  # no node is deeper than the tree says
        above = parents[:, i]
        steps[:, i] = 1 + steps.gather(1, above[:, None])[:, 0]
        flat = steps[:, i] > depth
        parents[flat, i], steps[flat, i] = 0, 1
    hosts = torch.randint(-1, nodes, (batch, 2), generator=generator)
    return Tree(
        torch.zeros(batch, nodes, dtype=torch.long),
        parents,
        depth,
        probes=Probes(torch.zeros(2, 1), hosts) if probes else None,
    )


def seen_by_lists(lists: Tensor, view: int) -> Tensor:
    """[B, R, S]: which slots the rows' lists name, each once and in rising order."""
    B, _, R, _ = lists.shape
    seen = torch.zeros(B, R, view, dtype=torch.bool)
    assert lists.dtype == torch.int32
    for b, r in product(range(B), range(R)):
        memory, first, end, *listed = lists[b, 0, r].tolist()
        known = next((i for i, slot in enumerate(listed) if slot < 0), len(listed))
        assert set(listed[known:]) <= {-1}
        slots = [*range(memory), *range(first, end), *listed[:known]]
        assert slots == sorted(set(slots))
        assert first <= end
        seen[b, r, slots] = True
    return seen


def by_rule(layout: TreeLayout, cache: KVCache, nodes: int, window: int | None) -> Tensor:
    """The same, slot by slot: the text, rows that a row may read, memory for probes; all in the window."""
    B, (R, A), prefix = len(cache.lengths), layout.visible.shape[1:], cache.prefix
    seen = torch.zeros(B, R, cache.view, dtype=torch.bool)
    visible, depths = layout.visible.expand(B, R, A), layout.depths.expand(B, A)
    for b, r in product(range(B), range(R)):
        length = int(cache.lengths[b])
        position = length + int(depths[b, A - R + r])
        near = position - window if window else -1
        seen[b, r, :prefix] = r >= nodes
        for at in range(length):
            seen[b, r, prefix + at] = at > near
        for a in range(A):
            seen[b, r, prefix + length + a] = visible[b, r, a] and length + int(depths[b, a]) > near
    return seen


def check(layout: TreeLayout, cache: KVCache, nodes: int, depth: int) -> None:
    """Both forms say the rule's, for every type of attention, and alone for one type."""
    positions = cache.lengths[:, None] + layout.depths
    lists = key_lists(layout, positions, cache, WINDOWS, nodes, depth)
    masks = dense(lists, cache.view, torch.float32)
    assert lists.keys() == masks.keys() == WINDOWS.keys()
    for kind, window in WINDOWS.items():
        want = by_rule(layout, cache, nodes, window)
        assert torch.equal(seen_by_lists(lists[kind], cache.view), want)
        assert torch.equal(masks[kind], torch.zeros_like(masks[kind]).masked_fill(~want[:, None], -torch.inf))
        alone = {kind: window}
        assert torch.equal(key_lists(layout, positions, cache, alone, nodes, depth), lists[kind])
        assert torch.equal(dense(lists[kind], cache.view, torch.float32), masks[kind])


@pytest.mark.parametrize("shared", [False, True], ids=["own trees", "one tree"])
@pytest.mark.parametrize("prefix", [0, P])
@pytest.mark.parametrize("probes", [False, True], ids=["plain", "probes"])
@pytest.mark.parametrize("seed", range(4))
def test_trees(seed, probes, prefix, shared):
    """A cousin that is read, an ancestor that is cut off, a window in slots, memory that an ordinary row
    reads."""
    tree = random_tree(seed, 1 if shared else 3, 11, probes)
    layout = tree.layout()
    depth = tree.depth + 1 + (2 if probes else 0)
    check(layout, cache_of(tree.rows, prefix=prefix), tree.nodes, depth)


@pytest.mark.parametrize("prefix", [0, P])
@pytest.mark.parametrize("rows", [1, 2, 13])
def test_chains(rows, prefix):
    """Chains name no slots: a row that reads itself twice, not at all, or the padding of another text."""
    layout = chain(torch.zeros(3, rows, dtype=torch.long)).layout()
    cache = cache_of(rows, prefix=prefix)
    check(layout, cache, rows, 0)
    positions = cache.lengths[:, None] + layout.depths
    assert key_lists(layout, positions, cache, {"": None}, rows, 0).shape == (3, 1, rows, 3)


def test_a_chain_with_probes():
    """Probes behind a chain are no chain: what they read is listed."""
    probes = Probes(torch.zeros(2, 1), torch.tensor([[0, 4], [PAD, 2], [3, 3]]))
    tree = Tree(torch.zeros(3, 5, dtype=torch.long), None, 4, probes=probes)
    check(tree.layout(), cache_of(tree.rows, prefix=P), tree.nodes, tree.depth + 3)


@pytest.mark.parametrize("seed", range(3))
def test_passes_behind_a_rounds_earlier_passes(seed):
    """`extend`: a draft model's level, whose rows read slots of earlier passes of the same round."""
    tree = random_tree(seed, 3, 12, probes=False)
    whole = tree.layout()
    for after in (0, 3, 8):
        layout = TreeLayout(whole.depths, whole.visible[:, after:])
        check(layout, cache_of(12 - after, after), 12 - after, 12)
