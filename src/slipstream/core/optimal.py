"""The best static tree for a node budget, from acceptance by depth and rank (Sequoia §3.1, dynamic programming)."""

from collections.abc import Sequence

from slipstream.core.grow import Path


def optimal_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> tuple[list[Path], float]:
    """(paths, expected tokens a pass) of the tree of at most `nodes` nodes, root included, that is accepted furthest.

    Args:
        acceptance: [d][r], the chance that the token after an accepted node of depth d is the drafter's r-th candidate.
            As many rows as the tree may be deep.

    A subtree of n nodes whose root stands at depth d is worth 1 + the best way to share n − 1 nodes among its children:
    the child of rank r adds acceptance[d][r] times its own subtree's worth. O(depth · ranks · nodes²).
    """
    worth = [0.0] + [1.0] * nodes  # of a subtree of n nodes at the deepest level: nothing below its root is ever drafted
    shares: list[list[list[int]]] = []  # [depth][rank][n]: nodes that the child of this rank gets of n still to share
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
    paths: list[Path] = []

    def spend(path: Path, n: int) -> None:
        if len(path) < len(shares):
            for rank, share in enumerate(shares[len(path)]):
                if given := share[n]:
                    paths.append((*path, rank))
                    spend((*path, rank), given - 1)
                    n -= given

    spend((), nodes - 1)
    return paths, worth[nodes]
