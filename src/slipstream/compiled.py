"""Compilation: a function of tensors as one graph for one row and one for more, with packed weights on the CPU."""

import os
from collections import defaultdict
from collections.abc import Callable
from operator import getitem
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from slipstream.files import cache_home

Function = TypeVar("Function", bound=Callable[..., Any])
GRAPHS = 64  # of one function: one row or more, one text or more, probes, and every drafter of a run
PACKED_FOR = 8  # rows: oneDNN's layout for a few serves one as well as many
HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def compiled(function: Function, device: torch.device) -> Function:
    """`function` as one graph for all sizes of the dimensions that were `freed`; it is kept across processes.

    Methods of modules of one class share their graphs. On the CPU, products with weights read a packed copy of them,
    which later changes of the weights do not reach.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # one graph for all layers, whatever their index
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
    made: Any = torch.compile(function, backend=_packing if device.type == "cpu" else "inductor")
    return made


def freed(x: Tensor, *dims: int) -> Tensor:
    """x itself, whose sizes along `dims` (default: the first two) are not to be compiled in."""
    for dim in dims or (0, 1):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def _packing(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor, with one `packed_linear` for all linear layers that read the same."""
    graph, readers = module.graph, defaultdict[fx.Node, list[fx.Node]](list)
    for node in graph.nodes:
        if node.target is F.linear:
            readers[node.args[0]].append(node)
    for x, nodes in readers.items():
        weights = [node.args[1] for node in nodes]
        biases = [node.args[2] if len(node.args) > 2 else node.kwargs.get("bias") for node in nodes]
        with graph.inserting_before(nodes[0]):
            out = graph.call_function(torch.ops.slipstream.packed_linear.default, (x, weights, biases))
            parts = graph.call_function(torch.split, (out, [len(w.meta["example_value"]) for w in weights], -1))
            for i, node in enumerate(nodes):
                node.replace_all_uses_with(graph.call_function(getitem, (parts, i)))
        for node in nodes:
            graph.erase_node(node)
    module.recompile()
    return torch._dynamo.lookup_backend("inductor")(module, inputs)


def _packed_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """Linear layers of one input, side by side, from a packed copy of their weights that is made at the first use.

    For 8 to 26 rows plain weights take nearly twice as long (AVX2, fp32). A CPU without bf16 instructions multiplies bf16
    eight times slower than fp32, so weights are packed as fp32 there; one row still reads the plain ones, half the bytes.
    """
    kept, dtype = weights[0], weights[0].dtype
    widened = dtype == torch.bfloat16 and not HAS_BF16
    if dtype not in (torch.float32, torch.bfloat16) or (widened and x.numel() == x.shape[-1]):
        return torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], -1)
    packed = getattr(kept, "packed", {}).get(len(weights))
    if packed is None:
        packed = _pack(weights, biases, torch.float32 if widened else dtype)
        kept.packed = {**getattr(kept, "packed", {}), len(weights): packed}  # type: ignore[attr-defined]
    if widened:
        return _onednn(x.float(), *packed, "none", [], "").to(dtype)
    return _onednn(x, *packed, "none", [], "")


def _pack(weights: list[Tensor], biases: list[Tensor | None], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """All weights in one, in oneDNN's own layout, and all biases in one."""
    plain, bias = torch.cat([weight.detach() for weight in weights]).to(dtype), None
    if any(b is not None for b in biases):
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]).to(dtype)
    return torch.ops.mkldnn._reorder_linear_weight(plain, PACKED_FOR), bias


def _shape(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(len(weight) for weight in weights))


_onednn = torch.ops.mkldnn._linear_pointwise.default
_library = torch.library.Library("slipstream", "DEF")
_library.define("packed_linear(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("slipstream::packed_linear", _shape, lib=_library)
