"""What rounds of a drafter's rungs cost here, measured once in a few seconds, and what they brought: kept in
the user's cache."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampling
from slipstream.core.shape import PLAIN
from slipstream.core.target import Target
from slipstream.core.tree import Tree, chain
from slipstream.decode.policy import Accepted, Ledger, Policy
from slipstream.decode.session import Session
from slipstream.files import cache_home, read_results, update_json
from slipstream.results import Figures

LAPS, SECONDS, FEWEST = 8, 3.0, 2  # over all rungs: at most, in all, and at least
CONTEXT = 256  # tokens before the rounds that are measured
NEWS = 200  # rounds between two writings of what was accepted
FILE, ACCEPTED = "rounds.json", "accepted"
_ledgers: WeakKeyDictionary[Drafter, Ledger] = WeakKeyDictionary()


def ledger(target: Target, drafter: Drafter) -> Ledger:
    """What is known of a drafter's rungs. All its sessions share it."""
    if drafter not in _ledgers:
        known = _ledgers[drafter] = Ledger(drafter.rungs)
        names = [rung.name for rung in drafter.rungs]
        kept = read_results(cache_home() / FILE).get(ACCEPTED, {}).get(_key(target, drafter), {})
        for name, means in kept.items():
            for sign, mean in enumerate(means if name in names else ()):
                known.accepted[names.index(name), sign] = Accepted(mean, 2 * Accepted.rounds)
    return _ledgers[drafter]


def policy(target: Target, drafter: Drafter, texts: int) -> Policy | None:
    """The policy for a session of so many texts; None for a drafter that offers no rungs."""
    if not drafter.rungs:
        return None
    known = ledger(target, drafter)
    if texts not in known.seconds:
        known.seconds[texts] = _seconds(target, drafter, texts)
    return Policy(known)


def keep(target: Target, drafter: Drafter) -> None:
    """Store what was accepted, if there is news of it."""
    known = _ledgers.get(drafter)
    if known is None or known.chosen.total() - known.kept < NEWS:
        return
    signs = 1 + max(sign for _, sign in known.accepted)
    means = {
        rung.name: [round(known.of(i, sign).mean, 3) for sign in range(signs)]
        for i, rung in enumerate(drafter.rungs)
    }
    update_json(cache_home() / FILE, ACCEPTED, {_key(target, drafter): means})
    known.kept = known.chosen.total()


def _key(target: Target, drafter: Drafter) -> str:
    return f"{target.fingerprint} {drafter.name}"


def _seconds(target: Target, drafter: Drafter, texts: int) -> list[float]:
    """By rung, from the user's cache, or measured."""
    file, place, key = cache_home() / FILE, f"{target.place}, texts: {texts}", _key(target, drafter)
    known = read_results(file).get(place, {}).get(key, {})
    if list(known) != [rung.name for rung in drafter.rungs]:
        seconds = measured(target, drafter, texts)
        known = {rung.name: round(each, 6) for rung, each in zip(drafter.rungs, seconds, strict=True)}
        update_json(file, place, {key: known})
    elif target.compiles:
        for rows in {1, texts}:  # graphs of all sizes, before they are needed
            next(_laps(target, drafter, rows))
    return list(known.values())


def measured(target: Target, drafter: Drafter, texts: int) -> list[float]:
    """Median seconds of a round of every rung. Rungs alternate, after an untimed round of each."""
    if texts > 1 and target.compiles:
        next(_laps(target, drafter, 1))
    laps = _laps(target, drafter, texts)
    next(laps)
    began, spent = perf_counter(), list[list[float]]()
    for lap in laps:
        spent.append(lap)
        if len(spent) == LAPS or (len(spent) >= FEWEST and perf_counter() - began > SECONDS):
            break
    return [median(times) for times in zip(*spent, strict=True)]


def _laps(target: Target, drafter: Drafter, texts: int) -> Iterator[list[float]]:
    """Seconds of a round of every rung, again and again. The first lap makes buffers and graphs."""
    context = min(CONTEXT, target.window // 2)
    prompts = [[(7 * i + text) % target.vocab for i in range(context)] for text in range(texts)]
    full: Any = Full(drafter)
    session = Session(
        target, full, rows=texts, capacity=min(2 * CONTEXT, target.window), shapes=drafter.rungs
    )
    session.admit(prompts, [Sampling()] * texts)
    for rung in drafter.rungs:
        session.step(shape=rung)
        assert list(session.state.held())  # a drafter that waits reads now, so that it has one token to read
        session.step(shape=PLAIN)
        session.step(shape=rung)
    while True:
        lap = []
        for rung in drafter.rungs:
            before = perf_counter()
            drafter.signs(session.state)
            session.step(min(rung.depth, target.window - 2 - max(session.lengths)), rung)
            lap.append(perf_counter() - before)
        yield lap


class Full:
    """The same drafter, for which there is always a match, though never a right one."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, state: Any, sampler: Any, shape: Any) -> Tree:
        tree = self._drafter.propose(state, sampler, shape)
        return tree if shape.width else chain(state.root[:, None].repeat(1, shape.nodes))


def explained(drafter: Drafter) -> Figures:
    """What a policy chose in this process, and why: a row for every rung."""
    known = _ledgers[drafter]
    texts = min(known.seconds)
    columns = ("nodes", "ms a round", "tokens a round: no match", "short match", "long match", "rounds")
    table = Figures(f"{drafter.name}: what it chose among", "tree", *columns)
    for i, (rung, seconds) in enumerate(zip(known.rungs, known.costs(texts), strict=True)):
        tokens = [f"{1 + known.of(i, sign).mean:.2f}" for sign in range(3)]
        table.add_row(rung.name, rung.nodes, f"{1e3 * seconds:.1f}", *tokens, known.chosen[i])
    return table
