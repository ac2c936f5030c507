"""BiTA: what masks say in training and in drafting is one and the same."""

import io
import json

import pytest
import torch

import tiny
from slipstream.core.tree import PAD, Tree
from slipstream.drafters.bita import objective as bita
from slipstream.drafters.bita.model import Bita, likeliest_ends, static_hosts
from slipstream.drafters.bita.objective import BitaRecipe
from slipstream.drafters.objective import Batch
from slipstream.engine.generate import generate
from slipstream.training.data import Example

PROMPTS = tiny.prompts(9, 4, 14)


def objective(target, **head):
    """With weights so large that masks say different things."""
    text = PROMPTS[2]
    f = target.features([text], ("final",))[0]
    recipe = BitaRecipe(head=BitaRecipe.Head(**{"prompts": 2, "draft_vocab": 0, **head}))
    made = bita.BitaObjective.begin(recipe, target, [Example(text, [True] * len(text))], f)
    generator = torch.Generator().manual_seed(1)
    for p in made.head.double().parameters():
        p.data.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return made


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
@pytest.mark.parametrize(
    "head", [{}, {"deep": False}, {"prompts": 0}], ids=["deep", "shallow", "masks alone"]
)
def test_masks_say_in_drafting_what_they_say_in_training(family, head, monkeypatch):
    """Another position, a group that sees another, a prompt that is turned, a host that its masks do not
    see."""
    monkeypatch.setattr(bita, "DROPOUT", 0.0)
    target, trace = tiny.target(family), io.StringIO()
    trained = objective(target, **head)
    drafter = trained.drafter("[[0],[1],[0,0],[0,0,0]]", torch.float64)
    answer = generate(target, PROMPTS[0], drafter, max_new_tokens=16, temperature=0.0, trace=trace)
    text, at, checked = torch.tensor([PROMPTS[0] + answer.tokens]), len(PROMPTS[0]), 0
    for line in map(json.loads, trace.getvalue().splitlines()):
        context = target.new_cache(1)
        target(bita.chain(text), context)
        said = trained._masks(context, torch.tensor([[0, at - 1]]), torch.Generator())[
            0, 1
        ]  # behind another group
        best = (said @ target.lm_head().weight.T).topk(2).indices.tolist()
        assert line["tokens"][1:] == [*best[0], best[1][0], best[2][0]]
        at += len(line["accepted"])
        checked += 1
    assert checked > 4


def test_straightforward_decoding_goes_on_with_what_earlier_masks_said(monkeypatch):
    """Fig. 4: of c accepted tokens the first c masks are done with, the others have spoken of what comes
    next."""
    monkeypatch.setattr(bita, "DROPOUT", 0.0)
    target, trace = tiny.target("llama"), io.StringIO()
    trained, M = objective(target), 3
    drafter = Bita(trained.drafter("chain-3", torch.float64).head, target, None, "chain-3", hosts=1)
    drafted = dict[int, list[int]]()  # by how many tokens were accepted before
    for prompt in PROMPTS:
        context = target.new_cache(1)
        answer = generate(target, prompt, drafter, max_new_tokens=30, temperature=0.0, trace=trace)
        text, host, accepted = prompt + answer.tokens, len(prompt) - 1, 0
        target(bita.chain(torch.tensor([text])), context)
        for line in map(json.loads, trace.getvalue().splitlines()):
            said = (
                trained._masks(context, torch.tensor([[host]]), torch.Generator())[0, 0]
                @ target.lm_head().weight.T
            )
            expected = said.argmax(-1).tolist()[accepted:]
            guesses = [token for token in line["tokens"][1:] if token >= 0]
            assert guesses == expected
            drafted.setdefault(accepted, []).append(len(guesses))
            host, accepted = host + accepted + 1, len(line["accepted"]) - 1
        trace.seek(0), trace.truncate()
    assert all(set(lengths) == {M - c} for c, lengths in drafted.items())
    assert len(drafted) > 1


def test_the_loss_is_the_mean_over_groups_and_masks(monkeypatch):
    """Labels off by one, a question's tokens learnt, a mask past the end; a batch without any that is NaN."""
    monkeypatch.setattr(bita, "DROPOUT", 0.0)
    target, text = tiny.target("llama"), tiny.prompts(12)[0]
    made, learn = objective(target), [False] * 5 + [True] * 7
    batch = Batch.collate([Example(text, learn)], [torch.zeros(12, 0)], "cpu")
    loss, _ = made(batch, BitaRecipe.Loss(), torch.Generator())
    context = target.new_cache(1)
    target(bita.chain(torch.tensor([text])), context)
    expected = []
    for host in range(12):
        said = (
            made._masks(context, torch.tensor([[host]]), torch.Generator())[0, 0] @ target.lm_head().weight.T
        )
        for j, token in enumerate(range(host + 2, min(host + 5, 12))):
            if token >= 5 and host >= 4:  # the first host is the prompt's last token
                expected.append(-said[j].log_softmax(-1)[text[token]])
    assert float(loss.detach()) == pytest.approx(
        float(torch.stack(expected).mean().detach()) * int(batch.counts.sum()), rel=1e-4
    )
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.head.parameters())
    assert all(p.grad is None for p in target.model.parameters())
    nothing = Batch(batch.features, batch.tokens, batch.counts & False)
    assert float(made(nothing, BitaRecipe.Loss(), torch.Generator())[0].detach()) == 0


def test_groups_stand_where_drafting_has_hosts():
    """A question's tokens, the token before a prompt's last, the later turns of a conversation left out."""
    counts = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]]).bool()
    seen = [set(), set()]
    for seed in range(40):
        hosts, real = bita.groups(counts, 3, torch.Generator().manual_seed(seed))
        assert hosts.shape == (2, 3)
        for row, of, there in zip(seen, hosts.tolist(), real.tolist(), strict=True):
            row |= {h for h, is_real in zip(of, there, strict=True) if is_real}
    assert seen == [{3, 4, 9, 10, 11}, {10, 11}]


def test_hosts_are_those_likeliest_to_end_a_path():
    target = tiny.target("llama")
    drafter = tiny.bita(target, "backbone-3x2", hosts=3)
    assert static_hosts(drafter.tree_spec.paths, 3, target.device).tolist() == [
        [0, 1, 2]
    ]  # slots: 1 and 2 of depth one, 3 and 4 of two, 5 and 6 of three
    assert drafter.rows == 7 + 3 * 3
    assert tiny.bita(target, "backbone-2x2").rows == 5 + 5 * 2  # as many masks as the tree is deep


def test_hosts_of_a_dynamic_tree_are_the_nodes_where_the_path_most_probably_ends():
    """The first slots are the shallow nodes, through which a confident path only passes."""
    tokens = torch.tensor([[9, 1, 2, 3, PAD]])
    parents = torch.tensor([[0, 0, 0, 1, 3]])
    reached = torch.tensor([[1.0, 0.9, 0.06, 0.7, 0.6]])
    tree = Tree(tokens, parents, 3, scores=reached.log())
    # the path ends: at the root 0.04, behind 1 0.2, behind 2 0.06, behind 3 0.7, since its child is PAD
    assert likeliest_ends(tree, 2).tolist() == [[1, 3]]
    assert likeliest_ends(tree, 3).tolist() == [[1, 2, 3]]
