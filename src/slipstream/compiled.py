"""Compilation: a function of tensors as one graph for one row and one for more, with packed weights on the CPU."""

import os
from collections import defaultdict
from collections.abc import Callable
from operator import getitem, iadd, imul, isub, itruediv, setitem
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from slipstream.files import cache_home

Function = TypeVar("Function", bound=Callable[..., Any])
GRAPHS = 64  # of one function in a process: one row or more, one text or more, taps, every target and drafter
PACKED_FOR = 8  # rows: oneDNN's layout for a few serves one as well as many
HAS_ONEDNN = torch.backends.mkldnn.is_available()
_product: Any = torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None
HAS_BF16 = HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def compiled(function: Function, device: torch.device) -> Function:
    """`function` compiled for all sizes of the dimensions that were `freed`; what was made is kept across processes.

    Methods of modules of one class share their graphs. On the CPU linear layers read a packed copy of their weights,
    which later changes of the weights do not reach. The two settings of the compiler are the whole process's.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # one graph for all layers, whatever their index
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
    made: Any = torch.compile(function, backend=_packing if device.type == "cpu" and HAS_ONEDNN else "inductor")
    return made


def freed(x: Tensor, *dims: int) -> Tensor:
    """x itself, whose sizes along `dims` (default: the first two) are not to be compiled in."""
    if not hasattr(x, "_dynamo_weak_dynamic_indices"):  # masks and angles come by once for every layer
        torch._dynamo.maybe_mark_dynamic(x, dims or (0, 1))
    return x


def _packing(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor, with one `packed_linear` for all linear layers that read the same."""
    graph, readers = module.graph, defaultdict[fx.Node, list[fx.Node]](list)
    for node in graph.nodes:
        if node.target is F.linear and len(node.args) > 1 and not node.kwargs and all(map(_fixed, node.args[1:])):
            readers[node.args[0]].append(node)
    for nodes in readers.values():
        x: Any = nodes[0].args[0]  # not the key, which is gone where it was a linear layer itself
        for group in [[node] for node in nodes] if any(map(_in_place, x.users)) else [nodes]:
            _merge(graph, group)
    module.recompile()
    return torch._dynamo.lookup_backend("inductor")(module, inputs)


def _fixed(argument: Any) -> bool:
    """A weight or bias as it is, not one that is computed anew in each call; or none."""
    return argument is None or argument.op in ("placeholder", "get_attr")


def _in_place(node: fx.Node) -> bool:
    """Whether what a linear layer reads is changed, so that it matters when it is read."""
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or node.target in (iadd, imul, isub, itruediv, setitem)


def _merge(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    x: Any = nodes[0].args[0]
    weights: list[Any] = [node.args[1] for node in nodes]
    biases: list[Any] = [node.args[2] if len(node.args) > 2 else None for node in nodes]
    sizes = [len(weight.meta["example_value"]) for weight in weights]
    with graph.inserting_before(nodes[0]):
        out = graph.call_function(torch.ops.slipstream.packed_linear.default, (x, weights, biases))
        parts = graph.call_function(torch.split, (out, sizes, -1))
        for i, node in enumerate(nodes):
            node.replace_all_uses_with(graph.call_function(getitem, (parts, i)))
    for node in nodes:
        graph.erase_node(node)


def _packed_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """Linear layers of one input, side by side, from a packed copy of their weights that is made at the first use.

    For a few rows MKL takes nearly twice as long with plain weights (docs/log.md). A CPU without bf16 instructions is many
    times slower in bf16 than in fp32, so weights are packed as fp32 there; one row reads the plain ones, half the bytes.
    """
    dtype = weights[0].dtype
    widened = dtype == torch.bfloat16 and not HAS_BF16
    if dtype not in (torch.float32, torch.bfloat16) or (widened and x.numel() == x.shape[-1]):
        return torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], -1)
    weight, bias = _kept(weights, biases, torch.float32 if widened else dtype)
    if widened:
        return _product(x.float(), weight, bias, "none", [], "").to(dtype)
    return _product(x, weight, bias, "none", [], "")


def _kept(weights: list[Tensor], biases: list[Tensor | None], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The packed copy, which lives with the first of the weights, and with it the others, so that their ids stay theirs."""
    copies = vars(weights[0]).setdefault("packed", {})
    key = tuple(map(id, weights)) + tuple(map(id, biases))
    if key not in copies:
        copies[key] = (_pack(weights, biases, dtype), weights[1:], biases)
    packed: tuple[Tensor, Tensor | None] = copies[key][0]
    return packed


def _pack(weights: list[Tensor], biases: list[Tensor | None], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """All weights in one, in oneDNN's own layout, and all biases in one."""
    plain, bias = torch.cat([weight.detach() for weight in weights]).to(dtype), None
    if any(b is not None for b in biases):
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]).to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(plain, PACKED_FOR), bias


def _shape(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(len(weight) for weight in weights))


_library = torch.library.Library("slipstream", "DEF")
_library.define("packed_linear(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("slipstream::packed_linear", _shape, lib=_library)
