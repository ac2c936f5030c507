"""Packed weights on the CPU: a pass before Inductor that lets linear layers read them.

The layout is that of our tiles where their kernel runs, and oneDNN's elsewhere.
"""

import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import getitem, iadd, imul, is_, isub, itruediv, setitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from slipstream.kernels import ops as kernels
from slipstream.kernels.build import HAS_AMX

Compiler = Callable[[fx.GraphModule, list[Any]], Any]
EIGHT = "of_8_bits"  # marks a weight that was stored so: a multiple of whole numbers in each row
PACKED_FOR = 8  # rows; oneDNN's layout for a few rows serves one row and many as well
HAS_ONEDNN = torch.backends.mkldnn.is_available()
X86_BF16 = torch.cpu._is_avx512_bf16_supported() or HAS_AMX
HAS_BF16 = (
    HAS_ONEDNN
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # with AVX-512 alone oneDNN emulates it, 3 times slower
    and (X86_BF16 or platform.machine() not in ("x86_64", "AMD64"))
)


def _inductor(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor without its check of strides: packed weights have none."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.lowering import lowerings, register_lowering

    if (op := torch.ops.slipstream.packed_linear.default) not in lowerings:
        register_lowering(op, type_promotion_kind=None)(_lowered)
    return compile_fx(module, inputs, config_patches={"size_asserts": False})


def packing(module: fx.GraphModule, inputs: list[Any], then: Compiler = _inductor) -> Any:
    """A pass before the compiler `then`: linear layers of one input become one product with packed weights.

    The packed weights are inputs of the graph, so that layers still share it.
    """
    graph = fx.Graph()
    readers = defaultdict[fx.Node, list[fx.Node]](list)
    graph.output(graph.graph_copy(module.graph, {}))  # the tracer goes on with its own graph
    for node in graph.nodes:
        fixed = (
            part is None or part.op == "placeholder" for part in node.args[1:]
        )  # not computed in each call
        if node.target is F.linear and len(node.args) > 1 and not node.kwargs and all(fixed):
            readers[node.args[0]].append(node)
    packs: list[partial[list[Tensor]]] = []
    for nodes in readers.values():
        x: Any = nodes[0].args[0]  # not the key, which is gone if it was a linear layer itself
        for group in [[node] for node in nodes] if any(map(in_place, x.users)) else [nodes]:
            if (dtype := _dtype_for(group[0])) is not None:
                packs.append(_merge(graph, group, dtype))
    added = [node.meta["example_value"] for node in graph.find_nodes(op="placeholder")][len(inputs) :]
    compiled_graph = then(fx.GraphModule(module, graph), [*inputs, *added])

    at = sorted({i for packed in packs for i in packed.args[0] if i is not None})

    def run(*args: Any) -> Any:
        first, *others = (args[i] for i in at)
        known: dict[Any, tuple[list[Any], list[Tensor]]] = vars(first).setdefault("packed_for", {})
        found = known.get(run)
        if found is None or not all(map(is_, found[0], others)):
            found = known[run] = others, [part for packed in packs for part in packed(args)]
        return compiled_graph(*args, *found[1])

    return run if packs else compiled_graph


def in_place(node: Any) -> bool:
    """Whether a node changes what it reads, so that the order of reads matters."""
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or node.target in (iadd, imul, isub, itruediv, setitem)


def _dtype_for(linear: fx.Node) -> torch.dtype | None:
    """The type in which a layer's weights are packed; None where plain weights are faster.

    For a few rows MKL takes nearly twice as long with plain weights (docs/log.md). A CPU without bf16
    instructions is many times slower in bf16 than in fp32. There weights are packed as fp32, but a single row
    reads the plain ones, which have half the bytes.
    """
    x, weight = (node.meta["example_value"] for node in linear.all_input_nodes[:2])
    if weight.dtype == torch.bfloat16 and not HAS_BF16:
        one = all(isinstance(n, int) and n == 1 for n in x.shape[:-1])
        return None if one else torch.float32
    return weight.dtype if weight.dtype in (torch.float32, torch.bfloat16) else None


def _merge(graph: fx.Graph, nodes: list[fx.Node], dtype: torch.dtype) -> partial[list[Tensor]]:
    """Replace `nodes` by one product, which reads packed weights that are new inputs of the graph. Returns a
    function from the graph's arguments to these inputs."""
    x: Any = nodes[0].args[0]
    weights: list[Any] = [node.args[1] for node in nodes]
    biases: list[Any] = [node.args[2] if len(node.args) > 2 else None for node in nodes]
    sizes = [len(weight.meta["example_value"]) for weight in weights]
    plain, shape = weights[0].meta["example_value"], x.meta["example_value"].shape
    places = graph.find_nodes(op="placeholder")
    at = [None if part is None else places.index(part) for part in weights + biases]
    with graph.inserting_after(places[-1]):
        weight, bias = graph.placeholder(f"packed_{len(places)}"), None
        tiled, size = kernels.has_tiles(dtype), (sum(sizes), int(plain.shape[1]))
        layout = kernels.tiles_shape(size, dtype) if tiled else size
        weight.meta["example_value"] = plain.new_empty(layout, dtype=dtype)
    if any(b is not None for b in biases):
        with graph.inserting_after(weight):
            bias = graph.placeholder(f"packed_{len(places)}_bias")
            bias.meta["example_value"] = plain.new_empty(sum(sizes), dtype=dtype)
    with graph.inserting_before(nodes[0]):
        x = x if dtype == plain.dtype else graph.call_method("to", (x, dtype))
        one = not tiled and all(isinstance(n, int) and n == 1 for n in shape[:-1])  # see `_onednn_linear`
        if one:
            x = graph.call_function(torch.cat, ((x, x), -2))
        out = graph.call_function(torch.ops.slipstream.packed_linear.default, (x, weight, bias, sum(sizes)))
        out = out if dtype == plain.dtype else graph.call_method("to", (out, plain.dtype))
        out = graph.call_function(torch.narrow, (out, -2, 0, 1)) if one else out
        parts = graph.call_function(torch.split, (out, sizes, -1))
        for i, node in enumerate(nodes):
            part = graph.call_function(getitem, (parts, i))
            part.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)
    return partial(_packed, at, dtype)


