"""Trees by name."""

import json
from collections import Counter

import pytest
import torch

from slipstream.core.tree_spec import FIG9, TreeSpec


def grow(name: str):
    """The tree of a spec under a drafter whose k-th child of token t is 10·t + k + 1, each less likely than
    the last."""
    spec = TreeSpec.parse(name)

    def expand(tokens, origin):
        ids = 10 * tokens[..., None] + 1 + torch.arange(spec.children)
        return ids, torch.log_softmax(-torch.arange(spec.children, dtype=torch.float64), -1).expand(ids.shape)

    return spec, spec.grow(torch.zeros(2, dtype=torch.long), expand)


def test_fig9_is_the_papers_tree():
    assert Counter(map(len, FIG9)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    spec, tree = grow("fig9")
    assert (tree.nodes, tree.depth, spec.children) == (26, 5, 4)
    assert tree.tokens[0, 1:5].tolist() == [1, 2, 3, 4]
    assert tree.tokens[0, -2:].tolist() == [11111, 11112]


def test_a_chain_is_a_chain():
    """Topology tensors where none are needed: layout and compaction have a quicker way for chains."""
    spec, tree = grow("chain-4")
    assert tree.is_chain
    assert tree.tokens[0].tolist() == [0, 1, 11, 111, 1111]
    assert (spec.nodes, spec.depth, spec.scratch) == (5, 4, 3)


@pytest.mark.parametrize(
    "name",
    [
        "fig9",
        "chain-3",
        "backbone-3x4",
        "full-3x3",
        "dynamic-3x4x14",
        "best-first-3x9",
        "beam-3x2",
        "cape-3x9",
        "[[0],[1],[2],[0,0],[2,0],[2,0,0]]",
    ],
)
def test_what_a_shape_says_of_its_tree_is_true(name):
    """Caches too small for the rows that come."""
    spec = TreeSpec.parse(name)
    rows, calls = 0, 0

    def expand(tokens, origin):
        nonlocal rows, calls
        rows, calls = rows + (tokens.shape[1] if calls else 0), calls + 1
        ids = torch.arange(spec.children).expand(*tokens.shape, -1)
        return ids, torch.zeros(ids.shape).log_softmax(-1)

    tree = spec.grow(torch.zeros(1, dtype=torch.long), expand)
    assert (tree.nodes, tree.depth, calls, rows) == (spec.nodes, spec.depth, spec.depth, spec.scratch)
    if spec.paths and not tree.is_chain:
        assert spec.inner(torch.device("cpu")).tolist() == tree.parents[0].unique().tolist()


@pytest.mark.parametrize(
    "name",
    [
        "fig8",
        "chain",
        "[" * 100_000,
        "chain-0",
        "dynamic-3x4",
        "best-first-0x4",
        "cape-0",
        "beam-2",
        "[[0], 3]",
        "[",
        "[]",
    ],
    ids=lambda name: name[:20],
)
def test_an_unknown_tree_is_refused_with_the_choices(name):
    with pytest.raises(ValueError, match=r"Available: chain-DEPTH|no nodes"):
        TreeSpec.parse(name)


def test_a_full_tree_has_all_paths_and_is_not_too_large():
    assert [TreeSpec.parse(f"full-3x{k}").nodes for k in (1, 2, 3, 4)] == [4, 15, 40, 85]
    with pytest.raises(ValueError, match=r"9\^9 leaves: 1024 at most"):
        TreeSpec.parse("full-9x9")


@pytest.mark.parametrize(
    "name",
    [
        "chain-65",
        "backbone-1000x1000",
        "dynamic-1000x1000x1000",
        "dynamic-6x1024x60",
        "best-first-64x1000",
        "beam-60x1000",
        json.dumps([[i] for i in range(1000)] + [[0, i] for i in range(1000)] + [[1, i] for i in range(100)]),
        json.dumps([[0] * n for n in range(1, 66)]),
    ],
    ids=lambda name: name[:20],
)
def test_a_tree_nobody_can_mean_is_refused_with_its_cost(name):
    """Said before anything is built: such trees took minutes and gigabytes."""
    with pytest.raises(
        ValueError, match=r"costs [\d,]+ draft steps a round, which read .* at most are 64, 4,096"
    ) as error:
        TreeSpec.parse(name)
    assert len(str(error.value)) < 400


def test_a_repeated_path_is_named():
    with pytest.raises(ValueError, match=r"distinct: \[0, 1\] is repeated$"):
        TreeSpec.parse("[[0],[0,1],[0,1]]")


@pytest.mark.parametrize("name", ["cape-5x4", "cape-2x9-3@0.5-2@0.4-1"])
def test_a_cape_that_cannot_be_is_refused(name):
    with pytest.raises(ValueError, match="limits must rise, and"):
        TreeSpec.parse(name)


def test_a_path_without_its_parent_is_refused():
    with pytest.raises(ValueError, match=r"\(0, 1\) has no parent"):
        TreeSpec.parse("[[1],[0,1]]")
