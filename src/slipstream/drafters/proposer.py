"""Drafters whose trees grow from candidates: by a named tree, in three ways to pick them at T > 0."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.core.drafter import Drafter, ScratchSlots
from slipstream.core.grammar import GrammarState, may_advance
from slipstream.core.noise import NoiseStream
from slipstream.core.sampling import Sampler, within
from slipstream.core.tree import PAD, Tree
from slipstream.core.tree_builders import Expand
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.layers import visible_scratch
from slipstream.drafters.store import VOCAB

PROPOSALS = ("top-k", "noise", "sampled")
NODES, LEVELS = (2, 4, 8, 16), 5  # of a ladder's trees; at most
Vocab = Int[Tensor, " Vd"]
Scores = Float[Tensor, "B F Vd"]
Candidates = tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]
# scores of a frontier, from its tokens, their parents in the frontier before, what they see of the scratch
# rows, the level
Step = Callable[[Int[Tensor, "B F"], Int[Tensor, "B F"], Bool[Tensor, "B F A"], int], Scores]


class Proposer(Drafter):
    """Grows trees of any `TreeSpec` from the laws that it guesses.

    Args:
        vocab: target ids that candidates are taken from, sorted.
        width: V, of the target's logits.
        tree: the default `TreeSpec`, or its name.
        proposal: candidates at T > 0: "top-k" of log q; "noise": top-k of log q + g with the target's own
            noise g; "sampled" from q without replacement, verified by the multi-round law (static trees).

    Raises:
        ValueError: an unknown tree or proposal, or a pair of them that is not exact; or the vocabulary names
            tokens that the target does not have, or one of them twice.
    """

    reach: int | None = None  # the last tokens of a text that are enough to begin with; None: all of them

    def __init__(self, vocab: Vocab, width: int, tree: str | TreeSpec, proposal: str) -> None:
        if not (len(vocab) and int(vocab.min()) >= 0 and int(vocab.max()) < width):
            raise ValueError(f"this drafter's draft vocabulary names other tokens than this target's {width}")
        if len(vocab.unique()) < len(vocab):  # siblings that are the same would be accepted too often
            raise ValueError("this drafter's draft vocabulary names tokens twice")
        self.vocab, self.width = vocab, width
        self.grow_as(tree, proposal)

    @property
    def deepest(self) -> int | None:
        """The deepest tree that it can grow, if there is a limit."""
        return None

    @property
    def ladder(self) -> tuple[str, ...]:
        """Trees of rising size that `auto` chooses among, unless others were tuned."""
        most = min(LEVELS, self.deepest or LEVELS)
        return tuple(f"best-first-{max(1, min(most, n // 2))}x{n}" for n in NODES)

    def grow_as(self, tree: str | TreeSpec, proposal: str = "top-k") -> None:
        """Change the default tree and the proposal. Raises ValueError."""
        if proposal not in PROPOSALS:
            raise ValueError(f"Unknown proposal: {proposal!r}. Available: {', '.join(PROPOSALS)}")
        self.proposal, self.uses_target_noise = proposal, proposal == "noise"
        self.law = "multi-round" if proposal == "sampled" else "coupled"
        self.tree_spec = TreeSpec.parse(tree) if isinstance(tree, str) else tree
        self.check(self.tree_spec)
        self._checked = [self.tree_spec]
        self.depth, self.rows = self.tree_spec.depth, self.tree_spec.nodes

    def check(self, spec: TreeSpec) -> None:
        """Raises ValueError for a tree that cannot be grown, or that would not be exact."""
        if self.deepest is not None and spec.depth > self.deepest:
            raise ValueError(
                f"tree {spec.name!r} is {spec.depth} deep and this drafter drafts {self.deepest} tokens: "
                "name a lower tree"
            )
        if self.proposal == "sampled" and not spec.keeps_first_children:
            raise ValueError(
                f"tree {spec.name!r} drops some of a node's sampled children, which the multi-round law "
                "does not allow: use a static tree without gaps among siblings (fig9, chain-5, …) with "
                "proposal=sampled"
            )
        if spec.children > len(self.vocab):
            raise ValueError(
                f"tree {spec.name!r} asks for {spec.children} children a node and the draft vocabulary has "
                f"{len(self.vocab)}: narrow the tree"
            )

    def packed(self, module: nn.Module, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a drafter directory holds: configuration, to which the tree is added, and tensors."""
        vocab = {VOCAB: self.vocab.int()} if len(self.vocab) < self.width else {}
        return config | {"tree": self.tree_spec.name}, {**module.state_dict(), **vocab}

    def shaped(self, spec: TreeSpec | None) -> TreeSpec:
        """The tree that was asked for, checked; the default where none was."""
        spec = spec or self.tree_spec
        if spec not in self._checked:
            self.check(spec)
            self._checked.append(spec)
        return spec

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        """See `Drafter`. Draft steps stand behind a text whose length is known a step late."""
        spec = self.shaped(spec)
        return ScratchSlots(spec.nodes, max(spec.nodes, spec.depth + spec.scratch + 3))


