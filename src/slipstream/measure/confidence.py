"""How often a drafted token is accepted, by the drafter's own confidence in it (GLIDE with a CAPE §4.2).

Drafts start at every position of the target's own answers and follow them: each drafted token is judged where
all before it were right.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.proposer import Proposer
from slipstream.measure.tune import ranks
from slipstream.targets import RecordedTarget

BINS = 10
DEPTH = 3  # of the drafts of a paper's figure
COLUMNS = ("judged", "confidence", "accepted")  # of a bin


def by_question(drafter: Drafter, recorded: RecordedTarget) -> tuple[list[str], list[list[float]]]:
    """For each text of a record and each bin: judged tokens, the sum of their confidence, and how many were
    accepted. Returns the columns' names and their values."""
    assert isinstance(drafter, Proposer)
    sums = by_confidence(drafter, recorded, min(DEPTH, drafter.deepest or DEPTH), (1,))
    return [f"{name} {b}" for b in range(BINS) for name in COLUMNS], sums.flatten(1).tolist()


def by_confidence(
    drafter: Proposer, recorded: RecordedTarget, depth: int, among: Sequence[int]
) -> Float[Tensor, "texts bins columns"]:
    """Of drafts of `depth` tokens: how many were judged, the sum of their confidence, and for each k of
    `among` how often the right token was among the first k candidates."""
    texts, rank, sure = ranks(drafter, recorded, TreeSpec.parse(f"backbone-{depth}x{max(among)}"))
    confidence, judged = sure.double(), rank >= 0
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    place = (texts[:, None].expand_as(rank)[judged], bins[judged])
    columns = (torch.ones_like(confidence), confidence, *((rank < k).double() for k in among))
    sums = torch.zeros(len(recorded.tokens), BINS, len(columns), dtype=torch.float64)
    for column, values in enumerate(columns):
        sums[..., column].index_put_(place, values[judged], accumulate=True)
    return sums
