"""Decoder layers as a description, which one call of our kernels executes on the CPU (csrc/decoder.h)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.core.kv_cache import KVCache
from slipstream.kernels import ops
from slipstream.kernels.weight_packing import packed_weight
from slipstream.targets.linear import Packed, packed_copy, version_of
from slipstream.targets.masks import Masks
from slipstream.targets.quantized import QuantisedLinear

_tanh_gelu = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, tuple[int, Callable[[Tensor], Tensor] | None]] = {  # the kernels' number, and torch's
    "silu": (0, F.silu),
    "swish": (0, F.silu),
    "gelu": (1, F.gelu),
    "gelu_pytorch_tanh": (2, _tanh_gelu),
    "gelu_new": (2, _tanh_gelu),
    "clamped": (3, None),
}
Matrix = tuple[Tensor | None, Tensor | None, Tensor | None]  # tiles, scales of rows, bias
NO_MATRIX: Matrix = None, None, None


class Undescribed(Exception):
    """A model has something that the description has no word for."""


@dataclass(frozen=True)
class DecoderConfig:
    """What all layers have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of attention's scores, as `cap`: see `kernels.ops.attention`
    activation: str  # a key of `ACTIVATIONS`; "clamped" is gpt-oss's, by `alpha` and `limit`
    eps: float  # of norms
    cap: float = 0.0
    head_eps: float = 0.0  # of norms of queries and keys
    read: int = 3  # matrices for queries, keys and values, or one for all
    up: int = 2  # matrices for gate and up of the MLP, or one for both; one if it is not `gated`
    gated: bool = True
    parallel: bool = False  # the MLP reads what attention reads
    centred: bool = False  # norms take the mean away first, as LayerNorm does
    whole: bool = False  # norms of queries and keys are of all heads together
    by_head: bool = False  # one matrix reads a head's queries, keys and values, and then the next head's
    pairs: bool = False  # angles turn neighbouring numbers, and not halves
    chosen: int = 0  # experts of each row
    shared: bool = False  # their weights add up to 1
    alpha: float = 1.0
    limit: float = 0.0
    more: float = 0.0  # what the weights of norms lack

    def layers(self, parts: Sequence[Tensor | None], which: Sequence[int]) -> Callable[..., list[Tensor]]:
        """`Decoder.run` of csrc/decoder.h, with what its constructor takes. Raises Undescribed where the
        activation is not known."""
        if self.activation not in ACTIVATIONS:
            raise Undescribed(f"activation {self.activation}")
        sizes = [
            *(self.read, self.up, self.heads, self.kv_heads, self.head_dim, self.parallel, self.gated),
            *(ACTIVATIONS[self.activation][0], self.centred, self.whole, self.by_head, self.pairs),
            *(self.chosen, self.shared),
        ]
        numbers = [self.eps, self.head_eps, self.scale, self.cap, self.alpha, self.limit]
        decoder: Any = torch.classes.slipstream.Decoder
        return decoder(list(parts), list(which), list(map(int, sizes)), numbers).run


@dataclass(frozen=True)
class Layer:
    """One layer, by its modules."""

    read: Sequence[nn.Module]  # linear layers, see `DecoderConfig`, as `o`, `up` and `down`
    o: nn.Module
    mlp: Any  # holds up and down, or experts
    up: Sequence[nn.Module]
    down: Any
    norms: Sequence[nn.Module | None]  # before attention, after it, before the MLP, after it
    heads: Sequence[nn.Module | None]  # norms of queries and keys
    factor: float  # of what attention and the MLP add
    sinks: Tensor | None  # see `kernels.ops.attention`
    angles: int  # which of a pass's it takes; -1: none
    window: int  # which of a pass's it takes


@dataclass(frozen=True)
class Rotary:
    """cos and sin of the angles of positions."""

    frequencies: Float[Tensor, " half"]  # float32
    factor: float  # of cos and sin
    pairs: bool  # neighbouring numbers have the same angle, and not those at one place of both halves

    def __call__(self, positions: Int[Tensor, "#B R"], dtype: torch.dtype) -> list[Float[Tensor, "#B R D"]]:
        """cos and sin, rounded to the precision of the states."""
        angles = positions[..., None].float() * self.frequencies
        both = angles.repeat_interleave(2, -1) if self.pairs else torch.cat([angles, angles], -1)
        return [(turned * self.factor).to(dtype).float() for turned in (both.cos(), both.sin())]


