"""What passes cost, and the distinct experts that they read, against Hugging Face's own router."""

import torch

import tiny
from slipstream.measure.cost import ROWS, experts_read, pass_seconds


def test_as_many_as_the_models_own_router_says():
    target, model = tiny.target("mixtral"), tiny.reference("mixtral")
    texts = tiny.prompts(40, 44, 3)  # the last one is too short for four rows
    found = experts_read(target, texts, (1, 2, 4, 8))
    assert found[1] == model.config.num_experts_per_tok
    assert found[1] <= found[2] <= found[4] <= found[8] <= model.config.num_local_experts
    counts = []
    for text in texts[:2]:
        tokens = torch.tensor([text[:36]])  # 32 before the four rows
        with torch.inference_mode():
            logits = model(tokens, output_router_logits=True).router_logits
        counts += [len(layer[-4:].topk(2).indices.unique()) for layer in logits]
    assert found[4] == round(sum(counts) / len(counts), 3)


def test_other_targets_have_none():
    assert experts_read(tiny.target("llama"), tiny.prompts(40), (1, 4)) == {}


def test_a_pass_costs_what_the_target_takes_and_leaves_the_cache_alone(target):
    seconds = pass_seconds(target, context=16, repeats=1)
    assert list(seconds) == list(ROWS)
    assert all(value > 0 for value in seconds.values())
    assert (
        target.read_bytes == sum(p.nbytes for p in target.model.parameters()) - target.lm_head().weight.nbytes
    )
