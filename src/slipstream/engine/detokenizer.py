"""The text of tokens as they come. A character is released once no later token can change it."""

from collections.abc import Sequence

from slipstream.core.target import Text
from slipstream.targets.prompts import BYTE


def silent_stops(text: Text, stop: Sequence[str]) -> frozenset[int]:
    """Special tokens whose own text is a stop string. The text of an answer leaves them out."""
    written = ((string, text.ids(string)) for string in stop)
    alone = (ids for string, ids in written if len(ids) == 1 and text.decode(ids, special=True) == string)
    return frozenset(ids[0] for ids in alone if not text.decode(ids))


class Detokenizer:
    """Turns tokens into pieces of text, which together are the text of all tokens, up to a stop string.

    It holds back incomplete characters and what may become a stop string. Tokens are decoded together with
    those released last, because a decoder may look back.
    """

    def __init__(self, text: Text, stop: Sequence[str] = ()) -> None:
        self.text, self.stop = text, tuple(stop)
        self._silent = silent_stops(text, stop)
        self.stopped = False  # a stop string is complete, and nothing follows
        self.released = self.decoded = 0  # characters of the pieces so far, and of all tokens
        self._context = list[int]()  # the tokens that were released last
        self._fresh = list[int]()  # the tokens after them, whose text is not all released
        self._start = 0  # characters before the fresh tokens' text
        self._in_bytes = False  # a run of bytes may go on
        self._context_length = 0  # characters of the context, decoded alone

    def push(self, token: int) -> str:
        """Take a token and return the text that is now certain."""
        self._fresh.append(token)
        if BYTE.fullmatch(self.text.written(token)):
            self._in_bytes = True
        elif self._in_bytes and self.text.decode([token]):  # a special token, without text, does not end it
            self._in_bytes = False
        text = self._text()
        self.decoded = self._start + len(text)
        ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        ends += [len(text)] * (token in self._silent)
        self.stopped = bool(ends)
        return self._release(text, min(ends) if ends else self._certain(text))

    def flush(self) -> str:
        """The rest of the text, once no token follows."""
        text = self._text()
        return "" if self.stopped else self._release(text, len(text))

    def _text(self) -> str:
        return self.text.decode(self._context + self._fresh)[self._context_length :]

    def _release(self, text: str, end: int) -> str:
        piece = text[self.released - self._start : end]
        self.released += len(piece)
        if text and self.released == self.decoded:
            self._context, self._fresh, self._start = self._fresh, [], self.released
            self._context_length = len(self.text.decode(self._context))
        return piece

    def _certain(self, text: str) -> int:
        """The number of characters that no later token can change or make part of a stop string."""
        if self._in_bytes:
            return 0
        end = len(text.rstrip("\ufffd"))
        partial = (n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n], 0, end))
        return end - max(partial, default=0)
