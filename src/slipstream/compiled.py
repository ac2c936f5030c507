"""Compilation: a function of tensors as one graph, for one row and for any number of them."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.files import cache_home

F = TypeVar("F", bound=Callable[..., Any])
GRAPHS = 64  # of one function: one row or more, one text or more, probes, and every drafter of a run


def compiled(function: F, device: torch.device) -> F:
    """`function` as one graph for all sizes of the dimensions that were `freed`; it is kept across processes.

    On the CPU the weights are packed for its matrix kernels: a copy of them, which later changes do not reach.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))
    options: dict[str, Any] = {"freezing": True} if device.type == "cpu" else {}
    made: Any = torch.compile(function, fullgraph=True, options=options)
    return made


def freed(x: Tensor, *dims: int) -> Tensor:
    """x itself, whose sizes along `dims` (default: the first two) are not to be compiled in."""
    for dim in dims or (0, 1):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x
