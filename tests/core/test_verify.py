"""Both laws of verification against exact enumeration.

Every random choice (the drafter's draws, acceptances, the target's draws) is replaced by a branch of a decision tree whose
leaves are all visited with their probabilities. What is emitted must then have the target's own law to 1e-9, without any
statistics. Planted errors, most of them once published, show that the enumeration sees what it should.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core import verify as module
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.tree import PAD, Tree, chain
from slipstream.core.verify import acceptance, coupled, multi_round, residual, verify, without

ROOT, PROMPT = 1, (2, 0)
WARM = Sampling(0.7)
NUCLEUS = Sampling(1.3, top_p=0.8)
PENALISED = Sampling(0.9, repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.3)
GREEDY = Sampling(0.0)


@cache
def logits_after(path, V, kind=1):
    """A language model: logits [V] after the root and what follows; `kind` 2 is another model, the drafter."""
    key = int("".join(map(str, (kind, *path))))
    return 1.5 * torch.randn(V, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


def law_after(path, V, s):
    """The target's law [V], written down from the definition."""
    x = logits_after(path, V).clone()
    for token in {*PROMPT, *path}:
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(path):
        x[token] -= s.presence_penalty + s.frequency_penalty * path.count(token)
    if s.temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), V).double()
    p = (x / s.temperature).softmax(-1)
    order = p.argsort(descending=True).tolist()
    for i in range(1, V):
        if sum(p[t].item() for t in order[:i]) >= s.top_p:
            p[order[i:]] = 0
            break
    return p / p.sum()


@cache
def product_law(V, D, s):
    """The target's law of the D + 1 tokens after the root, [V, …, V]."""
    whole = torch.ones([V] * (D + 1), dtype=torch.float64)
    for d in range(D + 1):
        for path in product(range(V), repeat=d):
            whole[path] *= law_after((ROOT, *path), V, s).view(-1, *[1] * (D - d))
    return whole


class World:
    """One leaf of the decision tree: replays a script, then takes the first open branch and files the others."""

    def __init__(self, script, queue):
        self.script, self.queue, self.at, self.weight = script, queue, 0, 1.0

    def choose(self, weights):
        """Index of the branch, with its probability on the world's weight; NaN counts as possible."""
        if self.at == len(self.script):
            first, *others = [i for i, weight in enumerate(weights) if weight != 0]
            self.queue += [[*self.script, i] for i in others]
            self.script.append(first)
        index = self.script[self.at]
        self.at += 1
        self.weight *= weights[index]
        return index


def worlds():
    """All worlds, as long as each is played to its end before the next is asked for."""
    queue = [[]]
    while queue:
        yield World(queue.pop(), queue)


class Enumerator(Sampler):
    """A sampler of one row whose draws are the world's. The draw that multi-round makes beside an accepted child must not
    be used: it is PAD.
    """

    def __init__(self, world, s, V):
        super().__init__([s], [PROMPT], V)
        self.world, self.accepted = world, False

    def draw(self, scores, positions):
        if self.accepted:
            self.accepted = False
            return torch.tensor([PAD])
        greedy = self.rows[0].temperature == 0
        p = torch.nn.functional.one_hot(scores.argmax(-1), self.vocab) if greedy else scores.softmax(-1)
        return torch.tensor([self.world.choose(p[0].tolist())])

    def accept(self, ratio, positions, sibling):
        r = ratio.clamp(max=1).item()
        self.accepted = self.world.choose([1 - r, r]) == 1
        return torch.tensor([self.accepted])


def paths_of(tree, b=0):
    """Tokens from the root to every node."""
    parents, tokens = tree.parent_slots().expand_as(tree.tokens)[b].tolist(), tree.tokens[b].tolist()
    paths = [(tokens[0],)]
    for i in range(1, len(tokens)):
        paths.append((*paths[parents[i]], tokens[i]))
    return paths


def logits_at(tree, V):
    """The target's logits at every node; NaN where no walk may come."""
    dead = torch.full((V,), torch.nan, dtype=torch.float64)
    return torch.stack([
        torch.stack([dead if PAD in path else logits_after(path, V) for path in paths_of(tree, b)])
        for b in range(len(tree.tokens))
    ])  # fmt: skip


