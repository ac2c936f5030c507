"""The server: its limits, its routes, and how a request becomes texts of the engine."""

import asyncio
import json
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from math import ceil
from time import time
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from slipstream.core.drafter import Drafter
from slipstream.core.grammar import Grammar, GrammarLimits
from slipstream.core.target import Target
from slipstream.engine.request import Request as TextRequest
from slipstream.engine.sampling_params import SamplingParams
from slipstream.serve.guard import API_KEY, Guard
from slipstream.serve.metrics import Metrics
from slipstream.serve.page import page
from slipstream.serve.replies import GONE, Events, Form, Refused, Reply, Whole, given_up, timed_out
from slipstream.serve.schema import Bias, ChatCompletion, Completion
from slipstream.serve.tools import Calls
from slipstream.serve.worker import Busy, Ended, Update, Worker
from slipstream.targets.grammar import Beyond, read_grammar

COMPLETION_TOKENS = 16  # of a completion that names no number, as OpenAI has it
PLAIN = "vanilla"
Body = Completion | ChatCompletion
LITTLE, LARGE = GrammarLimits(seconds=0.25, memory=16), 2  # of most grammars; others that are read at once


@dataclass(frozen=True)
class Limits:
    """What a server takes."""

    rows: int = 16  # texts under way at once
    queue: int = 64  # texts that may wait for a row
    context: int | None = None  # tokens of prompt and answer; None: the target's window, 4096 at most
    keep: int = 8192  # tokens of ended texts whose caches are kept, for prompts that begin as they did
    body: int = 2**20  # bytes of a request
    seconds: float = 600.0  # a request may take, its reader included
    grammar: GrammarLimits = field(default_factory=GrammarLimits)  # what reading a grammar may take

    def tokens(self, target: Target) -> int:
        """Of prompt and answer, at most. Raises ValueError for more than the target's window."""
        if (self.context or 0) > target.window:
            window = f"{target.name} has a window of {target.window}"
            raise ValueError(f"{self.context} tokens of context; {window}: give at most that")
        return self.context or min(target.window, 4096)


