"""The decoder layer of learned drafters, with the tensor names of public checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.compiled import freed
from slipstream.core.cache import KVCache, LayerView

# Takes the rows' keys and values; returns all keys and values that are read, and which of them each row sees.
Attend = Callable[
    [Tensor, Tensor],
    tuple[Float[Tensor, "B heads S D"], Float[Tensor, "B heads S D"], Bool[Tensor, "#B 1 T S"]],
]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
SCALED = ("linear", "llama3", "yarn")  # ropes whose frequencies do not depend on the text's length


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of a Llama-like decoder layer, under Hugging Face's names.

    Attributes:
        attention_bias: the projections of queries, keys and values have a bias.
        output_bias: the projection of attention's output has one.
        rope_scaling: the type, one of `SCALED`, and its numbers, as in Hugging Face's config.json; None:
            plain.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    output_bias: bool = False
    rope_scaling: Mapping[str, Any] | None = None


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
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_parameters={"rope_theta": config.rope_theta, **config.rope_scaling},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]](
            llama, torch.device("cpu")
        )
        return cls(frequencies.tolist(), float(factor))

    def __call__(
        self, positions: Int[Tensor, "#B T"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "#B 1 T D"], Float[Tensor, "#B 1 T D"]]:
        """cos and sin, computed in float32 at least."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        frequencies = self.frequencies.to(torch.promote_types(dtype, torch.float32))
        angle = positions[:, None, :, None].to(frequencies.dtype) * frequencies
        angle = torch.cat([angle, angle], -1)
        return self.factor * angle.cos().to(dtype), self.factor * angle.sin().to(dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LayerConfig, inputs: int = 1) -> None:
        """`inputs` states, side by side, make a row of x: I = inputs·H."""
        super().__init__()
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim, self.rope = D, Rope.of(config)
        self.q_proj = nn.Linear(inputs * H, config.num_attention_heads * D, bias)
        self.k_proj = nn.Linear(inputs * H, config.num_key_value_heads * D, bias)
        self.v_proj = nn.Linear(inputs * H, config.num_key_value_heads * D, bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, config.output_bias)

    def forward(
        self, x: Float[Tensor, "B T I"], positions: Int[Tensor, "#B T"], attend: Attend
    ) -> Float[Tensor, "B T H"]:
        """Rows of x attend to the keys and values that `attend` returns."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rope(positions, x.dtype)
        key, value, mask = attend(rotate(k, cos, sin), v)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), key, value, mask, **grouped(q, key))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        H, I = config.hidden_size, config.intermediate_size  # noqa: E741
        self.gate_proj = nn.Linear(H, I, bias=False)
        self.up_proj = nn.Linear(H, I, bias=False)
        self.down_proj = nn.Linear(I, H, bias=False)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Float[Tensor, "B T H"]) -> Float[Tensor, "B T H"]:
        """down(act(gate(x)) · up(x))."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). The first norm may be missing, as in EAGLE."""

    def __init__(self, config: LayerConfig, input_norm: bool = True) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm: nn.Module = nn.RMSNorm(H, eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.post_attention_layernorm = nn.RMSNorm(H, eps)

    def forward(
        self, x: Float[Tensor, "B T H"], positions: Int[Tensor, "#B T"], attend: Attend
    ) -> Float[Tensor, "B T H"]:
        """One layer."""
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def grouped(q: Float[Tensor, "B A T D"], key: Float[Tensor, "B G S D"]) -> dict[str, bool]:
    """What attention is told where several heads share keys. A branch: of free sizes Dynamo makes no bool."""
    return {"enable_gqa": True} if q.shape[1] != key.shape[1] else {}


def rotate(x: Float[Tensor, "B heads T D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B heads T D"]:
    """RoPE on halves, as in Llama."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


@dataclass(frozen=True)
class CacheAttend:
    """`Attend` of one layer of a cache. Compiled passes give a `LayerView`, which holds tensors alone."""

    cache: KVCache | LayerView
    layer: int
    seen: Bool[Tensor, "#B R S"]

    def __call__(self, key: Tensor, value: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        self.cache.write(self.layer, key, value)
        return (*self.cache.read(self.layer), self.seen[:, None])


def attend_cache(
    cache: KVCache,
    rows: int,
    after: int = 0,
    among: Bool[Tensor, "B R A"] | None = None,
    compiles: bool = False,
) -> tuple[list[CacheAttend], Int[Tensor, "B R"]]:
    """(`Attend` of each layer, positions) of `rows` new rows, `after` scratch slots behind the kept tokens.

    Args:
        among: which of the round's A = after + rows scratch slots each new row sees; default: the earlier
            ones and its own.
        compiles: attend through the cache's `LayerView`s, once it has storage.
    """
    cache.reserve(rows, after)
    slots = cache.used
    new = (slots - cache.lengths[:, None])[:, None]  # [B, 1, S]; negative: kept
    depths = after + torch.arange(rows, device=slots.device)
    if among is None:
        seen = new <= depths[:, None]
    else:
        inside = (new >= 0) & (new < after + rows)
        index = new.clamp(0, after + rows - 1).expand(-1, rows, -1)
        seen = (new < 0) | (inside & among.gather(2, index))
    views = compiles and bool(cache.stored)
    seen = freed(seen, 0, 1, 2) if views else seen
    attends = [CacheAttend(cache.layer(i) if views else cache, i, seen) for i in range(cache.layers)]
    return attends, cache.lengths[:, None] + depths


def descended(ancestors: Bool[Tensor, "B F0 A"], origin: Int[Tensor, "B F"]) -> Bool[Tensor, "B F A1"]:
    """The scratch rows that a frontier's rows see: those that their parents saw and their own; A1 = A + F."""
    own = torch.eye(origin.shape[1], dtype=torch.bool, device=origin.device).expand(len(origin), -1, -1)
    return torch.cat([ancestors.gather(1, origin[..., None].expand(-1, -1, ancestors.shape[2])), own], 2)
