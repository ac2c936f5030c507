"""GLIDE: a small decoder that also attends to the target's cached keys and values (GLIDE with a CAPE, §4.1).
The public code does not run, and rotates queries with the base 10000 for every target. Choices that both
leave open are named here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.core.device import is_host
from slipstream.core.drafter import CACHE, State
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.target import Target
from slipstream.core.tree import Tree
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.heads import Head, HeadConfig, HeadDrafter, randomise
from slipstream.drafters.layers import (
    MLP,
    Attend,
    Attention,
    Positions,
    Residuals,
    Rope,
    Rows,
    Stored,
    Visible,
    attend_cache,
    attended,
    first_slots,
    rotate,
)
from slipstream.drafters.proposer import Draft
from slipstream.kernels.compiled import freed

# The target's keys and values of one block, and which of them each row sees.
Glimpse = tuple[Stored, Stored, Visible]
Glimpses = Sequence[Glimpse | None]  # of each layer


@dataclass(frozen=True)
class GlideConfig(HeadConfig):
    """The head's sizes. Those of `LayerConfig` are the draft's own; `taps` name the target's caches that its
    layers read. Without taps it is a decoder of the same size, the paper's vanilla draft. Raises ValueError
    if there are more taps than layers."""

    depth: int = 1  # N_D, its layers
    target_size: int = 0  # H, of the target's states
    target_heads: int = 1  # of the target's queries
    target_head_dim: int = 1
    # Of each cache: frequencies of its rotary positions and a factor on their cos and sin; none without them.
    target_rope: Sequence[Sequence[Any]] = ()
    target_pairs: bool = False  # these turn neighbouring numbers, as Cohere's, and not halves, as Llama's
    vocab_size: int = 0  # V, if embedding and LM head are its own, as published; 0: the target's
    draft_vocab_size: int = 0  # rows of its own LM head
    cross_norm: bool = True  # before cross-attention; the public code has none
    first_token: bool = False  # it also reads the text's first token, as the public code does

    def __post_init__(self) -> None:
        if len(self.taps) > self.depth:
            raise ValueError(f"taps is {[*self.taps]}; this head's layers, {self.depth}, read one each")


class CrossAttention(nn.Module):
    """The draft's queries over the target's cached keys and values. Queries are rotated like the target's
    own, at their absolute positions."""

    def __init__(self, config: GlideConfig, layer: int) -> None:
        super().__init__()
        A, D = config.target_heads, config.target_head_dim
        self.config = config
        self.rope = Rope(*config.target_rope[layer])
        self.q_proj = nn.Linear(config.hidden_size, A * D, bias=False)
        self.o_proj = nn.Linear(A * D, config.hidden_size, bias=False)

    def forward(self, x: Rows, positions: Positions, glimpse: Glimpse) -> Rows:
        """Rows of x attend to the keys and values that the glimpse's mask shows them."""
        q = self.q_proj(x).unflatten(-1, (-1, self.config.target_head_dim)).transpose(1, 2)
        return self.o_proj(attended(self.rotated(q, positions), *glimpse).flatten(2))

    def rotated(self, q: Float[Tensor, "B A T D"], positions: Positions) -> Tensor:
        if not (rotated := 2 * len(self.rope.frequencies)):
            return q
        turned = rotate(q[..., :rotated], *self.rope(positions, q.dtype))
        return torch.cat([interleaved(turned) if self.config.target_pairs else turned, q[..., rotated:]], -1)


