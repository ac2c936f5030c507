"""The kinds of figures that tables show: how each is measured, and what it is of sums over questions."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.measure.confidence import BINS

PREDICTION = "prediction"  # along the target's recorded answers
RACE = "race"  # of `bench`
CONFIDENCE = "confidence"  # of the guesses behind right ones, by the drafter's own confidence
Sums = dict[str, Float[Tensor, " draws"]]  # by column of the cells


def _reached(sums: Sums) -> list[Tensor]:
    """By depth d: rounds that accepted d guesses or more, from d = 0."""
    depths = sorted((name for name in sums if name.isdigit()), key=int)
    return [sums["rounds"], *(sums[depth] for depth in depths)]


def _alpha(sums: Sums) -> Tensor:
    reached = _reached(sums)
    return torch.stack(reached[1:]).sum(0) / torch.stack(reached[:-1]).sum(0)


def _n_alpha(n: int, sums: Sums) -> Tensor:
    reached = _reached(sums)
    return reached[n + 1] / reached[n]


def _over(baseline: str, sums: Sums) -> Tensor:
    theirs = sums[f"{baseline} tokens"] / sums[f"{baseline} seconds"]
    return sums["tokens"] / sums["seconds"] / theirs


def _step_cost(sums: Sums) -> Tensor:
    return sums["draft seconds"] / sums["levels"] / (sums["plain verify"] / sums["plain rounds"])


def _total(name: str, bins: range, sums: Sums) -> Tensor:
    return torch.stack([sums[f"{name} {b}"] for b in bins]).sum(0)


def _accepted(bins: range, sums: Sums) -> Tensor:
    return _total("accepted", bins, sums) / _total("judged", bins, sums)


def _calibration(sums: Sums) -> Tensor:
    errors = torch.stack([(sums[f"confidence {b}"] - sums[f"accepted {b}"]).abs() for b in range(BINS)])
    return errors.sum(0) / _total("judged", range(BINS), sums)


class Kind(NamedTuple):
    """A kind of figure. `how`: prediction, race or confidence."""

    how: str
    formula: Callable[[Sums], Tensor]


KINDS = {
    # Tokens a target pass.
    "τ": Kind(PREDICTION, lambda sums: sums["tokens"] / sums["rounds"]),
    # The share accepted of the guesses of a chain that were judged, and of those behind n accepted ones.
    "α": Kind(PREDICTION, _alpha),
    **{f"{n}-α": Kind(PREDICTION, partial(_n_alpha, n)) for n in range(5)},
    # Speed over plain decoding's and Hugging Face generate's.
    "× plain": Kind(RACE, partial(_over, "plain")),
    "× HF": Kind(RACE, partial(_over, "hf")),
    "tokens/s": Kind(RACE, lambda sums: sums["tokens"] / sums["seconds"]),
    # Milliseconds of drafting a round.
    "draft ms": Kind(RACE, lambda sums: 1e3 * sums["draft seconds"] / sums["rounds"]),
    # One draft step over a plain pass.
    "c": Kind(RACE, _step_cost),
    # Speed over plain decoding's if a pass cost the same for any rows: τ / (γc + 1).
    "E": Kind(RACE, lambda sums: sums["tokens"] / (sums["levels"] * _step_cost(sums) + sums["rounds"])),
    # The share accepted where the confidence is 0.5 or more, and where it is less.
    "sure": Kind(CONFIDENCE, partial(_accepted, range(BINS // 2, BINS))),
    "unsure": Kind(CONFIDENCE, partial(_accepted, range(BINS // 2))),
    # The mean distance of confidence and acceptance over ten bins.
    "calibration error": Kind(CONFIDENCE, _calibration),
}
