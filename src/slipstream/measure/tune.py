"""tune: the tree that pays most on this machine, from what rounds cost and what would be accepted.

First the optimal static tree of every node budget and depth (`optimal_trees`), from acceptance by depth and
rank along the target's own texts; with the measured cost of rows and of draft steps that says which sizes are
worth a closer look. These, grown statically and by confidence, are then drafted along the same texts for
their τ, and the best of them raced.
"""

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from slipstream.core.optimal import optimal_trees
from slipstream.core.shape import Shape
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.vanilla import Vanilla
from slipstream.files import check_counts
from slipstream.machine import heading
from slipstream.measure.cost import RoundCost, Rounds, pass_seconds
from slipstream.measure.run import stopped_by
from slipstream.targets.hf import Target
from slipstream.training.replay import Following, Record, predict

BUDGETS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 20, 26, 32, 40, 48, 64)  # nodes, root included
DEPTH, RANKS, WIDTH = 7, 10, 8  # at most
GAMMA = 10  # the longest chain of draft models: the papers tune γ over 2 to 10
SIZES, ROUNDS = (
    4,
    5,
)  # sizes looked at closely, and rounds of each of their trees before the slower half is dropped


@dataclass(frozen=True)
class Size:
    """A budget and a depth, with the best static tree for them and its estimated speed-up over plain
    decoding."""

    nodes: int
    depth: int
    tree: str
    estimate: float


def tune(
    target: Target,
    drafter: Proposer,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float] = (0.0, 1.0),
    new: int = 40,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """The best tree and proposal at each temperature.

    Args:
        prompts: some of the kind that will be asked; 8 to 16 are enough.
        new: tokens of each answer along which drafts are held.
        keep: is given what is known of the temperatures before the one at which an error or Ctrl-C ends it.

    Raises:
        ValueError: no prompts, a count below 1, or a drafter whose probes ride in the target's passes.

    Returns:
        schema 1: `passes_ms` by rows, and for each temperature `plain`, `proposals`, each with `acceptance`
            by depth and
        rank and the best static tree of all `budgets`, `candidates` with the τ that they would reach and the
        speed-up that was timed, best first, and `chosen`, the first of them. Who lost an earlier race was
        timed over fewer `rounds`, and
        comes after all who did not. Of a draft model `gammas`, too: chains of 2 to 10, the best of which is a
            candidate.
    """
    if drafter.probes is not None:
        raise ValueError(
            "this drafter guesses in the target's own passes, along no record that trees could be held "
            "against: compare "
            "its trees by bench, one --drafter NAME:tree=… for each"
        )
    check_counts(prompts=len(prompts), temperatures=len(temperatures), new=new)
    context = sum(map(len, prompts)) // len(prompts) + new // 2
    probe = min(prompts, key=len)  # read once for every tree that is timed
    progress("cost of a pass")
    curve = _rising(pass_seconds(target, context=context, repeats=3))
    depth = _deepest(drafter)
    timed = [Vanilla(), *(reshaped(drafter, tree) for tree in ("chain-1", f"chain-{depth}"))]
    costs = Costs(depth, curve, *Rounds(target, timed, probe).run(ROUNDS))
    reports: list[dict[str, Any]] = []
    about = {
        **heading(target),
        "context": context,
        "passes_ms": {str(rows): round(seconds * 1e3, 3) for rows, seconds in curve.items()},
        "draft_step_ms": round(costs.step * 1e3, 3),
        "temperatures": reports,
    }
    try:
        for temperature in temperatures:
            progress(f"T = {temperature:g}: the target answers")
            record = Record.of(target, prompts, new, drafter.taps, len(prompts), temperature)
            reports.append(_at(target, drafter, record, temperature, costs, probe, progress))
    except BaseException as error:
        if reports:
            keep(about | {"stopped": stopped_by(error)})
        raise
    return about


