"""Answers as OpenAI's JSON: whole, or as events while they are made."""

import asyncio
import json
from abc import abstractmethod
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.core.target import Text
from slipstream.engine.request import Request, mean_accepted_length
from slipstream.serve.metrics import Metrics
from slipstream.serve.tools import Calls
from slipstream.serve.worker import Likely, Update, Worker, cached_tokens

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
GONE, LATE = "the client left", "it took too long"  # why a request ended early
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout"}  # of errors
Object = dict[str, Any]
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class Refused(Exception):
    """A request that is not answered: OpenAI's error, with a status and headers."""

    def __init__(
        self, fault: str, status: int = 400, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(fault)
        self.status = status
        self.headers = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        kind = KINDS.get(status, "invalid_request_error")
        self.body = {"error": {"message": fault, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """As a response. Characters that UTF-8 does not have are escaped."""
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


@dataclass
class Form:
    """How a response is written: a chat's, or a completion's."""

    chat: bool
    model: str
    seed: int  # of the answers, so that a text can be made again
    fingerprint: str  # of the weights and their precision, on which texts depend as well
    text: Text
    usage: bool = False  # the last event of a stream holds it
    calls: Callable[[], Calls] = Calls  # parts an answer's text
    echoes: list[str] = field(default_factory=list)  # the prompts that stand before the texts, if wanted
    key: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time()))

    def response(self, kind: str, choices: list[Object], **more: Any) -> Object:
        """A response, or an event of a stream; `kind`: as a chat's is called."""
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.key}",
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "seed": self.seed,
            "system_fingerprint": self.fingerprint,
            **more,
        }

    def choice(
        self, index: int, text: str, likely: Any, finish: str | None, whole: bool, calls: Sequence[Any] = ()
    ) -> Object:
        """A text, or a piece of it, and the tools that it calls."""
        numbered = [*calls] if whole else [{"index": i, **call} for i, call in enumerate(calls)]
        called = {"tool_calls": numbered} if calls else {}
        content: Object = {"text": text}
        if self.chat and whole:
            content = {"message": {"role": "assistant", "content": text or None if calls else text} | called}
        elif self.chat:
            content = {"delta": {"content": text} | called}
        reason = FINISH.get(finish or "")
        reason = "tool_calls" if calls and reason else reason
        return {"index": index} | content | {"logprobs": likely, "finish_reason": reason}

    def likely(self, tokens: Sequence[Likely], place: "Place") -> Object:
        """Log-probabilities of tokens; `place`: where they begin in the answer, which moves behind them."""
        if self.chat:
            tops = [{"top_logprobs": [self._entry(*other) for other in it.top]} for it in tokens]
            content = [self._entry(it.token, it.logprob) | top for it, top in zip(tokens, tops, strict=True)]
            return {"content": content, "refusal": None}
        likeliest = [[*it.top, (it.token, it.logprob)] for it in tokens]
        return {
            "tokens": [self._name(it.token) for it in tokens],
            "token_logprobs": [it.logprob for it in tokens],
            "top_logprobs": [{self._name(token): logprob for token, logprob in top} for top in likeliest],
            "text_offset": [place.behind(self._bytes(it.token)) for it in tokens],
        }

    def _entry(self, token: int, logprob: float) -> Object:
        """A token alone. One that is a part of a character has bytes and no text of its own."""
        text, known = self.text.decode([token], special=True), self.text.bytes_of(token)
        return {"token": text, "logprob": logprob, "bytes": None if known is None else [*known]}

    def _bytes(self, token: int) -> bytes:
        return self.text.bytes_of(token) or self.text.decode([token], special=True).encode()

    def _name(self, token: int) -> str:
        """A token's text, or as OpenAI names a part of a character, by which it is told from others."""
        try:
            return self._bytes(token).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes(token))


class Place:
    """Where an answer's next token begins, in characters. A character begins with its first token."""

    def __init__(self) -> None:
        self._characters = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def behind(self, token: bytes) -> int:
        """Where this token begins; the next one begins behind it."""
        began = self._characters
        self._characters += len(self._decoder.decode(token))
        return began


