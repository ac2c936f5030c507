"""Ranks along recorded answers, and costs that do not fall."""

import pytest
import torch

import tiny
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.draft_model import DraftModel
from slipstream.engine.replay import record
from slipstream.measure.trees import GAMMA, RANKS, _rising, acceptance, proposing, ranks


def test_a_cascade_is_followed_as_deep_as_it_drafts(target):
    """Every depth's law is known at once, and says nothing of the draft before it."""
    cascade = tiny.fasteagle(target)
    recorded = record(target, tiny.prompts(5, 9, 12, 7), 60, cascade.taps)
    rates = acceptance(cascade, recorded, "top-k")
    assert len(rates) == cascade.deepest == 3
    assert all(0 < sum(row) <= 1 for row in rates)


def test_a_model_that_drafts_for_itself_is_right_first_at_every_depth(target):
    """A rank that is compared with another text's token, or a text's end that counts as a miss."""
    itself = DraftModel(target, target)
    recorded = record(target, tiny.prompts(5, 9, 4), 12, ())
    assert acceptance(itself, recorded, "top-k") == [[1.0] + [0.0] * (RANKS - 1)] * GAMMA
    drafts = ranks(itself, recorded, TreeSpec.parse("backbone-3x2"))
    ends = [int(n) for n in recorded.lengths - recorded.prompts]
    assert (drafts == -1).sum() == 3 * len(ends)  # one, two and three tokens before the end of a text
    assert len(drafts) == sum(ends) - len(ends)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposal", ["top-k", "noise"])
def test_ranks_are_those_of_drafts_from_every_position(target, drafter, proposal, temperature):
    """Counted by hand: from every token, the head steps along its own first guesses, as far as the text that
    is known to follow bears them out."""
    recorded = record(target, tiny.prompts(5, 9), 60, ("final",), temperature=temperature)
    ranked, ten = proposing(drafter, proposal), TreeSpec.parse("[[0],[1],[2],[3],[4],[5],[6],[7],[8],[9]]")
    hits = torch.zeros(2, 10)
    tried = [0, 0]
    for b, row in enumerate(recorded.sampling):
        text = recorded.tokens[b, : recorded.lengths[b]]
        for at in range(int(recorded.prompts[b]), len(text) - 1):
            sampler = Sampler([row], [[]], target.vocab)
            state = drafter.start(1, target.device)
            cache = target.new_cache(1)
            read = Span(
                text[None, :at], text[None, 1 : at + 1], torch.zeros(1).long(), torch.tensor([at]), cache
            )
            drafter.update(
                Span(**{**vars(read), "features": recorded.tapped(("final",))[b : b + 1, :at]}), state
            )
            for depth in range(min(2, len(text) - 1 - at)):
                if depth:  # the guess is fed instead of the feature: what a draft has
                    one, fed = torch.ones(1).long(), text[None, at + depth : at + depth + 1]
                    step = Span(fed, fed, state.cache.lengths, one, cache, state.hidden[:, None])
                    drafter.update(step, state)
                state.root = text[at + depth][None]
                found = ranked.propose(state, sampler, ten).tokens[0, 1:].tolist()
                tried[depth] += 1
                if int(text[at + depth + 1]) in found:
                    hits[depth, found.index(int(text[at + depth + 1]))] += 1
                if int(text[at + depth + 1]) != found[0]:
                    break
    expected = hits / torch.tensor(tried)[:, None]
    assert hits.sum() > 3
    assert torch.allclose(torch.tensor(acceptance(drafter, recorded, proposal))[:2], expected, atol=1e-6)


def test_more_rows_cost_no_less():
    assert _rising({1: 5.0, 2: 3.0, 4: 4.0, 8: 7.0, 16: 6.0, 32: 9.0}) == {
        1: 4.0,
        2: 4.0,
        4: 4.0,
        8: 6.5,
        16: 6.5,
        32: 9.0,
    }
