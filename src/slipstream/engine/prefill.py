"""How prompts are read: which ones together, and in which chunks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.drafter import State
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampler
from slipstream.engine.request import Request

SHORT = 64  # tokens that a pass reads in little more time than one
TOGETHER = 1024  # tokens of a group, padding included, at most
PADDED = 1.25  # so many times its own tokens a group may have, padding included

Chunk = tuple[Int[Tensor, "B T"], Int[Tensor, " B"], Int[Tensor, " B"], bool]


@dataclass
class Prefill:
    """Requests whose prompts are being read, in rows behind those under way, and the chunks that are left."""

    requests: Sequence[Request]
    cache: KVCache
    state: State
    sampler: Sampler
    chunks: Iterator[Chunk]


def together(prompts: Iterable[Sequence[int]]) -> int:
    """How many of the first prompts to read as one group, each padded to the longest: those that are short
    together, or not too long and of much the same length."""
    lengths, best = list[int](), 0
    for count, prompt in enumerate(prompts, 1):
        lengths.append(len(prompt))
        padded = count * max(lengths)
        if count > 1 and padded > max(SHORT, min(TOGETHER, PADDED * sum(lengths))):
            break
        best = count
    return best


def chunked(prompts: Sequence[Sequence[int]], device: torch.device, width: int) -> Iterator[Chunk]:
    """(tokens, next token, count, last?) per chunk. Chunks are cut from the end: all rows end in the last,
    and a shorter prompt has no tokens in the first ones."""
    longest = max(map(len, prompts))
    for end in range(longest % width or width, longest + 1, width):
        stops = [max(0, end - longest + len(prompt)) for prompt in prompts]
        rows = [list(prompt[max(0, s - width) : s]) for prompt, s in zip(prompts, stops, strict=True)]
        widest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (widest - len(row)) for row in rows], device=device)
        nexts = [prompt[s] if end < longest else 0 for prompt, s in zip(prompts, stops, strict=True)]
        counts = torch.tensor(list(map(len, rows)), device=device)
        yield tokens, torch.tensor(nexts, device=device), counts, end == longest
