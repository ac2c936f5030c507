"""Lookahead decoding: the target's own passes make n-grams by Jacobi iteration, and those that fit are
drafted (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding")."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from slipstream.core.drafter import Drafter, State
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree

POOL = 4096  # n-grams that a row remembers; the oldest make room
LOOKS = 4  # matches that are looked at for each guess, since some of them are alike


@dataclass
class LookaheadState(State):
    levels: Int[Tensor, "B N1 W"]  # level l of column j is a guess of the token l + j + 1 behind the root
    pool: Int[Tensor, "B P1 N"]  # n-grams, oldest first round the ring; the last slot takes what is none
    made: Int[Tensor, " B"]  # n-grams that were ever put in
    text: Int[Tensor, "B S"]  # the last slot takes what is only padding
    length: Int[Tensor, " B"]  # tokens of text; the root comes after


@final
class Lookahead(Drafter):
    """Drafts n-grams that begin with the root, and in the same pass lets the target make new ones.

    The tree is both branches of the paper: W columns, of which the first level is a chain behind the root and
    the others go on from it one by one, and G chains of n-grams from the pool. So what a column says may be
    accepted as well.

    Args:
        window: W, columns.
        ngram: N, tokens of an n-gram, its first included, which is the root.
        guesses: G, n-grams drafted at once.

    Raises:
        ValueError: a number that leaves nothing to draft.
    """

    def __init__(self, window: int = 5, ngram: int = 4, guesses: int = 5) -> None:
        if window < 1 or ngram < 2 or not 1 <= guesses <= POOL // LOOKS:
            raise ValueError(
                f"lookahead got window={window}, ngram={ngram}, guesses={guesses}; it needs window >= 1, "
                f"ngram >= 2 and "
                f"guesses from 1 to {POOL // LOOKS}"
            )
        self.W, self.N, self.G = window, ngram, guesses
        first = torch.arange(window)  # slots: the first level, then the rest of each column, then the guesses
        column = torch.stack([1 + first, *(1 + window + first * (ngram - 2) + i for i in range(ngram - 2))])
        guess = 1 + window * (ngram - 1) + torch.arange(guesses * (ngram - 1)).view(guesses, -1)
        parents = torch.zeros(1 + (window + guesses) * (ngram - 1), dtype=torch.long)
        parents[column[0]], parents[column[1:]], parents[guess[:, 1:]] = first, column[:-1], guess[:, :-1]
        self._column, self._parents = column, parents[None]
        self.rows, self.depth = len(parents), max(window + ngram - 2, ngram - 1)

    def start(self, batch: int, capacity: int, device: torch.device) -> LookaheadState:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=device)

        pool = zeros(batch, POOL + 1, self.N) + PAD
        return LookaheadState(
            zeros(batch),
            zeros(batch, self.N - 1, self.W),
            pool,
            zeros(batch),
            zeros(batch, capacity + 1),
            zeros(batch),
        )

    def absorb(self, span: Span, state: State) -> None:
        assert isinstance(state, LookaheadState)
        if span.tree is None or span.tree.is_chain:  # a prompt
            self._read(span, state)
            spread = (
                torch.arange((self.N - 1) * self.W, device=span.tokens.device) * 7919
            )  # anything will do to begin with
            index = spread % state.length.clamp(min=1)[:, None]
            state.levels = state.text.gather(1, index).view(-1, self.N - 1, self.W)
            return
        said = span.picks[:, self._column[-1]]  # behind every column's last level
        grams = torch.cat([state.levels, said[:, None]], 1).transpose(1, 2)
        self._remember(state, grams, torch.ones_like(said, dtype=torch.bool))
        state.levels = torch.cat([state.levels[:, 1:], said[:, None]], 1)
        self._read(span, state)

    def _read(self, span: Span, state: LookaheadState) -> None:
        """Go on in the text; its own n-grams are as good as any."""
        at = span.start[:, None] + torch.arange(span.tokens.shape[1], device=span.tokens.device)
        state.text.scatter_(1, at.where(span.mask, state.text.shape[1] - 1), span.tokens)
        back = at[..., None] - torch.arange(self.N - 1, -1, -1, device=at.device)
        grams = state.text.gather(1, back.clamp(0, state.text.shape[1] - 1).flatten(1)).view(*back.shape)
        self._remember(state, grams, span.mask & (back[..., 0] >= 0))
        state.length, state.root = span.start + span.count, span.last(span.nexts)

    def _remember(
        self, state: LookaheadState, grams: Int[Tensor, "B K N"], real: Bool[Tensor, "B K"]
    ) -> None:
        at = (state.made[:, None] + real.cumsum(1) - 1) % POOL
        at = at.where(real, POOL)[..., None].expand(-1, -1, self.N)
        state.pool = state.pool.scatter(1, at, grams)
        state.made = state.made + real.sum(1)

    def propose(self, state: State, sampler: Sampler) -> Tree:
        assert isinstance(state, LookaheadState)
        B, device = len(state.root), state.root.device
        columns = torch.cat([state.levels[:, 0], state.levels[:, 1:].transpose(1, 2).flatten(1)], 1)
        tokens = torch.cat([state.root[:, None], columns, self._guesses(state).flatten(1)], 1)
        return Tree(tokens, self._parents.to(device).expand(B, -1), self.depth)

    def _guesses(self, state: LookaheadState) -> Int[Tensor, "B G N1"]:
        """The latest n-grams that begin with the root, no two alike; `PAD` where there are fewer."""
        slot = torch.arange(POOL, device=state.root.device)
        age = (state.made[:, None] - 1 - slot) % POOL
        fits = state.pool[:, :POOL, 0] == state.root[:, None]
        index = age.where(fits, POOL).topk(LOOKS * self.G, largest=False, sorted=True).indices
        found = state.pool.gather(1, index[..., None].expand(-1, -1, self.N))[..., 1:]
        found = found.masked_fill(~fits.gather(1, index)[..., None], PAD)
        alike = (found[:, :, None] == found[:, None]).all(-1).tril(-1).any(-1)
        chosen = (alike | (found[..., 0] < 0)).int().sort(dim=1, stable=True)
        best = chosen.indices[:, : self.G]
        guesses = found.gather(1, best[..., None].expand(-1, -1, self.N - 1))
        return guesses.masked_fill(chosen.values[:, : self.G, None] > 0, PAD)
