"""Which of its own blocks a target may skip to draft for itself.

Blocks that change their input least are skipped first (Men et al. 2024, "ShortGPT": the cosine of a block's
input and output). Each number of blocks is judged by its agreement with the target along the target's
answers, and by the measured cost of a pass.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from slipstream.core.drafter import FINAL, INPUT
from slipstream.core.target import Target
from slipstream.engine.replay import record
from slipstream.measure.cost import pass_seconds, promised
from slipstream.measure.tune_report import Skipped

GAMMAS = range(1, 11)


@torch.inference_mode()
def skippable(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new: int = 40,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Skipped]:
    """What skipping each number of blocks promises.

    Args:
        prompts: some of the kind that will be asked.
        new: tokens of each answer.

    Raises:
        ValueError: the target has fewer than three blocks.
    """
    L = target.sizes.blocks
    if L < 3:
        raise ValueError(
            f"this target has {L} blocks; self-speculation skips some between the first and the last"
        )
    progress("the target answers")
    taps = tuple(f"{INPUT}{i}" for i in range(L))
    recorded = record(target, prompts, new, taps)
    at = torch.arange(recorded.tokens.shape[1], device=target.device)
    read = at < recorded.lengths[:, None]
    judged = (at >= recorded.prompts[:, None] - 1) & (at + 1 < recorded.lengths[:, None])
    states = recorded.tapped(taps)[read].float().unflatten(-1, (L, -1))
    alike = F.cosine_similarity(states[:, 1:-1], states[:, 2:], dim=-1).mean(0)  # of blocks 1 … L − 2
    order = [1 + i for i in alike.argsort(descending=True).tolist()]
    whole, tried = pass_seconds(target, (1,))[1], list[Skipped]()
    rows = [tokens[:n].tolist() for tokens, n in zip(recorded.tokens, recorded.lengths, strict=True)]
    lm_head = target.lm_head()
    for count in range(max(1, L // 10), len(order) + 1, max(1, L // 10)):
        progress(f"{count} blocks skipped")
        blocks = sorted(order[:count])
        short = target.part([i for i in range(L) if i not in blocks])
        chosen = lm_head(short.features(rows, (FINAL,))).argmax(-1)
        right = chosen == recorded.tokens[:, 1 : chosen.shape[1] + 1]
        alpha = float(right[judged[:, : chosen.shape[1]]].float().mean())
        c = pass_seconds(short, (1,))[1] / whole
        expected = max(promised(alpha, gamma, c) for gamma in GAMMAS)
        named = ",".join(map(str, blocks))
        tried.append(Skipped(skip=named, alpha=round(alpha, 4), c=round(c, 4), expected=round(expected, 4)))
    return tried
