"""The command line: one command per verb. Commands import heavy modules themselves: --help is quick."""

import os
import shlex
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

import typer

from slipstream.cli import cache, chat, decoding, measuring, serving, training  # noqa: F401  each registers its commands
from slipstream.cli.common import app, err
from slipstream.files import printable
from slipstream.provenance import commanded

STOPPED = 130  # what typer turns a KeyboardInterrupt into
ORDER = "cache chat demo tune doctor fetch generate bench certify reproduce report serve train synthesize "
ORDER += "regenerate data import export parity"
app.registered_commands.sort(key=lambda command: ORDER.split().index(str(command.name)))  # in help
SILENT = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")  # other libraries read these when imported


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2; Ctrl-C and SIGTERM are one line and 130 or
    143."""
    for variable in SILENT:
        os.environ.setdefault(variable, "1")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show τ
    caught = [signal.SIGINT]

    def stop(number: int, _: Any) -> None:
        """SIGTERM ends the work as Ctrl-C does."""
        caught.append(signal.Signals(number))
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with commanded(printable(shlex.join(["slipstream", *sys.argv[1:]]))):
            code = _run()
    except KeyboardInterrupt:
        code = STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == STOPPED:
        err.print("slipstream: stopped")
        code = 128 + caught[-1]
    sys.exit(code)


def _run() -> int:
    """The command's exit code."""
    try:
        code = app(prog_name="slipstream", standalone_mode=False)
    except typer.Abort:  # Ctrl-C where something was asked
        return STOPPED
    except ValueError as error:
        return _fail(str(error))
    except OSError as error:  # typer handles broken pipes
        with suppress(OSError):  # output that cannot be printed is not tried again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own complaint about the command line
            message = _complaint(error)
            return _fail(message) if message else 2
        with tempfile.NamedTemporaryFile("w", prefix="slipstream-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
        return _fail(f"{type(error).__name__}: {error}: please report this with {file.name}", 1)
    return code if isinstance(code, int) else 0


def _complaint(error: Any) -> str:
    """What is wrong with the command line, for people; empty where there is no command."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "slipstream"
    message: str = error.format_message()
    if name := getattr(error, "option_name", None):
        message = f"{path} has no option {name}"
        above = context.parent.command.params if context and context.parent else ()
        if similar := error.possibilities:
            message += f": did you mean {' or '.join(similar[:2])}?"
        elif context and any(name in parameter.opts for parameter in above):
            message += f": it stands before the command: slipstream {name} … {context.info_name} …"
    wrong: list[Any] = getattr(error.__context__, "errors", list)()
    message += "".join(f", not {fault['input']!r}" for fault in wrong)
    return message and f"{message} (see {path} --help)"


def _fail(message: str, code: int = 2) -> int:
    err.print(f"slipstream: {' '.join(message.split())}", style="red", soft_wrap=True)
    return code