def accepted(tree, verdict, b=0):
    return tree.tokens[b, verdict.path[b, 1 : verdict.count[b]]].tolist()


def outcomes(draft, law, V, s):
    """(emitted tokens, probability) of one round in every world; `draft(world)` makes the tree."""
    for world in worlds():
        tree = draft(world)
        verdict = verify(tree, logits_at(tree, V), torch.tensor([len(PROMPT)]), Enumerator(world, s, V), law)
        yield (*accepted(tree, verdict), verdict.next.item()), world.weight


def error(draft, law, V, D, s):
    """How far the law of one round, continued by the target itself to D + 1 tokens, is from the target's (or NaN)."""
    truth = product_law(V, D, s)
    found = torch.zeros_like(truth)
    for emitted, weight in outcomes(draft, law, V, s):
        assert min(emitted) >= 0
        rest = truth[emitted]
        found[emitted] += weight * (rest / rest.sum())
    return (found - truth).abs().max().item()


def q_after(path, V, near=0.7):
    """The drafter's law: near the target's, but unable to open with its least likely token."""
    x = near * logits_after(path, V) + (1 - near) * logits_after(path, V, kind=2)
    return x.masked_fill((x == x.min()) & (len(path) == 1), -torch.inf).softmax(-1)


def sampled(parents, V, q=q_after, claimed=None, choice=lambda kids: kids):
    """A drafter that hangs children drawn without replacement from q under the nodes that `parents` says. To plant errors:
    `claimed`, the law it says it drew from, and `choice`, what it makes of the children drawn.
    """

    def draft(world):
        tokens, law = [ROOT] + [PAD] * (len(parents) - 1), torch.zeros(len(parents), V, dtype=torch.float64)
        for node in range(len(parents)):
            slots = [i for i in range(1, len(parents)) if parents[i] == node]
            path = paths_of(Tree(torch.tensor([tokens]), torch.tensor([parents]), len(parents)))[node]
            if not slots or PAD in path:
                continue
            law[node] = (claimed or q)(path, V)
            rest, kids = q(path, V), []
            for _ in slots[: int((rest > 0).sum())]:  # a support too small leaves PAD
                kids.append(world.choose((rest / rest.sum()).tolist()))
                rest[kids[-1]] = 0
            for slot, token in zip(slots, choice(kids), strict=False):
                tokens[slot] = token
        return Tree(torch.tensor([tokens]), torch.tensor([parents]), depth_of(parents), law[None])

    return draft


def depth_of(parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


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


@pytest.mark.parametrize("s", [WARM, NUCLEUS, PENALISED, GREEDY], ids=["warm", "nucleus", "penalised", "greedy"])
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
    rate = sum(weight for emitted, weight in outcomes(sampled([0, 0], V), multi_round, V, NUCLEUS) if len(emitted) == 2)
    assert rate == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-12)


def test_top_k_children_are_accepted_with_all_their_mass():
    """Both laws accept one of k fixed children with Σ p: nothing may be lost between siblings."""
    best = law_after((ROOT,), 6, WARM).topk(3)
    tree = Tree(torch.tensor([[ROOT, *best.indices.tolist()]]), torch.zeros(1, 4).long(), 1)
    for law in (coupled, multi_round):
        rate = sum(weight for emitted, weight in outcomes(lambda world: tree, law, 6, WARM) if len(emitted) == 2)
        assert rate == pytest.approx(best.values.sum().item(), abs=1e-12)


# --- planted errors -----------------------------------------------------------------------------------------------------


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
    """multi_round, written out for one row; `stale`: the last token from the residual before the last rejection."""

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
    """(f) p = q to the last bit leaves a residual without mass: 0/0, and argmax of NaN is token 0, however unlikely."""
    V, s = 6, Sampling(1.0, top_k=3)
    logits = torch.tensor([[[-9.0, 1.0, -3.0, 2.0, -4.0, 0.5]]], dtype=torch.float64).expand(1, 1 + siblings, V)
    q = Sampler([s], [[]], V).law(logits[:, 0])
    tokens, parents = torch.tensor([[0, 3, 1][: 1 + siblings]]), torch.zeros(1, 1 + siblings).long()
    tree = Tree(tokens, parents, 1, q.expand(1, 1 + siblings, V))

    def drawn():
        return {verify(tree, logits, torch.tensor([i]), Refusal([s], [[]], V), multi_round).next.item() for i in range(60)}

    x = tree.tokens[:, 1]
    assert torch.equal(residual(q, q, x), q)
    assert drawn() <= {1, 3, 5}
    monkeypatch.setattr(module, "_normalised", lambda p, otherwise: p / p.sum(-1, keepdim=True))
    assert residual(q, q, x).isnan().all()
    assert drawn() == {0}


