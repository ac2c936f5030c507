"""Growth of trees against naive constructions in plain Python."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.core.tree import PAD
from slipstream.core.tree_builders import best_first, dynamic, static
from slipstream.core.tree_spec import TreeSpec

FIG9 = [
    *[(0,), (1,), (2,), (3,)],
    *[(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)],
    *[(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)],
    *[(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)],
    *[(0, 0, 0, 0, 0), (0, 0, 0, 0, 1)],
]


def paths_of(tree, b=0):
    """Tokens from below the root to each node but the root."""
    parents, tokens = tree.parent_slots().expand_as(tree.tokens)[b].tolist(), tree.tokens[b].tolist()
    paths = [()]
    for i in range(1, len(tokens)):
        assert parents[i] < i
        paths.append((*paths[parents[i]], tokens[i]))
    return paths[1:]


def independent(ids, log_q=None):
    """Draft steps of which each says the same of all paths."""
    levels = iter(
        zip(ids.unbind(1), (torch.zeros(ids.shape) if log_q is None else log_q).unbind(1), strict=True)
    )

    def expand(frontier, origin):
        return tuple(x[:, None].expand(-1, frontier.shape[1], -1) for x in next(levels))

    return expand


@pytest.mark.parametrize(("D", "K"), [(1, 1), (3, 1), (1, 4), (4, 3)])
def test_backbone_hangs_every_level_under_the_first_of_the_last(D, K):
    """Siblings under the wrong level, or (K = 1) a chain that starts to branch."""
    ids = 10 + torch.arange(2 * D * K).view(2, D, K)
    tree = TreeSpec.parse(f"backbone-{D}x{K}").grow(torch.tensor([1, 2]), independent(ids))
    assert tree.is_chain == (K == 1)
    assert tree.depth == tree.layout().depths.max() == D
    for b in range(2):
        spine = ids[b, :, 0].tolist()
        assert paths_of(tree, b) == [(*spine[:d], ids[b, d, k].item()) for d in range(D) for k in range(K)]


class Ranks:
    """A draft step whose ids spell the path of ranks in base 9; checks that `origin` names the frontier's
    parents."""

    def __init__(self, K):
        self.K, self.steps, self.before = K, 0, None

    def __call__(self, tokens, origin):
        if self.before is not None:
            assert torch.equal(self.before.gather(1, origin), tokens // 9)
        self.before, self.steps = tokens, self.steps + 1
        ids = tokens[..., None] * 9 + 1 + torch.arange(self.K)
        return ids, torch.zeros(ids.shape)

    @staticmethod
    def read(token):
        return () if token == 0 else (*Ranks.read(token // 9), token % 9 - 1)


def test_static_builds_the_tree_of_figure_9():
    """EAGLE's published tree: 25 drafted nodes, five draft steps, and at each node the token of its own
    path."""
    expand = Ranks(4)
    tree = static(torch.zeros(2, dtype=torch.long), FIG9, expand)
    assert tree.nodes == 26
    assert tree.depth == expand.steps == 5
    depths = tree.layout().depths[0]
    assert [(depths == d).sum().item() for d in range(6)] == [1, 4, 8, 8, 3, 2]
    for b in range(2):
        assert [Ranks.read(token) for token in tree.tokens[b].tolist()] == [(), *FIG9]
        assert [Ranks.read(path[-1]) for path in paths_of(tree, b)] == FIG9
        assert [tuple(token % 9 - 1 for token in path) for path in paths_of(tree, b)] == FIG9


def test_static_takes_paths_in_any_order_with_gaps_between_ranks():
    """Slots assigned in the order given would put a child before its parent."""
    paths = [(2, 1), (0,), (2,), (2, 1, 0), (0, 3)]
    tree = static(torch.zeros(1, dtype=torch.long), paths, Ranks(4))
    assert [Ranks.read(path[-1]) for path in paths_of(tree)] == [(0,), (2,), (0, 3), (2, 1), (2, 1, 0)]


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        ([(0,), (1, 0)], "has no parent"),
        ([(0,), (0,)], "distinct"),
        ([()], "non-empty"),
        ([(-1,)], "ranks from 0"),
        ([(5,)], "asks for 6 children.*offers 4"),
    ],
)
def test_static_refuses_bad_paths(paths, complaint):
    with pytest.raises(ValueError, match=complaint):
        static(torch.zeros(1, dtype=torch.long), paths, Ranks(4))


def eagle_2(root, children, depth, width, budget):
    """EAGLE-2's tree for one row, node by node; `children(token)` lists (id, log q)."""
    pool, frontier = (
        [(float("inf"), root, 0)],
        [(0.0, root, 0)],
    )  # (score, token, parent) and (score, token, slot)
    for _ in range(depth):
        kids = [
            (score + q, PAD if score + q == -float("inf") else token, slot)
            for score, parent, slot in frontier
            for token, q in children(max(parent, 0))
        ]
        best = sorted(range(len(kids)), key=lambda i: (-kids[i][0], i))[:width]
        frontier = [(*kids[i][:2], len(pool) + i) for i in best]
        pool += kids
    kept = sorted(sorted(range(len(pool)), key=lambda i: (-pool[i][0], i))[:budget])
    return [pool[i][1] for i in kept], [kept.index(pool[i][2]) for i in kept]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 24))
