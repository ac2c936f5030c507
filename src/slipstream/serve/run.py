"""Runs a server until a signal ends it."""

import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import uvicorn

from slipstream.core.drafter import Drafter
from slipstream.core.target import Target
from slipstream.serve.app import Limits, Server
from slipstream.serve.connection import Connection


def run(
    target: Target,
    drafter: Drafter,
    spec: str,
    limits: Limits,
    key: str | None,
    grace: int,
    hosts: Collection[str],
    listener: socket.socket,
    say: Callable[[str], Any],
) -> None:
    """Serve until Ctrl-C or SIGTERM. What is under way then has `grace` seconds to end; a second Ctrl-C ends
    it at once. On a loopback without a key, or where `hosts` are named, it answers to these names and the
    loopback's alone. `say` gets what a person should know."""
    host, port, *_ = listener.getsockname()
    local = ip_address(host).is_loopback
    allowed = hosts if hosts or (local and key is None) else None
    server = Server(target, drafter, spec, limits, key, lambda line: print(line, flush=True), allowed)
    shown = f"[{host}]" if ":" in host else host
    say(f"{target.name} ({target.precision}) is served at http://{shown}:{port}/v1; Ctrl-C ends it")
    if key is None and not local:
        say("other machines can reach it and need no key: set SLIPSTREAM_API_KEY")
    with suppress(KeyboardInterrupt):  # raised again after an orderly end
        made(server, grace).run([listener])
    say("the server has ended")


def made(server: Server, grace: int) -> uvicorn.Server:
    """The HTTP server around it."""
    return uvicorn.Server(
        uvicorn.Config(
            server.app,
            http=Connection,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=grace,
        )
    )
