"""Counter-based noise: two kernels, one stream of bits, and the laws drawn with it."""

import math

import pytest
import torch

from slipstream.core.noise import (
    LOUD,
    NoiseStream,
    _words_numpy,
    _words_torch,
    gumbel,
    uniform,
    winner,
    words,
)

KEYS = torch.tensor(
    [[0, 0], [1, 0], [0, 1], [-1, 3], [2**63 - 1, 7], [-(2**63), 2**40], [0x9E3779B97F4A7C15 - 2**64, 5]]
)


@pytest.mark.parametrize("stream", list(NoiseStream))
@pytest.mark.parametrize("n", [1, 3, 4, 5, 64, 1027])
def test_kernels_agree_bit_for_bit(stream, n):
    """The same seed must give the same text on every device: a lost carry or a sign bit in the integer
    product."""
    for position in (0, 1, 2**31, 2**40 + 3):
        positions = torch.full((len(KEYS),), position) + torch.arange(len(KEYS))
        assert torch.equal(_words_numpy(KEYS, stream, positions, n), _words_torch(KEYS, stream, positions, n))


def test_asking_for_more_extends_what_there_was():
    """Acceptance reads the j-th uniform of a position by asking for j + 1 of them."""
    long = words(KEYS, NoiseStream.ACCEPT, torch.arange(7), 11)
    assert torch.equal(words(KEYS, NoiseStream.ACCEPT, torch.arange(7), 6), long[:, :6])


def test_every_part_of_the_key_counts():
    """Rows of one seed, streams of one row or positions of one stream that share noise would correlate
    draws."""
    draws = [
        words(torch.tensor([[seed, row]]), stream, torch.tensor([position]), 8)
        for seed in (0, 1, -1)
        for row in (0, 1)
        for stream in NoiseStream
        for position in (0, 1, 2)
    ]
    assert torch.cat(draws).unique().numel() == 8 * len(draws)


def test_uniforms_are_strictly_inside_the_unit_interval():
    """A uniform of 0 or 1 makes infinite Gumbel noise, which draws tokens outside the support."""
    ends = torch.tensor([0, 2**52 - 1])
    assert uniform(ends).tolist() == [2.0**-53, 1 - 2.0**-53]
    assert gumbel(ends).isfinite().all()


def test_gumbel_argmax_draws_from_the_law():
    """Five standard deviations on every token, over 20,000 positions; one-sided mistakes in −log(−log u) show
    at once."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02], dtype=torch.float64)
    n = 20_000
    keys = torch.tensor([[3, 1]]).expand(n, 2).contiguous()
    g = gumbel(words(keys, NoiseStream.TARGET, torch.arange(n), len(p)))
    counts = (p.log() + g).argmax(-1).bincount(minlength=len(p))
    assert ((counts - n * p).abs() < 5 * (n * p * (1 - p)).sqrt()).all()
    mean, deviation = g.mean().item(), g.std().item()
    assert mean == pytest.approx(0.5772, abs=0.02)
    assert deviation == pytest.approx(torch.pi / 6**0.5, abs=0.02)


def drawn_of(scores, position):
    """The winner, and argmax over the noise of all tokens."""
    bits = words(KEYS[1:2], NoiseStream.TARGET, torch.tensor([position]), len(scores))[0]
    return winner(scores, bits), int((scores + gumbel(bits)).argmax())


@pytest.mark.parametrize("vocab", [1, 2, 7, 300, 49_152])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.3, 1.0, 3.0, 20.0, 1e6, 1e18])
def test_the_winner_is_that_of_all_noise(vocab, scale):
    """Too tight a bound leaves out a token that wins in spite of its low score, or the lower id of a tie."""
    noise = torch.Generator().manual_seed(vocab)
    for position in range(40 if vocab < 1000 else 8):
        scores = torch.randn(vocab, dtype=torch.float64, generator=noise) * scale
        if position % 2:
            scores[torch.rand(vocab, generator=noise) < 0.5] = -torch.inf
            scores[position % vocab] = 0.0
        won, of_all = drawn_of(scores, position)
        assert won == of_all


def test_a_quiet_token_wins_by_its_score():
    """Neither loud nor the likeliest: the likeliest one's own noise is as low as noise can be."""
    bits = torch.tensor([0, LOUD, 2**40, LOUD, LOUD + 1])
    scores = torch.tensor([1.0, 0.9, 0.95, 0.9, -9.0], dtype=torch.float64)
    assert winner(scores, bits) == int((scores + gumbel(bits)).argmax()) == 1


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_no_token_wins_without_a_finite_best_score(broken):
    """A token with a finite score beside a NaN would say that the pass was sound."""
    scores = torch.full((300,), -math.inf, dtype=torch.float64)
    scores[7] = broken
    if math.isnan(broken):
        scores[:5] = 3.0
    assert not math.isfinite(scores[drawn_of(scores, 0)[0]])
