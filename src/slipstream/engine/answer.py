"""Answer: one row's text as it grows, and where it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.core.target import Target
from slipstream.engine.detokenizer import Detokeniser
from slipstream.engine.session import Committed

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Round:
    """One pass for one row: the depth that it drafted, the drafted tokens accepted, and the tokens kept in
    the text (fewer than accepted + 1 where the text ended)."""

    drafted: int
    accepted: int
    kept: int


def mean_accepted_length(rounds: Sequence[Round]) -> float:
    """τ: tokens committed per target pass, the target's own included; 1 for plain decoding. The prompt's
    pass and its token do not count."""
    return sum(r.kept for r in rounds) / len(rounds) if rounds else 1.0


@dataclass
class Answer:
    """One row's answer. It takes tokens one by one, so that it ends exactly where plain decoding would.

    Attributes:
        read: its text is wanted as it grows. Otherwise it is decoded once, unless there are stop strings.
        tokens: token ids, a closing EOS included.
        pieces: if text is wanted as it grows: what became certain with each token.
        rounds: one entry per target pass after the prompt's.
        ended: says of its tokens so far whether the last of them ends it.
    """

    target: Target
    limit: int
    eos: frozenset[int]
    stop: tuple[str, ...]
    read: bool = False
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Finish | None = None
    ended: Callable[[list[int]], bool] | None = None

    def __post_init__(self) -> None:
        text = self.target.text if self.read or self.stop else None
        self._reader = None if text is None else Detokeniser(text, self.stop)
        self._ends: list[int] = []  # characters up to the end of each token
        self._released = 0

    def take(self, made: Committed, prompt: Sequence[int], known: int = 0) -> list[int]:
        """Take what a pass brought, but for its first tokens that are `known`; returns those taken. Raises
        ValueError where scores that decided were not finite."""
        if not made.finite:
            raise ValueError(self.target.explain_non_finite([*prompt, *self.tokens]))
        taken = self.extend(made.tokens[known:])
        if made.drafted is not None and taken:
            self.rounds.append(Round(made.drafted, len(made.tokens) - 1, len(taken)))
        return taken

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

    @property
    def text(self) -> str:
        """The answer, without special tokens and without the stop string that ended it; empty where the
        target has no text."""
        if self._reader is not None:
            return "".join(self.pieces)
        return "" if self.target.text is None else self.target.text.decode(self.tokens)
