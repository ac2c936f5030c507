"""Compilation of functions of tensors into graphs of free sizes. On a GPU products of one input are one
launch: a product of few rows reads its weights, and most of its launch's beginning and end reads none."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import getitem, iadd, imul, isub, itruediv, setitem
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.files import cache_home
from slipstream.kernels import HALVES
from slipstream.kernels.ops import has_kernels

Function = TypeVar("Function", bound=Callable[..., Any])
CACHE = "TORCHINDUCTOR_CACHE_DIR"
GRAPHS = 64  # Dynamo's recompile limit: one graph per combination of rows, batch, taps, target and drafter
OURS = "slipstream.linear_cuda"
MOST = 4  # weights of one launch


def compiled(function: Function, device: torch.device) -> Function:
    """`function` compiled for all sizes of `freed` dimensions. Graphs are cached across processes, and
    modules of one class share them. The process gets two other settings of Dynamo's."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # and Dynamo: a second

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # layers of any index share a graph
    if os.environ.get(CACHE) in (None, default_cache_dir()):  # which importing transformers sets
        os.environ[CACHE] = str(cache_home() / "compiled")
    graphs: Any = torch.compile(function, backend=merging if merges(device) else inductor)
    return graphs


def freed(x: Tensor, *dims: int) -> Tensor:
    """x itself, marked so that graphs take any size of its `dims` (default: the first two)."""
    # Nobody compiles before Dynamo is loaded, and every layer gets the same masks and angles.
    if "torch._dynamo" in sys.modules and not hasattr(x, "_dynamo_weak_dynamic_indices"):
        torch._dynamo.maybe_mark_dynamic(x, dims or (0, 1))
    return x


def freed_view(view: Any) -> Any:
    """A cache's `LayerView`, whose tensors graphs take for any number of texts, rows and slots."""
    keys, values, slots, used = view
    return type(view)(freed(keys, 0, 2), freed(values, 0, 2), freed(slots), freed(used, 0))


def merges(device: torch.device) -> bool:
    """Whether there is our kernel of several weights, whose programs take 99 KiB: on NVIDIA's GPUs since
    Ampere, with Triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and has_kernels(device, torch.bfloat16)


def inductor(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor, which is imported when the first graph is compiled."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs)


def merging(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor after `merge`, where nobody differentiates."""
    if not torch.is_grad_enabled():
        merge(module.graph)
        module.recompile()
    return inductor(module, inputs)


def merge(graph: fx.Graph) -> None:
    """Rewrite the products of one input without biases, by torch or by our kernel for GPUs, as one."""
    readers = defaultdict[Any, list[fx.Node]](list)
    for node in graph.nodes:
        if _is_product(node) and not any(map(_in_place, node.args[0].users)):
            readers[node.args[0], node.target, len(_weights(node))].append(node)
    for nodes in readers.values():
        for group in (nodes[i : i + MOST] for i in range(0, len(nodes), MOST)):
            if len(group) > 1:
                _merge(graph, group)


def _in_place(node: fx.Node) -> bool:
    """Whether a node changes what it reads, so that the order of reads matters."""
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or node.target in (iadd, imul, isub, itruediv, setitem)


def _is_product(node: fx.Node) -> bool:
    """Whether a node is a product in halves, of weights that are inputs of the graph, and without a bias."""
    ours = str(node.target).startswith(OURS)
    if not (ours or node.target is F.linear) or node.kwargs:
        return False
    x, weights = node.args[0], _weights(node)
    values = [operand.meta["example_value"] for operand in (x, *weights)]
    are_inputs = all(weight.op == "placeholder" for weight in weights)
    plain = values[0].dtype in HALVES and not any(map(is_traceable_wrapper_subclass, values))
    return are_inputs and plain and (len(node.args) < 3 or node.args[2] is None)


def _weights(node: fx.Node) -> list[Any]:
    """A product's weight and its scales, if it has some."""
    return [node.args[1], *(scales for scales in node.args[3:] if scales is not None)]


def _merge(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    weights, *scales = map(list, zip(*map(_weights, nodes), strict=True))
    exact = nodes[0].target is not F.linear
    with graph.inserting_before(nodes[0]):
        op = torch.ops.slipstream.linears_cuda.default
        out = graph.call_function(op, (nodes[0].args[0], weights, *(scales or [[]]), exact))
        sizes = [len(weight.meta["example_value"]) for weight in weights]
        parts = graph.call_function(torch.split, (out, sizes, -1))
        for i, node in enumerate(nodes):
            part = graph.call_function(getitem, (parts, i))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)
