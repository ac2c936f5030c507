"""Runs the HTTP server: what it answers while the model loads, heads that do not come, and its end."""

import gc
import socket
from asyncio import BaseTransport, TimerHandle
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from threading import Thread
from time import monotonic
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slipstream.serve.app import Server
from slipstream.serve.replies import Refused

HEAD_SECONDS = 10.0  # in which the head of a request must have come
HEAD_BYTES = 2**16  # of a head, beside the piece in which it begins


class Connection(HttpToolsProtocol):
    """uvicorn's own waits for a head for ever, and keeps all of it. Connections that idle between two
    requests are uvicorn's: `timeout_keep_alive`."""

    _timer: TimerHandle | None = None
    _in_head, _size = False, 0

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        begun = self._in_head
        super().data_received(data)
        if self.transport.is_closing():
            return
        if begun and self._in_head:
            self._size += len(data)
            if self._size > HEAD_BYTES:
                self.send_400_response(f"the head of a request may have {HEAD_BYTES} bytes")
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            # Nothing is being answered: this is of the next head, or what is left of a body.
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def on_message_begin(self) -> None:
        self._in_head, self._size = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def http_server(app: ASGIApp, grace: int) -> uvicorn.Server:
    """Serves an application. At its end, requests under way have `grace` seconds."""
    settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    settings |= {"interface": "asgi3", "timeout_graceful_shutdown": grace}
    return uvicorn.Server(uvicorn.Config(app, http=Connection, **settings))


class Loading:
    """Answers every request with 503 until its context ends. Then the socket is as it was.

    Attributes:
        doing: what the server is busy with.
    """

    def __init__(self, listener: socket.socket, doing: str) -> None:
        self.doing, self._began = doing, monotonic()
        self._http = http_server(self._answer, grace=1)
        self._thread = Thread(target=self._http.run, args=([listener.dup()],), name="loading", daemon=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):  # a client that still sends would lose the answer
            pass
        fault = f"the server is not ready yet: {self.doing}, {monotonic() - self._began:.0f} s so far"
        refused = Refused(fault, 503, code="loading", Retry_After="5")
        await refused.response()(scope, receive, send)

    def __enter__(self) -> "Loading":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.should_exit = True
        self._thread.join()


def run(server: Server, grace: int, listener: socket.socket, say: Callable[[str], Any]) -> None:
    """Serve until Ctrl-C or SIGTERM. What is under way then has `grace` seconds to end; a second Ctrl-C ends
    it at once. `say` gets what a person should know."""
    host, port, *_ = listener.getsockname()
    shown = f"[{host}]" if ":" in host else host
    say(f"{server.name} ({server.target.precision}) is served at http://{shown}:{port}/v1; Ctrl-C ends it")
    if not server.app.keys and not is_local(listener):
        say("other machines can reach it and need no key: set SLIPSTREAM_API_KEY")
    gc.collect()
    gc.freeze()  # what is loaded stays: to look it through takes 0.2 s, in which no other thread runs
    gc.set_threshold(10_000, 20, 20)  # a large body alone has 50,000 objects
    with suppress(KeyboardInterrupt):  # raised again after an orderly end
        http_server(server.app, grace).run([listener])
    say("the server has ended")


def is_local(listener: socket.socket) -> bool:
    """Whether it can be reached from this machine alone."""
    return ip_address(listener.getsockname()[0]).is_loopback
