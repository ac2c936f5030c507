"""Which tree a round should grow: the one that promises most tokens a second.

Two things are known of every candidate tree of a drafter: what a round with it costs here, measured once
(`engine.costs`) and corrected by every round since; and how many of its tokens are accepted, on average and
lately in the text at hand. So a text whose guesses fail is soon decoded plainly, and is tried again as this
evidence fades.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2, sqrt

from slipstream.core.tree_spec import TreeSpec

PRIOR = 3.5  # accepted tokens that the average of all texts weighs against the evidence on one
FADES = 0.95  # this much of the evidence on a text, and on a cost, is left after a round that adds to it
FADES_UNUSED = 0.995  # the same after a round that adds none
WORTH, WORTH_TO_MANY = 1.05, 1.15  # a tree is grown if it promises so many times plain decoding's speed
FEW = 4  # more texts gain little by a tree, and lose by one that was tried
SLACK = 0.05  # so far below its worth no tree is close
SURE, OFTEN = 1.3, 64  # below this gain, one round in so many is plain, to measure its cost again
MOVED = 1.1  # so is the next round once others have changed that cost by this factor
RESTS = 4  # plain rounds without a choice once no tree is close; for more texts, as many as these
FIRM = 4.0  # rounds that a cost counts as, if none timed it lately
OFF = 1.3  # a round counts as so many times its cost at most, or one over it: something may have stopped it
LAGS = 4  # rounds without the head after which its next one reads much, and does not show what rounds cost
KEEPS = 200.0  # rounds that an average of accepted tokens remembers
FIRST, GROWN = 0.2, 0.29  # guess: tokens accepted of a head's tree, and more for each doubling of its nodes
CHAINED = 0.8  # guess: chance that a chain's next token is accepted
MATCHED = (0.2, 0.6, 0.8, 0.92)  # guess: chance that a match's next token is accepted, by match bucket
GUESS = 8.0  # rounds that a guess counts as
HOPE = 0.75  # standard errors that are added to a mean
NO_GUESSES = -1  # the bucket of a text that gets none: it brings one token, whatever the tree
PAYS = 16  # rounds of a head's trees in which the cost of catching up must pay
TOLD = 32.0  # rounds that a mean is worth at least, once as many were counted
DOUBTED = 4.0  # the same of a chain with fewer: it may cost so much that it is not tried again otherwise


@dataclass
class Accepted:
    """Tokens accepted in an average text, and the rounds that they were counted in."""

    mean: float
    rounds: float = GUESS

    @property
    def hoped(self) -> float:
        """The mean and some of its standard error, as of a count: few bad rounds do not rule a tree out."""
        return self.mean + HOPE * sqrt(self.mean / self.rounds)

    def fade(self, left: float, least: float = TOLD) -> None:
        """Rounds of other trees went by. A mean of many rounds stays worth `TOLD`, one of fewer `least`."""
        least = TOLD if self.rounds > TOLD else min(self.rounds, least)
        self.rounds = max(least, self.rounds * left)

    def add(self, tokens: int, factor: float) -> None:
        """A round of a text whose guesses are `factor` times as good."""
        self.rounds = min(KEEPS, self.rounds + factor)
        self.mean += (tokens - factor * self.mean) / self.rounds


@dataclass
class TreeStatistics:
    """What is known of a drafter's candidate trees, in any text."""

    trees: Sequence[TreeSpec]
    seconds: dict[int, list[float]] = field(default_factory=dict)  # of a round, by texts in it, then by tree
    accepted: dict[tuple[int, int], Accepted] = field(default_factory=dict)  # by tree and match bucket
    catch_up_per_token: float = 0.0  # see `Drafter`
    chosen: Counter[int] = field(default_factory=Counter)  # rounds of each tree
    begun: set[int] = field(default_factory=set)  # numbers of texts of engines, which were measured before
    stored: int = 0  # rounds whose acceptance is stored
    timed: dict[int, list[float]] = field(default_factory=dict)  # how often lately, by texts, then by tree
    plain_seconds: dict[int, float] = field(default_factory=dict)  # of the last timed plain round, by texts

    def average(self, tree: int, bucket: int) -> Accepted:
        """Of a tree in a match bucket; a guess before any was counted."""
        if (tree, bucket) not in self.accepted:
            spec, match = self.trees[tree], MATCHED[bucket]
            if spec.is_chain:
                grown = _chain_tokens(CHAINED, spec)
            else:
                grown = FIRST + GROWN * log2(spec.nodes) if spec.children else 0.0
            self.accepted[tree, bucket] = Accepted(_chain_tokens(match, spec) + (1 - match) * grown)
        return self.accepted[tree, bucket]

    def add(self, tree: int, bucket: int, tokens: int, factor: float) -> None:
        """A round of a text whose guesses are `factor` times as good. It also changes trees of the same kind
        of guesses: by as much as a guess is worth beside what was counted in their own rounds."""
        average, own = self.average(tree, bucket), self.trees[tree]
        before = average.mean
        average.add(tokens, factor)
        change = min(2.0, max(0.5, average.mean / before)) if before else 1.0
        for i, spec in enumerate(self.trees):
            if i != tree and spec.depth and bool(spec.children) == bool(own.children):
                other = self.average(i, bucket)
                other.mean *= change ** (_leverage(spec) / _leverage(own) * min(1.0, GUESS / other.rounds))

    def nearest(self, texts: int) -> int:
        """The nearest number of texts that was measured."""
        return min(self.seconds, key=lambda known: abs(log2(known / texts)))

    def costs(self, texts: int) -> list[float]:
        """Of every tree, for so many texts."""
        return self.seconds[self.nearest(texts)]

    def moved(self, texts: int) -> bool:
        """Whether a plain round's cost is no longer what plain rounds took."""
        plain = self.costs(texts)[0]
        return not 1 / MOVED < plain / self.plain_seconds.get(self.nearest(texts), plain) < MOVED

    def time(self, texts: int, tree: int, seconds: float, rounds: int) -> None:
        """Correct costs by what the last of so many rounds took. A longer text, or what else runs, makes
        rounds of other trees dearer, too: those that were not timed lately change by this tree's share of the
        rounds that were."""
        nearest = self.nearest(texts)
        costs, timed = self.seconds[nearest], self.timed.setdefault(nearest, [0.0] * len(self.trees))
        off = min(OFF, max(1 / OFF, seconds / costs[tree])) ** (1 / (FIRM + timed[tree]))
        share = (1 + timed[tree]) / (1 + sum(timed))
        for i, n in enumerate(timed):
            costs[i] *= off if i == tree else off ** (share / (1 + n))
            timed[i] = n * FADES**rounds + (i == tree)
        if tree == 0 or nearest not in self.plain_seconds:
            self.plain_seconds[nearest] = costs[0]


