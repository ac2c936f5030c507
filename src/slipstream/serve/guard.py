"""Middleware of the server: hosts, keys, limits on bodies, and a log line for each request."""

import asyncio
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hmac import compare_digest
from ipaddress import ip_address
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.metrics import Metrics
from slipstream.serve.replies import Refused

API_KEY = "slipstream.api_key"  # where a scope holds the request's key
TOO_LARGE = "the body is too large: this server takes at most {:,} bytes"
QUIET = ("/health", "/ready", "/metrics")  # what machines ask every few seconds is not logged


@dataclass
class Guard:
    """Passes requests on to an application."""

    app: ASGIApp
    hosts: Collection[str] | None  # who may be asked, and ask, beside the loopback's names; None: any
    keys: Collection[str]  # of which requests under /v1 must give one as a bearer token, if there are any
    body: int  # bytes of a request, at most
    seconds: float  # in which a body must have come
    log: Callable[[str], Any] | None  # takes a line of JSON for each request, without what was asked or said
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI wants it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = 0, perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        note = scope.setdefault("slipstream", {})
        try:
            if refused := self._refusal(scope):
                await refused.response()(scope, receive, watched)
            else:
                await self.app(scope, self._limited(receive), watched)
        except asyncio.CancelledError:  # the time to end in is over
            note["ended"] = "the server ended"
        finally:
            self.metrics.responses.labels(str(status)).inc()
            if self.log is not None and scope["path"] not in QUIET:
                line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}
                line |= {"method": scope["method"], "path": scope["path"][:100], "status": status}
                self.log(json.dumps(line | {"seconds": round(perf_counter() - began, 4)} | note))

    def _refusal(self, scope: Scope) -> Refused | None:
        """A page on the internet can give its own name the loopback's address, and then read all answers. A
        browser always sends the name, and the page that asks."""
        for header, value in scope["headers"] if self.hosts is not None else ():
            name = value.decode("latin-1")
            if header == b"host" and not self._knows(f"//{name}"):
                fault = f"this server does not answer as {name[:60]!r}: ask 127.0.0.1, or start it with"
                return Refused(f"{fault} --allowed-host NAME", 421, code="host_not_allowed")
            if header == b"origin" and not self._knows(name):
                fault = f"pages of {name[:60]!r} may not ask this server: start it with --allowed-host NAME"
                return Refused(fault, 403, code="origin_not_allowed")
        headers = dict(scope["headers"])
        if self.keys and scope["path"].startswith("/v1"):
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            known = [key for key in self.keys if compare_digest(token.strip(), key.encode())]
            scope[API_KEY] = known[0] if known else None
            if scheme.lower() != b"bearer" or not known:
                fault = "this server asks for its API key: Authorization: Bearer KEY"
                return Refused(fault, 401, code="invalid_api_key", WWW_Authenticate="Bearer")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.body:
            return Refused(TOO_LARGE.format(self.body), 413)
        return None

    def _knows(self, url: str) -> bool:
        with suppress(ValueError):
            name = host_name(url)
            return name in (self.hosts or ()) or name == "localhost" or ip_address(name).is_loopback
        return False

    def _limited(self, receive: Receive) -> Receive:
        """Receives a body that must be small, and come soon."""
        read, complete, until = 0, False, perf_counter() + self.seconds

        async def limited() -> Message:
            nonlocal read, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, until - perf_counter()))
            except TimeoutError as error:
                raise HTTPException(408, "the body took too long to come") from error
            read += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if read > self.body:
                raise HTTPException(413, TOO_LARGE.format(self.body))
            return message

        return limited


def host_name(url: str) -> str:
    """The host that a URL or `//authority` names, in small letters. Raises ValueError if it names none."""
    name = urlsplit(url).hostname
    if not name:
        raise ValueError(f"{url.removeprefix('//')!r} names no host: give a name such as example.com")
    return name.rstrip(".")
