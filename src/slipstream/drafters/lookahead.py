"""Lookahead decoding (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference …"): n-grams that the
target's own passes make by Jacobi iteration are drafted where they begin with the root."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.suffix import TextState

POOL = 4096  # n-grams that a row remembers; a new one replaces the oldest
LOOKS = 4  # matches that are looked at per guess, because some of them are equal


@dataclass
class LookaheadState(TextState):
    levels: Int[Tensor, "B N1 W"]  # level l of column j guesses the token l + j + 1 positions behind the root
    pool: Int[Tensor, "B P1 N"]  # a ring of n-grams; the last slot is written in the place of no n-gram
    added: Int[Tensor, " B"]  # n-grams that were ever put in


@final
class Lookahead(Drafter):
    """Drafts n-grams that begin with the root, and lets the same target pass make new ones.

    The tree holds both branches of the paper, and tokens of both may be accepted. The lookahead branch has W
    columns of N − 1 levels: the first level is a chain, from whose nodes the columns continue. The
    verification branch is G n-grams from the pool. Raises ValueError for a number that leaves nothing.

    Args:
        window: W, the number of columns.
        ngram: N, the tokens of an n-gram, of which the first is the root.
        guesses: G, the n-grams drafted at once.
    """

    def __init__(self, window: int = 5, ngram: int = 4, guesses: int = 5) -> None:
        if window < 1 or ngram < 2 or not 1 <= guesses <= POOL // LOOKS:
            raise ValueError(
                f"lookahead got window={window}, ngram={ngram}, guesses={guesses}; it needs window >= 1, "
                f"ngram >= 2 and guesses from 1 to {POOL // LOOKS}"
            )
        self.W, self.N, self.G = window, ngram, guesses
        first = torch.arange(window)  # order of slots: the first level, the rest of each column, the guesses
        column = torch.stack([1 + first, *(1 + window + first * (ngram - 2) + i for i in range(ngram - 2))])
        guess = 1 + window * (ngram - 1) + torch.arange(guesses * (ngram - 1)).view(guesses, -1)
        parents = torch.zeros(1 + (window + guesses) * (ngram - 1), dtype=torch.long)
        parents[column[0]] = first
        parents[column[1:]] = column[:-1]
        parents[guess[:, 1:]] = guess[:, :-1]
        self._column, self._parents = column, parents[None]
        self.rows, self.depth = len(parents), window + ngram - 2

    def start(self, batch: int, device: torch.device) -> LookaheadState:
        self._column, self._parents = self._column.to(device), self._parents.to(device)
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        levels = zeros.new_zeros(batch, self.N - 1, self.W)
        pool = zeros.new_full((batch, POOL + 1, self.N), PAD)
        return LookaheadState(zeros, zeros.new_zeros(batch, 0), zeros.clone(), levels, pool, zeros.clone())

    def update(self, span: Span, state: LookaheadState) -> None:
        tree = span.tree  # one that a grammar has cut has other slots
        looked_ahead = tree is not None and not tree.is_chain and tree.nodes == self.rows
        if looked_ahead:
            picks = span.picks[:, self._column[-1]]  # the target's tokens behind the last level
            grams = torch.cat([state.levels, picks[:, None]], 1).transpose(1, 2)
            self._remember(state, grams, torch.ones_like(picks, dtype=torch.bool))
            state.levels = torch.cat([state.levels[:, 1:], picks[:, None]], 1)
        state.read(span)
        at = span.start[:, None] + torch.arange(span.tokens.shape[1], device=span.tokens.device)
        back = at[..., None] - torch.arange(self.N - 1, -1, -1, device=at.device)
        grams = state.text.gather(1, back.clamp(0, state.text.shape[1] - 1).flatten(1)).view(*back.shape)
        self._remember(state, grams, span.mask & (back[..., 0] >= 0))
        if not looked_ahead:
            # Any tokens will do to begin with: these are scattered over the text.
            index = torch.arange((self.N - 1) * self.W, device=at.device) * 7919
            index = index % state.length.clamp(min=1)[:, None]
            state.levels = state.text.gather(1, index).view(-1, self.N - 1, self.W)

    def _remember(self, state: LookaheadState, grams: Tensor, real: Bool[Tensor, "B K"]) -> None:
        """Put the real ones of some n-grams [B, K, N] into the pool."""
        at = (state.added[:, None] + real.cumsum(1) - 1) % POOL
        at = at.where(real, POOL)[..., None].expand(-1, -1, self.N)
        state.pool = state.pool.scatter(1, at, grams)
        state.added = state.added + real.sum(1)

    def propose(self, state: LookaheadState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        B = len(state.root)
        columns = torch.cat([state.levels[:, 0], state.levels[:, 1:].transpose(1, 2).flatten(1)], 1)
        tokens = torch.cat([state.root[:, None], columns, self._guesses(state).flatten(1)], 1)
        return Tree(tokens, self._parents.expand(B, -1), self.depth)

    def _guesses(self, state: LookaheadState) -> Int[Tensor, "B G N1"]:
        """The latest distinct n-grams that begin with the root, `PAD` where there are fewer than G."""
        slot = torch.arange(POOL, device=state.root.device)
        age = (state.added[:, None] - 1 - slot) % POOL
        fits = state.pool[:, :POOL, 0] == state.root[:, None]
        index = age.where(fits, POOL).topk(LOOKS * self.G, largest=False, sorted=True).indices
        latest = state.pool.gather(1, index[..., None].expand(-1, -1, self.N))[..., 1:]
        latest = latest.masked_fill(~fits.gather(1, index)[..., None], PAD)
        repeated = (latest[:, :, None] == latest[:, None]).all(-1).tril(-1).any(-1)
        useless = (repeated | (latest[..., 0] < 0)).int().sort(dim=1, stable=True)
        best = useless.indices[:, : self.G]
        guesses = latest.gather(1, best[..., None].expand(-1, -1, self.N - 1))
        return guesses.masked_fill(useless.values[:, : self.G, None] > 0, PAD)