@dataclass
class Draft:
    """A tree that is being grown."""

    drafter: Proposer
    tree_spec: TreeSpec
    sampler: Sampler
    laws: list[Scores] = field(default_factory=list)  # that children were sampled from, level by level
    # Where the nodes of the frontier stand in the grammars of their rows; none without grammars.
    walks: list[list[GrammarState | None]] = field(default_factory=list)

    def grow(self, root: Int[Tensor, " B"], expand: Expand) -> Tree:
        """The tree, with the laws that its children were sampled from, if they were."""
        if any(walk is not None for walk in self.sampler.grammar_states):
            self.walks = [[walk] for walk in self.sampler.grammar_states]

        def walked(tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            if self.walks:  # behind a forbidden token, or one that nothing may follow, no grammar goes on
                lines = zip(self.walks, tokens.tolist(), origin.tolist(), strict=True)
                self.walks = [
                    [
                        row[i] and may_advance(row[i], token, onward=True)
                        for token, i in zip(line, above, strict=True)
                    ]
                    for row, line, above in lines
                ]
            return expand(tokens, origin)

        tree = self.tree_spec.grow(root, walked)
        if not self.laws:
            return tree
        law = self.laws[0].new_zeros(len(tree.tokens), tree.nodes, self.drafter.width)
        law[:, self.tree_spec.inner(law.device)[:, None], self.drafter.vocab] = torch.cat(self.laws, 1)
        return replace(tree, law=law)

    def step_by_step(
        self, root: Int[Tensor, " B"], at: Int[Tensor, " B"], scores: Float[Tensor, "B 1 Vd"], step: Step
    ) -> Tree:
        """The tree of a drafter that reads its own guesses: a step for every level below the root, whose
        position is `at` and whose own scores are known."""
        visible = torch.ones(len(root), 1, 0, dtype=torch.bool, device=root.device)
        level = 0

        def expand(tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal scores, level, visible
            if level:
                visible = visible_scratch(visible, origin)
                scores = step(tokens, origin, visible, level)
            level += 1
            return self.children(scores, at + level)

        return self.grow(root, expand)

    @property
    def noisy(self) -> bool:
        """Candidates are drawn with the target's noise at their position."""
        return self.drafter.proposal == "noise" and not self.sampler.greedy

    def children(self, scores: Scores, position: Int[Tensor, " B"]) -> Candidates:
        """Candidates behind the frontier, which stand at `position`, and their log probabilities."""
        drafter, sampler = self.drafter, self.sampler
        if drafter.proposal == "sampled" and not sampler.greedy:
            return self._sample(self._processed(scores), position)
        if self.noisy:
            scores = self._tempered(scores) + sampler.noise(position, drafter.vocab)[:, None]
        if self.walks:
            wide = self._widened(scores)
            allowed = within(wide.flatten(0, 1), [walk for row in self.walks for walk in row]).view_as(wide)
            scores = allowed if wide is scores else allowed[..., drafter.vocab]
        log_q, index = scores.log_softmax(-1).topk(self.tree_spec.children)
        ids = drafter.vocab[index]
        if self.walks:  # somewhere nothing may be allowed
            log_q = log_q.nan_to_num(-torch.inf, neginf=-torch.inf)
            ids = ids.masked_fill(log_q == -torch.inf, PAD)
        return ids, log_q

    def _widened(self, scores: Scores) -> Float[Tensor, "B F V"]:
        """Over the target's vocabulary, −inf for tokens that are not drafted."""
        if scores.shape[-1] == self.drafter.width:
            return scores
        every = scores.new_full((*scores.shape[:2], self.drafter.width), -torch.inf)
        every[..., self.drafter.vocab] = scores
        return every

    def _tempered(self, scores: Scores) -> Scores:
        """Scores over each row's temperature; those of greedy rows as they are."""
        T = self.sampler.temperature
        return scores / torch.where(T > 0, T, 1.0)[..., None]

    def _processed(self, scores: Scores) -> Scores:
        """Log weights of the law that children are drawn from: the target's cuts, penalties and processors
        for the history before the root. A draft that these exclude is never accepted."""
        if self.sampler.tempers_only:
            return self._tempered(scores)
        nodes = self._widened(scores).unbind(1)
        walks = [list(column) for column in zip(*self.walks, strict=True)] or [[]] * len(nodes)
        processed = [
            self.sampler.scores(node, states=walk, partial=True)
            for node, walk in zip(nodes, walks, strict=True)
        ]
        return torch.stack(processed, 1)[..., self.drafter.vocab]

    def _sample(self, scores: Scores, position: Int[Tensor, " B"]) -> Candidates:
        """Gumbel top-k: drawn without replacement, in order; `PAD` where the law has no further token. A
        greedy row takes its top-k, and its law is its best."""
        hot = (self.sampler.temperature > 0)[..., None]
        u = self.sampler.uniform(NoiseStream.DRAFT, position, scores.shape[1] * scores.shape[2])
        log_q = scores.double().log_softmax(-1)
        log_q = log_q.nan_to_num(-torch.inf, neginf=-torch.inf)  # nothing is allowed, or a head is damaged
        drawn = torch.where(hot, log_q - (-u.view(scores.shape).log()).log(), log_q)
        index = drawn.topk(self.tree_spec.children).indices
        best = torch.zeros_like(log_q).scatter_(2, index[..., :1], 1.0)
        self.laws.append(torch.where(hot, log_q.exp(), best))
        chosen = log_q.gather(2, index)
        return self.drafter.vocab[index].masked_fill(chosen == -torch.inf, PAD), chosen
