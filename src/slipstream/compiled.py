"""Compilation: a function of tensors as one graph for one row and one for more, with packed weights on the CPU."""

import os
from collections.abc import Callable
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
    made: Any = torch.compile(function, fullgraph=True, backend=_packing if device.type == "cpu" else "inductor")
    return made


def freed(x: Tensor, *dims: int) -> Tensor:
    """x itself, whose sizes along `dims` (default: the first two) are not to be compiled in."""
    for dim in dims or (0, 1):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def _packing(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor, with `packed_linear` for every linear layer."""
    for node in graph.graph.nodes:
        if node.target is F.linear:
            node.target = torch.ops.slipstream.packed_linear.default
    graph.recompile()
    return torch._dynamo.lookup_backend("inductor")(graph, inputs)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear from a packed copy of the weight, made at its first use and kept with it.

    For 8 to 26 rows plain weights take nearly twice as long (AVX2, fp32). A CPU without bf16 instructions multiplies bf16
    eight times slower than fp32, so weights are packed as fp32 there; one row still reads the plain ones, half the bytes.
    """
    widened = weight.dtype == torch.bfloat16 and not HAS_BF16
    if weight.dtype not in (torch.float32, torch.bfloat16) or (widened and x.numel() == x.shape[-1]):
        return F.linear(x, weight, bias)
    packed = getattr(weight, "packed", None)
    if packed is None:
        plain = weight.detach().float() if widened else weight.detach()
        packed = torch.ops.mkldnn._reorder_linear_weight(plain, PACKED_FOR)
        weight.packed = packed  # type: ignore[attr-defined]
    if not widened:
        return _onednn(x, packed, bias, "none", [], "")
    return _onednn(x.float(), packed, None if bias is None else bias.float(), "none", [], "").to(x.dtype)


_onednn = torch.ops.mkldnn._linear_pointwise.default
_library = torch.library.Library("slipstream", "DEF")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake(
    "slipstream::packed_linear", lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]), lib=_library
)
