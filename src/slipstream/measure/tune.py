"""tune: the tree that pays most on this machine, from what rounds cost and what would be accepted.

Acceptance by depth and rank along the target's own texts gives the optimal static tree of every node budget
and depth (`optimal_trees`). The measured costs of rows and of draft steps say which sizes may pay. Trees of
these sizes, static ones and ones that follow the drafter's confidence, are drafted along the same texts for
their τ, and then raced. Where no record can tell τ, as of sampled children and of guesses that stand in the
target's own passes, the texts are decoded anew. The best tree of each size is one that `auto` may take.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import cycle, islice, product
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.drafter import FINAL, INPUT, Drafter
from slipstream.core.optimal_trees import optimal_trees
from slipstream.core.target import Target
from slipstream.core.tree_builders import Path
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter, tuned_home
from slipstream.drafters.auto import tuned_head
from slipstream.drafters.draft_model.model import DraftModel
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.store import save_tuned, tuned_file
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.costs import learn
from slipstream.engine.engine import Seconds
from slipstream.engine.replay import decoded, one_by_one, predict, record, steps
from slipstream.files import check_counts, check_given, check_limits, evenly, read_results, several
from slipstream.measure.cost import ROWS, Rounds, pass_seconds, promised
from slipstream.measure.datasets import Questions, load_questions
from slipstream.measure.results import PARTS
from slipstream.measure.resume import reported
from slipstream.measure.runner import first_prompts
from slipstream.measure.tune_report import (
    Candidate,
    Proposed,
    Raced,
    Size,
    Skipped,
    Timing,
    Tuned,
    TuneReport,
)
from slipstream.methods import named as methods
from slipstream.provenance import public, suggested
from slipstream.results import heading
from slipstream.spec import Named, Spec
from slipstream.targets.load import AnyTarget, loaded
from slipstream.targets.recorded import RecordedTarget

BUDGETS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 20, 26, 32, 40, 48, 64)  # nodes, root included
DEPTH, RANKS = 7, 10  # at most
GAMMA = 10  # the longest chain of draft models: the papers tune γ over 2 to 10
ROUNDS = 5  # of each tree in a lap
WIDTH = 8  # children of a dynamic tree's nodes, at most
SIZES = 4  # octaves of nodes whose best trees are raced
TREELESS = (
    "grows no trees that tune could choose among: it takes {names} or a drafter directory; of the others "
    "compare options by bench (--drafter ngram:depth=4 --drafter ngram:depth=8); of hybrid tune the head"
)


@public
def tune(
    target: AnyTarget,
    drafter: Named | Proposer = "auto",
    questions: Questions = (),
    *,
    temperatures: float | Sequence[float] = (0.0, 1.0),
    batch: int = 1,
    context: int | None = None,
    limit: int | None = 8,
    max_new_tokens: int = 40,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[TuneReport], None] = lambda _: None,
) -> TuneReport:
    """Find the tree and the proposal that pay most on this machine, at each temperature: 0, and one above it.

    Those of a drafter given by name are stored at once. `load_drafter` then uses them where no other tree is
    named, and `auto` with this head chooses among the best of each size. What its rounds cost and bring is
    stored, too. Sampled children are raced, but taken by name only: they draw another text for a seed.

    Args:
        target, questions, progress, keep: as `bench` takes them. The questions should be of the kind that
            will be asked.
        drafter: one that grows trees, or its name; "auto" stands for its head. For "self-speculative" the
            blocks to skip are chosen first.
        batch: texts that share a round. What is stored holds for the nearest number of texts.
        context: tokens behind which rounds are timed; default: as many as the questions have.
        limit: questions in all; 8 to 16 are enough.
        max_new_tokens: tokens of each answer along which drafts are judged.

    Raises:
        ValueError: no questions, a count or context out of range, or a drafter without trees to choose.
    """
    temperatures = several(temperatures)
    check_given(temperatures=temperatures)
    if sum(temperature > 0 for temperature in temperatures) > 1:
        raise ValueError("trees are stored for T = 0 and for T > 0: give one temperature above 0")
    check_counts(max_new_tokens=max_new_tokens, batch=batch)
    check_limits(context=context)
    asked, target = evenly(load_questions(questions), limit), loaded(target)
    spec = drafter if isinstance(drafter, Drafter) else tuned_head(drafter, target)
    itself = spec == Spec("self-speculative")
    skipping = skippable(target, first_prompts(target, asked), progress=progress) if itself else []
    skip = max(skipping, key=lambda skipped: skipped.expected).skip if skipping else None
    named = spec.replace(skip=skip) if skip and isinstance(spec, Spec) else spec
    grower = load_drafter(named, target) if isinstance(named, Spec) else named
    if not isinstance(grower, Proposer):
        names = ", ".join(method.name for method in methods() if method.tunes)
        raise ValueError(f"drafter {str(named)!r} {TREELESS.format(names=names)}")
    prompts = first_prompts(target, asked)
    if isinstance(spec, Spec) and (home := tuned_home(spec, target)) is not None:
        read_results(tuned_file(home))
    progress("cost of a pass")
    costs = Costs(target, grower, prompts, max_new_tokens, batch, context)
    done: list[Tuned] = []

    def report() -> TuneReport:
        return TuneReport(
            **heading(target),
            context=costs.context,
            batch=batch,
            passes_ms={rows: round(seconds * 1e3, 3) for rows, seconds in costs.passes.items()},
            draft_step_ms=round(costs.step * 1e3, 3),
            temperatures=done,
            skipping=skipping,
        )

    with reported(keep, lambda reason: report().stopped_by(reason) if done else None):
        for temperature in temperatures:
            progress(f"T = {temperature:g}: the target answers")
            recorded = record(target, prompts, max_new_tokens, grower.taps, len(prompts), temperature)
            done.append(_Tuning(target, grower, recorded, temperature, costs, skip, progress).tuned())
            if isinstance(spec, Spec):
                progress(f"T = {temperature:g}: what auto's rounds cost and bring")
                _store(target, spec, recorded, done[-1], costs)
    return report()


def proposing(drafter: Proposer, proposal: str, tree: str = "chain-1") -> Proposer:
    """The same head with candidates of another kind, and another tree of its own."""
    drafter = copy(drafter)
    drafter.grow_as(tree, proposal)
    return drafter


def deepest(drafter: Proposer) -> int:
    """The depth of the deepest tree that is looked at."""
    most = GAMMA if isinstance(drafter, DraftModel) else DEPTH
    return min(most, drafter.deepest or most)


def acceptance(drafter: Proposer, recorded: RecordedTarget, proposal: str) -> list[list[float]]:
    """[d][r]: how often, behind d right first candidates, the next token is the r-th candidate."""
    children = min(RANKS, len(drafter.vocab))
    shape = TreeSpec.parse(f"backbone-{deepest(drafter)}x{children}")
    _, drafts, _ = ranks(proposing(drafter, proposal), recorded, shape)
    counts = torch.stack([torch.bincount(depth[depth >= 0], minlength=children + 1) for depth in drafts.T])
    return (counts[:, :-1] / counts.sum(1, keepdim=True).clamp(min=1)).tolist()


def ranks(
    drafter: Proposer, recorded: RecordedTarget, shape: TreeSpec
) -> tuple[Int[Tensor, " n"], Int[Tensor, "n depth"], Float[Tensor, "n depth"]]:
    """Drafts that begin at every token of the recorded answers: the texts that they begin in, the ranks of
    the right candidates, and how sure the drafter is of the first ones. The shape is a backbone. Its width
    stands for a position where no candidate is right; −1 for one behind a wrong first candidate or past the
    end of the text."""
    depth, width = shape.depth, shape.children
    last = recorded.tokens.shape[1] - 1
    drafts = []
    for engine in steps(drafter, recorded, one_by_one, shape):
        span = engine.span
        assert span is not None and span.tree is not None and span.tree.scores is not None
        at = span.start[:, None] + torch.arange(1, depth + 1, device=span.start.device)
        right = recorded.tokens[engine.cache.texts[:, None], at.clamp(max=last)]
        hits = span.tree.tokens[:, 1:].unflatten(1, (depth, width)) == right[..., None]
        rank = torch.where(hits.any(2), hits.int().argmax(2), width)
        reached = F.pad((rank == 0).cumprod(1), (1, -1), value=1).bool()
        paths = span.tree.scores[:, 1::width]  # log probabilities of the first candidates' paths
        confidence = (paths - F.pad(paths, (1, -1))).exp()
        rank = torch.where(reached & (right >= 0), rank, -1)
        drafts.append((engine.cache.texts.clone(), rank, confidence))
    text, rank, confidence = (torch.cat(parts) for parts in zip(*drafts, strict=True))
    return text, rank, confidence


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
        one, wide = np.interp([1, rows], [*self.passes], [*self.passes.values()]).tolist()
        drafted = wide + self.short.draft + (depth - 1) * self.step + self.short.host
        return float(tau * (one + self.plain.host) / drafted)


def every_size(rates: list[list[float]], costs: Costs) -> list[Size]:
    """The best static tree of each budget and depth."""
    sizes = []
    for depth in range(1, len(rates) + 1):
        for nodes, (paths, tau) in optimal_trees(rates[:depth], BUDGETS).items():
            if len(paths) == nodes - 1 and max(map(len, paths)) == depth:  # spends all and goes as deep
                estimate = costs.speedup(tau, nodes, depth)
                sizes.append(Size(nodes=nodes, depth=depth, tree=as_text(paths), estimate=estimate))
    return sizes


def as_text(paths: Iterable[Path]) -> str:
    """A static tree as options and files name it."""
    return json.dumps(sorted(paths, key=lambda path: (len(path), path)))


def best_sizes(rates: list[list[float]], costs: Costs) -> list[Size]:
    """The best static tree of each budget."""
    best: dict[int, Size] = {}
    for size in sorted(every_size(rates, costs), key=lambda size: -size.estimate):
        best.setdefault(size.nodes, size)
    return [best[nodes] for nodes in sorted(best)]


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    """Costs that do not fall as rows are added: falling ones are noise, and become their mean."""
    pools: list[list[float]] = []
    for value in seconds.values():
        pools.append([value])
        while len(pools) > 1 and mean(pools[-2]) > mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return dict(zip(seconds, (mean(pool) for pool in pools for _ in pool), strict=True))


def _store(target: Target, spec: Spec, recorded: RecordedTarget, tuned: Tuned, costs: Costs) -> None:
    """Store what was found, then measure what `auto` has to know of it."""
    entry = tuned.chosen.stored() | {"context": costs.context, "rungs": tuned.rungs}
    save_tuned(tuned_home(spec, target), target.place, {tuned.temperature: entry}, costs.batch)
    head = Spec("auto", {"head": str(spec.replace(tree=None, proposal=None))})
    auto = load_drafter(head, target, tuned.temperature, costs.batch)
    law = recorded.law if auto.probes is None else None
    learn(target, auto, costs.batch, costs.context, lambda policy: steps(auto, recorded, law, policy=policy))


@dataclass
class _Tuning:
    """The search at one temperature."""

    target: Target
    drafter: Proposer
    recorded: RecordedTarget
    temperature: float
    costs: Costs
    skip: str | None
    progress: Callable[[str], None]

    def tuned(self) -> Tuned:
        drafter, recorded, at = self.drafter, self.recorded, f"T = {self.temperature:g}"
        proposals: list[Proposed] = []
        kinds = ("top-k", "noise") if self.temperature else ("top-k",)
        for kind in kinds if drafter.probes is None else ():
            self.progress(f"{at}: {kind}, ranks")
            rates = acceptance(drafter, recorded, kind)
            rounded = [[round(rate, 4) for rate in depth] for depth in rates]
            budgets = best_sizes(rates, self.costs)
            proposals.append(Proposed(proposal=kind, acceptance=rounded, budgets=budgets))
        self.progress(f"{at}: drafts along the answers")
        pairs = _promising(proposals) if drafter.probes is None else [*product(kinds, _masked(drafter))]
        if self.temperature:
            static = [_without_gaps(tree) for _, tree in pairs if TreeSpec.parse(tree).paths]
            pairs += [("sampled", tree) for tree in dict.fromkeys(static)]
        candidates = [self._candidate(proposal, tree) for proposal, tree in pairs]
        lengths = range(2, self.costs.depth + 1) if isinstance(drafter, DraftModel) else ()
        gammas = [self._candidate("top-k", f"chain-{gamma}") for gamma in lengths]
        if gammas:
            candidates.append(max(gammas, key=lambda chain: chain.estimate))
        if not candidates:
            raise ValueError(
                f"at {at} no guess of this drafter is the target's: {suggested('doctor')} says why"
            )
        self.progress(f"{at}: a race of {len(candidates)}")
        plain, raced = self._race(candidates)
        exact = [row for row in raced if row.proposal != "sampled"]
        rungs = {row.nodes.bit_length(): row.tree for row in reversed(exact)}  # the best of each octave
        return Tuned(
            temperature=self.temperature,
            plain=plain,
            proposals=proposals,
            gammas=gammas,
            candidates=raced,
            chosen=exact[0].model_copy(update={"skip": self.skip} if self.skip else {}),
            rungs=[*rungs.values()],
        )

    def _candidate(self, proposal: str, tree: str) -> Candidate:
        """A proposal and a tree, with the τ that they reach along the record, or where that cannot tell, in
        decoding its prompts anew."""
        drafter = proposing(self.drafter, proposal, tree)
        known = drafter.probes is None and drafter.law == "coupled"
        tau = (predict if known else decoded)(drafter, self.recorded).tau
        estimate = round(self.costs.speedup(tau, drafter.rows, drafter.depth), 4)
        size = {"nodes": drafter.tree_spec.nodes, "depth": drafter.depth}
        return Candidate(tree=tree, proposal=proposal, **size, tau=round(tau, 4), estimate=estimate)

    def _race(self, candidates: list[Candidate]) -> tuple[Timing, list[Raced]]:
        """Plain decoding's timing, and the candidates, best first. Each lap drops the slower half of them."""
        trees = [(proposing(self.drafter, one.proposal, one.tree), None) for one in candidates]
        timed = Rounds(self.target, [(Vanilla(), None), *trees], self.costs.prompts, self.temperature)
        running, rounds = list(range(len(trees))), 0
        ranking: list[Raced] = []
        while running:
            rounds += ROUNDS
            plain, *spent = timed.run(ROUNDS, [0, *(1 + i for i in running)])
            times = {}
            for i in running:  # against plain rounds of the same minutes
                timing = self._timing(candidates[i].tau, spent[i], plain)
                times[i] = Raced(**candidates[i].stored(), rounds=rounds, **timing.stored())
            running.sort(key=lambda i: -times[i].speedup)
            left = (len(running) + 1) // 2 if len(running) > 2 else 0
            ranking = [times[i] for i in running[left:]] + ranking
            running = running[:left]
        return self._timing(1.0, plain, plain), ranking

    def _timing(self, tau: float, cost: Seconds, plain: Seconds) -> Timing:
        parts = {f"{part}_ms": round(getattr(cost, part) * 1e3, 3) for part in PARTS}
        speed = round(len(self.costs.prompts) * tau / cost.total, 2)
        return Timing(**parts, tokens_per_second=speed, speedup=round(tau * plain.total / cost.total, 4))


