"""One tree of guesses and matches."""

from dataclasses import replace

import pytest
import torch

import tiny
from slipstream.core.tree import PAD, Tree, chain
from slipstream.decode.generate import generate
from slipstream.drafters import load_drafter
from slipstream.drafters.hybrid import Hybrid, joined
from slipstream.drafters.ngram import NGram
from slipstream.drafters.store import save_drafter, save_tuned


def paths(tree: Tree, row: int) -> set[tuple[int, ...]]:
    """Every path of real tokens below the root."""
    tokens, parents = (
        tree.tokens[row].tolist(),
        tree.parent_slots().expand(len(tree.tokens), -1)[row].tolist(),
    )

    def path(slot: int) -> tuple[int, ...]:
        return (*path(parents[slot]), tokens[slot]) if slot else ()

    return {path(slot) for slot in range(1, len(tokens)) if PAD not in path(slot)}


def test_a_match_takes_the_place_of_the_least_probable_nodes():
    """A match that lands under the wrong parent, hides a guess, or costs a row that had none."""
    tokens = torch.tensor([[9, 1, 2, 3, 4, 5, 6, 7]]).expand(4, -1)
    parents = torch.tensor([[0, 0, 0, 1, 1, 3, 3, 5]]).expand(4, -1)
    tree = Tree(tokens, parents, 4, scores=-torch.arange(8.0).expand(4, -1))
    match = torch.tensor([[8, 8, 8], [1, 3, 8], [PAD, PAD, PAD], [1, 8, PAD]])
    made = joined(tree, match)
    assert (made.nodes, made.depth) == (8, 4)
    assert paths(made, 0) == {(1,), (2,), (1, 3), (1, 4), (8,), (8, 8), (8, 8, 8)}
    assert paths(made, 1) == {(1,), (2,), (1, 3), (1, 4), (1, 3, 5), (1, 3, 6), (1, 3, 8)}
    assert paths(made, 2) == paths(tree, 2)
    assert paths(made, 3) == {(1,), (2,), (1, 3), (1, 4), (1, 3, 5), (1, 8), (1, 3, 5, 7)}
    assert all(int(p) < slot for row in made.parents for slot, p in enumerate(row) if slot)


def test_nodes_that_matter_stay_wherever_they_stand():
    """The last slots of a static tree are the deepest nodes, not the least probable ones."""
    tokens, parents = torch.tensor([[9, 1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 0, 0, 1, 4]])
    scores = torch.tensor([[0.0, -0.1, -5.0, -6.0, -0.2, -0.3]])
    made = joined(Tree(tokens, parents, 3, scores=scores), torch.tensor([[7, 8]]))
    assert paths(made, 0) == {(1,), (1, 4), (1, 4, 5), (7,), (7, 8)}
    assert all(int(p) < slot for slot, p in enumerate(made.parent_slots()[0]) if slot)


def test_a_chain_may_be_joined_and_a_bare_root_changes_nothing():
    tree = replace(chain(torch.tensor([[9, 1, 2, 3, 4]])), scores=-torch.arange(5.0)[None])
    assert joined(tree, torch.zeros(1, 0, dtype=torch.long)) is tree
    assert paths(joined(tree, torch.tensor([[7, 8]])), 0) == {(1,), (1, 2), (7,), (7, 8)}


def test_what_cannot_be_joined_is_refused():
    target = tiny.target("llama")
    with pytest.raises(ValueError, match="drawn from no law"):
        Hybrid(tiny.eagle(target, "fig9", "sampled"), NGram(3))
    with pytest.raises(ValueError, match="no room for a match of 7"):
        Hybrid(tiny.eagle(target, "best-first-3x8"), NGram(7))
    with pytest.raises(ValueError, match="'lookahead' grows no tree"):
        load_drafter("hybrid:head=lookahead", target)


def test_the_default_tree_follows_the_head(tmp_path):
    """`hybrid:head=fasteagle`, as the help offers it: a tree deeper than the head says tokens was refused,
    and one larger than what `tune` chose for the head was slow."""
    target = tiny.target("llama")

    def made(spec: str, temperature: float = 0.0) -> tuple[str, str, int]:
        drafter = load_drafter(spec, target, temperature)
        return drafter.head.shape.name, drafter.head.proposal, drafter.ngram.depth

    config, tensors = tiny.fasteagle(target, "best-first-2x10").pack()
    save_drafter(tmp_path, "fasteagle", target, config, tensors, {}, dtype=None)
    head = f"hybrid:head={tmp_path}"
    assert made(head) == ("best-first-2x10", "top-k", 5)
    assert made(f"{head}:proposal=noise,depth=3") == ("best-first-2x10", "noise", 3)
    assert made(f"{head}:tree=chain-3") == ("best-first-3x8", "top-k", 4)
    assert made(f"{head},tree=chain-3") == ("chain-3", "top-k", 2)
    assert made("hybrid:head=self-speculative:skip=0") == ("best-first-4x8", "top-k", 4)
    save_tuned(tmp_path, target.place, {1.0: {"tree": "dynamic-2x8x12", "proposal": "noise"}})
    assert made(head, 0.7) == ("dynamic-2x8x12", "noise", 6)
    assert made(head) == ("best-first-2x10", "top-k", 5)


@pytest.mark.parametrize("head", ["eagle", "fasteagle", "glide", "draft_model", "bita"])
def test_matches_deeper_than_the_head_fit_up_to_the_end(head, unchecked):
    """A cache that is sized for the head's own depth, when all of a long match is accepted in the last
    round."""
    target = tiny.target("llama")
    drafter = Hybrid(getattr(tiny, head)(target, "best-first-1x11"), NGram(8, shortest=1))
    for prompt in tiny.prompts(12, 9):
        for new in range(8, 40):
            generate(target, prompt * 2, drafter, max_new_tokens=new, temperature=0.0)
