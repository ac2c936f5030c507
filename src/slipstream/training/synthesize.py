"""Training data that the target writes: answers to given prompts, and prompts from its own chat template."""

import json
import os
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count, islice
from typing import Any, TypeVar, final

from slipstream.core.sampling import Sampling
from slipstream.decode.generate import Generation, generate
from slipstream.decode.settings import Settings
from slipstream.files import STANDARD, check_counts, locked, parsed
from slipstream.targets import Target

T = TypeVar("T")
Messages = list[dict[str, str]]
Append = Callable[[Sequence[Messages], Sequence["Written"], float], None]
HERE = "\u2983slipstream\u2984"  # the user's words, by which the template's text is cut
ABOUT = {"source": "self"}  # every row begins with this
PATIENCE = 5  # batches without a usable prompt, after which synthesis stops
PROMPT_TOKENS = (4, 200)  # shorter and longer prompts are discarded


@dataclass(frozen=True)
class Written:
    """One text; `finished` is false if a length limit cut it."""

    text: str
    finished: bool


class Writer(ABC):
    """What writes texts: the target in this process, or a server."""

    @property
    def about(self) -> dict[str, str]:
        """The model, as every row records it."""
        return {"writer": type(self).__name__}

    def check(self, prompts: Sequence[Messages], limit: int) -> None:  # noqa: B027  a server checks itself
        """Raise ValueError if a prompt leaves no room for an answer, before the first one is answered."""

    @abstractmethod
    def answer(self, prompts: Sequence[Messages], temperature: float, limit: int, seed: int) -> list[Written]:
        """The assistant's answer to each conversation, of at most `limit` tokens."""

    @abstractmethod
    def go_on(self, text: str, n: int, temperature: float, limit: int, seed: int) -> list[Written]:
        """`n` continuations of a raw text, each up to its end token."""


