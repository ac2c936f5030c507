"""The command that a result stores: the command line, or the Python call, that made it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import isroutine, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
MOST = 64  # items of an argument that are shown: data are larger
_command: ContextVar[str] = ContextVar("command", default="")


def current() -> str:
    """The command under way; empty where there is none."""
    return _command.get()


@contextmanager
def commanded(command: str) -> Iterator[None]:
    """Results made in this context store `command`, or that of a context around it."""
    token = _command.set(_command.get() or command)
    try:
        yield
    finally:
        _command.reset(token)


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: results that it makes store its call as their command."""

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        if current():
            return function(*args, **named)
        given = signature(function).bind(*args, **named).arguments.items()
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in given if not isroutine(value))
        package = function.__module__.partition(".")[0]
        with commanded(f"{package}.{function.__name__}({shown})"):
            return function(*args, **named)

    return call


def _shown(value: Any) -> str:
    """Plain values as Python writes them, and the class of anything else."""
    if isinstance(value, (list, tuple, dict)) and len(value) > MOST:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(each)}' for key, each in value.items())}}}"
    return repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
