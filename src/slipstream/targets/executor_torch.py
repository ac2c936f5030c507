"""Described layers as torch operations, for devices that our C++ does not run on.

A pass can be captured as a CUDA graph: nothing waits for the device, and no shape depends on a tensor's
values. Weights are the model's own, and products and norms are those of its modules.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.targets import attention_patch as ours
from slipstream.targets.executor import Kind, Layer, Undescribed, eps_of

TANH = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("silu", "swish"), F.silu),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), TANH),
    "gelu": F.gelu,
}


class Layers:
    """What `Kind.layers` executes on a CPU.

    Args:
        final: the norm behind all layers.
        exact: a row's bits do not depend on its neighbours.

    Raises:
        Undescribed: the layers are a mixture of experts, or their activation is not known.
    """

    def __init__(self, kind: Kind, layers: Sequence[Layer], final: nn.Module, exact: bool) -> None:
        if kind.chosen or kind.activation not in ACTIVATIONS:
            raise Undescribed(f"activation {kind.activation}" if not kind.chosen else "experts")
        self._kind, self._layers, self._exact = kind, layers, exact
        self._activated, self._final = ACTIVATIONS[kind.activation], self._norm(final)
        self._norms = [[*map(self._norm, (*layer.norms, *layer.heads))] for layer in layers]

    def _norm(self, module: Any) -> Callable[[Tensor], Tensor] | None:
        """A norm's operation: torch's own is one launch, but what it adds up in which order is not known."""
        if module is None or isinstance(module, nn.Identity):
            return None
        if self._exact or self._kind.more or "RMSNorm" not in type(module).__name__:
            operation: Callable[[Tensor], Tensor] = module
            return operation
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
        kept: Collection[int],
    ) -> list[Tensor]:
        """As `Decoder.run` of csrc/decoder.h."""
        turns = [[each.to(x.dtype)[:, None] for each in both] for both in zip(cos, sin, strict=True)]
        at = torch.arange(len(x), device=x.device)[:, None], slice(None), slots
        said = []
        with ours.Calls() if self._exact else nullcontext():
            for i, (layer, norms) in enumerate(zip(self._layers, self._norms, strict=True)):
                turn = turns[layer.angles] if layer.angles >= 0 else None

                def attend(q: Tensor, k: Tensor, v: Tensor, i: int = i, layer: Layer = layer) -> Tensor:
                    keys[i][at], values[i][at] = k.transpose(1, 2), v.transpose(1, 2)
                    k, v = keys[i][:, :, :view], values[i][:, :, :view]
                    how = masks[layer.window], self._kind.scale, self._kind.cap, layer.sinks
                    return ours.attend(layer.o, q, k, v, *how)[0].flatten(2)

                x = self._added(layer, norms, x, turn, attend)
                if i in kept:
                    said.append(x)
            return [*said, x if self._final is None else self._final(x)]

    def _added(self, layer: Layer, norms: Any, x: Tensor, turn: Any, attend: Callable[..., Tensor]) -> Tensor:
        """x with what attention and the MLP add."""
        before, behind, second, last, *heads = norms
        normed = _by(before, x)
        between = x + layer.factor * _by(behind, layer.o(attend(*self._read(layer, heads, normed, turn))))
        if not self._kind.parallel or second is not None:
            normed = _by(second, x if self._kind.parallel else between)
        return between + layer.factor * _by(last, layer.down(self._inner(layer, normed)))

    def _read(self, layer: Layer, norms: Any, x: Tensor, turn: Any) -> list[Tensor]:
        """Queries, keys and values [B, heads, R, D]."""
        kind, made = self._kind, [read(x) for read in layer.read]
        if kind.by_head:
            made = [*made[0].unflatten(-1, (kind.heads, -1)).chunk(3, -1)]
        elif len(made) == 1:
            widths = [n * kind.head_dim for n in (kind.heads, kind.kv_heads, kind.kv_heads)]
            made = [*made[0].split(widths, -1)]
        if kind.whole:
            made[:2] = map(_by, norms, made[:2])
        if not kind.by_head:
            made = [each.unflatten(-1, (-1, kind.head_dim)) for each in made]
        if not kind.whole:
            made[:2] = map(_by, norms, made[:2])
        made = [each.transpose(1, 2) for each in made]
        if turn is not None:
            made[:2] = (self._turned(each, *turn) for each in made[:2])
        return made

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
        made = [up(x) for up in layer.up]
        if not self._kind.gated:
            return self._activated(made[0])
        gate, up = made if len(made) == 2 else made[0].chunk(2, -1)
        return self._activated(gate) * up


def _by(norm: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
