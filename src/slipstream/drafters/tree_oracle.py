"""A public test double: it proposes a known answer among wrong siblings, which tests every path of a loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.drafter import Drafter, State
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree
from slipstream.core.tree_spec import TreeSpec


@dataclass
class OracleState(State):
    row: Int[Tensor, " B"]
    position: Int[Tensor, " B"]  # of the root
    step: Int[Tensor, " B"]


@final
class TreeOracle(Drafter):
    """Proposes 0, 1, …, `depth` right tokens in turn, each at every sibling rank in turn.

    Every level has `width` siblings under the last right node. The right one's slot changes from step to
    step, so accepted slots are not contiguous. From depth 2 on, a decoy carries the right token under a
    wrong parent.

    Args:
        texts: prompt and answer of each text, by its number. Past their end nothing is proposed.
        vocab: V, more than `width`.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int, depth: int = 4, width: int = 3) -> None:
        if width >= vocab:
            raise ValueError(
                f"TreeOracle got width={width} and vocab={vocab}: wrong siblings need a wider vocabulary"
            )
        self.texts = [list(text) for text in texts]
        self.vocab, self.depth, self.width = vocab, depth, width
        self.rows = 1 + depth * width + depth - 1

    def start(self, batch: int, device: torch.device) -> OracleState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return OracleState(zeros, zeros, zeros, zeros)

    def update(self, span: Span, state: OracleState) -> None:
        state.root, state.position = span.root, span.start + span.count
        state.row, state.step = span.cache.texts, state.step + 1

    def propose(self, state: OracleState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        columns = (state.root, state.row, state.position, state.step)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        nodes = zip(*(self._row(*row) for row in rows), strict=True)
        tokens, parents = (torch.tensor(lines, device=state.root.device) for lines in nodes)
        return Tree(tokens, parents, self.depth)

    def _row(self, root: int, row: int, position: int, step: int) -> tuple[list[int], list[int]]:
        tokens, parents, parent, decoys = [root], [0], 0, list[int]()
        hit = (step + row) % (self.depth + 1)
        for depth in range(1, self.depth + 1):
            at, first = position + depth, len(tokens)
            truth = self.texts[row][at] if at < len(self.texts[row]) else PAD
            siblings = [(truth + 1 + i) % self.vocab if truth >= 0 else PAD for i in range(self.width)]
            rank = (step // (self.depth + 1) + depth + row) % self.width
            if depth <= hit:
                siblings[rank] = truth
            tokens += siblings + [truth] * len(decoys)
            parents += [parent] * self.width + decoys
            parent, decoys = first + rank, [first + (rank + 1) % self.width]
        return tokens, parents
