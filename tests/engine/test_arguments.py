"""`generate`: what may be given, in which forms, which defaults hold, and what is refused."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import config
from transformers import GenerationConfig, NoRepeatNGramLogitsProcessor, TextStreamer

import tiny
from slipstream.core.drafter import Drafter
from slipstream.drafters.random_drafter import RandomDrafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.generate import generate, stream
from slipstream.targets import HFTarget
from slipstream.targets.prompts import encode

PROMPTS, SAMPLED, ENDLESS = tiny.PROMPTS, tiny.SAMPLED, tiny.ENDLESS
PROMPT = PROMPTS[0]


def test_an_argument_that_there_is_not(target):
    """A typo that changes nothing."""
    for call in (generate, stream):
        with pytest.raises(TypeError, match="generate has no argument 'max_tokens': it has max_new_tokens, "):
            call(target, PROMPT, max_tokens=3)


def configured(**settings: object) -> HFTarget:
    """A target whose `generation_config` says something."""
    model = deepcopy(tiny.reference("llama"))
    model.generation_config = GenerationConfig(**settings)
    return HFTarget(model, tiny.tokenizer())


@pytest.mark.parametrize(
    ("config", "explicit"),
    [
        ({}, {"temperature": 0.0, "eos_token_ids": [tiny.EOS]}),
        ({"temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 2.0, "top_p": 0.6}, {"temperature": 2.0, "top_p": 0.6}),
        ({"do_sample": True, "temperature": 2.0, "top_k": 3}, {"temperature": 2.0, "top_k": 3}),
        ({"do_sample": True, "temperature": 2.0, "min_p": 0.3}, {"temperature": 2.0, "min_p": 0.3}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ],
    ids=str,
)
def test_generation_config_is_honoured(target, config, explicit):
    """Defaults of the model ignored, or sampling switched on where it asks for greedy search."""
    asks = configured(**config)
    for prompt in PROMPTS:
        want = generate(target, prompt, max_new_tokens=20, **explicit)
        assert generate(asks, prompt, max_new_tokens=20).tokens == want.tokens


def test_what_is_given_overrules_generation_config(target, answer):
    """A user's own temperature, penalty or EOS replaced by the model's."""
    other = configured(
        do_sample=True,
        temperature=3.0,
        top_k=2,
        repetition_penalty=3.0,
        eos_token_id=[answer[5], answer[7], 1],
    )
    given = {"top_k": 0, "repetition_penalty": 1.0}
    assert generate(other, PROMPT, max_new_tokens=40, **SAMPLED, **given, **ENDLESS).tokens == answer
    ended = generate(other, PROMPT, max_new_tokens=40, **SAMPLED, **given)
    assert (ended.tokens[-1], ended.finish) == (answer[len(ended.tokens) - 1], "eos")
    assert len(ended.tokens) <= 6


def test_laws_go_by_name(target, answer):
    """A name that picks the other law: only the coupled one gives plain decoding's text at T > 0."""

    def drafter() -> Drafter:
        return RandomDrafter(tiny.VOCAB, width=8, sampled=True)

    coupled = generate(target, PROMPT, drafter(), max_new_tokens=40, **SAMPLED, **ENDLESS, law="coupled")
    multi_round = generate(
        target, PROMPT, drafter(), max_new_tokens=40, **SAMPLED, **ENDLESS, law="multi-round"
    )
    assert coupled.tokens == answer != multi_round.tokens


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ([], {}, "there are no prompts: give at least one"),
        ("", {}, "the prompt is empty"),
        ([PROMPT, []], {}, "the prompt is empty"),
        ([1] * 128, {}, "the prompt has 128 tokens; llama has a window of 128"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        (
            PROMPT,
            {"temperature": -1.0},
            r"temperature is -1\.0; it must be 0 \(greedy\) or a positive number",
        ),
        (PROMPT, {"top_p": 0.0}, r"top_p is 0\.0; it must be in \(0, 1\]"),
        (PROMPT, {"top_p": 1.5}, r"top_p is 1\.5; it must be in \(0, 1\]"),
        (PROMPT, {"drafter": "ngrm"}, "Unknown drafter: 'ngrm'.*Did you mean 'ngram'"),
        (PROMPT, {"law": "leviathan"}, "Unknown law: 'leviathan'. Available: coupled, multi-round"),
        (PROMPT, {"stop": ["a", ""]}, "a stop string is empty"),
        (
            [PROMPT, PROMPT],
            {"streamer": TextStreamer(tiny.tokenizer())},
            "a streamer takes one prompt, 2 were given",
        ),
        (
            PROMPT,
            {"streamer": print},
            "streamer is a builtin_function_or_method: give an object with put and end",
        ),
        (PROMPT, {"trace": "trace.jsonl"}, "trace is a str: give an open file, or anything else with write"),
        (PROMPT, {"max_new_tokens": 1.5}, "max_new_tokens is 1.5; it must be at least 1, a whole number"),
        (PROMPT, {"max_new_tokens": True}, "max_new_tokens is True"),
        (PROMPT, {"batch": 0}, "batch is 0; it must be at least 1, a whole number"),
        (PROMPT, {"temperature": "hot"}, "temperature is 'hot'; it must be 0"),
        (PROMPT, {"temperature": 1e-320}, "temperature is 1e-320; it must be 0"),
        (PROMPT, {"top_k": 0.5}, "top_k is 0.5; it must be 0"),
        (PROMPT, {"min_p": float("nan")}, "min_p is nan; it must be in"),
        (PROMPT, {"seed": 1.5}, "seed is 1.5; it must be a 64-bit whole number"),
        (PROMPT, {"seed": "1"}, "seed is '1'; it must be a 64-bit whole number"),
        (PROMPT, {"processors": [3]}, "processors holds 3; it must hold Hugging Face LogitsProcessors"),
        (PROMPT, {"processors": NoRepeatNGramLogitsProcessor(2)}, "processors is a NoRepeat.*: give a list"),
        (
            PROMPT,
            {"processors": [lambda ids, x: x[:, 1:]]},
            r"processor <lambda> returned torch.float64 of shape \[1, 63\]",
        ),
        (PROMPT, {"eos_token_ids": ["</s>"]}, "eos_token_ids holds '</s>', a str, as a token id"),
        (PROMPT, {"eos_token_ids": "</s>"}, "eos_token_ids holds '</s>', a str, as a token id"),
        (
            PROMPT,
            {"eos_token_ids": [64]},
            "eos_token_ids holds the token id 64; the target's vocabulary has 0 to 63",
        ),
        (PROMPT, {"stop": 3}, "stop holds 3, a int: give strings"),
        (PROMPT, {"stop": [b"a"]}, "stop holds b'a', a bytes: give strings"),
        (PROMPT, {"stop": "\ud800"}, "a stop string is no Unicode text"),
        (PROMPT, {"drafter": None}, "drafter is None: give a name, a directory or a slipstream.Drafter"),
        (PROMPT, {"drafter": Vanilla}, "drafter is <class .*Vanilla'>: give a name"),
        (PROMPT, {"law": ["coupled"]}, "Unknown law: \\['coupled'\\]"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_mistakes_are_explained(target, prompts, how, message, monkeypatch):
    """A stack trace from the depths, or a silent default, in place of what is wrong and what is allowed."""
    monkeypatch.setattr(
        config, "jaxtyping_disable", True
    )  # arguments of wrong types are to reach our own errors
    with pytest.raises(ValueError, match=message) as error:
        generate(target, prompts, **how)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "mistaken", ["smollm2", None, tiny.reference("llama")], ids=lambda x: type(x).__name__
)
def test_a_target_is_a_target(mistaken, monkeypatch):
    """A Hugging Face model has no `encode`, it said."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with pytest.raises(
        ValueError, match=r"target is a \w+: give slipstream.HFTarget\(model, tokenizer\) or load_target"
    ):
        generate(mistaken, PROMPT)


def test_numbers_of_numpy_are_numbers(target):
    how = {"max_new_tokens": 8, "temperature": 0.8, "top_k": 9, "seed": 3, "eos_token_ids": 5}
    theirs = {
        name: np.float32(0.8) if name == "temperature" else np.int64(value) for name, value in how.items()
    }
    want = generate(target, PROMPT, **how | {"temperature": float(np.float32(0.8))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "jaxtyping_disable", True)
        assert generate(target, PROMPT, **theirs).tokens == want.tokens


def test_prompts_come_in_many_forms(target):
    """A list of ids taken for several prompts, or several prompts for one."""
    text, ids = "hello", encode(target, "hello")
    want = generate(target, ids, max_new_tokens=8)
    for prompt in (text, torch.tensor(ids)):
        assert generate(target, prompt, max_new_tokens=8).tokens == want.tokens
    for prompts in ([text], [ids], torch.tensor([ids])):
        (made,) = generate(target, prompts, max_new_tokens=8)
        assert made.tokens == want.tokens
    assert (want.prompt, want.text) == (ids, target.text.decode(want.tokens))
    assert (
        generate(target, text, Path("ngram"), max_new_tokens=8).tokens == want.tokens
    )  # a path is a name, too


def test_text_needs_a_tokenizer():
    """An attribute error on `None`."""
    mute = HFTarget(deepcopy(tiny.reference("llama")), name="mute")
    with pytest.raises(ValueError, match="target mute has no tokenizer: give the prompt as token ids"):
        generate(mute, "hello")
    assert generate(mute, PROMPT, max_new_tokens=3).text == ""
