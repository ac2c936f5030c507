"""Which tree a round should grow: the one that promises most tokens a second.

Two things are known of every rung, a tree that the drafter offers: what a round with it costs here, measured
once (`decode.costs`) and corrected by every round since; and how many of its tokens are accepted, on average
and lately in the text at hand. So a text that is drafted badly is soon decoded plainly, and is tried again as
what was seen of it fades.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2, sqrt
from operator import add

from slipstream.core.tree_spec import TreeSpec

PRIOR = 3.5  # accepted tokens that the average of all texts weighs against what was seen of one
FADES = 0.95  # of the evidence on a text this much is left after a round
FADES_UNUSED = 0.995  # the same after a round that adds none
WORTH, WORTH_TO_MANY = 1.05, 1.15  # a tree is grown if it promises so many times plain decoding's speed
FEW = 4  # texts; more of them gain little by a tree, and lose by one that was tried
SLACK = 0.05  # below its worth by so much, no tree is near
SURE, OFTEN = 1.3, 64  # below this gain, every so many rounds a plain one tells again what it costs
MOVED = 1.1  # one does at once, too, if other rounds moved its cost as far as that
RESTS = 4  # rounds that are plain without a choice once no tree is near; for more texts as many as these
FIRM = 4.0  # rounds that a cost counts as, if none timed it lately
AGES = 0.95  # of what a round told of its cost this much is left a round later
OFF = 1.3  # a round counts as so many times its cost at most: something may have stopped it; or so much less
LAGS = 4  # rounds without the head after which its next one reads much, and does not tell what rounds cost
KEEPS = 200.0  # rounds that an average of accepted tokens remembers
FIRST, GROWN = 0.2, 0.29  # guess: tokens accepted of a head's tree, and more for each doubling of its nodes
CHAINED = 0.8  # guess: a chain's next token is accepted
MATCHED = (0.2, 0.6, 0.8, 0.92)  # guess: a match's next token is accepted, by sign
GUESS = 8.0  # rounds that a guess counts as
HOPE = 0.75  # standard errors
NO_GUESSES = -1  # the sign of a text that gets none: it brings one token, whatever the tree
KINDS = "no match", "match", "head"  # of guesses
PAYS = 16  # rounds of a head's trees in which what it has yet to read must pay
TOLD = 32.0  # rounds that a mean is worth at least, once as many told it
DOUBTED = 4.0  # the same of a chain that fewer told: it may cost so much that it is not tried again otherwise


@dataclass
class Accepted:
    """Tokens accepted in an average text, and the rounds that tell."""

    mean: float
    rounds: float = GUESS

    @property
    def hoped(self) -> float:
        """The mean and some of its standard error, as of a count: what few rounds spoke badly of is tried
        again."""
        return self.mean + HOPE * sqrt(self.mean / self.rounds)

    def fade(self, left: float, least: float = TOLD) -> None:
        """Other rounds went by. What many rounds told is never worth as little as a guess; what fewer told,
        no less than `least`."""
        least = TOLD if self.rounds > TOLD else least
        if self.rounds > least:
            self.rounds = max(least, self.rounds * left)

    def add(self, tokens: int, factor: float) -> None:
        """A round of a text whose guesses are `factor` times as good."""
        self.rounds = min(KEEPS, self.rounds + factor)
        self.mean += (tokens - factor * self.mean) / self.rounds


@dataclass
class Ledger:
    """What is known of a drafter's rungs, in any text.

    Attributes:
        seconds: of a round, by the texts that share it, then by rung.
        accepted: tokens, by rung and `Drafter.signs`.
        pace: see `Drafter`.
        chosen: rounds of each rung.
        begun: the texts of sessions: each number was measured before the first.
        kept: rounds whose acceptance is stored.
        timed: rounds that told lately what a rung costs, by texts, then by rung.
        told: of a plain round, by texts, when one was last timed.
    """

    rungs: Sequence[TreeSpec]
    seconds: dict[int, list[float]] = field(default_factory=dict)
    accepted: dict[tuple[int, int], Accepted] = field(default_factory=dict)
    pace: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)
    begun: set[int] = field(default_factory=set)
    kept: int = 0
    timed: dict[int, list[float]] = field(default_factory=dict)
    told: dict[int, float] = field(default_factory=dict)

    def of(self, rung: int, sign: int) -> Accepted:
        """The average, a guess before any was counted."""
        if (rung, sign) not in self.accepted:
            spec, match = self.rungs[rung], MATCHED[sign]
            grown = FIRST + GROWN * log2(spec.nodes) if spec.children else 0.0
            if spec.is_chain:
                grown = _accepted(CHAINED, spec)
            self.accepted[rung, sign] = Accepted(_accepted(match, spec) + (1 - match) * grown)
        return self.accepted[rung, sign]

    def add(self, rung: int, sign: int, tokens: int, factor: float) -> None:
        """A round of a text whose guesses are `factor` times as good. It speaks of other trees of the same
        guesses, too: as much as a guess is worth beside what their own rounds told."""
        average = self.of(rung, sign)
        before = average.mean
        average.add(tokens, factor)
        change = min(2.0, max(0.5, average.mean / before)) if before else 1.0
        kind, own = bool(self.rungs[rung].children), _leverage(self.rungs[rung])
        for i, spec in enumerate(self.rungs):
            if i != rung and spec.depth and bool(spec.children) == kind:
                like = self.of(i, sign)
                like.mean *= change ** (_leverage(spec) / own * min(1.0, GUESS / like.rounds))

    def costs(self, texts: int) -> list[float]:
        """Of every rung, for so many texts; for the nearest number that was measured."""
        return self.seconds[self._measured(texts)]

    def _measured(self, texts: int) -> int:
        return min(self.seconds, key=lambda known: abs(log2(known / texts)))

    def moved(self, texts: int) -> bool:
        """Whether a plain round's cost is no longer what plain rounds told."""
        known = self._measured(texts)
        plain = self.seconds[known][0]
        return not 1 / MOVED < plain / self.told.get(known, plain) < MOVED

    def time(self, texts: int, rung: int, seconds: float, rounds: int) -> None:
        """What the last of so many rounds took. It corrects its rung's cost. A longer text, or what else
        runs, makes other rungs dearer, too: those that were not timed lately go along, by this rung's share
        of the rounds that were."""
        known = self._measured(texts)
        costs, timed = self.seconds[known], self.timed.setdefault(known, [0.0] * len(self.rungs))
        off = min(OFF, max(1 / OFF, seconds / costs[rung])) ** (1 / (FIRM + timed[rung]))
        share = (1 + timed[rung]) / (1 + sum(timed))
        for i, n in enumerate(timed):
            costs[i] *= off if i == rung else off ** (share / (1 + n))
            timed[i] = n * AGES**rounds + (i == rung)
        if rung == 0 or known not in self.told:
            self.told[known] = costs[0]


