"""Attention, products and means on a GPU, by Triton, in which a row's bits do not depend on its neighbours.

Every sum has one order, which depends on nothing but what is summed. A product runs over all of K in one
program, in halves by instructions that take 16 numbers at a time. Its tiles follow the number of rows there,
because instructions of all sizes add up alike: on an H100 products by 32 tiles, of `wgmma` and `mma.sync`,
agreed in all bits, and a target tries it (`targets.batch_invariance`). In fp32 tiles have one size. Attention
takes a row's keys in blocks from its own first key, and adds up the parts of `SPLIT` keys in their order."""

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels import HALVES

TILE = 16  # rows and heads that read keys together: those of one instruction
SPLIT = 256  # keys of a row that one program reads
PARTS = 2**26  # numbers in the parts of sums at once, 256 MiB: rows beyond them follow in another launch
WIDE = 2**14  # columns in all, for which two programs of 64 columns have work on each part of an H100
FEW = 64  # rows that several weights multiply in one launch where torch's own products may be taken


@triton.jit
@no_type_check
def _listed(at, width, TILE: tl.constexpr):
    """The number of slots in each row's list, which ends with the first negative one."""
    count = tl.zeros([TILE], tl.int32) + width - 3
    for begin in range(0, width - 3, 64):
        place = begin + tl.arange(0, 64)
        slot = tl.load(at[:, None] + 3 + place[None, :], mask=(place < width - 3)[None, :], other=0)
        count = tl.minimum(count, tl.min(tl.where(slot < 0, place[None, :], width), 1))
    return count


@triton.jit
@no_type_check
def _capped(score, cap):
    """cap · tanh(score / cap)."""
    e = tl.exp(tl.abs(score) * (-2 / cap))
    return tl.where(score < 0, -cap, cap) * ((1 - e) / (1 + e))


