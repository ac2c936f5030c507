"""How well prompts are framed: whether the target knows the marks around a question.

A chat model has learnt to say the marks between a question and its answer, and takes them for certain. Marks
of another template surprise it.
"""

from collections.abc import Sequence
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


def framing(target: Target, questions: Sequence[str]) -> tuple[float | None, dict[str, float]]:
    """Nats a token of the marks behind the questions: as the target frames them (None: not at all), and by
    the public templates."""
    assert target.text is not None
    public = {
        name: mean(_surprise(target, before + question, after) for question in questions)
        for name, (before, after) in TEMPLATES.items()
    }
    own = []
    for question in questions if target.text.has_chat else ():
        before, after = _around(target, [{"role": "user", "content": question}], question)
        if after:
            own.append(_surprise(target, before + question, after))
    return (mean(own) if own else None), public


def system_surprise(target: Target, question: str) -> tuple[float, float] | None:
    """Nats a token of the marks right before a question, as the target frames it and behind a system prompt.
    None where its template takes none."""
    message = {"role": "user", "content": question}
    try:
        plain, _ = _around(target, [message], question)
        longer, _ = _around(target, [{"role": "system", "content": SYSTEM}, message], question)
    except ValueError:
        return None
    if longer == plain or SYSTEM not in longer:
        return None
    marks = plain
    while not longer.endswith(marks):
        marks = marks[1:]
    if not marks:
        return None
    alone, prompted = (_surprise(target, text[: -len(marks)], marks, 1) for text in (plain, longer))
    return alone, prompted


def _around(target: Target, messages: Messages, question: str) -> tuple[str, str]:
    """What the template writes before and behind a question. Raises ValueError as the template does."""
    assert target.text is not None
    before, separator, after = target.text.render(messages, True).rpartition(question)
    return (before, after) if separator else ("", "")


def _surprise(target: Target, before: str, marks: str, skip: int = 0) -> float:
    """Nats a token of some marks behind a text, without the first `skip` of them, which may end the text.
    The first token of all is not judged."""
    assert target.text is not None
    ids, judged = (target.text.ids(part) if part else [] for part in (before, marks))
    skip = max(skip, not ids)
    start = len(ids) + len(judged[:skip])
    tokens = torch.tensor([[*ids, *judged]], device=target.device)
    log_p = target(chain(tokens), target.new_cache(1)).logits[0].double().log_softmax(-1)
    surprise = log_p[start - 1 : -1].gather(1, tokens[0, start:, None])
    return float(-surprise.mean()) if len(surprise) else 0.0
