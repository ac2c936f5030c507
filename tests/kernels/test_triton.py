"""Our kernels for GPUs against plain torch in float64, and bits between passes.

Without a GPU they run in Triton's interpreter, whose products round otherwise than a GPU's, and Triton
compiles them for GPUs all the same.
"""

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
from test_ops import CASES, case, each_misfit, lists, misfit, numbers, slots_of
from transformers import LlamaConfig, MistralConfig
from triton.runtime import interpreter

import tiny
from slipstream.kernels import ON_CUDA, ops, triton as kernels_triton
from slipstream.kernels.triton import attention, linear, linears, mean
from slipstream.targets import (
    HFTarget,
    attention_patch as ours,
    batch_invariance as alike,
    linear as products,
)
from slipstream.targets.executor_torch import Layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
each_dtype = pytest.mark.parametrize("dtype", ON_CUDA, ids=str)


@pytest.fixture(autouse=True)
def in_bfloat16(monkeypatch):
    """The interpreter multiplies bfloat16 as if it were integers. Here each product is a sum of its own, 16
    numbers after another, as a GPU's instructions make it, whatever the tile."""

    def dot(self, a, b, c, *_):
        a, b = (x.data.astype(np.uint32) << 16 if x.dtype.is_bf16() else x.data for x in (a, b))
        a, b = (x.view(np.float32) if x.dtype == np.uint32 else x.astype(np.float32) for x in (a, b))
        made = c.data
        for k in range(0, a.shape[1], 16):
            made = made + (a[:, k : k + 16, None] * b[None, k : k + 16]).sum(1)
        return interpreter.TensorHandle(made, c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def on_device(*args: Tensor | float | None) -> list:
    """Tensors on the machine that the kernels run on."""
    return [x.to(DEVICE) if isinstance(x, Tensor) else x for x in args]


def attend(*args: Tensor | float, **how: float | Tensor) -> Tensor:
    """Our attention, and its result on the CPU."""
    return attention(*on_device(*args), **dict(zip(how, on_device(*how.values()), strict=True))).cpu()


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float, cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """`ops.attention` in float64, row by row."""
    (B, heads, R, _), group = q.shape, q.shape[1] // k.shape[1]
    out = torch.empty(B, R, heads, v.shape[3], dtype=torch.float64)
    for b in range(B):
        for r in range(R):
            slots = slots_of(keys[b % len(keys), 0, r])
            key, value = (x[b][:, slots].double().repeat_interleave(group, 0) for x in (k, v))
            scores = (key @ q[b, :, r].double()[..., None])[..., 0] * scale
            scores = cap * (scores / cap).tanh() if cap else scores
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], -1)
            out[b, r] = (scores.softmax(-1)[:, None, : len(slots)] @ value)[:, 0]
    return out


FEW = ("one row, grouped", "a tree", "softcap and sinks")
TRIED = [(name, 1.0, torch.float32) for name in CASES]
TRIED += [(name, 30.0, dtype) for name in FEW for dtype in ON_CUDA]  # weights down to the smallest


@pytest.mark.parametrize(("name", "scale", "dtype"), TRIED)
def test_attention_is_softmax_attention(name, scale, dtype):
    """A row that reads its neighbour's keys, or slots of nobody, which are NaN; a wrong mask, cap or sink."""
    args, how = case(name, dtype, scale)
    near = NEAR[dtype] * scale**0.5
    want = softmax_attention(*args, **how)
    torch.testing.assert_close(attend(*args, **how).double(), want, rtol=near, atol=near)


