"""EAGLE: a head of one layer predicts the target's next feature, and the target's LM head reads it. EAGLE-1
(§3) grows static trees and EAGLE-2 dynamic ones, from the same weights.

EAGLE-3 (Li et al. 2025, "Scaling up Inference Acceleration of Large Language Models via Training-Time Test")
drafts in the same steps. Its head reads three of the target's states first, and its own state later. As in
public checkpoints, it has an LM head of its own over a draft vocabulary, and predicts no feature.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.core.drafter import State
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import Tree
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.heads import NEAR, Head, HeadConfig, HeadDrafter, check_one_tap, copying, randomise
from slipstream.drafters.layers import (
    MLP,
    Attend,
    Attention,
    DecoderLayer,
    Positions,
    Residuals,
    Rows,
    attend_cache,
)
from slipstream.drafters.proposer import Draft

INPUTS = {  # whether tokens are read, and states
    "shifted": (True, True),  # EAGLE: each state with the token that came after it
    "unshifted": (True, True),  # each state with the token that it was made from
    "features": (False, True),
    "tokens": (True, False),
}


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """The sizes of an `EagleHead`. Raises ValueError if there are no such inputs, or several taps."""

    bias: bool = False  # of the fc. vLLM ignores one without a warning, so new heads have none
    input_norm: bool = False  # before attention (variant "eagle-prenorm"); public checkpoints have none
    inputs: str = "shifted"  # a key of `INPUTS`; the others are for comparison (§4.3.2, Fig. 8)

    def __post_init__(self) -> None:
        check_one_tap(self.taps)
        if self.inputs not in INPUTS:
            raise ValueError(f"inputs is {self.inputs!r}; it must be one of {', '.join(INPUTS)}")


class EagleHead(Head):
    """EAGLE's draft model (§3.1, Fig. 6), with the tensor names of public checkpoints."""

    sizes = EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config, self.shifted = config, config.inputs != "unshifted"
        self.embed_tokens: Any = None  # it reads the target's
        self.fc = nn.Linear(sum(INPUTS[config.inputs]) * config.hidden_size, config.hidden_size, config.bias)
        self.layers = nn.ModuleList([DecoderLayer(config, config.input_norm)])  # a list, as tensors are named

    def fuse(self, features: Float[Tensor, "B T F"]) -> Rows:
        """The state that the first step reads: the target's, as it is."""
        return features

    def forward(self, embedded: Rows, hidden: Rows, positions: Positions, attend: Attend) -> Rows:
        """The next features: row i reads (embedding of t_{i+1}, f_i) at position i and predicts f_{i+1}."""
        layer: Any = self.layers[0]
        tokens, features = INPUTS[self.config.inputs]
        x = self.fc(torch.cat([embedded] * tokens + [hidden] * features, -1))
        return layer(x, layer.self_attn.rope(positions, x.dtype), attend)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> "EagleHead":
        """Initialise for training to f̂_{i+1} = f_i: the fc copies the feature, or the token where it reads no
        features, and the layer adds nothing."""
        randomise(self, generator)
        read = sum(INPUTS[self.config.inputs])
        self.fc.weight.copy_(copying(self.config.hidden_size, of=read - 1, among=read))
        return self

    @torch.no_grad()
    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        tokens, features = INPUTS[self.config.inputs]
        scales = torch.stack([embedding] * tokens + [*taps] * features)
        self.fc.weight *= scales.repeat_interleave(self.config.hidden_size)


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


@dataclass
class RecursiveState(State):
    hidden: Float[Tensor, "B H"]  # the prediction at the root, from which its children come
    length: Int[Tensor, " B"]  # tokens before the root
    cache: KVCache  # the head's own: a slot for each pair (h_i, t_{i+1}) that it read


class RecursiveDrafter(HeadDrafter):
    """Reads each drafted token together with the state that was predicted for its parent: one draft step per
    level. Its head has `shifted` (a state is read with the token after it), `embed_tokens` (its own, or None
    for the target's) and `fuse` (makes the first step's state of the target's taps)."""

    reach = NEAR

    def start(self, batch: int, device: torch.device) -> RecursiveState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        hidden = torch.zeros(batch, self.head.config.hidden_size, dtype=self.target.dtype, device=device)
        return RecursiveState(zeros, hidden, zeros.clone(), self.new_cache(1, batch))

    def update(self, span: Span, state: RecursiveState) -> None:
        attends, positions = attend_cache(state.cache, span.tokens.shape[1], compiles=self.compiles)
        tokens = span.nexts if self.head.shifted else span.tokens
        hidden = self.run(self._read, tokens, span.features, positions, attends, True)
        state.cache.follow(span.cache, span.count)
        state.hidden, state.root, state.length = span.last(hidden), span.root, span.start + span.count

    def propose(self, state: RecursiveState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        hidden, above = state.hidden[:, None], state.root[:, None]

        def step(tokens: Tensor, origin: Tensor, visible: Tensor, level: int) -> Tensor:
            """Read the frontier: each token with the state of its parent's row."""
            nonlocal hidden, above
            n = tokens.shape[1]
            read, above = tokens if self.head.shifted else above.gather(1, origin), tokens
            parents = hidden.gather(1, origin[..., None].expand(-1, -1, hidden.shape[-1]))
            attends, _ = attend_cache(state.cache, n, visible.shape[2] - n, visible, self.compiles)
            # `repeat` and not `expand`: a tensor with strides of its own needs no graph of its own.
            positions = (state.cache.lengths + level - 1)[:, None].repeat(1, n)
            hidden = self.run(self._read, read, parents, positions, attends, False)
            return self.scores(hidden)

        draft = Draft(self, self.shaped(spec), sampler)
        return draft.step_by_step(state.root, state.length, self.scores(hidden), step)

    def _read(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attends: Any, fresh: bool) -> Rows:
        """`fresh`: `hidden` holds the target's taps, not the head's own states."""
        embed = self.head.embed_tokens or self.target.embed
        return self.head(embed(tokens), self.head.fuse(hidden) if fresh else hidden, positions, attends[0])


@final
class Eagle(RecursiveDrafter):
    """Drafts with an `EagleHead` over the target's final features, read by the target's own LM head."""

    method, module = "eagle", EagleHead

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = super().pack()
        return config | ({"variant": "eagle-prenorm"} if self.head.config.input_norm else {}), tensors


@final
class Eagle3(RecursiveDrafter):
    method, module = "eagle3", Eagle3Head
