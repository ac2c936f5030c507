"""Targets for public heads."""

import pytest
from transformers import LlamaConfig

import tiny
from public_heads import DEEP, H
from slipstream.targets import HFTarget


@pytest.fixture(scope="session")
def target() -> HFTarget:
    """A target of another width than the other tests'."""
    shape = tiny.GROUPED | {"hidden_size": H, "num_attention_heads": 6, "num_key_value_heads": 3}
    return HFTarget(tiny.build(LlamaConfig(**shape)), tiny.tokenizer(), "wide")


@pytest.fixture(scope="session")
def deep() -> HFTarget:
    """A target with blocks enough for EAGLE-3's three taps."""
    return HFTarget(tiny.build(LlamaConfig(**DEEP)), tiny.tokenizer(), "deep")
