"""Answers as OpenAI's JSON: whole, or as events while they are made."""

import asyncio
import json
from abc import abstractmethod
from codecs import getincrementaldecoder
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
from slipstream.engine.answer import mean_accepted_length
from slipstream.serve.engine import Engine, Likely, News, Task
from slipstream.serve.metrics import Metrics
from slipstream.serve.tools import Calls

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


class Ticket:
    """The texts of one request, and the news of them that nobody has read yet. However slowly they are read,
    they hold no more than the answers' text, and nothing waits for the reader."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.tasks: list[Task] = []
        self._index: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._unread: list[News] = []
        self._fresh = asyncio.Event()

    def submit(self, tasks: list[Task]) -> None:
        """Queue the texts. Raises Busy."""
        self.engine.submit(tasks)
        self.tasks = tasks
        self._index = {id(task): i for i, task in enumerate(tasks)}

    def hear(self, news: News) -> None:
        """Take news, in the server's own thread."""
        self.metrics.hear(news, self._since.get(id(news.task), news.at))
        self._since[id(news.task)] = news.at
        self._unread.append(news)
        self._fresh.set()

    async def news(self) -> AsyncIterator[list[tuple[int, News]]]:
        """What has come since the last time, with the numbers of the texts, until all have ended. Raises
        Refused if one has failed."""
        left = len(self.tasks)
        while left:
            await self._fresh.wait()
            self._fresh.clear()
            unread, self._unread = self._unread, []
            for each in unread:
                if each.error is not None:
                    raise Refused(each.error) if each.asked else Refused(each.error, 500, "server_error")
                left -= each.last
            yield [(self._index[id(each.task)], each) for each in unread]

    def close(self) -> None:
        """Let go of texts that are not finished."""
        self.engine.cancel(self.tasks)

    def forget(self) -> None:
        """Hold the texts no more, which hold this: their grammars' processes would wait for the collector."""
        self.tasks, self._unread = [], []

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, and what guessing brought."""
        prompts = {id(task.prompt): len(task.prompt) for task in self.tasks}  # choices share their prompt
        shared = {id(task.prompt): task.cached for task in reversed(self.tasks)}  # of their first
        prompt, answers = sum(prompts.values()), sum(len(task.answer.tokens) for task in self.tasks)
        rounds = [each for task in self.tasks for each in task.answer.rounds]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": sum(shared.values())},
            "tau": round(mean_accepted_length(rounds), 4),
            "drafted_tokens": sum(each.drafted for each in rounds),
            "accepted_tokens": sum(each.accepted for each in rounds),
        }


@dataclass
class Form:
    """How a response is written: a chat's, or a completion's.

    Args:
        seed: of the answers, so that a text can be made again.
        fingerprint: of the weights and their precision, on which texts depend as well.

    Attributes:
        calls: parts an answer's text, where it may call tools.
        echoes: the prompts that stand before the texts, if they are wanted.
    """

    chat: bool
    model: str
    seed: int
    fingerprint: str
    text: Text
    calls: Callable[[], Calls] | None = None
    echoes: list[str] = field(default_factory=list)
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
        made = {"id": self.id, "object": chat if self.chat else "text_completion", "created": self.created}
        rest = {"model": self.model, "choices": choices, "seed": self.seed}
        return made | rest | {"system_fingerprint": self.fingerprint}

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
        made: dict[str, Any] = {"index": index}
        called: dict[str, Any] = {}
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            called = {"tool_calls": [*calls] if whole else numbered}
        if not self.chat:
            made["text"] = text
        elif whole:
            made["message"] = {"role": "assistant", "content": text or None if calls else text} | called
        else:
            made["delta"] = {"content": text} | called
        reason = FINISH.get(finish or "")
        return made | {"logprobs": likely, "finish_reason": "tool_calls" if calls and reason else reason}

    def likely(self, tokens: Sequence[Likely], place: "Place") -> dict[str, Any]:
        """Log-probabilities of tokens; `place`: where they begin in the answer, which moves behind them."""
        if self.chat:
            content = []
            for each in tokens:
                beside = [self._entry(token, logprob) for token, logprob in each.top]
                content.append(self._entry(each.token, each.logprob) | {"top_logprobs": beside})
            return {"content": content, "refusal": None}
        tops = []
        for each in tokens:
            top = [*each.top, (each.token, each.logprob)]
            tops.append({self._name(token): logprob for token, logprob in top})
        return {
            "tokens": [self._name(each.token) for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": tops,
            "text_offset": [place.behind(self._bytes(each.token)) for each in tokens],
        }

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
        self.ticket, self.form, self.seconds = ticket, form, seconds

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
    async def _answer(self, send: Send) -> None:
        """Send the response."""

    @abstractmethod
    async def _fail(self, send: Send, refused: Refused) -> None:
        """Send an error, also behind what was sent already."""


class Whole(Reply):
    """One JSON object, once all texts have ended."""

    async def _answer(self, send: Send) -> None:
        made: dict[int, list[News]] = {}
        async for batch in self.ticket.news():
            for i, news in batch:
                made.setdefault(i, []).append(news)
        choices = []
        for i, all_news in sorted(made.items()):
            text = "".join(news.text for news in all_news)
            asked = all_news[-1].task.most_likely is not None
            likely = [each for news in all_news for each in news.likely]
            shown = self.form.likely(likely, Place()) if asked else None
            calls = list[dict[str, Any]]()
            if self.form.calls is not None:
                parts = self.form.calls()
                text, (rest, calls) = parts.push(text), parts.end()
                text += rest
            elif self.form.echoes:
                text = self.form.echoes[i] + text
            choices.append(self.form.choice(i, text, shown, all_news[-1].finish, True, calls))
        await _send(send, 200, self.form.whole(choices, self.ticket.usage))

    async def _fail(self, send: Send, refused: Refused) -> None:
        await _send(send, refused.status, refused.body, refused.headers)


class Events(Reply):
    """Server-sent events. The response starts with the first token, so that what fails before has a status.

    Args:
        usage: the last event holds it.
    """

    def __init__(self, ticket: Ticket, form: Form, seconds: float, usage: bool) -> None:
        super().__init__(ticket, form, seconds)
        self.usage, self._places, self._started = usage, dict[int, Place](), False
        self._calls: dict[int, Calls] = {}

    async def _answer(self, send: Send) -> None:
        async for batch in self.ticket.news():
            events = [event for i, news in batch for event in self._events(i, news)]
            if events or not self._started:
                await self._write(send, events)
        if self.usage:
            await self._write(send, [self.form.event([], usage=self.ticket.usage)])
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _events(self, i: int, news: News) -> list[dict[str, Any]]:
        """Of the i-th text: its role first, and then what it says."""
        made, form = [], self.form
        more: dict[str, Any] = {"usage": None} if self.usage else {}
        if i not in self._places:
            self._places[i] = Place()
            if form.chat:
                opening = {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                made.append(form.event([opening], **more))
            elif form.echoes:
                made.append(form.event([form.choice(i, form.echoes[i], None, None, False)], **more))
        text, calls = (news.text, []) if form.calls is None else self._parted(i, news, form.calls)
        if news.tree is not None:
            more = more | {"trace": news.tree}
        if text or news.likely or news.finish or news.tree:
            asked = news.task.most_likely is not None
            likely = form.likely(news.likely, self._places[i]) if asked else None
            made.append(form.event([form.choice(i, text, likely, news.finish, False, calls)], **more))
        return made

    def _parted(self, i: int, news: News, begin: Callable[[], Calls]) -> tuple[str, list[dict[str, Any]]]:
        """What a text has said for certain, and at its end what it calls."""
        parts = self._calls.setdefault(i, begin())
        text = parts.push(news.text)
        if not news.finish:
            return text, []
        rest, calls = parts.end()
        return text + rest, calls

    async def _write(self, send: Send, events: list[dict[str, Any]]) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        body = "".join(f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events)
        await send({"type": "http.response.body", "body": body.encode(), "more_body": True})

    async def _fail(self, send: Send, refused: Refused) -> None:
        if not self._started:
            await _send(send, refused.status, refused.body, refused.headers)
            return
        body = f"data: {json.dumps(refused.body)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": False})


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
    made, now = ticket.usage, perf_counter()
    began = [task.began - task.arrived for task in ticket.tasks if task.began]
    finish = sorted({task.answer.finish for task in ticket.tasks if task.answer.finish})
    waited = round(max(began), 4) if began else round(now - ticket.tasks[0].arrived, 4)
    return made | {"choices": len(ticket.tasks), "queued": waited, "finish": ",".join(finish)}
