"""Numbers that are not finite stop whatever reads them, with the place where they begin."""

import math
from copy import deepcopy

import pytest
import torch

import tiny
from slipstream import generate
from slipstream.core.sampling import Sampling
from slipstream.drafters import load_drafter
from slipstream.engine.audit import audit
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request
from slipstream.measure.certify import certify
from slipstream.measure.datasets import Question
from slipstream.targets import HFTarget

PROMPT = tiny.prompts(9)[0]
SAYS = (
    r"target broken says numbers that are not finite after \d+ tokens, first in "
    r"model\.layers\.1\.mlp\.up_proj"
)


def broken(number: float, token: int | None = None) -> HFTarget:
    """A target whose second block says `number`, everywhere or behind one token alone."""
    target = HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), "broken")
    with torch.no_grad():
        if token is None:
            target.model.model.layers[1].mlp.up_proj.weight[0, 0] = number
        else:
            target.model.model.embed_tokens.weight[token] = number
    return target


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["vanilla", "ngram", "self-speculative:skip=0"])
def test_generate_stops(drafter, temperature, number):
    """An answer of whatever token has the first NaN, exit code 0."""
    with pytest.raises(ValueError, match=SAYS):
        generate(broken(number), PROMPT, drafter, temperature=temperature)


def test_a_place_in_the_middle_of_a_batch_is_found():
    """One row of a batch whose text goes wrong after some tokens, while the others are sound."""
    sound = generate(tiny.target("llama"), PROMPT, max_new_tokens=8).tokens
    target = broken(math.nan, token=sound[4])
    at = len(PROMPT) + sound.index(sound[4]) + 1
    with pytest.raises(ValueError, match=rf"not finite after {at} tokens, first in model\.embed_tokens"):
        generate(target, [tiny.prompts(5, 3)[1], PROMPT], max_new_tokens=8)


def test_certify_and_audit_certify_nothing():
    """A certificate of an answer whose every margin is NaN, which no bound exceeds."""
    with pytest.raises(ValueError, match=SAYS):
        certify(broken(math.nan), "ngram", [Question("own", "1", "chat", ("abc",))], max_new_tokens=4)
    with pytest.raises(ValueError, match=SAYS):
        audit(broken(math.nan), PROMPT, [1, 2], Sampling())


def test_features_to_train_on_stop():
    """A head that learns from NaN, and is said to reach a τ of 1.98."""
    with pytest.raises(ValueError, match=SAYS):
        broken(math.nan).features([PROMPT], ("final",))


@pytest.mark.parametrize("drafter", ["vanilla", "self-speculative:skip=0"])
@pytest.mark.parametrize("step", [False, True])
def test_a_text_in_the_row_of_an_unsound_one_is_sound(drafter, step):
    """A masked key that is NaN, left in a row's memory, ended every later text of that row."""
    sound = generate(tiny.target("llama"), PROMPT, max_new_tokens=3, eos_token_ids=()).tokens
    target = broken(math.nan, token=sound[1] if step else PROMPT[-1])
    engine, bad = Engine(target, load_drafter(drafter, target), rows=1), Request(PROMPT)
    engine.admit(bad)
    while bad.finite:
        engine.step()
    engine.cancel(bad)
    other = [token for token in tiny.prompts(5)[0] if token not in (sound[1], PROMPT[-1])]
    good = Request(other)
    engine.add(good)
    while not good.steps:
        engine.step()
        assert good.finite
    plain = generate(target, other, "vanilla", max_new_tokens=len(good.tokens), eos_token_ids=())
    assert good.tokens == plain.tokens
