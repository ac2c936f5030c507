"""How sure a speed-up is: a bootstrap over questions that both methods answered."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.results import Part

SAMPLES = 2000


class Asked(Part):
    """One method's answers to one question, all turns together. `file`: where the question is from."""

    file: str
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class Paired:
    """`mean` over the questions' files; `interval`: 95 % of it, None where a file has one question only."""

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (" [{:.2f}, {:.2f}]".format(*self.interval) if self.interval else "")


def paired(ours: Mapping[str, Asked], theirs: Mapping[str, Asked]) -> Paired:
    """One method's tokens per second over another's: over each file's questions together, and the mean over
    the files.

    The interval is the percentile bootstrap's. From every file of n questions it draws n − 1 with
    replacement, the same for both methods (n draws vary too little: McCarthy & Snowden 1985). It says how far
    other questions would move the figure, not another machine.

    Args:
        ours, theirs: `by_question` of two methods in one report of `bench`.
    """
    files: dict[str, list[list[float]]] = {}
    for name, a in ours.items():
        b = theirs[name]
        files.setdefault(a.file, []).append([a.new_tokens, a.seconds, b.new_tokens, b.seconds])
    sums = [torch.tensor(questions, dtype=torch.float64) for questions in files.values()]
    generator = torch.Generator().manual_seed(0)
    mean = torch.stack([_ratio(q.sum(0)) for q in sums]).mean().item()
    if any(len(q) < 2 for q in sums):
        return Paired(mean, None)
    drawn = [q[torch.randint(len(q), (SAMPLES, len(q) - 1), generator=generator)].sum(1) for q in sums]
    return Paired(mean, interval(torch.stack([_ratio(draw) for draw in drawn]).mean(0)))


def interval(draws: Tensor) -> tuple[float, float]:
    """The interval that holds the middle 95 % of the draws."""
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return low, high


def _ratio(sums: Tensor) -> Tensor:
    """Tokens per second of the one over the other's."""
    tokens, seconds, their_tokens, their_seconds = sums.unbind(-1)
    return tokens / seconds * their_seconds / their_tokens
