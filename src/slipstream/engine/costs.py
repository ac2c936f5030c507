"""What rounds of a drafter's candidate trees cost here, measured once in a few seconds, and what they bring.
Both are kept in the user's cache."""

import math
from collections.abc import Callable, Iterable, Iterator
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
from slipstream.engine.policy import Accepted, Policy, TreeStatistics, Trial
from slipstream.engine.request import Request
from slipstream.files import cache_home, first_line, note, read_results, understood, update_json
from slipstream.kernels.build import fingerprint
from slipstream.results import Figures

LAPS, SECONDS, FEWEST = 8, 3.0, 3  # over all trees: at most, in all, and at least
CONTEXT = 256  # tokens before the rounds that are measured
NEWS = 32  # rounds between two writings of what was accepted
FILE, ACCEPTED = "rounds.json", "accepted"
CATCH_UP = "a token read late"  # stands among the costs of trees
BUCKETS = ("none", "short", "long", "longer")  # matches, by `Drafter.match_buckets`
_statistics: WeakKeyDictionary[Target, dict[Any, TreeStatistics]] = WeakKeyDictionary()


def statistics(target: Target, drafter: Drafter) -> TreeStatistics:
    """What is known of a drafter's candidate trees. Drafters of the same name and trees share it: one that is
    made anew in each call need not learn anew."""
    of_target, specs = _statistics.setdefault(target, {}), drafter.candidate_trees
    if (key := (drafter.name, specs)) not in of_target:
        known = of_target[key] = TreeStatistics(specs)
        trees = {spec.name: i for i, spec in enumerate(specs)}
        with suppress(ValueError), understood(FILE):  # what is damaged is learnt anew
            known.accepted |= {
                (trees[name], bucket): Accepted(float(mean), float(rounds))
                for name, means in _stored(target, drafter).get(ACCEPTED, {}).items()
                for bucket, (mean, rounds) in enumerate(means if name in trees else ())
            }
    return of_target[key]


def policy(target: Target, drafter: Drafter, texts: int) -> Policy | None:
    """The policy for an engine of so many texts; None for a drafter without candidate trees."""
    if not drafter.candidate_trees:
        return None
    with target.lock:  # one thread measures, alone
        known = statistics(target, drafter)
        if texts not in known.begun:
            known.seconds = _seconds(target, drafter, texts) | known.seconds
            known.begun.add(texts)
        # The next drafter of the name begins with it.
        known.catch_up_per_token = drafter.catch_up_per_token or known.catch_up_per_token
        drafter.catch_up_per_token = known.catch_up_per_token
    return Policy(known)


def keep(target: Target, drafter: Drafter) -> None:
    """Store what was accepted and what rounds cost, if there is news of it: a first measurement in a busy
    second must not stay. All in one writing, which the end of an answer waits for."""
    if not drafter.candidate_trees:
        return
    with target.lock:
        known = statistics(target, drafter)
        if known.chosen.total() - known.stored >= NEWS:
            _store(target, drafter, {texts: known.seconds[texts] for texts in known.timed}, known)
            known.stored = known.chosen.total()


def learn(
    target: Target, drafter: Drafter, texts: int, context: int, decode: Callable[[Policy], Iterable[Any]]
) -> None:
    """Measure what rounds of so many texts cost behind a context, and what every tree brings, and store both.
    `decode` gives the rounds of some texts under a policy."""
    known = statistics(target, drafter)
    known.seconds[texts] = measured(target, drafter, texts, context)
    known.begun.add(texts)
    _store(target, drafter, {texts: known.seconds[texts]})
    for tree, spec in enumerate(drafter.candidate_trees):
        if spec.depth:
            for _ in decode(Trial(known, tree)):
                pass
    _store(target, drafter, {}, known)


def _setting(target: Target, texts: int | str) -> str:
    """Costs hold for one place and one build of the kernels."""
    return f"{target.place}, build {fingerprint()}, texts: {texts}"


