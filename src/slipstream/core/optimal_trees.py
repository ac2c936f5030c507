"""The best static trees, from acceptance by depth and rank (dynamic programming, Sequoia §3.1)."""

from collections.abc import Iterator, Sequence

from slipstream.core.tree_builders import Path


def optimal_trees(
    acceptance: Sequence[Sequence[float]], budgets: Sequence[int]
) -> dict[int, tuple[list[Path], float]]:
    """(paths, expected tokens per pass) of the best tree for each budget of nodes, root included.

    A subtree's worth is the expected number of its accepted nodes if its root is accepted: 1 plus the best
    division of the others among its children, of which rank r adds acceptance[d][r] times its own worth. That
    is the probability that the token after an accepted node of depth d is the drafter's r-th candidate. The
    search takes O(depth · ranks · nodes²).
    """
    nodes = max(budgets)
    worth = [0.0] + [1.0] * nodes  # of a subtree of n nodes at the deepest level, where only its root counts
    shares = list[list[list[int]]]()  # [depth][rank][n]: nodes of the n left that the child of this rank gets
    for rates in reversed(acceptance):
        rest = [0.0] * (nodes + 1)  # worth of n nodes divided among this rank and the later ones
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
                if count := share[n]:
                    yield (*path, rank)
                    yield from spent((*path, rank), count - 1)
                    n -= count

    return {budget: (list(spent((), budget - 1)), worth[budget]) for budget in budgets}
