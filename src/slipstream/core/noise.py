"""Counter-based noise, a function of (seed, row, stream, position): Philox4x64-10 (Salmon et al. 2011).

A CPU runs NumPy's, 10 times as fast there; other devices run integer tensor arithmetic without host
synchronisation. Both give the same bits.
"""

import math
from enum import IntEnum

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.device import is_host

ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
LOW32 = 0xFFFFFFFF
LOUD = 2**52 - 2**44  # one word in 256 is above it
# Above the noise of all others, however it rounds.
MURMUR = -math.log(-math.log(LOUD / 2**52)) + 1e-9


class NoiseStream(IntEnum):
    """The independent streams of noise at one position."""

    TARGET = 0  # decides the text; a drafter may look at it under the coupled law
    ACCEPT = 1  # decides acceptance in multi-round verification
    DRAFT = 2  # draws a sampled drafter's candidates; multi-round verification must not share it


def words(
    keys: Int[Tensor, "B 2"], stream: NoiseStream, positions: Int[Tensor, " B"], n: int
) -> Int[Tensor, "B n"]:
    """`n` words of 52 bits per row, by (seed, row) and position."""
    make = _words_numpy if is_host(positions) else _words_torch
    return make(keys, stream, positions, n)


def uniform(bits: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """A float64 uniform of each word: odd multiples of 2⁻⁵³, so never 0 or 1."""
    return bits.double().add_(0.5).mul_(2.0**-52)


def gumbel(bits: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Standard Gumbel noise of each word, so that argmax(log p + g) is a draw from p."""
    return uniform(bits).log_().neg_().log_().neg_()


def winner(scores: Float[Tensor, " V"], bits: Int[Tensor, " V"]) -> int:
    """argmax(scores + g) on the host, the lower id in a tie. Noise grows with its word, so logarithms are
    taken only of the few that are loud, and of what may win although it is not."""
    x = scores.double().numpy()
    best = int(x.argmax())
    if not np.isfinite(x[best]):
        return best
    loud = bits.numpy() > LOUD
    some = np.append(np.flatnonzero(loud), best)
    least = float((scores[some] + gumbel(bits[some])).max())
    floor = least - MURMUR - 1e-12 * abs(least)  # whoever is below it and not loud is below the least
    some = np.flatnonzero(loud | (x >= floor))
    return int(some[(scores[some] + gumbel(bits[some])).argmax()])


def _words_numpy(keys: Tensor, stream: NoiseStream, positions: Tensor, n: int) -> Tensor:
    out = np.empty((len(keys), n), dtype=np.uint64)
    for row, key, position in zip(out, keys.numpy().view(np.uint64), positions.tolist(), strict=True):
        raw = np.random.Philox(key=key, counter=[0, position, int(stream), 0]).random_raw(n)
        np.right_shift(raw, np.uint64(12), out=row)
    return torch.from_numpy(out.view(np.int64))


def _words_torch(keys: Tensor, stream: NoiseStream, positions: Tensor, n: int) -> Tensor:
    B, blocks = len(keys), -(-n // 4)
    # The counter begins at 1, because NumPy's Philox counts up before its first block.
    counter = torch.arange(1, blocks + 1, device=keys.device).expand(B, -1)
    zeros = torch.zeros_like(counter)
    x = [counter, positions[:, None].expand(B, blocks), zeros + int(stream), zeros]
    k0, k1 = keys[:, :1], keys[:, 1:]
    for _ in range(ROUNDS):
        (h0, l0), (h1, l1) = (_multiply(m, v) for m, v in zip(MULTIPLIERS, (x[0], x[2]), strict=True))
        x = [h1 ^ x[1] ^ k0, l1, h0 ^ x[3] ^ k1, l0]
        k0, k1 = k0 + _signed(WEYL[0]), k1 + _signed(WEYL[1])
    words = torch.stack(x, -1).flatten(1)[:, :n]
    return (words >> 12) & (2**52 - 1)


def _multiply(m: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of the unsigned 128-bit product, in int64 arithmetic that wraps."""
    m0, m1 = m & LOW32, m >> 32
    x0, x1 = x & LOW32, (x >> 32) & LOW32
    low, mid0, mid1 = m0 * x0, m1 * x0, m0 * x1
    carry = ((low >> 32) & LOW32) + (mid0 & LOW32) + (mid1 & LOW32)
    high = m1 * x1 + ((mid0 >> 32) & LOW32) + ((mid1 >> 32) & LOW32) + ((carry >> 32) & LOW32)
    return high, x * _signed(m)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