def _accepted(chance: float, spec: TreeSpec) -> float:
    """Tokens accepted of a chain with so many nodes, if each has this chance."""
    return sum((chance**i for i in range(1, spec.nodes)), 0.0)


def _leverage(spec: TreeSpec) -> float:
    """By about how many percent a tree brings more if its guesses are one percent likelier."""
    return log2(2 * spec.depth) if spec.is_chain else 1.0


@dataclass
class Evidence:
    """What was seen of one text: accepted tokens, and how many the averages had promised."""

    accepted: float = 0.0
    promised: float = 0.0

    @property
    def factor(self) -> float:
        """How much better than the average its guesses are."""
        return (self.accepted + PRIOR) / (self.promised + PRIOR)

    def fade(self, left: float) -> None:
        self.accepted *= left
        self.promised *= left


class Policy:
    """Chooses for one session: `choose` before a round, `learn` after it, where it does not rest."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._seen: dict[tuple[int, str], Evidence] = {}  # by text and kind of guess
        self._rung, self._rows = 0, list[tuple[int, int]]()
        self._since = 0  # rounds since the last plain one
        self._idle = 0  # rounds since the last of a head's tree
        self._rests, self._rested = 0, 0  # rounds to rest since the last that was weighed, and those that did

    def rests(self, texts: Sequence[int]) -> bool:
        """Whether the next round is plain like the last, because no tree promised enough. Then neither
        `choose` nor `learn` is asked: with eight texts their work is 2 to 5 % of a plain round."""
        if self._rested >= self._rests or [text for text, _ in self._rows] != texts:
            return False
        self._rested += 1
        self._idle += 1
        self.ledger.chosen[self._rung] += 1
        return True

    def choose(self, texts: Sequence[int], signs: Sequence[int], owed: float = 0.0) -> TreeSpec:
        """The tree for a round of these texts, which show these signs. `owed`: seconds that a head would
        first read."""
        self._rows = list(zip(texts, signs, strict=True))
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] in texts}
        reads = [owed / PAYS if rung.children else 0.0 for rung in self.ledger.rungs]
        plain, *others = self.ledger.costs(len(texts))
        costs = map(add, [plain, *(max(plain, cost) for cost in others)], reads)  # it is the quickest round
        speeds = [tokens / cost for tokens, cost in zip(self._tokens(), costs, strict=True)]
        best = max(range(1, len(speeds)), key=lambda rung: speeds[rung])
        gain = speeds[best] / speeds[0]
        due = self.ledger.moved(len(texts)) or (gain < SURE and self._since >= OFTEN)
        worth = WORTH if len(texts) <= FEW else WORTH_TO_MANY
        self._since = 0 if gain < worth or due else self._since + 1
        self._rung = best if self._since else 0
        self._rests = max(RESTS, len(texts)) if gain < worth - SLACK else 0
        self.ledger.chosen[self._rung] += 1
        return self.ledger.rungs[self._rung]

    def _tokens(self) -> list[float]:
        """What a round of each rung would bring, over all texts."""
        ledger, signs = self.ledger, {sign for _, sign in self._rows} - {NO_GUESSES}
        rows = [[(self._of(*row, head).factor, row[1]) for row in self._rows] for head in (False, True)]
        made = []
        for i, rung in enumerate(ledger.rungs):
            most, hoped = rung.nodes - 1.0, {sign: ledger.of(i, sign).hoped for sign in signs}
            means = (factor * hoped.get(sign, 0.0) for factor, sign in rows[bool(rung.children)])
            made.append(sum((1.0 + min(most, mean) for mean in means), 0.0))
        return made

    def _of(self, text: int, sign: int, head: bool) -> Evidence:
        """What was seen of a head's trees, or of matches where there were some, or of those where there were
        none. One says little of another: a text that repeats nothing may well be drafted by a head."""
        kind = KINDS[2 if head else sign > 0]
        return self._seen.setdefault((text, kind), Evidence())

    def learn(self, tokens: Sequence[int], seconds: float, guessed: Sequence[bool]) -> None:
        """What the chosen round brought each text, the target's own token included, and its time. A text
        whose head could not guess yet, for lack of masks in the round before, was decoded plainly."""
        spec, rounds = self.ledger.rungs[self._rung], 1 + self._rested
        left, self._rested = FADES_UNUSED**rounds, 0
        for (rung, _), average in self.ledger.accepted.items():
            average.fade(left, DOUBTED if self.ledger.rungs[rung].is_chain else TOLD)
        for (text, sign), made, drafted in zip(self._rows, tokens, guessed, strict=True):
            if sign == NO_GUESSES:
                continue
            drafts = spec.depth and (drafted or not spec.children)
            average, seen = self.ledger.of(self._rung, sign), self._of(text, sign, bool(spec.children))
            for kind in KINDS:
                if evidence := self._seen.get((text, kind)):
                    evidence.fade(FADES if drafts and evidence is seen else left)
            if drafts:
                promised = average.mean
                self.ledger.add(self._rung, sign, made - 1, seen.factor)
                seen.accepted += made - 1
                seen.promised += promised
        if not spec.children or (any(guessed) and self._idle < LAGS):
            self.ledger.time(len(tokens), self._rung, seconds, rounds)
        self._idle = 0 if spec.children else self._idle + 1


class Trial(Policy):
    """Takes one rung only, and counts what it brings."""

    def __init__(self, ledger: Ledger, rung: int) -> None:
        super().__init__(ledger)
        self._rung = rung

    def choose(self, texts: Sequence[int], signs: Sequence[int], owed: float = 0.0) -> TreeSpec:
        self._rows = list(zip(texts, signs, strict=True))
        return self.ledger.rungs[self._rung]

    def learn(self, tokens: Sequence[int], seconds: float, guessed: Sequence[bool]) -> None:
        spec = self.ledger.rungs[self._rung]
        for (_, sign), made, drafted in zip(self._rows, tokens, guessed, strict=True):
            if drafted or not spec.children:
                self.ledger.of(self._rung, sign).add(made - 1, 1.0)
