"""The audit: is every token of an answer the one that plain decoding would have chosen?

It says what differs and by how much; `measure.runner.Runner.audited` judges it. Where a target's `exactness`
is "bits", every difference is an error. Elsewhere, and in Hugging Face's `generate`, passes over a tree and
over one row round differently: a token whose score is within the target's margin of the best is a tie.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.core.sampling import Sampling
from slipstream.core.target import Target
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request


@dataclass(frozen=True)
class Divergence:
    """A token that plain decoding, forced along the answer up to there, would not have chosen."""

    position: int  # in the answer
    token: int
    plain: int  # what plain decoding chooses
    margin: float  # how far the token's score lies below the best, in logits; infinite outside the support


@torch.inference_mode()
def audit(
    target: Target, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> list[Divergence]:
    """Teacher-force plain decoding, one row a pass, over an answer; all tokens that differ from its choice.

    A token is inside the support if a top-k, top-p or min-p boundary moved by the margin lets it in; only
    tokens of a support narrowed as much outrank it. Processors and warpers have no such slack.
    """
    engine = Engine(target, Vanilla(), capacity=len(prompt) + len(answer))
    request = Request(list(prompt), sampling)
    unit = sampling.temperature or 1.0  # scores are logits over temperature
    slack, divergences = target.margin / unit, []
    for i, token in enumerate(answer):
        if i:
            engine.state.root.fill_(answer[i - 1])
            engine.decode()
        else:
            engine.admit(request)
        if not request.finite:
            raise ValueError(target.explain_non_finite([*prompt, *answer[:i]]))
        if request.committed != [token]:
            sampler, span = engine.sampler, engine.span
            assert span is not None and span.logits is not None
            noise, logits = sampler.noise(span.start + span.count), span.logits[:, -1]
            own = (sampler.scores(logits, slack) + noise)[0, token]
            best = (sampler.scores(logits, -slack) + noise).max()
            gap = float(best - own) * unit if own > -torch.inf else math.inf
            divergences.append(Divergence(i, token, request.committed[0], max(0.0, gap)))
    return divergences
