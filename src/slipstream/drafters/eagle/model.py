"""EAGLE: a head of one layer predicts the target's next feature, and the target's LM head reads it. EAGLE-1
(§3) grows static trees and EAGLE-2 dynamic ones, from the same weights. EAGLE-3 drafts in the same steps.
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
    Attend,
    DecoderLayer,
    Positions,
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
