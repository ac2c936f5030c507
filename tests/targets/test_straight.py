"""Passes that call the model's modules, and not the model."""

from functools import wraps
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

import tiny
from slipstream import kernels
from slipstream.core.drafter import CACHE, FINAL, INPUT
from slipstream.core.tree import Tree, chain
from slipstream.targets import HFTarget
from slipstream.targets.straight import Straight

pytestmark = pytest.mark.skipif(
    not tiny.COMPILED or not kernels.available(), reason="make test-compiled, with a C++ compiler"
)
TAPS = (f"{INPUT}0", f"{INPUT}1", f"{CACHE}1", FINAL)
TEXTS = torch.tensor(tiny.prompts(20, 20))
PARENTS = torch.tensor([[0, 0, 0, 1, 1, 2]])


class Doubles(LlamaForCausalLM):
    """Makes other logits than its LM head."""

    @wraps(LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out


class DoublesInPlace(LlamaForCausalLM):
    """The same, in the memory of the LM head's."""

    @wraps(LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits.mul_(2)
        return out


def target_of(kind=LlamaForCausalLM) -> HFTarget:
    model = tiny.build(tiny.LlamaConfig(**tiny.GROUPED)).float()
    model.__class__ = kind
    return HFTarget(model, compile=True)


def said(target: HFTarget) -> list[torch.Tensor]:
    """Logits and taps of rounds of one text and of two."""
    found = []
    for texts in (TEXTS[:1], TEXTS):
        cache, parents = target.new_cache(len(texts)), PARENTS.expand(len(texts), -1)
        rounds = [chain(texts[:, :8]), chain(texts[:, 8:9]), Tree(texts[:, 9:15], parents, 2)]
        for tree in (*rounds, chain(texts[:, 15:16]), chain(texts[:, 16:])):
            out = target(tree, cache, TAPS)
            found += [out.logits, out.features]
            cache.keep(None, torch.full((len(texts),), tree.nodes))
    return found


def own(target: HFTarget) -> list[torch.Tensor]:
    """The same by passes of the model's own."""
    with patch.object(Straight, "run", return_value=None):
        return said(target)


def same(one, other) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_straight_pass_says_what_the_models_own_does():
    """A round by a call that another kind of pass made, or taps of the pass before."""
    target = target_of()
    want = own(target)
    for _ in range(4):
        assert same(said(target), want)
    with patch.object(type(target.twin.get_decoder()), "forward", side_effect=AssertionError):
        assert same(said(target), want)


@pytest.mark.parametrize("kind", [Doubles, DoublesInPlace])
def test_what_a_model_does_between_its_modules_is_not_left_out(kind):
    target = target_of(kind)
    want = own(target)
    for _ in range(4):
        assert same(said(target), want)
    assert same(want[::2], [2 * x for x in own(target_of())[::2]])
    with patch.object(kind, "forward", side_effect=AssertionError), pytest.raises(AssertionError):
        said(target)


def test_whoever_looks_at_a_module_that_is_passed_over_sees_its_passes():
    target = target_of()
    for _ in range(4):
        said(target)
    for module in (target.twin, target.twin.get_decoder(), target.blocks[1]):
        calls = []
        hook = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        said(target)
        hook.remove()
        assert len(calls) == 10
