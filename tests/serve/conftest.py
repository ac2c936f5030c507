"""Servers: of a tiny model, whose answers take milliseconds, and of SmolLM2, on the loopback."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import pytest
import uvicorn

import tiny
from slipstream.drafters import load_drafter
from slipstream.serve.app import Limits, Server
from slipstream.serve.run import http_server
from slipstream.targets import HFTarget, load_target

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="session")
def chatting() -> HFTarget:
    """A tiny Llama with a chat template and a window of 128 tokens."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = TEMPLATE
    return HFTarget(deepcopy(tiny.reference("llama")), tokenizer, "tiny")


@pytest.fixture
def serve(chatting):
    """Makes a server of the tiny model. Its log goes to `server.lines`."""

    def made(keys=(), target=chatting, drafter="ngram", hosts=None, name=None, **limits) -> Server:
        lines: list[str] = []
        limits = Limits(**{"rows": 4, "queue": 8} | limits)
        server = Server(
            target, load_drafter(drafter, target), drafter, limits, keys, lines.append, hosts, name
        )
        server.lines = lines
        return server

    return made


@pytest.fixture(scope="session")
def listening():
    """A context manager: serves, and yields the address."""
    return _listening


@contextmanager
def _listening(server: Server, grace: int = 5) -> Iterator[str]:
    """Serves on the loopback while the context lasts, in a thread of its own; yields the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    http: uvicorn.Server = http_server(server.app, grace)
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[tuple[Server, str]]:
    """SmolLM2 with auto, which gets its trees in turn, whatever they cost."""
    target = load_target("smollm2", "bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        restless = lambda target, drafter, texts: tiny.Restless(drafter)  # noqa: E731
        patch.setattr("slipstream.serve.worker.policy", restless)
        server = Server(target, load_drafter("auto", target, 1.0), "auto", Limits(rows=3, queue=40))
    with _listening(server) as url:
        yield server, url


class Client:
    """Calls the application itself, as ASGI does, without HTTP."""

    def __init__(self, server: Server) -> None:
        self.server, self.loop = server, asyncio.new_event_loop()
        self._lifespan = server._lifespan(None)
        self.loop.run_until_complete(self._lifespan.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        self.loop.close()

    async def send(self, path, body=b"", method="POST", headers=(), leaves=None, reads=None):
        """Status, headers and body. The client leaves after `leaves` pieces; `reads` is awaited for each."""
        headers = [*headers, (b"content-type", b"application/json")] if method == "POST" else [*headers]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "headers": headers,
        }
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"}}
        gone, sent, start = asyncio.Event(), [], {}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.start":
                start.update(message)
                return
            if reads is not None:
                await reads(message)
            sent.append(message.get("body", b""))
            if not message.get("more_body") or len(sent) == leaves:
                gone.set()

        if leaves == 0:
            self.loop.call_later(0.05, gone.set)
        await self.server.app(scope, receive, send)
        return start.get("status"), dict(start.get("headers", ())), b"".join(sent)

    def post(self, path, body, **how):
        """Status and what JSON says."""
        status, _, data = self.loop.run_until_complete(self.send(path, json.dumps(body).encode(), **how))
        return status, json.loads(data)

    def idle(self) -> bool:
        """Whether no row is taken, and nothing waits, within a second."""
        worker = self.server.worker
        for _ in range(100):
            if not worker.running and not worker.waiting and not worker.engine.running:
                return True
            self.loop.run_until_complete(asyncio.sleep(0.01))
        return False


@pytest.fixture
def client(serve):
    """Makes clients of tiny servers."""
    clients = []

    def made(**how) -> Client:
        clients.append(Client(serve(**how)))
        return clients[-1]

    yield made
    for each in clients:
        each.close()