@triton.jit(do_not_specialize=["R", "width", "lists", "splits", "q_text", "q_head", "q_row"])
@no_type_check
def _attend(
    q, k, v, keys, sums, tops, totals, scale, cap, R, width, lists, splits, KV,
    q_text, q_head, q_row, k_text, k_head, k_slot, v_text, v_head, v_slot,
    D: tl.constexpr, DV: tl.constexpr, D2: tl.constexpr, DV2: tl.constexpr, G: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """What TILE pairs of a row and one of the G heads that share keys read of one split: sums of weights
    times values, of weights, and the highest score. A row's slots are those of `kernels.ops.attention`."""
    text, kv, split = (tl.program_id(1) // KV).to(tl.int64), tl.program_id(1) % KV, tl.program_id(2)
    i, d, dv = tl.arange(0, TILE), tl.arange(0, D2), tl.arange(0, DV2)
    pair = tl.program_id(0) * TILE + i
    there, pair = pair < R * G, tl.minimum(pair, R * G - 1)
    row, head = pair // G, kv * G + pair % G
    among = row - tl.min(row, 0)

    at = keys + (text % lists * R + row) * width
    memory, first, end = tl.maximum(tl.load(at), 0), tl.load(at + 1), tl.load(at + 2)
    read = memory + end - first
    size = tl.where(there, read + _listed(at, width, TILE), 0)

    q += text * q_text + head[:, None] * q_head + row[:, None] * q_row + d[None, :]
    query = tl.load(q, mask=there[:, None] & (d < D)[None, :], other=0.0)
    k += text * k_text + kv.to(tl.int64) * k_head
    v += text * v_text + kv.to(tl.int64) * v_head
    sum = tl.zeros([TILE, DV2], tl.float32)
    total, top = tl.zeros([TILE], tl.float32), tl.full([TILE], -float("inf"), tl.float32)

    for begin in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, tl.max(size, 0)), BLOCK):
        j = begin + tl.arange(0, BLOCK)[None, :]
        reads = j < size[:, None]
        far = j - read[:, None]
        listed = tl.load(at[:, None] + 3 + far, mask=reads & (far >= 0), other=0)
        slots = tl.where(j < memory[:, None], j, first[:, None] - memory[:, None] + j)
        slots = tl.where(reads, tl.where(far < 0, slots, listed), -1)
        # Rows that read the same slots go together. Others take turns: what a row does not read may be NaN.
        other = (slots != tl.max(slots, 0)[None, :]) & (begin < size)[:, None]
        turns = tl.where(tl.max(tl.max(other.to(tl.int32), 1), 0) > 0, tl.max(among, 0) + 1, 1)
        for turn in range(0, turns):
            mine = ((turns == 1) | (among == turn)) & (begin < size)
            slot = tl.max(tl.where(mine[:, None], slots, -1), 0).to(tl.int64)
            known = slot >= 0
            whole = known[None, :] & (d < D)[:, None]
            key = tl.load(k + slot[None, :] * k_slot + d[:, None], mask=whole, other=0.0)
            score = tl.dot(query, key, input_precision="ieee") * scale
            score = _capped(score, cap) if CAPPED else score
            score = tl.where(mine[:, None] & reads, score, -float("inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weight, shrink = tl.exp(score - base[:, None]), tl.exp(top - base)
            filled = known[:, None] & (dv < DV)[None, :]
            value = tl.load(v + slot[:, None] * v_slot + dv[None, :], mask=filled, other=0.0)
            added = tl.dot(weight.to(value.dtype), value, sum * shrink[:, None], input_precision="ieee")
            sum = tl.where(mine[:, None], added, sum)
            total = tl.where(mine, total * shrink + tl.sum(weight, 1), total)
            top = tl.where(mine, higher, top)

    part = ((text * KV * G + head) * R + row) * splits + split
    tl.store(sums + part[:, None] * DV + dv[None, :], sum, mask=there[:, None] & (dv < DV)[None, :])
    tl.store(tops + part, top, mask=there)
    tl.store(totals + part, total, mask=there)


@triton.jit(do_not_specialize=["R", "splits"])
@no_type_check
def _join(
    sums, tops, totals, sinks, out, R, splits, heads, DV: tl.constexpr, DV2: tl.constexpr, SUNK: tl.constexpr
):
    """One row and head: its parts, added up in order, over the sum of its weights."""
    text, row, head, dv = tl.program_id(0) // R, tl.program_id(0) % R, tl.program_id(1), tl.arange(0, DV2)
    first = ((text.to(tl.int64) * heads + head) * R + row) * splits
    most = tl.full([], -float("inf"), tl.float32)
    if SUNK:
        sink = tl.load(sinks + head)
        most = tl.maximum(most, sink)
    for split in range(0, splits):
        most = tl.maximum(most, tl.load(tops + first + split))
    base = tl.where(most == -float("inf"), 0.0, most)
    sum = tl.zeros([DV2], tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for split in range(0, splits):
        share = tl.exp(tl.load(tops + first + split) - base)
        sum += share * tl.load(sums + (first + split) * DV + dv, mask=dv < DV, other=0.0)
        total += share * tl.load(totals + first + split)
    if SUNK:
        total += tl.exp(sink - base)
    out += (tl.program_id(0).to(tl.int64) * heads + head) * DV
    tl.store(out + dv, (sum / total).to(out.dtype.element_ty), mask=dv < DV)


@triton.jit(do_not_specialize=["M"])
@no_type_check
def _multiply(
    x, weights, scales, bias, out, M, sizes, K, strides,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """A tile of the product with one of the weights. Programs that read the same numbers stand side by side,
    and so do the products' columns."""
    weight, scale, N, stride = weights[0], scales[0], sizes[0], strides[0]
    before, width = 0, N
    for i in tl.static_range(1, len(weights)):
        mine = tl.program_id(1) == i
        weight, scale = tl.where(mine, weights[i], weight), tl.where(mine, scales[i], scale)
        N, stride = tl.where(mine, sizes[i], N), tl.where(mine, strides[i], stride)
        before = tl.where(mine, width, before)
        width += sizes[i]

    tiles = tl.cdiv(M, ROWS)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) // tiles * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    k, at = tl.arange(0, BLOCK), tl.minimum(column, N - 1)
    # A row that is not there is not read: all programs would ask the second cache for the same line.
    there = (row < M)[:, None]
    left = x + row.to(tl.int64)[:, None] * K + k[None, :]
    right = weight + at.to(tl.int64)[None, :] * stride + k[:, None]
    sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, tl.where(first < N, K, 0), BLOCK):
        if EVEN:
            a, b = tl.load(left + begin, mask=there, other=0.0), tl.load(right + begin)
        else:
            a = tl.load(left + begin, mask=there & (begin + k < K)[None, :], other=0.0)
            b = tl.load(right + begin, mask=(begin + k < K)[:, None], other=0)
        b = b.to(tl.float32).to(a.dtype) if SCALED else b
        sum = tl.dot(a, b, sum, input_precision="ieee")
    if SCALED:
        sum *= tl.load(scale + at)[None, :]
    if BIASED:
        sum += tl.load(bias + at).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * width + (before + column)[None, :]
    tl.store(place, sum.to(out.dtype.element_ty), mask=there & (column < N)[None, :])


@triton.jit
@no_type_check
def _mean(x, out, H, BLOCK: tl.constexpr):
    """Of one row."""
    row, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    sum = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, H, BLOCK):
        sum += tl.load(x + row * H + begin + h, mask=begin + h < H, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(sum, 0) / H).to(out.dtype.element_ty))


def attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """See `kernels.ops.attention`. Raises RuntimeError where the arguments do not fit."""
    (B, heads, R, D), (KV, S, DV) = q.shape, (k.shape[1], k.shape[2], v.shape[3])
    fits = k.shape == (B, KV, S, D) and v.shape == (B, KV, S, DV) and heads % KV == 0
    torch._check(fits and (sinks is None or sinks.shape == (heads,)), lambda: "attention: shapes do not fit")
    listed = keys.dim() == 4 and keys.shape[0] in (1, B) and keys.shape[1:3] == (1, R) and keys.shape[3] >= 3
    torch._check(listed and keys.dtype == torch.int32, lambda: "attention: each row needs its list of keys")
    torch._check(k.stride(3) == v.stride(3) == 1, lambda: "attention: keys and values must be dense")
    torch._check(q.dtype == k.dtype == v.dtype, lambda: "attention: one dtype for all")
    most = max(1, PARTS // (B * heads * triton.cdiv(max(S, 1), SPLIT) * DV))
    parts = [
        _rows(q[:, :, top : top + most], k, v, keys[:, :, top : top + most], scale, cap, sinks)
        for top in range(0, R, most)
    ]
    return parts[0] if len(parts) == 1 else torch.cat([q.new_empty(B, 0, heads, DV), *parts], 1)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """Attention of some rows."""
    (B, heads, R, D), (KV, S, DV) = q.shape, (k.shape[1], k.shape[2], v.shape[3])
    q, keys, out = q.contiguous(), keys.contiguous(), q.new_empty(B, R, heads, DV)
    D2, DV2, splits = _power(D), _power(DV), triton.cdiv(max(S, 1), SPLIT)
    sums = q.new_empty(B, heads, R, splits, DV, dtype=torch.float32)
    tops, totals = sums.new_empty(2, B, heads, R, splits)
    G, block = heads // KV, 64 if max(D2, DV2) * k.element_size() <= 256 else 32
    _attend[(triton.cdiv(R * G, TILE), B * KV, splits)](
        q, k, v, keys, sums, tops, totals, scale, cap, R, keys.shape[3], len(keys), splits, KV,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], D=D, DV=DV, D2=D2, DV2=DV2, G=G,
        TILE=TILE, BLOCK=block, SPLIT=SPLIT, CAPPED=cap > 0, num_stages=1,
    )  # fmt: skip
    sunk = sums if sinks is None else sinks.float().contiguous()
    _join[(B * R, heads)](
        sums, tops, totals, sunk, out, R, splits, heads, DV=DV, DV2=DV2, SUNK=sinks is not None
    )
    return out


def _power(width: int) -> int:
    """The width of a tile that holds so many numbers."""
    return max(16, triton.next_power_of_2(width))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """See `kernels.ops.linear`. Raises RuntimeError where the arguments do not fit."""
    torch._check(bias is None or bias.shape == weight.shape[:1], lambda: "linear: bias and weight do not fit")
    return _products(x, [weight], [] if scales is None else [scales], bias)