def _packed(at: list[int | None], dtype: torch.dtype, args: Sequence[Any]) -> list[Tensor]:
    """The weights at positions `at` of the arguments, packed as one; if any, the biases behind them as one.

    They are made at the first use and stored on the first weight. The entry holds the other parts, so that no
    other tensor gets their ids.
    """
    parts: list[Any] = [None if i is None else args[i] for i in at]
    weights, biases = parts[: len(at) // 2], parts[len(at) // 2 :]
    copies: dict[Any, tuple[list[Tensor], Any]] = vars(weights[0]).setdefault("packed", {})
    key = tuple(map(id, parts))
    if key not in copies:
        packed = [packed_weight(torch.cat([weight.detach() for weight in weights]).to(dtype))]
        if any(b is not None for b in biases):
            pairs = zip(weights, biases, strict=True)
            packed.append(torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs]).to(dtype))
        copies[key] = (packed, parts[1:])
    return copies[key][0]


def packed_weight(weight: Tensor) -> Tensor:
    """A weight [N, K] as `packed_linear` reads it: in tiles, where our kernel for them runs, else in oneDNN's
    layout."""
    if kernels.has_tiles(weight.dtype):
        return kernels.tiles(weight)
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


def _lowered(x: Any, weight: Any, bias: Any, N: int) -> Any:
    """A direct call of oneDNN, or of our kernel for tiles. Inductor's own lowering of oneDNN's product treats
    weights as constants."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.mkldnn_ir import LinearUnary

    if len(weight.get_size()) > 2:
        op = torch.ops.slipstream.packed_linear.default
        return fallback_handler(op, add_to_fallback_set=False)(x, weight, bias, N)
    return TensorBox.create(LinearUnary.create(x, weight, bias, "none", [], ""))


_library = torch.library.Library("slipstream", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int N) -> Tensor")
_library.impl("packed_linear", _onednn_linear, "MkldnnCPU")
torch.library.register_fake("slipstream::packed_linear", _shape, lib=_library)
