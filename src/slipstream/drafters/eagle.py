"""EAGLE: a one-layer head guesses the target's next feature, and the target's own LM head reads tokens off it.

EAGLE-1 (papers/eagle, §3) with static trees, and EAGLE-2's dynamic trees: the weights are the same.
"""

from dataclasses import asdict, dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.compiled import compiled, freed
from slipstream.core.cache import KVCache, LayerView
from slipstream.core.drafter import Drafter, Ends, State
from slipstream.core.noise import Stream
from slipstream.core.sampling import Sampler
from slipstream.core.shape import Shape
from slipstream.core.span import Span
from slipstream.core.tree import Tree
from slipstream.drafters.layers import MLP, Attend, Attention, CacheAttend, LayerConfig, attend_cache
from slipstream.drafters.store import load_weights

PROPOSALS = ("top-k", "noise", "sampled")
TAPS = ("final",)
EMBEDDING = "embed_tokens.weight"  # public checkpoints carry a copy of the target's


@dataclass(frozen=True)
class EagleConfig(LayerConfig):
    """The head's sizes.

    Attributes:
        bias: the fc has one; vLLM drops it without a word, so a new head has none.
        input_norm: a norm before attention, which public checkpoints do not have (variant "eagle-prenorm").
    """

    bias: bool = False
    input_norm: bool = False


class EagleLayer(nn.Module):
    """x += attention(x), without a norm before it; x += mlp(norm(x))."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        if config.input_norm:
            self.input_layernorm: nn.Module = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        else:
            self.input_layernorm = nn.Identity()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Float[Tensor, "B T H"], positions: Int[Tensor, "#B T"], attend: Attend) -> Float[Tensor, "B T H"]:
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """EAGLE's draft model (§3.1, Fig. 6), with the tensor names of public checkpoints."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, config.bias)
        self.layers = nn.ModuleList([EagleLayer(config)])  # a list for the sake of the tensors' names

    def forward(
        self,
        embedded: Float[Tensor, "B T H"],
        features: Float[Tensor, "B T H"],
        positions: Int[Tensor, "#B T"],
        attend: Attend,
    ) -> Float[Tensor, "B T H"]:
        """The features after: row i reads (embedding of t_{i+1}, f_i) at position i and says f̂_{i+1}."""
        return self.layers[0](self.fc(torch.cat([embedded, features], -1)), positions, attend)

    @torch.no_grad()
    def start_as_identity(self, generator: torch.Generator) -> "EagleHead":
        """Before training f̂_{i+1} = f_i: the fc copies the feature, and both branches of the layer add nothing."""
        H = self.config.hidden_size
        for name, p in self.named_parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * H**-0.5)
            elif name.endswith("bias"):
                p.zero_()
        self.fc.weight.copy_(torch.cat([torch.zeros(H, H), torch.eye(H)], 1))
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
        return self


@dataclass
class EagleState(State):
    hidden: Float[Tensor, "B H"]  # f̂ of the root
    cache: KVCache  # the head's own: slot i holds the pair (f_i, t_{i+1})