def _promising(proposals: list[Proposed]) -> list[tuple[str, str]]:
    """Proposals and trees: a static and a dynamic one of the best size of each octave of nodes."""
    sizes = [(proposed.proposal, size) for proposed in proposals for size in proposed.budgets]
    sizes.sort(key=lambda pair: pair[1].estimate)
    octaves = {size.nodes.bit_length(): (proposal, size) for proposal, size in sizes}
    pairs = []
    for proposal, size in sorted(octaves.values(), key=lambda pair: -pair[1].estimate)[:SIZES]:
        pairs.append((proposal, size.tree))
        if size.depth > 1:  # the dynamic tree of depth 1 is the same
            pairs.append((proposal, f"dynamic-{size.depth}x{min(WIDTH, size.nodes - 1)}x{size.nodes}"))
    return pairs


def _without_gaps(tree: str) -> str:
    """A static tree of the same form, whose nodes have their first children: sampled ones stand in the order
    in which they were drawn."""
    spec = TreeSpec.parse(tree)
    if spec.keeps_first_children:
        return tree
    moved: dict[Path, Path] = {(): ()}
    for path in sorted(spec.paths, key=len):
        before = [other for other in spec.paths if other[:-1] == path[:-1] and other < path]
        moved[path] = (*moved[path[:-1]], len(before))
    return as_text(filter(None, moved.values()))


