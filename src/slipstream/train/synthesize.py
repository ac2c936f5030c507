"""Data from the target itself: answers to given prompts, and prompts written from its own chat template."""

import json
import os
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, final

from slipstream.decode.generate import Generation, generate
from slipstream.targets import Target

Messages = list[dict[str, str]]
HERE = "\u2983slipstream\u2984"  # stands for the user's words while the template is cut open
PROMPT_TOKENS = (4, 200)  # shorter and longer prompts are thrown away


@dataclass(frozen=True)
class Written:
    """One text; `finished` is false where a length limit cut it."""

    text: str
    finished: bool


class Writer(ABC):
    """Who writes: the target in this process, or a server."""

    @abstractmethod
    def answer(self, prompts: Sequence[Messages], temperature: float, limit: int, seed: int) -> list[Written]:
        """An assistant's answer to each conversation, at most `limit` tokens long."""

    @abstractmethod
    def go_on(self, text: str, n: int, temperature: float, limit: int, seed: int) -> list[Written]:
        """`n` continuations of a raw text, each up to the end token."""


@final
class TargetWriter(Writer):
    """Plain decoding in batches."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def answer(self, prompts: Sequence[Messages], temperature: float, limit: int, seed: int) -> list[Written]:
        return self._write([self.target.encode(prompt) for prompt in prompts], temperature, limit, seed)

    def go_on(self, text: str, n: int, temperature: float, limit: int, seed: int) -> list[Written]:
        assert self.target.tokenizer is not None
        ids = list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._write([ids] * n, temperature, limit, seed)

    def _write(self, prompts: list[list[int]], temperature: float, limit: int, seed: int) -> list[Written]:
        made: list[Generation] = generate(self.target, prompts, max_new_tokens=limit, temperature=temperature, seed=seed)
        return [Written(answer.text.strip(), answer.finish == "eos") for answer in made]


@final
class ServerWriter(Writer):
    """An OpenAI-compatible server, such as `vllm serve`, that holds the same model.

    Args:
        url: its base, http://host:port/v1.
        model: the name it serves the model under; default: its first.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.model = model or str(self._ask("models", None)["data"][0]["id"])

    def answer(self, prompts: Sequence[Messages], temperature: float, limit: int, seed: int) -> list[Written]:
        def one(item: tuple[int, Messages]) -> Written:
            settings = {"temperature": temperature, "max_tokens": limit, "seed": seed + item[0]}
            done = self._ask("chat/completions", {"model": self.model, "messages": item[1], **settings})["choices"][0]
            return Written((done["message"]["content"] or "").strip(), done["finish_reason"] == "stop")

        with ThreadPoolExecutor(max(len(prompts), 1)) as pool:  # the server makes a batch of them
            return list(pool.map(one, enumerate(prompts)))

    def go_on(self, text: str, n: int, temperature: float, limit: int, seed: int) -> list[Written]:
        settings = {"temperature": temperature, "max_tokens": limit, "seed": seed, "n": n}
        done = self._ask("completions", {"model": self.model, "prompt": text, **settings})
        return [Written(choice["text"].strip(), choice["finish_reason"] == "stop") for choice in done["choices"]]

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise ValueError(
                f"server {self.url}/{path}: {error}: give the base of an OpenAI-compatible server, such as "
                "http://localhost:8000/v1"
            ) from error


def regenerate(
    rows: Iterable[Messages],
    writer: Writer,
    out: str,
    temperatures: Sequence[float],
    limit: int,
    batch: int,
    seed: int = 0,
    advance: Callable[[int], None] = lambda n: None,
) -> int:
    """Let the target answer each row's first questions; whatever the rows' own answers were is dropped.

    Lines are appended batch by batch. What an interrupted run has written is gone on with.

    Args:
        rows: conversations; each is cut before its first assistant turn.
        temperatures: taken in turn, batch by batch.

    Returns:
        Lines in the file.
    """
    asked = [_question(messages) for messages in rows]
    done = _lines(out)
    advance(min(done, len(asked)))
    with _appending(out) as file:
        for i in range(done // batch, -(-len(asked) // batch)):
            fresh = asked[max(done, i * batch) : (i + 1) * batch]
            if not fresh:
                continue
            temperature = temperatures[i % len(temperatures)]
            answers = writer.answer(fresh, temperature, limit, seed + i)
            for question, answer in zip(fresh, answers, strict=True):
                messages = [*question, {"role": "assistant", "content": answer.text}]
                about = {"source": "regenerated", "temperature": temperature, "finished": answer.finished}
                file.write(json.dumps({**about, "messages": messages}, ensure_ascii=False) + "\n")
            file.flush()
            advance(len(fresh))
    return max(done, len(asked))


def synthesize_prompts(
    target: Target, writer: Writer, n: int, temperature: float, batch: int, seed: int = 0
) -> Iterator[Messages]:
    """Prompts that the target writes when it is asked to go on where its chat template lets a user speak.

    Empty, overlong, unfinished and repeated ones are thrown away.

    Raises:
        ValueError: the target has no chat template, or does not write usable prompts.
    """
    opening, seen = opening_of(target), set[str]()
    for i in count():
        before = len(seen)
        for written in writer.go_on(opening, batch, temperature, PROMPT_TOKENS[1], seed + i):
            assert target.tokenizer is not None
            length = len(target.tokenizer(written.text)["input_ids"])
            if written.finished and length >= PROMPT_TOKENS[0] and written.text not in seen:
                seen.add(written.text)
                yield [{"role": "user", "content": written.text}]
                if len(seen) == n:
                    return
        if len(seen) == before and i > 4:
            raise ValueError(
                f"target {target.name} wrote {len(seen)} usable prompts and then none: raise the temperature, or give "
                "prompts of your own to `slipstream regenerate`"
            )


def opening_of(target: Target) -> str:
    """The chat template's text up to where a user's words begin. Raises ValueError where there is no template."""
    if not target.has_chat:
        raise ValueError(f"target {target.name} has no chat template to write prompts from: use `slipstream regenerate`")
    assert target.tokenizer is not None
    conversation: Any = [{"role": "user", "content": HERE}]
    text = str(target.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False))
    return text[: text.index(HERE)]


def _question(messages: Messages) -> Messages:
    turns = [message["role"] for message in messages]
    return messages[: turns.index("assistant")] if "assistant" in turns else messages


def _lines(path: str) -> int:
    """Whole lines of a file; a half-written last one is cut off."""
    if not os.path.exists(path):
        return 0
    with open(path, "rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
    return data.count(b"\n")


def _appending(path: str) -> Any:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from error
