"""Verification of batches with the real noise and what a verdict says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from enumeration import (
    NUCLEUS,
    PROMPT,
    ROOT,
    accepted,
    error,
    logits_after,
    logits_at,
    paths_of,
    q_after,
)
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.tree import PAD, Tree, chain
from slipstream.core.verify import coupled, multi_round, verify


@st.composite
def batches(draw, V=5, D=3):
    """Trees of B rows of the same width, on the right track often enough, and settings for each."""
    B, N = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    rows = [  # keywords: Sampling itself is type-checked, which draws from `random`
        {
            "temperature": T,
            "top_p": top_p,
            "frequency_penalty": 0.2,
            "seed": draw(st.integers(0, 99)),
            "row": b,
        }
        for b in range(B)
        for T, top_p in [draw(st.sampled_from([(0.0, 1.0), (0.8, 1.0), (1.2, 0.7)]))]
    ]
    parents, tokens = [], []
    for _ in range(B):
        depths, above = [0], [0]
        for _ in range(1, N):
            above.append(draw(st.sampled_from([i for i, depth in enumerate(depths) if depth < D])))
            depths.append(depths[above[-1]] + 1)
        parents.append(above)
        tokens.append([ROOT] + [draw(st.integers(PAD, V - 1)) for _ in above[1:]])
    tree = Tree(torch.tensor(tokens), torch.tensor(parents), D)
    law = [[q_after((ROOT,) if PAD in path else path, V) for path in paths_of(tree, b)] for b in range(B)]
    lengths = draw(st.lists(st.integers(0, 9), min_size=B, max_size=B))
    return replace(tree, law=torch.stack([torch.stack(row) for row in law])), rows, torch.tensor(lengths)


def sampler_of(rows, V=5):
    return Sampler([Sampling(**row) for row in rows], [PROMPT] * len(rows), V)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_coupled_picks_do_not_depend_on_the_tree(batch):
    """Same seed, same text: every token emitted is the one that plain decoding draws, whatever the tree and
    the batch."""
    tree, rows, lengths = batch
    verdict = verify(replace(tree, law=None), logits_at(tree, 5), lengths, sampler_of(rows))
    for b, row in enumerate(rows):
        sampler, path = sampler_of([row]), (ROOT,)
        emitted = [*accepted(tree, verdict, b), verdict.next[b].item()]
        for i, token in enumerate(emitted):
            sampler.observe(torch.tensor([path[-1]]), torch.ones(1, dtype=torch.bool))
            at = lengths[b : b + 1] + i + 1
            assert sampler.draw(sampler.scores(logits_after(path, 5)[None]), at) == token
            path = (*path, token)
        children = tree.tokens[b, 1:][tree.parents[b, 1:] == verdict.path[b, -1]]
        assert emitted[-1] not in children.tolist()  # it went as far as it could


@pytest.mark.parametrize("law", [coupled, multi_round])
@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_rows_of_a_batch_are_verified_as_if_alone(law, batch):
    """Rows accept different numbers of siblings and tokens: a row that has finished must neither move nor
    count."""
    tree, rows, lengths = batch
    logits, together = logits_at(tree, 5), sampler_of(rows)
    verdict = verify(tree, logits, lengths, together, law)
    for b, row in enumerate(rows):
        own, i = sampler_of([row]), slice(b, b + 1)
        alone = verify(
            Tree(tree.tokens[i], tree.parents[i], tree.depth, tree.law[i]), logits[i], lengths[i], own, law
        )
        width = alone.path.shape[1]  # as wide as the longest path of a batch
        assert torch.equal(verdict.path[i, :width], alone.path)
        assert torch.equal(verdict.count[i], alone.count)
        assert torch.equal(verdict.next[i], alone.next)
        assert torch.equal(
            together.select([b]).scores(logits[i, 0]), own.scores(logits[i, 0])
        )  # histories too


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.01}])
def test_verdict_is_a_path_from_the_root_that_ends_in_its_last_slot(settings):
    """Columns past the count repeat the last slot: features and probes are gathered with the whole path."""
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 0, 4, 0, 2], [0, 0, 0, 0, 0]]), 5).double()
    tree = Tree(torch.tensor([[1, 2, 3, 4, 4], [1, 2, 3, 4, 4]]), torch.tensor([[0, 0, 0, 1, 2]]), 4)
    verdict = verify(tree, logits, torch.tensor([0, 0]), sampler_of([settings] * 2))
    width = verdict.path.shape[1]
    assert width >= 3
    assert verdict.path.tolist() == [[0, 2, 4, 4, 4][:width], [0, 0, 0, 0, 0][:width]]
    assert (verdict.count.tolist(), verdict.next.tolist()) == ([3, 1], [2, 0])


def test_a_bare_root_is_plain_decoding():
    for law in (coupled, multi_round):
        assert error(lambda world: chain(torch.tensor([[ROOT]])), law, 5, 0, NUCLEUS) < 1e-9


def test_the_first_of_two_equal_children_is_taken():
    """Deterministic: traces of one seed must agree."""
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 0, 0]]), 5).double()
    tree = Tree(torch.tensor([[1, 3, 3]]), torch.zeros(1, 3).long(), 1)
    for law in (coupled, multi_round):
        assert verify(tree, logits, torch.tensor([0]), sampler_of([{}]), law).path.tolist() == [[0, 1]]
