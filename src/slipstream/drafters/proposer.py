"""Drafters whose trees grow from candidates: by a named shape, in three ways to pick them at T > 0."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.noise import Stream
from slipstream.core.sampling import Sampler
from slipstream.core.shape import Shape
from slipstream.core.tree import PAD, Tree
from slipstream.drafters.layers import descended

PROPOSALS = ("top-k", "noise", "sampled")
# scores of a frontier, from its tokens, their parents in the frontier before, what they see of the scratch
# rows, the level
Step = Callable[
    [Int[Tensor, "B F"], Int[Tensor, "B F"], Bool[Tensor, "B F A"], int],
    Float[Tensor, "B F Vd"],
]


class Proposer(Drafter):
    """Grows a `Shape` from the laws that it guesses.

    Args:
        vocab: target ids that candidates are taken from, sorted.
        width: V, of the target's logits.
        tree: the `Shape` to grow, or its name.
        proposal: candidates at T > 0: "top-k" of log q; "noise": top-k of log q + g with the target's own
            noise g; "sampled" from q without replacement, verified by the multi-round law (static trees
            only).

    Raises:
        ValueError: an unknown tree or proposal, or a pair of them that is not exact.
    """

    def __init__(self, vocab: Int[Tensor, " Vd"], width: int, tree: str | Shape, proposal: str) -> None:
        self.vocab, self.width = vocab, width
        self.grow_as(tree, proposal)

    @property
    def deepest(self) -> int | None:
        """The deepest tree that it can grow, if there is a limit."""
        return None

    def grow_as(self, tree: str | Shape, proposal: str = "top-k") -> None:
        """Change the tree and the proposal; states that have begun are not for the new ones. Raises
        ValueError."""
        if proposal not in PROPOSALS:
            raise ValueError(f"Unknown proposal: {proposal!r}. Available: {', '.join(PROPOSALS)}")
        shape = Shape.parse(tree) if isinstance(tree, str) else tree
        if self.deepest is not None and shape.depth > self.deepest:
            raise ValueError(
                f"tree {shape.name!r} is {shape.depth} deep and this drafter says {self.deepest} tokens: "
                "name a lower tree"
            )
        if proposal == "sampled" and not shape.keeps_first_children:
            raise ValueError(
                f"tree {shape.name!r} drops some of a node's sampled children, which the multi-round law "
                "does not allow: use a static tree without gaps among siblings (fig9, chain-5, …) with "
                "proposal=sampled"
            )
        if shape.children > len(self.vocab):
            raise ValueError(
                f"tree {shape.name!r} asks for {shape.children} children a node and the draft vocabulary has "
                f"{len(self.vocab)}: narrow the tree"
            )
        self.shape, self.proposal = shape, proposal
        self.depth, self.rows = shape.depth, shape.nodes
        self.peeks, self.law = proposal == "noise", "multi-round" if proposal == "sampled" else "coupled"

    def step_by_step(
        self,
        root: Int[Tensor, " B"],
        at: Int[Tensor, " B"],
        scores: Float[Tensor, "B 1 Vd"],
        step: Step,
        sampler: Sampler,
    ) -> Tree:
        """The tree of a drafter that reads its own guesses, a step for every level below the root, whose
        position is `at` and whose own scores are known."""
        seen = torch.ones(len(root), 1, 0, dtype=torch.bool, device=root.device)
        level, laws = 0, list[Tensor]()

        def expand(tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal scores, level, seen
            if level:
                seen = descended(seen, origin)
                scores = step(tokens, origin, seen, level)
            level += 1
            return self.candidates(scores, sampler, at + level, laws)

        return self.with_laws(self.shape.grow(root, expand), laws)

    def candidates(
        self,
        scores: Float[Tensor, "B F Vd"],
        sampler: Sampler,
        position: Int[Tensor, " B"],
        laws: list[Tensor],
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """Children of the frontier, which stand at `position`; in sampled mode their law is appended to
        `laws`."""
        if self.proposal == "sampled" and not sampler.greedy:
            return self._sample(self._processed(scores, sampler), sampler, position, laws)
        if self.proposal == "noise" and not sampler.greedy:
            scores = _heated(scores, sampler) + sampler.noise(position)[:, None, self.vocab]
        log_q, index = scores.log_softmax(-1).topk(self.shape.children)
        return self.vocab[index], log_q

    def _processed(self, scores: Float[Tensor, "B F Vd"], sampler: Sampler) -> Float[Tensor, "B F Vd"]:
        """Log weights of the law that children are drawn from: cut, penalised and processed as the target's
        is, for the history up to the root. A draft that the target's law excludes is never accepted."""
        if sampler.tempers_only:
            return _heated(scores, sampler)
        every = scores.new_full((*scores.shape[:2], self.width), -torch.inf)
        every[..., self.vocab] = scores
        return torch.stack([sampler.scores(one) for one in every.unbind(1)], 1)[..., self.vocab]

    def _sample(
        self,
        scores: Float[Tensor, "B F Vd"],
        sampler: Sampler,
        position: Int[Tensor, " B"],
        laws: list[Tensor],
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """Gumbel top-k: drawn without replacement, in order; `PAD` where the law has no further token. A
        greedy row takes its top-k, and its law is its best."""
        hot = (sampler.temperature > 0)[..., None]
        u = sampler.uniform(Stream.DRAFT, position, scores.shape[1] * scores.shape[2]).view(scores.shape)
        log_q = scores.double().log_softmax(-1)
        index = torch.where(hot, log_q - (-u.log()).log(), log_q).topk(self.shape.children).indices
        best = torch.zeros_like(log_q).scatter_(2, index[..., :1], 1.0)
        laws.append(torch.where(hot, log_q.exp(), best))
        chosen = log_q.gather(2, index)
        return self.vocab[index].masked_fill(chosen == -torch.inf, PAD), chosen

    def with_laws(self, tree: Tree, laws: list[Tensor]) -> Tree:
        """The tree, with the laws that its children were sampled from, level by level, if they were."""
        if not laws:
            return tree
        shape = len(tree.tokens), tree.nodes, self.width
        law = torch.zeros(shape, dtype=laws[0].dtype, device=laws[0].device)
        law[:, self.shape.inner.to(law.device)[:, None], self.vocab] = torch.cat(laws, 1)
        return replace(tree, law=law)


def _heated(scores: Float[Tensor, "B F Vd"], sampler: Sampler) -> Float[Tensor, "B F Vd"]:
    """Scores over each row's temperature; those of greedy rows as they are."""
    T = sampler.temperature
    return scores / torch.where(T > 0, T, 1.0)[..., None]
