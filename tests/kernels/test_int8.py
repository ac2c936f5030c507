"""Products in tiles, those of 8 bits against whole numbers in plain torch, in every bit."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.kernels import PRECISIONS, build, ops

pytestmark = pytest.mark.skipif(not ops.available(), reason="there is no C++ compiler")
each_dtype = pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
SIZES = [(1, 1), (7, 3), (64, 32), (65, 33), (100, 9), (576, 130)]  # K, N


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of whole numbers and their scales."""
    most = x.float().abs().amax(-1, keepdim=True)
    return (x.float() * (torch.tensor(127.0) / most)).round(), most / 127


def proof(x: Tensor, whole: Tensor, scales: Tensor) -> Tensor:
    """The product in float32: whole numbers are exact in float64."""
    rows, factor = rounded(x)
    return (rows.double() @ whole.double().t()).float() * (factor * scales)


def weight_of(generator: torch.Generator, N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """In tiles, its scales, and as it is."""
    whole = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    return ops.int8_tiles(whole), torch.rand(N, generator=generator) + 0.1, whole


@each_dtype
@pytest.mark.parametrize(("K", "N"), SIZES)
def test_rows_are_multiplied_as_they_are_by_panels(K, N, dtype):
    """A row that is rounded, zeros behind that count, a row whose bits its neighbours change."""
    generator = torch.Generator().manual_seed(K + N)
    x, weight = (torch.randn(n, K, generator=generator) for n in (33, N))
    whole, scales = ops.whole_numbers(weight)
    got = ops.tiled_linear(x.to(dtype), ops.panels(whole), scales)
    want = x.to(dtype).double() @ (whole * scales[:, None]).double().T
    torch.testing.assert_close(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=K * 1e-6)
    for rows in (1, 2, 5, 16):
        part = ops.tiled_linear(x[-rows:].to(dtype), ops.panels(whole), scales)
        assert torch.equal(part, got[-rows:])


@each_dtype
@pytest.mark.parametrize(("K", "N"), SIZES)
def test_products_have_the_bits_of_their_proof(K, N, dtype):
    """A row that is rounded by another's scale, a column in another's place, sums that overflow or saturate,
    rows of another tile, block or thread."""
    generator = torch.Generator().manual_seed(K)
    x = torch.randn(133, K, generator=generator).to(dtype)
    tiles, scales, whole = weight_of(generator, N, K)
    which = torch.arange(N).flip(0).view(-1, 1)
    rows = (whole[which].float() * scales[which][..., None]).to(dtype)
    assert torch.equal(torch.ops.slipstream.int8_rows(tiles, scales, which, K, dtype), rows)
    want = proof(x, whole, scales).to(dtype)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (1, 2, 7, 8, 16, 17, 32, 33, 64, 133):
                assert torch.equal(ops.tiled_linear(x[-rows:], tiles, scales), want[-rows:])
    finally:
        torch.set_num_threads(1)
    assert ops.tiled_linear(x[:0], tiles, scales).shape == (0, N)


@each_dtype
def test_the_largest_sums_do_not_overflow(dtype):
    """16-bit sums that saturate: all numbers as large as they can be, and of one sign."""
    x, whole = torch.ones(3, 4096, dtype=dtype), torch.full((40, 4096), 127, dtype=torch.int8)
    whole[1::2] = -127
    got = ops.tiled_linear(x, ops.int8_tiles(whole), torch.ones(40))
    assert torch.equal(got, proof(x, whole, torch.ones(40)).to(dtype))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_come_through(number):
    """A damaged row that looks sound."""
    tiles, scales, _ = weight_of(torch.Generator().manual_seed(0), 40, 70)
    x = torch.ones(3, 70)
    x[1, 5] = number
    got = ops.tiled_linear(x, tiles, scales)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()
    assert torch.equal(ops.tiled_linear(0 * torch.ones(2, 70), tiles, scales), torch.zeros(2, 40))


def proof_as_it_is(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return (x.to(weight.dtype).double() @ weight.double().t()).float() * scales


def weight_as_it_is(dtype: torch.dtype, generator: torch.Generator, N: int, K: int) -> tuple[Tensor, ...]:
    """As `weight_of`."""
    weight = torch.randn(N, K, generator=generator).to(dtype)
    return ops.tiles(weight), torch.rand(N, generator=generator) + 0.1, weight


KINDS = [(dtype, weight_of, proof) for dtype in PRECISIONS]
KINDS += [(dtype, partial(weight_as_it_is, dtype), proof_as_it_is) for dtype in PRECISIONS]


@pytest.mark.parametrize(("dtype", "weight_of", "proof"), KINDS)
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_products_of_all_kinds_have_their_proof(rows, dtype, weight_of, proof):
    """A row with another row's numbers, or scales of other columns."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 70, generator=generator).to(dtype)
    tiles, scales, weight = weight_of(generator, 100, 70)
    got, want = ops.tiled_linear(x, tiles, scales), proof(x, weight, scales)
    assert got.dtype == dtype
    assert (got.float() - want).pow(2).mean().sqrt() < 0.02 * want.std()  # one number may round otherwise
    alone = [ops.tiled_linear(x[i : i + 1], tiles, scales) for i in range(rows)]
    assert torch.equal(torch.cat(alone), got)


def test_what_does_not_fit_is_refused():
    """Reading behind the end of a weight or its scales, or one type's bytes as another's."""
    tiles, scales, _ = weight_of(torch.Generator().manual_seed(0), 40, 70)
    x = torch.ones(3, 70)
    for bad in (
        (x[:, :60], tiles, scales),
        (x.double(), tiles, scales),
        (x, tiles, scales[:7]),
        (x, tiles, scales.double()),
        (x, tiles.float(), scales),
    ):
        with pytest.raises(RuntimeError):
            torch.ops.slipstream.tiled_linear(*bad)


OTHERS = {
    "AVX512_BF16": torch.cpu._is_avx512_bf16_supported(),
    "AVX512_VNNI": torch.cpu._is_vnni_supported(),
    "AVX2": torch.cpu._is_avx2_supported(),
}
PROOF = """
import sys, torch
from slipstream.kernels import build, ops
build.HAS_AMX = False
build.processor = ops.processor = lambda: sys.argv[1]
sys.path.insert(0, sys.argv[2])
import pytest
assert ops.load(), "not compiled"
chosen = ["-k", "proof or overflow or tiled_products"]
sys.exit(pytest.main(["-q", "-W", "ignore", *chosen, "-p", "no:cacheprovider", *sys.argv[3:]]))
"""


@pytest.mark.parametrize(
    "processor", [name for name, runs in OTHERS.items() if runs and name != build.processor()]
)
def test_other_instructions_have_the_same_bits(processor):
    """A product of 8 or 4 bits that only this processor's own instructions get right."""
    if os.environ.get("TEST_INSIDE"):
        pytest.skip("this is the other process")
    tests = os.path.dirname(__file__)
    words = [sys.executable, "-c", PROOF, processor, tests, __file__]
    words.append(os.path.join(tests, "test_int4.py"))
    if processor == "AVX512_BF16":
        words.append(os.path.join(tests, "test_ops.py"))
    done = subprocess.run(words, env=os.environ | {"TEST_INSIDE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