def _at(
    target: Target,
    drafter: Proposer,
    record: Record,
    temperature: float,
    costs: "Costs",
    probe: Sequence[int],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """What `tune` says of one temperature."""
    proposals, sizes = [], list[tuple[str, Size]]()
    for proposal in ("top-k", "noise") if temperature else ("top-k",):
        progress(f"T = {temperature:g}: {proposal}, ranks")
        rates = acceptance(drafter, record, proposal)
        best = _sizes(rates, costs)
        sizes += [(proposal, size) for size in best]
        seen = {"proposal": proposal, "acceptance": [[round(r, 4) for r in row] for row in rates]}
        proposals.append({**seen, "budgets": [asdict(size) for size in best]})
    progress(f"T = {temperature:g}: drafts along the answers")
    closest = sorted(sizes, key=lambda named: -named[1].estimate)[:SIZES]
    candidates = _held(
        drafter, record, [(kind, tree) for kind, size in closest for tree in _trees(size)], costs
    )
    gammas = []
    if isinstance(drafter, DraftModel):
        gammas = _held(
            drafter, record, [("top-k", f"chain-{gamma}") for gamma in range(2, costs.depth + 1)], costs
        )
        candidates += sorted(gammas, key=lambda chain: -chain["estimate"])[:1]
    progress(f"T = {temperature:g}: a race of {len(candidates)}")
    plain, candidates = _race(target, drafter, candidates, probe, temperature)
    about = {"temperature": temperature, "plain": plain, "proposals": proposals, "gammas": gammas}
    return {**about, "candidates": candidates, "chosen": candidates[0]}


@dataclass(frozen=True)
class Costs:
    """Seconds of passes by rows, and of rounds without a drafter and with chains of 1 and of `depth`."""

    depth: int
    passes: dict[int, float]
    plain: RoundCost
    short: RoundCost
    long: RoundCost

    @property
    def step(self) -> float:
        return max(0.0, (self.long.draft - self.short.draft) / max(1, self.depth - 1))

    def speedup(self, tau: float, nodes: int, depth: int) -> float:
        """Over plain decoding, of a tree of that size, which need not have been timed."""
        drafted = self._pass(nodes) + self.short.draft + (depth - 1) * self.step + self.short.host
        return tau * (self._pass(1) + self.plain.host) / drafted

    def _pass(self, rows: int) -> float:
        """Linear between measured sizes."""
        below, above = max(n for n in self.passes if n <= rows), min(n for n in self.passes if n >= rows)
        share = 0.0 if above == below else (rows - below) / (above - below)
        return self.passes[below] + share * (self.passes[above] - self.passes[below])


def acceptance(drafter: Proposer, record: Record, proposal: str) -> list[list[float]]:
    """[d][r]: how often the token after an accepted node of depth d is the r-th candidate, along the
    record."""
    follow = Following.along(record, _deepest(drafter), min(RANKS, len(drafter.vocab)))
    predict(reshaped(drafter, follow, proposal), record)
    return follow.acceptance()


def _held(
    drafter: Proposer, record: Record, kinds: Sequence[tuple[str, str]], costs: Costs
) -> list[dict[str, Any]]:
    """Proposals and trees, with the τ that they reach along the record."""
    found = []
    for proposal, tree in kinds:
        made = reshaped(drafter, tree, proposal)
        tau = predict(made, record).tau
        about = {
            "tree": tree,
            "proposal": proposal,
            "nodes": made.rows,
            "depth": made.depth,
            "tau": round(tau, 4),
        }
        found.append({**about, "estimate": round(costs.speedup(tau, made.rows, made.depth), 4)})
    return found


def _race(
    target: Target,
    drafter: Proposer,
    candidates: list[dict[str, Any]],
    probe: Sequence[int],
    temperature: float,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(plain decoding, the candidates, best first): rounds of all, then of the better half, and so on."""
    trees = [reshaped(drafter, each["tree"], each["proposal"]) for each in candidates]
    rounds = Rounds(target, [Vanilla(), *trees], probe, temperature)
    racing, ended, raced = list(range(len(trees))), list[int](), 0
    while racing:
        plain, *spent = rounds.run(ROUNDS, [0, *(1 + i for i in racing)])
        raced += ROUNDS
        for i in racing:  # against plain rounds of the same minutes
            candidates[i] |= {"rounds": raced, **_figures(candidates[i]["tau"], spent[i], plain)}
        racing.sort(key=lambda i: -candidates[i]["speedup"])
        left = (len(racing) + 1) // 2 if len(racing) > 2 else 0
        racing, ended = racing[:left], racing[left:] + ended
    return _figures(1.0, plain, plain), [candidates[i] for i in ended]


def reshaped(drafter: Proposer, tree: str | Shape, proposal: str = "top-k") -> Proposer:
    """The same head with another tree."""
    made = copy(drafter)
    made.grow_as(tree, proposal)
    return made


def _deepest(drafter: Proposer) -> int:
    most = GAMMA if isinstance(drafter, DraftModel) else DEPTH
    return min(most, drafter.deepest or most)


def _sizes(rates: list[list[float]], costs: Costs) -> list[Size]:
    """The best static tree of each budget."""
    best: dict[int, Size] = {}
    for depth in range(1, len(rates) + 1):
        for nodes, (paths, tau) in optimal_trees(rates[:depth], BUDGETS).items():
            if len(paths) == nodes - 1 and max(map(len, paths)) == depth:  # spends all and goes as deep
                tree = json.dumps(sorted(paths, key=lambda p: (len(p), p)))
                size = Size(nodes, depth, tree, costs.speedup(tau, nodes, depth))
                best[nodes] = max(best.get(nodes, size), size, key=lambda size: size.estimate)
    return [best[nodes] for nodes in sorted(best)]


def _trees(size: Size) -> list[str]:
    """Of that size: the best static one, and where that is another one, the one that follows the drafter's
    confidence."""
    width = min(WIDTH, size.nodes - 1)
    return [size.tree, f"dynamic-{size.depth}x{width}x{size.nodes}"] if size.depth > 1 else [size.tree]


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    """More rows cost no less: what contradicts it is noise, and its mean is taken (pool adjacent
    violators)."""
    pools: list[list[float]] = []
    for value in seconds.values():
        pools.append([value])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return dict(zip(seconds, (mean(pool) for pool in pools for _ in pool), strict=True))


def _figures(tau: float, cost: RoundCost, plain: RoundCost) -> dict[str, Any]:
    parts = {f"{key}_ms": round(seconds * 1e3, 3) for key, seconds in asdict(cost).items()}
    speed, speedup = tau / cost.total, tau * plain.total / cost.total
    return {**parts, "tokens_per_second": round(speed, 2), "speedup": round(speedup, 4)}
