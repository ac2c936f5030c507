"""FastEagle drafts what its formulas say, and all of it in one pass."""

import io
import math

import pytest
import torch

import tiny
from slipstream.core.sampling import Sampler, Sampling, rows_of
from slipstream.core.span import Span
from slipstream.core.tree import Tree, chain
from slipstream.drafters.fasteagle.model import FastEagle
from slipstream.engine.generate import generate

PROMPTS = tiny.prompts(9, 4, 14)


def naive(drafter: FastEagle, target, text: list[int], path: list[int] | None = None) -> torch.Tensor:
    """Log q [N, Vd] of the N tokens after `text`, behind those of `path` where laws know them. No cache."""
    head, H, n = drafter.head, drafter.head.config.hidden_size, len(text) - 1
    out = target(chain(torch.tensor([text])), target.new_cache(1), drafter.taps)
    g = sum(
        f @ w.T for f, w in zip(out.features[:, :-1].split(H, -1), head.fuse.weight.split(H, 1), strict=True)
    )
    x = torch.cat([g, target.embed(torch.tensor([text[1:]]))], -1) @ head.fc.weight.T
    mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    laws = []
    for layer in head.layers:
        x = layer(x, layer.self_attn.rope(torch.arange(n)[None], x.dtype), lambda k, v: (k, v, mask))
        law = (x[0, -1] @ target.lm_head().weight.T)[drafter.vocab]
        if head.above is not None and 0 < len(laws) <= len(path or ()):
            read = torch.cat([x[0, -1], target.embed(torch.tensor(path[len(laws) - 1]))])
            gate, up, out = (layer.weight for layer in head.above.children())
            law = law + out @ (torch.nn.functional.silu(gate @ read) * (up @ read))
        laws.append(law.log_softmax(-1))
    return torch.stack(laws)


