"""Our attention and products in the place of Hugging Face's, in a twin."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from slipstream import learning
from slipstream.kernels import attention, has_tiles, linear, mean, panels, tiled_linear, whole_numbers
from slipstream.machine import available_memory
from slipstream.packing import EIGHT, HAS_BF16, packed_linear, packed_weight
from slipstream.targets.activations import CALLED, aligned, own_activations
from slipstream.targets.alike import ROWS

Copy = TypeVar("Copy")
OURS = "slipstream"
NEEDS = (
    "that takes float32, bfloat16 or, on a GPU, float16, a C++ compiler or, on a GPU, Triton, and attention "
    "that can be replaced; leave exact=True out"
)
OWN_SDPA = ("falcon",)  # families that call sdpa themselves, with a mask as it is given


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over lists of keys (`masks.key_lists`) by our kernel, and under a dense mask by torch."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        return attention(query, key, value, attention_mask, scale, softcap or 0.0, s_aux), None
    if softcap or s_aux is not None:
        return _dense(query, key, value, attention_mask, scale, softcap, s_aux), None
    if attention_mask is not None and learning.learns(query):
        return learning.attention(query, key, value, attention_mask == 0, scale).transpose(1, 2), None
    # Hugging Face repeats grouped keys for all heads whenever there is a mask, which on a CPU doubles the
    # time of attention (30 layers at 512 slots: 2.0 ms against 0.9 ms).
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a softcap or sinks, which sdpa does not have."""
    group = query.shape[1] // key.shape[1]
    scores = scale * query @ key.repeat_interleave(group, 1).transpose(2, 3)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if mask is None else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1).to(scores)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous()


AttentionInterface.register(OURS, attend)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are products with packed weights: by our tiles, or by oneDNN with instructions."""
    return device.type == "cpu" and (has_tiles(dtype) or (dtype == torch.bfloat16 and HAS_BF16))


class Linear(nn.Linear):
    """A linear layer by our product."""

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear`; under autograd torch's own."""
        return F.linear(x, weight, bias) if torch.is_grad_enabled() else linear(x, weight, bias)


def version_of(weight: Tensor) -> tuple[int, int]:
    """How often a weight was changed in place, which in inference mode nobody counts, and where it lies: a
    module that is cast keeps its parameters and gives them other memory."""
    return 0 if weight.is_inference() else weight._version, weight.data_ptr()


@dataclass(frozen=True)
class Held:
    """A copy of a weight as it was at some version. A copy of its module does not get it: there versions are
    counted anew."""

    weight: Tensor
    version: tuple[int, int]
    copy: Any

    def __deepcopy__(self, memo: Any) -> None:
        return None


def _copy_of(module: Any, copied: Callable[[Tensor], Copy]) -> Copy:
    """A copy of a module's weight, kept beside it, and made again when there is another weight or it was
    changed in place."""
    weight = module.weight
    version = version_of(weight)
    held = module.__dict__.get("held")
    if held is None or held.weight is not weight or held.version != version:
        module.held = held = Held(weight, version, copied(weight.detach()))
    copy: Copy = held.copy
    return copy


def packed_copy(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """A linear layer's weight, packed, see `_copy_of`, and the scales of one that was stored in 8 bits."""
    return _copy_of(module, _eight_bits if hasattr(module.weight, EIGHT) else _as_it_is)


def _as_it_is(weight: Tensor) -> tuple[Tensor, None]:
    return packed_weight(weight), None


def _eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    whole, scales = whole_numbers(weight)
    return panels(whole), scales


class Turned(Conv1D):
    """GPT-2's linear layer, whose weight lies [K, N], by a copy that lies [N, K]."""

    def forward(self, x: Tensor) -> Tensor:
        """The product. Graphs do not look at versions, so they keep torch's own."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x)
        return linear(x, _copy_of(self, lambda weight: weight.t().contiguous()), self.bias)


class Packed(nn.Linear):
    """A linear layer by the product with a packed copy of the weight. Graphs pack it themselves."""

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear`. The packed copy is of this layer's own weight; one that was cast has none."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or weight is not self.weight:
            return F.linear(x, weight, bias)
        packed, scales = packed_copy(self)
        if scales is None:
            return packed_linear(x, packed, bias, len(weight))
        out = tiled_linear(x, packed, scales)
        return out if bias is None else out + bias


def own_parts(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Let a model's linear layers and, on a CPU, its activations round each row alike."""
    own_products(model, dtype, device)
    if device.type == "cpu":
        own_activations(model)


def own_products(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Let a model's linear layers round each row alike, whatever its neighbours."""
    packed = packs(dtype, device)
    room = not packed or sum(p.nbytes for p in model.parameters()) < 0.8 * available_memory()
    alike = (lambda *_: True) if has_tiles(dtype) else cache(_packed_rows_alike)  # ours are by construction
    for module in model.modules():
        if type(module) is Conv1D:
            module.__class__ = Turned
        elif room and isinstance(module, nn.Linear) and type(module) in (nn.Linear, FalconLinear):
            N, K = module.weight.shape
            module.__class__ = Packed if packed and alike(N, K, dtype) else Linear


def _packed_rows_alike(N: int, K: int, dtype: torch.dtype) -> bool:
    """Whether the packed product of this size gives rows the same bits, alone and among others."""
    x, weight = (torch.linspace(-1, 1, n * K).sin().view(n, K).to(dtype) for n in (ROWS[-1], N))
    packed = packed_weight(weight)
    whole = packed_linear(x, packed, None, N)
    return all(torch.equal(packed_linear(x[:n], packed, None, N), whole[:n]) for n in ROWS)


class Calls(TorchFunctionMode):
    """Inside, torch's linear, attention and means of rows are ours, for modules that call them directly, such
    as experts and norms."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return linear(*args, **kwargs)
        if func in CALLED and args[0].device.type == "cpu":
            return aligned(func, *args, **kwargs)
        if func is Tensor.mean and args[1:] == (-1,) and kwargs == {"keepdim": True}:
            return mean(args[0])
        mask = kwargs.get("attn_mask")
        if func is F.scaled_dot_product_attention and mask is not None and mask.dtype == torch.int32:
            query, key, value = args
            scale = kwargs.get("scale") or query.shape[-1] ** -0.5
            return attention(query, key, value, mask, scale).transpose(1, 2)
        return func(*args, **kwargs)


def called_directly(model: nn.Module, config: Any) -> bool:
    """Whether a model needs `Calls`: it has weights of three dimensions, as experts, its own sdpa, or is on
    a GPU, for its norms."""
    return config.model_type in OWN_SDPA or any(p.dim() > 2 or p.is_cuda for p in model.parameters())
