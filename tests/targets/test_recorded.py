"""A recorded target: its passes say what its texts say, whatever rows they stand in."""

import pytest
import torch

import tiny
from slipstream.core.tree import Tree, chain
from slipstream.targets import RecordedTarget

TEXTS = [(prompt[:4], prompt[4:]) for prompt in tiny.prompts(12, 7, 9)]
TAPS = ("final", "input of block 1")


@pytest.fixture(scope="module")
def recorded() -> RecordedTarget:
    return RecordedTarget(tiny.target("llama"), TEXTS, TAPS)


def test_a_pass_reads_the_texts_of_its_cache(recorded):
    """Another text's features, or those of the node's slot in place of its position."""
    whole = recorded.target.features([[*prompt, *answer] for prompt, answer in TEXTS], ("input of block 1",))
    cache = recorded.new_cache(3)
    cache.select([2, 0])
    cache.lengths += torch.tensor([3, 5])
    tree = Tree(torch.tensor([[1, 2, 3]] * 2), torch.tensor([[0, 0, 0]] * 2), 1)
    out = recorded(tree, cache, TAPS[1:])
    for row, (text, at) in enumerate(((2, 3), (0, 5))):
        for node, depth in enumerate((0, 1, 1)):
            assert torch.equal(out.features[row, node], whole[text, at + depth])
            assert int(out.logits[row, node, 0]) == [*TEXTS[text][0], *TEXTS[text][1]][at + depth + 1]


def test_nothing_matches_past_the_end(recorded):
    cache = recorded.new_cache(3)
    cache.lengths += recorded.lengths - 1  # the root is the last token
    logits = recorded(chain(torch.zeros(3, 2).long()), cache).logits
    assert logits.flatten().tolist() == [-1.0] * 6


def test_all_else_is_the_recorded_targets(recorded):
    """So that a head may be made for it as for the target itself."""
    target, ids = recorded.target, torch.arange(5)
    assert (recorded.fingerprint, recorded.sizes) == (target.fingerprint, target.sizes)
    assert torch.equal(recorded.embed(ids), target.embed(ids))
    assert recorded.lm_head().weight is target.lm_head().weight
    assert tiny.eagle(recorded, "chain-2").lm_head.weight is target.lm_head().weight
