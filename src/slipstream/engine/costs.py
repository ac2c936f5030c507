"""What rounds of a drafter's rungs cost here, measured once in a few seconds, and what they brought: kept in
the user's cache."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from statistics import median
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from rich.console import Group
from rich.text import Text

from slipstream.core.drafter import Drafter, ScratchSlots, State
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.span import Span
from slipstream.core.target import Target
from slipstream.core.tree import Tree, chain
from slipstream.core.tree_spec import PLAIN, TreeSpec
from slipstream.drafters.auto import SAMPLED
from slipstream.engine.engine import Engine
from slipstream.engine.memory import GIB, memory
from slipstream.engine.policy import Accepted, TreeStatistics, Policy, Trial
from slipstream.engine.request import Request
from slipstream.files import cache_home, first_line, note, read_results, understood, update_json
from slipstream.kernels.build import fingerprint
from slipstream.results import Figures

LAPS, SECONDS, FEWEST = 8, 3.0, 3  # over all rungs: at most, in all, and at least
CONTEXT = 256  # tokens before the rounds that are measured
NEWS = 32  # rounds between two writings of what was accepted
FILE, ACCEPTED = "rounds.json", "accepted"
PACE = "a token read late"  # among what rungs cost
SIGNS = ("none", "short", "long", "longer")  # matches, by `Drafter.signs`
_ledgers: WeakKeyDictionary[Target, dict[Any, TreeStatistics]] = WeakKeyDictionary()


def ledger(target: Target, drafter: Drafter) -> TreeStatistics:
    """What is known of a drafter's rungs. All drafters of the same name and rungs share it: a drafter that is
    named in each call is made anew, and need not learn anew."""
    ledgers = _ledgers.setdefault(target, {})
    if (key := (drafter.name, drafter.candidate_trees)) not in ledgers:
        known = ledgers[key] = TreeStatistics(drafter.candidate_trees)
        names = [rung.name for rung in drafter.candidate_trees]
        with suppress(ValueError), understood(FILE):  # what is damaged is learnt anew
            known.accepted |= {
                (names.index(name), sign): Accepted(float(mean), float(rounds))
                for name, means in _stored(target, drafter).get(ACCEPTED, {}).items()
                for sign, (mean, rounds) in enumerate(means if name in names else ())
            }
    return ledgers[key]


def policy(target: Target, drafter: Drafter, texts: int) -> Policy | None:
    """The policy for an engine of so many texts; None for a drafter that offers no rungs."""
    if not drafter.candidate_trees:
        return None
    with target.lock:  # one thread measures, alone
        known = ledger(target, drafter)
        if texts not in known.begun:
            known.seconds = _seconds(target, drafter, texts) | known.seconds
            known.begun.add(texts)
        drafter.pace = known.pace = drafter.pace or known.pace  # the next drafter of the name begins with it
    return Policy(known)


def keep(target: Target, drafter: Drafter) -> None:
    """Store what was accepted and what rounds cost, if there is news of it: a first measurement in a busy
    second is not for ever. All in one writing: an answer ends behind it."""
    if not drafter.candidate_trees:
        return
    with target.lock:
        known = ledger(target, drafter)
        if known.chosen.total() - known.kept >= NEWS:
            costs = {texts: known.seconds[texts] for texts in known.timed}
            _store(target, drafter, _accepted(target, drafter, known) | _costs(target, drafter, costs))
            known.kept = known.chosen.total()


def learn(
    target: Target, drafter: Drafter, texts: int, context: int, decode: Callable[[Policy], Iterable[Any]]
) -> None:
    """Measure what rounds of so many texts cost behind a context, and what every rung brings, and store
    both. `decode` gives the rounds of some texts under a policy."""
    known = ledger(target, drafter)
    known.seconds[texts] = measured(target, drafter, texts, context)
    known.begun.add(texts)
    _store(target, drafter, _costs(target, drafter, {texts: known.seconds[texts]}))
    for rung, spec in enumerate(drafter.candidate_trees):
        if spec.depth:
            deque(decode(Trial(known, rung)), maxlen=0)
    _store(target, drafter, _accepted(target, drafter, known))


def _accepted(target: Target, drafter: Drafter, known: TreeStatistics) -> dict[str, Any]:
    """What is stored of acceptance. Other rungs of the drafter's name, which it had elsewhere, stay."""
    if not known.accepted:  # no text took guesses
        return {}
    signs = 1 + max(sign for _, sign in known.accepted)
    means = {
        rung.name: [[round(each, 3) for each in astuple(known.of(i, sign))] for sign in range(signs)]
        for i, rung in enumerate(drafter.candidate_trees)
    }
    return {ACCEPTED: _stored(target, drafter).get(ACCEPTED, {}) | means}


