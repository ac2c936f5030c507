"""Texts decoded at once, without a session. What a GPU captures runs here as it is."""

from collections import Counter
from copy import deepcopy

import pytest
import torch

import tiny
from slipstream.engine.generate import generate
from slipstream.targets import HFTarget
from slipstream.training import batch_generation
from slipstream.training.batch_generation import BatchGenerator
from slipstream.training.generators import TargetWriter, audit
from slipstream.training.synthesize import regenerate


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Batches shrink at once, and buffers grow, in texts of some tokens."""
    for name, value in {"SPAN": 8, "LOOK": 2, "LEAST": 1, "CHUNK": 40}.items():
        monkeypatch.setattr(batch_generation, name, value)


@pytest.mark.parametrize("slots", [64, 160, 4096])
def test_greedy_texts_are_those_of_plain_decoding(slots):
    """In float64: of one text at a time, of some, and of all at once. Ends come early and late."""
    target, prompts = tiny.target("llama"), tiny.prompts(1, 3, 17, 5, 4, 9, 2, 30)
    eos = [3, 5, 60]
    plain = generate(target, prompts, "vanilla", max_new_tokens=24, temperature=0.0, eos_token_ids=eos)
    said = BatchGenerator(target, eos, slots).write(prompts, 0.0, 24, 1)
    assert said == [answer.tokens for answer in plain]
    assert len({len(tokens) for tokens in said}) > 2


def test_sampled_texts_follow_the_targets_law():
    target, prompt = tiny.target("llama"), tiny.prompts(6)[0]
    many, n = BatchGenerator(target, [0], 2**17), 4096
    assert many.write([prompt] * 3, 0.8, 4, 1) == many.write([prompt] * 3, 0.8, 4, 1)
    said = many.write([prompt] * n, 0.8, 2, 2)
    logits = target.plain(torch.tensor([prompt])).logits[0, -1]
    law, drawn = (logits / 0.8).softmax(-1), Counter(tokens[0] for tokens in said)
    off = sum((drawn[token] - n * float(p)) ** 2 / (n * float(p)) for token, p in enumerate(law))
    assert abs(off - len(law)) < 6 * (2 * len(law)) ** 0.5  # χ² of as many tokens
    assert len({tuple(tokens) for tokens in said}) > len(drawn)


def test_a_prompt_beyond_the_memory_is_refused():
    with pytest.raises(ValueError, match="leaves the GPU no memory"):
        BatchGenerator(tiny.target("llama"), [0], 16).write(tiny.prompts(30), 0.0, 8, 1)


def test_a_target_on_a_gpu_writes_so(chat, tmp_path, monkeypatch):
    rows = [[{"role": "user", "content": c * 3}] for c in "abcdefg"]
    how = {"temperatures": [0.0], "max_new_tokens": 8, "batch": 4}
    regenerate(chat, rows, tmp_path / "one.jsonl", **how)
    assert not BatchGenerator.serves(chat)
    monkeypatch.setattr(BatchGenerator, "serves", lambda target: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**20))
    regenerate(chat, rows, tmp_path / "many.jsonl", **how)
    assert (tmp_path / "one.jsonl").read_text() == (tmp_path / "many.jsonl").read_text()


@pytest.mark.parametrize("about", [{"repetition_penalty": 1.8}, {"top_k": 2, "do_sample": True}])
def test_a_target_with_more_settings_than_a_temperature_writes_as_ever(about, monkeypatch):
    """Its own generation_config was left out of what a GPU wrote."""
    target = HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), "set")
    vars(target.model.generation_config).update(about)
    monkeypatch.setattr(BatchGenerator, "serves", lambda target: True)
    said = TargetWriter(target).go_on(["abcab", "cdefgh"], 0.7, 24, 1)
    how = {"max_new_tokens": 24, "temperature": 0.7, "seed": 1}
    prompts = [target.text.ids(text) for text in ("abcab", "cdefgh")]
    assert [each.text for each in said] == [answer.text for answer in generate(target, prompts, **how)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_texts_that_are_not_the_targets_are_not_written_down(temperature):
    """A GPU once wrote noise behind its first texts, and heads learnt from it."""
    target, prompts = tiny.target("llama"), tiny.prompts(*range(3, 15))
    made = BatchGenerator(target, [0], 2**14).write(prompts, temperature, 64, 1)
    audit(target, prompts, made, temperature)
    noise = [tokens[:2] + [(token * 7 + 3) % 60 for token in tokens[2:]] for tokens in made]
    with pytest.raises(ValueError, match="is not its own"):
        audit(target, prompts, noise, temperature)
