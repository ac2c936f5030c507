"""tune: the tree that pays most on this machine, from what rounds cost and what would be accepted. Nothing is decoded.

First the optimal static tree of every node budget and depth (`optimal_tree`), from acceptance by depth and rank along the
target's own texts; with the measured cost of rows and of draft steps that says which sizes are worth a closer look. These,
grown statically and by confidence, are then drafted along the same texts for their τ, and a few of their rounds timed.
"""

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.bench.cost import RoundCost, pass_seconds, round_costs
from slipstream.core.optimal import optimal_tree
from slipstream.core.shape import Shape
from slipstream.drafters.eagle import Eagle
from slipstream.drafters.vanilla import Vanilla
from slipstream.machine import heading
from slipstream.targets.hf import Target
from slipstream.train.replay import Following, Record, predict

BUDGETS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 26, 32, 40, 48, 64)  # nodes, root included
DEPTH, RANKS, WIDTH = 7, 10, 8
ROUNDS = 7  # of each tree that are timed
CLOSE = 0.93  # sizes whose estimate is within this share of the best are looked at closely


@dataclass(frozen=True)
class Size:
    """A budget and a depth, with the best static tree for them and its estimated speed-up over plain decoding."""

    nodes: int
    depth: int
    tree: str
    estimate: float


def tune(
    target: Target,
    drafter: Eagle,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float] = (0.0, 1.0),
    new: int = 64,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The best tree and proposal at each temperature.

    Args:
        prompts: some of the kind that will be asked; 8 to 16 are enough.
        new: tokens of each answer along which drafts are held.

    Returns:
        schema 1: `passes_ms` by rows, and for each temperature `plain` and `chosen`, the best of all `candidates` of its
        `proposals`; these also say `acceptance` by depth and rank, and the optimal static trees of all `budgets`.
    """
    context = sum(map(len, prompts)) // len(prompts) + new // 2
    probe = min(prompts, key=len)  # read once for every tree that is timed
    progress("cost of a pass")
    curve = pass_seconds(target, context=context)
    timed = [Vanilla(), *(reshaped(drafter, tree) for tree in ("chain-1", f"chain-{DEPTH}"))]
    costs = Costs(curve, *round_costs(target, timed, probe))
    reports: list[dict[str, Any]] = []
    for temperature in temperatures:
        progress(f"T = {temperature:g}: the target answers")
        record = Record.of(target, prompts, new, drafter.taps, len(prompts), temperature)
        found: list[dict[str, Any]] = []
        for proposal in ("top-k", "noise") if temperature else ("top-k",):
            progress(f"T = {temperature:g}: {proposal}")
            rates = acceptance(drafter, record, proposal)
            sizes = _sizes(rates, costs)
            seen = {"proposal": proposal, "acceptance": [[round(r, 4) for r in row] for row in rates]}
            found.append({**seen, "budgets": [asdict(size) for size in sizes]})
            found[-1]["candidates"] = _candidates(drafter, record, proposal, sizes)
        progress(f"T = {temperature:g}: timing rounds")
        candidates = [candidate for seen in found for candidate in seen["candidates"]]
        trees = [reshaped(drafter, candidate["tree"], candidate["proposal"]) for candidate in candidates]
        plain, *rounds = round_costs(target, [Vanilla(), *trees], probe, temperature, ROUNDS)
        for candidate, cost in zip(candidates, rounds, strict=True):
            candidate |= _figures(candidate["tau"], cost, plain)
        chosen = max(candidates, key=lambda candidate: candidate["speedup"])
        about = {"temperature": temperature, "plain": _figures(1.0, plain, plain)}
        reports.append({**about, "proposals": found, "chosen": chosen})
    return {
        **heading(target),
        "context": context,
        "passes_ms": {str(rows): round(seconds * 1e3, 3) for rows, seconds in curve.items()},
        "draft_step_ms": round(costs.step * 1e3, 3),
        "temperatures": reports,
    }


@dataclass(frozen=True)
class Costs:
    """Seconds of passes by rows, and of rounds without a drafter and with chains of 1 and of `DEPTH`."""

    passes: dict[int, float]
    plain: RoundCost
    short: RoundCost
    long: RoundCost

    @property
    def step(self) -> float:
        return max(0.0, (self.long.draft - self.short.draft) / (DEPTH - 1))

    def speedup(self, tau: float, nodes: int, depth: int) -> float:
        """Over plain decoding, of a tree of that size, which need not have been timed."""
        drafted = self._pass(nodes) + self.short.draft + (depth - 1) * self.step + self.short.host
        return tau * (self._pass(1) + self.plain.host) / drafted

    def _pass(self, rows: int) -> float:
        """Linear between measured sizes."""
        below, above = max(n for n in self.passes if n <= rows), min(n for n in self.passes if n >= rows)
        share = 0.0 if above == below else (rows - below) / (above - below)
        return self.passes[below] + share * (self.passes[above] - self.passes[below])


def acceptance(drafter: Eagle, record: Record, proposal: str) -> list[list[float]]:
    """[d][r]: how often the token after an accepted node of depth d is the r-th candidate, along the record."""
    follow = Following.along(record, DEPTH, min(RANKS, len(drafter.vocab)))
    predict(reshaped(drafter, follow, proposal), record)
    return follow.acceptance()


def _candidates(drafter: Eagle, record: Record, proposal: str, sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """The trees of sizes whose estimate is near the best, with the τ that they would reach."""
    best, found = max(size.estimate for size in sizes), []
    close = [size for size in sizes if size.estimate >= CLOSE * best]
    for tree in dict.fromkeys(name for size in close for name in _trees(size)):
        made = reshaped(drafter, tree, proposal)
        about = {"tree": tree, "proposal": proposal, "nodes": made.rows, "depth": made.depth}
        found.append({**about, "tau": predict(made, record).tau})
    return found


def reshaped(drafter: Eagle, tree: str | Shape, proposal: str = "top-k") -> Eagle:
    """The same head with another tree."""
    made = copy(drafter)
    made.grow_as(tree, proposal)
    return made


def _sizes(rates: list[list[float]], costs: Costs) -> list[Size]:
    sizes = []
    for nodes in BUDGETS:
        for depth in range(1, min(DEPTH, nodes - 1) + 1):
            paths, tau = optimal_tree(rates[:depth], nodes)
            if paths and max(map(len, paths)) == depth:
                tree = json.dumps(sorted(paths, key=lambda p: (len(p), p)))
                sizes.append(Size(nodes, depth, tree, costs.speedup(tau, nodes, depth)))
    return sizes


def _trees(size: Size) -> list[str]:
    """Names of the trees of that size: the best static one, and those that follow the drafter's confidence."""
    dynamic = f"dynamic-{size.depth}x{min(WIDTH, size.nodes - 1)}x{size.nodes}"
    return [size.tree, dynamic] if Shape.parse(dynamic).nodes == size.nodes else [size.tree]


def _figures(tau: float, cost: RoundCost, plain: RoundCost) -> dict[str, Any]:
    parts = {f"{key}_ms": round(seconds * 1e3, 3) for key, seconds in asdict(cost).items()}
    speed, speedup = tau / cost.total, tau * plain.total / cost.total
    return {"tau": round(tau, 4), **parts, "tokens_per_second": round(speed, 2), "speedup": round(speedup, 4)}
