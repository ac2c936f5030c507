"""FastEagle: N cascaded layers draft N tokens in one pass. There is no public code: choices that the paper
leaves open are named here. docs/fasteagle.md gives figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.core.kv_cache import KVCache
from slipstream.core.span import Span
from slipstream.drafters.eagle.model import EagleHead
from slipstream.drafters.heads import NEAR, Head, HeadConfig, copying, randomise
from slipstream.drafters.layers import Attend, DecoderLayer, Positions, Rows, attend_cache
from slipstream.drafters.parallel import ParallelDrafter, ParallelState


@dataclass(frozen=True)
class FastEagleConfig(HeadConfig):
    depth: int = 7  # N: layers, and tokens drafted
    cascade: bool = True  # each layer reads the output of the one before; false: the first's input (Table 2)
    input_norm: bool = True  # before attention. Layers that began as EAGLE's have none
    rank: int = 0  # of the term by which a law knows the token above it; 0: there is none, as in the paper
    draft_vocab_size: int = 0  # Vd, of that term


class TokenTerm(nn.Module):
    """Logits of low rank that a drafted token adds to those of the depth behind it. They cost a product with
    r columns of Vd rows, where the LM head has H."""

    def __init__(self, config: FastEagleConfig) -> None:
        super().__init__()
        H, r = config.hidden_size, config.rank
        self.gate_proj = nn.Linear(2 * H, r, bias=False)
        self.up_proj = nn.Linear(2 * H, r, bias=False)
        self.lm_head = nn.Linear(r, config.draft_vocab_size, bias=False)

    def forward(self, hidden: Float[Tensor, "*n H"], above: Float[Tensor, "*n H"]) -> Float[Tensor, "*n Vd"]:
        """Of the depth's state and the embedding of the token above."""
        x = torch.cat([hidden, above], -1)
        return self.lm_head(F.silu(self.gate_proj(x)) * self.up_proj(x))

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """Initialise for training: it adds nothing."""
        for layer in (self.gate_proj, self.up_proj):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * layer.in_features**-0.5)
        self.lm_head.weight.zero_()


class FastEagleHead(Head):
    """The cascaded drafter (§2.1, eq. 1 and 2): g = FC(taps); h_1 = L_1(FC[g, e]); h_i = L_i(h_{i−1})."""

    sizes = FastEagleConfig

    def __init__(self, config: FastEagleConfig) -> None:
        super().__init__()
        self.config, H = config, config.hidden_size
        self.fuse = nn.Linear(len(config.taps) * H, H, bias=False)
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, config.input_norm) for _ in range(config.depth)])
        self.above = TokenTerm(config) if config.rank else None

    def forward(
        self, embedded: Rows, features: Tensor, positions: Positions, attends: Sequence[Attend]
    ) -> Float[Tensor, "B T N H"]:
        """Row i reads (g_i, embedding of t_{i+1}) at position i and predicts f_{i+1} … f_{i+N}, which the
        target's LM head turns into t_{i+2} … t_{i+1+N}. Fewer `attends` run the first layers alone."""
        x = first = self.fc(torch.cat([self.fuse(features), embedded], -1))
        attention: Any = self.layers[0].self_attn
        states, rotary = [], attention.rope(positions, x.dtype)
        for layer, attend in zip(self.layers[: len(attends)], attends, strict=True):
            x = layer(x if self.config.cascade else first, rotary, attend)
            states.append(x)
        return torch.stack(states, 2)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> "FastEagleHead":
        """Initialise for training: every layer returns the last tap, which should be the final state."""
        randomise(self, generator)
        H, taps = self.config.hidden_size, len(self.config.taps)
        self.fuse.weight.copy_(copying(H, taps - 1, taps))
        self.fc.weight.copy_(copying(H, of=0, among=2))
        if self.above is not None:
            self.above.start(generator)
        return self

    @torch.no_grad()
    def start_as(self, other: "EagleHead | FastEagleHead", generator: torch.Generator) -> "FastEagleHead":
        """Initialise for training from a trained head of the same sizes: layers that it does not have are
        copies of its last one, and a term that it does not have adds nothing. An EAGLE head reads the final
        state, which must be the last tap."""
        if self.above is not None:
            self.above.start(generator)
        if isinstance(other, FastEagleHead):
            for own, its in (self.fuse, other.fuse), (self.fc, other.fc), (self.above, other.above):
                if own is not None and its is not None:
                    own.load_state_dict(its.state_dict())
        else:
            embedding, final = other.fc.weight.split(self.config.hidden_size, 1)
            taps = len(self.config.taps)
            self.fuse.weight.copy_(copying(self.config.hidden_size, taps - 1, taps))
            self.fc.weight.copy_(torch.cat([final, embedding], 1))
        for i, layer in enumerate(self.layers):
            layer.load_state_dict(other.layers[min(i, len(other.layers) - 1)].state_dict())
        return self

    @torch.no_grad()
    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        H = self.config.hidden_size
        self.fuse.weight *= taps.repeat_interleave(H)
        self.fc.weight[:, H:] *= embedding
        if self.above is not None:
            self.above.gate_proj.weight[:, H:] *= embedding
            self.above.up_proj.weight[:, H:] *= embedding


@dataclass
class FastEagleState(ParallelState):
    cache: KVCache  # of the layers that run: the committed tokens and nothing else


@final
class FastEagle(ParallelDrafter):
    """Drafts with a `FastEagleHead`, which takes one pass per committed path and none to grow a tree. For
    trees of depth d its first d layers run."""

    method, module, reach = "fasteagle", FastEagleHead, NEAR

    def start(self, batch: int, device: torch.device) -> FastEagleState:
        cache = self.new_cache(self.drafted, batch)
        return FastEagleState(**vars(super().start(batch, device)), cache=cache)

    def update(self, span: Span, state: FastEagleState) -> None:
        attends, positions = attend_cache(state.cache, span.tokens.shape[1], compiles=self.compiles)
        states = self.run(self._read, span.nexts, span.features, positions, attends)
        state.cache.follow(span.cache, span.count)
        state.hidden, state.root, state.length = span.last(states), span.root, span.start + span.count

    def _read(self, tokens: Tensor, *others: Any) -> Float[Tensor, "B T N H"]:
        return self.head(self.target.embed(tokens), *others)

    @property
    def one_law(self) -> bool:
        return self.head.above is None

    def behind(
        self, tokens: Int[Tensor, "B F"], hidden: Float[Tensor, "B 1 H"], scores: Float[Tensor, "B 1 Vd"]
    ) -> Float[Tensor, "B F1 Vd"]:
        if self.one_law:
            return scores
        return scores + self.run(self._above, tokens, hidden.repeat(1, tokens.shape[1], 1))

    def _above(self, tokens: Int[Tensor, "B F"], hidden: Float[Tensor, "B F H"]) -> Float[Tensor, "B F Vd"]:
        return self.head.above(hidden, self.target.embed(tokens))