class GlideLayer(nn.Module):
    """Self-attention, cross-attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, config: GlideConfig, layer: int) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)
        self.cross_layernorm: nn.Module = nn.RMSNorm(d, eps) if config.cross_norm else nn.Identity()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.cross_attn: Any = CrossAttention(config, layer) if config.taps else None
        self.before_cross = Residuals(config, self.self_attn, self.input_layernorm)
        self.behind_cross = Residuals(config, mlp=self.mlp, second=self.post_attention_layernorm)

    def forward(self, x: Rows, positions: Positions, attend: Attend, glimpse: Glimpse | None) -> Rows:
        x = self.before_cross(x, self.self_attn.rope(positions, x.dtype), attend)
        if glimpse is not None:
            x = x + self.cross_attn(self.cross_layernorm(x), positions, glimpse)
        return self.behind_cross(x)


class GlideHead(Head):
    """GLIDE's draft model."""

    sizes = GlideConfig

    def __init__(self, config: GlideConfig) -> None:
        super().__init__()
        self.config, d = config, config.hidden_size
        self.own_lm_head = own = config.vocab_size > 0
        self.embed_tokens: Any = nn.Embedding(config.vocab_size, d) if own else None
        self.inward: Any = nn.Identity() if own else nn.Linear(config.target_size, d, bias=False)
        self.layers = nn.ModuleList([GlideLayer(config, i) for i in range(config.depth)])
        self.norm = nn.RMSNorm(d, config.rms_norm_eps)
        self.outward: Any = nn.Identity() if own else nn.Linear(d, config.target_size, bias=False)
        self.lm_head: Any = nn.Linear(d, config.draft_vocab_size, bias=False) if own else None

    def forward(
        self, embedded: Rows, positions: Positions, attends: Sequence[Attend], glimpses: Glimpses
    ) -> Rows:
        """Row i reads t_{i+1} at position i+1, and its state gives the LM head's prediction of t_{i+2}."""
        x = self.inward(embedded)
        for layer, attend, glimpse in zip(self.layers, attends, glimpses, strict=True):
            x = layer(x, positions, attend, glimpse)
        return self.outward(self.norm(x))

    def logits(self, hidden: Float[Tensor, "... d"]) -> Float[Tensor, "... Vd"]:
        return self.lm_head(hidden)

    @torch.no_grad()
    def start(self, generator: torch.Generator, size: Float[Tensor, ""]) -> "GlideHead":
        """Initialise for training so that all tokens are equally likely: embeddings passed through to the
        target's LM head would make every token predict itself."""
        randomise(self, generator)
        self.norm.weight.copy_(size.expand(len(self.norm.weight)))
        if not self.own_lm_head:
            self.inward.weight.copy_(torch.eye(*self.inward.weight.shape))
            self.outward.weight.zero_()
        return self

    @torch.no_grad()
    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        if not self.own_lm_head:  # caches have no scale
            self.inward.weight *= embedding


@dataclass
class GlideState(State):
    hidden: Float[Tensor, "B H"]  # the head's output at the root
    cache: KVCache  # of the draft's own layers: slot i holds t_{i+1}, or t_i if it reads the first token
    target_cache: KVCache  # a copy of the target's keys and values, up to the token before the root