def _key(target: Target, drafter: Drafter, what: str) -> str:
    """Quantised copies have their model's fingerprint, and begin with what it accepted. Temperatures share
    costs: rounds soon show what noise adds."""
    name = drafter.name if what == ACCEPTED else drafter.name.removesuffix(SAMPLED)
    return f"{target.fingerprint} {name}"


def _stored(target: Target, drafter: Drafter) -> dict[str, dict[str, Any]]:
    """Of this drafter: costs by their setting, and what was accepted. A damaged file is deleted."""
    path = cache_home() / FILE
    try:
        results = read_results(path)
    except ValueError as error:
        note(f"costs of rounds are measured again: {first_line(error)}")
        with suppress(OSError):
            path.unlink()
        return {}
    own = {what: entries.get(_key(target, drafter, what)) for what, entries in results.items()}
    return {what: entry for what, entry in own.items() if isinstance(entry, dict)}


def _store(
    target: Target, drafter: Drafter, costs: dict[int, list[float]], known: TreeStatistics | None = None
) -> None:
    """What rounds cost, by numbers of texts, and what was accepted. Entries of other trees of the drafter's
    name stay. A cache that cannot be written is no error."""
    trees = [spec.name for spec in drafter.candidate_trees]
    news: dict[str, dict[str, Any]] = {}
    if known is not None and known.accepted:  # otherwise no text took guesses
        buckets = range(1 + max(bucket for _, bucket in known.accepted))
        news[ACCEPTED] = {
            name: [[round(x, 3) for x in astuple(known.average(i, bucket))] for bucket in buckets]
            for i, name in enumerate(trees)
        }
    for texts, seconds in costs.items():
        news[_setting(target, texts)] = {name: round(x, 6) for name, x in zip(trees, seconds, strict=True)}
        news[_setting(target, texts)][CATCH_UP] = round(drafter.catch_up_per_token, 9)
    stored = _stored(target, drafter)
    entries = {
        what: {_key(target, drafter, what): stored.get(what, {}) | entry} for what, entry in news.items()
    }
    with suppress(ValueError, OSError):
        update_json(cache_home() / FILE, entries)


def _seconds(target: Target, drafter: Drafter, texts: int) -> dict[int, list[float]]:
    """By texts and tree, from the user's cache: for so many, which are measured if they are not there, and
    for other known numbers, as an engine's texts become fewer."""
    trees, place = [spec.name for spec in drafter.candidate_trees], _setting(target, "")
    seconds, catch_up = dict[int, list[float]](), dict[int, float]()
    for what, entry in _stored(target, drafter).items():
        number = what.removeprefix(place)
        costs, late = [entry.get(name, math.nan) for name in trees], entry.get(CATCH_UP, math.nan)
        numbers = all(isinstance(x, int | float) and 0 <= x < math.inf for x in (*costs, late))
        if what.startswith(place) and number.isdigit() and numbers and all(costs):
            seconds[int(number)], catch_up[int(number)] = costs, late
    if texts not in seconds:
        seconds[texts] = measured(target, drafter, texts)
        _store(target, drafter, {texts: seconds[texts]})
    elif target.compiles:
        for rows in {1, texts}:  # graphs of all sizes, before they are needed
            next(_laps(target, drafter, rows))
    drafter.catch_up_per_token = catch_up.get(texts, drafter.catch_up_per_token)
    return seconds


def measured(target: Target, drafter: Drafter, texts: int, context: int = CONTEXT) -> list[float]:
    """Median seconds of a round of every tree. Trees alternate, after an untimed round of each. What a token
    read late costs the drafter is what its head takes to read their prompts."""
    if texts > 1 and target.compiles:
        next(_laps(target, drafter, 1))
    laps = _laps(target, drafter, texts, context)
    next(laps)
    began, timed = perf_counter(), [next(laps) for _ in range(FEWEST)]
    while len(timed) < LAPS and perf_counter() - began <= SECONDS:
        timed.append(next(laps))
    if head := next((spec for spec in drafter.candidate_trees if spec.children), None):
        # The first engine's head read its prompts while graphs and buffers were made.
        _engine(target, drafter, texts, context).step(spec=head)
    return [median(times) for times in zip(*timed, strict=True)]


