"""Compilation of functions of tensors into graphs of free sizes."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.files import cache_home
from slipstream.packing import HAS_ONEDNN, packing

Function = TypeVar("Function", bound=Callable[..., Any])
GRAPHS = 64  # Dynamo's recompile limit: one graph per combination of rows, batch, taps, target and drafter


def compiled(function: Function, device: torch.device) -> Function:
    """`function` compiled for all sizes of `freed` dimensions. Graphs are cached across processes.

    Modules of one class share their graphs. On the CPU linear layers read a packed copy of their weights,
    which does not follow later changes of the weights. The process gets two other settings of Dynamo's.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # layers of any index share a graph
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
    backend = packing if device.type == "cpu" and HAS_ONEDNN else "inductor"
    graphs: Any = torch.compile(function, backend=backend)
    return graphs


def freed(x: Tensor, *dims: int) -> Tensor:
    """x itself, marked so that graphs take any size of its `dims` (default: the first two)."""
    if not hasattr(x, "_dynamo_weak_dynamic_indices"):  # every layer gets the same masks and angles
        torch._dynamo.maybe_mark_dynamic(x, dims or (0, 1))
    return x
