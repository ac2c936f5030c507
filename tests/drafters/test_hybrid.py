"""One tree of guesses and matches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import tiny
from slipstream.core.tree import PAD, Probes, Tree, chain
from slipstream.drafters import load_drafter
from slipstream.drafters.hybrid import Hybrid, merged
from slipstream.drafters.store import save_drafter, save_tuned
from slipstream.drafters.suffix import Suffix
from slipstream.engine.generate import generate


def paths(tree: Tree, row: int) -> set[tuple[int, ...]]:
    """Every path of real tokens below the root."""
    tokens, parents = (
        tree.tokens[row].tolist(),
        tree.parent_slots().expand(len(tree.tokens), -1)[row].tolist(),
    )

    def path(slot: int) -> tuple[int, ...]:
        return (*path(parents[slot]), tokens[slot]) if slot else ()

    return {path(slot) for slot in range(1, len(tokens)) if PAD not in path(slot)}


def scored(tokens, parents, depth, probabilities) -> Tree:
    """One row."""
    scores = torch.tensor([probabilities]).log()
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), depth, scores=scores)


HEAD = scored([9, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 3], 3, [1, 0.6, 0.3, 0.5, 0.1, 0.2])


@pytest.fixture(params=[True, False])
def looks(request, monkeypatch):
    """Whether lists of the host merge one text's trees, or tensors."""
    tiny.replace_is_host(monkeypatch, lambda x: request.param)


@pytest.mark.usefixtures("looks")
def test_the_most_probable_nodes_of_both_are_kept():
    """A node under the wrong parent, a path in two nodes, a sure match behind a guess that the head doubts,
    or a row more than the head's."""
    matches = scored([9, 2, 7, 1, 8], [0, 0, 1, 0, 3], 2, [1, 0.9, 0.8, 0.05, 0.04])
    made = merged(HEAD, matches)
    assert (made.nodes, made.depth) == (6, 3)
    assert paths(made, 0) == {(1,), (2,), (1, 3), (2, 7), (1, 3, 5)}
    assert sorted(made.scores[0].exp().tolist()) == pytest.approx([0.2, 0.5, 0.6, 0.8, 0.9, 1])
    assert all(int(p) < slot for slot, p in enumerate(made.parents[0]) if slot)
    assert paths(merged(HEAD, scored([9, 1, 3, 5], [0, 0, 1, 2], 3, [1, 1, 1, 1])), 0) == paths(HEAD, 0)


@pytest.mark.usefixtures("looks")
def test_without_matches_the_tree_is_the_heads():
    """Rows without any beside rows that have some; a chain; a tree with nodes that stand for nothing."""
    none = replace(chain(torch.tensor([[9]])), scores=torch.zeros(1, 1))
    assert paths(merged(HEAD, none), 0) == paths(HEAD, 0)
    padded = scored([9, PAD, 6, PAD], [0, 0, 1, 0], 2, [1, 0, 0, 0])
    assert paths(merged(HEAD, padded), 0) == paths(HEAD, 0)
    tree = replace(chain(torch.tensor([[9, 1, 2]])), scores=torch.tensor([[0.0, -1.0, -2.0]]))
    assert paths(merged(tree, scored([9, 1, 5], [0, 0, 1], 2, [1, 0.9, 0.8])), 0) == {(1,), (1, 5)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lists_and_tensors_merge_alike(data):
    """Nodes of equal scores, of both trees, without a token, or behind a node that is not kept."""

    def tree(depth: int) -> Tree:
        tokens, parents, scores, seen = [7], [0], [0.0], set()
        for _ in range(data.draw(st.integers(0, 9))):
            parent = data.draw(st.sampled_from([i for i, token in enumerate(tokens) if token != PAD]))
            token = data.draw(st.integers(PAD, 2))
            if (parent, token) not in seen and token >= 0:
                seen.add((parent, token))
                worth = scores[parent] - data.draw(st.sampled_from([0.25, 0.5, 1.5]))
                tokens, parents, scores = [*tokens, token], [*parents, parent], [*scores, worth]
            elif token == PAD:
                tokens, parents, scores = [*tokens, PAD], [*parents, 0], [*scores, -torch.inf]
        return Tree(torch.tensor([tokens]), torch.tensor([parents]), depth, scores=torch.tensor([scores]))

    one, other = tree(9), tree(9)
    with pytest.MonkeyPatch.context() as patch:
        tiny.replace_is_host(patch, lambda x: False)
        want = merged(one, other)
    made = merged(one, other)
    for name in ("tokens", "parents", "scores"):
        assert torch.equal(getattr(made, name), getattr(want, name))


def test_masks_follow_their_hosts():
    """Masks behind a node that made room for a match, or behind the node that took its slot."""
    tree = replace(HEAD, probes=Probes(torch.zeros(2, 3), torch.tensor([[0, 4, 3, PAD]])))
    made = merged(tree, scored([9, 7], [0, 0], 1, [1, 0.9]))
    hosts = made.probes.hosts[0].tolist()
    assert [made.tokens[0, host] if host >= 0 else PAD for host in hosts] == [9, PAD, 3, PAD]


def test_what_cannot_be_joined_is_refused():
    target = tiny.target("llama")
    with pytest.raises(ValueError, match="drawn from no law"):
        Hybrid(tiny.eagle(target, "fig9", "sampled"), Suffix(3))
    with pytest.raises(ValueError, match="'lookahead' grows no tree"):
        load_drafter("hybrid:head=lookahead", target)


def test_the_default_tree_follows_the_head(tmp_path):
    """`hybrid:head=fasteagle`, as the help offers it: a tree deeper than the head says tokens was refused,
    and one larger than what `tune` chose for the head was slow."""
    target = tiny.target("llama")

    def made(spec: str, temperature: float = 0.0) -> tuple[str, str, int]:
        drafter = load_drafter(spec, target, temperature)
        return drafter.head.tree_spec.name, drafter.head.proposal, drafter.matches.rows

    config, tensors = tiny.fasteagle(target, "best-first-2x10").pack()
    save_drafter(tmp_path, "fasteagle", target, config, tensors, {}, dtype=None)
    head = f"hybrid:head={tmp_path}"
    assert made(head) == ("best-first-2x10", "top-k", 10)
    assert made(f"{head}:proposal=noise,depth=3") == ("best-first-2x10", "noise", 10)
    assert made(f"{head}:tree=chain-3") == ("chain-3", "top-k", 4)
    assert made(f"{head},tree=chain-3") == ("chain-3", "top-k", 4)
    assert made("hybrid:head=self-speculative:skip=0") == ("best-first-4x8", "top-k", 8)
    save_tuned(tmp_path, target.place, {1.0: {"tree": "dynamic-2x8x12", "proposal": "noise"}})
    assert made(head, 0.7) == ("dynamic-2x8x12", "noise", 12)
    assert made(head) == ("best-first-2x10", "top-k", 10)


@pytest.mark.parametrize("head", ["eagle", "fasteagle", "glide", "draft_model", "bita"])
def test_matches_deeper_than_the_head_fit_up_to_the_end(head, unchecked):
    """A cache that is sized for the head's own depth, when all of a long match is accepted in the last
    round."""
    target = tiny.target("llama")
    drafter = Hybrid(getattr(tiny, head)(target, "best-first-1x11"), Suffix(11, 8))
    for prompt in tiny.prompts(12, 9):
        for new in range(8, 40):
            generate(target, prompt * 2, drafter, max_new_tokens=new, temperature=0.0)