class Reply(Response):
    """Waits for the texts of one HTTP request, and for the client to leave: then it lets go of the texts.

    However slowly the client reads, what it has not read is no more than the answers' text, and nothing waits
    for it.

    Args:
        seconds: the reply may take, its reader included.
    """

    def __init__(self, worker: Worker, metrics: Metrics, form: Form, seconds: float) -> None:
        super().__init__()
        self.worker, self.metrics, self.form, self.seconds = worker, metrics, form, seconds
        self.requests = list[Request]()
        self._heard = dict[int, float]()  # when each request had its last update
        self._unread = list[Update]()
        self._fresh = asyncio.Event()
        self._started = False

    def submit(self, requests: list[Request]) -> None:
        """Queue the requests. Raises Busy."""
        self.worker.submit(requests)
        self.requests = requests

    def hear(self, update: Update) -> None:
        """Take an update, in the server's own thread."""
        self.metrics.hear(update, self._heard.get(id(update.request), update.at))
        self._heard[id(update.request)] = update.at
        self._unread.append(update)
        self._fresh.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI wants it."""
        note, fault = scope.setdefault("slipstream", {}), None
        work = asyncio.ensure_future(self._work(scope, receive, send))
        try:
            if fault := await given_up(work, receive, self.seconds):
                note["ended"] = fault
        finally:
            self.worker.cancel(self.requests)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            note |= self._figures()
            # They hold this: their grammars' processes would wait to be collected.
            self.requests, self._unread = [], []
        if fault == LATE:
            text = f"it took longer than {self.seconds:g} s, which is this server's limit"
            with suppress(TimeoutError):  # a reader so slow that not even this can be sent
                await asyncio.wait_for(self._fail(timed_out(text), scope, receive, send), 1)
        if not work.cancelled():
            work.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except Refused as refused:
            scope["slipstream"]["ended"] = str(refused)
            await self._fail(refused, scope, receive, send)

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def _fail(self, refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an error, also behind events that were sent already."""
        if not self._started:
            await refused.response()(scope, receive, send)
            return
        body = f"data: {json.dumps(refused.body)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _updates(self) -> AsyncIterator[list[tuple[int, Update]]]:
        """What has come since the last time, with the numbers of the requests, until all have ended. Raises
        Refused if one has failed."""
        left, numbers = len(self.requests), {id(request): i for i, request in enumerate(self.requests)}
        while left:
            await self._fresh.wait()
            self._fresh.clear()
            unread, self._unread = self._unread, []
            for update in unread:
                if update.error is not None:
                    raise Refused(update.error, 400 if update.is_users else 500)
                left -= update.last
            yield [(numbers[id(update.request)], update) for update in unread]

    @property
    def _usage(self) -> Object:
        """Tokens, and what guessing brought."""
        # The choices of a prompt share it, and what the first of them found in the cache counts.
        firsts = {id(request.prompt): request for request in reversed(self.requests)}.values()
        prompt = sum(len(request.prompt) for request in firsts)
        answers = sum(len(request.tokens) for request in self.requests)
        steps = [step for request in self.requests for step in request.steps]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": sum(map(cached_tokens, firsts))},
            "tau": round(mean_accepted_length(steps), 4),
            "drafted_tokens": sum(step.drafted for step in steps),
            "accepted_tokens": sum(step.accepted for step in steps),
        }

    def _figures(self) -> Object:
        """What a log says of a request."""
        began = [request.began - request.arrived for request in self.requests if request.began]
        queued = max(began) if began else perf_counter() - self.requests[0].arrived
        finish = ",".join(sorted({request.finish for request in self.requests if request.finish}))
        return self._usage | {"choices": len(self.requests), "queued": round(queued, 4), "finish": finish}


class Whole(Reply):
    """One JSON object, once all texts have ended."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        form, updates = self.form, defaultdict[int, list[Update]](list)
        async for batch in self._updates():
            for i, update in batch:
                updates[i].append(update)
        choices = []
        for i, (*_, last) in sorted(updates.items()):
            text, calls = form.calls().part("".join(update.text for update in updates[i]), True)
            text = form.echoes[i] + text if form.echoes else text
            tokens = [token for update in updates[i] for token in update.likely]
            likely = None if last.request.most_likely is None else form.likely(tokens, Place())
            choices.append(form.choice(i, text, likely, last.finish, True, calls))
        body = json.dumps(form.response("chat.completion", choices, usage=self._usage))
        await Response(body, media_type="application/json")(scope, receive, send)


class Events(Reply):
    """Server-sent events. They start with the first token, so that what fails before has a status."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        readers: dict[int, tuple[Place, Calls]] = {}
        async for batch in self._updates():
            events = [event for i, update in batch for event in self._events(i, update, readers)]
            if events or not self._started:
                await self._write(send, events)
        if self.form.usage:
            await self._write(send, [self._event([], usage=self._usage)])
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _events(self, i: int, update: Update, readers: dict[int, tuple[Place, Calls]]) -> Iterator[Object]:
        """Of the i-th text: its role first, and then what it says."""
        form = self.form
        more: Object = {"usage": None} if form.usage else {}
        if i not in readers:
            readers[i] = Place(), form.calls()
            if form.chat:
                opening = {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield self._event([opening], **more)
            elif form.echoes:
                yield self._event([form.choice(i, form.echoes[i], None, None, False)], **more)
        place, reader = readers[i]
        text, calls = reader.part(update.text, update.finish is not None)
        if update.tree is not None:
            more["trace"] = update.tree
        if text or update.likely or update.finish or update.tree:
            likely = None if update.request.most_likely is None else form.likely(update.likely, place)
            yield self._event([form.choice(i, text, likely, update.finish, False, calls)], **more)

    def _event(self, choices: list[Object], **more: Any) -> Object:
        return self.form.response("chat.completion.chunk", choices, **more)

    async def _write(self, send: Send, events: list[Object]) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        body = "".join(f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
        await send({"type": "http.response.body", "body": body.encode(), "more_body": True})


async def given_up(work: asyncio.Future[Any], receive: Receive, seconds: float) -> str | None:
    """Why work is not waited for any more: its client has left, or it has taken these seconds. None: it is
    done."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(leave())
    try:
        await asyncio.wait({gone, work}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return None if work.done() else GONE if gone.done() else LATE
    finally:
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)


def timed_out(fault: str) -> Refused:
    """OpenAI's clients would ask once more, and run into the same limit."""
    return Refused(fault, 504, x_should_retry="false")
