"""Our attention, products and activations in the place of Hugging Face's, in a shadow model."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from slipstream.kernels import training_attention
from slipstream.kernels.ops import attention, linear, mean
from slipstream.targets.activations import CALLED, aligned, own_activations
from slipstream.targets.linear import copy_of, own_products

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
    if softcap or s_aux is not None:  # which sdpa does not have
        group = query.shape[1] // key.shape[1]
        scores = scale * query @ key.repeat_interleave(group, 1).transpose(2, 3)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores if attention_mask is None else scores + attention_mask
        if s_aux is not None:
            scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[:3], 1).to(scores)], -1)
        weights = scores.softmax(-1)[..., : key.shape[2]]
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None
    if attention_mask is not None and training_attention.learns(query):
        out = training_attention.attention(query, key, value, attention_mask == 0, scale)
        return out.transpose(1, 2), None
    # Hugging Face repeats grouped keys for all heads whenever there is a mask, which on a CPU doubles the
    # time of attention (30 layers at 512 slots: 2.0 ms against 0.9 ms).
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(OURS, attend)


class Turned(Conv1D):
    """GPT-2's linear layer, whose weight lies [K, N], by a copy that lies [N, K]."""

    def forward(self, x: Tensor) -> Tensor:
        """The product. Graphs do not look at versions, so they keep torch's own."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x)
        return linear(x, copy_of(self, lambda weight: weight.t().contiguous()), self.bias)


def own_parts(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Let a model's linear layers and, on a CPU, its activations round each row alike."""
    own_products(model, dtype, device, (nn.Linear, FalconLinear))
    for module in model.modules():
        if type(module) is Conv1D:
            module.__class__ = Turned
    if device.type == "cpu":
        own_activations(model)


class OwnFunctions(TorchFunctionMode):
    """Inside, torch's linear, attention and means of rows are ours, for modules that call them directly, such
    as experts and norms."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Whether a model needs `OwnFunctions`: it has weights of three dimensions, as experts, its own sdpa, or
    is on a GPU, for its norms."""
    return config.model_type in OWN_SDPA or any(p.dim() > 2 or p.is_cuda for p in model.parameters())
