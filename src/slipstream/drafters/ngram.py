"""Prompt lookup: the longest match of the text's end, earlier in the text, proposes its continuation.

Saxena's prompt lookup decoding, vLLM's `ngram`. Costs no pass of anything: a few integer comparisons over the
context.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core import look
from slipstream.core.drafter import Drafter, State
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree, chain


@dataclass
class NGramState(State):
    text: Int[Tensor, "B S"]  # the last slot takes what is only padding
    length: Int[Tensor, " B"]  # tokens of text; the root comes after


@final
class NGram(Drafter):
    """Proposes a chain of up to `depth` tokens.

    Args:
        depth: tokens drafted per round.
        longest: suffixes of up to this many tokens are told apart; among equally long matches the latest
            wins.
        shortest: a match must be at least this long. 1 drafts more often and is right less often.

    Raises:
        ValueError: limits that no match can meet.
    """

    def __init__(self, depth: int = 7, longest: int = 4, shortest: int = 2) -> None:
        if depth < 1 or not 1 <= shortest <= longest:
            raise ValueError(
                f"ngram got depth={depth}, longest={longest}, shortest={shortest}; "
                "it needs depth >= 1 and 1 <= shortest <= longest"
            )
        self.depth, self.rows, self.longest, self.shortest = depth, depth + 1, longest, shortest

    def start(self, batch: int, capacity: int, device: torch.device) -> NGramState:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=device)

        return NGramState(zeros(batch), zeros(batch, capacity + 1), zeros(batch))

    def absorb(self, span: Span, state: State) -> None:
        assert isinstance(state, NGramState)
        at = span.start[:, None] + torch.arange(span.tokens.shape[1], device=span.tokens.device)
        state.text.scatter_(1, at.where(span.mask, state.text.shape[1] - 1), span.tokens)
        state.length, state.root = span.start + span.count, span.last(span.nexts)

    def propose(self, state: State, sampler: Sampler) -> Tree:
        assert isinstance(state, NGramState)
        end, length = self._match(state)
        found = length >= self.shortest
        if look.may_look(found) and not bool(found.any()):
            return chain(state.root[:, None])
        return chain(self._continuation(state, end, found))

    def _match(self, state: NGramState) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
        """Where the best match ends, and how many tokens it has."""
        view = int(state.length.max()) if look.may_look(state.length) else state.text.shape[1]
        text, slot = state.text[:, :view], torch.arange(view, device=state.text.device)
        run = (text == state.root[:, None]) & (slot < state.length[:, None])
        length = run.long()
        for back in range(1, self.longest):
            token = state.text.gather(1, (state.length - back).clamp(min=0)[:, None])
            run = run & torch.nn.functional.pad(text == token, (back, 0))[:, :view]
            length += run
        best = (length * view + slot).argmax(1)
        return best, length.gather(1, best[:, None])[:, 0]

    def _continuation(self, state: NGramState, end: Tensor, found: Tensor) -> Int[Tensor, "B N"]:
        """Root and draft. A continuation that runs into the root goes round: text that repeats itself keeps
        doing so."""
        period = (state.length - end).clamp(min=1)[:, None]
        at = end[:, None] + 1 + torch.arange(self.depth, device=end.device) % period
        full = torch.cat([state.text, state.root[:, None]], 1)
        at = torch.where(at >= state.length[:, None], full.shape[1] - 1, at)
        draft = full.gather(1, at).masked_fill(~found[:, None], PAD)
        return torch.cat([state.root[:, None], draft], 1)
