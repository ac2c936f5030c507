"""A tiny target and a question for the command line."""

from copy import deepcopy

import pytest

import tiny
from world import TEMPLATE


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A tiny Llama with a window of 128 tokens, as a directory."""
    path = tmp_path_factory.mktemp("model")
    tiny.reference("llama").save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def chatting(tmp_path_factory) -> list[str]:
    """Options of the same model with a chat template."""
    path = tmp_path_factory.mktemp("chatting")
    tiny.reference("llama").save_pretrained(path)
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return ["--target", str(path), "--dtype", "float64"]


@pytest.fixture
def tiny_options(model) -> list[str]:
    return ["--target", model, "--dtype", "float64", "--max-new-tokens", "8"]


@pytest.fixture
def questions(tmp_path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question_id": 1, "category": "letters", "turns": ["abc abc", "de"]}\n')
    return str(path)
