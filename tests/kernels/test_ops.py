"""Our kernels against the same sums in plain torch, in every bit, and against float64."""

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from slipstream.core.tree import chain
from slipstream.kernels import PRECISIONS, build, ops
from slipstream.kernels.ops import attention, linear
from slipstream.kernels.weight_packing import packed_linear, packed_weight
from slipstream.targets import HFTarget

compiled = pytest.mark.skipif(not ops.available(), reason="there is no C++ compiler")
each_dtype = pytest.mark.parametrize("dtype", PRECISIONS, ids=str)


def in_tiles(dtype: torch.dtype, *widths: int) -> bool:
    """Whether attention takes AMX tiles."""
    return build.HAS_AMX and ops.has_pairs(dtype) and all(width % 32 == 0 for width in widths)


def numbers(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


# The proof: the kernels' sums, written for reading. Everything is float32 unless it says otherwise.


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c, rounded once. The product is exact in float64. The sum is rounded to odd there, so that
    rounding it again to float32 is as if it had been exact."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    of_c = total - product
    lost = (product - (total - of_c)) + (c - of_c)
    bits = total.view(torch.int64)
    toward = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where((lost != 0) & (bits % 2 == 0), bits + toward, bits)
    return odd.view(torch.float64).float()


def by_pairs(x: Tensor) -> Tensor:
    """The sum of the W numbers in the last dimension."""
    if x.shape[-1] == 16:
        x = x[..., :8] + x[..., 8:]
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def in_vectors(x: Tensor) -> Tensor:
    """[..., n] as [..., vectors, W], with zeros behind."""
    W = torch.ops.slipstream.lanes()
    return F.pad(x, (0, -x.shape[-1] % W)).unflatten(-1, (-1, W))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Products over the last dimension."""
    a, b = torch.broadcast_tensors(in_vectors(a.float()), in_vectors(b.float()))
    sums = torch.zeros_like(a[..., 0, :])
    for i in range(a.shape[-2]):
        sums = fma(a[..., i, :], b[..., i, :], sums)
    return by_pairs(sums)


def exponential(x: Tensor) -> Tensor:
    """e^x as Cephes has it: 2^n times a polynomial."""
    x = x.clamp(min=-87.5)
    n = (x * torch.tensor(1.44269504)).round()
    r = fma(n, torch.tensor(-0.693359375), x)
    r = fma(n, torch.tensor(2.12194440e-4), r)
    p = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, torch.tensor(c))
    return fma(p, r * r, r + 1) * torch.ldexp(torch.tensor(1.0), n)


def weights(scores: Tensor, scale: float, cap: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of scores [heads, n]: weights, and what they are divided by."""
    scores = scores * torch.tensor(scale)
    if cap:
        x = scores * (1 / torch.tensor(cap))
        e = exponential(x.abs() * -2)
        scores = (torch.tensor(cap) * ((1 - e) / (1 + e))).copysign(x)
    most = scores.amax(-1, keepdim=True)
    most = most if sinks is None else most.maximum(sinks[:, None])
    made = exponential(scores - most)
    sums = torch.zeros_like(in_vectors(made)[:, 0])
    for vector in in_vectors(made).unbind(1):
        sums = sums + vector
    if sinks is not None:
        sums = sums + in_vectors(exponential(sinks[:, None] - most))[:, 0]
    return made, by_pairs(sums)


def by_words(a: Tensor, b: Tensor) -> Tensor:
    """Products of bf16 over the last dimension by AVX-512: of each pair of numbers first the second."""
    a, b = torch.broadcast_tensors(a.float(), b.float())
    a, b = (F.pad(x, (0, x.shape[-1] % 2)).unflatten(-1, (-1, 2)) for x in (a, b))
    sums = torch.zeros_like(a[..., 0, 0])
    for i in range(a.shape[-2]):
        for half in (1, 0):
            sums = fma(a[..., i, half], b[..., i, half], sums)
    return sums


def in_order(a: Tensor, b: Tensor) -> Tensor:
    """Products over the last dimension, number by number."""
    a, b = torch.broadcast_tensors(a.float(), b.float())
    sums = torch.zeros_like(a[..., 0])
    for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True):
        sums = fma(x, y, sums)
    return sums


