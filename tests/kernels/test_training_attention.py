"""Attention with gradients on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels import training_attention
from slipstream.kernels.training_attention import ROWS, attention


def drawn(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of heads that share keys; each row sees a window of the text."""
    T, S = 2 * ROWS + 7, 3 * ROWS
    generator = torch.Generator().manual_seed(0)
    sizes = (4, T, 8), (2, S, 8), (2, S, 6)
    made = [torch.randn(2, *size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    age = torch.arange(T)[:, None] + S - T - torch.arange(S)
    return made, ((age >= 0) & (age < 50)).expand(2, 1, T, S)


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Torch's, of all rows and keys."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale)


def gradients(out: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum with fixed weights."""
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return torch.autograd.grad((out.double() * weights).sum(), of)


@pytest.mark.parametrize("products", [True, False])
def test_rows_apart_are_all_rows_together(monkeypatch, products: bool):
    """By torch's own in float64, and by products in bf16. A key that some row sees was left out."""
    monkeypatch.setattr(training_attention, "HAS_BF16", products)
    dtype = torch.bfloat16 if products else torch.float64
    inputs, seen = drawn(dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, want = attention(*inputs, seen, 0.4), dense(*exact, seen, 0.4)
    close = {"rtol": 0.05, "atol": 0.02} if products else {"rtol": 1e-9, "atol": 1e-12}
    assert out.dtype == dtype
    for mine, other in zip([out, *gradients(out, inputs)], [want, *gradients(want, exact)], strict=True):
        torch.testing.assert_close(mine.double(), other, **close)


def test_autocast_decides_the_precision(monkeypatch):
    """Its softmax is float32, three times the memory and a third of the speed."""
    monkeypatch.setattr(training_attention, "HAS_BF16", True)
    inputs, seen = drawn(torch.float32)
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*inputs, seen, 0.4)
    assert torch.equal(out, attention(*low, seen, 0.4))
    assert all(x.dtype == torch.float32 for x in gradients(out, inputs))