def _laps(target: Target, drafter: Drafter, texts: int, context: int = CONTEXT) -> Iterator[list[float]]:
    """Seconds of a round of every tree, again and again. The first lap makes buffers and graphs."""
    deepest = max(spec.depth for spec in drafter.candidate_trees)
    most = min(target.window, context + CONTEXT)  # a longer text makes all rounds alike
    engine = _engine(target, drafter, texts, context)

    def ready() -> Engine:
        """An engine whose texts have room for three rounds."""
        fits = max(engine.lengths) + 3 * (deepest + 2) <= most
        return engine if fits else _engine(target, drafter, texts, context)

    for spec in drafter.candidate_trees:
        engine = ready()
        engine.step(spec=spec)
        engine.state.flush()  # a drafter that waits reads now, and then has one token to read
        engine.step(spec=PLAIN)
        engine.step(spec=spec)
    while True:
        lap = []
        for spec in drafter.candidate_trees:
            engine = ready()
            # The timed round reads what this one brings, and its masks guess. Plain rounds of eight texts
            # took half as long again where they were timed behind the largest tree's.
            engine.step(spec=spec)
            before = perf_counter()
            drafter.match_buckets(engine.state)
            engine.step(spec=spec)
            lap.append(perf_counter() - before)
        yield lap


def _engine(target: Target, drafter: Drafter, texts: int, context: int) -> Engine:
    """An engine under way behind a context, or as much of it as half the window holds."""
    context = min(context, target.window // 2)
    prompts = [[(7 * i + text) % target.vocab for i in range(context)] for text in range(texts)]
    capacity = min(context + CONTEXT, target.window)
    engine = Engine(target, _Matching(drafter), rows=texts, capacity=capacity, specs=drafter.candidate_trees)
    sampling = Sampling(temperature=float(drafter.uses_target_noise))  # noise takes its time
    engine.admit(*(Request(prompt, sampling) for prompt in prompts))
    return engine


class _Matching(Drafter):
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
    """What was chosen in this process, and why: a row for every tree; and what a text of `tokens` holds."""
    known = statistics(target, drafter)
    texts = min(known.begun)
    title = f"{drafter.name}, {known.chosen.total()} rounds; ms, and tokens by the length of a match"
    table = Figures(title, "tree", "rounds", "nodes", "ms", *BUCKETS, "tokens/s")
    for i, (spec, cost) in enumerate(zip(known.trees, known.costs(texts), strict=True)):
        brings = [1 + known.average(i, bucket).mean for bucket in range(len(BUCKETS))]
        slow, fast = (f"{texts * tokens_a_round / cost:.0f}" for tokens_a_round in (brings[0], brings[-1]))
        cells = (known.chosen[i], spec.nodes, f"{1e3 * cost:.1f}", *(f"{mean:.2f}" for mean in brings))
        table.add_row(_short(spec), *cells, f"{slow} to {fast}" if spec.depth else slow)
    text = f"Found by tune: {', '.join(map(_short, drafter.tuned))}. " if drafter.tuned else ""
    text += (
        "A round takes the tree that promises most tokens a second. Tokens are means over all texts; a text "
        "whose guesses are accepted less often than these takes smaller trees, or none (plain), and is tried "
        f"again now and then. Kept in {cache_home() / FILE}."
    )
    if tokens is not None:
        size = memory(target, drafter, tokens)
        text += f"\n{size}; 1 GiB holds {int(GIB // size.text)} such texts."
    return Group(table, Text(text, "dim"))


def _short(spec: TreeSpec) -> str:
    """A name that fits a table: a static tree by its depth and nodes."""
    return f"static-{spec.depth}x{spec.nodes}" if spec.name.startswith("[") else spec.name
