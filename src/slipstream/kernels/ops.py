"""Attention and products in which a row's bits do not depend on its neighbours: on the CPU `csrc/ops.cpp`,
which `build` compiles once for a processor where there is a C++ compiler, on a GPU by `triton.py`."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8, Real, UInt8
from torch import Tensor

from slipstream.files import first_line, note
from slipstream.kernels import ON_CUDA, PRECISIONS
from slipstream.kernels.build import INSTRUCTIONS, library, processor

AT_ONCE = 128  # rows of a weight that are rounded together
CPU = torch.device("cpu")


def load(device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> bool:
    """Load the kernels for a device and precision, as a target does. Those for the CPU are compiled if nobody
    has done so yet. Whether there are any; where there is no compiler, a line on stderr says so."""
    if device.type == "cpu" and dtype in PRECISIONS:
        _load_library()
    elif has_kernels(device, dtype):
        import slipstream.kernels.triton  # noqa: F401
    return has_kernels(device, dtype)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this device and precision; those for the CPU must have been loaded."""
    if device.type == "cuda":
        return dtype in ON_CUDA and find_spec("triton") is not None
    return device.type == "cpu" and dtype in PRECISIONS and available()


def available() -> bool:
    """Whether `load` has loaded the kernels for the CPU."""
    return hasattr(torch.ops.slipstream, "tiled_linear")


@cache
def _load_library() -> bool:
    """Whether they run here."""
    try:
        torch.ops.load_library(library())
    except (OSError, ValueError) as error:
        fix = "install a C++ compiler, or name it in CXX"
        note(f"passes are slower without kernels of our own: {first_line(error)}: {fix}")
        return False
    shapes: dict[str, Callable[..., Tensor]] = {
        "linear": lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
        "attention": lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]),
        "tiled_linear": lambda x, tiles, scales: x.new_empty(*x.shape[:-1], len(scales)),
        "int8_rows": lambda tiles, scales, which, K, dtype: scales.new_empty(*which.shape, K, dtype=dtype),
    }
    for name, shape in shapes.items():
        torch.library.register_fake(f"slipstream::{name}", shape)
    return True


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether the kernels multiply weights of this precision, as they are, in tiles or panels. oneDNN has
    instructions for bf16 on processors that we do not know."""
    known = dtype == torch.float32 or (dtype == torch.bfloat16 and processor() in INSTRUCTIONS)
    return known and available()


def has_pairs(dtype: torch.dtype) -> bool:
    """Whether this is bf16 on a processor that multiplies pairs of it, which lie in tiles."""
    return dtype == torch.bfloat16 and processor() in ("AMX", "AVX512_BF16")


def tiles(weight: Float[Tensor, "N K"]) -> Tensor:
    """A weight in tiles, steps of 32 numbers and 16 × 32, or else in panels of 32 columns, padded with zeros:
    [⌈N / 32⌉, ⌈K / 32⌉, 2, 16, 32] or [⌈N / 32⌉, 16 ⌈K / 16⌉, 32]."""
    return torch.ops.slipstream.tiles(weight) if has_pairs(weight.dtype) else panels(weight)


def whole_numbers(weight: Float[Tensor, "N K"]) -> tuple[Int8[Tensor, "N K"], Float[Tensor, " N"]]:
    """A weight as whole numbers from -127 to 127, and the rows' scales."""
    whole = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for i in range(0, len(weight), AT_ONCE):  # a part of it lies in the processor's cache
        part, some = weight[i : i + AT_ONCE].float(), slice(i, i + AT_ONCE)
        scales[some] = part.abs().amax(1) / 127
        part = part / scales[some].clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        whole[some] = part.round_().clamp_(-127, 127)
    return whole, scales


