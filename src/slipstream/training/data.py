"""Training data: rows of JSONL or raw text become token ids and a loss mask."""

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.core.target import Target
from slipstream.files import evenly, parsed, read_text, several
from slipstream.provenance import suggested
from slipstream.targets.prompts import check_readable, message_of

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "tool": "tool"}
ROLES |= {"system": "system", "developer": "system"}
REASONS = ("reasoning_content", "reasoning", "thinking")
OPTIONAL = (*REASONS, "name", "tool_calls", "tool_call_id")  # fields of a message
SHAPES = (
    '{"messages": […]}, {"conversations": […]}, {"instruction", "input", "output"}, {"prompt", "completion"} '
    'or {"text"}'
)
TURNS = {"messages", "conversations", "instruction"}
RECORDED = ["source", "made", "kind", "temperature", "finished"]  # how a row was written


@dataclass(frozen=True)
class Example:
    """One sequence, and which of its tokens the drafter learns to predict."""

    tokens: list[int]  # as decoding reads them: each prompt through the chat template, then its answer
    loss: list[bool]  # true for tokens to learn: the assistant's own, and the one that ends its turn
    greedy: bool = False  # the row says that the answer is the target's at T = 0
    asked: tuple[int, ...] = ()  # the question, where the prompt has a system message or raw text is cut

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first one to learn: a conversation's first question, or half of raw text."""
        return self.tokens[: len(self.tokens) // 2 if all(self.loss) else max(self.loss.index(True), 1)]

    @property
    def question(self) -> tuple[int, ...]:
        """What no training example may ask if this one is held out: the question without its system message,
        or all of a raw text."""
        return self.asked or tuple(self.tokens if all(self.loss) else self.prompt)

    @property
    def answer(self) -> list[int]:
        """The tokens to learn after the prompt, up to the first one that is not learnt."""
        start = len(self.prompt)
        return self.tokens[start:][: len(list(takewhile(bool, self.loss[start:])))]


def load_examples(
    paths: Sequence[str],
    target: Target,
    max_length: int,
    limit: int | None = None,
    greedy: bool = False,
    force: bool = False,
) -> list[Example]:
    """The examples of all files, in order, cut at `max_length` tokens: of at most `limit` rows of each, only
    answers at temperature 0 (`greedy`), also those of another target (`force`). Raises ValueError: a file or
    a line cannot be read (its number is given), another target wrote a row, or no assistant says anything."""
    if not paths:
        write = suggested("synthesize --out answers.jsonl")
        raise ValueError(f"no training data: give --data FILE, or let the target write some: {write}")
    examples = []
    max_length = min(max_length, target.window)
    for path in paths:
        for number, row in evenly(list(read_rows(path)), limit):
            try:
                if not force:
                    _check_own(row.get("made"), target)
                examples.append(encode_row(row, target, max_length))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    examples = [example for example in examples if sum(example.loss[2:])]
    if not examples:
        write = suggested(f"regenerate {shlex.join(paths)} --out answers.jsonl")
        fix = f"give rows in which an assistant answers within the first {max_length} tokens"
        fix += f", or let the target write the answers: {write}"
        raise ValueError(f"{', '.join(paths)}: no assistant text to learn from: {fix}")
    examples = [example for example in examples if example.greedy or not greedy]
    if not examples:
        raise ValueError(f'{", ".join(paths)}: no row says "temperature": 0, as data.greedy=true wants them')
    return examples


def _check_own(made_by: Any, target: Target) -> None:
    """Raise ValueError if a row says that another target wrote it."""
    if isinstance(made_by, dict) and made_by.get("fingerprint", target.fingerprint) != target.fingerprint:
        writer = f"target {made_by.get('target', 'unnamed')} ({made_by['fingerprint']})"
        fix = "give --target as the data has it, or --force to learn another's answers"
        raise ValueError(f"{writer} wrote it, and this target is {target.name} ({target.fingerprint}): {fix}")


def read_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of a .jsonl or .txt file, gzipped or not. A paragraph of a .txt file is a row.
    Raises ValueError: it cannot be read, or lines are malformed, of which up to five are named."""
    text, number = read_text(path, "training data"), 1
    if _is_raw(path):
        for part in text.split("\n\n"):
            if part.strip():
                check_readable(row := {"text": part.strip("\n")}, f"training data {path}: line {number}")
                yield number, row
            number += part.count("\n") + 2
        return
    rows, bad = [], []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                check_readable(row := parsed(line), "it")
                rows.append((number, _row(row)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            bad.append(f"line {number} ({_reason(error)})")
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        fix = f"each line must be JSON of the form {SHAPES}: mend or delete"
        raise ValueError(f"training data {path}: {'; '.join(bad[:5])}{more}: {fix}")
    yield from rows


def check_lines(path: str) -> None:
    """Raise ValueError for an output of rows whose name is that of raw text or of a gzipped file."""
    if _is_raw(path):
        raise ValueError(f"output {path} would be read as raw text, and holds JSON: name a .jsonl file")
    if path.endswith(".gz"):
        fix = "name a .jsonl file, and gzip it afterwards"
        raise ValueError(f"output {path} is written as plain text: {fix}")


def _is_raw(path: str) -> bool:
    return Path(path.removesuffix(".gz")).suffix == ".txt"


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """OpenAI's messages of a row in OpenAI's, ShareGPT's or Alpaca's shape. Raises ValueError for others."""
    if shape := next((key for key in ("messages", "conversations") if key in row), None):
        turns = row[shape]
    elif "instruction" in row:
        question = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        turns = [{"role": "user", "content": question}]
        turns += [{"role": "assistant", "content": row["output"]}] if "output" in row else []
    else:
        raise ValueError(f"keys {sorted(row)}")
    if row.get("system") and all(turn.get("role", turn.get("from")) != "system" for turn in turns):
        turns = [{"role": "system", "content": row["system"]}, *turns]
    weight = {"weight": row["weight"]} if "weight" in row else {}
    messages = [_turn({**weight, **turn}) for turn in turns]
    return list(dropwhile(lambda message: message["role"] == "assistant", messages))  # answers to no question


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's or ShareGPT's shape, without empty fields. Raises ValueError."""
    message = message_of({**turn, "role": turn["from"], "content": turn["value"]} if "from" in turn else turn)
    if turn.get("function_call"):
        raise ValueError("function_call is of earlier versions of OpenAI's: write tool_calls")
    if (weight := turn.get("weight")) not in (None, 0, 1):
        raise ValueError(f"weight {weight!r}: give 0, of what is read and not learnt, or 1")
    if (role := ROLES.get(message["role"])) is None:
        raise ValueError(f"role {message['role']!r}")
    optional = {key: message[key] for key in OPTIONAL if message.get(key)}
    if weight == 0 and role == "assistant":
        optional["weight"] = 0
    return {"role": role, "content": message["content"], **optional}


def encode_row(row: dict[str, Any], target: Target, max_length: int) -> Example:
    """Token ids and loss mask of a row. Prompts and answers are tokenised apart, as decoding does. Raises
    ValueError: the target lacks a tokenizer or a chat template, or the template rewrites earlier turns."""
    if (words := target.text) is None:
        raise ValueError(f"target {target.name} has no tokenizer to read training data with")
    greedy = row.get("temperature") == 0
    if "text" in row:
        ids = words.ids(row["text"], special=True)
        tokens = ids[:max_length]
        return Example(tokens, [True] * len(tokens), asked=tuple(ids) if len(ids) > max_length else ())
    if "prompt" in row:
        prompt, answer = words.ids(row["prompt"], special=True), words.ids(row.get("completion", ""))
        if "completion" in row and row.get("finished", True) and words.eos is not None:
            answer.append(words.eos)
        loss = [False] * len(prompt) + [True] * len(answer)
        return Example((prompt + answer)[:max_length], loss[:max_length], greedy)
    if not words.has_chat:
        others = '{"prompt", "completion"}, {"text"} or a .txt file'
        raise ValueError(f"target {target.name} has no chat template: give {others}")
    messages, tools, tokens, loss, text = row["messages"], row.get("tools", ()), [], [], ""
    ends = {*several(target.generation_config.eos_token_id), words.eos}
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i in answers:
        asked = words.render(messages[:i], ask=True, tools=tools)
        answered = words.render(messages[: i + 1], ask=False, tools=tools)
        for key in (key for key in REASONS if key in messages[i]):
            without = {name: value for name, value in messages[i].items() if name != key}
            if answered == words.render([*messages[:i], without], ask=False, tools=tools):
                raise ValueError(f"the chat template of {target.name} does not write {key}: leave it out")
        if not (asked.startswith(text) and answered.startswith(asked)):
            fix = "give rows of one question and one answer"
            raise ValueError(f"the chat template rewrites earlier turns: {fix}")
        prompt, answer = words.ids(asked.behind(len(text))), words.ids(answered.behind(len(asked)))
        own = next((j + 1 for j, token in enumerate(answer) if token in ends), len(answer))
        # Where a length limit cut the last answer, the target did not end it.
        if i == answers[-1] and not row.get("finished", True):
            answer = answer[: own - 1]
        tokens += prompt + answer
        learnt = messages[i].get("weight", 1) != 0
        loss += [False] * len(prompt) + [learnt and j < own for j in range(len(answer))]
        text = answered
    first = messages[: answers[0]] if answers else []
    bare = [message for message in first if message["role"] != "system"]
    asks = 0 < len(bare) < len(first)
    question = words.ids(words.render(bare, ask=True, tools=tools)) if asks else []
    return Example(tokens[:max_length], loss[:max_length], greedy, tuple(question))


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """The text of a row or its messages, and what is `RECORDED` of it. Raises ValueError."""
    recorded = {key: row[key] for key in RECORDED if key in row}
    if isinstance(row.get("prompt"), str) and row["prompt"] and not (TURNS | {"text"}) & row.keys():
        if not isinstance(row.get("completion", ""), str):
            raise ValueError("completion is no string")
        return {key: row[key] for key in ("prompt", "completion") if key in row} | recorded
    if "text" not in row or TURNS & row.keys():  # a text next to turns is their rendering
        return {"messages": messages_of(row)} | _tools(row) | recorded
    if not isinstance(row["text"], str) or not row["text"]:
        raise ValueError("text is empty or no string")
    return {"text": row["text"]} | recorded


def _tools(row: dict[str, Any]) -> dict[str, Any]:
    """The tools that a row offers, as values or as JSON of them. Raises ValueError."""
    if row.get("functions"):
        raise ValueError("functions are of earlier versions of OpenAI's: write tools")
    tools = parsed(row["tools"] or "[]") if isinstance(row.get("tools"), str) else row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError('tools is no list of {"type": "function", "function": {…}}')
    return {"tools": tools} if tools else {}


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error.msg} at column {error.colno}"
    return f"missing {error}" if isinstance(error, KeyError) else str(error)


def hold_out(examples: Sequence[Example], count: int) -> tuple[list[Example], list[Example]]:
    """(training examples, held-out examples). At most `count`, and an eighth of all, are held out, each with
    another question. A greedy answer is preferred: the target need not write it again. Held out are the
    questions with the smallest hashes. Further rows do not turn a learnt question into a held-out one, so a
    head that is trained on with more data (`head.start`) is judged by unseen texts."""
    count = min(count, len(examples) // 8)
    order = sorted(range(len(examples)), key=lambda i: (examples[i].greedy, -i))
    row_of = {examples[i].question: i for i in order}  # the first greedy row that asks it, else the first

    def digest(question: tuple[int, ...]) -> bytes:
        return hashlib.sha256(np.asarray(question, dtype=np.int32).tobytes()).digest()

    held = {row_of[question] for question in sorted(row_of, key=digest)[:count]}
    return [e for i, e in enumerate(examples) if i not in held], [examples[i] for i in sorted(held)]