def long_case(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Two texts of more than two splits, with windows and lists of their own."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (numbers(generator, dtype, 2, *shape, 16) for shape in ((6, 7), (2, 620), (2, 620)))
    return q, k, v, lists(generator, 2, 7, 620)


@each_dtype
def test_no_row_looks_at_its_neighbours(dtype):
    """A row that is read with others, in another order or tile, in a batch, behind more slots, or from other
    slots, has other bits."""
    q, k, v, keys = long_case(dtype)
    together = attend(q, k, v, keys, 0.3)
    near = NEAR[dtype]
    torch.testing.assert_close(together.double(), softmax_attention(q, k, v, keys, 0.3), rtol=near, atol=near)
    assert torch.equal(attend(q.flip(2), k, v, keys.flip(2), 0.3).flip(1), together)
    order = torch.randperm(620, generator=torch.Generator().manual_seed(0))
    place = order.argsort()
    wide = [F.pad(x, (0, 0, 0, 500), value=math.nan)[:, :, :1000] for x in (k, v)]
    for b in range(2):
        for r in (0, 3, 6):
            row = (slice(b, b + 1), slice(None), slice(r, r + 1))
            alone = attend(q[row], *(x[b : b + 1] for x in wide), keys[row], 0.3)
            assert torch.equal(alone[0, 0], together[b, r])
            slots = place[slots_of(keys[b, 0, r])].int()
            moved = torch.cat([torch.zeros(3, dtype=torch.int32), slots])[None, None, None]
            alone = attend(q[row], k[b : b + 1, :, order], v[b : b + 1, :, order], moved, 0.3)
            assert torch.equal(alone[0, 0], together[b, r])


def test_a_tree_has_the_bits_of_its_paths():
    """Rows that share the text and end in lists of their own, against the same keys one behind the other: as
    a chain reads them, and from a cache that was compacted."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (numbers(generator, torch.float32, 1, *shape, 16) for shape in ((4, 9), (4, 80), (4, 80)))
    parents, behind = [-1, 0, 0, 1, 1, 2, 3, 5, 6], 60
    paths = [[0]]
    for parent in parents[1:]:
        paths.append([*paths[parent], len(paths)])
    keys = torch.full((1, 1, 9, 12), -1, dtype=torch.int32)
    for r, path in enumerate(paths):
        keys[0, 0, r, :3] = torch.tensor([0, 0, behind])
        keys[0, 0, r, 3 : 3 + len(path)] = behind + torch.tensor(path)
    tree = attend(q, k, v, keys, 0.3)
    for r, path in enumerate(paths):
        slots = torch.tensor([*range(behind), *(behind + node for node in path)])
        bounds = [[0, 0, behind + 1 + i] for i in range(len(path))]
        as_chain = torch.tensor(bounds, dtype=torch.int32)[None, None]
        rows = attend(q[:, :, path], k[:, :, slots], v[:, :, slots], as_chain, 0.3)
        assert torch.equal(rows[0, -1], tree[0, r])


def test_many_rows_are_read_in_parts(monkeypatch):
    """Memory for the parts of sums that grows with a prompt; a part that is put elsewhere."""
    q, k, v, keys = long_case(torch.float32)
    whole = attend(q, k, v, keys, 0.3)
    monkeypatch.setattr(kernels_triton, "PARTS", 2 * 6 * 3 * 16 * 2)  # two rows at once
    assert torch.equal(attend(q, k, v, keys, 0.3), whole)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by NumPy
def test_numbers_that_are_not_finite_come_through(number, cap):
    """A damaged key that nobody notices, or that spoils rows that do not read it."""
    q, k, v = (torch.ones(1, 2, n, 8) for n in (9, 20, 20))
    k[:, 1, 7] = number
    v[:, 0, 8] = number
    keys = torch.tensor([[0, 0, 5 + r] for r in range(9)], dtype=torch.int32)[None, None]
    out = attend(q, k, v, keys, 0.5, cap)
    reads = torch.arange(9) >= 3  # rows 3 and later read slot 7
    assert out[:, ~reads].isfinite().all()
    assert out[:, 3, 0].isfinite().all()  # row 4 is the first to read slot 8
    assert not out[:, 4:, 0].isfinite().any()
    if cap == 0 or math.isnan(number):  # a cap makes infinity finite
        assert out[:, reads, 1].isnan().all()


@each_misfit
def test_attention_refuses_what_does_not_fit(spoiled):
    """Reading behind the end of a tensor."""
    with pytest.raises(RuntimeError):
        attend(*misfit(spoiled), 1.0)


@each_dtype
@pytest.mark.parametrize(("K", "N"), [(1, 1), (33, 65), (256, 40)])
def test_products_do_not_depend_on_the_number_of_rows(K, N, dtype):
    """Rows that round otherwise in a tile, behind it, or alone; a number of K that is left out."""
    generator = torch.Generator().manual_seed(K)
    x, weight, bias = (numbers(generator, dtype, *shape) for shape in ((70, K), (N, K), (N,)))
    whole = linear(*on_device(x, weight, bias)).cpu()
    near = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), near, rtol=NEAR[dtype], atol=NEAR[dtype] * K**0.5)
    for rows in (1, 2, 16, 17, 65):
        assert torch.equal(linear(*on_device(x[-rows:], weight, bias)).cpu(), whole[-rows:])


@each_dtype
@pytest.mark.parametrize(("K", "N"), [(33, 65), (256, 40)])
def test_products_with_weights_of_8_bits(K, N, dtype):
    """Scales that are left out or in another's place; rows that round otherwise among others."""
    generator = torch.Generator().manual_seed(K)
    x, full, bias = (numbers(generator, dtype, *shape) for shape in ((70, K), (N, K), (N,)))
    weight, scales = ops.whole_numbers(full)
    whole = linear(*on_device(x, weight, bias, scales)).cpu()
    near = F.linear(x.double(), weight.double() * scales.double()[:, None], bias.double())
    torch.testing.assert_close(whole.double(), near, rtol=NEAR[dtype], atol=NEAR[dtype] * K**0.5)
    for rows in (1, 17, 65):
        assert torch.equal(linear(*on_device(x[-rows:], weight, bias, scales)).cpu(), whole[-rows:])
    for bad in ((x, weight), (x, weight, bias, scales[1:]), (x, full, bias, scales)):
        with pytest.raises(RuntimeError):
            linear(*on_device(*bad))


def test_products_of_any_shape():
    """Inputs of several dimensions, turned or empty; weights that are turned or a part."""
    generator = torch.Generator().manual_seed(0)
    x, weight = numbers(generator, torch.float32, 2, 5, 3, 12), numbers(generator, torch.float32, 14, 9)
    x, weight = on_device(x, weight)
    got, want = (f(x.transpose(0, 2), weight.t()[:, 1:13], None) for f in (linear, F.linear))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert linear(x[:0], weight.new_zeros(4, 12), None).shape == (0, 5, 3, 4)
    assert linear(x[0, 0, 0], weight.t()[:, 1:13], None).shape == (9,)


@each_dtype
@pytest.mark.parametrize("scaled", [False, True])
def test_products_of_one_input_are_those_of_each_weight(dtype, scaled):
    """A weight's columns in another's place; a part that is left out; other bits than alone."""
    generator = torch.Generator().manual_seed(3)
    x, *weights = (numbers(generator, dtype, n, 48) for n in (70, 65, 9, 140))
    scales = []
    if scaled:
        weights, scales = map(list, zip(*map(ops.whole_numbers, weights), strict=True))
    x, weights, scales = on_device(x), on_device(*weights), on_device(*scales)
    whole = linears(x[0], weights, scales, True)
    for got, weight, its in zip(whole.split([65, 9, 140], -1), weights, scales or [None] * 3, strict=True):
        assert torch.equal(got, linear(x[0], weight, None, its))
    for rows in (1, 33):
        assert torch.equal(linears(x[0][-rows:], weights, scales, True), whole[-rows:])
    if not scaled:  # nothing has to be exact: many rows by torch
        assert torch.equal(
            linears(x[0], weights, [], False), torch.cat([F.linear(x[0], w) for w in weights], -1)
        )
    for bad in ((x[0], [weights[0], weights[1][:, 1:]], []), (x[0], weights, scales[1:] or x)):
        with pytest.raises(RuntimeError):
            linears(*bad, True)


def test_products_refuse_what_does_not_fit():
    """Reading behind the end of a weight or a bias, or one type's bytes as another's."""
    x, weight = torch.zeros(3, 8), torch.zeros(5, 8)
    for bad in (
        (x, weight[:, :7], None),
        (x[:, :7], weight, None),
        (x, weight.bfloat16(), None),
        (x, weight, torch.zeros(4)),
    ):
        with pytest.raises(RuntimeError):
            linear(*on_device(*bad))


@each_dtype
@pytest.mark.parametrize("H", [1, 48, 2500])
def test_means_of_rows(H, dtype):
    """A block of the row that is left out, or what lies behind it."""
    x = numbers(torch.Generator().manual_seed(H), dtype, 3, 4, H)
    whole = mean(*on_device(x)).cpu()
    want = x.double().mean(-1, keepdim=True)
    torch.testing.assert_close(whole.double(), want, rtol=NEAR[dtype], atol=NEAR[dtype])
    assert torch.equal(mean(*on_device(x[1:, 2])).cpu(), whole[1:, 2])
    assert mean(*on_device(x[:0])).shape == (0, 4, 1)


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slipstream.kernels import triton as ours

def compiles(kernel, sizes, dtype, capability, **numbers):
    names, wide = kernel.arg_names, {"q", "k", "v", "x", "bias", "out"}
    kinds = dict.fromkeys(wide, "*" + dtype)
    kinds |= dict.fromkeys(("sums", "tops", "totals", "sinks"), "*fp32")
    kinds |= {"keys": "*i32", "scale": "fp32", "cap": "fp32"}
    kinds |= {"weights": ("*i8" if sizes.get("SCALED") else "*" + dtype,) * 3}
    kinds |= {"scales": ("*fp32",) * 3, "sizes": ("i32",) * 3, "strides": ("i32",) * 3}
    kinds = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in names}
    fixed = {(names.index(name),): value for name, value in sizes.items()}
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(ASTSource(kernel, kinds, fixed, {}), target=target, options=numbers)
    assert made.metadata.shared <= 99 * 1024  # of a program on the smallest of these GPUs

