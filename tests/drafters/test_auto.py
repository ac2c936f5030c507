"""Auto: the head reads later what it missed, and says the same."""

import random
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch

import tiny
from slipstream.core.tree_spec import PLAIN
from slipstream.drafters import auto as auto_module, load_drafter
from slipstream.drafters.auto import Auto
from slipstream.drafters.store import save_drafter
from slipstream.drafters.suffix import TextState
from slipstream.engine.engine import Engine
from slipstream.engine.generate import generate
from slipstream.engine.request import Request

PROMPTS = tiny.prompts(9, 14, 5)


@pytest.mark.parametrize("head", [tiny.eagle, tiny.fasteagle, tiny.glide, tiny.medusa])
@pytest.mark.parametrize("plain", [1, 3, 16, 35])
@pytest.mark.parametrize("behind", [8192, 2**25])
def test_a_head_that_sat_out_rounds_proposes_the_same(head, plain, behind, monkeypatch):
    """Texts of a batch advance unevenly before, so that what was missed is ragged."""
    monkeypatch.setattr(auto_module, "BEHIND", behind)
    target = tiny.target("llama")
    made = []
    for lags in (True, False):
        auto = Auto(head(target))
        tree = auto.candidate_trees[-1]
        engine = Engine(target, auto, rows=3, capacity=200, specs=auto.candidate_trees)
        engine.admit(*map(Request, PROMPTS))
        for spec in (tree, tree, *[PLAIN] * plain):
            engine.step(spec=spec)
            if not lags:
                auto.catch_up(engine.state)
        assert lags or not engine.state.missed
        with torch.inference_mode():
            made.append(auto.propose(engine.state, engine.sampler, tree))
    late, soon = made
    assert torch.equal(late.tokens, soon.tokens)
    assert torch.equal(late.parent_slots(), soon.parent_slots())


@pytest.mark.parametrize("head", [tiny.eagle, tiny.fasteagle, tiny.medusa])
@pytest.mark.parametrize("plain", [0, 5, 40])
@pytest.mark.parametrize(("reach", "each"), [(3, 3), (7, 4), (18, 6)])
def test_a_head_begins_with_what_is_in_its_reach(head, plain, reach, each, monkeypatch):
    """Padding of a shorter text, tokens of another place, or noise of another position. Three texts share a
    reach, and each has four tokens, where the reach holds them."""
    monkeypatch.setattr(auto_module, "FEWEST", 4)
    target = tiny.target("llama")
    auto = Auto(head(target))
    auto.hybrid.head.reach = reach
    engine = Engine(target, auto, rows=3, capacity=200, specs=auto.candidate_trees)
    engine.admit(*map(Request, PROMPTS))
    for _ in range(plain):
        engine.step(spec=PLAIN)
    texts = [request.sequence[:-1] for request in engine.running]
    with patch.object(auto.hybrid.head, "update", wraps=auto.hybrid.head.update) as update:
        engine.step(spec=auto.candidate_trees[-1])
    (span, _), _ = update.call_args
    last = [text[-each:] for text in texts]
    assert span.count.tolist() == [len(text) for text in last]
    assert [row[: len(text)] for row, text in zip(span.tokens.tolist(), last, strict=True)] == last
    assert engine.state.head.length.tolist() == [len(text) for text in texts]


@pytest.mark.parametrize("head", [tiny.eagle, tiny.fasteagle, tiny.glide, tiny.medusa])
@pytest.mark.parametrize("early", [False, True])
def test_texts_that_join_and_leave_before_the_head_reads_are_drafted_the_same(head, early):
    """Prompts of several lengths, rows that move, and texts that join beside one that was read (early)."""
    target, made = tiny.target("llama"), []
    for lags in (True, False):
        auto = Auto(head(target))
        tree = auto.candidate_trees[-1]
        engine = Engine(target, auto, rows=3, capacity=200, specs=auto.candidate_trees)
        flush = () if lags else (engine.state,)

        def rounds(spec, engine=engine, flush=flush):
            engine.step(spec=spec)
            for state in flush:
                state.flush()

        for prompt in PROMPTS[:2]:
            engine.admit(Request(prompt))
        for _ in range(3):
            rounds(tree if early else PLAIN)
        assert early or bool(engine.state.missed) == lags
        engine.cancel(engine.running[0])
        engine.free()
        engine.admit(*map(Request, PROMPTS[2:]))
        rounds(PLAIN)
        assert auto.catch_up_cost(engine.state) >= 0
        with torch.inference_mode():
            made.append(auto.propose(engine.state, engine.sampler, tree))
        assert engine.state.missed == []
    late, soon = made
    assert torch.equal(late.tokens, soon.tokens)
    assert torch.equal(late.parent_slots(), soon.parent_slots())


def test_what_is_kept_of_a_text_takes_no_head_that_nobody_asked_for():
    """A server keeps prefixes: its head read each prompt, although no tree of it was grown."""
    target, prompt = tiny.target("llama"), [i % 50 for i in range(20)]
    auto = Auto(tiny.fasteagle(target))
    engine = Engine(target, auto, rows=2, specs=auto.candidate_trees, keep=100)
    engine.admit(Request(prompt))
    (other,) = engine.admit(Request([*prompt, 7, 7]))
    assert other.shared == len(prompt) - 1
    assert not engine.state.reads
    engine.step(spec=auto.candidate_trees[-1])  # now it is
    engine.cancel(engine.running[0])
    engine.free()
    assert engine.admit(Request([*prompt, 8, 8]))[0].shared == len(prompt) - 1


