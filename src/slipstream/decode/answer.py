"""Answer: one row's text as it grows, and where it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.targets.hf import Target

Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Round:
    """What one pass did for one row: tokens drafted along the deepest path, drafted ones accepted, tokens kept in the text
    (fewer than accepted + 1 where the text ended)."""

    drafted: int
    accepted: int
    kept: int


def mean_accepted_length(rounds: Sequence[Round]) -> float:
    """τ: tokens committed per target pass, the target's own included; 1 for plain decoding.

    The prompt's pass and the token it yields are in neither.
    """
    return sum(r.kept for r in rounds) / len(rounds) if rounds else 1.0


@dataclass
class Answer:
    """Ends exactly where plain decoding would: tokens are looked at one by one, whatever a round brought.

    Attributes:
        tokens: token ids, a closing EOS included.
        rounds: one entry per target pass after the prompt's.
    """

    target: Target
    limit: int
    eos: frozenset[int]
    stop: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Finish | None = None

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens until the text ends; returns those taken."""
        before = len(self.tokens)
        for token in tokens:
            if self.finish is not None:
                break
            self.tokens.append(token)
            if token in self.eos:
                self.finish = "eos"
            elif self.stop and any(stop in self._tail(stop) for stop in self.stop):
                self.finish = "stop"
            elif len(self.tokens) == self.limit:
                self.finish = "length"
        return self.tokens[before:]

    def _tail(self, stop: str) -> str:
        """Text that holds `stop` if the last token completed it: a token is at least a byte, a character at most four."""
        return self.target.decode(self.tokens[-(4 * len(stop) + 8) :])

    @property
    def text(self) -> str:
        """The answer, without special tokens and without the stop string that ended it."""
        text = self.target.decode(self.tokens)
        if self.finish != "stop":
            return text
        return text[: min(at for at in map(text.find, self.stop) if at >= 0)]
