"""logit_bias: what a request adds to the scores of some tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.targets.prompts import checked_ids


@dataclass(frozen=True)
class Bias:
    """Adds to the logits of tokens, as a processor."""

    tokens: tuple[int, ...]
    biases: tuple[float, ...]

    @classmethod
    def of(cls, given: Mapping[str, float], vocab: int) -> "Bias":
        """From token ids as text, which JSON asks for. Raises ValueError."""
        if wrong := [token for token in given if not (token.isdecimal() and len(token) < 20)]:
            raise ValueError(f"logit_bias holds {wrong[0][:40]!r}, which is no token id")
        return cls(tuple(checked_ids(map(int, given), vocab, "logit_bias")), tuple(given.values()))

    def __call__(self, ids: Int[Tensor, "1 T"], x: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        tokens = torch.tensor(self.tokens, device=x.device)
        return x.index_add(1, tokens, torch.tensor([self.biases], dtype=x.dtype, device=x.device))
