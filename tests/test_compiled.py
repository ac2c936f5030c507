"""Products with packed weights, which compiled passes use on the CPU, are those of plain ones."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.compiled import HAS_BF16


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_linear_layers_side_by_side(dtype, rows):
    """Weights in the wrong order, a bias that is left out, or a copy that was packed for other neighbours."""
    make = torch.Generator().manual_seed(rows)
    x, *weights = (torch.randn(n, 32, generator=make).to(dtype) for n in (rows, 64, 16, 24))
    biases = [torch.randn(64, generator=make).to(dtype), None, torch.randn(24, generator=make).to(dtype)]
    plain = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    for n in (3, 1, 3):  # all of them, and the first one alone
        packed = torch.ops.slipstream.packed_linear(x[None], weights[:n], biases[:n])[0]
        for ours, theirs in zip(packed.split([len(w) for w in weights[:n]], -1), plain, strict=False):
            tolerance = {torch.float64: 0.0, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
            assert torch.allclose(ours, theirs, rtol=0, atol=tolerance)
    read_plain = dtype == torch.float64 or (dtype == torch.bfloat16 and not HAS_BF16 and rows == 1)
    assert len(getattr(weights[0], "packed", [])) == (0 if read_plain else 2)
