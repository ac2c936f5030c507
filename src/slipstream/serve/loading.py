"""What is answered while the model loads: 503, and what the server is busy with."""

import json
import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import monotonic
from typing import Any

from slipstream.serve.replies import Refused

SECONDS = 5  # that a request may take, and after which it is worth asking again
BODY = 2**20  # bytes of a body that are read: a client that still sends would lose the answer


class Loading(ThreadingHTTPServer):
    """Answers at a socket that listens, until its context ends. Then the socket is as it was.

    Attributes:
        doing: what the server is busy with.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, doing: str) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.doing, self._began = listener, doing, monotonic()
        self._thread = Thread(target=self.serve_forever, args=(0.05,), name="loading", daemon=True)

    @property
    def refused(self) -> Refused:
        """The answer to every request."""
        fault = f"the server is not ready yet: {self.doing}, {monotonic() - self._began:.0f} s so far"
        return Refused(fault, 503, "server_error", code="loading", Retry_After=str(SECONDS))

    def __enter__(self) -> "Loading":
        self.socket.setblocking(False)  # a client that is gone again is not waited for
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error."""


class _Handler(BaseHTTPRequestHandler):
    timeout = SECONDS
    server: Loading

    def do_GET(self) -> None:
        length = self.headers.get("Content-Length", "")
        with suppress(TimeoutError):
            self.rfile.read(min(int(length), BODY) if length.isdigit() else 0)
        refused = self.server.refused
        body = json.dumps(refused.body).encode()
        self.send_response(refused.status)
        length = str(len(body))
        for name, value in {
            **refused.headers,
            "content-type": "application/json",
            "content-length": length,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what machines ask every few seconds is not logged."""