@final
class Eagle(Drafter):
    """Drafts with an `EagleHead` over the target's final features.

    Args:
        head: the trained layer.
        ends: the target's embedding and LM head.
        vocab: target ids that the head's candidates are taken from, sorted; all by default.
        tree: the `Shape` to grow, or its name.
        proposal: candidates at T > 0: "top-k" of log q; "noise": top-k of log q + g with the target's own noise g;
            "sampled" from q without replacement, verified by the multi-round law (static trees only).

    Raises:
        ValueError: an unknown tree or proposal, or a pair of them that is not exact.
    """

    taps = TAPS

    def __init__(
        self,
        head: EagleHead,
        ends: Ends,
        vocab: Int[Tensor, " Vd"] | None = None,
        tree: str | Shape = "fig9",
        proposal: str = "top-k",
    ) -> None:
        V = ends.head.shape[0]
        self.vocab = torch.arange(V, device=ends.head.device) if vocab is None else vocab.to(ends.head.device).long()
        self.grow_as(tree, proposal)
        self.head, self.ends = head.to(ends.head.device, ends.head.dtype).requires_grad_(False), ends
        self.lm_head = ends.head if vocab is None else ends.head[self.vocab].contiguous()
        self.lm_bias = None if ends.bias is None else ends.bias[self.vocab]
        self._compiled_read, self._compiled_logits = self._read, self.logits
        if ends.compiles:
            self._compiled_read = compiled(self._read, ends.head.device)
            self._compiled_logits = compiled(self.logits, ends.head.device)

    def grow_as(self, tree: str | Shape, proposal: str = "top-k") -> None:
        """Change the tree and the proposal; states that have begun are not for the new ones. Raises ValueError."""
        if proposal not in PROPOSALS:
            raise ValueError(f"Unknown proposal: {proposal!r}. Available: {', '.join(PROPOSALS)}")
        shape = Shape.parse(tree) if isinstance(tree, str) else tree
        if proposal == "sampled" and not shape.keeps_first_children:
            raise ValueError(
                f"tree {shape.name!r} drops some of a node's sampled children, which the multi-round law does not "
                "allow: use a static tree without gaps among siblings (fig9, chain-5, …) with proposal=sampled"
            )
        if shape.children > len(self.vocab):
            raise ValueError(
                f"tree {shape.name!r} asks for {shape.children} children a node and the draft vocabulary has "
                f"{len(self.vocab)}: narrow the tree"
            )
        self.shape, self.proposal = shape, proposal
        self.depth, self.rows = shape.depth, shape.nodes
        self.peeks, self.law = proposal == "noise", "multi-round" if proposal == "sampled" else "coupled"

    @classmethod
    def load(cls, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends, **options: Any) -> "Eagle":
        """A drafter from what `pack` gave. Raises ValueError for tensors that do not fit."""
        tensors = dict(tensors)
        try:
            sizes, tree = EagleConfig(**config["head"]), config["tree"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"config.json of this eagle head is not complete: {error}") from error
        vocab = tensors.pop("draft_vocab", None)
        tensors.pop(EMBEDDING, None)  # kept for export only
        head = EagleHead(sizes)
        load_weights(head, tensors, "this eagle head")
        return cls(head, ends, vocab, **{"tree": tree, **options})

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a drafter directory says of this drafter: configuration and tensors, without the target's own."""
        tensors = dict(self.head.state_dict())
        if len(self.vocab) < len(self.ends.head):
            tensors["draft_vocab"] = self.vocab.int()
        about: dict[str, Any] = {"head": asdict(self.head.config), "taps": list(TAPS), "tree": self.shape.name}
        return about | ({"variant": "eagle-prenorm"} if self.head.config.input_norm else {}), tensors

    def start(self, batch: int, capacity: int, device: torch.device) -> EagleState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        hidden = torch.zeros(batch, self.head.config.hidden_size, dtype=self.lm_head.dtype, device=device)
        room = capacity + self.depth + 1 + self.shape.scratch  # the bound runs a round behind
        return EagleState(zeros, hidden, KVCache(1, batch, room, device))

    def absorb(self, span: Span, state: State) -> None:
        assert isinstance(state, EagleState) and span.features is not None
        attend, positions = attend_cache(state.cache, 0, span.tokens.shape[1], compiles=self.ends.compiles)
        hidden = self._forward(span.nexts, span.features, positions, attend)
        state.cache.keep(None, span.count)
        state.cache.bound = min(state.cache.bound, span.cache.bound)
        state.hidden, state.root = span.last(hidden), span.last(span.nexts)

    def propose(self, state: State, sampler: Sampler) -> Tree:
        assert isinstance(state, EagleState)
        hidden, level = state.hidden[:, None], 0
        ancestors = torch.ones(len(hidden), 1, 0, dtype=torch.bool, device=hidden.device)  # among the scratch rows
        laws: list[Tensor] = []

        def expand(tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal hidden, level, ancestors
            if level:  # the root's own step was taken when it was absorbed
                hidden, ancestors = self._step(state.cache, tokens, origin, hidden, ancestors, level)
            level += 1
            return self._candidates(hidden, sampler, state.cache.lengths + level, laws)

        tree = self.shape.grow(state.root, expand)
        if not laws:
            return tree
        V = len(self.ends.head)
        law = torch.zeros(len(tree.tokens), tree.nodes, V, dtype=laws[0].dtype, device=laws[0].device)
        law[:, self.shape.inner.to(law.device)[:, None], self.vocab] = torch.cat(laws, 1)
        return Tree(tree.tokens, tree.parents, tree.depth, law)

    def _step(
        self, cache: KVCache, tokens: Tensor, origin: Tensor, hidden: Tensor, ancestors: Tensor, level: int
    ) -> tuple[Float[Tensor, "B F H"], Bool[Tensor, "B F A"]]:
        """Read the frontier: each token with the feature guessed for it, f̂ of its parent's row."""
        B, n = tokens.shape
        own = torch.eye(n, dtype=torch.bool, device=tokens.device).expand(B, n, n)
        after = ancestors.shape[2]
        seen = torch.cat([ancestors.gather(1, origin[..., None].expand(-1, -1, after)), own], 2)
        features = hidden.gather(1, origin[..., None].expand(-1, -1, hidden.shape[-1]))
        attend, _ = attend_cache(cache, 0, n, after, seen, self.ends.compiles)
        positions = (cache.lengths + level - 1)[:, None].repeat(1, n)  # strides of its own: one graph when compiled
        return self._forward(tokens, features, positions, attend), seen

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: CacheAttend) -> Float[Tensor, "B T H"]:
        if not isinstance(attend.cache, LayerView):
            return self._read(tokens, features, positions, attend)
        return self._compiled_read(freed(tokens), freed(features), freed(positions), attend)

    def _read(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Float[Tensor, "B T H"]:
        return self.head(self.ends.embed(tokens), features, positions, attend)

    def logits(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... Vd"]:
        """Over the draft vocabulary, float32 at least."""
        logits = F.linear(hidden, self.lm_head, self.lm_bias)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _candidates(
        self, hidden: Float[Tensor, "B F H"], sampler: Sampler, position: Int[Tensor, " B"], laws: list[Tensor]
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """Children of the frontier, which stand at `position`; in sampled mode their law is appended to `laws`."""
        scores = self._compiled_logits(freed(hidden)) if self.ends.compiles else self.logits(hidden)
        K = self.shape.children
        if self.proposal != "top-k" and not sampler.greedy:
            T = sampler.temperature
            scores = scores / torch.where(T > 0, T, 1.0)[..., None]
            if self.proposal == "noise":
                scores = scores + sampler.noise(position)[:, None, self.vocab]
            else:
                return self._sample(scores, sampler, position, laws)
        log_q, index = scores.log_softmax(-1).topk(K)
        return self.vocab[index], log_q

    def _sample(
        self, scores: Float[Tensor, "B F Vd"], sampler: Sampler, position: Int[Tensor, " B"], laws: list[Tensor]
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """Gumbel top-k: drawn without replacement, in order. A greedy row takes its top-k, and its law is its best."""
        hot = (sampler.temperature > 0)[..., None]
        u = sampler.uniform(Stream.DRAFT, position, scores.shape[1] * scores.shape[2]).view(scores.shape)
        log_q = scores.double().log_softmax(-1)
        index = torch.where(hot, log_q - (-u.log()).log(), log_q).topk(self.shape.children).indices
        best = torch.zeros_like(log_q).scatter_(2, index[..., :1], 1.0)
        laws.append(torch.where(hot, log_q.exp(), best))
        return self.vocab[index], log_q.gather(2, index)


def config_for(ends: Ends, intermediate_size: int | None = None) -> EagleConfig:
    """Sizes of a head for this target: one layer of its own width, heads and rope, with plain rotary positions.

    Raises:
        ValueError: the target's embedding is not as wide as its features.
    """
    target = ends.config
    H, heads = target.hidden_size, target.num_attention_heads
    if ends.head.shape[1] != H:
        raise ValueError(f"the target's LM head is {ends.head.shape[1]} wide and its features {H}: no EAGLE head fits")
    rope: dict[str, Any] = getattr(target, "rope_parameters", None) or {}
    inner = intermediate_size or getattr(target, "intermediate_size", None) or 4 * H
    return EagleConfig(
        hidden_size=H,
        intermediate_size=int(inner),
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or H // heads,
        rope_theta=float(rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", None) or 1e-6),
        hidden_act=target.hidden_act if getattr(target, "hidden_act", None) in ("silu", "gelu", "relu") else "silu",
    )
