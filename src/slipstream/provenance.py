"""The command under way: results store it, and the commands that hints show repeat its options."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import isroutine, signature
from itertools import pairwise
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from slipstream.progress import in_notebook, notebook_bar

P = ParamSpec("P")
R = TypeVar("R")
MOST = 64  # items of an argument that are shown: data are larger
PLUGIN, FLAG = "--plugin", "--compile"  # an option before a command, and one without a value
KEPT = ("--target", "--dtype", "--device", FLAG, "--quantize")  # the model, and how it is loaded
TAKES = dict[str, set[str]]()  # the options of each command, which says so itself
_command: ContextVar[str] = ContextVar("command", default="")
current = _command.get  # the command under way; empty where there is none


def suggested(words: str) -> str:
    """A command as a hint shows it: `slipstream WORDS`, for the model of the command under way. It repeats
    `PLUGIN`, and the options of `KEPT` that the command takes and WORDS do not name."""
    verb, *own = words.split()
    names = [name for name in KEPT if name in TAKES.get(verb, ()) and name not in own]
    options = (option for name in names for option in _given(name))
    program = sys.argv[0]  # its path where a shell would not find it
    on_path = os.path.basename(program) != "slipstream" or shutil.which("slipstream")
    program = "slipstream" if on_path else shlex.quote(program)
    return " ".join([program, *_given(PLUGIN), words, *options])


def _given(option: str) -> Iterator[str]:
    """An option and its value, as often as the command line under way has it."""
    line = shlex.split(current()) if current().startswith("slipstream ") else []
    for word, following in pairwise([*line, ""]):
        name, equals, value = word.partition("=")
        if name == option:
            yield option if option == FLAG else f"{option} {shlex.quote(value if equals else following)}"


@contextmanager
def commanded(command: str) -> Iterator[None]:
    """Results made in this context store `command`, or that of a context around it."""
    token = _command.set(_command.get() or command)
    try:
        yield
    finally:
        _command.reset(token)


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: results that it makes store its call as their command. A notebook shows
    its `progress`, unless the caller takes it; `None` shows none. A seed may be of any integer type."""
    shows = "progress" in signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        has_bar = shows and "progress" not in named
        if named.get("progress", call) is None:
            del named["progress"]
        if isinstance(seed := named.get("seed"), Integral):
            named["seed"] = int(seed)  # such as NumPy's
        if current():
            return function(*args, **named)
        arguments = signature(function).bind(*args, **named).arguments
        shown = ", ".join(f"{name}={_shown(it)}" for name, it in arguments.items() if not isroutine(it))
        package = function.__module__.partition(".")[0]
        with ExitStack() as stack:
            if has_bar and "progress" not in arguments and in_notebook():
                named["progress"] = stack.enter_context(notebook_bar(function.__name__))
            stack.enter_context(commanded(f"{package}.{function.__name__}({shown})"))
            return function(*args, **named)

    return call


def _shown(value: Any) -> str:
    """Plain values as Python writes them, and the class of anything else."""
    if isinstance(value, (list, tuple, dict)) and len(value) > MOST:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(it)}' for key, it in value.items())}}}"
    return repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
