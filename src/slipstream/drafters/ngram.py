"""Prompt lookup decoding (Saxena 2023; vLLM's `ngram`): what followed the longest earlier match of the text's
end is proposed, without a pass of a model."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core import look
from slipstream.core.drafter import Drafter, State, appended
from slipstream.core.sampling import Sampler
from slipstream.core.shape import Shape
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree, chain


@dataclass
class NGramState(State):
    text: Int[Tensor, "B S"]  # the last slot is written in the place of padding
    length: Int[Tensor, " B"]  # tokens of text; the root comes behind them


@final
class NGram(Drafter):
    """Proposes a chain of up to `depth` tokens.

    Args:
        depth: tokens drafted per round.
        longest: matches are compared up to this length. Of equally long ones the latest is taken.
        shortest: a match must have at least this length. With 1, drafts are more frequent and worse.

    Raises:
        ValueError: no match can meet the limits.
    """

    def __init__(self, depth: int = 7, longest: int = 4, shortest: int = 2) -> None:
        if depth < 1 or not 1 <= shortest <= longest:
            raise ValueError(
                f"ngram got depth={depth}, longest={longest}, shortest={shortest}; it needs depth >= 1 and 1 "
                "<= shortest <= longest"
            )
        self.depth, self.rows = depth, depth + 1
        self.longest, self.shortest = longest, shortest

    def start(self, batch: int, device: torch.device) -> NGramState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return NGramState(zeros, zeros.new_zeros(batch, 0), zeros.clone())

    def absorb(self, span: Span, state: NGramState) -> None:
        state.text = appended(state.text, span)
        state.length = span.start + span.count
        state.root = span.root

    def propose(self, state: NGramState, sampler: Sampler, shape: Shape | None = None) -> Tree:
        end, length = self._match(state)
        matched = length >= self.shortest
        if look.may_look(matched) and not bool(matched.any()):
            return chain(state.root[:, None])
        depth = self.depth if shape is None else min(self.depth, shape.depth)
        return chain(self._continuation(state, end, matched, depth))

    def _match(self, state: NGramState) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
        """The slot at which the best match ends, and the number of its tokens."""
        view = int(state.length.max()) if look.may_look(state.length) else state.text.shape[1]
        text = state.text[:, :view]
        slot = torch.arange(view, device=state.text.device)
        run = (text == state.root[:, None]) & (slot < state.length[:, None])
        length = run.long()
        for back in range(1, self.longest):
            token = state.text.gather(1, (state.length - back).clamp(min=0)[:, None])
            run = run & torch.nn.functional.pad(text == token, (back, 0))[:, :view]
            length += run
        best = (length * view + slot).argmax(1)
        return best, length.gather(1, best[:, None])[:, 0]

    def _continuation(
        self, state: NGramState, end: Tensor, matched: Tensor, depth: int
    ) -> Int[Tensor, "B N"]:
        """Root and draft. A continuation that reaches the root starts again: repetitions tend to go on."""
        period = (state.length - end).clamp(min=1)[:, None]
        at = end[:, None] + 1 + torch.arange(depth, device=end.device) % period
        full = torch.cat([state.text, state.root[:, None]], 1)
        at = torch.where(at >= state.length[:, None], full.shape[1] - 1, at)
        draft = full.gather(1, at).masked_fill(~matched[:, None], PAD)
        return torch.cat([state.root[:, None], draft], 1)
