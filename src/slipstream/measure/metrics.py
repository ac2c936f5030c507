"""Figures of one method's answers: τ, acceptance by depth, and the factors of a speed-up."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from slipstream.core.sampling import Sampling
from slipstream.engine.engine import Seconds
from slipstream.engine.request import Step, mean_accepted_length
from slipstream.measure.cost import promised
from slipstream.measure.results import Counted, Difference, Expected, Factors

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
        """What figures are computed from."""
        rounds = Counter((r.drafted, r.accepted, r.kept) for r in self.rounds)
        fields = {name: value for name, value in vars(self).items() if name in Counted.model_fields}
        fields["rounds"] = [(*kind, times) for kind, times in sorted(rounds.items())]
        return Counted(new_tokens=len(self.tokens), **fields)


class Tally:
    """Answers of one method, to all of the questions or to a part of them."""

    def __init__(self, answers: Iterable[Counted]) -> None:
        self.answers = list(answers)
        self.new_tokens = sum(answer.new_tokens for answer in self.answers)
        self.wall = sum(answer.wall for answer in self.answers)
        kinds = [kind for answer in self.answers for kind in answer.rounds]
        self.rounds = [Step(*kind) for *kind, times in kinds for _ in range(times)]
        self.seconds = sum((answer.seconds for answer in self.answers), Seconds())
        self.differences = [difference for answer in self.answers for difference in answer.differences]
        self.unexplained = sum(answer.unexplained for answer in self.answers)
        self.tokens_per_second = self.new_tokens / self.wall if self.wall else 0.0
        self.tau = mean_accepted_length(self.rounds)
        memory = (answer.memory_mib for answer in self.answers)
        self.memory_mib = max((mib for mib in memory if mib is not None), default=None)

    @property
    def shared(self) -> float | None:
        """Rounds, those that several texts shared counted once; None where all texts were alone."""
        shares = [answer.shared for answer in self.answers]
        if all(share is None for share in shares):
            return None
        alone = (sum(times for *_, times in answer.rounds) for answer in self.answers)
        return float(sum(own if share is None else share for own, share in zip(alone, shares, strict=True)))

    @property
    def per_pass(self) -> float:
        """Seconds of a target pass."""
        return self.seconds.verify / max(len(self.rounds), 1)

    @property
    def decoding(self) -> float:
        """Seconds behind the prompts."""
        return max(self.seconds.total - self.seconds.prefill, TINY)

    def acceptance(self, conditional: bool) -> list[float]:
        """By depth d: the share of passes that accepted d drafted tokens or more; conditional: of those that
        drafted d and accepted d − 1."""
        rates = []
        for depth in range(1, max((r.drafted for r in self.rounds), default=0) + 1):
            tried = self.rounds
            if conditional:
                tried = [r for r in tried if r.drafted >= depth and r.accepted >= depth - 1]
            rates.append(round(sum(r.accepted >= depth for r in tried) / max(len(tried), 1), 4))
        return rates


def expected(tally: Tally, plain: Tally) -> Expected:
    """The speed-up that a draft's quality and cost alone promise (GLIDE §3; Leviathan et al. 2023, Theorem
    3.8), if rows cost nothing and tokens are accepted independently. Each round counts with the number of
    tokens that it drafted, which may be 0."""
    gammas, rounds = [r.drafted for r in tally.rounds], max(len(tally.rounds), 1)
    judged = sum(min(r.accepted + 1, r.drafted) for r in tally.rounds)
    alpha = sum(r.accepted for r in tally.rounds) / max(judged, 1)
    drafting = tally.seconds.draft / max(plain.per_pass, TINY)  # in plain passes
    c = drafting / sum(gammas) if any(gammas) else 0.0
    speedup = sum(promised(alpha, gamma, 0.0) for gamma in gammas) / rounds / (1 + drafting / rounds)
    return Expected(alpha=round(alpha, 4), c=round(c, 4), speedup=round(speedup, 4))


def factors(tally: Tally, plain: Tally) -> Factors:
    """A speed-up over plain decoding, factor by factor, and their product beside the measured one."""

    def behind_prompts(t: Tally) -> float:
        tokens = t.new_tokens / max(t.tau * len(t.rounds), TINY)
        return tokens * t.decoding / max(t.seconds.total, TINY)

    ours, theirs = tally.seconds, plain.seconds
    product = {
        "tau": tally.tau,
        "rows": plain.per_pass / max(tally.per_pass, TINY),
        "draft": ours.verify / max(ours.verify + ours.draft, TINY),
        "host": (1 - ours.host / tally.decoding) / max(theirs.verify / plain.decoding, TINY),
        "prompt": behind_prompts(tally) / max(behind_prompts(plain), TINY),
    }
    predicted = prod(product.values())
    measured = tally.tokens_per_second / max(plain.tokens_per_second, TINY)
    product |= {"predicted": predicted, "measured": measured}
    product["remainder"] = measured / max(predicted, TINY) - 1
    return Factors(**{name: round(value, 4) for name, value in product.items()})