for capability, dtype, D, G, block in (
    (80, "bf16", 64, 3, 64), (80, "fp32", 128, 1, 32), (90, "bf16", 256, 71, 32)
):
    sizes = dict(D=D, DV=D, D2=D, DV2=D, G=G, TILE=ours.TILE, BLOCK=block, SPLIT=ours.SPLIT, CAPPED=G == 1)
    compiles(ours._attend, sizes, dtype, capability, num_stages=1)
for capability, dtype, M in ((80, "fp32", 1), *((90, "bf16", M) for M in (1, 32, 64, 512))):
    for scaled in (False, True):
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        rows, columns, block, stages, warps = ours._tile(M, 100 if M == 1 else 2**15, kind, scaled)
        sizes = dict(ROWS=rows, COLUMNS=columns, BLOCK=block, SCALED=scaled)
        sizes |= dict(EVEN=rows == 64, BIASED=rows == 16)
        compiles(ours._multiply, sizes, dtype, capability, num_stages=stages, num_warps=warps)
compiles(ours._join, dict(DV=80, DV2=128, SUNK=True), "bf16", 80)
compiles(ours._mean, dict(BLOCK=1024), "bf16", 80)
"""


def test_triton_compiles_them_for_gpus_that_are_not_here(tmp_path):
    """What the interpreter takes, and the compiler does not."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """On the CPU, targets take the kernels for GPUs."""
    if DEVICE.type == "cpu":
        for name in ("attention", "linear", "mean"):
            monkeypatch.setattr(ours, name, getattr(kernels_triton, name))
        monkeypatch.setattr(products, "linear", kernels_triton.linear)
        monkeypatch.setattr(ours, "called_directly", lambda *_: True)
        monkeypatch.setattr(products, "packs", lambda *_: False)
        monkeypatch.setattr(ops, "has_kernels", lambda device, dtype: dtype in ON_CUDA)


WHOLE = {  # vectors, so that no row's activations lie behind one, where some CPUs round otherwise
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("config", [MistralConfig(**WHOLE, sliding_window=8), LlamaConfig(**WHOLE)])
def test_a_target_is_exact_on_them(config, monkeypatch):
    """An operation of a layer, such as the mean in its norms, whose bits depend on the number of rows."""
    monkeypatch.setattr(alike, "ROWS", (1, 3, 33))
    dtype = torch.float32 if config.model_type == "mistral" else torch.bfloat16
    target = HFTarget(tiny.build(config).to(DEVICE, dtype), exact=True)
    assert target.decoder is not None
    assert isinstance(target.decoder._run.__self__, Layers)
    assert target.exactness == "bits"
    target.decoder = None  # Hugging Face's modules
    del target.exactness
    assert target.exactness == "bits"
