"""How well prompts are framed: whether the target knows the marks around a question.

A chat model has learnt to say the marks between a question and its answer, and takes them for certain. Marks
of another template surprise it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from slipstream.core.target import Messages, Target
from slipstream.core.tree import chain

# By name: what public templates write before a question, and between it and the answer.
TEMPLATES = {
    "ChatML": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "Llama 2": ("[INST] ", " [/INST]"),
    "Llama 3": (
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Gemma": ("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
    "Phi-3": ("<|user|>\n", "<|end|>\n<|assistant|>\n"),
    "Zephyr": ("<|user|>\n", "</s>\n<|assistant|>\n"),
    "Vicuna": ("USER: ", " ASSISTANT:"),
    "Alpaca": ("### Instruction:\n", "\n\n### Response:\n"),
}
SYSTEM = "You are a helpful AI assistant."


@dataclass(frozen=True)
class Framing:
    """Nats a token of the marks behind the questions: as the target frames them (None: not at all), and by
    the public templates."""

    own: float | None
    public: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.public, key=lambda name: self.public[name])


def framing(target: Target, questions: Sequence[str]) -> Framing:
    """How the target takes the marks behind the questions."""
    assert target.text is not None
    public = {
        name: mean(_surprise(target, before + asked, after) for asked in questions)
        for name, (before, after) in TEMPLATES.items()
    }
    if not target.text.has_chat:
        return Framing(None, public)
    parts = [_around(target, [{"role": "user", "content": asked}], asked) for asked in questions]
    own = [
        _surprise(target, before + asked, after)
        for (before, after), asked in zip(parts, questions, strict=True)
        if after
    ]
    return Framing(mean(own) if own else None, public)


def system_surprise(target: Target, question: str) -> tuple[float, float] | None:
    """Nats a token of the marks right before a question, as the target frames it and behind a system prompt.
    None where its template takes none."""
    asked = {"role": "user", "content": question}
    try:
        given, _ = _around(target, [asked], question)
        longer, _ = _around(target, [{"role": "system", "content": SYSTEM}, asked], question)
    except ValueError:
        return None
    if longer == given or SYSTEM not in longer:
        return None
    marks = given
    while not longer.endswith(marks):
        marks = marks[1:]
    if not marks:
        return None
    pair = [_surprise(target, each[: -len(marks)], marks, 1) for each in (given, longer)]
    return pair[0], pair[1]


def _around(target: Target, messages: Messages, question: str) -> tuple[str, str]:
    """What the template writes before and behind a question. Raises ValueError as the template does."""
    assert target.text is not None
    before, found, after = target.text.render(messages, True).rpartition(question)
    return (before, after) if found else ("", "")


def _surprise(target: Target, before: str, marks: str, after: int = 0) -> float:
    """Nats a token of some marks behind a text, without the first `after` of them, which may end the text.
    The first token of all is not judged."""
    assert target.text is not None
    read, said = (target.text.ids(part) if part else [] for part in (before, marks))
    split = max(after, not read)
    read, said = [*read, *said[:split]], said[split:]
    tokens = torch.tensor([[*read, *said]], device=target.device)
    logits = target(chain(tokens), target.new_cache(1)).logits[0].double().log_softmax(-1)
    told = logits[len(read) - 1 : -1].gather(1, tokens[0, len(read) :, None])
    return float(-told.mean()) if len(told) else 0.0
