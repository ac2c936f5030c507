"""Verification, every random choice of which is replaced by a branch of a decision tree.

All leaves are visited with their probabilities: the drafter's draws, acceptances, the target's draws. What is
emitted must then have the target's own law to 1e-9, without any statistics.
"""

from functools import cache
from itertools import product

import torch

from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.tree import PAD, Tree
from slipstream.core.verify import verify

ROOT, PROMPT = 1, (2, 0)
WARM = Sampling(0.7)
NUCLEUS = Sampling(1.3, top_p=0.8)
PENALISED = Sampling(0.9, repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.3)
GREEDY = Sampling(0.0)


@cache
def logits_after(path, V, kind=1):
    """A language model: logits [V] after the root and what follows; `kind` 2 is another model, the
    drafter."""
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
    """One leaf of the decision tree: replays a script, then takes the first open branch and files the
    others."""

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
    """A sampler of one row whose draws are the world's. The draw that multi-round makes beside an accepted
    child must not be used: it is PAD.
    """

    def __init__(self, world, s, V):
        super().__init__([s], [PROMPT], V)
        self.world, self.accepted = world, False

    def draw_alone(self, row, scores, position):
        if self.accepted:
            self.accepted = False
            return PAD
        greedy = self.rows[0].temperature == 0
        p = torch.nn.functional.one_hot(scores.argmax(-1), self.vocab) if greedy else scores.softmax(-1)
        return self.world.choose(p.tolist())

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
    """How far the law of one round, continued by the target itself to D + 1 tokens, is from the target's (or
    NaN)."""
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
    """A drafter that hangs children drawn without replacement from q under the nodes that `parents` says. To
    plant errors: `claimed`, the law it says it drew from, and `choice`, what it makes of the children drawn.
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
