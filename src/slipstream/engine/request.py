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
    where plain decoding would.

    Attributes:
        limit: the most tokens that the text may have.
        tokenizer: reads the text; None: only its tokens are wanted.
        streams: the text is wanted as it grows. Otherwise it is decoded once, unless there are stop strings.
        plain: it gets no guesses.
        salt: 64 bits. Cached prefixes and remembered answers serve requests of the same salt alone, so that
            none tells what is in another.
        ended: whether the last of the tokens so far ends the text.
        tell, most_likely, traced: of the server: what gets its updates; alternatives wanted with each token
            (None: no probabilities are wanted); updates hold the trees of its steps.

        tokens: token ids, a closing EOS included.
        pieces: if the text is wanted as it grows: what became certain with each token.
        steps: one entry per target pass after the prompt's.
        finish: why it ended; None while it has not.
        error: why it failed. The engine goes on with the others.
        finite: all scores that decided were finite; otherwise the last pass brought nothing.
        arrived, began: when the server got it, and when its prompt was first read.
        number: counted from 0 in the order in which prompts were read.
        shared: tokens of the prompt that were known from another request, and not read.
        sequence: the prompt and all that passes brought, what lies behind the text's end included. The target
            has not yet read the last token.
        committed: what the last pass brought: accepted tokens, then the target's own.
        drafted: depth of its deepest guess; None for the pass of the prompt.
        known: of its first tokens, how many the text had already.
        fresh: those that the text took.
        again: tokens that it has, and makes again after the failure of another request.
        alone: a pass failed in which it took part, so it gets the engine for itself.
        likely: probabilities of tokens that are not yet certain to belong to the text.
    """

    prompt: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    limit: int = sys.maxsize
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    tokenizer: Text | None = None
    streams: bool = False
    plain: bool = False
    salt: int = 0
    ended: Callable[[list[int]], bool] | None = None
    tell: Callable[[Any], None] | None = None
    most_likely: int | None = None
    traced: bool = False

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    finite: bool = True
    cancelled: bool = False
    arrived: float = 0.0
    began: float = 0.0
    number: int = -1
    shared: int = 0
    sequence: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    drafted: int | None = None
    known: int = 0
    fresh: list[int] = field(default_factory=list)
    again: int = 0
    alone: bool = False
    likely: list[Any] = field(default_factory=list)

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
        """Take what a pass brought, but for tokens that the text has already."""
        self.sequence += tokens
        self.committed, self.drafted, self.finite = tokens, drafted, finite
        self.known = min(self.again, len(tokens))
        self.again -= self.known
        self.fresh = self.extend(tokens[self.known :]) if finite else []
        if drafted is not None and self.fresh:
            self.steps.append(Step(drafted, len(tokens) - 1, len(self.fresh)))

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens until the text ends; returns those taken."""
        before = len(self.tokens)
        for token in tokens:
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
                self._ends.append(self._reader.read)
                if self._reader.stopped:
                    self.finish = "stop"
                if self.finish is not None:
                    self.pieces[-1] += self._reader.flush()
        return self.tokens[before:]

    def released(self) -> list[int]:
        """Tokens not returned before that are part of the text for certain. A token in which a stop string
        begins is not."""
        start, end = self._released, len(self.tokens)
        if self._reader is not None:
            end = next((i for i in range(start, end) if min(self._ends[i:]) > self._reader.given), end)
        self._released = end
        return self.tokens[start:end]

    def new_pieces(self) -> list[str]:
        """Pieces not returned before."""
        start, self._shown = self._shown, len(self.pieces)
        return self.pieces[start:]

    @property
    def text(self) -> str:
        """The text, without special tokens and without the stop string that ended it; empty where there is no
        tokenizer."""
        if self._reader is not None:
            return "".join(self.pieces)
        return "" if self.tokenizer is None else self.tokenizer.decode(self.tokens)