class Server:
    """One target, one engine, and the requests to it.

    Args:
        spec: what the drafter was called.
        keys, hosts: see `Guard`.
        log: takes a line for each request; None: no log.
        name: what requests call the model; None: as the target is called.

    Attributes:
        app: the server for ASGI.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        spec: str,
        limits: Limits = Limits(),
        keys: Collection[str] = (),
        log: Callable[[str], Any] | None = None,
        hosts: Collection[str] | None = None,
        name: str | None = None,
    ) -> None:
        if target.text is None:
            raise ValueError(f"target {target.name} has no tokenizer: a server cannot read text with it")
        self.target, self.spec, self.limits, self.text = target, spec, limits, target.text
        SamplingParams.of(target)  # what its generation_config asks for can be honoured
        self.name = name or target.name
        self.context = limits.tokens(target)
        rows, queue = limits.rows, limits.queue
        self.worker = Worker(target, drafter, rows, self.context, queue, self._post, limits.keep)
        self.metrics = Metrics(self.worker)
        self._longest = max(map(len, self.text.vocabulary))  # characters of a token
        self.fingerprint = f"{target.fingerprint}, {target.precision}"
        self.created = int(time())
        self._reader = ThreadPoolExecutor(1, "prompts")  # one thread: a tokenizer is not for several
        # Threads that wait for processes, so that no grammar waits for another.
        self._grammars = ThreadPoolExecutor(rows + queue, "grammars")
        self._large = threading.Semaphore(LARGE)
        self._loop: asyncio.AbstractEventLoop | None = None
        app = FastAPI(title="Slipstream", version=version("slipstream"), docs_url=None, redoc_url=None)
        app.router.lifespan_context = self._lifespan
        app.get("/", include_in_schema=False)(self.playground)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/metrics")(self.figures)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat)
        for kind in (Refused, RequestValidationError, HTTPException, Exception):
            app.add_exception_handler(kind, _failed)
        self.app = Guard(app, hosts, keys, limits.body, limits.seconds, log, self.metrics)

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self.worker.start()
        yield
        await asyncio.to_thread(self.worker.close)
        self._reader.shutdown()
        self._grammars.shutdown()

    def _post(self, updates: list[Update]) -> None:
        """Pass updates from the worker's thread to the server's."""
        assert self._loop is not None
        with suppress(RuntimeError):  # a second Ctrl-C has closed the loop
            self._loop.call_soon_threadsafe(_tell, updates)

    async def playground(self) -> Response:
        """A chat in the browser, which shows what was drafted."""
        traces = not self.worker.engine.drafter.remembers
        return HTMLResponse(page(self.name, self.spec, traces, self.text.has_chat))

    async def health(self) -> Response:
        """200 while texts are made."""
        return Response(status_code=200 if self.worker.alive else 503)

    async def ready(self) -> Response:
        """200 once requests are answered. While the model loads `Loading` answers, with 503."""
        return await self.health()

    async def figures(self) -> Response:
        """Figures for Prometheus."""
        text = generate_latest(self.metrics.registry)
        return Response(text, media_type="text/plain; version=1.0.0; charset=utf-8")

    async def models(self) -> dict[str, Any]:
        """The models that are served: one."""
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        """One of them."""
        self._check_model(name)
        fields = {"id": self.name, "object": "model", "created": self.created, "owned_by": "slipstream"}
        own = {"precision": self.target.precision, "exactness": self.target.exactness, "drafter": self.spec}
        return fields | {"max_model_len": self.context} | own

    async def completions(self, body: Completion, request: Request) -> Response:
        """Continue text as it stands."""
        return await self._reply(body, request)

    async def chat(self, body: ChatCompletion, request: Request) -> Response:
        """Answer messages, through the target's chat template."""
        if not self.text.has_chat:
            raise Refused(f"{self.target.name} has no chat template: ask /v1/completions")
        if body.offered and not self.text.calls_tools:
            fault = f"the chat template of {self.target.name} has no tools, or not as <tool_call>"
            raise Refused(f"{fault}: leave them out", param="tools")
        return await self._reply(body, request)

    async def _reply(self, body: Body, request: Request) -> Reply:
        """Queue what is asked for. Raises Refused."""
        self._check_model(body.model)
        self._check_size(body)
        if body.drafter not in (None, PLAIN, self.spec):
            fault = f"drafter is {body.drafter!r}; this server has {PLAIN!r} and {self.spec!r}"
            raise Refused(fault, param="drafter")
        if body.trace and self.worker.engine.drafter.remembers:
            fault = f"the guesses of {self.spec!r} are of other requests' answers, which a trace would show"
            raise Refused(fault, param="trace")
        seed = secrets.randbits(53) if body.seed is None else body.seed
        form = Form(isinstance(body, ChatCompletion), self.name, seed, self.fingerprint, self.text)
        form.usage = body.stream_options is not None and body.stream_options.include_usage
        reply = (Events if body.stream else Whole)(self.worker, self.metrics, form, self.limits.seconds)
        loop = asyncio.get_running_loop()
        try:
            grammar = await self._grammar(body, request)
            texts = await loop.run_in_executor(self._reader, self._texts, body, seed, reply, grammar)
            for text in texts:  # Python's hash of texts is keyed by a secret of the process
                text.salt = hash((request.scope.get(API_KEY), body.prompt_cache_key))
            reply.submit(texts)
        except ValueError as error:
            raise Refused(str(error)) from error
        except Ended as error:
            raise Refused(str(error), 503) from error
        except Busy as error:
            wait = str(max(1, ceil(self.metrics.typical_seconds)))
            raise Refused(str(error), 429, Retry_After=wait) from error
        if isinstance(body, ChatCompletion):
            names = {tool["function"]["name"] for tool in body.offered}
            form.calls = partial(Calls, names, body.parallel_tool_calls is not False)
        elif body.echo:
            prompts = [row if isinstance(row, str) else self.text.decode(row) for row in body.prompts]
            form.echoes = [prompt for prompt in prompts for _ in range(body.n or 1)]
        return reply

    async def _grammar(self, body: Body, request: Request) -> Grammar | None:
        """The grammar that is asked for, if one is, read while the client waits and others are answered.
        Raises ValueError; Refused if the client leaves, or after the time that a request may take."""
        bounds = {} if body.response_format is None else body.response_format.bounds
        if not bounds:
            return None
        ((kind, source),) = bounds.items()
        gone, eos, limit = threading.Event(), SamplingParams.of(self.target).eos, self.limits.seconds
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._grammars, self._read_grammar, kind, source, eos, gone)
        try:
            fault = await given_up(reading, request.receive, limit)
        finally:
            gone.set()
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        if fault is None:
            return await reading
        if fault == GONE:
            request.scope["slipstream"]["ended"] = fault
            raise Refused(fault, 499)
        raise timed_out(f"the grammar could not be read in {limit:g} s, this server's limit")

    def _read_grammar(self, kind: str, source: Any, eos: frozenset[int], gone: threading.Event) -> Grammar:
        """Most grammars take little. Those that take more are read again a few at a time, as there is not
        memory for many."""
        limits = self.limits.grammar
        little = GrammarLimits(min(LITTLE.seconds, limits.seconds), min(LITTLE.memory, limits.memory))
        with suppress(Beyond):
            return read_grammar(self.target, kind, source, eos, little, gone)
        with self._large:
            return read_grammar(self.target, kind, source, eos, limits, gone)

    def _texts(self, body: Body, seed: int, reply: Reply, grammar: Grammar | None) -> list[TextRequest]:
        """The texts of a request, as `generate` would make them: `n` of each prompt. Raises ValueError."""
        rows = [prompt for prompt in body.ids(self.target) for _ in range(body.n or 1)]
        config, tokens = self.target.generation_config, body.max_tokens
        if tokens is None and not isinstance(body, ChatCompletion):
            tokens = COMPLETION_TOKENS
        elif tokens is None and config.max_new_tokens is None and config.max_length is None:
            tokens = self.context
        bias = [Bias.of(body.logit_bias, self.target.vocab)] if body.logit_bias else []
        own = body.sampling() | {"seed": seed}
        params = SamplingParams.of(self.target, tokens, processors=bias, grammar=grammar, **own)
        fields: Any = {"streams": True, "plain": body.drafter == PLAIN, "tell": reply.hear}
        fields |= {"most_likely": body.most_likely, "traced": bool(body.trace)}
        limits = [self._limit(params, prompt, body.max_tokens) for prompt in rows]
        return [params.request(i, *row, **fields) for i, row in enumerate(zip(rows, limits, strict=True))]

    def _limit(self, params: SamplingParams, prompt: list[int], wanted: int | None) -> int:
        """The most tokens that an answer may have. Raises Refused if the context is too short."""
        room = self.context - len(prompt)
        if room < 1 or (wanted is not None and wanted > room):
            answer = "" if wanted is None else f" and the answer may have {wanted}"
            fault = f"the prompt has {len(prompt)} tokens{answer}; this server takes at most {self.context} "
            fault += "tokens of prompt and answer together: shorten one of them"
            raise Refused(fault, code="context_length_exceeded")
        return min(params.limit(prompt), room)

    def _check_size(self, body: Body) -> None:
        """Raises Refused for what is too much, before anything is tokenised: all others wait for that."""
        sizes, most = body.sizes, self.limits.rows + self.limits.queue
        if (count := len(sizes) * (body.n or 1)) > most:
            raise Refused(f"{count} texts are asked for; this server takes at most {most} at once")
        for characters, tokens in sizes:
            if (least := max(tokens, ceil(characters / self._longest))) > self.context:
                fault = f"the prompt has {least} tokens at least; this server takes at most {self.context}"
                raise Refused(f"{fault} tokens of prompt and answer together", code="context_length_exceeded")

    def _check_model(self, name: str) -> None:
        if name != self.name:
            fault = f"there is no model {name!r}: this server has {self.name!r}"
            raise Refused(fault, 404, param="model", code="model_not_found")


