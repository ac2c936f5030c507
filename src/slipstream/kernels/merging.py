"""On a GPU products of one input become one launch: a pass before Inductor.

A product of few rows reads its weights, and most of its launch's beginning and end reads none.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.kernels import HALVES
from slipstream.kernels.ops import has_kernels
from slipstream.kernels.weight_packing import in_place

OURS = "slipstream.linear_cuda"
MOST = 4  # weights of one launch


def merges(device: torch.device) -> bool:
    """Whether there is our kernel of several weights, whose programs take 99 KiB: on NVIDIA's GPUs since
    Ampere, with Triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and has_kernels(device, torch.bfloat16)


def merging(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor behind `merge`, where nobody differentiates."""
    from torch._inductor.compile_fx import compile_fx

    if not torch.is_grad_enabled():
        merge(module.graph)
        module.recompile()
    return compile_fx(module, inputs)


def merge(graph: fx.Graph) -> None:
    """Rewrite the products of one input without biases, by torch or by our kernel for GPUs, as one."""
    readers = defaultdict[Any, list[fx.Node]](list)
    for node in graph.nodes:
        if _is_product(node) and not any(map(in_place, node.args[0].users)):
            readers[node.args[0], node.target, len(_weights(node))].append(node)
    for nodes in readers.values():
        for group in (nodes[i : i + MOST] for i in range(0, len(nodes), MOST)):
            if len(group) > 1:
                _merge(graph, group)


def _is_product(node: fx.Node) -> bool:
    """Whether a node is a product in halves, of weights that are given as they are and no bias."""
    ours = str(node.target).startswith(OURS)
    if not (ours or node.target is F.linear) or node.kwargs:
        return False
    x, weights = node.args[0], _weights(node)
    values = [each.meta["example_value"] for each in (x, *weights)]
    given = all(each.op == "placeholder" for each in weights)
    plain = values[0].dtype in HALVES and not any(map(is_traceable_wrapper_subclass, values))
    return given and plain and (len(node.args) < 3 or node.args[2] is None)


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
