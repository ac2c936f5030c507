"""The coupled and the multi-round law against exact enumeration; planted errors, most once published, are
caught."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from enumeration import (
    GREEDY,
    NUCLEUS,
    PENALISED,
    ROOT,
    WARM,
    depth_of,
    error,
    law_after,
    outcomes,
    q_after,
    sampled,
)
from slipstream.core import verify as module
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.tree import PAD, Tree
from slipstream.core.verify import acceptance, coupled, multi_round, residual, verify, without

TREES = {  # parents, V
    "one token": ([0, 0], 6),
    "chain of 2": ([0, 0, 1], 5),
    "chain of 3": ([0, 0, 1, 2], 4),
    "2 siblings": ([0, 0, 0], 6),
    "3 siblings": ([0, 0, 0, 0], 5),
    "more siblings than q can say": ([0, 0, 0, 0], 3),
    "backbone": ([0, 0, 0, 1, 1], 4),
    "3 and 2 siblings": ([0, 0, 0, 0, 1, 1], 4),
    "binary": ([0, 0, 0, 1, 1, 2, 2], 3),
    "second child grows": ([0, 0, 0, 2, 2], 4),
    "depth 3": ([0, 0, 0, 1, 1, 3, 3], 3),
    "depth 3, second child grows": ([0, 0, 0, 2, 2, 3], 3),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("s", [WARM, NUCLEUS], ids=["warm", "nucleus"])
def test_sampled_drafts_are_exact(tree, s):
    """EAGLE's Algorithm 1; on chains, Leviathan's rule."""
    parents, V = TREES[tree]
    assert error(sampled(parents, V), multi_round, V, depth_of(parents), s) < 1e-9


@pytest.mark.parametrize("s", [PENALISED, GREEDY], ids=["penalised", "greedy"])
def test_sampled_drafts_are_exact_under_penalties_and_when_greedy(s):
    """A target law that depends on the walk, and one that is a point mass."""
    assert error(sampled([0, 0, 0, 1, 1], 4), multi_round, 4, 2, s) < 1e-9


@st.composite
def fixed_trees(draw, V=4, D=3):
    """Trees that no draw decides: wrong, right, missing and repeated children in any order."""
    parents, depths = [0], [0]
    for _ in range(draw(st.integers(0, 7))):
        parents.append(draw(st.sampled_from([i for i, depth in enumerate(depths) if depth < D])))
        depths.append(depths[parents[-1]] + 1)
    tokens = [ROOT] + [draw(st.integers(PAD, V - 1)) for _ in parents[1:]]
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), max(depths) + draw(st.integers(0, 1)))


@pytest.mark.parametrize(
    "s", [WARM, NUCLEUS, PENALISED, GREEDY], ids=["warm", "nucleus", "penalised", "greedy"]
)
@pytest.mark.parametrize("law", [coupled, multi_round])
@settings(max_examples=20, deadline=None)
@given(tree=fixed_trees())
def test_any_fixed_tree_is_exact(law, s, tree):
    """Point-mass children: a duplicate accepted twice over, or a PAD walked into (its logits are NaN)."""
    assert error(lambda world: tree, law, 4, 3, s) < 1e-9


def test_leviathan_accepts_as_often_as_the_laws_overlap():
    """One sampled child: Σ min(p, q). A rule that is exact but accepts less is a slower one."""
    V = 6
    p, q = law_after((ROOT,), V, NUCLEUS), q_after((ROOT,), V)
    rate = sum(
        weight
        for emitted, weight in outcomes(sampled([0, 0], V), multi_round, V, NUCLEUS)
        if len(emitted) == 2
    )
    assert rate == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-12)


def test_shared_noise_accepts_no_more_than_the_laws_overlap():
    """One child drafted with the target's own noise: Σ_i 1 / Σ_j max(p_j/p_i, q_j/q_i), at most Σ min(p, q).

    A bound for every coupling of two draws, so that a chain of sampled tokens is accepted most.
    """
    V, N = 6, 2_000
    logits = torch.randn(2, 1, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, q = logits.softmax(-1)[:, 0]
    ratios = torch.maximum(p / p[:, None], q / q[:, None])
    rate = (1 / ratios.sum(1)).sum().item()
    assert rate < torch.minimum(p, q).sum().item()
    sampler = Sampler([Sampling(1.0, row=row) for row in range(N)], [()] * N, V)
    noise = sampler.noise(torch.full((N,), 3))
    agreed = (p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)
    assert agreed.double().mean().item() == pytest.approx(rate, abs=4 * (0.25 / N) ** 0.5)


def test_top_k_children_are_accepted_with_all_their_mass():
    """Both laws accept one of k fixed children with Σ p: nothing may be lost between siblings."""
    best = law_after((ROOT,), 6, WARM).topk(3)
    tree = Tree(torch.tensor([[ROOT, *best.indices.tolist()]]), torch.zeros(1, 4).long(), 1)
    for law in (coupled, multi_round):
        rate = sum(
            weight for emitted, weight in outcomes(lambda world: tree, law, 6, WARM) if len(emitted) == 2
        )
        assert rate == pytest.approx(best.values.sum().item(), abs=1e-12)


# --- planted errors
# -----------------------------------------------------------------------------------------------------


def caught(draft, law, V=4, D=2, s=WARM):
    return not error(draft, law, V, D, s) < 1e-3  # NaN is caught too


def test_catches_a_missing_residual(monkeypatch):
    """(a) After a rejection the target's law as it was: tokens that the drafter likes come too often."""
    monkeypatch.setattr(module, "residual", lambda p, q, x: p)
    assert caught(sampled([0, 0, 1], 4), multi_round)
    assert caught(sampled([0, 0, 0], 4), multi_round, D=1)


