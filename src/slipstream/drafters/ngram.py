"""Prompt lookup decoding (Saxena 2023; vLLM's `ngram`): what followed the longest earlier match of the text's
end is proposed, without a pass of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.drafter import Drafter, State, appended
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree, chain
from slipstream.core.tree_spec import TreeSpec


@dataclass
class TextState(State):
    by_token = ("text",)
    text: Int[Tensor, "B S"]  # the last slot is written in the place of padding
    length: Int[Tensor, " B"]  # tokens of text; the root comes behind them

    def read(self, span: Span) -> None:
        """Append a span to the text."""
        self.text = appended(self.text, span)
        self.length = span.start + span.count
        self.root = span.root

    def viewed(self) -> Int[Tensor, "B S1"]:
        """The text without slots that no row has filled, where the host may know."""
        return self.text[:, : int(self.length.max())] if is_host(self.length) else self.text

    def ends(self, longest: int) -> Int[Tensor, "B n"]:
        """The last tokens, the root first; before the text's beginning what equals no token."""
        at = self.length[:, None] - torch.arange(1, longest, device=self.text.device)
        tokens = self.text.gather(1, at.clamp(min=0)).masked_fill(at < 0, PAD - 1)
        return torch.cat([self.root[:, None], tokens], 1)

    def matched(self, sizes: Sequence[int]) -> list[int]:
        """How many of these sizes, the smallest first, each text's last tokens have that stood there before,
        the root included. The host looks among bytes: tensors take many times as long for so little."""
        found, wide = [], self.text.element_size()
        for root, text, length in zip(self.root, self.text.numpy(), self.length.tolist(), strict=True):
            line = text[:length].tobytes()
            whole, n = line + root.numpy().tobytes(), 0
            while n < len(sizes) and length >= sizes[n] and _stands(whole[-wide * sizes[n] :], line, wide):
                n += 1
            found.append(n)
        return found

    def following(self, slots: Int[Tensor, "B K"], depth: int) -> Int[Tensor, "B K D"]:
        """What stands behind slots, up to the root. There it starts again: repetitions tend to go on."""
        period = (self.length[:, None] - slots).clamp(min=1)[..., None]
        at = slots[..., None] + 1 + torch.arange(depth, device=slots.device) % period
        full = torch.cat([self.text, self.root[:, None]], 1)
        at = torch.where(at >= self.length[:, None, None], full.shape[1] - 1, at)
        return full.gather(1, at.flatten(1)).view(at.shape)


def _stands(end: bytes, line: bytes, wide: int) -> bool:
    """Whether a line of numbers, `wide` bytes each, holds these."""
    at = line.find(end)
    while at > 0 and at % wide:
        at = line.find(end, at + 1)
    return at >= 0


def match_lengths(
    table: Int[Tensor, "#B S"], ends: Int[Tensor, "B n"]
) -> tuple[Int[Tensor, " P"], Int[Tensor, "B P"]]:
    """Slots of a table, and at each of them how many tokens up to it equal the last of a text, newest first
    in `ends`. Where the host may look, slots at which no text matches are left out."""
    slots = torch.arange(table.shape[1], device=table.device)
    if is_host(table):
        slots = slots[(table == ends[:, :1]).any(0)]
    at = slots[:, None] - torch.arange(ends.shape[1], device=table.device)
    same = (table[:, at.clamp(min=0)] == ends[:, None]) & (at >= 0)
    return slots, same.cumprod(2).sum(2)


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

    def start(self, batch: int, device: torch.device) -> TextState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return TextState(zeros, zeros.new_zeros(batch, 0), zeros.clone())

    def update(self, span: Span, state: TextState) -> None:
        state.read(span)

    def propose(self, state: TextState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        slots, lengths = match_lengths(state.viewed(), state.ends(self.longest))
        lengths = lengths.where(slots < state.length[:, None], 0)
        matched = lengths.amax(1) >= self.shortest if len(slots) else lengths.any(1)
        if is_host(matched) and not bool(matched.any()):
            return chain(state.root[:, None])
        latest = slots[(lengths * len(slots) + torch.arange(len(slots), device=slots.device)).argmax(1)]
        depth = self.depth if spec is None else min(self.depth, spec.depth)
        draft = state.following(latest[:, None], depth)[:, 0].masked_fill(~matched[:, None], PAD)
        return chain(torch.cat([state.root[:, None], draft], 1))
