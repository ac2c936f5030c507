"""Grammars over a target's tokens, by llguidance: JSON schemas, regular expressions, Lark, choices. Other
processes read them, and hold the states of texts in them: `grammar_worker`."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Bool
from tokenizers import Tokenizer
from torch import Tensor

from slipstream.core.grammar import DeadEnd, Grammar, GrammarLimits, GrammarState
from slipstream.core.target import Target
from slipstream.files import parsed
from slipstream.targets import grammar_worker
from slipstream.targets.prompts import HFText, check_readable

LARGEST = 2**18  # characters of a grammar
STUCK = 60  # seconds in which no answer comes: the process is held, not slow
DEAD = "the grammar cannot go on"
WRITING = threading.Lock()  # each that writes keeps Python from the thread that decodes
HOSTS = weakref.WeakKeyDictionary[
    Target, dict[tuple[int, ...], "GrammarHost"]
]()  # by tokens that end an answer
STARTING = threading.Lock()


class Beyond(ValueError):
    """A grammar takes more than its limits."""


@final
class LLGrammar(Grammar):
    """A grammar that llguidance has read, in its own process, which ends with this. Raises Beyond where it
    cannot be read within the limits, and ValueError where it cannot be read. `gone`: see `read_grammar`."""

    def __init__(
        self, host: "GrammarHost", kind: str, text: str, limits: GrammarLimits, gone: threading.Event | None
    ) -> None:
        self._channel, self.vocab, self.eos = host.connect(), host.vocab, frozenset(host.eos)
        self.ended = 0  # the signal that ended the process
        self.dropped: list[int] = []  # numbers of states that nobody holds any more
        self._channel.send((kind, text, limits.seconds, round(limits.memory * 2**20), gone is not None))
        while not self._channel.poll(0.05):
            if gone is not None and gone.is_set():
                self.close()
                raise ValueError(f"nobody waits for this {kind} any more")
        try:
            fault, _ = self._channel.recv()
        except (EOFError, OSError):
            fault = -1
        if fault is None:
            return
        self.close()
        if isinstance(fault, int):
            raise Beyond(f"{kind} {_beyond(fault, limits)}: make it smaller, or raise the limit")
        raise ValueError(f"{kind} cannot be read: {_line(fault)}")

    def close(self) -> None:
        """End the process, where the grammar is refused: the error holds this until the next collection."""
        self._channel.close()

    def begin(self) -> GrammarState:
        return LLWalk(self)

    def ask(self, number: int, token: int | None = None) -> Any:
        """What may follow in a state, or the number of the state after a token. Raises DeadEnd."""
        dropped, self.dropped = self.dropped, []
        try:
            self._channel.send((dropped, number, token))
            fault, answer = self._channel.recv()
        except (EOFError, OSError):
            self._channel.close()
            fault, answer = self.ended or -1, None
        if isinstance(fault, int):
            self.ended = fault
            raise DeadEnd(f"{DEAD}: it {_beyond(fault)}")
        if fault is not None:
            raise DeadEnd(f"{DEAD}: {_line(fault)}")
        return answer


def _beyond(ended: int, limits: GrammarLimits | None = None) -> str:
    """The limit that ended a process with this signal, while it read a grammar within limits, or answered."""
    if ended in (signal.SIGSEGV, signal.SIGBUS):
        return "is nested too deeply"
    is_time = ended == signal.SIGPROF
    if limits is None:
        return grammar_worker.SLOW if is_time else "takes more than its limit of memory"
    most = f"{limits.seconds:g} s of processor time" if is_time else f"{limits.memory:g} MiB of memory"
    return f"takes more than {most} to read, which is the limit"


@final
class LLWalk(GrammarState):
    """A state of a grammar's; `grammar` is None where the text has ended, as tokens of `eos` do."""

    def __init__(self, grammar: LLGrammar | None, number: int = 0) -> None:
        self._grammar, self._number = grammar, number
        self._next: dict[int, GrammarState | None] = {}  # drafts and verification ask for the same

    def __del__(self) -> None:
        if self._grammar is not None and self._number:
            self._grammar.dropped.append(self._number)

    @cached_property
    def _answer(self) -> tuple[list[int], bytes]:
        """Forced tokens, and which may follow."""
        assert self._grammar is not None
        return self._grammar.ask(self._number)

    @cached_property
    def allowed(self) -> Bool[Tensor, " V"] | None:
        if self._grammar is None:
            return None
        # By NumPy: torch would wake all its threads.
        (forced, bits), vocab = self._answer, self._grammar.vocab
        if forced:
            mask = np.arange(vocab) == forced[0]
        else:
            unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=vocab, bitorder="little")
            mask = unpacked.view(bool)
        if not mask.any():
            raise DeadEnd(f"{DEAD}: it allows no token behind what it led to")
        return torch.from_numpy(mask)

    @property
    def forced(self) -> list[int]:
        return [] if self._grammar is None else self._answer[0]

    def advance(self, token: int) -> GrammarState | None:
        if self._grammar is None:
            return self
        if token not in self._next:
            if token in self._grammar.eos:
                ends = self.allowed is not None and bool(self.allowed[token])
                self._next[token] = LLWalk(None) if ends else None
            else:
                number = self._grammar.ask(self._number, token)
                self._next[token] = None if number is None else LLWalk(self._grammar, number)
        return self._next[token]


