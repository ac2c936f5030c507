"""EAGLE-3 (Li et al. 2025, "Scaling up Inference Acceleration of Large Language Models via Training-Time
Test"): EAGLE's steps with another head. It reads three of the target's states first, and its own state later.
As in public checkpoints, it has an LM head of its own over a draft vocabulary, and predicts no feature.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.drafters.eagle.model import RecursiveDrafter
from slipstream.drafters.heads import Head, HeadConfig, copying, randomise
from slipstream.drafters.layers import MLP, Attend, Attention, Positions, Residuals, Rows


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    draft_vocab_size: int = 32000  # rows of its LM head
    norm_before_residual: bool = False  # the layer's residual is normed, as in some public checkpoints
    norm_output: bool = False  # of EAGLE 3.1: later steps read the normed state that the LM head reads
    norm_before_fc: bool = False  # of EAGLE 3.1: the concatenated taps have a norm
    fc_norm: bool = False  # of EAGLE 3.1: each tap has a norm of its own
    target_hidden_size: int = 0  # width of the taps; 0: the head's
    vocab_size: int = 0  # V, if the head has an embedding of its own; 0: it reads the target's


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads embedding and state, each normed and side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = Attention(config, inputs=2), MLP(config)
        self.norm_before_residual = config.norm_before_residual
        self.residuals = Residuals(config, self.self_attn, None, self.mlp, self.post_attention_layernorm)

    def forward(self, embedded: Rows, hidden: Rows, positions: Positions, attend: Attend) -> Rows:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        return self.residuals(residual, self.self_attn.rope(positions, x.dtype), attend, x)


class Eagle3Head(Head):
    """EAGLE-3's draft model, with the tensor names of public checkpoints."""

    sizes, own_lm_head, shifted = Eagle3Config, True, True

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, H, taps = config, config.hidden_size, len(config.taps)
        width, eps = config.target_hidden_size or H, config.rms_norm_eps
        self.embed_tokens: Any = nn.Embedding(config.vocab_size, H) if config.vocab_size else None
        self.input_norm: nn.Module = nn.RMSNorm(taps * width, eps) if config.norm_before_fc else nn.Identity()
        norms = nn.ModuleList([nn.RMSNorm(width, eps) for _ in range(taps)])
        self.fc_norm: Any = norms if config.fc_norm else None
        self.fc = nn.Linear(taps * width, H, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(H, eps)
        self.lm_head = nn.Linear(H, config.draft_vocab_size, bias=False)

    def fuse(self, features: Float[Tensor, "B T F"]) -> Rows:
        """Combine the target's states into one. The head's own state does not pass through this."""
        features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(self, embedded: Rows, hidden: Rows, positions: Positions, attend: Attend) -> Rows:
        """The next states, normed if `norm_output`: row i reads (embedding of t_{i+1}, h_i) at position i."""
        states = self.midlayer(embedded, hidden, positions, attend)
        return self.norm(states) if self.config.norm_output else states

    def logits(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... Vd"]:
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    @torch.no_grad()
    def start(
        self, generator: torch.Generator, lm_head: Float[Tensor, "Vd H"], norm: Float[Tensor, " H"]
    ) -> "Eagle3Head":
        """Initialise for training as if the last tap were the target's final state: the fc copies it, the
        layer adds nothing, and LM head and norm are the target's."""
        randomise(self, generator)
        taps = len(self.config.taps)
        self.fc.weight.copy_(copying(self.config.hidden_size, taps - 1, taps))
        self.lm_head.weight.copy_(lm_head)
        self.norm.weight.copy_(norm)
        return self

    @torch.no_grad()
    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        self.fc.weight *= taps.repeat_interleave(self.config.hidden_size)  # embeddings are normed


@final
class Eagle3(RecursiveDrafter):
    method, module = "eagle3", Eagle3Head
