"""Decoder layers, described by their modules, that one call of our kernels executes (csrc/decoder.h)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kernels import ops as kernels
from slipstream.kernels.weight_packing import packed_weight
from slipstream.targets.linear import Packed, packed_copy, version_of
from slipstream.targets.quantized import QuantisedLinear

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "gelu_new": 2, "clamped": 3}
Part = Tensor | None
NO_MATRIX: tuple[Part, Part, Part] = None, None, None


class Undescribed(Exception):
    """A model has something that the description has no word for."""


@dataclass(frozen=True)
class Kind:
    """What all layers have in common.

    Attributes:
        heads, kv_heads, head_dim: of attention.
        scale, cap: of its scores, see `kernels.attention`.
        activation: a key of `ACTIVATIONS`; "clamped" is gpt-oss's, by `alpha` and `limit`.
        read: 3 matrices for queries, keys and values, or one for all.
        up: 2 matrices for gate and up of the MLP, or one for both; one if it is not `gated`.
        parallel: the MLP reads what attention reads.
        centred: norms take the mean away first, as LayerNorm does.
        whole: norms of queries and keys are of all heads together.
        by_head: one matrix reads a head's queries, keys and values, and then the next head's.
        pairs: angles turn neighbouring numbers, and not halves.
        chosen: experts of each row; their weights add up to 1 if they are `shared`.
        eps, head_eps: of norms, and of those of queries and keys.
        more: what the weights of norms lack.

    Raises:
        Undescribed: the activation is not known.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    activation: str
    eps: float
    cap: float = 0.0
    head_eps: float = 0.0
    read: int = 3
    up: int = 2
    gated: bool = True
    parallel: bool = False
    centred: bool = False
    whole: bool = False
    by_head: bool = False
    pairs: bool = False
    chosen: int = 0
    shared: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    more: float = 0.0

    def layers(self, parts: Sequence[Part], which: Sequence[int]) -> Callable[..., list[Tensor]]:
        """`Decoder.run` of csrc/decoder.h, with what its constructor takes."""
        if self.activation not in ACTIVATIONS:
            raise Undescribed(f"activation {self.activation}")
        sizes = [
            *(self.read, self.up, self.heads, self.kv_heads, self.head_dim, self.parallel, self.gated),
            *(ACTIVATIONS[self.activation], self.centred, self.whole, self.by_head, self.pairs),
            *(self.chosen, self.shared),
        ]
        numbers = [self.eps, self.head_eps, self.scale, self.cap, self.alpha, self.limit]
        made: Any = torch.classes.slipstream.Decoder(list(parts), list(which), list(map(int, sizes)), numbers)
        run: Callable[..., list[Tensor]] = made.run
        return run


@dataclass(frozen=True)
class Layer:
    """One layer, by its modules.

    Attributes:
        read, o, up, down: linear layers, see `Kind`; `mlp` is what holds up and down, or experts.
        norms: before attention, behind it, before the MLP, behind it.
        heads: norms of queries and keys.
        factor: of what attention and the MLP add.
        sinks: see `kernels.attention`.
        angles, window: which of a pass's it takes; -1: no angles.
    """

    read: Sequence[nn.Module]
    o: nn.Module
    mlp: Any
    up: Sequence[nn.Module]
    down: Any
    norms: Sequence[nn.Module | None]
    heads: Sequence[nn.Module | None]
    factor: float
    sinks: Part
    angles: int
    window: int


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


def matrix(module: Any, factor: float = 1.0) -> tuple[Tensor, Tensor, Part]:
    """A linear layer's tiles, scales and bias. Raises Undescribed for one that has no tiles."""
    scales: Part
    if type(module) is QuantisedLinear:
        tiles, scales = module.weight, module.scales
    elif type(module) is Packed and kernels.has_tiles(module.weight.dtype):
        tiles, scales = packed_copy(module)
        scales = torch.ones(len(module.weight)) if scales is None else scales
    else:
        raise Undescribed(type(module).__name__)
    bias = None if module.bias is None else (module.bias.detach().float() * factor).contiguous()
    return tiles, scales if factor == 1 else scales * factor, bias


def stored(weight: Tensor, bias: Part = None) -> tuple[Tensor, Tensor, Part]:
    """A weight that no linear layer holds, packed. Raises Undescribed as `matrix` does."""
    if not kernels.has_tiles(weight.dtype):
        raise Undescribed(f"weights of {weight.dtype}")
    tiles = packed_weight(weight.detach().contiguous())
    return tiles, torch.ones(len(weight)), None if bias is None else bias.detach().float().contiguous()


def norm(module: Any, more: float = 0.0) -> tuple[Part, Part]:
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
