"""The best static tree for each node budget, from acceptance by depth and rank (Sequoia §3.1, dynamic
programming)."""

from collections.abc import Iterator, Sequence

from slipstream.core.grow import Path


def optimal_trees(
    acceptance: Sequence[Sequence[float]], budgets: Sequence[int]
) -> dict[int, tuple[list[Path], float]]:
    """(paths, expected tokens a pass) of the tree that is accepted furthest, for each budget of nodes, root
    included.

    Args:
        acceptance: [d][r], the chance that the token after an accepted node of depth d is the drafter's r-th
            candidate. As many rows as the tree may be deep.

    A subtree of n nodes whose root stands at depth d is worth 1 + the best way to share n − 1 nodes among its
    children: the child of rank r adds acceptance[d][r] times its own subtree's worth. O(depth · ranks ·
        nodes²).
    """
    nodes = max(budgets)
    worth = [0.0] + [
        1.0
    ] * nodes  # of a subtree of n nodes at the deepest level: nothing below its root is ever drafted
    shares: list[
        list[list[int]]
    ] = []  # [depth][rank][n]: nodes that the child of this rank gets of n still to share
    for rates in reversed(acceptance):
        rest = [0.0] * (nodes + 1)  # worth of n nodes shared among the ranks from here on
        chosen: list[list[int]] = []
        for rate in reversed(rates):
            best, share = list(rest), [0] * (nodes + 1)
            for n in range(1, nodes + 1):
                for k in range(1, n + 1):
                    value = rate * worth[k] + rest[n - k]
                    if value > best[n] + 1e-12:
                        best[n], share[n] = value, k
            rest = best
            chosen.append(share)
        shares.append(chosen[::-1])
        worth = [0.0] + [1.0 + rest[n - 1] for n in range(1, nodes + 1)]
    shares.reverse()

    def spent(path: Path, n: int) -> Iterator[Path]:
        if len(path) < len(shares):
            for rank, share in enumerate(shares[len(path)]):
                if given := share[n]:
                    yield (*path, rank)
                    yield from spent((*path, rank), given - 1)
                    n -= given

    return {budget: (list(spent((), budget - 1)), worth[budget]) for budget in budgets}
