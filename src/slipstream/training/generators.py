"""What writes training data: a target in this process, or a server that holds the same model."""

import json
import os
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice, tee
from typing import Any, NamedTuple, TypeVar, final
from urllib.error import HTTPError

import torch
from torch import Tensor

from slipstream.core.drafter import FINAL
from slipstream.core.sampling import Sampling
from slipstream.core.target import Target
from slipstream.engine.generate import generate
from slipstream.engine.sampling_params import SamplingParams
from slipstream.files import check_counts, check_given, evenly, is_whole, note
from slipstream.targets.hf import HFTarget
from slipstream.targets.load import AnyTarget, loaded
from slipstream.targets.prompts import encode
from slipstream.targets.recorded import RecordedTarget
from slipstream.training.batch_generation import BatchGenerator
from slipstream.training.resume import SOURCE, Row

T = TypeVar("T")
Messages = list[dict[str, Any]]
Prompt = Messages | str  # a conversation to answer, or raw text to go on with
STARTING = 300  # seconds for which a server that is not there yet is waited for
AUDITED, AUDITED_TOKENS = 8, 64  # texts of a batch that an audit reads, and how much of each
LIKELIEST = 0.9  # the least share of a greedy text's tokens that are the likeliest; rounding turns a few
KEY = "OPENAI_API_KEY"  # the environment's
# HTTP's codes for a full queue, for a key that is missing or wrong, and for an address that is not the API's.
BUSY, UNKNOWN, ELSEWHERE = 429, (401, 403), (404, 405)
SILENCE = 3600  # seconds that a reply may take: a busy server holds requests back


class TextRequest(NamedTuple):
    """A conversation to answer, or raw text to go on with. A temperature of None is the next in turn; a seed
    of None is drawn by the writer."""

    messages: Prompt
    temperature: float | None = None
    seed: int | None = None
    kind: str | None = None


class Written(NamedTuple):
    """A text. `finished` is false if a length limit cut it."""

    text: str
    finished: bool


class TextWriter(ABC):
    """Writes texts of at most `limit` tokens."""

    @property
    def about(self) -> dict[str, str]:
        """The model, as each row records it."""
        return {"writer": type(self).__name__}

    def has_room(self, prompt: Prompt) -> bool:
        """Whether a prompt leaves room for an answer. A server says so itself. Raises ValueError for one that
        cannot be asked."""
        return True

    @abstractmethod
    def answer(self, requests: Iterable[TextRequest], limit: int, batch: int) -> Iterator[Written]:
        """The assistant's answers, and what follows raw texts, in order. `batch` are written at once, and
        taken from `requests` then."""

    def go_on(self, texts: Sequence[str], temperature: float, limit: int, seed: int | None) -> list[Written]:
        """A continuation of each raw text, special tokens in it included, up to its end token. White space at
        its start is kept."""
        requests = [TextRequest(text, temperature, derived(seed, i)) for i, text in enumerate(texts)]
        return list(self.answer(requests, limit, len(texts)))


