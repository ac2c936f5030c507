"""Figures of one method's answers: τ, acceptance by depth, and the factors of a speed-up."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from slipstream.core.sampling import Sampling
from slipstream.engine.engine import Seconds
from slipstream.engine.request import Step, mean_accepted_length
from slipstream.measure.bench_report import Counted, Difference, Expected, TreeStatistics
from slipstream.measure.cost import promised

TINY = 1e-9  # what is divided by is at least this


@dataclass(frozen=True)
class Answered:
    """One answer of one method. The rounds and the sampling of Hugging Face's are not known."""

    tokens: list[int]
    wall: float  # seconds, the prompt's pass included
    rounds: list[Step] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    sampling: Sampling = field(default_factory=Sampling)
    identical: bool = True  # to plain decoding's
    differences: list[Difference] = field(default_factory=list)
    unexplained: int = 0  # of the differences: no promise allows them
    memory_mib: float | None = None  # the most that the process held
    shared: float | None = None  # its share of the rounds that it had with other texts of a batch

    @property
    def counted(self) -> Counted:
        """What figures are made of."""
        rounds = Counter((r.drafted, r.accepted, r.kept) for r in self.rounds)
        return Counted(
            new_tokens=len(self.tokens),
            wall=self.wall,
            rounds=[(*kind, times) for kind, times in sorted(rounds.items())],
            seconds=self.seconds,
            identical=self.identical,
            differences=self.differences,
            unexplained=self.unexplained,
            memory_mib=self.memory_mib,
            shared=self.shared,
        )


class Tally:
    """Answers of one method, to all of the questions or to a part of them."""

    def __init__(self, answers: Iterable[Counted]) -> None:
        self.answers = list(answers)
        self.new_tokens = sum(answer.new_tokens for answer in self.answers)
        self.wall = sum(answer.wall for answer in self.answers)
        kinds = [kind for answer in self.answers for kind in answer.rounds]
        self.rounds = [Step(*kind) for *kind, times in kinds for _ in range(times)]
        self.seconds = sum((answer.seconds for answer in self.answers), Seconds())
        self.differences = [each for answer in self.answers for each in answer.differences]
        self.unexplained = sum(answer.unexplained for answer in self.answers)
        self.tokens_per_second = self.new_tokens / self.wall if self.wall else 0.0
        self.tau = mean_accepted_length(self.rounds)
        held = [answer.memory_mib for answer in self.answers if answer.memory_mib is not None]
        self.memory_mib = max(held, default=None)
        batched = any(answer.shared is not None for answer in self.answers)
        self.shared = sum(map(_share, self.answers)) if batched else None

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


def _share(answer: Counted) -> float:
    """Of rounds. The last text of a file may have had them alone."""
    return float(sum(times for *_, times in answer.rounds)) if answer.shared is None else answer.shared


def expected(tally: Tally, plain: Tally) -> Expected:
    """The speed-up that a draft's quality and cost alone promise (GLIDE §3; Leviathan et al. 2023, Theorem
    3.8).

    It assumes that a pass over several rows costs what one row costs, and that tokens are accepted
    independently. Each round counts with the number of tokens that it drafted, which may be 0.
    """
    gammas = [r.drafted for r in tally.rounds]
    judged = sum(min(r.accepted + 1, r.drafted) for r in tally.rounds)
    alpha = sum(r.accepted for r in tally.rounds) / max(judged, 1)
    rounds = max(len(gammas), 1)
    one_pass = plain.seconds.verify / max(len(plain.rounds), 1)
    drafting = tally.seconds.draft / max(one_pass, TINY)  # in plain passes
    c = drafting / sum(gammas) if any(gammas) else 0.0
    speedup = sum(promised(alpha, gamma, 0.0) for gamma in gammas) / rounds / (1 + drafting / rounds)
    return Expected(alpha=round(alpha, 4), c=round(c, 4), speedup=round(speedup, 4))


def ledger(tally: Tally, plain: Tally) -> TreeStatistics:
    """A speed-up over plain decoding, factor by factor, and their product beside the measured one."""
    ours, theirs = tally.seconds, plain.seconds

    def verify(t: Tally) -> float:
        return t.seconds.verify / max(len(t.rounds), 1)

    def decoding(s: Seconds) -> float:
        return max(s.total - s.prefill, TINY)

    def behind_prompt(t: Tally) -> float:
        tokens = t.new_tokens / max(t.tau * len(t.rounds), TINY)
        return tokens * decoding(t.seconds) / max(t.seconds.total, TINY)

    factors = {
        "tau": tally.tau,
        "rows": verify(plain) / max(verify(tally), TINY),
        "draft": ours.verify / max(ours.verify + ours.draft, TINY),
        "host": (1 - ours.host / decoding(ours)) / max(theirs.verify / decoding(theirs), TINY),
        "prompt": behind_prompt(tally) / max(behind_prompt(plain), TINY),
    }
    predicted = prod(factors.values())
    measured = tally.tokens_per_second / max(plain.tokens_per_second, TINY)
    factors |= {"predicted": predicted, "measured": measured}
    factors["remainder"] = measured / max(predicted, TINY) - 1
    return TreeStatistics(**{name: round(value, 4) for name, value in factors.items()})