def test_dynamic_equals_eagle_2_in_plain_python(seed, depth, K, width, budget):
    """Ties: scores in steps of 1/2, where torch.topk may keep a child without its parent; impossible
    candidates: PAD."""
    g = torch.Generator().manual_seed(seed)
    V, B = 9, 2
    ids = torch.rand(B, V, V, generator=g).argsort(-1)[..., :K]
    log_q = -torch.randint(0, 5, (B, V, K), generator=g).float().sort(-1).values / 2
    log_q[log_q == -2] = -torch.inf
    root, rows = torch.randint(V, (B,), generator=g), torch.arange(B)[:, None]
    tree = dynamic(
        root, lambda tokens, origin: (ids[rows, tokens], log_q[rows, tokens]), depth, width, budget
    )
    for b in range(B):

        def children(token, b=b):
            return list(zip(ids[b, token].tolist(), log_q[b, token].tolist(), strict=True))

        tokens, parents = eagle_2(root[b].item(), children, depth, width, budget)
        assert tree.tokens[b].tolist() == tokens
        assert tree.parents[b].tolist() == parents
        assert all(parent < i for i, parent in enumerate(parents[1:], 1))
    assert depth >= tree.depth >= tree.layout().depths.max()


def test_dynamic_draft_steps_know_where_their_frontier_came_from():
    """An `origin` that counts slots of the pool instead of the frontier: the head would read another node's
    state."""
    expand = Ranks(4)
    dynamic(torch.zeros(2, dtype=torch.long), expand, depth=4, width=3, budget=9)
    assert expand.steps == 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
