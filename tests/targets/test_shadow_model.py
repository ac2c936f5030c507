"""The user's model is bit for bit what it was, whatever a target does with its weights."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, PreTrainedModel

import tiny
from slipstream import generate
from slipstream.measure.runner import hf_generate
from slipstream.targets import HFTarget

PROMPT = tiny.prompts(9)[0]
TEXT = torch.tensor([PROMPT])


def model_of(family: str) -> PreTrainedModel:
    """A model as a user has it: in training mode, its weights gathering gradients."""
    return deepcopy(tiny.reference(family)).requires_grad_().train()


def behaviour(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a model says, answers and learns; a training step is made, so it must be told of one model
    once."""
    model.eval()
    seen = {
        "logits": model(TEXT).logits.detach(),
        "generate": model.generate(TEXT, max_new_tokens=8, do_sample=False),
    }
    model.train()
    torch.manual_seed(0)  # of dropout
    model(TEXT, labels=TEXT).loss.backward()
    seen |= {
        f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.eval()
    return seen | {"logits after a step": model(TEXT).logits.detach()}


def assert_untouched(model: PreTrainedModel, family: str) -> None:
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad and p.grad is None and not hasattr(p, "packed") for p in model.parameters())
    assert model.config._attn_implementation == tiny.reference(family).config._attn_implementation
    assert not any("forward" in vars(m) for m in model.modules())
    mine, theirs = behaviour(deepcopy(model)), behaviour(model_of(family))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_target_leaves_the_users_model_as_it_was(family):
    """A model that is no longer causal, in eval mode, frozen or compiled while a target is made of it, and
    afterwards."""
    model = model_of(family)
    with HFTarget(model, tiny.tokenizer(), compile=tiny.COMPILED) as target:
        assert_untouched(model, family)
        generate(target, PROMPT, "ngram", max_new_tokens=4)
        hf_generate(target, TEXT, max_new_tokens=4, do_sample=False)
        assert_untouched(model, family)
    assert_untouched(model, family)


def test_compiled_layers_are_not_the_users():
    """A model that cannot be copied, saved or made a second target of, because its layers were compiled for
    the first."""
    model = model_of("llama")
    targets = [HFTarget(model, compile=True), HFTarget(model, compile=True)]
    assert {type(x.forward).__name__ for target in targets for x in target.blocks} == {"CompiledForward"}
    assert_untouched(model, "llama")


def test_training_mode_does_not_reach_the_target():
    """Texts decoded with dropout, because the user trains the model meanwhile."""
    config = deepcopy(tiny.FAMILIES["llama"])
    config.attention_dropout = 0.5
    model = tiny.build(config)
    target = HFTarget(model)
    before = generate(target, PROMPT, max_new_tokens=16).tokens
    model.train()
    assert generate(target, PROMPT, max_new_tokens=16).tokens == before
    assert hf_generate(target, TEXT, max_new_tokens=16, do_sample=False)[0, len(PROMPT) :].tolist() == before


def test_a_target_follows_weights_that_are_trained_in_place():
    """A target that answers as the model did before it was fine-tuned."""
    model = model_of("llama")
    target = HFTarget(model)
    behaviour(model)
    want = model.generate(TEXT, max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    assert generate(target, PROMPT, max_new_tokens=8).tokens == want


def test_a_released_target_holds_nothing_and_says_so():
    """Weights that stay in memory after their target was given up, or an AttributeError in place of the
    reason."""
    target = HFTarget(deepcopy(tiny.reference("llama")), name="mine")
    generate(target, PROMPT, max_new_tokens=2)
    held = weakref.ref(target.shadow_model)
    target.release()
    gc.collect()
    assert held() is None
    with pytest.raises(ValueError, match="target mine was released: make another one"):
        generate(target, PROMPT)


def test_a_target_shows_what_it_is():
    """An address in place of a name, sizes and precision."""
    target = HFTarget(deepcopy(tiny.reference("llama")), name="mine")
    assert repr(target) == "HFTarget(mine: llama, 2 blocks, 0.0 M weights, float64 on cpu)"


@pytest.mark.parametrize("given", ["smollm2", None, torch.nn.Linear(2, 2)], ids=type)
def test_what_is_no_model_is_refused(given, unchecked):
    """An AttributeError of an inner line."""
    with pytest.raises(ValueError, match="a target is made of a Hugging Face model, not of a"):
        HFTarget(given)


def test_an_encoder_is_refused():
    """A model that reads ahead: what it says of a token changes with what follows, so that no text of it is
    its own."""
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = BertConfig(**sizes, intermediate_size=48)
    fresh = AutoModelForCausalLM.from_config(encoder)  # whose attention hardly matters
    for model in (tiny.build(encoder), fresh.double(), deepcopy(fresh).bfloat16()):
        with pytest.raises(ValueError, match="Unsupported target: bert: its attention is not causal"):
            HFTarget(model)
    encoder.is_decoder = True
    HFTarget(tiny.build(encoder))
