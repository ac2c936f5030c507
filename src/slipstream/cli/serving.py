"""serve: answer requests of OpenAI's clients."""

import socket
from dataclasses import replace
from functools import partial

from slipstream.cli import common as cli
from slipstream.files import install


@cli.command(
    "serve",
    "serve --target ./my-model --compile --port 9000",
    "serve --host 0.0.0.0 --rows 32 --queue 200   # with SLIPSTREAM_API_KEY set",
    takes="target drafter draft_model host port api_key allowed_host served_model_name rows memory queue "
    f"max_context keep max_body max_seconds max_grammar_seconds max_grammar_memory grace {cli.MACHINE}",
)
def serve(options: cli.Arguments) -> None:
    """Answer requests of OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/models.

    All texts share one engine, and each says what generate would say alone. /metrics is for
    Prometheus, and standard output gets a line of JSON for each request, without prompts.
    """
    drafter = cli.with_model(options.drafter, options.draft_model)
    cli.inputs(options.target, [drafter])
    try:
        from slipstream.serve.run import Loading, is_local, run
    except ModuleNotFoundError as error:
        missing = f"the server needs {error.name}, which is not installed"
        raise ValueError(f"{missing}: {install('serve')}") from error
    from slipstream.core.grammar import GrammarLimits
    from slipstream.drafters import load_drafter
    from slipstream.engine import memory
    from slipstream.serve.app import Limits, Server
    from slipstream.serve.guard import host_name

    keys = list(filter(None, options.api_key))
    hosts = [host_name(f"//{name}") for name in options.allowed_host]
    grammar = GrammarLimits(options.max_grammar_seconds, options.max_grammar_memory)
    rows, keep = options.rows, options.keep
    sizes = (options.max_context, keep, options.max_body, options.max_seconds)
    limits = Limits(rows, options.queue, *sizes, grammar)
    with _listening(options.host, options.port) as listener:
        # Without a key, a page on the internet must not reach it by a name of its own.
        allowed = hosts if hosts or (not keys and is_local(listener)) else None
        with Loading(listener, f"loading {options.target}") as loading:
            target = options.load()
            loaded = load_drafter(drafter, target, temperature=1.0, texts=rows)
            needed = memory.memory(target, loaded, limits.tokens(target))
            cached = keep / needed.tokens * needed.text / memory.GIB
            if options.memory is not None:
                limits = replace(limits, rows=min(rows, needed.batch(options.memory, cached)))
            size = limits.rows * needed.text / memory.GIB + cached
            text = f"{limits.rows} rows and {keep:,} kept tokens, {size:.2f} GiB: {needed}"
            cli.err.print(text, soft_wrap=True)
            loading.doing = cli.MEASURING
            with cli.err.status(cli.MEASURING):
                log, name = partial(print, flush=True), options.served_model_name
                server = Server(target, loaded, drafter, limits, keys, log, allowed, name)
        run(server, options.grace, listener, cli.err.print)


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
