"""Runs a server until a signal ends it."""

import gc
import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import uvicorn

from slipstream.serve.app import Server
from slipstream.serve.connection import Connection


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
        made(server, grace).run([listener])
    say("the server has ended")


def is_local(listener: socket.socket) -> bool:
    """Whether it can be reached from this machine alone."""
    return ip_address(listener.getsockname()[0]).is_loopback


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
