"""A public test double: random trees with probes and memory, the hardest case for exactness."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.drafter import Drafter, State
from slipstream.core.noise import NoiseStream
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Probes, Tree
from slipstream.core.tree_spec import TreeSpec


@dataclass
class RandomState(State):
    position: Int[Tensor, " B"]  # of the root


@final
class RandomDrafter(Drafter):
    """Every node has `width` children down to `depth`, drawn without replacement from a random law.

    Args:
        probes: vectors [M, H] that the root and a random node host.
        memory: keys and values [L, 2, P, heads, D] that the probes read.
        sampled: put the law on the tree, for multi-round verification. Otherwise candidates are point masses.
        seed: of the random laws. Candidates are drawn with the sampler's stream for drafts.
    """

    def __init__(
        self,
        vocab: int,
        depth: int = 2,
        width: int = 2,
        probes: Float[Tensor, "M H"] | None = None,
        memory: Float[Tensor, "L 2 P heads D"] | None = None,
        sampled: bool = False,
        seed: int = 0,
    ) -> None:
        if not 1 <= width <= vocab:
            raise ValueError(
                f"RandomDrafter got width={width}; it must be between 1 and the vocabulary's {vocab}"
            )
        self.vocab, self.depth, self.width, self.sampled, self.seed = vocab, depth, width, sampled, seed
        self.probes, self.memory = probes, memory
        self.nodes = sum(width**d for d in range(depth + 1))
        self.inner = self.nodes - width**depth
        self.rows = self.nodes + (0 if probes is None else 2 * len(probes))

    def start(self, batch: int, device: torch.device) -> RandomState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return RandomState(zeros, zeros)

    def update(self, span: Span, state: RandomState) -> None:
        state.root, state.position = span.root, span.start + span.count

    def propose(self, state: RandomState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        B, device = len(state.root), state.root.device
        u = sampler.uniform(NoiseStream.DRAFT, state.position, self.inner * self.vocab)
        u = u.view(B, self.inner, self.vocab)
        generator = torch.Generator().manual_seed(self.seed)
        scores = torch.randn(self.inner, self.vocab, generator=generator, dtype=torch.float64)
        log_q = scores.to(device).log_softmax(-1)
        # Gumbel top-k draws without replacement, in order.
        children = (log_q - (-u.log()).log()).topk(self.width).indices
        tokens = torch.cat([state.root[:, None], children.flatten(1)], 1)
        slots = torch.arange(self.nodes, device=device)
        parents = (slots - 1).div(self.width, rounding_mode="floor").clamp(min=0)
        law = probes = None
        if self.sampled:
            law = torch.zeros(B, self.nodes, self.vocab, dtype=torch.float64, device=device)
            law[:, : self.inner] = log_q.exp()
        if self.probes is not None:
            second = (1 + (u[:, 0, 0] * (self.nodes - 1)).long()).masked_fill(u[:, 0, 1] < 0.25, PAD)
            probes = Probes(self.probes, torch.stack([torch.zeros_like(second), second], 1))
        return Tree(tokens, parents.expand(B, -1), self.depth, law, probes)
