"""Grammars in processes of their own, so that none can stall or end the process that asks for it.

Run as a script, which imports no torch, this holds a tokenizer and forks a process for each grammar. That
reads the grammar with a deep stack, and then answers questions about texts in it, until the connection ends.
It has limits of processor time and memory for reading, and of processor time for each answer."""

import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import llguidance
from tokenizers import Tokenizer

STACK = 2**28  # bytes; llguidance takes up to 4 kB for each rule that stands in a rule
QUICK = 0.01  # seconds of processor time after which reading gives way to others
BURST, STEADY = 0.2, 0.002  # seconds that an answer may take, and that each answer adds for the next ones
SLOW = f"takes too long for a token: more than {1000 * STEADY:g} ms each and {BURST:g} s beside"
TRIAL = 16  # tokens that are walked through before a grammar is used
FORCED = 64  # forced tokens in an answer, at most
# As json.dumps writes it, so that what stands between values is known beforehand.
LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Plain:
    """A tokenizer whose tokens' texts, one behind the other, are the text."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: list[int], tokenizer: Any) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos[0]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of text."""
        text = text if isinstance(text, str) else text.decode("utf-8", "ignore")
        if isinstance(self._tokenizer, Tokenizer):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def read_tokenizer(written: str | tuple[Any, ...], vocab: int, eos: list[int]) -> llguidance.LLTokenizer:
    """From a tokenizer.json, or from the arguments of `Plain`. Raises ValueError."""
    if isinstance(written, str):
        return llguidance.LLTokenizer(written, n_vocab=vocab, eos_token=eos)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Plain(*written)))


def read(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> llguidance.LLMatcher:
    """A grammar's matcher, which may be in error. Raises ValueError."""
    if kind == "json_schema":
        text = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=LAYOUT)
    elif kind == "regex":
        text = llguidance.LLMatcher.grammar_from_regex(text)
    elif kind == "grammar":
        try:
            text = llguidance.grammar_from("grammar", text)
        except Exception as error:  # of many types, from the reader of llama.cpp's form
            raise ValueError(str(error) or type(error).__name__) from error
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
    _check(matcher)
    return matcher


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise ValueError(matcher.get_error())


class MatcherState:
    """Where a text stands in its grammar, by llguidance's matcher. The tokens that must come are those
    `ahead`, from the one at `at` on; None: not known yet. They are walked through once, and handed on from
    state to state."""

    def __init__(self, matcher: Any, ahead: list[int] | None = None, at: int = 0) -> None:
        self.matcher, self.ahead, self.at = matcher, ahead, at

    def forced(self) -> list[int]:
        """The tokens that must come next, the first of them."""
        if self.ahead is None:
            tokens = self.matcher.compute_ff_tokens()
            _check(self.matcher)
            self.ahead = tokens[: self.matcher.validate_tokens(tokens)]
        return self.ahead[self.at : self.at + FORCED]

    def look(self, vocab: int, eos: frozenset[int]) -> tuple[list[int], bytes]:
        """Forced tokens, and which tokens may come next, as bits; no bits where a token is forced."""
        if forced := self.forced():
            return forced, b""
        mask: bytes = self.matcher.compute_bitmask()
        _check(self.matcher)
        bits = int.from_bytes(mask, "little")
        if bits.bit_count() == 1 and not self._bears(bits.bit_length() - 1, eos):
            others = (token for token in range(vocab) if token not in eos and self._bears(token, eos))
            mask = sum(1 << token for token in others).to_bytes(len(mask), "little")
        return [], mask

    def _bears(self, token: int, eos: frozenset[int]) -> bool:
        """Whether a token that is allowed alone may come. A forced text goes through the tokenizer, which may
        write another: it composes accents, or drops what it has no tokens for."""
        return token in eos or bool(self.matcher.validate_tokens([token]))

    def advance(self, token: int) -> "MatcherState | None":
        """The state with one more token; None: it may not come."""
        forced = self.forced()
        if not self.matcher.validate_tokens([token]):
            _check(self.matcher)
            return None
        matcher = self.matcher.deep_copy()
        matcher.consume_token(token)
        _check(matcher)
        assert self.ahead is not None
        known = forced[:1] == [token] and self.at + 1 < len(self.ahead)
        return MatcherState(matcher, self.ahead, self.at + 1) if known else MatcherState(matcher)

    def walk(self, vocab: int, eos: frozenset[int]) -> None:
        """Go a little way, which shows how long answers take. Raises ValueError at a dead end."""
        state: MatcherState | None = self
        for _ in range(TRIAL):
            if state is None:
                return
            forced, mask = state.look(vocab, eos)
            token = forced[0] if forced else _from_the_middle(mask)
            if token is None or token in eos:
                return
            state = state.advance(token)


