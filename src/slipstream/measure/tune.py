"""tune: the tree that pays most on this machine, from what rounds cost and what would be accepted.

Acceptance by depth and rank along the target's own texts gives the optimal static tree of every node budget
and depth (`optimal_trees`). The measured costs of rows and of draft steps say which sizes may pay. Trees of
these sizes, static ones and ones that follow the drafter's confidence, are drafted along the same texts for
their τ, and then raced. Where no record can tell τ, as of sampled children and of guesses that stand in the
target's own passes, the texts are decoded anew. The best tree of each size is one that `auto` may take.
"""

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.core.tree_builders import Path
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter, tuned_home
from slipstream.drafters.auto import tuned_head
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.store import save_tuned, tuned_file
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.costs import learn
from slipstream.engine.engine import Seconds
from slipstream.engine.replay import decoded, predict, record, steps
from slipstream.files import check_counts, check_given, check_limits, evenly, read_results, several
from slipstream.measure.bench_report import PARTS
from slipstream.measure.cost import Rounds
from slipstream.measure.questions import Questions, load_questions
from slipstream.measure.runner import first_prompts
from slipstream.measure.skip import skippable
from slipstream.measure.trees import ROUNDS, Costs, acceptance, best_sizes, deepest, proposing
from slipstream.measure.tune_report import Held, Proposed, Raced, Skipped, Timing, Tuned, TuneReport
from slipstream.methods import named
from slipstream.provenance import public, suggested
from slipstream.results import heading
from slipstream.spec import Named, Spec
from slipstream.targets.load import AnyTarget, loaded
from slipstream.targets.recorded import RecordedTarget

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
    temperatures = _temperatures(temperatures)
    check_counts(max_new_tokens=max_new_tokens, batch=batch)
    check_limits(context=context)
    asked, target = evenly(load_questions(questions), limit), loaded(target)
    spec = drafter if isinstance(drafter, Drafter) else tuned_head(drafter, target)
    itself = spec == Spec("self-speculative")
    skipping = skippable(target, first_prompts(target, asked), progress=progress) if itself else []
    skip = max(skipping, key=lambda each: each.expected).skip if skipping else None
    made = _grower(spec.replace(skip=skip) if skip and isinstance(spec, Spec) else spec, target)
    prompts = first_prompts(target, asked)
    if isinstance(spec, Spec) and (home := tuned_home(spec, target)) is not None:
        read_results(tuned_file(home))
    progress("cost of a pass")
    costs = Costs(target, made, prompts, max_new_tokens, batch, context)
    done: list[Tuned] = []
    try:
        for temperature in temperatures:
            progress(f"T = {temperature:g}: the target answers")
            recorded = record(target, prompts, max_new_tokens, made.taps, len(prompts), temperature)
            done.append(_tuned(target, made, recorded, temperature, costs, skip, progress))
            if isinstance(spec, Spec):
                progress(f"T = {temperature:g}: what auto's rounds cost and bring")
                _store(target, spec, recorded, done[-1], costs)
    except BaseException as error:
        if done:
            keep(_report(target, costs, done, skipping).ended_by(error))
        raise
    return _report(target, costs, done, skipping)


def _temperatures(given: float | Sequence[float]) -> list[float]:
    """Raises ValueError where trees for them cannot be stored."""
    temperatures = several(given)
    check_given(temperatures=temperatures)
    if sum(temperature > 0 for temperature in temperatures) > 1:
        raise ValueError("trees are stored for T = 0 and for T > 0: give one temperature above 0")
    return temperatures


def _grower(drafter: Spec | Drafter, target: Target) -> Proposer:
    """A drafter whose trees can be chosen. Raises ValueError for any other."""
    made = load_drafter(drafter, target) if isinstance(drafter, Spec) else drafter
    if not isinstance(made, Proposer):
        names = ", ".join(method.name for method in named() if method.tunes)
        raise ValueError(f"drafter {str(drafter)!r} {TREELESS.format(names=names)}")
    return made


def _store(target: Target, spec: Spec, recorded: RecordedTarget, found: Tuned, costs: Costs) -> None:
    """Keep what was found, then measure what `auto` has to know of it."""
    temperature, entry = found.temperature, {"context": costs.context, "rungs": found.candidate_trees}
    entry = found.chosen.stored() | entry
    save_tuned(tuned_home(spec, target), target.place, {temperature: entry}, costs.batch)
    head = Spec("auto", {"head": str(spec.replace(tree=None, proposal=None))})
    auto = load_drafter(head, target, temperature, costs.batch)
    law = recorded.law if auto.probes is None else None
    learn(target, auto, costs.batch, costs.context, lambda policy: steps(auto, recorded, law, policy=policy))


def _report(target: Target, costs: Costs, done: list[Tuned], skipping: list[Skipped]) -> TuneReport:
    return TuneReport(
        **heading(target),
        context=costs.context,
        batch=costs.batch,
        passes_ms={rows: round(seconds * 1e3, 3) for rows, seconds in costs.passes.items()},
        draft_step_ms=round(costs.step * 1e3, 3),
        temperatures=done,
        skipping=skipping,
    )