@pytest.mark.parametrize("behind", [8192, 2**25])
def test_texts_that_are_never_drafted_are_not_read(behind, monkeypatch):
    """71 texts were read in the midst of their answers, at the price of six rounds, although no tree
    of theirs could pay: so many states outgrew what a head may lag behind."""
    monkeypatch.setattr(auto_module, "BEHIND", behind)
    target = tiny.target("llama")
    auto = Auto(tiny.fasteagle(target))
    read = []
    monkeypatch.setattr(auto.hybrid.head, "update", lambda span, state: read.append(span))
    engine = Engine(target, auto, rows=3, capacity=200, specs=auto.candidate_trees)
    for prompt in PROMPTS:
        engine.admit(Request(prompt))
    for _ in range(40):
        engine.step(spec=PLAIN)
        assert engine.state.columns * engine.state.column_bytes < behind
    engine.cancel(*engine.running[1:])
    engine.free()
    engine.cancel(*engine.running)
    engine.free()
    assert read == []
    assert engine.state.missed == []
    assert engine.state.columns == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_length_of_a_match_is_that_of_direct_search(seed):
    """Texts over two letters, in which long matches and none come about, beside others in a batch. Bytes of
    one letter stand in two others side by side: 1, 1 in 256, 256."""
    draws, letters = random.Random(seed), (1, 256) if seed % 2 else (0, 1)
    lines = [[draws.choice(letters) for _ in range(draws.randrange(1, 30))] for _ in range(3)]
    width = max(map(len, lines))
    text = torch.tensor([line[:-1] + [7] * (width - len(line) + 1) for line in lines])
    state = TextState(
        torch.tensor([line[-1] for line in lines]), text, torch.tensor([len(line) - 1 for line in lines])
    )
    sizes = (1, 2, 4, 7)
    for line, found in zip(lines, state.matched(sizes), strict=True):
        stands = [n for n in sizes if any(line[i : i + n] == line[-n:] for i in range(len(line) - n))]
        assert found == len(stands)


def test_without_weights_there_are_matches_alone():
    """A target that nothing was trained for."""
    target = tiny.target("llama")
    auto = load_drafter("auto", target)
    assert [rung.name for rung in auto.candidate_trees] == ["plain", "matches-4", "matches-8", "matches-16"]
    assert auto.taps == ()
    made = generate(target, PROMPTS, auto, max_new_tokens=30)
    assert [each.tokens for each in made] == [
        each.tokens for each in generate(target, PROMPTS, "vanilla", max_new_tokens=30)
    ]


def test_masks_ride_with_the_heads_trees_alone():
    """Rows of masks in rounds that do not need them. After such a round there are no guesses, and a round of
    the head's tree gets them."""
    target = tiny.target("llama")
    auto = Auto(tiny.bita(target, hosts=2))
    plain, match, tree = auto.candidate_trees[0], auto.candidate_trees[1], auto.candidate_trees[-1]
    engine = Engine(target, auto, rows=1, capacity=120, specs=auto.candidate_trees)
    engine.admit(Request(tiny.prompts(23)[0]))
    (first,) = engine.step(spec=tree)
    assert first.drafted, "the prompt's last token hosts masks"
    for spec in (plain, match):
        engine.step(spec=spec)
        assert engine.span.tree.probes is None
        assert not engine.state.head.known.any()
        engine.step(spec=tree)
        assert engine.span.tree.probes is not None
        assert engine.state.head.known.all()
        (then,) = engine.step(spec=tree)
        assert then.drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_is_offered_chains(temperature, tmp_path):
    """Each of a tree's levels is a pass of a whole model, the more so where it is wide."""
    target = tiny.target("llama")
    tiny.reference("mistral").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    auto = load_drafter(f"auto:head=draft-model:model={tmp_path}", target, temperature)
    assert [rung.name for rung in auto.candidate_trees[4:]] == ["chain-1", "chain-2", "chain-4", "chain-8"]
    how = {"max_new_tokens": 30, "temperature": temperature, "seed": 3}
    made, plain = (generate(target, PROMPTS, drafter, **how) for drafter in (auto, "vanilla"))
    assert [each.tokens for each in made] == [each.tokens for each in plain]
    part = Auto(tiny.distilled(target))
    assert part.candidate_trees[4].name == "best-first-1x2", "one block is as cheap as a head"


def test_a_draft_model_of_another_tokenizer_is_refused(tmp_path):
    tiny.reference("llama").save_pretrained(tmp_path)
    other = deepcopy(tiny.tokenizer())
    other.add_tokens(["zz"])
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="reads other tokens than the target"):
        load_drafter(f"auto:head=draft-model:model={tmp_path}", tiny.target("llama"))


def test_a_head_without_trees_is_refused():
    with pytest.raises(ValueError, match="drafter 'auto': 'ngram' has no trees to choose among"):
        load_drafter("auto:head=ngram", tiny.target("llama"))


def test_what_the_head_is_told_is_kept_or_refused(tmp_path):
    """A tree and a proposal were thrown away without a word."""
    target = tiny.target("llama")
    save_drafter(tmp_path, "eagle", target, *tiny.eagle(target).pack(), {}, dtype=None)
    made = load_drafter(f"auto:head={tmp_path}:proposal=top-k", target, 1.0)
    assert made.hybrid.head.proposal == "top-k"
    assert load_drafter(f"auto:head={tmp_path}", target, 1.0).hybrid.head.proposal == "noise"
    with pytest.raises(ValueError, match="names a tree"):
        load_drafter(f"auto:head={tmp_path}:tree=chain-3", target)
