"""Objectives train the very computation that drafting runs. Heads that begin as trained ones say what these
say."""

from copy import deepcopy

import pytest
import torch

import tiny
from slipstream.core.span import Span
from slipstream.core.tree import chain
from slipstream.drafters.draft_model.objective import DraftModelObjective
from slipstream.drafters.eagle.model import INPUTS, EagleConfig, EagleHead
from slipstream.drafters.eagle.objective import EagleObjective, EagleRecipe, Unrolled
from slipstream.drafters.eagle3.objective import Eagle3Objective, Eagle3Recipe
from slipstream.drafters.fasteagle.objective import FastEagleObjective, FastEagleRecipe
from slipstream.drafters.heads import layer_sizes
from slipstream.drafters.layers import attend_cache
from slipstream.drafters.objective import ROWS, Batch, LossOfLaw, Objective, check_size, coverage, frequent
from slipstream.drafters.store import read_drafter, restored, save_drafter, stored
from slipstream.targets import HFTarget
from slipstream.training.data import Example
from slipstream.training.recipe import load_recipe

OBJECTIVES = {"eagle": EagleObjective, "eagle3": Eagle3Objective, "fasteagle": FastEagleObjective}
MAKE = {"eagle": tiny.eagle, "eagle3": tiny.eagle3, "fasteagle": tiny.fasteagle}


@pytest.fixture
def drafter():
    return tiny.eagle(tiny.target("llama"), "chain-4")


@pytest.mark.parametrize("inputs", INPUTS)
def test_unrolled_steps_are_the_steps_of_a_draft(inputs):
    """A mask that shows training what drafting will not have: losses that promise what decoding does not
    keep."""
    target, T, depth = tiny.target("llama"), 12, 4
    drafter = tiny.eagle(target, "chain-4", inputs=inputs)
    text = torch.tensor(tiny.prompts(T + 1))
    features = target.features(text.tolist(), ("final",))
    objective, settings = EagleObjective(drafter.head, target, None), EagleRecipe.Loss(unroll=depth)
    steps = list(objective.steps(text, features[:, :-1], settings, torch.Generator()))
    for root in range(1, T - depth):  # draft along the text from every root, with the drafter's own cache
        cache = target.new_cache(1)
        cache.keep(None, torch.tensor([root]))
        state = drafter.start(1, target.device)
        count = torch.tensor([root])
        span = Span(text[:, :root], text[:, 1 : root + 1], 0 * count, count, cache, features[:, :root])
        drafter.update(span, state)
        hidden = state.hidden[:, None]
        assert torch.allclose(hidden[0, 0], steps[0][0, root - 1])
        for j in range(1, depth):
            [attend], _ = attend_cache(state.cache, 1, j - 1)
            at = torch.tensor([[root + j - 1]])
            read = target.embed(text[:, root + j - (inputs == "unshifted")][:, None])
            hidden = drafter.head(read, hidden, at, attend)
            assert torch.allclose(hidden[0, 0], steps[j][0, root + j - 1]), (root, j)


def test_layers_of_a_cascade_are_the_steps_of_a_draft():
    """A layer that learns another token than the one it drafts, or reads what drafting will not have."""
    target, T = tiny.target("llama"), 9
    drafter = tiny.fasteagle(target)
    objective = FastEagleObjective(drafter.head, target, None)
    text = torch.tensor(tiny.prompts(T + 1))
    features = target.features(text.tolist(), drafter.taps)[:, :-1]
    steps = list(objective.steps(text, features, FastEagleRecipe.Loss(), torch.Generator()))
    assert len(steps) == 3
    for root in range(1, T + 1):
        cache, count = target.new_cache(1), torch.tensor([root])
        cache.keep(None, count)
        state = drafter.start(1, target.device)
        drafter.update(
            Span(text[:, :root], text[:, 1 : root + 1], 0 * count, count, cache, features[:, :root]), state
        )
        for j, step in enumerate(steps):
            if root - 1 + j < T:
                torch.testing.assert_close(step[0, root - 1 + j], state.hidden[0, j])


