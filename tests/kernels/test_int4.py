"""Products of 4 bits against whole numbers in plain torch, in every bit."""

import pytest
import torch
import torch.nn.functional as F
from test_int8 import SIZES, each_dtype, rounded
from torch import Tensor

from slipstream.kernels import ops

pytestmark = pytest.mark.skipif(not ops.available(), reason="there is no C++ compiler")


def proof(x: Tensor, tiles: Tensor, scales: Tensor) -> Tensor:
    """The product in float32. What one operation adds is exact in float64 before it is added."""
    which, N = torch.arange(len(scales)), len(scales)
    one = torch.ones(1, 1, 2, 32).half().view(torch.uint8)
    one[..., 1, :] = 0  # d is 1, and m is 0
    q = ops.int4_rows(torch.cat([tiles[:, :, :8], one.expand(*tiles.shape[:2], 2, 64)], 2), which)
    panels = tiles[:, :, 8:].view(torch.float16).double()  # [panels, groups, 2, 32]
    d, m = panels.permute(2, 1, 0, 3).flatten(2)[..., :N]  # [groups, N] each
    whole, factor = rounded(F.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)))
    whole, total = torch.where(factor > 0, whole, 0).double(), torch.zeros(len(x), N)
    for g in range(whole.shape[1]):
        sums = (whole[:, g] @ q.unflatten(1, (-1, 32))[:, g].double().t()).float() * factor[:, g]
        total = (sums * d[g] + total).float()
        total = ((whole[:, g].sum(1, keepdim=True).float() * factor[:, g]) * m[g] + total).float()
    return total * scales


@each_dtype
@pytest.mark.parametrize(("K", "N"), SIZES)
def test_products_have_the_bits_of_their_proof(K, N, dtype):
    """A group that is rounded by another's scale, a half of a byte in the other's place, a group left out or
    added in another order, by vectors, tiles and threads."""
    generator = torch.Generator().manual_seed(K)
    x = torch.randn(133, K, generator=generator).to(dtype)
    tiles, scales = ops.int4_tiles(torch.randn(N, K, generator=generator))
    want = proof(x, tiles, scales).to(dtype)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (1, 2, 5, 6, 7, 8, 9, 16, 17, 32, 33, 64, 133):
                assert torch.equal(ops.tiled_linear(x[-rows:], tiles, scales), want[-rows:])
    finally:
        torch.set_num_threads(1)
    assert ops.tiled_linear(x[:0], tiles, scales).shape == (0, N)


@each_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(dtype, sign):
    """16-bit sums that saturate: all numbers as large as they can be, and of one sign."""
    x, weight = sign * torch.ones(3, 4096, dtype=dtype), torch.ones(40, 4096)
    weight[:, ::32] = 0  # so that q is 15 for all others
    tiles, scales = ops.int4_tiles(weight)
    got = ops.tiled_linear(x, tiles, scales)
    assert torch.equal(got, proof(x, tiles, scales).to(dtype))
    torch.testing.assert_close(got.float(), torch.full((3, 40), sign * 3968.0), rtol=0.01, atol=0)


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("K", [576, 100])
def test_numbers_on_a_grid_of_groups_are_found_again(K, size):
    """Q4_1 weights that were read into bfloat16 and are not what they were: q shifted by one, scales that
    fp16 does not hold, or a last group whose range takes in zeros that are not there."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (40, 18, 32), generator=generator).float()
    q[..., 0], q[..., 1] = 0, 15
    d = torch.rand(40, 18, 1, generator=generator).half() + 0.1
    m = -d * (5 + 5 * torch.rand(40, 18, 1, generator=generator).half())
    source = (q * d.float() + m.float()).flatten(1)[:, :K] * size
    tiles, scales = ops.int4_tiles(source.bfloat16())
    got = ops.int4_rows(tiles, torch.arange(40))[:, :K] * scales[:, None]
    step = d.float().expand(-1, -1, 32).flatten(1)[:, :K] * size
    assert ((got - source).abs() <= 0.05 * step).all()
    some = torch.tensor([[3, 1], [39, 0]])
    assert torch.equal(ops.int4_rows(tiles, some)[..., :K] * scales[some][..., None], got[some])


def test_any_numbers_are_rounded_to_the_nearest():
    """Steps that are wider than a group's range asks for; rows of zeros, or of one number, that are not."""
    weight = torch.randn(33, 100, generator=torch.Generator().manual_seed(1))
    weight[3], weight[4] = 0, -0.3
    tiles, scales = ops.int4_tiles(weight)
    got = ops.int4_rows(tiles, torch.arange(33))[:, :100] * scales[:, None]
    for k in range(0, 100, 32):
        part = weight[:, k : k + 32]
        step = (part.amax(1) - part.amin(1)) / 15
        assert ((got[:, k : k + 32] - part).abs().amax(1) <= 0.8 * step + 3e-4).all()
    assert torch.equal(got[3], weight[3])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_come_through(number):
    """A damaged row that looks sound."""
    tiles, scales = ops.int4_tiles(torch.randn(40, 70, generator=torch.Generator().manual_seed(0)))
    x = torch.ones(20, 70)
    x[1, 5] = number
    sound = torch.arange(20) != 1
    for rows in (3, 20):
        got = ops.tiled_linear(x[:rows], tiles, scales)
        assert not got[1].isfinite().any()
        assert got[sound[:rows]].isfinite().all()
    assert torch.equal(ops.tiled_linear(0 * torch.ones(2, 70), tiles, scales), torch.zeros(2, 40))


def test_what_does_not_fit_is_refused():
    """Reading behind the end of a weight or its scales, or one type's bytes as another's."""
    tiles, scales = ops.int4_tiles(torch.ones(40, 70))
    x, op = torch.ones(3, 70), ops.tiled_linear
    for bad in (
        (x[:, :60], tiles, scales),
        (x.double(), tiles, scales),
        (x, tiles, scales[:7]),
        (x, tiles, scales.double()),
        (x, tiles.float(), scales),
        (x, tiles[:, :, :9], scales),
    ):
        with pytest.raises(RuntimeError):
            op(*bad)
