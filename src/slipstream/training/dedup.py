"""What training data should not hold: loops, near copies, and words of a question set."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from os import PathLike
from zlib import crc32

import numpy as np
from jaxtyping import UInt64
from numpy.lib.stride_tricks import sliding_window_view

from slipstream.files import parsed, read_text
from slipstream.targets.special_tokens import texts_in

EXCLUDED = 13  # consecutive words that a row may not share with a question set
WHOLE = 4  # a question of at least so many words, and fewer than `EXCLUDED`, may be no message of a row
COMPARED = 5  # consecutive words that are compared to find near copies
NEAR = 0.7  # the share of these sequences that near copies have in common
BANDS, IN_BAND = 16, 4  # of MinHash: texts of which half is shared meet in a band with probability 0.64
LAG = 100  # words: the longest passage whose repetition is looked for
LOOPED = 30  # words: the shortest run of repetitions that is a loop
NUMBERING = re.compile(r"(?m)^\s*\d+[.)]\s")  # a loop may count itself
_RNG = np.random.default_rng(0)
WEIGHTS = _RNG.integers(1, 2**63, EXCLUDED, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
MIXERS = _RNG.integers(1, 2**63, (2, BANDS * IN_BAND, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)


@lru_cache(maxsize=2**18)
def _hash(word: str) -> int:
    return crc32(word.encode())


def shingles(text: str, n: int) -> UInt64[np.ndarray, " S"]:
    """A number for each `n` consecutive words, without case and punctuation. Fewer words have none."""
    words = re.findall(r"\w+", text.lower())
    if len(words) < n:
        return np.empty(0, np.uint64)
    hashes = np.fromiter(map(_hash, words), np.uint64, len(words))
    return (sliding_window_view(hashes, n) * WEIGHTS[:n]).sum(1)


def _marks(text: str) -> list[int]:
    """The shingles of `EXCLUDED` words; of a shorter text that of all its words, if there are `WHOLE`."""
    count = min(EXCLUDED, len(re.findall(r"\w+", text)))
    return shingles(text, count).tolist() if count >= WHOLE else []


def excluded_words(paths: Iterable[str | PathLike[str]]) -> set[int]:
    """Shingles of texts in JSONL files, which no row may share. Raises ValueError for unreadable files."""
    words: set[int] = set()
    for path in paths:
        lines = [line for line in read_text(path, "question file").split("\n") if line.strip()]
        if not lines:
            raise ValueError(f"question file {path} is empty: give one JSON object a line")
        for line in lines:
            try:
                if not isinstance(row := parsed(line), dict):
                    raise ValueError(f"a {type(row).__name__}")
            except ValueError as error:
                raise ValueError(f"question file {path}: {line[:40]!r} is no JSON object: {error}") from error
            words.update(*map(_marks, texts_in(row)))
    return words


def holds(text: str, words: set[int]) -> bool:
    """Whether a text shares `EXCLUDED` consecutive words with the texts, or is a shorter one of them."""
    return not words.isdisjoint(_marks(text))


def loops(text: str) -> bool:
    """Whether a text repeats a passage at least twice, in `LOOPED` words or more beyond its first saying.
    Numbers that count the repetitions do not matter."""
    words = NUMBERING.sub("", text).split()
    ids = np.fromiter(map(_hash, words), np.uint64, len(words))
    if len(ids) - len({*zip(ids.tolist(), ids[1:].tolist(), strict=False)}) < LOOPED // 2:
        return False  # too few pairs of words come again
    for lag in range(1, min(LAG, len(ids) // 3) + 1):
        differs = np.flatnonzero(ids[lag:] != ids[:-lag])
        run = np.diff(np.concatenate([[-1], differs, [len(ids) - lag]])).max() - 1
        if run >= max(2 * lag, LOOPED):
            return True
    return False


def near_copies(texts: Iterable[str]) -> Iterator[bool]:
    """Whether each text is nearly one before it that is none itself. MinHash finds candidates. Then the share
    of common shingles is computed (Jaccard). Texts of fewer than `COMPARED` words must be equal."""
    in_band: dict[bytes, list[int]] = defaultdict(list)
    originals: list[UInt64[np.ndarray, " S"]] = []
    short: set[str] = set()
    for text in texts:
        shingled = np.unique(shingles(text, COMPARED))
        if not len(shingled):
            yield text in short
            short.add(text)
            continue
        signature = (shingled * MIXERS[0] + MIXERS[1]).min(1).reshape(BANDS, IN_BAND)
        keys = [bytes([band]) + row.tobytes() for band, row in enumerate(signature)]
        candidates = {i for key in keys for i in in_band[key]}
        copy = any(_jaccard(shingled, originals[i]) >= NEAR for i in candidates)
        if not copy:
            for key in keys:
                in_band[key].append(len(originals))
            originals.append(shingled)
        yield copy


def _jaccard(a: UInt64[np.ndarray, " A"], b: UInt64[np.ndarray, " B"]) -> float:
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)