def test_a_law_is_trained_behind_the_token_that_it_is_drafted_behind():
    """A term of the token above that learns from another token, or from a scaled one."""
    target, T = tiny.target("llama"), 6
    drafter = tiny.fasteagle(target, vocab=40, rank=6)
    objective = FastEagleObjective(drafter.head, target, drafter.vocab)
    objective.lm_head.double()
    text = torch.tensor(tiny.prompts(T + 2))
    features = target.features(text.tolist(), drafter.taps)[:, :-2]
    steps = list(objective.steps(text[:, :-1], features, FastEagleRecipe.Loss(), torch.Generator()))
    count, cache = torch.tensor([3]), target.new_cache(1)
    cache.keep(None, count)
    state = drafter.start(1, target.device)
    drafter.update(Span(text[:, :3], text[:, 1:4], 0 * count, count, cache, features[:, :3]), state)
    scores = drafter.scores(state.hidden)
    for j, step in enumerate(steps):
        here, row = slice(j, j + 1), 2 + j  # the root, t_3, is row 2's next token
        own = scores[:, here]
        if j:
            own = drafter.behind(text[:, row + 1 : row + 2], state.hidden[:, here], own)
        learnt = objective.student(step[:, row], j, text[:, row + 1])
        torch.testing.assert_close(learnt, own[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", [0.8, 1 / 0.9])
def test_the_loss_of_a_cascade_is_the_papers(decay):
    """FastEagle §2.3, eq. 3 to 6, but for the means over the width: depth j of row i against the state j
    tokens on."""
    target = tiny.target("llama")
    head = tiny.fasteagle(target).head.float()
    example = Example(tiny.prompts(9)[0], [False] * 4 + [True] * 5)
    features = target.features([example.tokens], head.config.taps).float()
    objective = FastEagleObjective(head, target, None)
    batch, settings = (
        Batch.collate([example], [features[0]], "cpu"),
        FastEagleRecipe.Loss(decay=decay),
    )
    loss, agreed = objective(batch, settings, torch.Generator())
    mask, V = torch.ones(7, 7, dtype=torch.bool).tril()[None, None], target.lm_head().weight.float()
    embedded = target.embed(torch.tensor([example.tokens[1:-1]])).float()
    said = head(embedded, features[:, :7], torch.arange(7)[None], [lambda k, v: (k, v, mask)] * 3)[0]
    f, expected = features[0, :, -32:], 0.0
    for i in range(7):
        for j in range(3):
            if (
                i + j < 7 and example.loss[i + j + 2]
            ):  # layer j of row i says f_{i+j+1}, which predicts t_{i+j+2}
                p, q = ((x @ V.T).log_softmax(-1) for x in (f[i + j + 1], said[i, j]))
                feature = torch.nn.functional.smooth_l1_loss(said[i, j], f[i + j + 1])
                expected += decay**j * (feature - 0.1 * (p.exp() * q).sum())
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert 0 <= int(agreed) <= 5


def test_eagle3s_loss_is_the_cross_entropy_of_its_own_steps():
    """Training-time test: step j reads what step j − 1 said, over the draft vocabulary, weighted by 0.8^j."""
    target = tiny.target("llama")
    drafter = tiny.eagle3(target, "chain-2", vocab=40)
    head, vocab = drafter.head.float(), torch.arange(40)
    example = Example(tiny.prompts(9)[0], [False] * 4 + [True] * 5)
    objective = Eagle3Objective(head, target, vocab)
    features = target.features([example.tokens], (*drafter.taps, "final")).float()
    batch = Batch.collate([example], [features[0]], "cpu")
    loss, _ = objective(batch, Eagle3Recipe.Loss(unroll=2), torch.Generator())
    unrolled, hidden = Unrolled(7, features.device), head.fuse(features[:, :7, :-32])
    embedded, expected = target.embed(torch.tensor([example.tokens[1:-1]])).float(), 0.0
    for j in range(2):
        said = head(embedded, hidden, unrolled.positions, unrolled.step)
        for i in range(j, 7):
            if example.loss[i + 2]:
                p = (features[0, i + 1, -32:] @ target.lm_head().weight.float()[:40].T).log_softmax(-1)
                q = head.lm_head(head.norm(said[0, i])).log_softmax(-1)
                expected -= 0.8**j * (p.exp() * q).sum()
        hidden = torch.cat([hidden[:, :1], said[:, :-1]], 1)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("acceptance", [0.0, 0.5])
def test_the_loss_is_the_papers(drafter, acceptance):
    """EAGLE §3.2 written out: SmoothL1 of the next feature, and cross-entropy of the law that it gives; and
    the chance that the law's sample is accepted."""
    target = tiny.target("llama")
    example = Example(tiny.prompts(9)[0], [False] * 4 + [True] * 5)
    features = target.features([example.tokens], ("final",))
    batch = Batch.collate([example], [features[0]], "cpu")
    objective = EagleObjective(drafter.head.float(), target, None)
    loss, _ = objective(batch, EagleRecipe.Loss(noise=0.0, acceptance=acceptance), torch.Generator())
    f, expected = features[0].float(), 0.0
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    embedded = target.embed(torch.tensor([example.tokens[1:-1]])).float()
    said = drafter.head(embedded, f[None, :7], torch.arange(7)[None], lambda k, v: (k, v, mask))[0]
    for i in range(7):
        if example.loss[i + 2]:  # row i says f_{i+1}, which predicts t_{i+2}
            d = (said[i] - f[i + 1]).abs()
            expected += torch.where(d < 1, 0.5 * d * d, d - 0.5).mean()
            p, q = ((x @ target.lm_head().weight.float().T).softmax(-1) for x in (f[i + 1], said[i]))
            expected -= 0.1 * (p * q.log()).sum() + acceptance * torch.minimum(p, q).sum().log()
    assert torch.allclose(loss, expected, rtol=1e-4)
    assert int(batch.counts.sum()) == 5


@pytest.mark.parametrize("acceptance", [0.0, 0.5])
def test_the_gradient_of_a_law_is_that_of_its_loss(acceptance):
    """It is made with the loss, some rows at a time, the last of them fewer."""
    drawn = torch.Generator().manual_seed(0)
    logits, p = (torch.randn(ROWS + 3, 6, dtype=torch.float64, generator=drawn) for _ in range(2))
    given = (p.softmax(-1), 0.7, acceptance)
    assert torch.autograd.gradcheck(lambda z: LossOfLaw.apply(z, *given), logits.requires_grad_())


def test_padding_and_other_rows_change_nothing(drafter):
    target = tiny.target("llama")
    examples = [Example(p, [True] * len(p)) for p in tiny.prompts(9, 5)]
    features = [target.features([e.tokens], ("final",))[0] for e in examples]
    objective = EagleObjective(drafter.head.double(), target, None)
    settings = EagleRecipe.Loss(noise=0.0, unroll=3)

    def loss(which: list[int]) -> float:
        batch = Batch.collate([examples[i] for i in which], [features[i] for i in which], "cpu")
        objective.head.float()
        return float(objective(batch, settings, torch.Generator())[0].detach())

    assert loss([0, 1]) == pytest.approx(loss([0]) + loss([1]), rel=1e-4)


def test_before_training_the_head_repeats_the_feature():
    """Identity start: f̂_{i+1} = f_i."""
    target = tiny.target("llama")
    text = torch.tensor(tiny.prompts(6))
    f = target.features(text.tolist(), ("final",)).float()
    objective = EagleObjective.begin(load_recipe(None), target, [Example(text[0].tolist(), [True] * 6)], f[0])
    unrolled = Unrolled(6, f.device)
    said = objective.head(target.embed(text).float(), f, unrolled.positions, unrolled.step)
    assert torch.allclose(said, f, atol=1e-5)


def test_a_cascade_may_begin_as_an_eagle_head(drafter, tmp_path):
    """The first layer says what the head says, though it is trained on scaled inputs."""
    target, text = tiny.target("llama"), torch.tensor(tiny.prompts(6))
    save_drafter(tmp_path, "eagle", target, *drafter.pack(), {}, dtype=None)
    taps, examples = ["input of block 0", "final"], [Example(text[0].tolist(), [True] * 6)]
    recipe = load_recipe(None, method="fasteagle", head={"start": str(tmp_path), "depth": 2, "taps": taps})
    f = target.features(text.tolist(), taps)
    made = FastEagleObjective.begin(recipe, target, examples, f[0]).drafter("chain-2", torch.float64)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    attend, at, embedded = lambda k, v: (k, v, mask), torch.arange(6)[None], target.embed(text)
    said = made.head(embedded, f, at, [attend, attend])[:, :, 0]
    torch.testing.assert_close(said, drafter.head(embedded, f[..., 32:], at, attend), rtol=1e-4, atol=1e-4)
    save_drafter(tmp_path / "cascade", "fasteagle", target, *made.pack(), {}, dtype=None)
    further = recipe.head.model_copy(update={"start": str(tmp_path / "cascade"), "depth": 3})
    deeper = FastEagleObjective.begin(recipe.model_copy(update={"head": further}), target, examples, f[0])
    both = [
        x.head(embedded, f, at, [attend] * n)
        for x, n in ((made, 2), (deeper.drafter("chain-3", torch.float64), 3))
    ]
    torch.testing.assert_close(both[1][:, :, :2], both[0], rtol=1e-4, atol=1e-4)
    for wrong in ({"taps": ["input of block 0"]}, {"intermediate_size": 8}):
        changed = recipe.model_copy(update={"head": recipe.head.model_copy(update=wrong)})
        with pytest.raises(ValueError, match="begins as an eagle"):
            FastEagleObjective.begin(changed, target, examples, f[0])
    about, tensors = drafter.pack()
    about["head"]["rope_scaling"] = {
        "rope_type": "linear",
        "factor": 2.0,
    }  # an imported one; a new layer's rope is plain
    save_drafter(tmp_path, "eagle", target, about, tensors, {}, dtype=None)
    with pytest.raises(ValueError, match="begins as an eagle"):
        FastEagleObjective.begin(recipe, target, examples, f[0])


def test_a_head_larger_than_its_target_is_refused():
    """Memory asked for until the system ends the process, because of one zero too many."""
    head, ends = FastEagleRecipe.Head(depth=16), tiny.target("llama")
    check_size(head, layer_sizes(ends, 2**10), ends)
    with pytest.raises(ValueError, match=r"head\.intermediate_size=131072 ask for 0\.2 billion numbers"):
        check_size(head, layer_sizes(ends, 2**17), ends)


def test_the_draft_vocabulary_is_what_is_said_most():
    examples = [Example([1, 7, 7, 7, 5, 5, 9], [False, True, True, True, True, True, True])]
    vocab = frequent(examples, 2, 64)
    assert vocab.tolist() == [5, 7]
    assert coverage(examples, vocab) == pytest.approx(5 / 6)
    assert frequent(examples, 5, 64).tolist() == [
        0,
        1,
        5,
        7,
        9,
    ]  # filled up: the shape does not depend on the data
    assert frequent(examples, 0, 64) is None


@pytest.mark.parametrize("make", [tiny.eagle3, tiny.fasteagle])
def test_the_scales_of_taps_are_folded_into_the_drafter(make):
    target, text = tiny.target("llama"), torch.tensor(tiny.prompts(6))
    drafter = make(target, "chain-3")
    gains = torch.tensor([7.0, 0.5, 3.0, 2.0])[: 1 + len(drafter.taps)]
    f = target.features(text.tolist(), drafter.taps).float()[:, :-1]
    kind, settings = {
        tiny.eagle3: (Eagle3Objective, Eagle3Recipe.Loss(unroll=2)),
        tiny.fasteagle: (FastEagleObjective, FastEagleRecipe.Loss()),
    }[make]
    objective = kind(drafter.head.float(), target, None, gains)
    made = kind(objective.drafter("chain-3", torch.float64).head.float(), target, None)
    scaled = f * gains[1:].repeat_interleave(32)
    said, again = (
        list(o.steps(text, x, settings, torch.Generator())) for o, x in ((objective, scaled), (made, f))
    )
    torch.testing.assert_close(said, again, rtol=1e-3, atol=1e-3)


def test_embeddings_that_are_normed_are_read_as_they_are():
    """Scaled ones, which a norm's eps tells from them."""
    target, text = tiny.target("llama"), torch.tensor(tiny.prompts(6))
    head = tiny.eagle3(target).head.float()
    objective = Eagle3Objective(head, target, None, torch.tensor([7.0, 0.5, 3.0]))
    torch.testing.assert_close(objective.embed(text), target.embed(text).float())


@pytest.mark.parametrize("inputs", INPUTS)
def test_the_scale_of_embeddings_is_folded_into_the_drafter(inputs):
    """A head that is trained on scaled embeddings and drafts with plain ones."""
    target, text = tiny.target("llama"), torch.tensor(tiny.prompts(6))
    drafter = tiny.eagle(target, inputs=inputs)
    f, embedded = target.features(text.tolist(), ("final",)).float(), target.embed(text).float()
    objective = EagleObjective(drafter.head.float(), target, None, torch.tensor([7.0, 1.0]))
    made = objective.drafter("chain-3", torch.float64).head.float()
    said = [
        head(x, f, u.positions, u.step)
        for head, x, u in (
            (objective.head, 7 * embedded, Unrolled(6, f.device)),
            (made, embedded, Unrolled(6, f.device)),
        )
    ]
    assert torch.allclose(said[0], said[1], atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_part_is_trained_on_what_it_drafts_with(family):
    """Training passes and drafting passes of another mask or position; gradients that reach the target or
    miss a weight."""
    target, text = tiny.target(family), torch.tensor(tiny.prompts(11))
    example = Example(text[0].tolist(), [True] * 11)
    f = target.features(text.tolist(), ["final"])
    recipe = load_recipe(None, method="draft-model", head={"blocks": [1], "draft_vocab": 40})
    objective = DraftModelObjective.begin(recipe, target, [example], f[0])
    batch = Batch.collate([example], [f[0]], "cpu")
    loss, _ = objective(batch, recipe.loss, torch.Generator())
    drafter = objective.drafter("chain-2", torch.float64)
    assert {weight.dtype for weight in objective.drafter("chain-2", torch.int8).part.parameters()} == {
        target.dtype
    }
    own = drafter.model.features(text.tolist(), ["final"])
    q, p = (target.lm_head(drafter.vocab)(states[0, 1:-1]) for states in (own, f))
    q, p = q.log_softmax(-1), p.softmax(-1)
    torch.testing.assert_close(loss.double(), -(p * q).sum(), rtol=1e-4, atol=1e-4)
    loss.backward()
    assert all(weight.grad is not None for weight in objective.head.parameters())
    assert all(weight.grad is None for weight in target.model.parameters())


def test_hard_labels_are_the_texts_own_tokens():
    """The target's law by mistake, or a token that the draft vocabulary lacks counted as another."""
    target, text = tiny.target("llama"), tiny.prompts(11)[0]
    f = target.features([text], ["final"])
    vocab = torch.tensor(sorted({*text[2:6], 1, 2}))
    objective = EagleObjective(tiny.eagle(target, "chain-2").head.float(), target, vocab)
    batch = Batch.collate([Example(text, [True] * 11)], [f[0]], "cpu")
    settings = EagleRecipe.Loss(feature=0.0, token=1.0, noise=0.0, hard=True)
    loss, _ = objective(batch, settings, torch.Generator())
    said = next(objective.steps(batch.tokens[:, :-1], f[:, :-2].float(), settings, torch.Generator()))[0]
    log_q = objective.student(said, 0, batch.tokens[0, 1:-1]).log_softmax(-1)
    ids, expected = vocab.tolist(), 0.0
    for i, token in enumerate(text[2:]):
        expected -= float(log_q[i, ids.index(token)]) if token in ids else 0.0
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_is_taught_and_drafted_with_is_the_targets_law(family):
    """An LM head's bias, scale or soft cap that is left out: Gemma 2 caps its logits at 30."""
    target, text = tiny.target(family), torch.tensor(tiny.prompts(9))
    out = target(chain(text), target.new_cache(1), ("final",))
    drafter = tiny.eagle(target)
    assert torch.allclose(drafter.logits(out.features), out.logits, atol=1e-9)
    law = EagleObjective(drafter.head, target, None)._law(out.features[0], text[0], False)
    assert torch.allclose(law.double(), out.logits[0].softmax(-1), atol=1e-6)


def test_the_labels_of_a_bf16_target_are_its_laws_in_float32():
    """A packed copy of other rows, or of another precision, that the LM head lends as its own."""
    target = HFTarget(deepcopy(tiny.reference("llama")).bfloat16(), tiny.tokenizer(), "llama")
    vocab = torch.arange(20, 60)
    lm_head, states = (
        EagleObjective(tiny.eagle(target).head, target, vocab).lm_head,
        tiny.noise(3, 32).float(),
    )
    wanted = states @ target.lm_head().weight[vocab].float().T
    with torch.no_grad():
        torch.testing.assert_close(lm_head(states), wanted)


def begin_as(method: str, start: str, **head) -> Objective:
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
    objective = begin_as(method, str(tmp_path), draft_vocab=40, **more)
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
    objective = begin_as("fasteagle", f"{tmp_path}/none", rank=6, **more)
    made = objective.drafter("chain-2", torch.bfloat16)
    assert made.head.above is not None
    plain, wanted = made.pack()[1], read_drafter(tmp_path / "none", target)[1]
    assert all(torch.equal(plain[name].to(tensor.dtype), tensor) for name, tensor in wanted.items())
    tokens, hidden, scores = torch.tensor([[3, 9]]), tiny.noise(1, 1, 32), tiny.noise(1, 1, 40)
    assert torch.equal(made.behind(tokens, hidden, scores), scores.expand(1, 2, -1))
    torch.nn.init.normal_(objective.head.above.lm_head.weight)
    made = objective.drafter("chain-2", torch.bfloat16)
    save_drafter(tmp_path / "six", "fasteagle", target, *made.pack(), {}, dtype=torch.bfloat16)
    again = begin_as("fasteagle", f"{tmp_path}/six", rank=6, **more).drafter("chain-2", torch.bfloat16)
    torch.testing.assert_close(again.behind(tokens, hidden, scores), made.behind(tokens, hidden, scores))
    with pytest.raises(ValueError, match=r"of the same head\.rank"):
        begin_as("fasteagle", f"{tmp_path}/six", rank=5, **more)


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
    assert begin_as("eagle", f"{tmp_path}/wide", intermediate_size=24)
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
            begin_as(method, f"{tmp_path}/{start}")
        assert "\n" not in str(refused.value)
