"""Answers as OpenAI's JSON: whole, or as events while they are made."""

import asyncio
import json
from abc import abstractmethod
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, time
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.core.target import Text
from slipstream.engine.request import Request, mean_accepted_length
from slipstream.serve.metrics import Metrics
from slipstream.serve.tools import Calls
from slipstream.serve.worker import Likely, Update, Worker, cached_tokens

JSON = (b"content-type", b"application/json")
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class Refused(Exception):
    """A request that is not answered: OpenAI's error, with a status and headers."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        **headers: str,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """As a response. Characters that UTF-8 does not have are escaped."""
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


@dataclass(eq=False)
class Ticket:
    """The requests of one HTTP request, and their updates that nobody has read yet. However slowly these are
    read, they hold no more than the answers' text, and nothing waits for the reader."""

    worker: Worker
    metrics: Metrics
    requests: list[Request] = field(default_factory=list)
    _heard: dict[int, float] = field(default_factory=dict)  # when each request had its last update
    _unread: list[Update] = field(default_factory=list)
    _fresh: asyncio.Event = field(default_factory=asyncio.Event)

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

    async def updates(self) -> AsyncIterator[list[tuple[int, Update]]]:
        """What has come since the last time, with the numbers of the requests, until all have ended. Raises
        Refused if one has failed."""
        left, numbers = len(self.requests), {id(request): i for i, request in enumerate(self.requests)}
        while left:
            await self._fresh.wait()
            self._fresh.clear()
            unread, self._unread = self._unread, []
            for update in unread:
                if update.error is not None:
                    raise (
                        Refused(update.error)
                        if update.is_users
                        else Refused(update.error, 500, "server_error")
                    )
                left -= update.last
            yield [(numbers[id(update.request)], update) for update in unread]

    def close(self) -> None:
        """Let go of requests that are not finished."""
        self.worker.cancel(self.requests)

    def forget(self) -> None:
        """Hold the requests no more, which hold this: their grammars' processes would wait to be
        collected."""
        self.requests, self._unread = [], []

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, and what guessing brought."""
        prompts = {
            id(request.prompt): len(request.prompt) for request in self.requests
        }  # choices share theirs
        cached = {
            id(request.prompt): cached_tokens(request) for request in reversed(self.requests)
        }  # the first's
        prompt, answers = sum(prompts.values()), sum(len(request.tokens) for request in self.requests)
        steps = [step for request in self.requests for step in request.steps]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
            "tau": round(mean_accepted_length(steps), 4),
            "drafted_tokens": sum(step.drafted for step in steps),
            "accepted_tokens": sum(step.accepted for step in steps),
        }


@dataclass
class Form:
    """How a response is written: a chat's, or a completion's."""

    chat: bool
    model: str
    seed: int  # of the answers, so that a text can be made again
    fingerprint: str  # of the weights and their precision, on which texts depend as well
    text: Text
    calls: Callable[[], Calls] | None = None  # parts an answer's text, where it may call tools
    echoes: list[str] = field(default_factory=list)  # the prompts that stand before the texts, if wanted
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid4().hex

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A response that is no stream."""
        return self._object("chat.completion", choices) | {"usage": usage}

    def event(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An event of a stream."""
        return self._object("chat.completion.chunk", choices) | more

    def _object(self, chat: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": chat if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "seed": self.seed,
            "system_fingerprint": self.fingerprint,
        }

    def choice(
        self,
        index: int,
        text: str,
        likely: dict[str, Any] | None,
        finish: str | None,
        whole: bool,
        calls: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        """A text, or a piece of it, and the tools that it calls."""
        numbered = [*calls] if whole else [{"index": i, **call} for i, call in enumerate(calls)]
        called = {"tool_calls": numbered} if calls else {}
        content: dict[str, Any] = {"text": text}
        if self.chat and whole:
            content = {"message": {"role": "assistant", "content": text or None if calls else text} | called}
        elif self.chat:
            content = {"delta": {"content": text} | called}
        reason = FINISH.get(finish or "")
        reason = "tool_calls" if calls and reason else reason
        return {"index": index} | content | {"logprobs": likely, "finish_reason": reason}

    def likely(self, tokens: Sequence[Likely], place: "Place") -> dict[str, Any]:
        """Log-probabilities of tokens; `place`: where they begin in the answer, which moves behind them."""
        if self.chat:
            content = [
                self._entry(each.token, each.logprob)
                | {"top_logprobs": [self._entry(*other) for other in each.top]}
                for each in tokens
            ]
            return {"content": content, "refusal": None}
        tops = [[*each.top, (each.token, each.logprob)] for each in tokens]
        return {
            "tokens": [self._name(each.token) for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [{self._name(token): logprob for token, logprob in top} for top in tops],
            "text_offset": [place.behind(self._bytes(each.token)) for each in tokens],
        }

    def begin_calls(self) -> Calls | None:
        """A reader of what a text calls."""
        return None if self.calls is None else self.calls()

    @staticmethod
    def parted(reader: Calls | None, text: str, finish: str | None) -> tuple[str, list[dict[str, Any]]]:
        """What a text says for certain with this piece, and at its end what it calls."""
        if reader is None:
            return text, []
        text = reader.push(text)
        if not finish:
            return text, []
        rest, calls = reader.end()
        return text + rest, calls

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
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
    """Waits for texts, and for the client to leave: then it lets go of the texts.

    Args:
        seconds: the reply may take, its reader included.
    """

    def __init__(self, ticket: Ticket, form: Form, seconds: float) -> None:
        super().__init__()
        self.ticket, self.form, self.seconds, self._started = ticket, form, seconds, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI wants it."""
        note = scope.setdefault("slipstream", {})
        gone, work = asyncio.ensure_future(until_gone(receive)), asyncio.ensure_future(self._work(send, note))
        try:
            await asyncio.wait({gone, work}, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            late = not gone.done() and not work.done()
            if not work.done():
                note["ended"] = "it took too long" if late else "the client left"
        finally:
            self.ticket.close()
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
            note |= _figures(self.ticket)
            self.ticket.forget()
        if late:
            with suppress(TimeoutError):  # a reader so slow that not even this can be sent
                fault = f"it took longer than {self.seconds:g} s, which is this server's limit"
                again: Any = {"x_should_retry": "false"}  # OpenAI's clients would, and run into it once more
                await asyncio.wait_for(self._fail(send, Refused(fault, 504, "timeout", **again)), 1)
        if not work.cancelled():
            work.result()

    async def _work(self, send: Send, note: MutableMapping[str, Any]) -> None:
        try:
            await self._answer(send)
        except Refused as refused:
            note["ended"] = str(refused)
            await self._fail(send, refused)

    @abstractmethod
    async def _answer(self, send: Send) -> None: ...

    async def _fail(self, send: Send, refused: Refused) -> None:
        """Send an error, also behind events that were sent already."""
        if not self._started:
            await _send(send, refused.status, refused.body, refused.headers)
            return
        body = f"data: {json.dumps(refused.body)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Whole(Reply):
    """One JSON object, once all texts have ended."""

    async def _answer(self, send: Send) -> None:
        form, updates = self.form, defaultdict[int, list[Update]](list)
        async for batch in self.ticket.updates():
            for i, update in batch:
                updates[i].append(update)
        choices = []
        for i, (*_, last) in sorted(updates.items()):
            text, calls = form.parted(
                form.begin_calls(), "".join(each.text for each in updates[i]), last.finish
            )
            text = form.echoes[i] + text if form.echoes else text
            tokens = [token for each in updates[i] for token in each.likely]
            likely = None if last.request.most_likely is None else form.likely(tokens, Place())
            choices.append(form.choice(i, text, likely, last.finish, True, calls))
        await _send(send, 200, form.whole(choices, self.ticket.usage))


class Events(Reply):
    """Server-sent events. The response starts with the first token, so that what fails before has a status.

    Args:
        usage: the last event holds it.
    """

    def __init__(self, ticket: Ticket, form: Form, seconds: float, usage: bool) -> None:
        super().__init__(ticket, form, seconds)
        self.usage = usage
        self._begun: dict[int, tuple[Place, Calls | None]] = {}

    async def _answer(self, send: Send) -> None:
        async for batch in self.ticket.updates():
            events = [event for i, update in batch for event in self._events(i, update)]
            if events or not self._started:
                await self._write(send, events)
        if self.usage:
            await self._write(send, [self.form.event([], usage=self.ticket.usage)])
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _events(self, i: int, update: Update) -> list[dict[str, Any]]:
        """Of the i-th text: its role first, and then what it says."""
        events, form = [], self.form
        more: dict[str, Any] = {"usage": None} if self.usage else {}
        if i not in self._begun:
            self._begun[i] = Place(), form.begin_calls()
            if form.chat:
                opening = {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                events.append(form.event([opening], **more))
            elif form.echoes:
                events.append(form.event([form.choice(i, form.echoes[i], None, None, False)], **more))
        place, reader = self._begun[i]
        text, calls = form.parted(reader, update.text, update.finish)
        if update.tree is not None:
            more = more | {"trace": update.tree}
        if text or update.likely or update.finish or update.tree:
            likely = None if update.request.most_likely is None else form.likely(update.likely, place)
            events.append(form.event([form.choice(i, text, likely, update.finish, False, calls)], **more))
        return events

    async def _write(self, send: Send, events: list[dict[str, Any]]) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        body = "".join(f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
        await send({"type": "http.response.body", "body": body.encode(), "more_body": True})


async def _send(
    send: Send, status: int, body: dict[str, Any], more: Mapping[str, str] = MappingProxyType({})
) -> None:
    data = json.dumps(body).encode()
    headers = [JSON, (b"content-length", str(len(data)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in more.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def until_gone(receive: Receive) -> None:
    """Until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _figures(ticket: Ticket) -> dict[str, Any]:
    """What a log says of a request."""
    requests = ticket.requests
    began = [request.began - request.arrived for request in requests if request.began]
    queued = max(began) if began else perf_counter() - requests[0].arrived
    finish = ",".join(sorted({request.finish for request in requests if request.finish}))
    return ticket.usage | {"choices": len(requests), "queued": round(queued, 4), "finish": finish}
