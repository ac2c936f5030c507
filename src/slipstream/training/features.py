"""Features: the target's states at every token of the training data, cached on disk within a budget."""

import fcntl
import hashlib
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.core.target import Target
from slipstream.files import cache_home
from slipstream.training.data import Example

# Of a configuration: what no state depends on, or the precision says. Where the model lies begins with _.
UNREAD = ("architectures", "dtype", "transformers_version")


class Features:
    """The target's taps at every token of every example.

    Each tap has a file of its own, which all runs on the same examples share. It holds tokens in the order of
    the batches, shortest first, so a run continues what another or a killed process has written.

    Args:
        batches: indices of examples of similar length, which pass through the target together.
        budget: bytes on disk. Batches beyond it are computed whenever they are needed.
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
        self._widths = target.widths(taps)
        tokens = [sum(len(examples[i].tokens) for i in batch) for batch in batches]
        self._starts = [0, *np.cumsum(tokens).tolist()]
        token = sum(self._widths) * target.dtype.itemsize
        self.kept = sum(0 < token * end <= budget for end in self._starts[1:])
        self.bytes = token * self._starts[self.kept]

    @cached_property
    def key(self) -> str:
        """A hash of all that the features depend on, except the taps."""
        target, config = self.target, dict(self.target.described)
        for name in [name for name in config if name.startswith("_") or name in UNREAD]:
            del config[name]
        described = json.dumps(config, sort_keys=True, default=str)
        key = hashlib.sha256(f"{target.fingerprint} {target.values} {target.precision} {described}".encode())
        for i in chain.from_iterable(self.batches):
            key.update(np.asarray(self.examples[i].tokens, dtype=np.int32).tobytes() + b"|")
        return key.hexdigest()[:16]

    @property
    def paths(self) -> list[Path]:
        """The file of each tap."""
        return [cache_home() / "features" / self.key / f"{tap.replace(' ', '_')}.bin" for tap in self.taps]

    def fill(self, advance: Callable[[int], None]) -> None:
        """Write what the files still lack. `advance` is called with each number of tokens done. Raises
        ValueError if the disk cannot be written. What was written stays, and the next run continues it."""
        if self._complete():  # whatever other taps another run may be writing
            advance(self._starts[self.kept])
            return
        try:
            with ExitStack() as stack:
                self.paths[0].parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(self.paths[0].parent / "lock", "w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    print("another run reads features of this data: waiting for it", file=sys.stderr)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                files = [stack.enter_context(open(path, "ab")) for path in self.paths]
                done = [self._finished(file, width) for file, width in zip(files, self._widths, strict=True)]
                first = bisect_right(self._starts, min(done)) - 1
                advance(self._starts[min(first, self.kept)])
                for b in range(first, self.kept):
                    start, end = self._starts[b : b + 2]
                    missing = [i for i, finished in enumerate(done) if finished < end]
                    widths = [self._widths[i] for i in missing]
                    features = torch.cat(self._compute(self.batches[b], tuple(self.taps[i] for i in missing)))
                    for i, part in zip(missing, features.split(widths, -1), strict=True):
                        new = part[max(done[i] - start, 0) :].cpu().contiguous()
                        files[i].write(new.view(torch.uint8).numpy().tobytes())
                    advance(end - start)
        except OSError as error:
            gib = self.bytes / 2**30
            raise ValueError(
                f"features cannot be cached in {self.paths[0].parent} ({gib:.1f} GiB): {error.strerror}: "
                "free the disk, set XDG_CACHE_HOME, or lower features.disk_gib (0 computes them online)"
            ) from error

    def _complete(self) -> bool:
        """Whether the files hold all batches that are to be kept."""
        tokens = self._starts[self.kept] * self.target.dtype.itemsize
        sizes = [path.stat().st_size if path.exists() else 0 for path in self.paths]
        return all(size >= width * tokens for size, width in zip(sizes, self._widths, strict=True))

    def _finished(self, file: BinaryIO, width: int) -> int:
        """The number of whole tokens in a tap's file, of which other runs may read. Any rest is cut off."""
        tokens, rest = divmod(os.fstat(file.fileno()).st_size, width * self.target.dtype.itemsize)
        if rest:
            file.truncate(tokens * width * self.target.dtype.itemsize)
        return tokens

    def of(self, b: int) -> list[Float[Tensor, "_ F"]]:
        """The features of each example of batch b."""
        if b >= self.kept:
            return self._compute(self.batches[b], self.taps)
        start, end = self._starts[b : b + 2]
        parts, dtype = [], self.target.dtype
        for path, width in zip(self.paths, self._widths, strict=True):
            row = width * dtype.itemsize
            try:
                raw = np.fromfile(path, dtype=np.uint8, count=row * (end - start), offset=row * start)
            except FileNotFoundError:  # the cache was cleaned meanwhile
                return self._compute(self.batches[b], self.taps)
            parts.append(torch.from_numpy(raw).view(dtype).view(-1, width))
        return list(torch.cat(parts, -1).split([len(self.examples[i].tokens) for i in self.batches[b]]))

    def _compute(self, batch: Sequence[int], taps: tuple[str, ...]) -> list[Float[Tensor, "_ F"]]:
        tokens = [self.examples[i].tokens for i in batch]
        features = self.target.features(tokens, taps)
        return [part[: len(row)] for part, row in zip(features, tokens, strict=True)]


def pack(examples: Sequence[Example], tokens: int) -> list[list[int]]:
    """Batches of similar length, shortest first, of at most `tokens` padded tokens or one example each."""
    order = sorted(range(len(examples)), key=lambda i: (len(examples[i].tokens), i))
    batches: list[list[int]] = [[]]
    for i in order:
        if batches[-1] and (len(batches[-1]) + 1) * len(examples[i].tokens) > tokens:
            batches.append([])
        batches[-1].append(i)
    return batches
