"""Grammars that would end or stall the process that asks for them, where tokens are letters."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import llguidance
import pytest

import tiny
from slipstream import GrammarLimits, generate
from slipstream.core.grammar import DeadEnd
from slipstream.targets.grammar import HOSTS, _plain, read_grammar
from slipstream.targets.grammar_worker import MatcherState, read_tokenizer

LETTER = {letter: i for i, letter in enumerate(tiny.LETTERS)}
DEEP = 4000  # 2,500 end a process whose stack has 8 MiB


def chained(line: str, last: str) -> str:
    return "\n".join([*(line.format(i, i + 1) for i in range(DEEP)), last])


def read(kind: str, source: object, **limits):
    limits.setdefault("seconds", 30.0)
    return read_grammar(tiny.target("llama"), kind, source, [tiny.EOS], GrammarLimits(**limits))


def server():
    (made,) = HOSTS[tiny.target("llama")].values()
    return made


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def wait_for(what) -> bool:
    until = time.monotonic() + 20
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (
            "json_schema",
            {
                "$ref": "#/$defs/0",
                "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(DEEP)}
                | {str(DEEP): {"const": 7}},
            },
        ),
        ("grammar", chained("r{}: r{}", f'r{DEEP}: "7"\nstart: r0')),
        ("grammar", chained("T{}: T{}", f'T{DEEP}: "7"\nstart: T0')),
        ("grammar", chained("r{} ::= r{}", f'r{DEEP} ::= "7"\nroot ::= r0')),
    ],
    ids=["schema", "rules", "terminals", "gbnf"],
)
def test_a_chain_of_rules_overflows_no_stack(kind, source):
    """SIGSEGV, which ended the process and every other text in it."""
    assert read(kind, source).begin().allowed.nonzero().tolist() == [[LETTER["7"]]]


@pytest.mark.parametrize(
    ("kind", "source", "limits", "fault"),
    [
        ("json_schema", {"type": "integer", "multipleOf": 123456789}, {"seconds": 0.2}, "more than 0.2 s"),
        ("regex", "a?" * 20_000, {"memory": 32}, "more than 32 MiB of memory"),
        (
            "json_schema",
            {"properties": {f"p{i}": {"type": "null"} for i in range(5000)}},
            {"seconds": 0.1},
            "more than 0.1 s",
        ),
    ],
)
def test_what_takes_too_much_is_refused_by_the_limit(kind, source, limits, fault):
    """An hour, gigabytes."""
    with pytest.raises(ValueError, match=f"^{kind} takes {fault}.*make it smaller, or raise the limit$"):
        read(kind, source, **limits)


def test_long_forced_text_costs_no_more_a_token():
    """It was gone through again for each token: a second of each, of 200,000 letters."""
    target = tiny.target("llama")
    words = read_tokenizer(_plain(target.text, target.vocab, [tiny.EOS]), target.vocab, [tiny.EOS])
    calls = []

    class Counted:
        def __init__(self, matcher):
            self.matcher = matcher

        def compute_ff_tokens(self):
            calls.append(1)
            return self.matcher.compute_ff_tokens()

        def compute_bitmask(self):
            raise AssertionError("a mask of a token that is forced")

        def deep_copy(self):
            return Counted(self.matcher.deep_copy())

        def __getattr__(self, name):
            return getattr(self.matcher, name)

    text = "ab" * 500
    state = MatcherState(Counted(llguidance.LLMatcher(words, llguidance.LLMatcher.grammar_from_regex(text))))
    for letter in text:
        (first, *_), bits = state.look(target.vocab, frozenset([tiny.EOS]))
        assert (first, bits) == (LETTER[letter], b"")
        assert state.advance(LETTER["z"]) is None
        state = state.advance(LETTER[letter])
    assert len(calls) == 1


def test_whoever_leaves_ends_the_reading():
    """The process went on for an hour."""
    read("regex", "a")
    gone, began = threading.Event(), time.monotonic()
    threading.Timer(0.3, gone.set).start()
    schema = {"type": "integer", "multipleOf": 123456789}
    with pytest.raises(ValueError, match="nobody waits"):
        read_grammar(
            tiny.target("llama"), "json_schema", schema, [tiny.EOS], GrammarLimits(seconds=600.0), gone
        )
    assert time.monotonic() - began < 20
    assert wait_for(lambda: not children(server()._process.pid))


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a thread has no scheduler of its own here")
@pytest.mark.parametrize("serves", [True, False])
def test_a_server_reads_a_large_grammar_while_nothing_else_wants_the_processor(serves):
    """Eight of them took a token's time from every text. Elsewhere somebody waits for the grammar alone."""
    read("regex", "a")
    gone = threading.Event()
    limits = GrammarLimits(seconds=60.0 if serves else 0.5)
    what = tiny.target("llama"), "json_schema", {"type": "integer", "multipleOf": 123456789}, [tiny.EOS]

    def reads():
        with suppress(ValueError):
            read_grammar(*what, limits, gone if serves else None)

    def idle() -> bool:
        with suppress(OSError):  # it has ended
            pids = [own for child in children(server()._process.pid) for own in (child, *children(child))]
            tasks = [int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").glob("*")]
            return any(os.sched_getscheduler(task) == os.SCHED_IDLE for task in tasks)
        return False

    reading = threading.Thread(target=reads)
    reading.start()
    found = False
    while reading.is_alive() and not found:
        found = idle()
    gone.set()
    reading.join()
    assert found == serves
    assert wait_for(lambda: not children(server()._process.pid))


def test_processes_end_with_their_grammars_and_no_signal_of_a_terminal_ends_them():
    held = read("regex", "[a-z]+")
    (parent,) = children(server()._process.pid)
    for pid in (server()._process.pid, parent, *children(parent)):
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, each)
    assert held.begin().advance(LETTER["a"]) is not None
    del held
    assert wait_for(lambda: not children(server()._process.pid))


def test_a_process_that_is_killed_ends_its_text_alone():
    """And not the process that asks, which would wait for ever."""
    lost, held = read("regex", "[a-z]+"), read("regex", "[a-z]+")
    walk = lost.begin()
    assert walk.advance(LETTER["a"]) is not None
    first, _ = sorted(children(server()._process.pid))
    (pid,) = children(first)
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(DeadEnd, match="takes more than its limit of memory"):
            walk.advance(LETTER["b"])
    assert held.begin().advance(LETTER["b"]) is not None
    os.kill(server()._process.pid, signal.SIGKILL)
    server()._process.wait()
    assert read("regex", "[a-z]+").begin().advance(LETTER["b"]) is not None


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"memory": -1}, {"seconds": float("nan")}])
def test_limits_are_numbers_above_0(limits):
    with pytest.raises(ValueError, match="give a number above 0"):
        GrammarLimits(**limits)


def test_generate_takes_limits():
    how = {"max_new_tokens": 3, "eos_token_ids": tiny.EOS, "drafter": "vanilla"}
    made = generate(tiny.target("llama"), [1, 2], regex="abc", grammar_limits=GrammarLimits(5.0), **how)
    assert made.text == "abc"
    with pytest.raises(ValueError, match=r"more than 0\.05 s of processor time"):
        generate(
            tiny.target("llama"),
            [1, 2],
            json_schema={"type": "integer", "multipleOf": 123456789},
            grammar_limits=GrammarLimits(seconds=0.05),
            **how,
        )
