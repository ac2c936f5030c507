"""Medusa against its formulas."""

import io

import pytest
import torch
import torch.nn.functional as F

import tiny
from slipstream.drafters.medusa.objective import MedusaObjective, MedusaRecipe
from slipstream.drafters.objective import Batch
from slipstream.engine.generate import generate
from slipstream.training.data import Example


def laws(drafter, state):
    """Head k on one state, written out."""
    said = []
    for layers, lm_head in zip(drafter.head.blocks, drafter.head.lm_heads, strict=True):
        x = state
        for layer in layers:
            x = x + F.silu(x @ layer.weight.T + layer.bias)
        said.append(x @ lm_head.weight.T)
    return torch.stack(said)


def test_every_drafted_child_is_among_the_likeliest_of_its_depth():
    """A head that reads another token's state, or another head's LM head."""
    target, trace = tiny.target("llama"), io.StringIO()
    drafter, prompt = tiny.medusa(target, "[[0],[1],[0,0],[0,1],[0,0,0],[0,0,1]]"), tiny.prompts(9)[0]
    answer = generate(target, prompt, drafter, max_new_tokens=20, temperature=0.0, trace=trace)
    checked = 0
    for text, path, kids in tiny.drafted(prompt + answer.tokens, len(prompt), trace):
        state = target.features([text[:-1]], ("final",))[0, -1]  # the root has not been read yet
        law = laws(drafter, state)[len(path)]
        assert set(kids) == set(law.topk(len(kids)).indices.tolist())
        checked += 1
    assert checked > 12


def test_the_loss_is_each_heads_own_token_further_on():
    """Labels of another depth; 0.8^k in the wrong order."""
    target, text = tiny.target("llama"), tiny.prompts(9)[0]
    f = target.features([text], ["final"])
    drafter = tiny.medusa(target)
    objective = MedusaObjective(drafter.head, target, None)
    batch = Batch.collate([Example(text, [False] * 4 + [True] * 5)], [f[0]], "cpu")
    drafter.head.float()
    loss, _ = objective(batch, MedusaRecipe.Loss(), torch.Generator())
    expected = 0.0
    for k in range(3):
        for token in range(max(4, 2 + k), 9):
            law = laws(drafter, f[0, token - 2 - k].float())[k].log_softmax(-1)
            expected -= 0.8**k * float(law[text[token]])
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_before_training_every_head_says_what_the_target_says():
    target = tiny.target("llama")
    head = tiny.medusa(target).head.start(target.lm_head().weight)
    f = target.features([tiny.prompts(5)[0]], ["final"])
    said = head.logits(head(f))
    torch.testing.assert_close(said, (f @ target.lm_head().weight.T)[:, :, None].expand_as(said))