def _from_the_middle(mask: bytes) -> int | None:
    """The first token that is allowed from the middle of the vocabulary on, or else of all."""
    bits, half = int.from_bytes(mask, "little"), 4 * len(mask)
    bits = bits >> half << half or bits
    return (bits & -bits).bit_length() - 1 if bits else None


def serve(channel: Connection, tokenizer: llguidance.LLTokenizer, vocab: int, eos: frozenset[int]) -> None:
    """Read a grammar and answer questions about it. An answer is a fault, or None and what was asked for.
    Where `others` wait for texts of theirs, what takes long to read gives way to all else on the machine."""
    kind, text, seconds, memory, others = channel.recv()
    read_first: list[MatcherState] = []

    def first() -> None:
        with suppress(FileNotFoundError):  # where the system says what the process has
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            most = resource.getrlimit(resource.RLIMIT_AS)[1]  # as of `ulimit -v`
            limit = size + memory if most == resource.RLIM_INFINITY else min(size + memory, most)
            resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        try:
            state = MatcherState(read(tokenizer, kind, text))
        except ValueError as error:
            channel.send((str(error), None))
            return
        with suppress(ValueError):  # which whoever asks for it gets again
            state.look(vocab, eos)
        began = time.thread_time()
        with suppress(ValueError):
            state.walk(vocab, eos)
        if time.thread_time() - began > BURST:
            channel.send((f"it {SLOW}: make it smaller", None))
        else:
            read_first.append(state)

    signal.setitimer(signal.ITIMER_PROF, seconds)
    reading = threading.Thread(target=_guarded, args=(first,), daemon=True)
    reading.start()
    if others:
        _give_way(reading)
    reading.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    states, left = dict(enumerate(read_first)), BURST
    if not states:
        return
    channel.send((None, None))
    for new in count(1):
        gone, number, token = channel.recv()
        for ended in gone:
            del states[ended]
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, left)
        fault: str | None = None
        answer: Any = None
        try:
            if token is None:
                answer = states[number].look(vocab, eos)
            elif (state := states[number].advance(token)) is not None:
                states[new], answer = state, new
        except ValueError as error:
            fault = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        left -= time.process_time() - began
        if left <= 0:  # the timer is as coarse as the system's clock
            signal.raise_signal(signal.SIGPROF)
        left = min(BURST, left + STEADY)
        channel.send((fault, answer))


def _give_way(reading: threading.Thread) -> None:
    """Wait for what is read quickly. What is not goes on only while nothing else wants the processor."""
    began = time.process_time()
    while reading.is_alive() and time.process_time() - began < QUICK:
        reading.join(QUICK / 4)
    with suppress(AttributeError, OSError):  # no thread here has a scheduler of its own, or it has ended
        os.sched_setscheduler(reading.native_id or 0, os.SCHED_IDLE, os.sched_param(0))


def _guarded(work: Any, *args: Any) -> None:
    """Do work in a thread. What it cannot do ends the process."""
    try:
        work(*args)
    except MemoryError:
        os.abort()
    except BaseException:  # the connection has ended, or llguidance has failed
        os._exit(1)


def run(channel: Connection, *with_what: Any) -> None:
    """Serve until the connection ends, in a process of its own. How that process ended is the last answer."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            channel.send((-code, None))
        return
    threading.stack_size(STACK)
    threading.Thread(target=_guarded, args=(serve, channel, *with_what), daemon=True).start()
    ended = select.poll()
    ended.register(channel.fileno(), 0)
    ended.poll()


def main() -> None:
    """Fork for each connection that comes through the socket whose number is given."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when whoever started it does
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(sys.argv[1]))
    start = Connection(os.dup(control.fileno()))
    written, vocab, eos = start.recv()
    try:
        tokenizer = read_tokenizer(written, vocab, eos)
    except ValueError as error:
        start.send(str(error))
        return
    start.send(None)
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            try:
                run(Connection(descriptors[0]), tokenizer, vocab, frozenset(eos))
            finally:
                os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
