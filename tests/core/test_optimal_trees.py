"""The dynamic programme against all trees there are."""

import random
from itertools import combinations, product
from math import prod

import pytest

from slipstream.core.optimal_trees import optimal_trees
from slipstream.core.tree_builders import static_levels


def worth(paths, acceptance) -> float:
    return 1 + sum(prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in paths)


@pytest.mark.parametrize("nodes", range(1, 6))
@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_as_many_nodes_is_worth_more(nodes, seed):
    rates = random.Random(seed)
    acceptance = [[rates.random() / 2 for _ in range(2)] for _ in range(3)]
    every = [path for depth in (1, 2, 3) for path in product(range(2), repeat=depth)]
    trees = [
        tree for n in range(nodes) for tree in combinations(every, n) if {p[:-1] for p in tree} <= {(), *tree}
    ]
    paths, tau = optimal_trees(acceptance, [nodes, 6])[nodes]
    assert len(paths) < nodes
    assert (
        tau
        == pytest.approx(worth(paths, acceptance))
        == pytest.approx(max(worth(tree, acceptance) for tree in trees))
    )


def test_a_large_budget_is_a_tree_that_can_be_grown():
    rates = random.Random(0)
    acceptance = [sorted((rates.random() / 8 for _ in range(10)), reverse=True) for _ in range(6)]
    paths, tau = optimal_trees(acceptance, [2, 64])[64]
    assert sum(len(level.parent) for level in static_levels(tuple(paths))) == 63
    assert tau == pytest.approx(worth(paths, acceptance))