class GrammarHost:
    """The process that holds a target's tokens, and forks one for each grammar. It ends with this one. Raises
    ValueError: the tokenizer as it is `written` cannot be read there."""

    def __init__(self, written: Any, vocab: int, eos: list[int]) -> None:
        self.vocab, self.eos = vocab, eos
        self._control, theirs = socket.socketpair()
        # The names of what it imports lead to where they lead here; threads need no heaps of their own.
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "MALLOC_ARENA_MAX": "1"}
        command = [sys.executable, "-P", grammar_worker.__file__, str(theirs.fileno())]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with theirs:
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], **quiet)
        weakref.finalize(self, _end, self._process, self._control)
        with Connection(os.dup(self._control.fileno())) as start:
            start.send((written, vocab, eos))
            if (fault := start.recv()) is not None:
                raise ValueError(fault)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def connect(self) -> Connection:
        """To a process of its own."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", STUCK, 0))
        return Connection(ours.detach())


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def read_grammar(
    target: Target,
    kind: str,
    source: Any,
    eos: Iterable[int],
    limits: GrammarLimits | None = None,
    gone: threading.Event | None = None,
) -> Grammar:
    """A grammar for a target's answers.

    Args:
        kind: "json_schema": a JSON schema, as a dictionary or as text; "regex": a regular expression that
            the whole answer matches; "grammar": in Lark's form, or llama.cpp's (GBNF); "choice": texts, one
            of which is the answer.
        eos: tokens that end an answer.
        gone: of a server, which has others waiting; once set, nobody waits for the grammar any more.

    Raises:
        ValueError: it cannot be read, or not within the limits, or allows no text; the target has no
            tokenizer, or one whose tokens are not bytes of text; nothing would end an answer.
    """
    try:
        with WRITING:
            text = _written(kind, source)
    except RecursionError as error:
        raise ValueError(f"{kind} is nested too deeply") from error
    eos = sorted(token for token in eos if token < target.vocab)
    if not eos:
        raise ValueError(f"{kind} needs a token that ends an answer: give eos_token_ids")
    grammar = LLGrammar(_host(target, eos), kind, text, limits or GrammarLimits(), gone)
    try:
        _ = grammar.begin().allowed
    except DeadEnd as error:
        grammar.close()
        raise ValueError(f"{kind} cannot be read: it allows no text") from error
    return grammar


def _written(kind: str, source: Any) -> str:
    """The grammar as text: a choice in Lark's form. Raises ValueError."""
    text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False, default=repr)
    if len(text) > LARGEST:
        raise ValueError(f"{kind} has {len(text):,} characters: at most {LARGEST:,} are read")
    check_readable(text, kind)
    if kind == "json_schema":
        try:
            schema = parsed(source) if isinstance(source, str) else source
        except ValueError as error:  # a long number's has advice for programmers behind a semicolon
            raise ValueError(f"json_schema is no JSON: {str(error).split(';')[0]}") from error
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, Mapping):
            raise ValueError(f"json_schema is a {type(schema).__name__}: give a JSON object")
        return json.dumps(schema)
    if kind == "choice":
        listed = isinstance(source, Sequence) and not isinstance(source, str)
        if not listed or not source or not all(isinstance(text, str) and text for text in source):
            raise ValueError(f"choice is {source!r:.60}: give a list of texts, none of them empty")
        return "start: " + " | ".join(map(json.dumps, source))
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"{kind} is {source!r:.60}: give it as text")
    return source


def _line(message: str) -> str:
    """The first line of a message, shortened; of a regular expression's, the reason behind what it quotes."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    reasons = [line.removeprefix("error") for line in lines[1:] if line.startswith("error: ")]
    return "".join([*(lines or ["no reason is given"])[:1], *reasons[:1]]).replace("::", ":")[:200]


def _host(target: Target, eos: list[int]) -> GrammarHost:
    """The one of a target's tokens, started when the first grammar asks for it. Raises ValueError."""
    if not isinstance(target.text, HFText):
        raise ValueError(f"target {target.name} has no tokenizer: a grammar needs its tokens' text")
    with STARTING:
        hosts, key = HOSTS.setdefault(target, {}), tuple(eos)
        if key not in hosts or not hosts[key].alive:
            try:
                hosts[key] = GrammarHost(written(target.text), target.vocab, eos)
            except ValueError:  # its decoder is of another kind
                hosts[key] = GrammarHost(_plain(target.text, target.vocab, eos), target.vocab, eos)
        return hosts[key]


def written(text: HFText) -> str:
    """A fast tokenizer as its tokenizer.json. Raises ValueError for another."""
    fast = copy(getattr(text.tokenizer, "backend_tokenizer", None))
    if not isinstance(fast, Tokenizer):
        raise ValueError(f"target {text.name} has no fast tokenizer")
    fast.no_padding()
    fast.no_truncation()
    return fast.to_str()


def _plain(text: HFText, vocab: int, eos: list[int]) -> tuple[Any, ...]:
    """The arguments of `grammar_worker.Plain`. Raises ValueError for tokens of another kind."""
    words = [text.decode([token], special=True) for token in range(vocab)]
    pairs = [text.decode([token, (7 * token + 1) % vocab], special=True) for token in range(vocab)]
    if pairs != [word + words[(7 * token + 1) % vocab] for token, word in enumerate(words)]:
        raise ValueError(f"target {text.name} has tokens that are not bytes of text: grammars cannot be kept")
    special = sorted({*eos, *text.tokenizer.all_special_ids})
    tokenizer = getattr(text.tokenizer, "backend_tokenizer", text.tokenizer)  # without what imports torch
    return [word.encode() for word in words], special, eos, tokenizer
