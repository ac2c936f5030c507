"""serve: answer requests of OpenAI's clients."""

import socket
from dataclasses import replace
from typing import Annotated

from slipstream.cli.common import (
    MEASURING,
    Compile,
    Device,
    DrafterName,
    DraftModelName,
    Dtype,
    Quantize,
    TargetName,
    command,
    drafters,
    err,
    inputs,
    load,
    option,
    with_model,
)
from slipstream.files import install

PANEL = "Limits"
HOST = "address to listen at; 0.0.0.0 lets other machines in"
KEY = "key that requests must give; repeatable; better in the environment, where ps does not show it"
ALLOWED = "a further name by which clients and pages may reach it; repeatable"
NAME = "what requests call the model (default: as --target names it)"
CONTEXT = "tokens of prompt and answer together (default: the target's window, 4096 at most)"
MEMORY = "memory for the KV cache; fewer rows if they do not fit"
KEEP = "tokens of finished texts whose KV cache is kept for prompts that begin alike; 0 keeps none"
SECONDS = "time a request may take, until its client has read the answer"
GRAMMAR_SECONDS = "processor time that reading a grammar may take"
GRAMMAR_MEMORY = "memory that a grammar may take"
GRACE = "time that requests under way get after Ctrl-C or SIGTERM"


@command(
    "serve",
    "serve --target ./my-model --compile --port 9000",
    "serve --host 0.0.0.0 --rows 32 --queue 200   # with SLIPSTREAM_API_KEY set",
    lists=drafters,
)
def serve(
    target: TargetName = "smollm2",
    drafter: DrafterName = "auto",
    draft_model: DraftModelName = None,
    host: Annotated[str, option(HOST, "ADDRESS")] = "127.0.0.1",
    port: Annotated[int, option("0 takes a free one", "N", min=0, max=65535)] = 8000,
    api_key: Annotated[list[str], option(KEY, "KEY", "--api-key", envvar="SLIPSTREAM_API_KEY")] = [],
    allowed_host: Annotated[list[str], option(ALLOWED, "NAME", "--allowed-host")] = [],
    served_model_name: Annotated[str | None, option(NAME, "NAME")] = None,
    rows: Annotated[int, option("texts under way at once", "N", panel=PANEL, min=1, max=1024)] = 16,
    memory: Annotated[float | None, option(MEMORY, "GIB", panel=PANEL, min=0)] = None,
    queue: Annotated[int, option("texts that may wait for a row", "N", panel=PANEL, min=0, max=2**20)] = 64,
    max_context: Annotated[int | None, option(CONTEXT, "N", panel=PANEL, min=2)] = None,
    keep: Annotated[int, option(KEEP, "N", panel=PANEL, min=0)] = 8192,
    max_body: Annotated[int, option("bytes of a request", "N", panel=PANEL, min=1)] = 2**20,
    max_seconds: Annotated[float, option(SECONDS, "S", panel=PANEL, min=0.001)] = 600.0,
    max_grammar_seconds: Annotated[
        float, option(GRAMMAR_SECONDS, "S", panel=PANEL, min=0.001, max=86400)
    ] = 2.0,
    max_grammar_memory: Annotated[int, option(GRAMMAR_MEMORY, "MIB", panel=PANEL, min=1, max=2**20)] = 256,
    grace: Annotated[int, option(GRACE, "S", panel=PANEL, min=0)] = 30,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    quantize: Quantize = None,
) -> None:
    """Answer requests of OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/models.

    All texts share one session, and each says what generate would say alone. /metrics is for
    Prometheus, and standard output gets a line of JSON for each request, without prompts.
    """
    drafter = with_model(drafter, draft_model)
    inputs(target, [drafter])
    try:
        from slipstream.serve.run import is_local, run
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the server needs {error.name}, which is not installed: {install('serve')}"
        ) from error
    from slipstream.core.grammar import GrammarLimits
    from slipstream.drafters import load_drafter
    from slipstream.engine import memory as needed
    from slipstream.serve.app import Limits, Server
    from slipstream.serve.guard import host_name
    from slipstream.serve.loading import Loading

    keys = list(filter(None, api_key))
    hosts = [host_name(f"//{name}") for name in allowed_host]
    grammar = GrammarLimits(max_grammar_seconds, max_grammar_memory)
    limits = Limits(rows, queue, max_context, keep, max_body, max_seconds, grammar)
    with _listening(host, port) as listener:
        # Without a key, a page on the internet must not reach it by a name of its own.
        allowed = hosts if hosts or (not keys and is_local(listener)) else None
        with Loading(listener, f"loading {target}") as loading:
            loaded = load(target, dtype, device, compile, quantize)
            guide = load_drafter(drafter, loaded, temperature=1.0, texts=rows)
            held = needed.memory(loaded, guide, limits.tokens(loaded))
            kept = keep / held.tokens * held.text / needed.GIB
            if memory is not None:
                limits = replace(limits, rows=min(rows, held.batch(memory, kept)))
            size = limits.rows * held.text / needed.GIB + kept
            err.print(f"{limits.rows} rows and {keep:,} kept tokens, {size:.2f} GiB: {held}", soft_wrap=True)
            loading.doing = MEASURING
            with err.status(MEASURING):
                server = Server(loaded, guide, drafter, limits, keys, _log, allowed, served_model_name)
        run(server, grace, listener, err.print)


def _log(line: str) -> None:
    print(line, flush=True)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ValueError."""
    if not host:  # which would be all addresses
        raise ValueError("--host is empty: name an address, such as 127.0.0.1, or 0.0.0.0 for all")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError, TypeError) as error:  # bytes that are no name are of a wrong type
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen at {host}, port {port}: {reason}: name another") from error
