"""The state of a training run, and the figures that callbacks get."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """A prediction of τ along the held-out answers.

    Attributes:
        trained: number of tokens trained on before it.
        loss: the loss of the last step. None before the first step.
        acceptance: for each depth, the share of rounds that accept at least as deep.
    """

    stage: int
    step: int
    trained: int
    loss: float | None
    tau: float
    acceptance: list[float]


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint.

    Attributes:
        stage, step: the next ones to take.
        trained, seconds: tokens learnt from, and time spent on steps, over all stages.
        best: the highest predicted τ; the drafter directory holds the weights that reached it.
    """

    stage: int = 0
    step: int = 0
    trained: int = 0
    seconds: float = 0.0
    best: float = 0.0
    history: list[Evaluation] = field(default_factory=list)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Progress":
        """The progress that a checkpoint stores."""
        return cls(**{**saved, "history": [Evaluation(**entry) for entry in saved["history"]]})


@dataclass(frozen=True)
class Seen:
    """The figures after a step: `step` of `of` in this stage; `tau` is the latest prediction."""

    stage: int
    step: int
    of: int
    loss: float
    agree: float
    tokens_per_second: float
    tau: float


Show = Callable[[Seen], None]
Filling = Callable[[str, int], Callable[[int], None]]  # long work's name and tokens → progress in tokens