def linears(x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], exact: bool) -> Tensor:
    """The products of x with several weights side by side, in one launch.

    Args:
        scales: of all the weights, if they have 8 bits; else none.
        exact: each has the bits that `linear` gives it. If not, many rows are multiplied by torch.
    """
    if not exact and x.numel() > FEW * x.shape[-1]:
        return torch.cat([F.linear(x, weight) for weight in weights], -1)
    return _products(x, weights, scales)


def _products(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor:
    """The bias is that of a single weight."""
    K, sizes = x.shape[-1], tuple(map(len, weights))
    kind = torch.int8 if scales else x.dtype
    fits = all(weight.shape[1] == K and weight.dtype == kind for weight in weights)
    torch._check(fits, lambda: "linear: x and weight do not fit")
    scaled = not scales or [scale.shape for scale in scales] == [(N,) for N in sizes]
    torch._check(scaled, lambda: "linear: scales and weight do not fit")
    x, weights = x.contiguous(), [w if w.stride(1) == 1 else w.contiguous() for w in weights]
    out, M = x.new_empty(*x.shape[:-1], sum(sizes)), x.numel() // max(K, 1)
    if out.numel() == 0:
        return out
    rows, columns, block, stages, warps = _tile(M, sum(sizes), x.dtype, bool(scales))
    _multiply[(triton.cdiv(M, rows) * triton.cdiv(max(sizes), columns), len(weights))](
        x, (*weights,), (*(scales or weights),), x if bias is None else bias.contiguous(), out, M, sizes, K,
        tuple(weight.stride(0) for weight in weights), ROWS=rows, COLUMNS=columns, BLOCK=block,
        EVEN=K % block == 0, SCALED=bool(scales), BIASED=bias is not None, num_stages=stages, num_warps=warps,
    )  # fmt: skip
    return out


def _tile(M: int, N: int, dtype: torch.dtype, scaled: bool) -> tuple[int, int, int, int, int]:
    """Rows, columns, numbers of K, stages and warps that read weights fastest on an H100; in 99 KiB.

    Weights of 8 bits get small tiles alone: `wgmma`, of 64 rows and more, takes their numbers in another
    order, and an H100 gave other bits.
    """
    if dtype not in HALVES:
        return 16, 32, 64, 3, 4
    M = min(M, 32) if scaled else M
    for rows, block, stages in ((16, 256, 5 if scaled else 4), (32, 128, 5), (64, 64, 6)):
        if rows >= M:
            return (rows, 64, 128, 3, 4) if N >= WIDE and rows <= 32 else (rows, 32, block, stages, 4)
    return 128, 128, 64, 3, 8


def mean(x: Tensor) -> Tensor:
    """See `kernels.ops.mean`."""
    x, H = x.contiguous(), x.shape[-1]
    out = x.new_empty(*x.shape[:-1], 1)
    if out.numel():
        _mean[(out.numel(),)](x, out, H, BLOCK=1024)
    return out


_library = torch.library.Library("slipstream", "FRAGMENT")
_ops: dict[str, tuple[Any, Any]] = {
    "attention_cuda(Tensor q, Tensor k, Tensor v, Tensor keys, float scale, float cap, Tensor? sinks)": (
        attention,
        lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]),
    ),
    "linear_cuda(Tensor x, Tensor weight, Tensor? bias, Tensor? scales)": (
        linear,
        lambda x, weight, *_: x.new_empty(*x.shape[:-1], weight.shape[0]),
    ),
    "linears_cuda(Tensor x, Tensor[] weights, Tensor[] scales, bool exact)": (
        linears,
        lambda x, weights, *_: x.new_empty(*x.shape[:-1], sum(map(len, weights))),
    ),
    "mean_cuda(Tensor x)": (mean, lambda x: x.new_empty(*x.shape[:-1], 1)),
}
for _schema, (_kernel, _shape) in _ops.items():
    _library.define(f"{_schema} -> Tensor")
    _library.impl(_schema.partition("(")[0], _kernel, "CUDA")
    torch.library.register_fake(f"slipstream::{_schema.partition('(')[0]}", _shape, lib=_library)