def test_best_first_keeps_the_most_probable_of_all_paths(seed, D, K, budget):
    """The budget counts the root; a frontier too narrow would miss a node."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(2, D, 9, generator=g).argsort(-1)[..., :K]
    log_q = torch.rand(2, D, K, generator=g).log()
    tree = TreeSpec.parse(f"best-first-{D}x{budget}").grow(torch.tensor([1, 2]), independent(ids, log_q))
    for b in range(2):
        levels = [dict(zip(ids[b, d].tolist(), log_q[b, d].tolist(), strict=True)) for d in range(D)]
        score = {
            path: sum(level[token] for level, token in zip(levels, path, strict=False))
            for d in range(1, D + 1)
            for path in product(*levels[:d])
        }
        best = sorted(score, key=score.__getitem__, reverse=True)[: budget - 1]
        assert sorted(paths_of(tree, b)) == sorted(best)


@pytest.mark.parametrize("name", ["full-3x3", "backbone-3x3", "cape-3x9-2@0.5-2"])
def test_nothing_hangs_below_a_candidate_that_cannot_be(name):
    """top-k may leave fewer candidates than a tree takes: it had children of none, and could not be drawn."""
    ids, log_q = torch.arange(9).view(1, 3, 3), torch.zeros(1, 3, 3)
    ids[0, 1, 1:], log_q[0, 1, 1:] = PAD, -torch.inf
    ids[0, 0, 0], log_q[0, 0, 0] = PAD, -torch.inf
    tree = TreeSpec.parse(name).grow(torch.tensor([1]), independent(ids, log_q))
    tokens, parents = tree.tokens[0].tolist(), tree.parent_slots().expand_as(tree.tokens)[0].tolist()
    assert PAD in tokens
    assert all(tokens[parent] != PAD for token, parent in zip(tokens, parents, strict=True) if token != PAD)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 5), st.integers(1, 12))
def test_cape_hangs_candidates_by_confidence(seed, D, K, more):
    """GLIDE §4.2 in plain Python: expansions that are expanded themselves, at the wrong token, or over the
    budget."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(2, D, 9, generator=g).argsort(-1)[..., : K + 1]
    log_q = torch.rand(2, D, K + 1, generator=g).log().sort(-1, descending=True).values
    name = f"cape-{D}x{D + more}-{K}@0.5-{K // 2}@0.8-0"
    tree = TreeSpec.parse(name).grow(torch.tensor([1, 2]), independent(ids, log_q))
    widest = 0
    for b in range(2):
        expected, spine, left = [], (), more
        for d in range(D):
            p = log_q[b, d, 0].exp().item()
            extra = min(left, K if p <= 0.5 else K // 2 if p <= 0.8 else 0)
            left -= extra
            expected += [(*spine, token) for token in ids[b, d, : 1 + extra].tolist()]
            spine = (*spine, ids[b, d, 0].item())
        widest = max(widest, len(expected))
        assert [path for path in paths_of(tree, b) if path[-1] != PAD] == expected
    assert tree.nodes == 1 + widest <= TreeSpec.parse(name).nodes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_beams_are_the_best_extensions_of_the_best_paths(seed, D, W):
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(2, D, 9, generator=g).argsort(-1)[..., :W]
    log_q = torch.rand(2, D, W, generator=g).log()
    tree = TreeSpec.parse(f"beam-{D}x{W}").grow(torch.tensor([1, 2]), independent(ids, log_q))
    for b in range(2):
        beams, expected = [(0.0, ())], []
        for d in range(D):
            level = list(zip(ids[b, d].tolist(), log_q[b, d].tolist(), strict=True))
            beams = sorted(((s + q, (*path, t)) for s, path in beams for t, q in level), reverse=True)[:W]
            expected += [path for _, path in beams]
        assert sorted(paths_of(tree, b)) == sorted(expected)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_heap_grows_the_same_best_first_trees(data):
    """A tie that falls to the higher slot, a candidate that is not there, siblings in another order."""
    B, D, N = (data.draw(st.integers(1, most)) for most in (3, 4, 9))
    spec = TreeSpec.parse(f"best-first-{D}x{N + 1}")
    assert spec.best_first
    ids = torch.randint(1, 50, (B, D, N), generator=torch.Generator().manual_seed(N))
    costs = st.lists(st.sampled_from([0.5, 1.0, 2.0, torch.inf]), min_size=B * D * N, max_size=B * D * N)
    log_q = -torch.tensor(data.draw(costs)).view(B, D, N).cumsum(2)
    root = torch.arange(B)
    want, got = spec.grow(root, independent(ids, log_q)), best_first(root, ids, log_q, N + 1)
    for b in range(B):  # they order nodes alike, but for those that are not there
        one, other = ([path for path in paths_of(tree, b) if path[-1] != PAD] for tree in (want, got))
        assert one == other
        assert torch.equal(*(tree.scores[b][tree.tokens[b] != PAD] for tree in (want, got)))