@final
class TargetWriter(TextWriter):
    """Writes by plain decoding: on a GPU of all texts at once, where `BatchGenerator` serves the target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._at_once: BatchGenerator | None = None

    @property
    def about(self) -> dict[str, str]:
        target = self.target
        about = {"target": target.name, "fingerprint": target.fingerprint, "dtype": target.precision}
        return about | {"generation_config": target.manner}

    def has_room(self, prompt: Prompt) -> bool:
        return len(self._ids(prompt)) < self.target.window

    def answer(self, requests: Iterable[TextRequest], limit: int, batch: int) -> Iterator[Written]:
        waiting = iter(requests)
        while some := list(islice(waiting, batch)):
            answers: dict[int, Written] = {}  # neighbours may differ in temperature, which a pass may not
            for temperature in dict.fromkeys(request.temperature for request in some):
                group = [i for i, request in enumerate(some) if request.temperature == temperature]
                prompts = [self._ids(some[i].messages) for i in group]
                written = self._write(prompts, temperature, limit, some[group[0]].seed)
                answers |= zip(group, written, strict=True)
            yield from map(answers.__getitem__, range(len(some)))

    def go_on(self, texts: Sequence[str], temperature: float, limit: int, seed: int | None) -> list[Written]:
        assert self.target.text is not None
        return self._write([self.target.text.ids(text) for text in texts], temperature, limit, seed)

    def _ids(self, prompt: Prompt) -> list[int]:
        """Of a conversation, or of raw text as it stands. Raises ValueError as `encode` does."""
        if not isinstance(prompt, str):
            return encode(self.target, prompt)
        text = self.target.text
        if text is None or not (tokens := text.ids(prompt, special=True)):
            raise ValueError(f"target {self.target.name} reads no tokens in the text {prompt!r:.80}")
        return tokens

    def _write(
        self, prompts: list[list[int]], temperature: float | None, limit: int, seed: int | None
    ) -> list[Written]:
        sampling: Any = {"temperature": temperature or 0.0, "seed": seed or 0}
        settings = SamplingParams.of(self.target, limit, **sampling)
        plain = settings.sampling == Sampling(**sampling) and not settings.stop
        if not (plain and BatchGenerator.serves(self.target)):
            answers = generate(self.target, prompts, "vanilla", max_new_tokens=limit, **sampling)
            return [Written(answer.text, answer.finish == "eos") for answer in answers]
        assert isinstance(self.target, HFTarget) and self.target.text is not None
        self._at_once = self._at_once or BatchGenerator(self.target, settings.eos)
        texts = self._at_once.write(prompts, settings.sampling.temperature, limit, settings.sampling.seed)
        audit(self.target, prompts, texts, settings.sampling.temperature)
        texts = [tokens[: settings.limit(prompt)] for prompt, tokens in zip(prompts, texts, strict=True)]
        return [Written(self.target.text.decode(tokens), tokens[-1] in settings.eos) for tokens in texts]


@torch.inference_mode()
def audit(
    target: Target, prompts: Sequence[list[int]], texts: Sequence[list[int]], temperature: float
) -> None:
    """Hold some texts against the target's law, a pass each: at T = 0 their tokens are the likeliest, else
    their mean surprise is the law's entropy, up to six standard errors. Raises ValueError."""
    some = evenly(list(zip(prompts, texts, strict=True)), AUDITED)
    recorded = RecordedTarget(target, [(prompt, text[:AUDITED_TOKENS]) for prompt, text in some], (FINAL,))
    likeliest, excess = list[Tensor](), list[Tensor]()
    for tokens, logits in recorded.answers():
        law = (logits.float() / (temperature or 1.0)).log_softmax(-1)
        likeliest.append((law.argmax(-1) == tokens).float())
        excess.append((law.exp() * law).sum(-1) - law.gather(1, tokens[:, None])[:, 0])
    share, over = torch.cat(likeliest).mean(), torch.cat(excess)
    error = over.std(correction=0).clamp(min=1.0) / len(over) ** 0.5
    if share < LIKELIEST if temperature == 0 else over.mean() > 6 * error:
        raise ValueError(
            f"what {target.name} wrote at temperature {temperature:g} is not its own ({share:.0%} of the "
            "tokens are its likeliest): please report this; a server (--server) or a CPU writes meanwhile"
        )