def int8_tiles(weight: Int8[Tensor, "N K"]) -> Int8[Tensor, "panels steps 2 16 16 4"]:
    """A weight as `tiled_linear` reads it: panels of 32 columns, steps of 64 numbers; padded with zeros."""
    N, K = weight.shape
    whole = F.pad(weight, (0, -K % 64, 0, -N % 32))
    tiles = whole.view(len(whole) // 32, 2, 16, -1, 16, 4).permute(0, 3, 1, 4, 2, 5)
    return torch.ops.slipstream.kept(tiles.contiguous())


def panels(weight: Real[Tensor, "N K"]) -> Real[Tensor, "panels K16 32"]:
    """A weight as `tiled_linear` reads it for rows as they are: panels of 32 columns, padded with zeros."""
    N, K = weight.shape
    whole = F.pad(weight, (0, -K % 16, 0, -N % 32))
    return torch.ops.slipstream.kept(whole.view(-1, 32, whole.shape[1]).transpose(1, 2).contiguous())


def tiled_linear(
    x: Float[Tensor, "*n K"], tiles: Tensor, scales: Float[Tensor, " N"]
) -> Float[Tensor, "*n N"]:
    """The product of x with a weight that `tiles`, `int8_tiles`, `panels` or `int4_tiles` packed, whose
    columns have scales.

    A weight of 8 bits is multiplied by rows of 8 bits: each is rounded by a scale of its own, its largest
    magnitude / 127. Sums are then exact, and multiplied by the row's scale times the column's in fp32. In
    panels weights of 8 bits are multiplied by rows as they are, and added up in fp32 in their order. With a
    weight of 4 bits each group of 32 numbers of a row has a scale, and its exact sums are added up like that.
    """
    return torch.ops.slipstream.tiled_linear(x, tiles, scales)


def int4_tiles(
    weight: Float[Tensor, "N K"],
) -> tuple[UInt8[Tensor, "panels groups 10 64"], Float[Tensor, " N"]]:
    """A weight as `tiled_linear` reads it, padded with zeros, and its rows' scales: powers of two that no
    number of a row exceeds.

    Over its scale a number is q · d + m: q from 0 to 15, d and m in float16, of each group of 32 numbers. q
    is the number's place in the group's range. For these, d and m have the least squared error, so that
    numbers which lay on such a grid are found again, though they were rounded since.
    """
    N, K = weight.shape
    scales = torch.ldexp(torch.ones(N), weight.float().abs().amax(1).frexp().exponent)
    rows = F.pad((weight.float() / scales[:, None])[None], (0, -K % 32), "replicate")[0]  # ranges stay
    groups = F.pad(rows, (0, 0, 0, -N % 32)).view(-1, 32, rows.shape[1] // 32, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    q = ((groups - low) * 15 / (high - low).clamp(min=tiny)).round()
    off, mean = q - q.mean(-1, keepdim=True), groups.mean(-1, keepdim=True)
    d = (off * (groups - mean)).sum(-1, keepdim=True) / off.square().sum(-1, keepdim=True).clamp(min=tiny)
    m = mean - d * q.mean(-1, keepdim=True)
    factors = torch.cat([d, m], -1).half().permute(0, 2, 3, 1).contiguous()  # [panels, groups, 2, 32]
    pairs = q.to(torch.uint8).view(-1, 2, 16, groups.shape[2], 4, 2, 4)
    numbers = (pairs[..., 0, :] + 16 * pairs[..., 1, :]).permute(0, 3, 1, 4, 2, 5)
    parts = numbers.reshape(*factors.shape[:2], 8, 64), factors.view(torch.uint8)
    return torch.ops.slipstream.kept(torch.cat(parts, 2)), scales


def int4_rows(tiles: UInt8[Tensor, "panels groups 10 64"], which: Int[Tensor, "*n"]) -> Float[Tensor, "*n K"]:
    """Some rows of a weight that `int4_tiles` packed, over their scales, with the padding of K."""
    vectors = tiles[:, :, :8].unflatten(2, (2, 4)).unflatten(-1, (16, 4))
    both = vectors[which // 32, :, which // 16 % 2, :, which % 16]  # [..., groups, 4, 4]
    q = torch.stack([both % 16, both // 16], -2).flatten(-3)
    d, m = tiles[:, :, 8:].view(torch.float16)[which // 32, :, :, which % 32].float()[..., None].unbind(-2)
    return (q * d + m).flatten(-2)


def linear(
    x: Float[Tensor, "*n K"],
    weight: Real[Tensor, "N K"],
    bias: Float[Tensor, " N"] | None = None,
    scales: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "*n N"]:
    """`F.linear`. Each number is a sum over K in one order, in fp32, for any number of rows. On a GPU the
    weight may be int8, with a scale for each of its rows."""
    ops = torch.ops.slipstream
    return ops.linear_cuda(x, weight, bias, scales) if x.is_cuda else ops.linear(x, weight, bias)


def attention(
    q: Float[Tensor, "B heads R D"],
    k: Float[Tensor, "B kv S D"],
    v: Float[Tensor, "B kv S Dv"],
    keys: Int[Tensor, "#B 1 R L"],
    scale: float,
    cap: float = 0.0,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "B R heads Dv"]:
    """Softmax attention in which each row reads its own list of keys, in order of position.

    Args:
        keys: int32: (m, first, end, slots…). The text's first token stands in slot |m|, behind memory. A row
            reads the slots [0, m), if m is positive, and [first, end), and then the listed ones up to the
            first negative one.
        scale, cap: a score is scale · q k; with a cap it is cap · tanh(score / cap).
        sinks: a score of each head that takes part in the softmax without any value.
    """
    ops = torch.ops.slipstream
    return (ops.attention_cuda if q.is_cuda else ops.attention)(q, k, v, keys, scale, cap, sinks)


def mean(x: Float[Tensor, "*n H"]) -> Float[Tensor, "*n 1"]:
    """Over the last dimension. On a GPU the order of torch's sum depends on the number of rows; on the CPU it
    does not, and is taken."""
    return torch.ops.slipstream.mean_cuda(x) if x.is_cuda else x.mean(-1, keepdim=True)
