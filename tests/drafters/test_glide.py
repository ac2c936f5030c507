"""GLIDE drafts what its formulas say, and sees of the target what it may see."""

import io
from inspect import signature

import pytest
import torch
from transformers import LlamaConfig

import tiny
from slipstream.core.span import Span
from slipstream.core.tree import chain
from slipstream.decode.generate import generate
from slipstream.drafters.glide import Glide, apart
from slipstream.drafters.heads import target_rope
from slipstream.drafters.layers import attend_cache, turns
from slipstream.train.methods import GlideObjective
from slipstream.train.recipe import Loss

PROMPTS = tiny.prompts(9, 4, 14)


def naive(drafter: Glide, target, text: list[int], path: list[int]) -> torch.Tensor:
    """Log q of the token after `text + path`: a decoder over all tokens but the first. No cache of its own."""
    head, tokens = drafter.head, torch.tensor([text[1:] + path])
    out = target(chain(torch.tensor([text[:-1]])), target.new_cache(1, len(text)), drafter.taps)
    n, m = tokens.shape[1], len(text) - 1  # what the target has read ends before the root
    at = torch.arange(n)
    causal = (at <= at[:, None])[None, None]
    seen = (torch.arange(m) <= at[:, None])[None, None]  # a token that was read again sees what came before it
    glimpses = [(*apart(part, head.config.target_head_dim), seen) for part in out.features.chunk(len(drafter.taps), -1)]
    embed = target.ends.embed if head.embed_tokens is None else head.embed_tokens
    attends = [lambda k, v: (k, v, causal)] * head.config.depth
    return drafter.logits(head(embed(tokens), at[None] + 1, attends, glimpses)[0, -1]).log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("tree", ["cape-3x9", "[[0],[1],[0,0],[1,0],[1,1],[1,0,0]]"])
@pytest.mark.parametrize("make", [{}, {"depth": 2}, {"own": True}])
def test_every_drafted_child_is_among_the_likeliest_of_its_path(family, tree, make):
    """A row that reads a cousin, a glimpse of what the target had not read, a query at another position."""
    target, trace = tiny.target(family), io.StringIO()
    drafter = tiny.glide(target, tree, **make)
    answer = generate(target, PROMPTS[0], drafter, max_new_tokens=12, temperature=0.0, trace=trace)
    checked = 0
    for text, path, kids in tiny.drafted(PROMPTS[0] + answer.tokens, len(PROMPTS[0]), trace):
        kids = [kid for kid in kids if kid >= 0]
        assert set(kids) == set(naive(drafter, target, text, path).topk(len(kids)).indices.tolist())
        checked += 1
    assert checked > 12


def test_rows_of_a_batch_draft_as_they_do_alone():
    """Ragged prefill, rows that end before others, slots of one row seen by another."""
    target = tiny.target("llama")
    drafter = tiny.glide(target, depth=2)
    together = generate(target, PROMPTS, drafter, max_new_tokens=16, temperature=0.0)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        alone = generate(target, prompt, drafter, max_new_tokens=16, temperature=0.0)
        assert [r.accepted for r in alone.rounds] == [r.accepted for r in answer.rounds]


def test_a_block_of_training_is_a_draft():
    """A mask that shows training what drafting will not have, or an offset that moves with anything but its generator."""
    target, T, block = tiny.target("llama"), 12, 4
    drafter = tiny.glide(target, "chain-4")
    objective, text = GlideObjective(drafter.head, target.ends, None), torch.tensor(tiny.prompts(T + 1))
    features = target.features(text.tolist(), drafter.taps)[:, :-1]
    firsts = set()
    for seed in range(6):
        [said] = objective.steps(text, features, Loss(block=block), torch.Generator().manual_seed(seed))
        first = int(torch.randint(block, (), generator=torch.Generator().manual_seed(seed)))
        firsts.add(first)
        for row in range(first, T - block, block):  # the root is token row + 1
            cache, count = target.new_cache(1, T + 1), torch.tensor([row + 1])
            cache.keep(None, count)
            state = drafter.start(1, T + 1, target.device)
            drafter.absorb(
                Span(text[:, : row + 1], text[:, 1 : row + 2], 0 * count, count, cache, features[:, : row + 1]), state
            )
            torch.testing.assert_close(state.hidden[0], said[0, row])
            for j in range(1, block):  # along the text itself
                own, positions = attend_cache(state.cache, 1, j - 1)
                hidden = drafter._forward(text[:, row + 1 + j, None], positions + 1, own, drafter._glimpses(state.seen))
                torch.testing.assert_close(hidden[0, 0], said[0, row + j])
    assert len(firsts) > 2


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *SCALED])
def test_queries_are_turned_as_the_targets_own(name):
    """Another base, width or scaling than the target's: glimpses of the wrong positions (the public code's fault)."""
    if name in SCALED:
        model = tiny.build(LlamaConfig(**tiny.GROUPED, rope_parameters={"rope_theta": 5e5, **SCALED[name]}))
    else:
        model = tiny.reference(name)
    theirs, config = getattr(model.get_decoder(), "rotary_emb", None), model.config
    at = torch.arange(100)[None]
    for block in range(config.num_hidden_layers):
        frequencies, factor = target_rope(config, block)
        assert (theirs is None) == (not frequencies)
        if theirs is None:
            continue
        kind = (config.layer_types[block],) if len(signature(theirs.forward).parameters) > 2 else ()
        wanted = theirs(torch.zeros(1), at, *kind)
        ours = turns(at, torch.tensor(frequencies), torch.float32)
        assert all(torch.allclose(factor * mine[:, 0], other, atol=1e-5) for mine, other in zip(ours, wanted, strict=True))
