"""The decoder layer of learned drafters, with the tensor names of public checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.core.kv_cache import KVCache, LayerView
from slipstream.kernels import ops, training_attention
from slipstream.kernels.compiled import freed, freed_view
from slipstream.targets.decoder import NO_MATRIX, DecoderConfig, Undescribed, Weights, matrix, norm

# Which keys each row sees: a mask, or lists as `ops.attention` takes them.
Visible = Bool[Tensor, "#B 1 #T S"] | Int[Tensor, "#B 1 #T L"]
Stored = Float[Tensor, "B heads S D"]
# Takes the rows' keys and values; returns all keys and values that are read, and which of them each row sees.
Attend = Callable[[Tensor, Tensor], tuple[Stored, Stored, Visible]]
Rows = Float[Tensor, "B T H"]
Positions = Int[Tensor, "#B T"]
CosSin = tuple[Float[Tensor, "#B T D"], Float[Tensor, "#B T D"]]  # cos and sin of rotary positions
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
PRODUCTS = ("gate_proj", "up_proj", "down_proj")
_NOWHERE = torch.zeros(0, dtype=torch.long)
SCALED = ("linear", "llama3", "yarn")  # ropes whose frequencies do not depend on the text's length


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of a Llama-like decoder layer, under Hugging Face's names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False  # of the projections to queries, keys and values
    output_bias: bool = False  # of the projection of attention's output
    rope_scaling: Mapping[str, Any] | None = None  # a type of `SCALED` and its numbers, as in config.json


class Rope:
    """Rotary positions with given frequencies, and a factor on cos and sin. Both halves of D are equal."""

    def __init__(self, frequencies: Sequence[float], factor: float = 1.0) -> None:
        # The frequencies are no buffer of a module, which would be rounded with the weights.
        self.frequencies = torch.tensor(frequencies, dtype=torch.float64)
        self.factor = factor

    @classmethod
    def of(cls, config: LayerConfig) -> "Rope":
        """The RoPE of a config; a scaled one as Hugging Face computes it."""
        if config.rope_scaling is None:
            return cls([config.rope_theta ** (-i / config.head_dim) for i in range(0, config.head_dim, 2)])
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope = {"rope_theta": config.rope_theta, **config.rope_scaling}
        llama = LlamaConfig(head_dim=config.head_dim, rope_parameters=rope)
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](llama, torch.device("cpu"))
        return cls(frequencies.tolist(), float(factor))

    def __call__(self, positions: Positions, dtype: torch.dtype) -> CosSin:
        """cos and sin, computed in float32 at least."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        frequencies = self.frequencies.to(torch.promote_types(dtype, torch.float32))
        angle = positions[..., None].to(frequencies.dtype) * frequencies
        angle = torch.cat([angle, angle], -1)
        return self.factor * angle.cos().to(dtype), self.factor * angle.sin().to(dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LayerConfig, inputs: int = 1) -> None:
        """`inputs` states, side by side, make a row of x: I = inputs·H."""
        super().__init__()
        H, D, heads = config.hidden_size, config.head_dim, config.num_attention_heads
        counts = (heads, config.num_key_value_heads, config.num_key_value_heads)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(inputs * H, count * D, config.attention_bias) for count in counts
        )
        self.o_proj = nn.Linear(heads * D, H, config.output_bias)
        self.head_dim, self.rope = D, Rope.of(config)  # last: a D that no memory holds has failed by now

    def forward(self, x: Float[Tensor, "B T I"], rotary: CosSin, attend: Attend) -> Rows:
        """Rows of x, rotated by their `rope`, attend to the keys and values that `attend` returns."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        key, value, visible = attend(k, v)
        return self.o_proj(attended(q, key, value, visible).flatten(2))


class MLP(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(H, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, H, bias=False)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Rows) -> Rows:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Residuals:
    """x += attention(before(x)); x += mlp(second(x)), or one of them. On a CPU, where linear layers are
    packed and attention reads lists of keys, it is one call of our kernels."""

    def __init__(
        self,
        config: LayerConfig,
        attention: Attention | None = None,
        before: nn.Module | None = None,
        mlp: MLP | None = None,
        second: nn.Module | None = None,
    ) -> None:
        self._config, self._parts = config, (attention, before, mlp, second)
        self._run: Any = None
        self._weights: Weights | None = None

    def __getstate__(self) -> dict[str, Any]:  # a copy of the modules is described anew
        return vars(self) | {"_run": None, "_weights": None}

    def __call__(self, x: Rows, rotary: Any = None, attend: Any = None, reads: Tensor | None = None) -> Rows:
        """Attention takes `rotary` and `attend`, and reads `reads` [B, T, I] in the place of x."""
        if (out := self.one_call(x, rotary, attend, reads)) is not None:
            return out
        attention, before, mlp, second = self._parts
        if attention is not None:
            read = x if reads is None else reads
            x = x + attention(read if before is None else before(read), rotary, attend)
        return x if mlp is None or second is None else x + mlp(second(x))

    def one_call(self, x: Rows, rotary: Any, attend: Any, reads: Tensor | None = None) -> Rows | None:
        """By our kernels; None: the modules must do it."""
        if x.device.type != "cpu" or torch.is_grad_enabled():
            return None
        of_cache: tuple[Any, ...] = None, [], [], [], [], _NOWHERE, [], 0
        if attend is not None:
            if not isinstance(attend, CacheAttend) or attend.visible.dtype != torch.int32:
                return None
            cache: Any = attend.cache
            angles = ([part.float()] for part in rotary)
            stored = ([layers[attend.layer]] for layers in cache.stored)
            of_cache = reads, *angles, *stored, cache.slots, [attend.visible], cache.view
        if self._weights is None or self._weights.changed:
            self._weights = Weights(module for part in self._parts if part for module in part.modules())
            self._run = None
            with suppress(Undescribed):
                self._run = self._described()
        return None if self._run is None else self._run(x, *of_cache, [])[0]

    def _described(self) -> Callable[..., list[Tensor]]:
        config, (attention, before, mlp, second) = self._config, self._parts
        kind = DecoderConfig(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            activation=config.hidden_act,
            eps=config.rms_norm_eps,
        )
        weights: list[Tensor | None] = []
        for module, names in (attention, PROJECTIONS), (mlp, PRODUCTS):
            for name in names:
                weights += NO_MATRIX if module is None else matrix(getattr(module, name))
        for layer_norm in (before, None, second, None, None, None):
            weights += norm(layer_norm)
        matrices = [weight for weight in weights if weight is not None and weight.dim() > 1]
        if len({(weight.dtype, weight.dim()) for weight in matrices}) > 1:
            raise Undescribed("weights of several kinds")
        return kind.layers([*weights, None, *norm(None)], (0, 0, 0))


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). The first norm may be missing, as in EAGLE."""

    def __init__(self, config: LayerConfig, input_norm: bool = True) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm: nn.Module = nn.RMSNorm(H, eps) if input_norm else nn.Identity()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.post_attention_layernorm = nn.RMSNorm(H, eps)
        parts = self.self_attn, self.input_layernorm, self.mlp, self.post_attention_layernorm
        self.residuals = Residuals(config, *parts)

    def forward(self, x: Rows, rotary: CosSin, attend: Attend) -> Rows:
        return self.residuals(x, rotary, attend)


