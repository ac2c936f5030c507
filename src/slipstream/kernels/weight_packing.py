"""Products with packed weights on the CPU, in the layout of our tiles where their kernel runs, else in
oneDNN's."""

import platform

import torch
from torch import Tensor

from slipstream.kernels import ops
from slipstream.kernels.build import HAS_AMX

EIGHT = "of_8_bits"  # marks a weight that was stored so: a multiple of whole numbers in each row
PACKED_FOR = 8  # rows; oneDNN's layout for a few rows serves one row and many as well
X86_BF16 = torch.cpu._is_avx512_bf16_supported() or HAS_AMX
HAS_BF16 = (
    torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # with AVX-512 alone oneDNN emulates it, 3 times slower
    and (X86_BF16 or platform.machine() not in ("x86_64", "AMD64"))
)


def packed_weight(weight: Tensor) -> Tensor:
    """A weight [N, K] as `packed_linear` reads it: in tiles, where our kernel for them runs, else in oneDNN's
    layout."""
    if ops.has_tiles(weight.dtype):
        return ops.tiles(weight)
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, N: int) -> Tensor:
    """The product of x [*, K] with a packed weight [N, K]."""
    return torch.ops.slipstream.packed_linear(x, weight, bias, N)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, N: int) -> Tensor:
    """oneDNN rounds a row alike from two rows on; a single one is multiplied as two (and no slower)."""
    one = x.numel() == x.shape[-1]
    rows = x.reshape(1, -1).expand(2, -1).contiguous() if one else x
    out = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out[:1].reshape(*x.shape[:-1], -1) if one else out


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None, N: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], N)


_library = torch.library.Library("slipstream", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int N) -> Tensor")
_library.impl("packed_linear", _onednn_linear, "MkldnnCPU")
torch.library.register_fake("slipstream::packed_linear", _shape, lib=_library)
