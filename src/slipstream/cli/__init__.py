"""The command line: one command per verb. Parses, calls, prints; heavy imports inside, so that --help is quick."""

import sys

from slipstream.cli import decoding, training, tuning  # noqa: F401  each registers its commands
from slipstream.cli.common import app, err

STOPPED = 130


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, Ctrl-C is one line and 130."""
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = STOPPED
    except ValueError as error:
        _fail(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own complaint about the command line
            raise
        if message := error.format_message():  # empty: help was asked for by giving no command
            _fail(f"{message} (see slipstream --help)")
        code = 2
    if code == STOPPED:  # typer turns Ctrl-C into this
        err.print("slipstream: stopped")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    err.print(f"slipstream: {' '.join(message.split())}", style="red", markup=False, soft_wrap=True)
    sys.exit(2)