@dataclass(frozen=True)
class Description:
    """Layers and the norm after them, as `Decoder` takes them."""

    kind: DecoderConfig
    parts: Sequence[Tensor | None]  # of each layer, and then of the last norm, in the order of csrc/decoder.h
    which: Sequence[int]  # of each layer its rotary positions, or -1, its window, and its number of experts
    rotary: Sequence[Rotary]  # one, or one for each type of attention
    windows: Sequence[str]  # the types of attention, see `support.attention_windows`
    factor: float = 1.0  # of embeddings


class Decoder:
    """Executes a description, by our kernels unless something else `run`s it."""

    def __init__(self, description: Description, run: Callable[..., list[Tensor]] | None = None) -> None:
        self.description = description
        self._run = run or description.kind.layers(description.parts, description.which)

    def __call__(
        self,
        embedded: Float[Tensor, "B R H"],
        positions: Int[Tensor, "#B R"],
        lists: Masks,
        cache: KVCache,
        taken: Sequence[int],
    ) -> tuple[Float[Tensor, "B R H"], dict[int, Float[Tensor, "B R H"]]]:
        """The final states under `masks.key_lists`, and the inputs of the layers of these numbers. The cache
        gets keys and values."""
        description = self.description
        x = embedded if description.factor == 1 else embedded * description.factor
        cos, sin = map(list, zip(*(rotary(positions, x.dtype) for rotary in description.rotary), strict=True))
        empty = x.new_empty(1, description.kind.kv_heads, 0, description.kind.head_dim)
        cache.allocate(empty, empty)
        keys, values = (stored.unbind(0) for stored in cache.stored)
        masks = [lists[kind] for kind in description.windows] if isinstance(lists, dict) else [lists]
        before = sorted({i - 1 for i in taken if i})
        *states, last = self._run(x, None, cos, sin, keys, values, cache.slots, masks, cache.view, before)
        return last, {0: x, **{i + 1: state for i, state in zip(before, states, strict=True)}}


class Weights:
    """The weights of modules as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._known = [
            (module._parameters, name, weight, version_of(weight))
            for module in modules
            for name, weight in module._parameters.items()
            if weight is not None
        ]

    @property
    def changed(self) -> bool:
        """Whether one was changed in place, or replaced, since."""
        return any(
            parameters[name] is not weight or version_of(weight) != version
            for parameters, name, weight, version in self._known
        )


def matrix(module: Any, factor: float = 1.0) -> Matrix:
    """A linear layer's tiles, scales and bias. Raises Undescribed for one that has no tiles."""
    if type(module) is QuantisedLinear:
        tiles, scales = module.weight, module.scales
    elif type(module) is Packed and ops.has_tiles(module.weight.dtype):
        tiles, row_scales = packed_copy(module)
        scales = torch.ones(len(module.weight)) if row_scales is None else row_scales
    else:
        raise Undescribed(type(module).__name__)
    bias = None if module.bias is None else (module.bias.detach().float() * factor).contiguous()
    return tiles, scales if factor == 1 else scales * factor, bias


def stored(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """A weight that no linear layer holds, packed. Raises Undescribed as `matrix` does."""
    if not ops.has_tiles(weight.dtype):
        raise Undescribed(f"weights of {weight.dtype}")
    tiles = packed_weight(weight.detach().contiguous())
    return tiles, torch.ones(len(weight)), None if bias is None else bias.detach().float().contiguous()


def norm(module: Any, more: float = 0.0) -> tuple[Tensor | None, Tensor | None]:
    """A norm's weight and shift. `more`: what the weight lacks. Raises Undescribed where each head has its
    own."""
    if module is None or isinstance(module, nn.Identity):
        return None, None
    if module.weight.dim() > 1:
        raise Undescribed("a norm of each head")
    bias = getattr(module, "bias", None)
    weight = (module.weight.detach().float() + more).contiguous()
    return weight, None if bias is None else bias.detach().float().contiguous()


def eps_of(norm: Any) -> float:
    """What stands under a norm's root."""
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)
