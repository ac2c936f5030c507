"""Connections: requests whose heads are too long, or do not come, end them."""

from asyncio import BaseTransport, TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 10.0  # in which the head of a request must have come
HEAD_BYTES = 2**16  # of a head, beside the piece in which it begins


class Connection(HttpToolsProtocol):
    """uvicorn's own, which waits for a head for ever, and keeps all of it. Connections that idle between two
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
