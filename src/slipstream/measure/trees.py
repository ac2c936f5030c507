"""Trees that may pay: what a drafter accepts by depth and rank, what rounds cost, and the best static tree of
every size by both."""

import json
from collections.abc import Sequence
from copy import copy
from itertools import cycle, islice
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from slipstream.core.optimal_trees import optimal_trees
from slipstream.core.target import Target
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.replay import one_by_one, steps
from slipstream.measure.cost import ROWS, Rounds, pass_seconds
from slipstream.measure.tune_report import Size
from slipstream.targets.recorded import RecordedTarget

BUDGETS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 20, 26, 32, 40, 48, 64)  # nodes, root included
DEPTH, RANKS = 7, 10  # at most
GAMMA = 10  # the longest chain of draft models: the papers tune γ over 2 to 10
ROUNDS = 5  # of each tree in a lap


def proposing(drafter: Proposer, proposal: str, tree: str = "chain-1") -> Proposer:
    """The same head with candidates of another kind, and another tree of its own."""
    made = copy(drafter)
    made.grow_as(tree, proposal)
    return made


def deepest(drafter: Proposer) -> int:
    """The depth of the deepest tree that is looked at."""
    most = GAMMA if isinstance(drafter, DraftModel) else DEPTH
    return min(most, drafter.deepest or most)


def acceptance(drafter: Proposer, recorded: RecordedTarget, proposal: str) -> list[list[float]]:
    """[d][r]: how often, behind d right first candidates, the next token is the r-th candidate."""
    children = min(RANKS, len(drafter.vocab))
    spec = TreeSpec.parse(f"backbone-{deepest(drafter)}x{children}")
    drafts = ranks(proposing(drafter, proposal), recorded, spec)
    counts = torch.stack([torch.bincount(depth[depth >= 0], minlength=children + 1) for depth in drafts.T])
    return (counts[:, :-1] / counts.sum(1, keepdim=True).clamp(min=1)).tolist()


def ranks(drafter: Proposer, recorded: RecordedTarget, spec: TreeSpec) -> Int[Tensor, "n depth"]:
    """The ranks of the right candidates of drafts that begin at every token of the recorded answers. The
    spec is a backbone. Its width stands for a position where no candidate is right; −1 for one behind a
    wrong first candidate or past the end of the text."""
    return ranked(drafter, recorded, spec)[1]


def ranked(
    drafter: Proposer, recorded: RecordedTarget, spec: TreeSpec
) -> tuple[Int[Tensor, " n"], Int[Tensor, "n depth"]]:
    """The texts that drafts begin in, and their `ranks`."""
    depth, width = spec.depth, spec.children
    last = recorded.tokens.shape[1] - 1
    texts, parts = [], []
    for engine in steps(drafter, recorded, one_by_one, spec):
        span = engine.span
        assert span is not None and span.tree is not None
        at = span.start[:, None] + torch.arange(1, depth + 1, device=span.start.device)
        right = recorded.tokens[engine.cache.texts[:, None], at.clamp(max=last)]
        hits = span.tree.tokens[:, 1:].unflatten(1, (depth, width)) == right[..., None]
        rank = torch.where(hits.any(2), hits.int().argmax(2), width)
        behind = F.pad((rank == 0).cumprod(1), (1, -1), value=1).bool()
        parts.append(torch.where(behind & (right >= 0), rank, -1))
        texts.append(engine.cache.texts.clone())
    return torch.cat(texts), torch.cat(parts)


class Costs:
    """Measured seconds of `batch` texts: `passes`, of target passes behind `context` tokens, by their rows;
    and of rounds behind `prompts`, without a drafter (`plain`), with chains of 1 (`short`) and of `depth`
    tokens (`long`). Raises ValueError for a context that leaves no room for rounds."""

    def __init__(
        self,
        target: Target,
        drafter: Proposer,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        batch: int,
        context: int | None,
        sizes: Sequence[int] = ROWS,
    ) -> None:
        self.depth = deepest(drafter)
        most = target.window - 4 * (1 + self.depth)
        if context is not None and context > most:
            raise ValueError(
                f"context is {context:,}; this target reads {target.window:,} tokens, so that rounds have "
                f"room behind at most {most:,}"
            )
        usual = sum(map(len, prompts)) // len(prompts) + max_new_tokens // 2
        self.batch, self.context = batch, context or usual
        self.passes = _rising(pass_seconds(target, sizes, self.context, batch, repeats=3))
        self.prompts = [
            (prompt * (1 + context // len(prompt)))[:context] if context else prompt
            for prompt in islice(cycle(sorted(prompts, key=len)), batch)
        ]
        drafter = proposing(drafter, "top-k")
        chains = [(drafter, TreeSpec.parse(f"chain-{tokens}")) for tokens in (1, self.depth)]
        rounds = Rounds(target, [(Vanilla(), None), *chains], self.prompts)
        self.plain, self.short, self.long = rounds.run(ROUNDS)

    @property
    def step(self) -> float:
        return max(0.0, (self.long.draft - self.short.draft) / max(1, self.depth - 1))

    def speedup(self, tau: float, rows: int, depth: int) -> float:
        """The estimated speed-up of a tree over plain decoding."""
        drafted = self._pass(rows) + self.short.draft + (depth - 1) * self.step + self.short.host
        return tau * (self._pass(1) + self.plain.host) / drafted

    def _pass(self, rows: int) -> float:
        """Linear between measured sizes."""
        return float(np.interp(rows, [*self.passes], [*self.passes.values()]))


def every_size(rates: list[list[float]], costs: Costs) -> list[Size]:
    """The best static tree of each budget and depth."""
    found = []
    for depth in range(1, len(rates) + 1):
        for nodes, (paths, tau) in optimal_trees(rates[:depth], BUDGETS).items():
            if len(paths) == nodes - 1 and max(map(len, paths)) == depth:  # spends all and goes as deep
                tree = json.dumps(sorted(paths, key=lambda p: (len(p), p)))
                estimate = costs.speedup(tau, nodes, depth)
                found.append(Size(nodes=nodes, depth=depth, tree=tree, estimate=estimate))
    return found


def best_sizes(rates: list[list[float]], costs: Costs) -> list[Size]:
    """The best static tree of each budget."""
    best: dict[int, Size] = {}
    for size in every_size(rates, costs):
        best[size.nodes] = max(best.get(size.nodes, size), size, key=lambda size: size.estimate)
    return [best[nodes] for nodes in sorted(best)]


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    """Costs that do not fall as rows are added: falling ones are noise, and become their mean (pool adjacent
    violators)."""
    pools: list[list[float]] = []
    for value in seconds.values():
        pools.append([value])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return dict(zip(seconds, (mean(pool) for pool in pools for _ in pool), strict=True))