def attended(
    q: Float[Tensor, "B A T D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S D"],
    visible: Visible,
) -> Float[Tensor, "B T A D"]:
    """Attention where several heads may share keys. Branches, as Dynamo makes no bool of free sizes."""
    scale = q.shape[-1] ** -0.5
    if visible.dtype == torch.int32:
        return ops.attention(q, key, value, visible.expand(-1, -1, q.shape[2], -1), scale)
    if training_attention.learns(q):
        return training_attention.attention(q, key, value, visible, scale).transpose(1, 2)
    if q.requires_grad:  # under a mask only cuDNN shares them and stores no scores
        key, value = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (key, value))
    if q.shape[1] == key.shape[1]:
        return F.scaled_dot_product_attention(q, key, value, visible).transpose(1, 2)
    return F.scaled_dot_product_attention(q, key, value, visible, enable_gqa=True).transpose(1, 2)


def rotate(x: Float[Tensor, "B heads T D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B heads T D"]:
    """RoPE on halves, as in Llama."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


@dataclass(frozen=True)
class CacheAttend:
    """`Attend` of one layer of a cache. Compiled passes give a `LayerView`, which holds tensors alone."""

    cache: KVCache | LayerView
    layer: int
    visible: Visible

    def __call__(self, key: Tensor, value: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        self.cache.write(self.layer, key, value)
        return (*self.cache.read(self.layer), self.visible)


def attend_cache(
    cache: KVCache,
    rows: int,
    after: int = 0,
    among: Bool[Tensor, "B R A"] | None = None,
    compiles: bool = False,
) -> tuple[list[CacheAttend], Int[Tensor, "B R"]]:
    """(`Attend` of each layer, positions) of `rows` new rows, `after` scratch slots behind the kept tokens.
    Each sees, of the step's A = after + rows scratch slots, those that `among` says, or the earlier ones and
    its own. `compiles`: attend through the cache's `LayerView`s, once it has storage."""
    cache.reserve(rows, after)
    at = cache.used.device
    depths = after + torch.arange(rows, device=at)
    views = compiles and bool(cache.stored)
    visible = (_listed if _lists(cache) else _masked)(cache, depths, among)
    visible = freed(visible, 0, 2, 3) if views else visible
    parts = (freed_view(cache.layer(i)) if views else cache for i in range(cache.layers))
    attends = [CacheAttend(part, i, visible) for i, part in enumerate(parts)]
    return attends, cache.lengths[:, None] + depths


def first_slots(cache: KVCache, count: Int[Tensor, " B"]) -> Visible:
    """The first `count` slots of each text, for all rows."""
    if _lists(cache):
        return F.pad(count[:, None].int(), (2, 0))[:, None, None]
    return (cache.used < count[:, None])[:, None, None]


def _lists(cache: KVCache) -> bool:
    """Rows list the keys that they see, for `ops.attention` on a CPU."""
    at = cache.used.device
    return at.type == "cpu" and bool(cache.stored) and ops.has_kernels(at, cache.stored[0].dtype)


def _masked(
    cache: KVCache, depths: Int[Tensor, " R"], among: Bool[Tensor, "B R A"] | None
) -> Bool[Tensor, "#B 1 R S"]:
    new = (cache.used - cache.lengths[:, None])[:, None]  # [B, 1, S]; negative: kept
    if among is None:
        return (new <= depths[:, None])[:, None]
    rows, A = among.shape[1:]
    allowed = among.gather(2, new.clamp(0, A - 1).expand(-1, rows, -1))
    return ((new < 0) | ((new >= 0) & (new < A) & allowed))[:, None]


def _listed(
    cache: KVCache, depths: Int[Tensor, " R"], among: Bool[Tensor, "B R A"] | None
) -> Int[Tensor, "B 1 R L"]:
    """`_masked` for `ops.attention`: kept tokens are a run of slots, and scratch slots are listed."""
    lengths = cache.lengths[:, None]
    end = (lengths + depths + 1 if among is None else lengths.expand(-1, len(depths)))[..., None]
    runs = torch.cat([torch.zeros_like(end), torch.zeros_like(end), end], -1)
    if among is not None:
        A, most = among.shape[2], int(among.sum(-1).max())
        slots = torch.where(among, torch.arange(A), A).sort(-1).values[..., :most]
        runs = torch.cat([runs, torch.where(slots < A, slots + lengths[..., None], -1)], -1)
    return runs.int()[:, None]


def visible_scratch(ancestors: Bool[Tensor, "B F0 A"], origin: Int[Tensor, "B F"]) -> Bool[Tensor, "B F A1"]:
    """The scratch rows that a frontier's rows see: those that their parents saw and their own; A1 = A + F."""
    own = torch.eye(origin.shape[1], dtype=torch.bool, device=origin.device).expand(len(origin), -1, -1)
    return torch.cat([ancestors.gather(1, origin[..., None].expand(-1, -1, ancestors.shape[2])), own], 2)
