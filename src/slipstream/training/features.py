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

# Keys of a configuration that change no state, or that the precision implies. The model's path begins with _.
UNREAD = ("architectures", "dtype", "transformers_version")
Batches = Sequence[Sequence[int]]  # indices of examples


class Features:
    """The target's taps at every token of every example.

    Each tap has a file, which all runs on the same examples share. It holds tokens in the order of the
    batches, shortest first. So a run continues what another or a killed process has written.

    Args:
        batches: examples of similar length, which pass through the target together.
        budget: bytes on disk. Batches beyond it are computed whenever they are needed.

    Attributes:
        stored, tokens, bytes: batches on disk, and their sizes.
    """

    def __init__(
        self, target: Target, examples: Sequence[Example], batches: Batches, taps: Sequence[str], budget: int
    ) -> None:
        self.target, self.examples, self.batches, self.taps = target, examples, batches, tuple(taps)
        self._rows = [width * target.dtype.itemsize for width in target.widths(taps)]  # bytes of a token
        tokens = [sum(len(examples[i].tokens) for i in batch) for batch in batches]
        self._starts = [0, *np.cumsum(tokens).tolist()]
        self.stored = sum(0 < sum(self._rows) * end <= budget for end in self._starts[1:])
        self.tokens = self._starts[self.stored]
        self.bytes = sum(self._rows) * self.tokens

    @cached_property
    def key(self) -> str:
        """A hash of all that the features depend on, except the taps."""
        target, config = self.target, self.target.described
        config = {name: config[name] for name in config if not name.startswith("_") and name not in UNREAD}
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
        home = cache_home() / "features" / self.key
        sizes = [path.stat().st_size if path.exists() else 0 for path in self.paths]
        if all(size >= row * self.tokens for size, row in zip(sizes, self._rows, strict=True)):
            advance(self.tokens)  # another run may be writing other taps
            return
        try:
            with ExitStack() as stack:
                home.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(home / "lock", "w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    print("another run reads features of this data: waiting for it", file=sys.stderr)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                files = [stack.enter_context(open(path, "ab")) for path in self.paths]
                done = [_whole_rows(file, row) for file, row in zip(files, self._rows, strict=True)]
                first = bisect_right(self._starts, min(done)) - 1
                advance(self._starts[min(first, self.stored)])
                for b in range(first, self.stored):
                    start, end = self._starts[b : b + 2]
                    missing = [i for i, rows in enumerate(done) if rows < end]
                    taps = tuple(self.taps[i] for i in missing)
                    features = torch.cat(self._compute(self.batches[b], taps))
                    for i, part in zip(missing, features.split(self.target.widths(taps), -1), strict=True):
                        new = part[max(done[i] - start, 0) :].cpu().contiguous()
                        files[i].write(new.view(torch.uint8).numpy().tobytes())
                    advance(end - start)
        except OSError as error:
            raise ValueError(
                f"features cannot be cached in {home} ({self.bytes / 2**30:.1f} GiB): {error.strerror}: "
                "free the disk, set XDG_CACHE_HOME, or lower features.disk_gib (0 computes them online)"
            ) from error

    def of(self, b: int) -> list[Float[Tensor, "_ F"]]:
        """The features of each example of batch b."""
        if b >= self.stored:
            return self._compute(self.batches[b], self.taps)
        start, end = self._starts[b : b + 2]
        parts = []
        for path, row in zip(self.paths, self._rows, strict=True):
            try:
                raw = np.fromfile(path, dtype=np.uint8, count=row * (end - start), offset=row * start)
            except FileNotFoundError:  # the cache was cleaned meanwhile
                return self._compute(self.batches[b], self.taps)
            parts.append(torch.from_numpy(raw).view(self.target.dtype).view(end - start, -1))
        return list(torch.cat(parts, -1).split([len(self.examples[i].tokens) for i in self.batches[b]]))

    def _compute(self, batch: Sequence[int], taps: tuple[str, ...]) -> list[Float[Tensor, "_ F"]]:
        tokens = [self.examples[i].tokens for i in batch]
        features = self.target.features(tokens, taps)
        return [part[: len(row)] for part, row in zip(features, tokens, strict=True)]


def _whole_rows(file: BinaryIO, row: int) -> int:
    """The number of whole rows in a tap's file. Other runs may be reading them. A partial row is cut off."""
    rows, rest = divmod(os.fstat(file.fileno()).st_size, row)
    if rest:
        file.truncate(rows * row)
    return rows


def pack(examples: Sequence[Example], tokens: int) -> list[list[int]]:
    """Batches of similar length, shortest first, of at most `tokens` padded tokens or one example each."""
    order = sorted(range(len(examples)), key=lambda i: (len(examples[i].tokens), i))
    batches: list[list[int]] = [[]]
    for i in order:
        if batches[-1] and (len(batches[-1]) + 1) * len(examples[i].tokens) > tokens:
            batches.append([])
        batches[-1].append(i)
    return batches
