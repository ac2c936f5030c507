"""Heads that begin as trained ones say what these say."""

import pytest
import torch

import tiny
from slipstream.drafters.eagle import EagleConfig, EagleHead
from slipstream.drafters.eagle.objective import EagleObjective
from slipstream.drafters.eagle3.objective import Eagle3Objective
from slipstream.drafters.fasteagle.objective import FastEagleObjective
from slipstream.drafters.heads import layer_sizes
from slipstream.drafters.objective import Objective
from slipstream.drafters.store import read_drafter, restored, save_drafter, stored
from slipstream.training.data import Example
from slipstream.training.recipe import load_recipe

OBJECTIVES = {"eagle": EagleObjective, "eagle3": Eagle3Objective, "fasteagle": FastEagleObjective}
MAKE = {"eagle": tiny.eagle, "eagle3": tiny.eagle3, "fasteagle": tiny.fasteagle}


def begin(method: str, start: str, **head) -> Objective:
    target, text = tiny.target("llama"), tiny.prompts(9)[0]
    recipe = load_recipe(None, method=method, head={"start": start, "tree": "chain-2", **head})
    taps = recipe.head.reads(2)
    features = target.features([text], taps if taps[-1] == "final" else (*taps, "final"))[0]
    return OBJECTIVES[method].begin(recipe, target, [Example(text, [True] * 9)], features)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("method", MAKE)
def test_before_the_first_step_the_head_is_the_one_that_it_began_as(method, storage, tmp_path):
    """Weights that were rounded to the target's precision, scales of the inputs that were folded twice,
    another draft vocabulary."""
    target = tiny.target("llama")
    drafter = MAKE[method](target, "chain-2", vocab=40)
    drafter.vocab = torch.arange(20, 60)
    save_drafter(tmp_path, method, target, *drafter.pack(), {}, dtype=storage)
    more = {"depth": 3, "taps": list(drafter.taps)} if method == "fasteagle" else {}
    objective = begin(method, str(tmp_path), draft_vocab=40, **more)
    assert not torch.equal(objective.gains, torch.ones_like(objective.gains))
    assert all(weight.requires_grad for weight in objective.head.parameters())
    made = stored(objective.drafter("chain-2", storage).pack()[1], storage)
    wanted = read_drafter(tmp_path, target)[1]
    assert made.keys() == stored(wanted, storage).keys()
    for name, tensor in restored(made).items():
        torch.testing.assert_close(tensor.float(), wanted[name].float(), rtol=1e-6, atol=0, msg=name)


def test_a_term_that_the_trained_head_has_not_adds_nothing_at_first(tmp_path):
    target = tiny.target("llama")
    drafter = tiny.fasteagle(target, "chain-2", vocab=40)
    save_drafter(tmp_path / "none", "fasteagle", target, *drafter.pack(), {}, dtype=torch.bfloat16)
    more = {"depth": 3, "taps": list(drafter.taps), "draft_vocab": 40}
    objective = begin("fasteagle", f"{tmp_path}/none", rank=6, **more)
    made = objective.drafter("chain-2", torch.bfloat16)
    assert made.head.above is not None
    plain, wanted = made.pack()[1], read_drafter(tmp_path / "none", target)[1]
    assert all(torch.equal(plain[name].to(tensor.dtype), tensor) for name, tensor in wanted.items())
    tokens, hidden, scores = torch.tensor([[3, 9]]), tiny.noise(1, 1, 32), tiny.noise(1, 1, 40)
    assert torch.equal(made.behind(tokens, hidden, scores), scores.expand(1, 2, -1))
    torch.nn.init.normal_(objective.head.above.lm_head.weight)
    made = objective.drafter("chain-2", torch.bfloat16)
    save_drafter(tmp_path / "six", "fasteagle", target, *made.pack(), {}, dtype=torch.bfloat16)
    again = begin("fasteagle", f"{tmp_path}/six", rank=6, **more).drafter("chain-2", torch.bfloat16)
    torch.testing.assert_close(again.behind(tokens, hidden, scores), made.behind(tokens, hidden, scores))
    with pytest.raises(ValueError, match=r"of the same head\.rank"):
        begin("fasteagle", f"{tmp_path}/six", rank=5, **more)


def test_what_does_not_fit_is_one_line(tmp_path):
    target = tiny.target("llama")
    wide = EagleHead(EagleConfig(**layer_sizes(target, 24)))
    for name, drafter in (
        ("eagle", tiny.eagle(target)),
        ("wide", tiny.Eagle(tiny.scrambled(wide), target)),
        ("narrow", tiny.eagle(target, vocab=40)),
        ("medusa", tiny.medusa(target)),
        ("part", tiny.distilled(target)),
    ):
        save_drafter(tmp_path / name, drafter.method, target, *drafter.pack(), {}, dtype=None)
    assert begin("eagle", f"{tmp_path}/wide", intermediate_size=24)
    for method, start, message in (
        ("eagle", "wide", "other sizes than this recipe: intermediate_size 24, not 48$"),
        ("eagle", "narrow", "a draft vocabulary of 40 tokens, which is kept, .* asks for 8192: set .*=40$"),
        ("eagle", "medusa", "is of the method medusa: name a head of the same method"),
        ("eagle3", "eagle", "is of the method eagle: name a head of the same method"),
        ("eagle", "part", "is a draft-model drafter, which has no head"),
        ("eagle", "nothing", "Unknown drafter"),
        ("fasteagle", "medusa", "begins as an eagle"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            begin(method, f"{tmp_path}/{start}")
        assert "\n" not in str(refused.value)
