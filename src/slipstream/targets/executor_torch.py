"""Described layers as torch operations, for devices that our C++ does not run on, by the weights, products
and norms of the model's modules. A pass can be captured as a CUDA graph: nothing waits for the device, and no
shape depends on a tensor's values."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.targets.attention_patch import OwnFunctions, attend
from slipstream.targets.decoder import ACTIVATIONS, DecoderConfig, Layer, Undescribed, eps_of


class Layers:
    """What `DecoderConfig.layers` executes on a CPU, and the norm after all layers. `exact`: a row's bits do
    not depend on its neighbours. Raises Undescribed: a mixture of experts, or an activation that is not
    known."""

    def __init__(self, kind: DecoderConfig, layers: Sequence[Layer], final: nn.Module, exact: bool) -> None:
        activation = ACTIVATIONS.get(kind.activation, (0, None))[1]
        if kind.chosen or activation is None:
            raise Undescribed("experts" if kind.chosen else f"activation {kind.activation}")
        self._kind, self._layers, self._exact = kind, layers, exact
        self._activation, self._final = activation, self._norm(final)
        self._norms = [[*map(self._norm, (*layer.norms, *layer.heads))] for layer in layers]

    def _norm(self, module: Any) -> Callable[[Tensor], Tensor]:
        """A norm's operation: torch's own is one launch, but what it adds up in which order is not known."""
        if module is None or isinstance(module, nn.Identity):
            return _unchanged
        if self._exact or self._kind.more or "RMSNorm" not in type(module).__name__:
            return module
        weight = module.weight
        return partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps_of(module))

    def run(
        self,
        x: Float[Tensor, "B R H"],
        _: None,
        cos: Sequence[Float[Tensor, "#B R turned"]],
        sin: Sequence[Float[Tensor, "#B R turned"]],
        keys: Sequence[Float[Tensor, "B kv S D"]],
        values: Sequence[Float[Tensor, "B kv S D"]],
        slots: Int[Tensor, "B R"],
        masks: Sequence[Tensor],
        view: int,
        outputs: Collection[int],
    ) -> list[Tensor]:
        """As `Decoder.run` of csrc/decoder.h."""
        turns = [[angle.to(x.dtype)[:, None] for angle in both] for both in zip(cos, sin, strict=True)]
        at = torch.arange(len(x), device=x.device)[:, None], slice(None), slots
        states = []
        with OwnFunctions() if self._exact else nullcontext():
            for i, (layer, norms) in enumerate(zip(self._layers, self._norms, strict=True)):
                turn = turns[layer.angles] if layer.angles >= 0 else None
                before, after, second, last, *heads = norms
                normed = before(x)
                q, k, v = self._read(layer, heads, normed, turn)
                keys[i][at], values[i][at] = k.transpose(1, 2), v.transpose(1, 2)
                how = masks[layer.window], self._kind.scale, self._kind.cap, layer.sinks
                read = attend(layer.o, q, keys[i][:, :, :view], values[i][:, :, :view], *how)[0].flatten(2)
                between = x + layer.factor * after(layer.o(read))
                if not self._kind.parallel or second is not _unchanged:
                    normed = second(x if self._kind.parallel else between)
                x = between + layer.factor * last(layer.down(self._inner(layer, normed)))
                if i in outputs:
                    states.append(x)
            return [*states, self._final(x)]

    def _read(self, layer: Layer, norms: Any, x: Tensor, turn: Any) -> list[Tensor]:
        """Queries, keys and values [B, heads, R, D]."""
        kind, qkv = self._kind, [read(x) for read in layer.read]
        if kind.by_head:
            qkv = [*qkv[0].unflatten(-1, (kind.heads, -1)).chunk(3, -1)]
        elif len(qkv) == 1:
            widths = [n * kind.head_dim for n in (kind.heads, kind.kv_heads, kind.kv_heads)]
            qkv = [*qkv[0].split(widths, -1)]
        if kind.whole:
            qkv[:2] = (norm(x) for norm, x in zip(norms, qkv, strict=False))
        if not kind.by_head:
            qkv = [x.unflatten(-1, (-1, kind.head_dim)) for x in qkv]
        if not kind.whole:
            qkv[:2] = (norm(x) for norm, x in zip(norms, qkv, strict=False))
        qkv = [x.transpose(1, 2) for x in qkv]
        if turn is not None:
            qkv[:2] = (self._turned(x, *turn) for x in qkv[:2])
        return qkv

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads whose first numbers are turned, neighbours or halves with each other."""
        x, rest = x.tensor_split([cos.shape[-1]], -1)
        if self._kind.pairs:
            other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        else:
            first, second = x.chunk(2, -1)
            other = torch.cat([-second, first], -1)
        turned = x * cos + other * sin
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def _inner(self, layer: Layer, x: Tensor) -> Tensor:
        """What `down` reads."""
        products = [up(x) for up in layer.up]
        if not self._kind.gated:
            return self._activation(products[0])
        gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
        return self._activation(gate) * up


def _unchanged(x: Tensor) -> Tensor:
    return x
