"""Activations on the CPU: a number has the same bits wherever it lies, for any width and any threads."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Gemma2Config, GPT2Config, LlamaConfig, Qwen2MoeConfig
from transformers.activations import ACT2FN

import tiny
from slipstream.core.tree import chain
from slipstream.targets import HFTarget
from slipstream.targets.activations import GRAIN, SERIAL, Activation, own_activations
from slipstream.targets.attention_patch import OwnFunctions

SIZES = (1, 31, 48, 1500, SERIAL + 5, 2 * GRAIN + 33, 4 * GRAIN - 1500)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    """PyTorch computes with so many."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def numbers(count: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers."""
    return tiny.noise(count, scale=3).to(dtype)


def vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What vectors make of each number, by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = function(F.pad(x, (0, 64 + -len(x) % 64)))[: len(x)]
    torch.set_num_threads(threads)
    return out


@each_dtype
@pytest.mark.parametrize("name", sorted(set(ACT2FN) - {"prelu", "xielu"}))
@torch.inference_mode()
def test_a_number_has_its_bits_wherever_it_lies(name, dtype, threads):
    """An end of a tensor, or of a thread's part of it, that is no whole number of vectors."""
    x, own = numbers(max(SIZES), dtype), nn.Sequential(ACT2FN[name])
    want = vectors(ACT2FN[name], x)
    own_activations(own)
    assert isinstance(own[0], Activation)
    for size in SIZES:
        assert torch.equal(own(x[:size]), want[:size])
        assert torch.equal(own(x[-size:].view(1, size, 1))[0, :, 0], want[-size:])
    halves = x[: 96 * 40].view(40, 96).chunk(2, -1)  # rows that do not lie side by side
    for half, right in zip(halves, want[: 96 * 40].view(40, 96).chunk(2, -1), strict=True):
        assert torch.equal(own(half), right)


@each_dtype
@pytest.mark.parametrize("name", ["silu", "gelu", "softplus", "sigmoid", "Tensor.sigmoid"])
@torch.inference_mode()
def test_functions_that_modules_call_themselves(name, dtype, threads):
    """The gates of routers and experts, which have no activation module."""
    called = {"sigmoid": torch.sigmoid, "Tensor.sigmoid": Tensor.sigmoid}.get(name) or getattr(F, name)
    x = numbers(SERIAL + 5, dtype)
    want = vectors(called, x)
    with OwnFunctions():
        for size in (1, 31, 48, SERIAL + 5):
            assert torch.equal(called(x[:size]), want[:size])


@pytest.mark.parametrize("config", [LlamaConfig, Gemma2Config, GPT2Config, Qwen2MoeConfig])
def test_rows_of_a_pass_whose_activations_have_ends(config, threads):
    """SiLU, GELU by tanh, GELU in Python, and a gate of one number a row, in a model of an odd width."""
    widths = ("intermediate_size", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size")
    odd = tiny.GROUPED | dict.fromkeys(widths, 45) | {"max_position_embeddings": 512}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    target = HFTarget(tiny.build(config(**odd, **experts, head_dim=8)).float())
    assert target.exactness == "bits"
    text = torch.tensor(tiny.prompts(450))
    whole = target(chain(text), target.new_cache(1)).logits  # 20,250 numbers: GELU takes all threads
    torch.set_num_threads(1)
    for rows in (1, 7, 30):
        assert torch.equal(target(chain(text[:, :rows]), target.new_cache(1)).logits, whole[:, :rows])
