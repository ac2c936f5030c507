"""Mixtures of experts: how many distinct experts a pass reads, which is what wide passes cost them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.core.tree import chain
from slipstream.measure.questions import load_questions
from slipstream.targets import HFTarget

CONTEXT = 32  # tokens before the rows


def own_texts(target: HFTarget) -> list[list[int]]:
    """The project's own questions as tokens; none for a target without a tokenizer."""
    return [] if target.text is None else [target.text.ids(each.turns[0]) for each in load_questions()]


@torch.inference_mode()
def experts_read(target: HFTarget, texts: Sequence[Sequence[int]], rows: Sequence[int]) -> dict[int, float]:
    """Distinct experts of a layer that a pass reads, by its rows: the mean over layers and texts.

    The rows are tokens of a text that follow each other, as those of a draft nearly do. A pass over one row
    reads as many experts as are active for a token, and a wide one may read all of them.

    Args:
        texts: as tokens. Those too short for a pass are left out of it.

    Returns:
        Nothing for a target without experts, and for a compiled one, whose layers are not looked into.
    """
    layers = [] if target.compiles else mixtures(target)
    chosen: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(_noting(chosen)) for layer in layers]
    try:
        counts = {n: _counts(target, texts, n, chosen) for n in rows} if layers else {}
    finally:
        for hook in hooks:
            hook.remove()
    return {n: round(sum(some) / len(some), 3) for n, some in counts.items() if some}


def mixtures(target: HFTarget) -> list[nn.Module]:
    """The modules of a target that hold weights of several experts, stacked."""
    modules = target.shadow_model.modules()
    return [each for each in modules if any(weight.dim() == 3 for weight in each.parameters(recurse=False))]


def _noting(chosen: list[Tensor]) -> Any:
    """A hook that notes which experts the router chose, which is the only tensor of whole numbers."""

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        chosen.extend(each for each in given if isinstance(each, Tensor) and not each.is_floating_point())

    return note


def _counts(target: HFTarget, texts: Sequence[Sequence[int]], n: int, chosen: list[Tensor]) -> list[int]:
    counts = []
    for text in texts:
        context = min(CONTEXT, len(text) - n)
        if context < 1:
            continue
        tokens = torch.tensor([list(text[: context + n])], device=target.device)
        cache = target.new_cache(1)
        cache.storage.hold(context + n)
        target(chain(tokens[:, :context]), cache, rows=tokens[:, :0])
        cache.keep(None, torch.tensor([context], device=target.device))
        chosen.clear()
        target(chain(tokens[:, context:]), cache)
        counts += [len(each.unique()) for each in chosen]
    return counts
