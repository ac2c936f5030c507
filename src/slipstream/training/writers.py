"""What writes training data: a target in this process, or a server that holds the same model."""

import json
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import count
from typing import Any, NamedTuple, TypeVar, final

from slipstream.core.target import Target
from slipstream.decode.generate import generate
from slipstream.decode.settings import Settings
from slipstream.targets.load import AnyTarget, loaded
from slipstream.targets.prompts import encode

T = TypeVar("T")
Messages = list[dict[str, str]]


class Written(NamedTuple):
    """A text. `finished` is false if a length limit cut it."""

    text: str
    finished: bool


class Writer(ABC):
    """Writes texts of at most `limit` tokens."""

    @property
    def about(self) -> dict[str, str]:
        """The model, as each row records it."""
        return {"writer": type(self).__name__}

    def check(self, prompts: Sequence[Messages], limit: int) -> None:  # noqa: B027  a server checks itself
        """Raise ValueError if a prompt leaves no room for an answer, before the first one is answered."""

    @abstractmethod
    def answer(self, prompts: Sequence[Messages], temperature: float, limit: int, seed: int) -> list[Written]:
        """The assistant's answer to each conversation."""

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
        target = self.target
        return {"target": target.name, "fingerprint": target.fingerprint, "dtype": target.dtype_name}

    def check(self, prompts: Sequence[Messages], limit: int) -> None:
        for number, prompt in enumerate(prompts, 1):
            try:
                Settings.of(self.target, limit).limit(encode(self.target, prompt))
            except ValueError as error:
                raise ValueError(f"question {number}: {error}") from error

    def answer(self, prompts: Sequence[Messages], temperature: float, limit: int, seed: int) -> list[Written]:
        return self._write([encode(self.target, prompt) for prompt in prompts], temperature, limit, seed)

    def go_on(self, text: str, n: int, temperature: float, limit: int, seed: int) -> list[Written]:
        assert self.target.text is not None
        return self._write([self.target.text.ids(text)] * n, temperature, limit, seed)

    def _write(self, prompts: list[list[int]], temperature: float, limit: int, seed: int) -> list[Written]:
        how: Any = {"max_new_tokens": limit, "temperature": temperature, "seed": seed}
        made = generate(self.target, prompts, "vanilla", **how)
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
        def one(i: int, messages: Messages) -> Written:
            body = {"messages": messages, "temperature": temperature, "max_tokens": limit}
            return self._write("chat/completions", {**body, "seed": wrapped(seed + i)})[0]

        with ThreadPoolExecutor(max(len(prompts), 1)) as pool:  # the server batches concurrent requests
            return list(pool.map(one, count(), prompts))

    def go_on(self, text: str, n: int, temperature: float, limit: int, seed: int) -> list[Written]:
        body = {"prompt": text, "temperature": temperature, "max_tokens": limit, "seed": seed, "n": n}
        return self._write("completions", body)

    def _write(self, path: str, body: dict[str, Any]) -> list[Written]:
        return self._ask(
            path, {"model": self.model, **body}, lambda reply: list(map(_written, reply["choices"]))
        )

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


def _written(choice: Any) -> Written:
    text = choice["message"]["content"] or "" if "message" in choice else choice["text"]
    return Written(text.strip(), choice["finish_reason"] == "stop")


def writer_of(given: "str | Writer | None", target: AnyTarget) -> Writer:
    """The server at a URL, a writer as it is, or the target where none is given. Raises ValueError."""
    if given is None:
        return TargetWriter(loaded(target))
    return ServerWriter(given) if isinstance(given, str) else given


def wrapped(seed: int) -> int:
    """A seed derived from a user's by addition, brought back into 63 bits."""
    return seed % 2**63
