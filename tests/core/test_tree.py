"""Tree.layout against a per-node reference, and what clip and probes may never do."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.core.tree import PAD, Probes, Tree, chain

N = 7


@st.composite
def batches(draw, rows=3):
    """Parents of B random trees of N nodes, parents first."""
    tree = st.tuples(*(st.integers(0, max(0, i - 1)) for i in range(draw(st.integers(1, N)))))
    size = len(draw(tree))
    same = st.tuples(*(st.integers(0, max(0, i - 1)) for i in range(size)))
    return [list(draw(same)) for _ in range(draw(st.integers(1, rows)))]


def ancestors(parents, node):
    """The node and all above it."""
    return {node} if node == 0 else {node} | ancestors(parents, parents[node])


def tree_of(parents, spare=0, **extra):
    depth = max(len(ancestors(row, i)) - 1 for row in parents for i in range(len(row))) + spare
    return Tree(torch.arange(len(parents[0])).expand(len(parents), -1), torch.tensor(parents), depth, **extra)


def seen_by(visible, row):
    """Columns that a row of one batch element reads."""
    return set(visible[row].nonzero()[:, 0].tolist())


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 2))
def test_layout_equals_pointer_chasing_per_node(parents, spare):
    """Rows mixed up across the batch, or a loop that stops one level short of (or runs on past) the deepest
    node."""
    depths, visible = tree_of(parents, spare).layout()
    for b, row in enumerate(parents):
        for i in range(len(row)):
            assert seen_by(visible[b], i) == ancestors(row, i)
            assert depths[b, i] == len(ancestors(row, i)) - 1


@pytest.mark.parametrize("n", [1, 2, 6])
def test_chain_is_the_tree_with_its_parents_written_out(n):
    """The closed form for prompts drifting from the general form."""
    short = chain(torch.arange(n)[None])
    long = Tree(short.tokens, short.parent_slots(), short.depth)
    assert short.is_chain
    assert not long.is_chain
    assert short.depth == n - 1
    for a, b in zip(short.layout(), long.layout(), strict=True):
        assert torch.equal(a, b)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3), st.integers(1, 3), st.data())
def test_probes_see_their_host_and_its_ancestors_and_nobody_sees_them(parents, M, G, data):
    """A probe that reads another group's, or a node that reads a probe, would change what the target says."""
    n = len(parents[0])
    hosts = [[data.draw(st.integers(PAD, n - 1)) for _ in range(G)] for _ in parents]
    plain = tree_of(parents)
    tree = tree_of(parents, probes=Probes(torch.zeros(M, 2), torch.tensor(hosts)))
    depths, visible = tree.layout()
    assert tree.rows == depths.shape[1] == n + G * M
    assert torch.equal(visible[:, :n, :n], plain.layout().visible)
    assert torch.equal(depths[:, :n], plain.layout().depths)
    assert not visible[:, :n, n:].any()
    for b, row in enumerate(parents):
        for g, host in enumerate(hosts[b]):
            first = n + g * M
            for j in range(M):
                own = set(range(first, first + j + 1))
                above = ancestors(row, host) if host != PAD else set()  # without a host: its own group only
                assert seen_by(visible[b], first + j) == own | above
                if host != PAD:
                    assert depths[b, first + j] == depths[b, host] + 1 + j


def test_one_topology_serves_rows_with_their_own_hosts():
    """Parents [1, N] and hosts [B, G], as a static tree with probes has them."""
    parents, hosts = torch.tensor([[0, 0, 1]]), torch.tensor([[2], [1]])
    depths, visible = Tree(
        torch.zeros(2, 3).long(), parents, 2, probes=Probes(torch.zeros(1, 4), hosts)
    ).layout()
    assert depths.tolist() == [[0, 1, 2, 3], [0, 1, 2, 2]]
    assert [seen_by(visible[b], 3) for b in range(2)] == [{0, 1, 2, 3}, {0, 1, 3}]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 4))
def test_clip_keeps_what_is_shallow_and_only_that(parents, limit):
    """A guess past the end of the context window that could still be accepted, or a shallow one lost with
    it."""
    tree = tree_of(parents)
    clipped = tree.clip(limit)
    deep = tree.layout().depths > limit
    assert clipped.nodes == tree.nodes
    assert torch.equal(clipped.tokens == PAD, deep)
    assert torch.equal(clipped.tokens[~deep], tree.tokens[~deep])
    before, after = tree.layout(), clipped.layout()
    assert torch.equal(before.visible[~deep], after.visible[~deep])
    assert clipped.depth <= max(limit, 1)
    assert after.depths.max() <= clipped.depth


def test_clip_shortens_a_chain_with_its_law():
    """A law that keeps the rows of removed nodes no longer fits the tree."""
    law = torch.rand(1, 4, 5)
    clipped = chain(torch.arange(4)[None], law).clip(1)
    assert clipped.tokens.tolist() == [[0, 1]]
    assert clipped.depth == 1
    assert torch.equal(clipped.law, law[:, :2])
    assert clipped.clip(3) is clipped


def test_clip_lets_go_of_hosts_that_it_cuts_off_a_chain():
    """A host beyond the shortened chain: an index out of range in the last round before the window ends."""
    tree = Tree(torch.arange(4)[None], None, 3, probes=Probes(torch.zeros(2, 2), torch.tensor([[1, 3]])))
    visible = tree.clip(1).layout().visible[0]
    assert seen_by(visible, 2) == {0, 1, 2}  # slots 0 and 1 are left, then the probes of host 1
    assert seen_by(visible, 5) == {4, 5}  # and those of nobody
