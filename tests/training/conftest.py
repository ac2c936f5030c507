"""A tiny chat target and data for it."""

import json
import random
from copy import deepcopy

import pytest

import tiny
from slipstream.targets import HFTarget

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


@pytest.fixture(scope="session")
def chat() -> HFTarget:
    """A tiny float64 Llama with a chat template: "u QUESTION a ANSWER</s> "."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    return HFTarget(deepcopy(tiny.reference("llama")), tokenizer, "tiny-chat")


@pytest.fixture
def home(tmp_path, monkeypatch) -> None:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path) -> str:
    """Forty conversations of random letters."""
    rng = random.Random(0)
    lines = []
    for _ in range(40):
        question, answer = ("".join(rng.choices("abcdefgh", k=rng.randint(3, 12))) for _ in range(2))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)