# --- batches and the real noise -----------------------------------------------------------------------------------------


@st.composite
def batches(draw, V=5, D=3):
    """Trees of B rows of the same width, on the right track often enough, and settings for each."""
    B, N = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    rows = [  # keywords: Sampling itself is type-checked, which draws from `random`
        {"temperature": T, "top_p": top_p, "frequency_penalty": 0.2, "seed": draw(st.integers(0, 99)), "row": b}
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
    """Same seed, same text: every token emitted is the one that plain decoding draws, whatever the tree and the batch."""
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
    """Rows accept different numbers of siblings and tokens: a row that has finished must neither move nor count."""
    tree, rows, lengths = batch
    logits, together = logits_at(tree, 5), sampler_of(rows)
    verdict = verify(tree, logits, lengths, together, law)
    for b, row in enumerate(rows):
        own, i = sampler_of([row]), slice(b, b + 1)
        alone = verify(Tree(tree.tokens[i], tree.parents[i], tree.depth, tree.law[i]), logits[i], lengths[i], own, law)
        assert torch.equal(verdict.path[i], alone.path)
        assert torch.equal(verdict.count[i], alone.count)
        assert torch.equal(verdict.next[i], alone.next)
        assert torch.equal(together.select([b]).scores(logits[i, 0]), own.scores(logits[i, 0]))  # histories too


def test_verdict_is_a_path_from_the_root_that_ends_in_its_last_slot():
    """Columns past the count repeat the last slot: features and probes are gathered with the whole path."""
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 0, 4, 0, 2]]), 5).double()
    tree = Tree(torch.tensor([[1, 2, 3, 4, 4]]), torch.tensor([[0, 0, 0, 1, 2]]), 4)
    verdict = verify(tree, logits, torch.tensor([0]), sampler_of([{}]))
    assert verdict.path.tolist() == [[0, 2, 4, 4, 4]]
    assert (verdict.count, verdict.next) == (3, 2)


def test_a_bare_root_is_plain_decoding():
    for law in (coupled, multi_round):
        assert error(lambda world: chain(torch.tensor([[ROOT]])), law, 5, 0, NUCLEUS) < 1e-9


def test_the_first_of_two_equal_children_is_taken():
    """Deterministic: traces of one seed must agree."""
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 0, 0]]), 5).double()
    tree = Tree(torch.tensor([[1, 3, 3]]), torch.zeros(1, 3).long(), 1)
    for law in (coupled, multi_round):
        assert verify(tree, logits, torch.tensor([0]), sampler_of([{}]), law).path.tolist() == [[0, 1]]


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_typical_acceptance_takes_the_first_child_that_is_likely_enough(sampling):
    """At T = 0 that is the target's own; otherwise its name says that it is lossy."""
    sampler, lengths = Sampler([sampling], [list(PROMPT)], 5), torch.tensor([2])
    for path in product(range(5), repeat=3):
        logits = torch.stack([logits_after((ROOT, *path, i), 5) for i in range(4)])[None]
        tree = Tree(torch.tensor([[ROOT, *path]]), torch.zeros(1, 4, dtype=torch.long), 1)
        p = sampler.law(logits[:, 0])[0]
        entropy = -sum(float(x) * float(x.log()) for x in p if x > 0)
        limit = min(0.09, 0.3 * math.exp(-entropy))
        likely = [slot for slot, token in enumerate(path, 1) if float(p[token]) > limit]
        verdict = verify(tree, logits, lengths, sampler, module.lossy_typical)
        assert verdict.path[0, : int(verdict.count)].tolist() == [0, *likely[:1]]
        if sampling is GREEDY:
            assert torch.equal(verdict.count, verify(tree, logits, lengths, sampler, coupled).count)
