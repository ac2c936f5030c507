"""Weights come back from a drafter directory as they were stored."""

import pytest
import torch

import tiny
from slipstream.drafters.store import read_drafter, restored, save_drafter, stored


@pytest.mark.parametrize("make", [tiny.eagle, tiny.eagle3, tiny.fasteagle])
def test_int8_takes_half_the_space_and_half_a_step(make, tmp_path):
    target = tiny.target("llama")
    drafter, sizes = make(target, "chain-2"), {}
    for dtype in (torch.bfloat16, torch.int8):
        save_drafter(tmp_path / str(dtype), drafter.method, "tiny", target.ends, *drafter.pack(), {}, dtype=dtype)
        sizes[dtype] = sum(t.numel() * t.itemsize for t in stored(drafter.pack()[1], dtype).values())
    assert sizes[torch.int8] < 0.7 * sizes[torch.bfloat16]  # tiny rows: their steps take an eighth
    config, tensors = read_drafter(tmp_path / "torch.int8", target.ends)
    for name, tensor in drafter.pack()[1].items():
        if tensor.ndim == 2:
            step = tensor.float().abs().amax(1, keepdim=True) / 127
            assert ((tensors[name] - tensor.float()).abs() <= 0.5001 * step).all(), name
    again = type(drafter).load(config, tensors, target.ends)
    assert again.shape == drafter.shape


def test_what_is_stored_does_not_change_when_it_is_stored_again():
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(5, 7), "b.weight": torch.randn(7), "vocab": torch.arange(5)}
    once = restored(stored(tensors, torch.int8))
    twice = restored(stored(once, torch.int8))
    assert all(torch.equal(once[name], twice[name]) for name in tensors)
