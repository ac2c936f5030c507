"""Heads that begin as trained ones (`head.start`)."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.target import Target
from slipstream.drafters import drafter_class
from slipstream.drafters.heads import Head, HeadDrafter
from slipstream.drafters.store import find_drafter, read_drafter
from slipstream.files import understood


@dataclass(frozen=True)
class WarmStart:
    """A trained head, in float32.

    Attributes:
        name: the recipe's: a method whose weights ship, or a directory.
        vocab: its draft vocabulary; None: all tokens.
    """

    name: str
    method: str
    head: Any
    vocab: Int[Tensor, " Vd"] | None

    @classmethod
    def read(cls, name: str, target: Target, draft_vocab: int) -> "WarmStart":
        """From weights as they are stored. Raises ValueError if there are none, or if the size of their draft
        vocabulary is not `draft_vocab` (0: all tokens)."""
        config, tensors = read_drafter(find_drafter(name, target), target)
        with understood(f"drafter directory {name}"):
            kind = drafter_class(config.get("method"), f"drafter directory {name}")
            if not issubclass(kind, HeadDrafter):
                raise ValueError(f"head.start={name!r} is a {kind.method} drafter, which has no head")
            head, vocab, _ = kind.unpack(config, tensors)
        wanted, size = draft_vocab or target.vocab, target.vocab if vocab is None else len(vocab)
        if size != min(wanted, target.vocab):
            raise ValueError(
                f"head.start={name!r} has a draft vocabulary of {size} tokens, which is kept, and "
                f"head.draft_vocab asks for {wanted}: set head.draft_vocab={size}"
            )
        return cls(name, kind.method, head.float(), None if vocab is None else vocab.long())

    def as_is(self, config: Any, gains: Float[Tensor, " taps1"]) -> Head:
        """The head itself, for inputs that are scaled by `gains` in training. Raises ValueError if it has not
        the sizes of `config`."""
        own = self.head.config
        if type(own) is not type(config):
            raise ValueError(
                f"head.start={self.name!r} is of the method {self.method}: name a head of the same method"
            )
        theirs, ours = asdict(own), asdict(config)
        if wrong := [f"{key} {theirs[key]}, not {ours[key]}" for key in ours if theirs[key] != ours[key]]:
            raise ValueError(f"head.start={self.name!r} has other sizes than this recipe: {'; '.join(wrong)}")
        return unscaled(self.head, gains)


def unscaled(head: Any, gains: Float[Tensor, " taps1"]) -> Any:
    """The head, which reads plain inputs, changed to give the same for inputs that are scaled by `gains`."""
    with torch.no_grad():
        head.scale_inputs(1 / gains[0], 1 / gains[1:])
    return head.requires_grad_()