@final
class TargetWriter(Writer):
    """Writes by plain decoding in batches."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @property
    def about(self) -> dict[str, str]:
        return {
            "target": self.target.name,
            "fingerprint": self.target.fingerprint,
            "dtype": self.target.dtype_name,
        }

    def check(self, prompts: Sequence[Messages], limit: int) -> None:
        for number, prompt in enumerate(prompts, 1):
            try:
                Settings.of(self.target, limit).limit(self.target.encode(prompt))
            except ValueError as error:
                raise ValueError(f"question {number}: {error}") from error

    def answer(self, prompts: Sequence[Messages], temperature: float, limit: int, seed: int) -> list[Written]:
        return self._write([self.target.encode(prompt) for prompt in prompts], temperature, limit, seed)

    def go_on(self, text: str, n: int, temperature: float, limit: int, seed: int) -> list[Written]:
        assert self.target.tokenizer is not None
        ids = list(self.target.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._write([ids] * n, temperature, limit, seed)

    def _write(self, prompts: list[list[int]], temperature: float, limit: int, seed: int) -> list[Written]:
        made: list[Generation] = generate(
            self.target, prompts, max_new_tokens=limit, temperature=temperature, seed=seed
        )
        return [Written(answer.text.strip(), answer.finish == "eos") for answer in made]


@final
class ServerWriter(Writer):
    """Writes through an OpenAI-compatible server of the same model, such as `vllm serve`.

    Args:
        url: its base, http://host:port/v1.
        model: the server's name for the model; default: its first model.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.model = model or self._ask("models", None, lambda reply: str(reply["data"][0]["id"]))

    @property
    def about(self) -> dict[str, str]:
        return {"server_model": self.model}

    def answer(self, prompts: Sequence[Messages], temperature: float, limit: int, seed: int) -> list[Written]:
        def one(item: tuple[int, Messages]) -> Written:
            settings = {"temperature": temperature, "max_tokens": limit, "seed": wrapped(seed + item[0])}
            return self._ask(
                "chat/completions", {"model": self.model, "messages": item[1], **settings}, _answer
            )

        with ThreadPoolExecutor(max(len(prompts), 1)) as pool:  # the server batches concurrent requests
            return list(pool.map(one, enumerate(prompts)))

    def go_on(self, text: str, n: int, temperature: float, limit: int, seed: int) -> list[Written]:
        settings = {"temperature": temperature, "max_tokens": limit, "seed": seed, "n": n}
        return self._ask("completions", {"model": self.model, "prompt": text, **settings}, _continuations)

    def _ask(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as reply:
                return read(json.load(reply))
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:  # no such server
            raise ValueError(
                f"server {self.url}/{path}: {error}: give the base of an OpenAI-compatible server, such as "
                "http://localhost:8000/v1"
            ) from error


def _answer(reply: Any) -> Written:
    choice = reply["choices"][0]
    return Written((choice["message"]["content"] or "").strip(), choice["finish_reason"] == "stop")


def _continuations(reply: Any) -> list[Written]:
    return [Written(choice["text"].strip(), choice["finish_reason"] == "stop") for choice in reply["choices"]]


def regenerate(
    rows: Sequence[Messages],
    writer: Writer,
    out: str,
    temperatures: Sequence[float],
    limit: int,
    batch: int,
    seed: int = 0,
    advance: Callable[[int], None] = lambda n: None,
) -> int:
    """Let the target answer the first questions of each row, whose own answers are dropped.

    Lines are appended batch by batch. A run continues what an interrupted one has written.

    Args:
        rows: conversations; each is cut before its first assistant turn.
        temperatures: used in turn, batch by batch.

    Returns:
        The number of lines in the file.

    Raises:
        ValueError: the file holds answers to other questions, by another model or under other settings;
            another process writes it; it cannot be written; or there is no question.
    """
    made = _made(out, writer, temperatures, limit, batch, seed)
    asked = [question for messages in rows if (question := _question(messages))]
    if not asked:
        raise ValueError(
            f"{len(rows)} conversations hold no question: give rows in which a user asks something"
        )
    writer.check(asked, limit)
    with _appending(out, made) as (known, append):
        written = [_question(messages) for messages in known]
        if written != asked[: len(written)]:
            raise ValueError(f"{out} holds answers to other questions than these: name another file")
        advance(len(written))
        for start in range(len(written) // batch * batch, len(asked), batch):
            if fresh := asked[max(len(written), start) : start + batch]:
                temperature = temperatures[start // batch % len(temperatures)]
                append(fresh, writer.answer(fresh, temperature, limit, wrapped(seed + start)), temperature)
                advance(len(fresh))
    return len(asked)


def templated(rows: Sequence[Messages], systems: Sequence[str]) -> list[Messages]:
    """Each conversation as it is, and once under each system message instead of its own (BiTA, Table 6)."""
    return [
        again
        for messages in rows
        for bare in [[message for message in messages if message["role"] != "system"]]
        for again in (messages, *([{"role": "system", "content": system}, *bare] for system in systems))
    ]


def synthesize(
    target: Target,
    writer: Writer,
    out: str,
    n: int,
    temperatures: Sequence[float],
    prompt_temperature: float,
    limit: int,
    batch: int,
    seed: int = 0,
    advance: Callable[[int], None] = lambda n: None,
) -> int:
    """Let the target write `n` prompts and answer them, batch by batch. A run continues an interrupted file.

    Returns:
        The number of lines in the file.

    Raises:
        ValueError: the target has no chat template, or writes no usable prompts; the file holds something
            else, or answers by another model or under other settings; another process writes it; or it cannot
            be written.
    """
    check_counts(prompts=n)
    made = _made(out, writer, temperatures, limit, batch, seed, prompt_temperature)
    with _appending(out, made) as (known, append):
        asked = [_question(messages)[0]["content"] for messages in known]
        done = len(asked)
        advance(min(done, n))
        prompts = synthesize_prompts(
            target, writer, n, prompt_temperature, batch, wrapped(seed + done), asked
        )
        while fresh := [[{"role": "user", "content": text}] for text in islice(prompts, batch)]:
            temperature = temperatures[done // batch % len(temperatures)]
            append(fresh, writer.answer(fresh, temperature, limit, wrapped(seed + done)), temperature)
            done += len(fresh)
            advance(len(fresh))
    return done


def synthesize_prompts(
    target: Target,
    writer: Writer,
    n: int,
    temperature: float,
    batch: int,
    seed: int = 0,
    known: Iterable[str] = (),
) -> Iterator[str]:
    """Prompts that the target writes when it continues its chat template from where a user's words begin.

    There are `n` of them together with the `known` ones. Too short, too long, unfinished and repeated prompts
    are discarded.

    Raises:
        ValueError: the target has no chat template, or does not write usable prompts.
    """
    opening = opening_of(target)
    seen = set(known)
    idle = 0
    assert target.tokenizer is not None
    for i in count():
        if len(seen) >= n:
            return
        before = len(seen)
        for written in writer.go_on(opening, batch, temperature, PROMPT_TOKENS[1], wrapped(seed + i)):
            length = len(target.tokenizer(written.text)["input_ids"])
            if written.finished and length >= PROMPT_TOKENS[0] and written.text not in seen and len(seen) < n:
                seen.add(written.text)
                yield written.text
        idle = idle + 1 if len(seen) == before else 0
        if idle == PATIENCE:
            raise ValueError(
                f"target {target.name} wrote {len(seen)} usable prompts and then none: raise the "
                "temperature, or give prompts of your own to `slipstream regenerate`"
            )


def opening_of(target: Target) -> str:
    """The chat template's text up to the user's words. Raises ValueError if there is no template."""
    if not target.has_chat:
        raise ValueError(
            f"target {target.name} has no chat template to write prompts from: use `slipstream regenerate`"
        )
    assert target.tokenizer is not None
    conversation: Any = [{"role": "user", "content": HERE}]
    text = str(
        target.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)
    )
    return text[: text.index(HERE)]


def _question(messages: Messages) -> Messages:
    turns = [message["role"] for message in messages]
    return messages[: turns.index("assistant")] if "assistant" in turns else messages


def _made(
    path: str,
    writer: Writer,
    temperatures: Sequence[float],
    limit: int,
    batch: int,
    seed: int,
    prompt_temperature: float | None = None,
) -> dict[str, Any]:
    """The model and the settings, as each row records them. Raises ValueError for a setting out of range, or
    an output that is no file."""
    if path in STANDARD or (os.path.exists(path) and not os.path.isfile(path)):
        raise ValueError(f"output {path} is no file: name one, which an interrupted run can go on with")
    check_counts(max_new_tokens=limit, batch=batch, temperatures=len(temperatures))
    asked = {} if prompt_temperature is None else {"prompt_temperature": prompt_temperature}
    for temperature in (*temperatures, *asked.values()):
        Sampling(temperature=temperature, seed=seed)
    how = {"temperatures": list(temperatures), "max_new_tokens": limit, "batch": batch, "seed": seed}
    return {**writer.about, **how, **asked}


@contextmanager
def _appending(path: str, made: dict[str, Any]) -> Iterator[tuple[list[Messages], Append]]:
    """The conversations that a file already holds, and a function that appends answers. The file is locked.

    Raises:
        ValueError: the file holds something else, or was made by another model or under other settings;
            another process writes it; or it cannot be written.
    """

    def append(asked: Sequence[Messages], answers: Sequence[Written], temperature: float) -> None:
        rows = [
            {
                **ABOUT,
                "made": made,
                "temperature": temperature,
                "finished": answer.finished,
                "messages": [*question, {"role": "assistant", "content": answer.text}],
            }
            for question, answer in zip(asked, answers, strict=True)
        ]
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except OSError as error:
            raise ValueError(
                f"output {path} cannot be written: {error.strerror}: what is there stays; run it again"
            ) from error

    with locked(path):
        rows = _written(path)
        for row in rows:
            _check_made(path, row.get("made"), made)
        yield [row["messages"] for row in rows], append


def _check_made(path: str, theirs: Any, ours: dict[str, Any]) -> None:
    """Raise ValueError if a row was made by another model or under other settings. A target may have several
    names, so its name is not compared."""
    if not isinstance(theirs, dict):
        raise ValueError(
            f"{path} does not say how it was made, as earlier versions did not: train on it, and name "
            "another file"
        )
    names = [name for name in ours | theirs if name != "target" and ours.get(name) != theirs.get(name)]
    if names:
        was, now = (", ".join(f"{name} {of.get(name, 'none')}" for name in names) for of in (theirs, ours))
        raise ValueError(
            f"{path} was made with {was}, not {now}: go on with what it was made with, or name another file"
        )


def _written(path: str) -> list[dict[str, Any]]:
    """The rows that a file already holds. An incomplete last line is cut off, if `regenerate` or `synthesize`
    wrote it. Raises ValueError."""
    try:
        if not os.path.exists(path):
            return []
        with open(path, "rb+") as file:
            *lines, half = file.read().split(b"\n")
            rows = [parsed(line.decode()) for line in lines]
            begun = json.dumps(ABOUT)[:-1].encode()
            if not all(row.items() >= ABOUT.items() and row["messages"] for row in rows):
                raise ValueError("not written by synthesize or regenerate")
            if half[: len(begun)] != begun[: len(half)]:
                raise ValueError("not written by synthesize or regenerate")
            file.truncate(sum(len(line) + 1 for line in lines))
            return rows
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}: name another file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds something else than answers: name another file") from error


def wrapped(seed: int) -> int:
    """A seed derived from a user's by addition, brought back into 63 bits."""
    return seed % 2**63
