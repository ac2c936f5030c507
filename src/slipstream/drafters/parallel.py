"""Parallel heads, which draft all depths in one pass: each depth has one law, independent of the drafted
tokens (FastEagle without a rank, Medusa)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.device import is_host
from slipstream.core.drafter import State
from slipstream.core.sampling import Sampler
from slipstream.core.tree import Tree
from slipstream.core.tree_builders import best_first
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.heads import HeadDrafter
from slipstream.drafters.proposer import Draft


@dataclass
class ParallelState(State):
    hidden: Float[Tensor, "B N H"]  # the states that give the laws of the depths that are drafted
    length: Int[Tensor, " B"]  # tokens before the root


class ParallelDrafter(HeadDrafter):
    """Drafts with N laws, of which as many are made as its trees are deep. From them any tree grows without
    another pass: FastEagle's Backbone Expansion ("backbone-7x10"), Medusa's static trees, or the most
    probable nodes ("best-first-7x26"). At T > 0 children sampled from one law serve all nodes of a depth: the
    walk visits only one of these nodes, and which one does not depend on the draws below it."""

    @property
    def deepest(self) -> int:
        return int(self.head.config.depth)

    @property
    def drafted(self) -> int:
        """The depth of the deepest tree that was asked for: no step needs deeper guesses."""
        return max(spec.depth for spec in self._checked)

    @property
    def one_law(self) -> bool:
        """All nodes of a depth have the same law."""
        return True

    def start(self, batch: int, device: torch.device) -> ParallelState:
        root = torch.zeros(batch, dtype=torch.long, device=device)
        shape = (batch, self.drafted, self.head.config.hidden_size)
        return ParallelState(root, torch.zeros(shape, dtype=self.target.dtype, device=device), root.clone())

    def propose(self, state: ParallelState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        spec = self.shaped(spec)
        draft, level = Draft(self, spec, sampler), 0
        if spec.depth > (drafted := state.hidden.shape[1]):
            raise ValueError(
                f"tree {spec.name!r} is {spec.depth} deep and this engine drafts {drafted} tokens: name it "
                "among the engine's specs"
            )
        scores = self.scores(state.hidden[:, : spec.depth])
        if self.one_law and spec.best_first and not any(sampler.grammar_states) and is_host(scores):
            laws = scores.split(1, 1) if draft.noisy else [scores]  # noise has its place in the text
            levels = (draft.children(law, state.length + i) for i, law in enumerate(laws, 1))
            ids, log_q = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
            return best_first(state.root, ids, log_q, spec.nodes)

        def expand(tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal level
            own = scores[:, level : level + 1]
            if level:
                own = self.behind(tokens, state.hidden[:, level : level + 1], own)
            level += 1
            width = tokens.shape[1]
            if draft.walks:  # what a grammar forbids depends on the node
                own = own.expand(-1, width, -1)
            ids, log_q = draft.children(own, state.length + level)
            draft.laws[level - 1 :] = [law.expand(-1, width, -1) for law in draft.laws[level - 1 :]]
            return ids.expand(-1, width, -1), log_q.expand(-1, width, -1)

        return draft.grow(state.root, expand)

    def behind(
        self, tokens: Int[Tensor, "B F"], hidden: Float[Tensor, "B 1 H"], scores: Float[Tensor, "B 1 Vd"]
    ) -> Float[Tensor, "B F1 Vd"]:
        """Scores of what stands behind drafted tokens; one law for all where it does not depend on them."""
        return scores
