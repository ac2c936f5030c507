"""Linear layers by our products, in which each row rounds alike, whatever its neighbours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels.ops import has_tiles, linear, panels, tiled_linear, whole_numbers
from slipstream.kernels.weight_packing import EIGHT, HAS_BF16, packed_linear, packed_weight
from slipstream.machine import available_memory
from slipstream.targets.batch_invariance import ROWS

Copy = TypeVar("Copy")


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are products with packed weights: by our tiles, or by oneDNN with instructions."""
    return device.type == "cpu" and (has_tiles(dtype) or (dtype == torch.bfloat16 and HAS_BF16))


def version_of(weight: Tensor) -> tuple[int, int]:
    """How often a weight was changed in place, which in inference mode nobody counts, and where it lies: a
    module that is cast keeps its parameters and gives them other memory."""
    return 0 if weight.is_inference() else weight._version, weight.data_ptr()


@dataclass
class WeightCopy:
    """A copy of a weight at some version. A deep copy of its module, which counts anew, does not get it."""

    weight: Tensor
    version: tuple[int, int]
    copy: Any

    def __deepcopy__(self, memo: Any) -> None:
        return None


def copy_of(module: Any, copied: Callable[[Tensor], Copy]) -> Copy:
    """A copy of a module's weight, which the module holds until there is another weight, or another
    version."""
    weight = module.weight
    version, held = version_of(weight), module.__dict__.get("weight_copy")
    if held is None or held.weight is not weight or held.version != version:
        module.weight_copy = held = WeightCopy(weight, version, copied(weight.detach()))
    return held.copy


def packed_copy(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """A linear layer's weight, packed, see `copy_of`, and the scales of one that was stored in 8 bits."""

    def packed(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        if not hasattr(module.weight, EIGHT):
            return packed_weight(weight), None
        whole, scales = whole_numbers(weight)
        return panels(whole), scales

    return copy_of(module, packed)


class Linear(nn.Linear):
    """A linear layer by our product."""

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear`; under autograd torch's own."""
        return F.linear(x, weight, bias) if torch.is_grad_enabled() else linear(x, weight, bias)


class Packed(Linear):
    """A linear layer by a packed copy of the weight; in graphs by the one that `pack_for_graphs` made."""

    weight_copy: WeightCopy

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear`. The packed copy is of this layer's own weight; one that was cast has none."""
        if torch.is_grad_enabled() or weight is not self.weight:
            return F.linear(x, weight, bias)
        packed, scales = self.weight_copy.copy if torch.compiler.is_compiling() else packed_copy(self)
        if scales is None:
            return packed_linear(x, packed, bias, len(weight))
        out = tiled_linear(x, packed, scales)
        return out if bias is None else out + bias


def pack_for_graphs(model: nn.Module) -> None:
    """Pack the weights of a model's linear layers before it is compiled. Graphs take no weights in oneDNN's
    layout, and read them as they are."""
    for module in model.modules():
        if type(module) is Packed and packed_copy(module)[0].is_mkldnn:
            module.__class__ = Linear  # type: ignore[assignment]


def own_products(
    model: nn.Module, dtype: torch.dtype, device: torch.device, kinds: Sequence[type] = (nn.Linear,)
) -> None:
    """Let a model's linear layers of these classes round each row alike, whatever its neighbours."""
    packed = packs(dtype, device)
    fits = not packed or sum(p.nbytes for p in model.parameters()) < 0.8 * available_memory()
    alike = (lambda *_: True) if has_tiles(dtype) else cache(_packed_rows_alike)  # ours are by construction
    for module in model.modules():
        if fits and isinstance(module, nn.Linear) and type(module) in kinds:
            N, K = module.weight.shape
            module.__class__ = Packed if packed and alike(N, K, dtype) else Linear


def _packed_rows_alike(N: int, K: int, dtype: torch.dtype) -> bool:
    """Whether the packed product of this size gives rows the same bits, alone and among others."""
    x, weight = (torch.linspace(-1, 1, n * K).sin().view(n, K).to(dtype) for n in (ROWS[-1], N))
    packed = packed_weight(weight)
    whole = packed_linear(x, packed, None, N)
    return all(torch.equal(packed_linear(x[:n], packed, None, N), whole[:n]) for n in ROWS)