def _tell(updates: list[Update]) -> None:
    for update in updates:
        if update.request.tell is not None:
            update.request.tell(update)


async def _failed(request: Request, error: Any) -> Response:
    """Every failure is OpenAI's error."""
    if isinstance(error, RequestValidationError):
        error = _invalid(error)
    elif isinstance(error, HTTPException):
        detail, cause = str(error.detail), error.__cause__
        if isinstance(cause, UnicodeDecodeError):
            detail = "the body is not UTF-8 text"
        elif isinstance(cause, (ValueError, RecursionError)):  # too many digits, or too many brackets
            detail = f"the body cannot be read as JSON: {str(cause).split(';')[0]}"
        error = Refused(detail, error.status_code, **(error.headers or {}))
    elif not isinstance(error, Refused):
        error = Refused(f"{type(error).__name__}: {error}", 500)
    return error.response()


def _invalid(error: RequestValidationError) -> Refused:
    """The first fault of a body, in one line; where a value may be of several kinds, the faults of each."""
    faults = error.errors()
    first, place = faults[0], faults[0]["loc"]
    if first["type"] == "json_invalid":
        return Refused(f"the body is no JSON: {first['ctx']['error']} at character {place[1]}")
    if isinstance(error.body, bytes):
        return Refused("the body is read as JSON: send the header Content-Type: application/json")
    if first["type"] == "missing" and len(place) == 1:
        return Refused("the body is empty: send a JSON object")
    if first["type"] == "model_attributes_type" and len(place) == 1:
        return Refused(f"the body is {_short(error.body)}: send a JSON object")
    same = [fault for fault in faults if len(place) > 2 and fault["loc"][: len(place) - 1] == place[:-1]]
    message = "; ".join(map(_described, same[:4] or [first]))
    return Refused(message, param=str(place[1]) if len(place) > 1 else None)


def _described(fault: dict[str, Any]) -> str:
    """Where a fault is, and what it is."""
    where = ".".join(map(str, fault["loc"][1:]))
    message, value = fault["msg"].removeprefix("Value error, "), fault.get("input")
    if fault["type"] == "extra_forbidden":
        message = f"this server does not know it, or cannot do what it asks for ({_short(value)})"
    elif where and (fault["type"].endswith("_type") or not isinstance(value, dict | list)):
        message += f", not {_short(value)}"
    return f"{where}: {message}" if where else message


def _short(value: Any) -> str:
    """A value as JSON, its beginning if it is long."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"
