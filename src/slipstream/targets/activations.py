"""Activations on the CPU in which a number's bits do not depend on where it lies.

PyTorch reads the numbers of a tensor in vectors, and the last few by scalar code, which rounds SiLU, GELU,
sigmoid and others otherwise. With several threads each thread's part has such an end. Here every part is a
whole number of vectors. Of cos, sin, tanh, exp, softmax and norms both codes make the same bits.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2CLS

VECTORS = 64  # numbers that PyTorch reads at once: two vectors of bf16 with AVX-512, and fewer elsewhere
SERIAL = 16_384  # numbers up to which it never takes a second thread; with more, GELU takes all of them
GRAIN = 32_768  # numbers for each of which other activations take another thread
KINDS = {nn.GELU, *(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())} - {nn.PReLU}
CALLED = {F.silu, F.gelu, F.softplus, torch.sigmoid, Tensor.sigmoid}  # by modules that have no activation


@lru_cache(1024)
def padded(numbers: int, threads: int) -> int:
    """The least number, from `numbers` on, whose parts for all threads are whole numbers of vectors."""
    while short := -numbers % (VECTORS * _parts(numbers, threads)):
        numbers += short
    return numbers


def _parts(numbers: int, threads: int) -> int:
    """A number that is divided by the number of parts, whatever the activation."""
    return 1 if numbers <= SERIAL else math.lcm(threads, min(threads, -(-numbers // GRAIN)))


def aligned(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`function`, which takes each number for itself, of x, and of zeros behind it where parts need them.
    Graphs and autograd keep the function as it is."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return function(x, *args, **kwargs)
    n, x = x.numel(), x.contiguous()
    size = padded(n, torch.get_num_threads())
    if size == n:
        return function(x, *args, **kwargs)
    return function(F.pad(x.view(-1), (0, size - n)), *args, **kwargs)[:n].view(x.shape)


class Activation(nn.Module):
    """What a kind of activation becomes."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of each number."""
        return aligned(super().forward, x)


@cache
def _own(kind: Any) -> Any:
    """A kind of activation whose numbers round alike."""
    return type(kind.__name__, (Activation, kind), {})


def own_activations(model: nn.Module) -> None:
    """Let a model's activations round each number alike, wherever it lies."""
    for module in model.modules():
        kind: Any = type(module)
        if kind in KINDS:
            module.__class__ = _own(kind)
