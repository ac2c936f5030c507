"""Linear layers, embeddings and LM heads with weights of 8 or 4 bits: on a CPU by `ops.tiled_linear`, on a
GPU by `ops.linear`, where torchao has the 4 bits."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.kernels import ops

KINDS = ("int8", "int4")


class Quantised(nn.Module):
    """A weight [N, K] of 8 bits, rounded by a scale for each row, its largest magnitude / 127, or of 4 bits.
    `dtype` is that of the model's states."""

    weight: Tensor  # in the order of `kernels.ops.int8_tiles` or of `int4_tiles`; on a GPU as it is
    scales: Tensor  # float32, of each row

    def __init__(self, weight: Tensor, scales: Tensor, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def rows(self, which: Int[Tensor, "*n"]) -> Float[Tensor, "*n K"]:
        """Some rows of the weight, as states are."""
        if self.weight.dtype == torch.int8:
            int8_rows = torch.ops.slipstream.int8_rows
            return int8_rows(self.weight, self.scales, which, self.width, self.dtype)
        whole = ops.int4_rows(self.weight, which)[..., : self.width]
        return (whole * self.scales[which][..., None]).to(self.dtype)


class QuantisedLinear(Quantised):
    """A linear layer. Each row that it reads is rounded to 8 bits as well, by its own scales. Under autograd
    the row stays as it is, and the product is torch's."""

    bias: Tensor | None

    def __init__(
        self, weight: Tensor, scales: Tensor, width: int, dtype: torch.dtype, bias: Tensor | None
    ) -> None:
        super().__init__(weight, scales, width, dtype)
        self.in_features, self.out_features = width, len(scales)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: Float[Tensor, "*n K"]) -> Float[Tensor, "*n N"]:
        """The product."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of this layer's own weight and bias."""
        if torch.is_grad_enabled():
            whole = self.rows(torch.arange(len(self.scales), device=x.device))
            return F.linear(x, whole.to(x), None if bias is None else bias.to(x))
        return self._product(x, weight, bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = ops.tiled_linear(x, weight, self.scales)
        return out if bias is None else out + bias


class WholeLinear(QuantisedLinear):
    """A linear layer on a GPU: its weight of 8 bits lies [N, K], and the rows that it reads stay as they
    are."""

    def rows(self, which: Int[Tensor, "*n"]) -> Float[Tensor, "*n K"]:
        """Some rows of the weight, as states are."""
        return (self.weight[which] * self.scales[which][..., None]).to(self.dtype)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x, weight, bias, self.scales)


class QuantisedEmbedding(Quantised):
    """An embedding, whose rows become numbers of the model's precision as they are looked up, times a factor
    of every row, as in Gemma."""

    factor: Tensor | None

    def __init__(
        self, weight: Tensor, scales: Tensor, width: int, dtype: torch.dtype, factor: Tensor | None
    ) -> None:
        super().__init__(weight, scales, width, dtype)
        self.register_buffer("factor", factor, persistent=False)

    def forward(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n K"]:
        """The rows of tokens."""
        rows = self.rows(tokens)
        return rows if self.factor is None else rows * self.factor.to(self.dtype)


def of_torchao(model: nn.Module) -> bool:
    """Whether some weights are of torchao's types, which hold several tensors each."""
    return any(map(parts_of, model.parameters()))


def dense(weight: Any) -> Tensor:
    """A weight of torchao's as numbers of the model's precision; others as they are."""
    return weight.dequantize() if parts_of(weight) else weight


def parts_of(weight: Any) -> list[Tensor]:
    """The tensors that make up a weight of torchao's; none of an ordinary one."""
    if not hasattr(weight, "__tensor_flatten__"):
        return []
    return [getattr(weight, part) for part in weight.__tensor_flatten__()[0]]


def rows_of_head(head: Any, vocab: Int[Tensor, " Vd"]) -> nn.Linear:
    """An LM head over some tokens, as a linear layer; a quantised one's in the precision of the states."""
    rows = head.rows(vocab) if isinstance(head, QuantisedLinear) else dense(head.weight[vocab])
    return linear_of(rows.contiguous(), None if head.bias is None else head.bias[vocab])


def linear_of(weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None) -> nn.Linear:
    """The linear layer of a weight, which does not learn."""
    linear = nn.Linear(weight.shape[1], len(weight), bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def stored_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights."""
    own = [x for module in model.modules() if isinstance(module, Quantised) for x in module.buffers(False)]
    return sum(map(_bytes, {id(x): x for x in (*model.parameters(), *own)}.values()))


def _bytes(weight: Tensor) -> int:
    return sum(map(_bytes, parts)) if (parts := parts_of(weight)) else weight.nbytes
