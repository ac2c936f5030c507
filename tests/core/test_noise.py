"""Counter-based noise: two kernels, one stream of bits, and the laws drawn with it."""

import pytest
import torch

from slipstream.core.noise import Stream, _words_numpy, _words_torch, gumbel, uniform

KEYS = torch.tensor(
    [[0, 0], [1, 0], [0, 1], [-1, 3], [2**63 - 1, 7], [-(2**63), 2**40], [0x9E3779B97F4A7C15 - 2**64, 5]]
)


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("n", [1, 3, 4, 5, 64, 1027])
def test_kernels_agree_bit_for_bit(stream, n):
    """The same seed must give the same text on every device: a lost carry or a sign bit in the integer
    product."""
    for position in (0, 1, 2**31, 2**40 + 3):
        positions = torch.full((len(KEYS),), position) + torch.arange(len(KEYS))
        assert torch.equal(_words_numpy(KEYS, stream, positions, n), _words_torch(KEYS, stream, positions, n))


def test_asking_for_more_extends_what_there_was():
    """Acceptance reads the j-th uniform of a position by asking for j + 1 of them."""
    long = uniform(KEYS, Stream.ACCEPT, torch.arange(7), 11)
    assert torch.equal(uniform(KEYS, Stream.ACCEPT, torch.arange(7), 6), long[:, :6])


def test_every_part_of_the_key_counts():
    """Rows of one seed, streams of one row or positions of one stream that share noise would correlate
    draws."""
    draws = [
        uniform(torch.tensor([[seed, row]]), stream, torch.tensor([position]), 8)
        for seed in (0, 1, -1)
        for row in (0, 1)
        for stream in Stream
        for position in (0, 1, 2)
    ]
    assert torch.cat(draws).unique().numel() == 8 * len(draws)


def test_uniforms_are_strictly_inside_the_unit_interval(monkeypatch):
    """A uniform of 0 or 1 makes infinite Gumbel noise, which draws tokens outside the support."""
    ends = torch.tensor([[0, 2**52 - 1]])
    monkeypatch.setattr("slipstream.core.noise._words_numpy", lambda *_: ends)
    u = uniform(KEYS[:1], Stream.TARGET, torch.zeros(1).long(), 2)
    assert u.tolist() == [[2.0**-53, 1 - 2.0**-53]]
    assert gumbel(KEYS[:1], Stream.TARGET, torch.zeros(1).long(), 2).isfinite().all()


def test_gumbel_argmax_draws_from_the_law():
    """Five standard deviations on every token, over 20,000 positions; one-sided mistakes in −log(−log u) show
    at once."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02], dtype=torch.float64)
    n = 20_000
    g = gumbel(torch.tensor([[3, 1]]).expand(n, 2).contiguous(), Stream.TARGET, torch.arange(n), len(p))
    counts = (p.log() + g).argmax(-1).bincount(minlength=len(p))
    assert ((counts - n * p).abs() < 5 * (n * p * (1 - p)).sqrt()).all()
    mean, deviation = g.mean().item(), g.std().item()
    assert mean == pytest.approx(0.5772, abs=0.02)
    assert deviation == pytest.approx(torch.pi / 6**0.5, abs=0.02)
