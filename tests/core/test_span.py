"""commit: what a pass leaves behind."""

import pytest
import torch

from slipstream.core.kv_cache import KVCache
from slipstream.core.span import Output, commit
from slipstream.core.tree import PAD, Probes, Tree, chain
from slipstream.core.verify import Verdict

#   0 ─ 1 ─ 3
#     └ 2 ─ 4        row 0 accepts 0, 2, 4; row 1 accepts its root alone
PARENTS = torch.tensor([[0, 0, 0, 1, 2]])
TOKENS = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
VERDICT = Verdict(torch.tensor([[0, 2, 4], [0, 0, 0]]), torch.tensor([3, 1]), torch.tensor([15, 25]))


def commit_one(tree, verdict, features=None, start=(4, 2)):
    """Commit after a pass over the tree in a cache whose rows have read `start` tokens."""
    cache = KVCache(1, 2)
    cache.reserve(max(start))
    cache.keep(None, torch.tensor(start))
    cache.reserve(tree.rows)
    logits = torch.zeros(2, tree.nodes, 30).scatter_(2, (tree.tokens.clamp(min=0) + 1)[..., None], 1.0)
    return commit(tree, Output(logits, features, 0.0), verdict, cache)


def numbered(rows):
    """Features [2, R, 1] that say row and slot: 100·b + slot."""
    return torch.arange(rows)[None, :, None] + torch.tensor([0.0, 100.0])[:, None, None]


def test_reads_along_the_accepted_path():
    """A feature or a next token one node off trains and drafts from the wrong branch."""
    span = commit_one(Tree(TOKENS, PARENTS, 2), VERDICT, numbered(5))
    assert span.tokens[0].tolist() == [10, 12, 14]
    assert span.nexts[0].tolist() == [12, 14, 15]
    assert span.features[0, :, 0].tolist() == [0, 2, 4]
    assert (span.tokens[1, 0], span.nexts[1, 0], span.features[1, 0, 0]) == (20, 25, 100)
    assert span.mask.tolist() == [[True, True, True], [True, False, False]]
    assert span.start.tolist() == [4, 2]
    assert span.cache.lengths.tolist() == [7, 3]
    assert span.last(span.nexts).tolist() == [15, 25]
    assert span.last(span.features)[:, 0].tolist() == [4, 100]
    assert torch.equal(span.picks, TOKENS + 1)


def test_a_chain_is_kept_without_a_path():
    span = commit_one(
        chain(TOKENS), Verdict(torch.arange(5).expand(2, -1), torch.tensor([5, 2]), torch.tensor([15, 25]))
    )
    assert span.nexts.tolist()[0] == [11, 12, 13, 14, 15]
    assert span.nexts.tolist()[1][:2] == [21, 25]
    assert span.cache.lengths.tolist() == [9, 4]
    assert span.features is None
    assert span.probed is None


def test_a_row_without_tokens_reads_nothing():
    """The first chunks of a ragged batch have no tokens of the shorter prompts."""
    verdict = Verdict(torch.tensor([[0, 1], [0, 0]]), torch.tensor([2, 0]), torch.tensor([15, 25]))
    span = commit_one(chain(TOKENS[:, :2]), verdict, numbered(2), start=(4, 0))
    assert span.cache.lengths.tolist() == [6, 0]
    assert span.mask.tolist() == [[True, True], [False, False]]
    assert span.last(span.features)[0] == 1


@pytest.mark.parametrize(
    ("hosts", "since", "groups"),
    [
        ([[0, 4], [0, 4]], [0, 0], [1, 0]),  # each row its last accepted host
        ([[4, 0], [PAD, 0]], [0, 0], [0, 1]),
        ([[0, 2], [1, PAD]], [1, -1], [1, None]),  # one token came after; a host that was not accepted
        ([[0, 0], [PAD, PAD]], [2, -1], [0, None]),
    ],
)
def test_probes_are_those_behind_the_last_accepted_host_and_say_how_old_they_are(hosts, since, groups):
    """Probes of another branch predict what follows another text."""
    M = 2
    tree = Tree(TOKENS, PARENTS, 2, probes=Probes(torch.zeros(M, 4), torch.tensor(hosts)))
    span = commit_one(tree, VERDICT, numbered(tree.rows))
    assert span.probed.since.tolist() == since
    assert span.probed.features.shape == (2, M, 1)
    for b, g in enumerate(groups):
        if g is None:
            continue
        first = 100 * b + tree.nodes + g * M
        assert span.probed.features[b, :, 0].tolist() == [first, first + 1]


def test_a_span_without_a_tree_has_no_picks():
    span = commit_one(
        chain(TOKENS), Verdict(torch.zeros(2, 1).long(), torch.ones(2).long(), torch.tensor([1, 1]))
    )
    object.__setattr__(span, "logits", None)
    with pytest.raises(ValueError, match="has no tree"):
        _ = span.picks
