"""Attention that is differentiated on a CPU, where torch's own spends most of its time on what is hidden and,
in bfloat16, on its backward pass."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from slipstream.kernels.weight_packing import HAS_BF16

ROWS = 64  # taken together


def learns(q: Tensor) -> bool:
    """Whether gradients will flow through rows on a CPU."""
    return q.requires_grad and q.device.type == "cpu" and torch.is_grad_enabled()


def attention(
    q: Float[Tensor, "B A T D"],
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S Dv"],
    visible: Bool[Tensor, "#B 1 T S"],
    scale: float,
) -> Float[Tensor, "B A T Dv"]:
    """Attention of some rows at a time to the keys that any of them sees. Several heads may share keys."""
    if torch.is_autocast_enabled("cpu"):
        q, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, key, value))
    with torch.autocast("cpu", enabled=False):
        return torch.cat([*_by_rows(q, key, value, visible, scale)], 2)


def _by_rows(q: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Iterator[Tensor]:
    for some, mask in zip(q.split(ROWS, 2), visible.split(ROWS, 2), strict=True):
        at = mask.flatten(0, 2).any(0).nonzero()[:, 0]
        k, v, mask = (x.index_select(d, at) for x, d in ((key, 2), (value, 2), (mask, 3)))
        if q.dtype == torch.bfloat16 and HAS_BF16:
            yield _products(some, k, v, mask, scale)
        else:
            yield F.scaled_dot_product_attention(some, k, v, mask, scale=scale, enable_gqa=True)


def _products(q: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Heads that share keys are rows of one product. With its gradient it takes a third of sdpa's time."""
    (B, A, T, D), (G, S) = q.shape, key.shape[1:3]
    scores = ((scale * q).reshape(B, G, -1, D) @ key.transpose(2, 3)).view(B, A, T, S)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights.view(B, G, -1, S) @ value).view(B, A, T, -1)