def _costs(target: Target, drafter: Drafter, seconds: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """What is stored of rounds' costs, given by numbers of texts. Other rungs, as of another temperature's
    trees, stay."""
    names, pace = [rung.name for rung in drafter.candidate_trees], {PACE: round(drafter.pace, 9)}
    known = _stored(target, drafter)
    return {
        (place := _setting(target, texts)): known.get(place, {})
        | {name: round(s, 6) for name, s in zip(names, each, strict=True)}
        | pace
        for texts, each in seconds.items()
    }


def _setting(target: Target, texts: int | str) -> str:
    """Costs hold for one place and one build of the kernels."""
    return f"{target.place}, build {fingerprint()}, texts: {texts}"


def _key(target: Target, drafter: Drafter, what: str) -> str:
    """Quantised copies have their model's fingerprint, and begin with what it accepted. Costs are begun with
    at all temperatures: what noise adds to them, each round tells."""
    name = drafter.name if what == ACCEPTED else drafter.name.removesuffix(SAMPLED)
    return f"{target.fingerprint} {name}"


def _stored(target: Target, drafter: Drafter) -> dict[str, dict[str, Any]]:
    """Of this drafter, by what it is: costs in a setting, or what was accepted. A damaged file is deleted:
    what it held is found again."""
    path = cache_home() / FILE
    try:
        kept = read_results(path)
    except ValueError as error:
        note(f"costs of rounds are measured again: {first_line(error)}")
        with suppress(OSError):
            path.unlink()
        return {}
    own = {what: each.get(_key(target, drafter, what)) for what, each in kept.items()}
    return {what: each for what, each in own.items() if isinstance(each, dict)}


def _store(target: Target, drafter: Drafter, news: Mapping[str, dict[str, Any]]) -> None:
    """What is known of the drafter's rungs. A cache that cannot be written is no error."""
    with suppress(ValueError, OSError):
        entries = {what: {_key(target, drafter, what): each} for what, each in news.items()}
        update_json(cache_home() / FILE, entries)


def _seconds(target: Target, drafter: Drafter, texts: int) -> dict[int, list[float]]:
    """By texts and rung, from the user's cache: for so many, else they are measured, and for what other
    numbers are known, as an engine's texts become fewer."""
    names, place = [*(rung.name for rung in drafter.candidate_trees), PACE], _setting(target, "")
    kept, paces = dict[int, list[float]](), dict[int, float]()
    for what, known in _stored(target, drafter).items():
        number = what.removeprefix(place)
        own = {name: known[name] for name in names if name in known}
        if what.startswith(place) and number.isdigit() and len(own) == len(names) and _are_seconds(own):
            *kept[int(number)], paces[int(number)] = own.values()
    if texts not in kept:
        kept[texts] = measured(target, drafter, texts)
        _store(target, drafter, _costs(target, drafter, {texts: kept[texts]}))
    elif target.compiles:
        for rows in {1, texts}:  # graphs of all sizes, before they are needed
            next(_laps(target, drafter, rows))
    drafter.pace = paces.get(texts, drafter.pace)
    return kept


def _are_seconds(known: Mapping[str, Any]) -> bool:
    """Whether what a file holds are a round's costs. A head may take no time."""
    numbers = all(isinstance(each, int | float) and 0 <= each < math.inf for each in known.values())
    return numbers and all(each for name, each in known.items() if name != PACE)


def measured(target: Target, drafter: Drafter, texts: int, context: int = CONTEXT) -> list[float]:
    """Median seconds of a round of every rung. Rungs alternate, after an untimed round of each. The drafter's
    `pace` is what its head takes to read their prompts."""
    if texts > 1 and target.compiles:
        next(_laps(target, drafter, 1))
    laps = _laps(target, drafter, texts, context)
    next(laps)
    began, spent = perf_counter(), list[list[float]]()
    for lap in laps:
        spent.append(lap)
        if len(spent) == LAPS or (len(spent) >= FEWEST and perf_counter() - began > SECONDS):
            break
    for tree in [rung for rung in drafter.candidate_trees if rung.children][:1]:
        # The first engine's head read its prompts while graphs and buffers were made.
        _engine(target, drafter, texts, context).step(spec=tree)
    return [median(times) for times in zip(*spent, strict=True)]


def _laps(target: Target, drafter: Drafter, texts: int, context: int = CONTEXT) -> Iterator[list[float]]:
    """Seconds of a round of every rung, again and again. The first lap makes buffers and graphs."""
    deepest = max(rung.depth for rung in drafter.candidate_trees)
    most = min(target.window, context + CONTEXT)  # a longer text makes all rounds alike
    engine = _engine(target, drafter, texts, context)

    def ready() -> Engine:
        """With room for the rounds of a rung."""
        fits = max(engine.lengths) + 3 * (deepest + 2) <= most
        return engine if fits else _engine(target, drafter, texts, context)

    for rung in drafter.candidate_trees:
        engine = ready()
        engine.step(spec=rung)
        engine.state.flush()  # a drafter that waits reads now, and then has one token to read
        engine.step(spec=PLAIN)
        engine.step(spec=rung)
    while True:
        lap = []
        for rung in drafter.candidate_trees:
            engine = ready()
            # The timed round reads what this one brings, and its masks guess. Plain rounds of eight texts
            # took half as long again where they were timed behind the largest tree's.
            engine.step(spec=rung)
            before = perf_counter()
            drafter.match_buckets(engine.state)
            engine.step(spec=rung)
            lap.append(perf_counter() - before)
        yield lap


def _engine(target: Target, drafter: Drafter, texts: int, context: int) -> Engine:
    """An engine under way behind a context, or as much of it as half the window holds."""
    context = min(context, target.window // 2)
    prompts = [[(7 * i + text) % target.vocab for i in range(context)] for text in range(texts)]
    capacity = min(context + CONTEXT, target.window)
    engine = Engine(target, Full(drafter), rows=texts, capacity=capacity, specs=drafter.candidate_trees)
    sampling = Sampling(temperature=float(drafter.uses_target_noise))  # noise takes its time
    engine.admit(*(Request(prompt, sampling) for prompt in prompts))
    return engine


class Full(Drafter):
    """The same drafter, for which there is always a match, though never a right one."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.taps, self.memory = drafter, drafter.taps, drafter.memory
        self.rows, self.depth, self.probes = drafter.rows, drafter.depth, drafter.probes

    def start(self, batch: int, device: torch.device) -> State:
        return self._drafter.start(batch, device)

    def update(self, span: Span, state: State) -> None:
        self._drafter.update(span, state)

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        return self._drafter.scratch_slots(spec)

    def propose(self, state: State, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        tree = self._drafter.propose(state, sampler, spec)
        return tree if spec is None or spec.children else chain(state.root[:, None].repeat(1, spec.nodes))


def explained(target: Target, drafter: Drafter, tokens: int | None = None) -> Group:
    """What was chosen in this process, and why: a row for every rung; and what a text of `tokens` holds."""
    known = ledger(target, drafter)
    texts = min(known.begun)
    costs = known.costs(texts)
    title = f"{drafter.name}, {known.chosen.total()} rounds; ms, and tokens by the length of a match"
    table = Figures(title, "tree", "rounds", "nodes", "ms", *SIGNS, "tokens/s")
    for i, (rung, cost) in enumerate(zip(known.candidate_trees, costs, strict=True)):
        brings = [1 + known.of(i, sign).mean for sign in range(len(SIGNS))]
        speeds = texts * brings[0] / cost, texts * brings[-1] / cost
        speed = f"{speeds[0]:.0f} to {speeds[1]:.0f}" if rung.depth else f"{speeds[0]:.0f}"
        row = (known.chosen[i], rung.nodes, f"{1e3 * cost:.1f}", *(f"{each:.2f}" for each in brings), speed)
        table.add_row(_short(rung), *row)
    note = (
        "A round takes the tree that promises most tokens a second. Tokens are means over all texts; a text "
        "whose guesses are accepted less often than these takes smaller trees, or none (plain), and is tried "
        f"again now and then. Kept in {cache_home() / FILE}."
    )
    found = ", ".join(map(_short, drafter.tuned))
    text = f"{f'Found by tune: {found}. ' if found else ''}{note}"
    if tokens is not None:
        held = memory(target, drafter, tokens)
        text += f"\n{held}; 1 GiB holds {int(GIB // held.text)} such texts."
    return Group(table, Text(text, "dim"))


def _short(rung: TreeSpec) -> str:
    """A name that fits a table: a static tree by its depth and nodes."""
    return f"static-{rung.depth}x{rung.nodes}" if rung.name.startswith("[") else rung.name
