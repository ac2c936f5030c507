"""What the target's taps say about each example: computed once and kept on disk within a budget, or computed each time."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.files import cache_home
from slipstream.targets import Target
from slipstream.train.data import Example

Advance = Callable[[int], None]


class Features:
    """The taps of the target at every token of every example.

    The file is a run of finished examples in the given order, so what a killed process has written is gone on with.

    Args:
        batches: indices of examples that pass through the target together, of similar length.
        budget: bytes on disk; the batches that fit are kept, the others computed whenever they are asked for.
    """

    def __init__(
        self,
        target: Target,
        examples: Sequence[Example],
        batches: Sequence[Sequence[int]],
        taps: tuple[str, ...],
        budget: int,
    ) -> None:
        self.target, self.examples, self.batches, self.taps = target, examples, batches, taps
        self._dtype, self._width = target.dtype, sum(target.widths(taps))
        row = self._width * target.dtype.itemsize
        ends = np.cumsum([row * sum(len(examples[i].tokens) for i in batch) for batch in batches])
        self.kept = int((ends <= budget).sum())
        self.bytes = int(ends[self.kept - 1]) if self.kept else 0
        self._starts = [0, *ends.tolist()]
        self.path = cache_home() / "features" / f"{self.key}.bin"

    @cached_property
    def key(self) -> str:
        """A hash of everything the features depend on."""
        key = hashlib.sha256(f"{self.target.fingerprint} {self._dtype} {self.taps}".encode())
        for batch in self.batches:
            for i in batch:
                key.update(np.asarray(self.examples[i].tokens, dtype=np.int32).tobytes() + b"|")
        return key.hexdigest()[:16]

    def fill(self, advance: Advance) -> None:
        """Write what the file still lacks; `advance` is told the tokens that are there.

        Raises:
            ValueError: the disk does not take it; what was written stays and is gone on with.
        """
        if not self.kept:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # of two runs on the same data one writes, the other waits
                done = os.fstat(file.fileno()).st_size
                first = sum(end <= done for end in self._starts[1 : self.kept + 1])
                advance(self._tokens(range(first)))
                if first < self.kept:
                    file.truncate(self._starts[first])  # an example that was cut off
                for b in range(first, self.kept):
                    for features in self._compute(self.batches[b]):
                        file.write(_bytes(features))
                    advance(self._tokens([b]))
        except OSError as error:
            gib = self.bytes / 2**30
            raise ValueError(
                f"features cannot be cached in {self.path} ({gib:.1f} GiB): {error.strerror}: free the disk, set "
                "XDG_CACHE_HOME, or lower features.disk_gib (0 computes them online)"
            ) from error

    def _tokens(self, batches: Iterable[int]) -> int:
        return sum(len(self.examples[i].tokens) for b in batches for i in self.batches[b])

    def of(self, b: int) -> list[Float[Tensor, "_ F"]]:
        """Features of each example of batch b."""
        if b >= self.kept:
            return self._compute(self.batches[b])
        lengths = [len(self.examples[i].tokens) for i in self.batches[b]]
        start, count = self._starts[b], self._starts[b + 1] - self._starts[b]
        raw = np.fromfile(self.path, dtype=np.uint8, count=count, offset=start)
        return list(torch.from_numpy(raw).view(self._dtype).view(-1, self._width).split(lengths))

    def _compute(self, batch: Sequence[int]) -> list[Float[Tensor, "_ F"]]:
        tokens = [self.examples[i].tokens for i in batch]
        features = self.target.features(tokens, self.taps)
        return [features[b, : len(row)] for b, row in enumerate(tokens)]


def pack(examples: Sequence[Example], tokens: int) -> list[list[int]]:
    """Batches of at most `tokens` padded tokens (one example at least), of similar length, shortest first."""
    order = sorted(range(len(examples)), key=lambda i: (len(examples[i].tokens), i))
    batches: list[list[int]] = [[]]
    for i in order:
        if batches[-1] and (len(batches[-1]) + 1) * len(examples[i].tokens) > tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def _bytes(features: Tensor) -> bytes:
    return features.cpu().contiguous().view(torch.uint8).numpy().tobytes()