# The same by AMX tiles, for bf16 and widths of a multiple of 32: sums go by blocks of 32 numbers.


def by_tiles(x: Tensor) -> Tensor:
    """Sums over the last dimension of products [..., n], which are exact: of each block of 32 first the even
    and the odd ones."""
    blocks = F.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 16, 2))
    total = torch.zeros_like(blocks[..., 0, 0, 0])
    for block in blocks.unbind(-3):
        halves = torch.zeros_like(block[..., 0, :])
        for pair in block.unbind(-2):
            halves = halves + pair
        total = total + (halves[..., 0] + halves[..., 1])
    return total


def numbered(keys: Tensor, origin: int) -> list[int]:
    """The slots that a row reads by number, in blocks of 32; -1 where there is none."""
    memory, first = max(int(keys[0]), 0), int(keys[1])
    text = [-1] * (first - origin) + slots_of(keys)[memory:]
    return [*range(memory), *[-1] * (-memory % 32), *text]


def tiled_weights(scores: Tensor, scale: float, cap: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `weights`, where a score that is -infinity is no key's."""
    by = torch.tensor(scale)
    if cap:
        x = scores * by * (1 / torch.tensor(cap))
        e = exponential(x.abs() * -2)
        capped = (torch.tensor(cap) * ((1 - e) / (1 + e))).copysign(x)
        scores, by = torch.where(scores == -math.inf, scores, capped), torch.tensor(1.0)
    most = scores.amax(-1, keepdim=True) * by
    most = most if sinks is None else most.maximum(sinks[:, None])
    made = exponential(fma(scores, by, -most)).where(scores != -math.inf, 0)
    sums = torch.zeros(len(made), 4)
    for four in F.pad(made, (0, -made.shape[-1] % 4)).unflatten(-1, (-1, 4)).unbind(1):
        sums = sums + four
    total = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
    return made.bfloat16().float(), total if sinks is None else total + exponential(sinks[:, None] - most)[
        :, 0
    ]


def tiled_row(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """One row [heads, D] of one text."""
    slots = torch.tensor(numbered(keys, abs(int(keys[0]))))
    key, value = (x[:, slots.clamp(min=0)].float().masked_fill(slots[:, None] < 0, 0) for x in (k, v))
    scores = by_tiles(q[:, None].float() * key).masked_fill(slots < 0, -math.inf)
    made, total = tiled_weights(scores, scale, cap, sinks)
    return by_tiles((made[..., None] * value).transpose(1, 2)) / total[:, None]


def slots_of(keys: Tensor) -> list[int]:
    """The slots that a row reads."""
    memory, first, end, *listed = keys.tolist()
    known = next((i for i, slot in enumerate(listed) if slot < 0), len(listed))
    return [*range(memory), *range(first, end), *listed[:known]]


def attention_proof(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """`ops.attention`, row by row."""
    (B, heads, R, _), group = q.shape, q.shape[1] // k.shape[1]
    out = torch.empty(B, R, heads, v.shape[3])
    sinks = None if sinks is None else sinks.float()
    for b in range(B):
        for r in range(R):
            if in_tiles(q.dtype, q.shape[3], v.shape[3]):
                each = (x[b].repeat_interleave(group, 0) for x in (k, v))
                out[b, r] = tiled_row(q[b, :, r], *each, keys[b % len(keys), 0, r], scale, cap, sinks)
                continue
            slots = slots_of(keys[b % len(keys), 0, r])
            key, value = (x[b][:, slots].float().repeat_interleave(group, 0) for x in (k, v))
            words = ops.has_pairs(q.dtype)
            scores = (by_words if words else dot)(q[b, :, r, None], key)
            made, total = weights(scores, scale, cap, sinks)
            sums = torch.zeros(heads, v.shape[3])
            for j in range(len(slots)):
                sums = fma(made[:, j, None], value[:, j], sums)
            out[b, r] = sums / total[:, None]
    return out.to(q.dtype)


def lists(generator: torch.Generator, B: int, R: int, S: int, memory: int = 3) -> Tensor:
    """Random lists of keys over S slots: groups of rows with memory or without, with windows and different
    ends, and 0 to 6 slots behind them."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    made = torch.full((B, 1, R, 9), -1, dtype=torch.int32)
    for b in range(B):
        for r in range(R):
            if r % 5 == 0:
                read, first = (-1) ** draw(0, 2) * memory, memory + draw(0, 2) * draw(0, S // 3)
            end = draw(first, S - 8)
            listed = (end + torch.randperm(S - end, generator=generator)[: draw(0, 7)]).sort().values
            if end == first and not len(listed):
                end += 1
            made[b, 0, r, :3] = torch.tensor([read, first, end])
            made[b, 0, r, 3 : 3 + len(listed)] = listed
    return made


CASES = {  # (batch, rows, slots, heads, grouped heads, width of keys, width of values, lists, more)
    "one row": (1, 1, 40, 2, 2, 64, 64, 1, {}),
    "one row, grouped": (1, 1, 300, 9, 3, 64, 64, 1, {}),
    "a tree": (1, 11, 70, 6, 2, 32, 32, 1, {}),
    "many rows": (1, 37, 60, 4, 2, 16, 16, 1, {}),
    "a batch": (3, 10, 50, 4, 2, 16, 16, 3, {}),
    "a batch that shares its lists": (3, 10, 50, 4, 2, 16, 16, 1, {}),
    "width 8": (1, 9, 40, 4, 1, 8, 8, 1, {}),
    "width 12": (1, 9, 40, 4, 4, 12, 12, 1, {}),
    "width 20": (2, 9, 40, 8, 2, 20, 20, 2, {}),
    "width 80": (1, 9, 40, 2, 1, 80, 80, 1, {}),
    "width 3": (1, 9, 40, 2, 1, 3, 5, 1, {}),
    "wider values": (1, 9, 40, 4, 2, 24, 100, 1, {}),
    "wider keys": (1, 9, 40, 4, 2, 72, 40, 1, {}),
    "long, with windows": (1, 33, 300, 6, 2, 64, 32, 1, {}),
    "many heads for one": (1, 5, 60, 40, 2, 32, 64, 1, {}),
    "a wide softcap": (2, 9, 70, 4, 2, 64, 64, 2, {"cap": 0.7}),
    "wide sinks": (2, 19, 70, 6, 2, 32, 32, 2, {"sinks": True}),
    "softcap": (2, 9, 40, 4, 2, 16, 16, 2, {"cap": 0.7}),
    "sinks": (2, 9, 40, 6, 2, 16, 16, 2, {"sinks": True}),
    "softcap and sinks": (1, 9, 40, 6, 2, 20, 20, 1, {"cap": 3.0, "sinks": True}),
}


def case(
    name: str, dtype: torch.dtype, scale: float = 1.0
) -> tuple[tuple[Tensor, ...], dict[str, float | Tensor]]:
    """Arguments of `attention`, as layers give them: queries turned, keys and values a part of a storage.
    Slots that no row reads hold NaN."""
    B, R, S, heads, kv, D, Dv, own, more = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    q = numbers(generator, dtype, B, R, heads, D).transpose(1, 2) * scale
    keys = lists(generator, own, R, S)
    k, v = (numbers(generator, dtype, 2, B, kv, S + 5, d)[1, :, :, :S] for d in (D, Dv))
    for b in range(B):
        read = {slot for row in keys[b % own, 0] for slot in slots_of(row)}
        for x in (k, v):
            x[b][:, sorted(set(range(S)) - read)] = math.nan
    how: dict[str, float | Tensor] = {"scale": D**-0.5, "cap": more.get("cap", 0.0)}
    if "sinks" in more:
        how["sinks"] = numbers(generator, dtype, heads)
    return (q, k, v, keys), how


@compiled
@each_dtype
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["flat", "sharp"])  # sharp: weights down to the smallest
@pytest.mark.parametrize("name", CASES)
def test_attention_has_the_bits_of_its_proof(name, scale, dtype):
    """A sum in another order for rows of a tile, of a tail or of a group; slots that are not in a row's list,
    which would be NaN here; a compiler that fuses what is not fused in the source."""
    args, how = case(name, dtype, scale)
    want = attention_proof(*args, **how)
    assert want.isfinite().all()
    assert torch.equal(attention(*args, **how), want)


@compiled
@pytest.mark.parametrize("name", CASES)
def test_attention_is_softmax_attention(name):
    """A kernel and its proof that are wrong together."""
    (q, k, v, keys), how = case(name, torch.float32)
    got = attention(q, k, v, keys, **how).double()
    group, cap, sinks = q.shape[1] // k.shape[1], how["cap"], how.get("sinks")
    for b in range(len(q)):
        for r in range(q.shape[2]):
            slots = slots_of(keys[b % len(keys), 0, r])
            key, value = (x[b][:, slots].double().repeat_interleave(group, 0) for x in (k, v))
            if not cap and sinks is None:
                want = F.scaled_dot_product_attention(q[b, :, r, None].double(), key, value)[:, 0]
            else:
                scores = (key @ q[b, :, r].double()[..., None])[..., 0] * how["scale"]
                scores = cap * (scores / cap).tanh() if cap else scores
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], -1)
                want = (scores.softmax(-1)[:, None, : len(slots)] @ value)[:, 0]
            torch.testing.assert_close(got[b, r], want, rtol=1e-5, atol=2e-6)


@compiled
@each_dtype
def test_no_row_looks_at_its_neighbours(dtype):
    """A row that is read with others, in a batch, by two threads or from other slots has other bits."""
    (q, k, v, keys), how = case("a batch", dtype)
    together = attention(q, k, v, keys, **how)
    torch.set_num_threads(2)
    try:
        assert torch.equal(attention(q, k, v, keys, **how), together)
    finally:
        torch.set_num_threads(1)
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(0))
    place = order.argsort()
    for b in range(len(q)):
        for r in range(q.shape[2]):
            slots = place[slots_of(keys[b, 0, r])].int()
            moved = torch.cat([torch.zeros(3, dtype=torch.int32), slots])[None, None, None]
            alone = attention(
                q[b, None, :, r, None], k[b, None][:, :, order], v[b, None][:, :, order], moved, **how
            )
            assert torch.equal(alone[0, 0], together[b, r])


@compiled
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_come_through(number, cap):
    """A damaged key whose score becomes a weight of almost nothing, so that nobody notices."""
    q, k, v = (torch.ones(1, 2, n, 8) for n in (9, 20, 20))
    k[:, 1, 7] = number
    keys = torch.tensor([[0, 0, 5 + r] for r in range(9)], dtype=torch.int32)[None, None]
    out = attention(q, k, v, keys, 0.5, cap)
    reads = torch.arange(9) >= 3  # rows 3 and later read slot 7
    assert out[:, :, 0].isfinite().all()
    assert out[:, ~reads].isfinite().all()
    if cap == 0 or math.isnan(number):  # a cap makes infinity finite
        assert out[:, reads, 1].isnan().all()


each_misfit = pytest.mark.parametrize(
    "spoiled", ["rows of lists", "batch of lists", "heads", "width", "lists", "dtype"]
)


def misfit(spoiled: str) -> tuple[Tensor, ...]:
    """Arguments of `attention` that do not fit each other."""
    (q, k, v, keys), _ = case("a batch", torch.float32)
    return {
        "rows of lists": (q, k, v, keys[:, :, :-1]),
        "batch of lists": (q, k, v, keys[:2]),
        "heads": (q[:, :3], k, v, keys),
        "width": (q[..., :8], k, v, keys),
        "lists": (q, k, v, keys.long()),
        "dtype": (q, k.bfloat16(), v.bfloat16(), keys),
    }[spoiled]


@compiled
@each_misfit
def test_attention_refuses_what_does_not_fit(spoiled):
    """Reading behind the end of a tensor."""
    with pytest.raises(RuntimeError):
        torch.ops.slipstream.attention(*misfit(spoiled), 1.0, 0.0, None)


def with_threads(threads: int, product: Callable[[], Tensor]) -> Tensor:
    """The product by so many threads."""
    torch.set_num_threads(threads)
    try:
        return product()
    finally:
        torch.set_num_threads(1)


@compiled
@each_dtype
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("K", "N"), [(1, 1), (7, 3), (32, 48), (33, 65), (100, 9), (576, 130)])
def test_products_have_the_bits_of_their_proof(K, N, biased, dtype):
    """Rows that round otherwise in a tile, behind it, in another block or on another thread."""
    generator = torch.Generator().manual_seed(K)
    x, weight = numbers(generator, dtype, 133, K), numbers(generator, dtype, N, K)
    bias = numbers(generator, dtype, N) if biased else None
    few = dot(x[:9, None], weight)
    few = (few if bias is None else few + bias.float()).to(dtype)
    whole = with_threads(1, lambda: linear(x, weight, bias))
    assert torch.equal(whole[:9], few)
    for threads in (1, 2):
        for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 64, 133):
            got = with_threads(threads, lambda rows=rows: linear(x[-rows:], weight, bias))
            assert torch.equal(got, whole[-rows:])
    near = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), near, rtol=tolerance, atol=tolerance * K**0.5)


@compiled
@each_dtype
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("K", "N"), [(1, 1), (7, 3), (32, 48), (33, 65), (100, 9), (576, 130), (1536, 576)])
def test_packed_products_have_the_bits_of_their_proof(K, N, biased, dtype):
    """Rows that round otherwise in a whole tile, in a part of one, behind it, or on another thread."""
    generator = torch.Generator().manual_seed(K)
    x, weight = (numbers(generator, dtype, n, K) for n in (700, N))
    bias = numbers(generator, dtype, N) if biased else None
    packed = packed_weight(weight)
    tiled = (-(-K // 32), 2, 16, 32) if ops.has_pairs(dtype) else (-(-K // 16) * 16, 32)
    assert packed.shape == (-(-N // 32), *tiled)
    few = in_order(x[:9, None], weight)
    if ops.has_pairs(dtype):
        exact = x[:9, None].float() * weight.float()
        few = by_tiles(exact) if build.HAS_AMX else by_words(x[:9, None], weight)
    few = (few if bias is None else few + bias.float()).to(dtype)
    whole = with_threads(1, lambda: packed_linear(x, packed, bias, N))
    assert torch.equal(whole[:9], few)
    for threads in (1, 2):
        for rows in (1, 2, 15, 16, 17, 31, 32, 33, 64, 133, 699):
            got = with_threads(threads, lambda rows=rows: packed_linear(x[-rows:], packed, bias, N))
            assert torch.equal(got, whole[-rows:])


@compiled
@each_dtype
def test_products_of_any_shape(dtype):
    """Inputs of several dimensions, turned or empty; weights that are turned or a part."""
    generator = torch.Generator().manual_seed(0)
    x, weight = numbers(generator, dtype, 2, 5, 3, 12), numbers(generator, dtype, 14, 9)
    want = dot(x.transpose(0, 2)[..., None, :], weight.t()[:, 1:13]).to(dtype)
    got = linear(x.transpose(0, 2), weight.t()[:, 1:13])
    assert (got.shape, got.dtype) == ((3, 5, 2, 9), dtype)
    assert torch.equal(got, want)
    assert linear(x[:0], weight[:, :0].new_zeros(4, 12)).shape == (0, 5, 3, 4)
    assert linear(x[0, 0, 0], weight.t()[:, 1:13]).shape == (9,)


@compiled
def test_products_refuse_what_does_not_fit():
    """Reading behind the end of a weight or a bias, or one type's bytes as another's."""
    x, weight = torch.zeros(3, 8), torch.zeros(5, 8)
    for bad in (
        (x, weight[:, :7], None),
        (x[:, :7], weight, None),
        (x, weight.bfloat16(), None),
        (x.double(), weight.double(), None),
        (x, weight, torch.zeros(4)),
        (x, weight[0], None),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            torch.ops.slipstream.linear(*bad)


COMPILERS = {
    "missing": None,
    "failing": "#!/bin/sh\nexit 1\n",
    "half-way": '#!/bin/sh\nfor last; do :; done\necho half > "$last"\nexit 1\n',
    "another one's": '#!/bin/sh\nfor last; do :; done\necho none > "$last"\n',
}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_without_a_compiler_targets_go_on(compiler, tmp_path, monkeypatch, capsys):
    """A traceback where there is no compiler; half of a library, which the next process loads; a target that
    says bits without them, and nobody who said why it is slow."""
    script = tmp_path / "c++"
    if text := COMPILERS[compiler]:
        script.write_text(text)
        script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not ops._load_library.__wrapped__()
    assert not ops._load_library.__wrapped__()
    told = capsys.readouterr().err.splitlines()
    assert sum("install a C++ compiler, or name it in CXX" in line for line in told) == 1
    assert len(told) == {"missing": 1, "another one's": 2}.get(
        compiler, 3
    )  # with "compiling kernels" of each
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert compiler == "another one's" or left == []
    monkeypatch.setattr(ops, "available", lambda: False)
    model = deepcopy(tiny.reference("qwen2")).float()
    target, text = HFTarget(model), torch.tensor(tiny.prompts(11))
    assert target.exactness == "audited"
    want = tiny.reference("qwen2")(text, use_cache=False).logits[0].float()
    torch.testing.assert_close(target(chain(text), target.new_cache(1)).logits[0], want, rtol=1e-3, atol=1e-3)


@pytest.fixture
def copying(tmp_path, monkeypatch):
    """A cache of its own, and a compiler that copies the library of this machine. The file that has a line
    for each of its runs."""
    runs, script = tmp_path / "runs", tmp_path / "c++"
    library = build.library()
    script.write_text(f'#!/bin/sh\nfor last; do :; done\necho >> {runs}\nsleep 0.3\ncp {library} "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return runs


@compiled
@pytest.mark.parametrize("size", [0, 1000, -1, None], ids=["empty", "truncated", "a byte less", "changed"])
def test_a_damaged_library_is_built_again(size, copying):
    """SIGBUS in every command over a truncated one; no kernels for ever over an empty one."""
    library = build.library()
    sound = library.read_bytes()
    changed = bytes([sound[0] ^ 1, *sound[1:]])
    library.write_bytes(changed if size is None else sound[:size])
    assert build.library().read_bytes() == sound
    assert build.library().read_bytes() == sound
    assert copying.read_text() == "\n\n"
    assert [*library.parent.iterdir()] == [library]


@compiled
def test_processes_that_start_at_once_build_once(copying):
    """Three compilers of half a minute each; a library that one loads while another replaces it. What a
    killed one has left is there no longer."""
    library = build.library()
    library.write_bytes(library.read_bytes()[:70_000])  # loading it is SIGBUS
    (library.parent / f".{library.stem[:-17]}-0123").write_text("half")
    code = "from slipstream.kernels import ops; print(ops.load())"
    ran = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    assert [each.communicate()[0] for each in ran] == [b"True\n"] * 3
    assert copying.read_text() == "\n\n"
    assert [*library.parent.iterdir()] == [library]


@compiled
def test_to_ask_for_kernels_compiles_none(copying):
    """Half a minute for an import, or for --help."""
    asked = "ops.available(), ops.has_tiles(torch.float32), ops.has_kernels(ops.CPU, torch.float32)"
    code = f"import torch; from slipstream.kernels import ops; print({asked})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "False False False\n"
    assert not copying.exists()


@compiled
def test_a_wheels_library_needs_no_compiler(copying, tmp_path, monkeypatch):
    """A user without a compiler, whose wheel brought kernels: a damaged one is not loaded."""
    library = build.library()
    built = Path(shutil.copytree(library.parent, tmp_path / "built")) / library.name
    library.unlink()
    monkeypatch.setattr(build, "BUILT", built.parent)
    monkeypatch.setenv("CXX", "nothing")
    assert build.library() == built
    built.write_bytes(b"")
    with pytest.raises(OSError, match="no compiler"):
        build.library()


@compiled
def test_a_wheel_has_a_library_for_every_processor(copying, tmp_path):
    build.build_all(tmp_path / "built")
    kinds = sorted(path.name.split("-")[0] for path in (tmp_path / "built").iterdir())
    assert kinds == sorted(2 * [name.lower() for name in build.INSTRUCTIONS])
    build.build_all(tmp_path / "built")
    assert len(copying.read_text()) == len(kinds)


def test_bf16_is_widened_as_torch_does_it():
    """Every number, of rows that do not lie side by side, too."""
    x = torch.randn(5, 40_003, generator=torch.Generator().manual_seed(0)).bfloat16()
    for each in (x, x[:, ::3], x[:0]):
        assert torch.equal(torch.ops.slipstream.widened(each), each.float())
    with pytest.raises(RuntimeError):
        torch.ops.slipstream.widened(x.float())