def test_catches_a_law_that_is_not_the_one_drawn_from():
    """(b) q before temperature or processors, say."""
    assert caught(sampled([0, 0, 1], 4, claimed=lambda path, V: q_after(path, V, near=0.4)), multi_round)


@pytest.mark.parametrize(
    "choice",
    [
        lambda kids: sorted(kids),
        lambda kids: [max(kids, key=lambda token: q_after((ROOT,), 4)[token])],
        lambda kids: [kids[0]] if kids[0] != 2 else [],
    ],
    ids=["sorted", "keeps the likelier", "drops one token"],
)
def test_catches_a_tree_whose_shape_depends_on_its_draws(choice):
    """(c) A budget spent on the tokens drawn is a proposal with another law than q."""
    draft = sampled([0, 0, 0], 4, choice=choice)
    assert caught(draft, multi_round, D=1)
    assert error(draft, coupled, 4, 1, WARM) < 1e-9  # the coupled law does not mind


def test_catches_a_bonus_drawn_without_temperature():
    """(d) A bug of the public code: the token after a draft accepted to its end came from the raw logits."""

    def law(tree, node, logits, position, sampler):
        if (tree.parent_slots()[:, 1:] == node).any():
            return multi_round(tree, node, logits, position, sampler)
        return torch.tensor([-1]), sampler.draw(logits, position)

    assert caught(sampled([0, 0, 1], 4), law)
    assert caught(sampled([0, 0, 1], 4), law, s=NUCLEUS)


def rejection(stale):
    """multi_round, written out for one row; `stale`: the last token from the residual before the last
    rejection."""

    def law(tree, node, logits, position, sampler):
        p, q = sampler.law(logits), tree.law[0, node]
        before = p
        for sibling, slot in enumerate((tree.parents[0, 1:] == node).nonzero()[:, 0] + 1):
            x = tree.tokens[:, slot]
            if sampler.accept(acceptance(p, q, x), position, sibling):
                sampler.accepted = False
                return slot[None], x
            before, p, q = p, residual(p, q, x), without(q, x)
        return torch.tensor([-1]), sampler.draw((before if stale else p).log(), position)

    return law


def test_catches_a_stale_residual():
    """(e) Another: after the last sibling's rejection the token was drawn from the residual before it."""
    draft = sampled([0, 0, 0, 1, 1], 4)
    assert caught(draft, rejection(stale=True))
    assert error(draft, rejection(stale=False), 4, 2, WARM) < 1e-9


class Refusal(Sampler):
    """Rejects everything, as an unlucky rounding of the ratio can."""

    def accept(self, ratio, positions, sibling):
        return torch.zeros(len(ratio), dtype=torch.bool)


@pytest.mark.parametrize("siblings", [1, 2])
def test_equal_laws_and_a_forced_rejection_stay_in_the_support(siblings, monkeypatch):
    """(f) p = q to the last bit leaves a residual without mass: 0/0, and argmax of NaN is token 0, however
    unlikely."""
    V, s = 6, Sampling(1.0, top_k=3)
    logits = torch.tensor([[[-9.0, 1.0, -3.0, 2.0, -4.0, 0.5]]], dtype=torch.float64).expand(
        1, 1 + siblings, V
    )
    q = Sampler([s], [[]], V).law(logits[:, 0])
    tokens, parents = torch.tensor([[0, 3, 1][: 1 + siblings]]), torch.zeros(1, 1 + siblings).long()
    tree = Tree(tokens, parents, 1, q.expand(1, 1 + siblings, V))

    def drawn():
        return {
            verify(tree, logits, torch.tensor([i]), Refusal([s], [[]], V), multi_round).next.item()
            for i in range(60)
        }

    x = tree.tokens[:, 1]
    assert torch.equal(residual(q, q, x), q)
    assert drawn() <= {1, 3, 5}
    monkeypatch.setattr(module, "_normalised", lambda p, otherwise: p / p.sum(-1, keepdim=True))
    assert residual(q, q, x).isnan().all()
    assert drawn() == {0}