@final
class Glide(HeadDrafter):
    """Drafts with a `GlideHead`. It has keys and values of its own, and sees the target's up to the last
    pass: the i-th drafted token is i positions ahead of them."""

    method, module, taps_optional = "glide", GlideHead, True

    @property
    def lead(self) -> int:
        """How many tokens its own cache is ahead of the target's: 1 if it reads the text's first token."""
        return int(self.head.config.first_token)

    def start(self, batch: int, device: torch.device) -> GlideState:
        N, zeros = self.head.config.depth, torch.zeros(batch, dtype=torch.long, device=device)
        width = self.head.config.hidden_size if self.head.own_lm_head else self.head.config.target_size
        hidden = torch.zeros(batch, width, dtype=self.target.dtype, device=device)
        return GlideState(zeros, hidden, self.new_cache(N, batch), KVCache(len(self.taps), batch, device))

    def update(self, span: Span, state: GlideState) -> None:
        T = span.tokens.shape[1]
        glimpses: list[Glimpse | None] = [None] * self.head.config.depth
        if self.taps:
            assert span.features is not None
            attends, _ = attend_cache(state.target_cache, T)
            parts = span.features.chunk(len(self.taps), -1)
            D = self.head.config.target_head_dim
            for i, (part, attend) in enumerate(zip(parts, attends, strict=True)):
                glimpses[i] = _freed(*attend(*split_kv(part, D)))
            state.target_cache.follow(span.cache, span.count)
        if self.lead and (span.tree is None or span.tree.is_chain):  # it may be a prompt's first chunk
            self._read_first_token(span, state)
        own, positions = attend_cache(state.cache, T, compiles=self.compiles)
        states = self.run(self._read, span.nexts, positions + 1 - self.lead, own, glimpses)
        state.cache.follow(span.cache, span.count, self.lead)
        state.hidden, state.root = span.last(states), span.root

    def _read_first_token(self, span: Span, state: GlideState) -> None:
        """Read the first token of each text that begins here. It sees itself, in the target's cache too."""
        new = (state.cache.lengths == 0) & (span.count > 0)
        if is_host(new) and not new.any():
            return
        own, positions = attend_cache(state.cache, 1)
        glimpses = self._glimpses(state.target_cache, torch.ones_like(span.count))
        self.run(self._read, span.tokens[:, :1], positions, own, glimpses)
        state.cache.keep(None, new.long())

    def propose(self, state: GlideState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        glimpses = self._glimpses(state.target_cache, state.target_cache.lengths)
        at = state.cache.lengths - self.lead

        def step(tokens: Tensor, origin: Tensor, visible: Tensor, level: int) -> Tensor:
            n = tokens.shape[1]
            own, _ = attend_cache(state.cache, n, visible.shape[2] - n, visible, self.compiles)
            positions = (at + level)[:, None].repeat(1, n)
            return self.scores(self.run(self._read, tokens, positions, own, glimpses))

        draft = Draft(self, self.shaped(spec), sampler)
        return draft.step_by_step(state.root, at, self.scores(state.hidden[:, None]), step)

    def _glimpses(self, cache: KVCache, count: Int[Tensor, " B"]) -> list[Glimpse | None]:
        """The target's keys and values of the first `count` tokens, for each layer."""
        if not self.taps:
            return [None] * self.head.config.depth
        cache.reserve(0)
        slots = first_slots(cache, count)
        return [_freed(*cache.read(i), slots) for i in range(len(self.taps))]

    def _read(self, tokens: Tensor, *others: Any) -> Rows:
        own = self.head.embed_tokens
        return self.head((self.target.embed if own is None else own)(tokens), *others)


def _freed(keys: Tensor, values: Tensor, visible: Tensor) -> Any:
    """A glimpse of any number of texts, rows and slots, for compiled passes."""
    return freed(keys, 0, 2), freed(values, 0, 2), freed(visible, 0, 2, 3)


def interleaved(x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
    """What was rotated by halves, in the order of those who rotate neighbours: 0, D/2, 1, D/2 + 1, …"""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rotates_pairs(target: Target) -> bool:
    """Whether the target's RoPE rotates neighbouring numbers. In block 0 keys of equal tokens differ by their
    positions alone."""
    if not (about := target.rope(0))[0]:
        return False
    features = target.features([[target.vocab // 2] * 16], (f"{CACHE}0",))[0]
    key = split_kv(features[None].double(), target.sizes.head_dim)[0][..., : 2 * len(about[0])]
    halves = Rope(*about)(torch.arange(16, device=key.device)[None], key.dtype)
    first = key[:, :, :1].expand_as(key) / about[1]
    by_halves = rotate(first, *halves)
    by_pairs = interleaved(rotate(first.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), *halves))
    return bool((by_pairs - key).norm() < (by_halves - key).norm())


def split_kv(cached: Float[Tensor, "B T W"], head_dim: int) -> tuple[Stored, Stored]:
    key, value = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in cached.chunk(2, -1))
    return key, value
