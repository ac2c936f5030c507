"""EAGLE's objective trains the very computation that drafting runs."""

import pytest
import torch

import tiny
from slipstream.core.span import Span
from slipstream.drafters.layers import attend_cache
from slipstream.train.data import Example
from slipstream.train.eagle import Batch, EagleObjective, Unrolled, coverage, frequent
from slipstream.train.recipe import Loss


@pytest.fixture
def drafter():
    return tiny.eagle(tiny.target("llama"), "chain-4")


def test_unrolled_steps_are_the_steps_of_a_draft(drafter):
    """A mask that shows training what drafting will not have: losses that promise what decoding does not keep."""
    target, T, depth = tiny.target("llama"), 12, 4
    text = torch.tensor(tiny.prompts(T + 1))
    features = target.features(text.tolist(), ("final",))
    embedded, unrolled, inputs, steps = target.ends.embed(text[:, 1:]), Unrolled(T, text.device), features[:, :-1], []
    for _ in range(depth):
        said = drafter.head(embedded, inputs, unrolled.positions, unrolled.step)
        steps.append(said)
        inputs = torch.cat([inputs[:, :1], said[:, :-1]], 1)
    for root in range(1, T - depth):  # draft along the text from every root, with the drafter's own cache
        cache = target.new_cache(1, T + 1)
        cache.keep(None, torch.tensor([root]))
        state = drafter.start(1, T + 1, target.device)
        count = torch.tensor([root])
        span = Span(text[:, :root], text[:, 1 : root + 1], 0 * count, count, cache, features[:, :root])
        drafter.absorb(span, state)
        hidden = state.hidden[:, None]
        assert torch.allclose(hidden[0, 0], steps[0][0, root - 1])
        for j in range(1, depth):
            attend, _ = attend_cache(state.cache, 0, 1, j - 1)
            at = torch.tensor([[root + j - 1]])
            hidden = drafter.head(target.ends.embed(text[:, root + j][:, None]), hidden, at, attend)
            assert torch.allclose(hidden[0, 0], steps[j][0, root + j - 1]), (root, j)


def test_the_loss_is_the_papers(drafter):
    """EAGLE §3.2 written out: SmoothL1 of the next feature, and cross-entropy of the law that it gives."""
    target = tiny.target("llama")
    example = Example(tiny.prompts(9)[0], [False] * 4 + [True] * 5)
    features = target.features([example.tokens], ("final",))
    batch = Batch.collate([example], [features[0]], "cpu")
    objective = EagleObjective(drafter.head.float(), target.ends, None)
    loss, _ = objective(batch, Loss(feature=1.0, token=0.1, noise=0.0), torch.Generator())
    f, expected = features[0].float(), 0.0
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    embedded = target.ends.embed(torch.tensor([example.tokens[1:-1]])).float()
    said = drafter.head(embedded, f[None, :7], torch.arange(7)[None], lambda k, v: (k, v, mask))[0]
    for i in range(7):
        if example.loss[i + 2]:  # row i says f_{i+1}, which predicts t_{i+2}
            d = (said[i] - f[i + 1]).abs()
            expected += torch.where(d < 1, 0.5 * d * d, d - 0.5).mean()
            p, q = ((x @ target.ends.head.float().T).softmax(-1) for x in (f[i + 1], said[i]))
            expected -= 0.1 * (p * q.log()).sum()
    assert torch.allclose(loss, expected, rtol=1e-4)
    assert int(batch.counts.sum()) == 5


def test_padding_and_other_rows_change_nothing(drafter):
    target = tiny.target("llama")
    examples = [Example(p, [True] * len(p)) for p in tiny.prompts(9, 5)]
    features = [target.features([e.tokens], ("final",))[0] for e in examples]
    objective = EagleObjective(drafter.head.double(), target.ends, None)
    settings = Loss(noise=0.0, unroll=3)

    def loss(which: list[int]) -> float:
        batch = Batch.collate([examples[i] for i in which], [features[i] for i in which], "cpu")
        objective.head.float()
        return float(objective(batch, settings, torch.Generator())[0].detach())

    assert loss([0, 1]) == pytest.approx(loss([0]) + loss([1]), rel=1e-4)


def test_before_training_the_head_repeats_the_feature():
    """Identity start: f̂_{i+1} = f_i."""
    from slipstream.train.recipe import Recipe

    target = tiny.target("llama")
    text = torch.tensor(tiny.prompts(6))
    f = target.features(text.tolist(), ("final",)).float()
    objective = EagleObjective.begin(Recipe(), target.ends, [Example(text[0].tolist(), [True] * 6)], f[0])
    unrolled = Unrolled(6, f.device)
    said = objective.head(target.ends.embed(text).float(), f, unrolled.positions, unrolled.step)
    assert torch.allclose(said, f, atol=1e-5)


def test_the_draft_vocabulary_is_what_is_said_most():
    examples = [Example([1, 7, 7, 7, 5, 5, 9], [False, True, True, True, True, True, True])]
    vocab = frequent(examples, 2, 64)
    assert vocab.tolist() == [5, 7]
    assert coverage(examples, vocab) == pytest.approx(5 / 6)
    assert frequent(examples, 5, 64).tolist() == [0, 1, 5, 7, 9]  # filled up: the shape does not depend on the data
    assert frequent(examples, 0, 64) is None


def test_the_scale_of_embeddings_is_folded_into_the_drafter(drafter):
    """A head that is trained on scaled embeddings and drafts with plain ones."""
    target, text = tiny.target("llama"), torch.tensor(tiny.prompts(6))
    f, embedded = target.features(text.tolist(), ("final",)).float(), target.ends.embed(text).float()
    objective = EagleObjective(drafter.head.float(), target.ends, None, gain=7.0)
    made = objective.drafter("chain-3", torch.float64).head.float()
    said = [
        head(x, f, u.positions, u.step)
        for head, x, u in ((objective.head, 7 * embedded, Unrolled(6, f.device)), (made, embedded, Unrolled(6, f.device)))
    ]
    assert torch.allclose(said[0], said[1], atol=1e-4)