def _masked(drafter: Proposer) -> list[str]:
    """Trees of a drafter whose guesses no record knows: with one of its masks, half and all of them."""
    most, trees = deepest(drafter), list[str]()
    for depth in sorted({1, (1 + most) // 2, most}):
        nodes = [n for n in (4, 8, 16) if depth + 1 < n <= 6 * depth]
        trees += [f"chain-{depth}", *(f"best-first-{depth}x{n}" for n in nodes)]
    return trees


@torch.inference_mode()
def skippable(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new: int = 40,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Skipped]:
    """What skipping each number of a target's own blocks promises, to draft for itself.

    Blocks that change their input least are skipped first (Men et al. 2024, "ShortGPT": the cosine of a
    block's input and output). Each number of blocks is judged by its agreement with the target along answers
    of `new` tokens, and by the measured cost of a pass. Raises ValueError for fewer than three blocks.
    """
    L = target.sizes.blocks
    if L < 3:
        raise ValueError(
            f"this target has {L} blocks; self-speculation skips some between the first and the last"
        )
    progress("the target answers")
    taps = tuple(f"{INPUT}{i}" for i in range(L))
    recorded = record(target, prompts, new, taps)
    at = torch.arange(recorded.tokens.shape[1], device=target.device)
    read = at < recorded.lengths[:, None]
    judged = (at >= recorded.prompts[:, None] - 1) & (at + 1 < recorded.lengths[:, None])
    states = recorded.tapped(taps)[read].float().unflatten(-1, (L, -1))
    similarity = F.cosine_similarity(states[:, 1:-1], states[:, 2:], dim=-1).mean(0)  # of blocks 1 … L − 2
    order = [1 + i for i in similarity.argsort(descending=True).tolist()]
    whole, lm_head, skips = pass_seconds(target, (1,))[1], target.lm_head(), list[Skipped]()
    rows = [tokens[:n].tolist() for tokens, n in zip(recorded.tokens, recorded.lengths, strict=True)]
    for count in range(max(1, L // 10), len(order) + 1, max(1, L // 10)):
        progress(f"{count} blocks skipped")
        blocks = sorted(order[:count])
        short = target.part([i for i in range(L) if i not in blocks])
        chosen = lm_head(short.features(rows, (FINAL,))).argmax(-1)
        right = chosen == recorded.tokens[:, 1 : chosen.shape[1] + 1]
        alpha = float(right[judged[:, : chosen.shape[1]]].float().mean())
        c = pass_seconds(short, (1,))[1] / whole
        expected = round(max(promised(alpha, gamma, c) for gamma in range(1, 11)), 4)
        skip = ",".join(map(str, blocks))
        skips.append(Skipped(skip=skip, alpha=round(alpha, 4), c=round(c, 4), expected=expected))
    return skips