def _tuned(
    target: Target,
    drafter: Proposer,
    recorded: RecordedTarget,
    temperature: float,
    costs: Costs,
    skip: str | None,
    progress: Callable[[str], None],
) -> Tuned:
    """What `tune` finds at one temperature."""
    proposals: list[Proposed] = []
    kinds = ("top-k", "noise") if temperature else ("top-k",)
    for proposal in kinds if drafter.probes is None else ():
        progress(f"T = {temperature:g}: {proposal}, ranks")
        rates = acceptance(drafter, recorded, proposal)
        rounded = [[round(rate, 4) for rate in depth] for depth in rates]
        proposals.append(Proposed(proposal=proposal, acceptance=rounded, budgets=best_sizes(rates, costs)))
    progress(f"T = {temperature:g}: drafts along the answers")
    pairs = [*product(kinds, _masked(drafter))] if drafter.probes is not None else _promising(proposals)
    if temperature:
        static = [_without_gaps(tree) for _, tree in pairs if TreeSpec.parse(tree).paths]
        pairs += [("sampled", tree) for tree in dict.fromkeys(static)]
    candidates = [_held(drafter, recorded, proposal, tree, costs) for proposal, tree in pairs]
    gammas: list[Held] = []
    if isinstance(drafter, DraftModel):
        chains = (f"chain-{gamma}" for gamma in range(2, costs.depth + 1))
        gammas = [_held(drafter, recorded, "top-k", tree, costs) for tree in chains]
        candidates.append(max(gammas, key=lambda chain: chain.estimate))
    if not candidates:
        raise ValueError(
            f"at T = {temperature:g} no guess of this drafter is the target's: {suggested('doctor')} says why"
        )
    progress(f"T = {temperature:g}: a race of {len(candidates)}")
    plain, raced = _race(target, drafter, candidates, costs.prompts, temperature)
    exact = [each for each in raced if each.proposal != "sampled"]
    chosen = exact[0].model_copy(update={"skip": skip}) if skip else exact[0]
    rungs = {each.nodes.bit_length(): each.tree for each in reversed(exact)}  # the best of each octave
    judged: dict[str, Any] = {"temperature": temperature, "proposals": proposals, "gammas": gammas}
    return Tuned(**judged, plain=plain, candidates=raced, chosen=chosen, rungs=[*rungs.values()])


def _promising(proposals: list[Proposed]) -> list[tuple[str, str]]:
    """Proposals and trees: a static and a dynamic one of the best size of each octave of nodes."""
    sizes = [(each.proposal, size) for each in proposals for size in each.budgets]
    sizes.sort(key=lambda each: each[1].estimate)
    octaves = {size.nodes.bit_length(): (proposal, size) for proposal, size in sizes}
    best = sorted(octaves.values(), key=lambda each: -each[1].estimate)[:SIZES]
    pairs = []
    for proposal, size in best:
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
    named: dict[Path, Path] = {(): ()}
    for path in sorted(spec.paths, key=len):
        before = [other for other in spec.paths if other[:-1] == path[:-1] and other < path]
        named[path] = (*named[path[:-1]], len(before))
    return json.dumps(sorted(filter(None, named.values()), key=lambda path: (len(path), path)))


def _masked(drafter: Proposer) -> list[str]:
    """Trees of a drafter whose guesses no record knows: with one of its masks, with half and with all of
    them."""
    most = deepest(drafter)
    trees = []
    for depth in sorted({1, (1 + most) // 2, most}):
        nodes = [n for n in (4, 8, 16) if depth + 1 < n <= 6 * depth]
        trees += [f"chain-{depth}", *(f"best-first-{depth}x{n}" for n in nodes)]
    return trees


def _held(drafter: Proposer, recorded: RecordedTarget, proposal: str, tree: str, costs: Costs) -> Held:
    """A proposal and a tree, with the τ that they reach along the record, or where that cannot tell, in
    decoding its prompts anew."""
    made = proposing(drafter, proposal, tree)
    known = made.probes is None and made.law == "coupled"
    tau = (predict if known else decoded)(made, recorded).tau
    estimate = round(costs.speedup(tau, made.rows, made.depth), 4)
    size = {"nodes": made.tree_spec.nodes, "depth": made.depth}
    return Held(tree=tree, proposal=proposal, **size, tau=round(tau, 4), estimate=estimate)


def _race(
    target: Target,
    drafter: Proposer,
    candidates: list[Held],
    prompts: Sequence[list[int]],
    temperature: float,
) -> tuple[Timing, list[Raced]]:
    """Plain decoding's timing, and the candidates, best first. Each lap drops the slower half of them."""
    trees = [(proposing(drafter, each.proposal, each.tree), None) for each in candidates]
    rounds = Rounds(target, [(Vanilla(), None), *trees], prompts, temperature)
    running = list(range(len(trees)))
    ranking: list[Raced] = []
    lap = 0
    while running:
        lap += 1
        plain, *spent = rounds.run(ROUNDS, [0, *(1 + i for i in running)])
        times = {}
        for i in running:  # against plain rounds of the same minutes
            timing = _timing(candidates[i].tau, spent[i], plain, len(prompts))
            times[i] = Raced(**candidates[i].stored(), rounds=lap * ROUNDS, **timing.stored())
        running.sort(key=lambda i: -times[i].speedup)
        left = (len(running) + 1) // 2 if len(running) > 2 else 0
        ranking = [times[i] for i in running[left:]] + ranking
        running = running[:left]
    return _timing(1.0, plain, plain, len(prompts)), ranking


def _timing(tau: float, cost: Seconds, plain: Seconds, texts: int) -> Timing:
    parts = {f"{part}_ms": round(getattr(cost, part) * 1e3, 3) for part in PARTS}
    speed = round(texts * tau / cost.total, 2)
    return Timing(**parts, tokens_per_second=speed, speedup=round(tau * plain.total / cost.total, 4))
