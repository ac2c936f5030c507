"""Request: one text from its prompt to its end."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.core.sampling import Sampling
from slipstream.core.target import Text
from slipstream.engine.detokenizer import Detokenizer

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Step:
    """One target pass for one request: the depth that it drafted, the drafted tokens accepted, and the tokens
    kept in the text (fewer than accepted + 1 where the text ended)."""

    drafted: int
    accepted: int
    kept: int


def mean_accepted_length(steps: Sequence[Step]) -> float:
    """τ: tokens committed per target pass, the target's own included; 1 for plain decoding. The prompt's
    pass and its token do not count."""
    return sum(step.kept for step in steps) / len(steps) if steps else 1.0


@dataclass(eq=False)
class Request:
    """What is asked for, and what came of it so far. It takes tokens one by one, so that it ends exactly
    where plain decoding would."""

    prompt: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    limit: int = sys.maxsize  # tokens of the text, at most
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    tokenizer: Text | None = None  # reads the text; None: only its tokens are wanted
    streams: bool = False  # the text is wanted as it grows; else it is decoded once, unless there are stops
    plain: bool = False  # it gets no guesses
    salt: int = 0  # 64 bits; only requests of one salt share prefixes and remembered answers
    ended: Callable[[list[int]], bool] | None = None  # whether the last of the tokens so far ends the text
    tell: Callable[[Any], None] | None = None  # gets the server's updates
    most_likely: int | None = None  # alternatives wanted with each token; None: no probabilities
    traced: bool = False  # updates hold the trees of its steps

    tokens: list[int] = field(default_factory=list)  # a closing EOS included
    pieces: list[str] = field(default_factory=list)  # of a text that streams: what each token made certain
    steps: list[Step] = field(default_factory=list)  # the target's passes after the prompt's
    finish: Finish | None = None  # why it ended
    error: Exception | None = None  # why it failed; the engine goes on with the others
    cancelled: bool = False
    arrived: float = 0.0  # when the server got it
    began: float = 0.0  # when its prompt was first read
    number: int = -1  # counted from 0 in the order in which prompts are read
    shared: int = 0  # tokens of the prompt that were known from another request, and not read
    # While it has a row: its prompt and all that passes brought, of which the target has not read the last.
    sequence: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)  # the last pass's tokens, the target's own included
    drafted: int | None = None  # the depth of its deepest guess; None for the prompt's pass
    finite: bool = True  # whether all scores that decided were finite; else the text took nothing
    known: int = 0  # of its first tokens, how many the text had already
    fresh: list[int] = field(default_factory=list)  # those that the text took
    again: int = 0  # tokens of the text that it makes again after another request's failure
    alone: bool = False  # it took part in a pass that failed, so it gets the engine for itself
    likely: list[Any] = field(default_factory=list)  # probabilities of tokens not yet certain to be text

    def __post_init__(self) -> None:
        read = self.streams or self.stop
        self._reader = Detokenizer(self.tokenizer, self.stop) if self.tokenizer is not None and read else None
        self._ends: list[int] = []  # characters up to the end of each token
        self._released = self._shown = 0

    @property
    def done(self) -> bool:
        """Whether it needs no other pass."""
        return self.finish is not None or self.error is not None or self.cancelled

    def take(self, tokens: list[int], drafted: int | None, finite: bool) -> None:
        """Take what a pass brought until the text ends, but for tokens that the text has already."""
        self.sequence += tokens
        self.committed, self.drafted, self.finite = tokens, drafted, finite
        self.known = min(self.again, len(tokens))
        self.again -= self.known
        before = len(self.tokens)
        for token in tokens[self.known :] if finite else ():
            if self.finish is not None:
                break
            self.tokens.append(token)
            if token in self.eos:
                self.finish = "eos"
            elif len(self.tokens) == self.limit:
                self.finish = "length"
            elif self.ended is not None and self.ended(self.tokens):
                self.finish = "stop"
            if self._reader is not None:
                self.pieces.append(self._reader.push(token))
                self._ends.append(self._reader.decoded)
                if self._reader.stopped:
                    self.finish = "stop"
                if self.finish is not None:
                    self.pieces[-1] += self._reader.flush()
        self.fresh = self.tokens[before:]
        if drafted is not None and self.fresh:
            self.steps.append(Step(drafted, len(tokens) - 1, len(self.fresh)))

    def released(self) -> list[int]:
        """Tokens not returned before that are certain to be text: in none of them may a stop string begin."""
        start, end = self._released, len(self.tokens)
        if self._reader is not None:
            end = next((i for i in range(start, end) if min(self._ends[i:]) > self._reader.released), end)
        self._released = end
        return self.tokens[start:end]

    def new_pieces(self) -> list[str]:
        """Pieces not returned before."""
        start, self._shown = self._shown, len(self.pieces)
        return self.pieces[start:]

    @property
    def text(self) -> str:
        """The text, without special tokens and the stop string that ended it; "" without a tokenizer."""
        if self._reader is not None:
            return "".join(self.pieces)
        return "" if self.tokenizer is None else self.tokenizer.decode(self.tokens)