@final
class ServerWriter(TextWriter):
    """Writes through an OpenAI-compatible server of the same model, such as `vllm serve`. A key is taken from
    OPENAI_API_KEY; a server whose queue is full is asked again.

    Args:
        url: its base, http://host:port/v1.
        model: the server's name for the model; default: its first model.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url, self._ended = url.rstrip("/"), threading.Event()
        self.model = model or self._first_model()

    @property
    def about(self) -> dict[str, str]:
        return {"server_model": self.model}

    def answer(self, requests: Iterable[TextRequest], limit: int, batch: int) -> Iterator[Written]:
        def one(request: TextRequest) -> Written:
            messages, settings = request.messages, {"temperature": request.temperature, "max_tokens": limit}
            try:
                if isinstance(messages, str):
                    return self._write("completions", {"prompt": messages, **settings}, request.seed)
                return self._write("chat/completions", {"messages": messages, **settings}, request.seed)
            except ValueError as error:
                last = messages if isinstance(messages, str) else messages[-1]["content"]
                raise ValueError(f"{error}; it was asked {last!r:.80}") from error

        pool, sent = ThreadPoolExecutor(batch), deque[Future[Written]]()
        try:
            for request in requests:
                sent.append(pool.submit(one, request))
                while sent and (sent[0].done() or len(sent) == 2 * batch):  # a long answer holds up no others
                    yield sent.popleft().result()
            while sent:
                yield sent.popleft().result()
        except BaseException:
            self._ended.set()  # nobody waits any longer for a row of a full server
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self._ended.clear()

    def _write(self, path: str, body: dict[str, Any], seed: int | None) -> Written:
        def read(reply: Any) -> Written:
            choice = reply["choices"][0]
            text = choice["message"]["content"] or "" if "message" in choice else choice["text"]
            return Written(text, choice["finish_reason"] == "stop")

        return self._ask(path, {"model": self.model, **body} | ({} if seed is None else {"seed": seed}), read)

    def _first_model(self) -> str:
        """The server's first model. A server that is still starting is waited for."""
        until = time.monotonic() + STARTING
        while True:
            try:
                return self._ask("models", None, lambda reply: str(reply["data"][0]["id"]))
            except ValueError as error:
                cause = error.__cause__
                refused = isinstance(getattr(cause, "reason", cause), ConnectionRefusedError)
                starting = refused or getattr(cause, "code", None) == 503
                if not starting or time.monotonic() >= until:
                    raise
            note(f"server {self.url} is not ready: waiting up to {STARTING} seconds for its start")
            time.sleep(1)

    def _ask(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        until = time.monotonic() + SILENCE
        while True:
            try:
                request = urllib.request.Request(f"{self.url}/{path}", data, headers)
                with urllib.request.urlopen(request, timeout=SILENCE) as reply:
                    return read(json.load(reply))
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                reason = _reason(error)
                if getattr(error, "code", None) != BUSY or time.monotonic() >= until or self._ended.wait(1):
                    raise ValueError(f"server {self.url}/{path}: {error}: {reason}") from error


def _reason(error: Exception) -> str:
    """The server's reason for a refusal, or what to do."""
    if isinstance(error, HTTPError):
        with error:
            text = " ".join(error.read(500).decode(errors="replace").split())
        if error.code in UNKNOWN:
            return f"put its key into {KEY}"
        if text and error.code not in ELSEWHERE:
            return text
    return "give the base of an OpenAI-compatible server, such as http://localhost:8000/v1"


def writer_of(writer: "str | TextWriter | None", target: AnyTarget) -> TextWriter:
    """The server at a URL, a writer as it is, or the target where none is given. Raises ValueError."""
    if writer is None:
        return TargetWriter(loaded(target))
    return ServerWriter(writer) if isinstance(writer, str) else writer


def derived(seed: int | None, offset: int) -> int | None:
    """A user's seed plus an offset, brought back into 63 bits; None stays None."""
    return None if seed is None else (seed + offset) % 2**63


@dataclass
class Writing:
    """A writer and its settings. Batches take the temperatures in turn. A seed of None is 0 for a target; a
    server is sent none, as vLLM's CPU build fails on seeds where a prompt is read in two pieces."""

    writer: TextWriter
    temperatures: Sequence[float]
    max_new_tokens: int
    batch: int
    seed: int | None
    prompt_temperature: float | None = None
    kinds: Sequence[str] = ("any",)

    def __post_init__(self) -> None:
        check_given(temperatures=self.temperatures)
        check_counts(max_new_tokens=self.max_new_tokens, batch=self.batch)
        if self.seed is None and isinstance(self.writer, TargetWriter):
            self.seed = 0
        for temperature in (*self.temperatures, self.prompt_temperature or 0.0):
            Sampling(temperature=temperature, seed=self.seed or 0)
        for name, value in vars(self).items():  # rows record them as JSON, which has no NumPy
            if is_whole(value):
                setattr(self, name, int(value))

    @property
    def record(self) -> dict[str, Any]:
        """The model and the settings, as each row records them."""
        kinds = None if [*self.kinds] == ["any"] else [*self.kinds]  # earlier versions knew no kinds
        record = {**self.writer.about, **vars(self), "temperatures": [*self.temperatures], "kinds": kinds}
        return {name: value for name, value in record.items() if name != "writer" and value is not None}

    def first(self, done: int) -> int:
        """The row from which a file with `done` rows continues: the first of its last batch. A batch is
        answered again as a whole, since what is drawn may depend on its neighbours."""
        return done - done % self.batch

    def rows(self, questions: Iterable[TextRequest], done: int) -> Iterator[Row]:
        """The row of each question, in order, without the `done` rows that are in the file. The first
        question is that of row `first(done)`."""

        def requests() -> Iterator[TextRequest]:
            for number, question in enumerate(questions, self.first(done)):
                temperature = question.temperature
                if temperature is None:
                    temperature = self.temperatures[number // self.batch % len(self.temperatures)]
                yield question._replace(temperature=temperature, seed=derived(self.seed, number))

        sent, answered = tee(requests())
        answers = self.writer.answer(sent, self.max_new_tokens, self.batch)
        pairs = zip(answers, answered, strict=False)  # an answer first, for which its question is written
        for number, (answer, request) in enumerate(pairs, self.first(done)):
            if number >= done:
                yield self._row(request, answer)

    def _row(self, request: TextRequest, answer: Written) -> Row:
        row: Row = {**SOURCE, "made": self.record} | ({"kind": request.kind} if request.kind else {})
        row |= {"temperature": request.temperature, "finished": answer.finished}
        if isinstance(request.messages, str):
            return {**row, "prompt": request.messages, "completion": answer.text}
        reply = {"role": "assistant", "content": answer.text.strip()}
        return {**row, "messages": [*request.messages, reply]}