def _chain_tokens(chance: float, spec: TreeSpec) -> float:
    """Tokens accepted of a chain with so many nodes, if each has this chance."""
    return sum((chance**i for i in range(1, spec.nodes)), 0.0)


def _leverage(spec: TreeSpec) -> float:
    """By about how many percent a tree brings more if its guesses are one percent likelier."""
    return log2(2 * spec.depth) if spec.is_chain else 1.0


@dataclass
class TextEvidence:
    """Tokens accepted in one text lately, and how many the averages had promised."""

    accepted: float = 0.0
    promised: float = 0.0

    @property
    def factor(self) -> float:
        """How much better than the average its guesses are."""
        return (self.accepted + PRIOR) / (self.promised + PRIOR)


class Policy:
    """Chooses for one engine: `choose` before a round, `learn` after it, where it does not rest."""

    def __init__(self, statistics: TreeStatistics) -> None:
        self.statistics = statistics
        self._evidence: dict[tuple[int, str], TextEvidence] = {}  # by text and kind of guess
        self._tree = 0  # of the round
        self._rows: list[tuple[int, int]] = []  # of the round: each text and its match bucket
        self._since_plain = 0  # rounds since the last plain one
        self._since_head = 0  # rounds since the last of a head's tree
        self._rests = self._rested = 0  # rounds to rest after the last choice, and those that did

    def rests(self, texts: Sequence[int]) -> bool:
        """Whether the next round is plain like the last, because no tree promised enough. Then neither
        `choose` nor `learn` is called: with eight texts their work is 2 to 5 % of a plain round."""
        if self._rested >= self._rests or [text for text, _ in self._rows] != texts:
            return False
        self._rested += 1
        self._since_head += 1
        self.statistics.chosen[self._tree] += 1
        return True

    def choose(self, texts: Sequence[int], buckets: Sequence[int], catch_up_cost: float = 0.0) -> TreeSpec:
        """The tree for a round of these texts with these match buckets. `catch_up_cost`: seconds for which a
        head would first read."""
        statistics, self._rows = self.statistics, list(zip(texts, buckets, strict=True))
        self._evidence = {key: evidence for key, evidence in self._evidence.items() if key[0] in texts}
        costs = statistics.costs(len(texts))  # of which a plain round's is the lowest
        read = catch_up_cost / PAYS  # for a head's trees
        speeds = [
            tokens / (max(cost, costs[0]) + (read if spec.children else 0.0))
            for tokens, cost, spec in zip(self._tokens(), costs, statistics.trees, strict=True)
        ]
        best = max(range(1, len(speeds)), key=lambda tree: speeds[tree])
        gain = speeds[best] / speeds[0]
        due = statistics.moved(len(texts)) or (gain < SURE and self._since_plain >= OFTEN)
        worth = WORTH if len(texts) <= FEW else WORTH_TO_MANY
        self._since_plain = 0 if gain < worth or due else self._since_plain + 1
        self._tree = best if self._since_plain else 0
        self._rests = max(RESTS, len(texts)) if gain < worth - SLACK else 0
        statistics.chosen[self._tree] += 1
        return statistics.trees[self._tree]

    def _tokens(self) -> list[float]:
        """What a round of each tree would bring, over all texts."""
        buckets = {bucket for _, bucket in self._rows} - {NO_GUESSES}
        factors = {
            head: [(self._of(text, bucket, head).factor, bucket) for text, bucket in self._rows]
            for head in (False, True)
        }
        tokens = []
        for i, spec in enumerate(self.statistics.trees):
            hoped = {bucket: self.statistics.average(i, bucket).hoped for bucket in buckets}
            means = (factor * hoped.get(bucket, 0.0) for factor, bucket in factors[bool(spec.children)])
            tokens.append(sum((1.0 + min(spec.nodes - 1.0, mean) for mean in means), 0.0))
        return tokens

    def _of(self, text: int, bucket: int, head: bool) -> TextEvidence:
        """The evidence on a head's trees, or on matches where there were some, or on those where there were
        none. One says little of another: a text that repeats nothing may well be drafted by a head."""
        kind = "head" if head else "match" if bucket > 0 else "no match"
        return self._evidence.setdefault((text, kind), TextEvidence())

    def learn(self, tokens: Sequence[int], seconds: float, guessed: Sequence[bool]) -> None:
        """What the chosen round brought each text, the target's own token included, and its time. A text
        whose head could not guess yet, for lack of masks in the round before, was decoded plainly."""
        statistics, spec, rounds = self.statistics, self.statistics.trees[self._tree], 1 + self._rested
        left, self._rested = FADES_UNUSED**rounds, 0
        for (tree, _), average in statistics.accepted.items():
            average.fade(left, DOUBTED if statistics.trees[tree].is_chain else TOLD)
        for (text, bucket), count, drafted in zip(self._rows, tokens, guessed, strict=True):
            if bucket == NO_GUESSES:
                continue
            used = spec.depth and (drafted or not spec.children)
            average, own = statistics.average(self._tree, bucket), self._of(text, bucket, bool(spec.children))
            for (other, _), evidence in self._evidence.items():
                if other == text:
                    fades = FADES if used and evidence is own else left
                    evidence.accepted *= fades
                    evidence.promised *= fades
            if used:
                promised = average.mean
                statistics.add(self._tree, bucket, count - 1, own.factor)
                own.accepted += count - 1
                own.promised += promised
        if not spec.children or (any(guessed) and self._since_head < LAGS):
            statistics.time(len(tokens), self._tree, seconds, rounds)
        self._since_head = 0 if spec.children else self._since_head + 1


class Trial(Policy):
    """Takes one tree only, and counts what it brings."""

    def __init__(self, statistics: TreeStatistics, tree: int) -> None:
        super().__init__(statistics)
        self._tree = tree

    def choose(self, texts: Sequence[int], buckets: Sequence[int], catch_up_cost: float = 0.0) -> TreeSpec:
        self._rows = list(zip(texts, buckets, strict=True))
        return self.statistics.trees[self._tree]

    def learn(self, tokens: Sequence[int], seconds: float, guessed: Sequence[bool]) -> None:
        spec = self.statistics.trees[self._tree]
        for (_, bucket), count, drafted in zip(self._rows, tokens, guessed, strict=True):
            if drafted or not spec.children:
                self.statistics.average(self._tree, bucket).add(count - 1, 1.0)