def proposed(drafter: FastEagle, target, text: list[int], sampling: Sampling, rows: int = 1) -> Tree:
    """The tree behind `text`, whose last token is the root."""
    tokens = torch.tensor(text).expand(rows, -1)
    cache, count = target.new_cache(rows), torch.full((rows,), len(text) - 1)
    out = target(chain(tokens[:, :-1]), cache, drafter.taps)
    cache.keep(None, count)
    state = drafter.start(rows, target.device)
    drafter.update(Span(tokens[:, :-1], tokens[:, 1:], 0 * count, count, cache, out.features), state)
    return drafter.propose(state, Sampler(rows_of(sampling, rows), [text[:-1]] * rows, target.vocab))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_tree_of_depth_d_runs_the_first_d_layers(depth):
    """All layers ran for a chain of one."""
    target, ran = tiny.target("llama"), []
    drafter = tiny.fasteagle(target, f"chain-{depth}")
    for i, layer in enumerate(drafter.head.layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    generate(target, PROMPTS[0], drafter, max_new_tokens=6, temperature=0.0)
    assert set(ran) == set(range(depth))


@pytest.mark.parametrize("tree", ["backbone-3x4", "chain-2", "fig3", "best-first-3x10"])
@pytest.mark.parametrize(("vocab", "rank"), [(None, 0), (40, 0), (40, 6)])
def test_every_drafted_child_is_among_the_likeliest_of_its_depth(tree, vocab, rank):
    """Layers that share a cache, a position off by one, a law of another depth or behind another token, rows
    that were rejected and stayed."""
    target, trace = tiny.target("llama"), io.StringIO()
    tree = "[[0],[1],[0,0],[1,0],[1,1]]" if tree == "fig3" else tree
    drafter = tiny.fasteagle(target, tree, vocab=vocab, rank=rank)
    answer = generate(target, PROMPTS[0], drafter, max_new_tokens=12, temperature=0.0, trace=trace)
    checked = 0
    for text, path, kids in tiny.drafted(PROMPTS[0] + answer.tokens, len(PROMPTS[0]), trace):
        best = drafter.vocab[naive(drafter, target, text, path)[len(path)].topk(len(kids)).indices].tolist()
        assert sorted(kids) == sorted(best)
        checked += 1
    assert checked > 10


def test_rows_of_a_batch_draft_as_they_do_alone():
    """Ragged prefill, rows that end before others, slots of one row seen by another."""
    target = tiny.target("llama")
    drafter = tiny.fasteagle(target)
    together = generate(target, PROMPTS, drafter, max_new_tokens=16, temperature=0.0)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        alone = generate(target, prompt, drafter, max_new_tokens=16, temperature=0.0)
        assert [r.accepted for r in alone.rounds] == [r.accepted for r in answer.rounds]


def test_sampled_children_follow_the_law_of_their_depth():
    """Draws that do not follow the q they are judged by, or that are shared between depths."""
    target, rows, text = tiny.target("llama"), 4000, [*PROMPTS[0], 3]
    drafter = tiny.fasteagle(target, "[[0],[1],[0,0],[1,0]]", "sampled", vocab=8)
    tree = proposed(drafter, target, text, Sampling(temperature=1.5), rows)
    q = (naive(drafter, target, text) / 1.5).softmax(-1)
    torch.testing.assert_close(tree.law[0, :3, :8], q[[0, 1, 1]])
    drawn = tree.tokens[:, [1, 3]]
    assert torch.equal(tree.tokens[:, 3], tree.tokens[:, 4])  # one draw serves all nodes of a depth
    joint = torch.zeros(8, 8).index_put_(drawn.unbind(1), torch.ones(rows), accumulate=True)
    for x in range(8):
        for y in range(8):
            p = float(q[0, x] * q[1, y])
            assert abs(float(joint[x, y]) - rows * p) < 5 * math.sqrt(rows * p * (1 - p)) + 2


def test_the_most_probable_nodes_are_those_of_their_own_laws():
    """A tree that ranks nodes by a law which does not know what stands above them."""
    target, text = tiny.target("llama"), [*PROMPTS[0], 3]
    drafter = tiny.fasteagle(target, "best-first-2x9", vocab=12, rank=6)
    tree = proposed(drafter, target, text, Sampling(temperature=0.0))
    first = naive(drafter, target, text)[0]
    paths = {(x,): float(first[x]) for x in range(12)}
    for x in range(12):
        second = naive(drafter, target, text, [x])[1]
        paths |= {(x, y): float(first[x] + second[y]) for y in range(12)}
    best = sorted(paths, key=lambda path: -paths[path])[:8]
    tokens, parents = tree.tokens[0].tolist(), tree.parent_slots()[0].tolist()
    grown = [(tokens[i],) if parents[i] == 0 else (tokens[parents[i]], tokens[i]) for i in range(1, 9)]
    assert sorted(grown) == sorted(best)
    plain = naive(tiny.fasteagle(target, vocab=12), target, text)[1].topk(3).indices.tolist()
    assert any(naive(drafter, target, text, [x])[1].topk(3).indices.tolist() != plain for x in range(12))


@pytest.mark.parametrize("vocab", [8])
def test_sampled_children_follow_the_law_behind_their_parent(vocab):
    """A q that is another node's, by which a draw is judged."""
    target, rows, text = tiny.target("llama"), 4000, [*PROMPTS[0], 3]
    drafter = tiny.fasteagle(target, "[[0],[1],[0,0],[1,0]]", "sampled", vocab=vocab, rank=6)
    tree = proposed(drafter, target, text, Sampling(temperature=1.5), rows)
    laws = [(naive(drafter, target, text, [x]) / 1.5).softmax(-1) for x in range(vocab)]
    q = torch.stack([law[1] for law in laws])
    torch.testing.assert_close(tree.law[0, 0, :vocab], laws[0][0])
    for above in (1, 2):
        torch.testing.assert_close(tree.law[:, above, :vocab], q[tree.tokens[:, above]])
    joint = torch.zeros(vocab, vocab)
    joint.index_put_(tree.tokens[:, [1, 3]].unbind(1), torch.ones(rows), accumulate=True)
    for x in range(vocab):
        for y in range(vocab):
            p = float(laws[0][0, x] * q[x, y])
            assert abs(float(joint[x, y]) - rows * p) < 5 * math.sqrt(rows * p * (1 - p)) + 2


def test_a_tree_deeper_than_the_cascade_is_refused():
    with pytest.raises(ValueError, match="4 deep and this drafter drafts 3"):
        tiny.fasteagle(tiny.target("llama"), "chain-4")
