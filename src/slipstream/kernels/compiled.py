"""Compilation of functions of tensors into graphs of free sizes."""

import os
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from inspect import signature
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.files import cache_home
from slipstream.kernels.merging import merges, merging
from slipstream.kernels.weight_packing import HAS_ONEDNN, packing

Function = TypeVar("Function", bound=Callable[..., Any])
Backend = Callable[..., Any]
CACHE = "TORCHINDUCTOR_CACHE_DIR"
GRAPHS = 64  # Dynamo's recompile limit: one graph per combination of rows, batch, taps, target and drafter


def compiled(
    function: Function, device: torch.device, backend: Backend | None = None, whole: bool = False
) -> Function:
    """`function` compiled for all sizes of `freed` dimensions. Graphs are cached across processes.

    Modules of one class share their graphs. On the CPU `F.linear` reads a packed copy of its weights, which
    does not follow later changes of the weights. The process gets two other settings of Dynamo's. On a
    GPU, and on a CPU without oneDNN, both arguments below are ignored.

    Args:
        backend: for a function whose modules nobody changes, `backend_for` these. Dynamo then looks at
            tensors alone before each call, in a third of the time.
        whole: a method gets code of its own for each backend. If no single graph can hold it, it raises an
            error: its parts would be compiled apart, and one of them may be called with several modules.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # and Dynamo: a second

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # layers of any index share a graph
    if os.environ.get(CACHE) in (None, default_cache_dir()):  # which importing transformers sets
        os.environ[CACHE] = str(cache_home() / "compiled")
    if device.type != "cpu" or not HAS_ONEDNN:
        graphs: Any = torch.compile(function, backend=merging if merges(device) else "inductor")
    elif backend is None:
        graphs = torch.compile(function, backend=packing)
    else:
        method: Any = function
        plain = MethodType(_copy(method.__func__, backend), method.__self__) if whole else function
        options: Any = {"guard_filter_fn": _of_inputs}
        graphs = torch.compile(plain, backend=backend, fullgraph=whole, options=options)
    return graphs


@cache
def _copy(function: FunctionType, backend: Backend) -> FunctionType:
    """The function, with other code of the same words. Dynamo keeps graphs by code, and has no more than
    `GRAPHS` of one; to say why it makes another one it evaluates the guards of all, and fails in those of
    targets that have not what they look at."""
    return _with_code(function, function.__code__.replace())


def _with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """A function that differs in its code alone."""
    made = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def backend_for(*modules: nn.Module) -> Backend:
    """The backend of modules of one kind. Dynamo gives no function a graph of another backend."""
    return _backend_of(tuple(map(_kind_of, modules)))


@cache
def _backend_of(kind: Hashable) -> Backend:
    return partial(packing)


def graph_of(method: Any, backend: Backend, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function that Dynamo runs in the place of a module's method for these arguments, without a check.

    None: there is none, parts of it are not compiled, or this PyTorch does not list what Dynamo made.
    """
    entries = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    if entries is None or not isinstance(method, MethodType):
        return None
    plain: Any = method.__func__
    given = _signature(plain).bind(method.__self__, *args, **kwargs)
    given.apply_defaults()
    known = _graphs.setdefault((plain.__code__, backend), [])
    for i, (guards, graph) in enumerate(known):
        if guards.check(given.arguments):
            known.insert(0, known.pop(i))  # the next call is likely to be like this one
            return graph
    for entry in entries(plain.__code__):
        whole = not any(name.startswith("__resume") for name in entry.code.co_names)
        mine = getattr(entry.backend, "compiler_fn", None) is backend
        if whole and mine and entry.guard_manager.check(given.arguments):
            known.insert(0, (entry.guard_manager, _with_code(plain, entry.code)))
            return known[0][1]
    return None


# What `graph_of` found, of each code and backend: Dynamo makes its list anew for whoever asks.
_graphs: dict[tuple[CodeType, Backend], list[tuple[Any, FunctionType]]] = {}
_signature = cache(signature)


def _of_inputs(guards: Sequence[Any]) -> list[bool]:
    """Which guards are kept: not those of modules, which their kind answers for, nor of global names."""
    return [not (guard.is_global or guard.orig_guard.source.is_unspecialized_nn_module()) for guard in guards]


# Of a module, but not given: a layer's number among its like, packed copies, and what PyTorch keeps there.
LEFT_OUT = {"layer_idx", "layer_id", "held", *vars(nn.Module())}


def _kind_of(module: nn.Module) -> Hashable:
    """What a graph takes as given from a module and its parts. Tensors are inputs of the graph, of which only
    shape and dtype are given. A layer's number is left out: in a graph it only names the cache's layer."""
    found: list[Hashable] = []
    for name, part in module.named_modules():
        found.append((name, type(part), part.training))
        tensors = [*part._parameters.items(), *part._buffers.items()]
        found += [(key, tuple(x.shape), x.dtype) for key, x in tensors if x is not None]
        found += [(key, _fixed(value)) for key, value in vars(part).items() if key not in LEFT_OUT]
        if name:  # a module's own hooks stand around its `forward`
            found += [*part._forward_pre_hooks, *part._forward_hooks]
    return tuple(found)


def _fixed(value: Any) -> Hashable:
    if isinstance(value, (bool, int, float, str, torch.dtype, type(None))):
        return value
    if isinstance(value, dict):  # such as the factors of PEFT's adapters
        return tuple((key, _fixed(each)) for key, each in value.items())
    if isinstance(value, (list, tuple, set)):
        return tuple(map(_fixed, value))
    if hasattr(value, "to_json_string"):  # a configuration
        return value.to_json_string(), value._attn_implementation
    if is_dataclass(value):  # that of a head
        return repr(value)
    return str(getattr(value, "__qualname__", type(value)))


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
