"""Answers of one method, counted: τ, acceptance by depth, and what a speed-up is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from slipstream.core.sampling import Sampling
from slipstream.decode.answer import Round, mean_accepted_length
from slipstream.decode.session import Seconds
from slipstream.measure.cost import promised
from slipstream.measure.report import Difference, Expected, Ledger


@dataclass(frozen=True)
class Answered:
    """One answer of one method. `wall` seconds include the prompt. Rounds and sampling of Hugging Face's are
    not known."""

    tokens: list[int]
    wall: float
    rounds: list[Round] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    sampling: Sampling = field(default_factory=Sampling)


@dataclass
class Tally:
    """All answers of one method, or of one part of the questions."""

    questions: int = 0
    new_tokens: int = 0
    wall: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    differences: list[Difference] = field(default_factory=list)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def add(self, answered: Answered, differences: Sequence[Difference] = ()) -> None:
        """Count one more answer."""
        self.questions += 1
        self.new_tokens += len(answered.tokens)
        self.wall += answered.wall
        self.rounds += answered.rounds
        self.seconds += answered.seconds
        self.differences += differences

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.wall if self.wall else 0.0

    @property
    def tau(self) -> float:
        """`mean_accepted_length` over all answers."""
        return mean_accepted_length(self.rounds)

    def acceptance(self, conditional: bool) -> list[float]:
        """By depth d: the share of passes that accepted d drafted tokens or more; conditional: of those that
        drafted d and accepted d − 1."""
        rates = []
        for depth in range(1, max((r.drafted for r in self.rounds), default=0) + 1):
            tried = self.rounds
            if conditional:
                tried = [r for r in tried if r.drafted >= depth and r.accepted >= depth - 1]
            rates.append(round(sum(r.accepted >= depth for r in tried) / len(tried), 4) if tried else 0.0)
        return rates


def expected(tally: Tally, plain: Tally) -> Expected:
    """The speed-up that a draft's quality and cost alone promise (GLIDE §3; Leviathan et al. 2023, Theorem
    3.8).

    Passes over several rows are taken to cost what one row costs, and tokens to be accepted independently. A
    round counts with as many tokens as it drafted; one that found nothing promises nothing.
    """
    judged = sum(min(r.accepted + 1, r.drafted) for r in tally.rounds)
    alpha = sum(r.accepted for r in tally.rounds) / max(judged, 1)
    rounds, gammas = max(len(tally.rounds), 1), [r.drafted for r in tally.rounds]
    one_pass = plain.seconds.verify / max(len(plain.rounds), 1)
    deepest = max(gammas, default=0)
    c = tally.seconds.draft / rounds / max(one_pass, 1e-9) / deepest if deepest else 0.0
    speedup = sum(promised(alpha, gamma, 0.0) for gamma in gammas) / rounds / (1 + c * deepest)
    return Expected(alpha=round(alpha, 4), c=round(c, 4), speedup=round(speedup, 4))


def ledger(tally: Tally, plain: Tally) -> Ledger:
    """A speed-up over plain decoding, factor by factor, and their product held against the clock."""
    rounds, plain_rounds = max(len(tally.rounds), 1), max(len(plain.rounds), 1)
    ours, theirs = tally.seconds, plain.seconds

    def decoding(s: Seconds) -> float:
        return max(s.total - s.prefill, 1e-9)

    def prompted(t: Tally) -> float:
        return (
            t.new_tokens / max(t.tau * len(t.rounds), 1e-9) * decoding(t.seconds) / max(t.seconds.total, 1e-9)
        )

    factors = {
        "tau": tally.tau,
        "rows": (theirs.verify / plain_rounds) / max(ours.verify / rounds, 1e-9),
        "draft": ours.verify / max(ours.verify + ours.draft, 1e-9),
        "host": (1 - ours.host / decoding(ours)) / max((theirs.verify / decoding(theirs)), 1e-9),
        "prompt": prompted(tally) / max(prompted(plain), 1e-9),
    }
    predicted = prod(factors.values())
    measured = tally.tokens_per_second / max(plain.tokens_per_second, 1e-9)
    factors |= {"predicted": predicted, "measured": measured}
    factors["remainder"] = measured / max(predicted, 1e-9) - 1
    return Ledger(**{name: round(value, 4) for name, value in factors.items()})
