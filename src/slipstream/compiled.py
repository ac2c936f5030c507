"""Compilation: a function of tensors as one graph for one row and one for more, with packed weights on the
CPU."""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem, iadd, imul, isub, itruediv, setitem
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from slipstream.files import cache_home

Compiler = Callable[[fx.GraphModule, list[Any]], Any]
Function = TypeVar("Function", bound=Callable[..., Any])
GRAPHS = 64  # of one function in a process: one row or more, one text or more, taps, every target and drafter
PACKED_FOR = 8  # rows: oneDNN's layout for a few serves one as well as many
HAS_ONEDNN = torch.backends.mkldnn.is_available()
HAS_BF16 = HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def compiled(function: Function, device: torch.device) -> Function:
    """`function` compiled for all sizes of the dimensions that were `freed`; what was made is kept across
    processes.

    Methods of modules of one class share their graphs. On the CPU linear layers read a packed copy of their
    weights, which later changes of the weights do not reach. The two settings of the compiler are the whole
    process's.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.allow_unspec_int_on_nn_module = (
        True  # one graph for all layers, whatever their index
    )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
    made: Any = torch.compile(
        function, backend=packing if device.type == "cpu" and HAS_ONEDNN else "inductor"
    )
    return made


def freed(x: Tensor, *dims: int) -> Tensor:
    """x itself, whose sizes along `dims` (default: the first two) are not to be compiled in."""
    if not hasattr(x, "_dynamo_weak_dynamic_indices"):  # masks and angles come by once for every layer
        torch._dynamo.maybe_mark_dynamic(x, dims or (0, 1))
    return x


def _inductor(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor, which is not to look at the strides of packed weights: there are none."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.lowering import lowerings, register_lowering

    if (op := torch.ops.slipstream.packed_linear.default) not in lowerings:
        register_lowering(op, type_promotion_kind=None)(_lowered)
    return compile_fx(module, inputs, config_patches={"size_asserts": False})


def packing(module: fx.GraphModule, inputs: list[Any], then: Compiler = _inductor) -> Any:
    """Another compiler behind this: linear layers that read the same become one product with packed weights.

    Those are inputs of the graph beside the plain ones, so that layers still share it.
    """
    graph, readers = fx.Graph(), defaultdict[fx.Node, list[fx.Node]](list)
    graph.output(
        graph.graph_copy(module.graph, {})
    )  # the tracer goes on with its own, whose inputs are what it passes
    for node in graph.nodes:
        if (
            node.target is F.linear
            and len(node.args) > 1
            and not node.kwargs
            and all(map(_fixed, node.args[1:]))
        ):
            readers[node.args[0]].append(node)
    packs: list[_Packed] = []
    for nodes in readers.values():
        x: Any = nodes[0].args[0]  # not the key, which is gone where it was a linear layer itself
        for group in [[node] for node in nodes] if any(map(_in_place, x.users)) else [nodes]:
            if (dtype := _dtype_for(group[0])) is not None:
                packs.append(_merge(graph, group, dtype))
    added = [node.meta["example_value"] for node in graph.find_nodes(op="placeholder")][len(inputs) :]
    made = then(fx.GraphModule(module, graph), [*inputs, *added])

    def run(*args: Any) -> Any:
        return made(*args, *(part for packed in packs for part in packed(args)))

    return run if packs else made


def _fixed(argument: Any) -> bool:
    """A weight or bias as it is, not one that is computed anew in each call; or none."""
    return argument is None or argument.op == "placeholder"


def _in_place(node: fx.Node) -> bool:
    """Whether what a linear layer reads is changed, so that it matters when it is read."""
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or node.target in (iadd, imul, isub, itruediv, setitem)


def _dtype_for(linear: fx.Node) -> torch.dtype | None:
    """What its weights are packed as, where that is quicker.

    For a few rows MKL takes nearly twice as long with plain weights (docs/log.md). A CPU without bf16
    instructions is many times slower in bf16 than in fp32, so weights are packed as fp32 there; one row reads
    the plain ones, half the bytes.
    """
    x, weight = (node.meta["example_value"] for node in linear.all_input_nodes[:2])
    if weight.dtype == torch.bfloat16 and not HAS_BF16:
        one = all(isinstance(n, int) and n == 1 for n in x.shape[:-1])
        return None if one else torch.float32
    return weight.dtype if weight.dtype in (torch.float32, torch.bfloat16) else None


def _merge(graph: fx.Graph, nodes: list[fx.Node], dtype: torch.dtype) -> "_Packed":
    """One product in place of `nodes`, which reads packed weights that are new inputs of the graph."""
    x: Any = nodes[0].args[0]
    weights: list[Any] = [node.args[1] for node in nodes]
    biases: list[Any] = [node.args[2] if len(node.args) > 2 else None for node in nodes]
    sizes = [len(weight.meta["example_value"]) for weight in weights]
    plain = weights[0].meta["example_value"]
    places = graph.find_nodes(op="placeholder")
    packed = _Packed(
        [places.index(w) for w in weights], [None if b is None else places.index(b) for b in biases], dtype
    )
    with graph.inserting_after(places[-1]):
        weight, bias = graph.placeholder(f"packed_{len(places)}"), None
        weight.meta["example_value"] = plain.new_empty(sum(sizes), plain.shape[1], dtype=dtype)
    if any(b is not None for b in biases):
        with graph.inserting_after(weight):
            bias = graph.placeholder(f"packed_{len(places)}_bias")
            bias.meta["example_value"] = plain.new_empty(sum(sizes), dtype=dtype)
    with graph.inserting_before(nodes[0]):
        x = x if dtype == plain.dtype else graph.call_method("to", (x, dtype))
        out = graph.call_function(torch.ops.slipstream.packed_linear.default, (x, weight, bias))
        out = out if dtype == plain.dtype else graph.call_method("to", (out, plain.dtype))
        parts = graph.call_function(torch.split, (out, sizes, -1))
        for i, node in enumerate(nodes):
            part = graph.call_function(getitem, (parts, i))
            part.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)
    return packed


@dataclass(frozen=True)
class _Packed:
    """Where the arguments of a graph hold the weights and biases of linear layers that are packed as one."""

    weights: list[int]
    biases: list[int | None]
    dtype: torch.dtype

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """The packed weight, and the bias if any: made at the first use, they live with the first of the
        weights, and with them the others, so that their ids stay theirs."""
        weights = [args[i] for i in self.weights]
        biases = [None if i is None else args[i] for i in self.biases]
        copies = vars(weights[0]).setdefault("packed", {})
        key = (*map(id, weights), *map(id, biases))
        if key not in copies:
            copies[key] = (_pack(weights, biases, self.dtype), weights[1:], biases)
        packed: list[Tensor] = copies[key][0]
        return packed


def _pack(weights: list[Tensor], biases: list[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
    """All weights in one, in oneDNN's own layout, and all biases in one."""
    plain = torch.cat([weight.detach() for weight in weights]).to(dtype)
    packed = [torch.ops.mkldnn._reorder_linear_weight(plain, PACKED_FOR)]
    if any(b is not None for b in biases):
        packed.append(
            torch.cat(
                [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
            ).to(dtype)
        )
    return packed


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _lowered(x: Any, weight: Any, bias: Any) -> Any:
    """The call of oneDNN itself, without Python; inductor's own way to it takes weights for constants."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.mkldnn_ir import LinearUnary

    return TensorBox.create(LinearUnary.create(x, weight, bias, "none", [], ""))


_library = torch.library.Library("slipstream", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _packed_linear, "MkldnnCPU")
torch.library.register_fake("slipstream::packed_linear", _shape, lib=_library)
