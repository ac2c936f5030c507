"""Costs, ranks along recorded answers, the choice of a tree, and where it is kept."""

import io
import shlex
from weakref import WeakKeyDictionary

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

import tiny
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter
from slipstream.drafters.draft_model.model import DraftModel
from slipstream.drafters.store import read_tuned, save_drafter, save_tuned
from slipstream.engine import costs
from slipstream.engine.policy import GUESS
from slipstream.engine.replay import record
from slipstream.measure.cost import cost_curve
from slipstream.measure.datasets import Question
from slipstream.measure.tune import (
    GAMMA,
    RANKS,
    SIZES,
    _rising,
    acceptance,
    proposing,
    ranks,
    skippable,
    tune,
)
from slipstream.measure.tune_report import TuneReport
from slipstream.targets import HFTarget

ASKED = [Question("f", "1", "letters", ("a b a",)), Question("f", "2", "letters", ("c d e f",))]


@pytest.fixture(scope="module")
def tuned(target, drafter):
    return tune(target, drafter, ASKED, max_new_tokens=8)


def test_what_is_chosen_wins_the_race_of_what_was_predicted_best(tuned):
    for found in tuned.temperatures:
        raced = found.candidates
        assert found.chosen == next(each for each in raced if each.proposal != "sampled")
        assert raced[0].speedup == max(entry.speedup for entry in raced[:2])
        octaves: dict[int, float] = {}
        for size in (size for seen in found.proposals for size in seen.budgets):
            octave = size.nodes.bit_length()
            octaves[octave] = max(octaves.get(octave, 0.0), size.estimate)
        sizes = {(s.proposal, e.nodes, e.depth): e.estimate for s in found.proposals for e in s.budgets}
        judged = {sizes[e.proposal, e.nodes, e.depth] for e in raced if e.proposal != "sampled"}
        assert judged == set(sorted(octaves.values(), reverse=True)[:SIZES])
        assert TreeSpec.parse(found.chosen.tree).nodes == found.chosen.nodes
        for seen in found.proposals:
            budgets = [size.nodes for size in seen.budgets]
            assert budgets[0] == 2
            assert budgets == sorted(set(budgets))
    assert TuneReport.from_json(tuned.to_json()) == tuned


def test_sampled_children_are_raced_but_taken_only_by_name(tuned):
    """A tree of theirs that was stored would let `generate` draw other texts for the same seed."""
    cold, hot = tuned.temperatures
    assert "sampled" not in {each.proposal for each in cold.candidates}
    sampled = [each for each in hot.candidates if each.proposal == "sampled"]
    assert sampled
    assert all(TreeSpec.parse(each.tree).keeps_first_children for each in sampled)
    sizes = {each.nodes for each in hot.candidates if each.tree.startswith("[")}
    assert {each.nodes for each in sampled} == sizes
    assert all(1 <= each.tau <= 1 + each.depth for each in sampled)
    assert hot.chosen.proposal != "sampled"


def test_the_trees_for_auto_are_the_best_of_each_size(tuned):
    for found in tuned.temperatures:
        exact = [each for each in found.candidates if each.proposal != "sampled"]
        octaves = [TreeSpec.parse(tree).nodes.bit_length() for tree in found.rungs]
        assert sorted(octaves) == sorted({each.nodes.bit_length() for each in exact})
        for tree, octave in zip(found.rungs, octaves, strict=True):
            assert tree == next(each.tree for each in exact if each.nodes.bit_length() == octave)


def test_what_guesses_in_the_targets_passes_is_judged_by_decoding(target):
    """It was refused: no record knows what its masks say."""
    bita = tiny.bita(target, hosts=2)
    for found in tune(target, bita, ASKED, max_new_tokens=8).temperatures:
        trees = {TreeSpec.parse(each.tree) for each in found.candidates}
        assert {spec.depth for spec in trees} == {1, 2, 3}
        assert all(1 <= each.tau <= 1 + each.depth for each in found.candidates)
        assert found.proposals == []
        assert found.chosen.proposal != "sampled"
    assert bita.tree_spec.name == "backbone-3x2", "the drafter that was given stays as it is"


@pytest.fixture
def home(target, drafter, monkeypatch, tmp_path):
    """An eagle directory; nothing is known of its rounds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())
    config, tensors = drafter.pack()
    save_drafter(tmp_path / "eagle", "eagle", target, config, tensors, {}, dtype=None)
    return tmp_path / "eagle"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_begins_with_what_tune_found(target, home, monkeypatch, temperature):
    """Its trees, what their rounds cost and what they bring: nothing is left to measure."""
    name = f"auto:head={home}"
    made = tune(target, name, ASKED, temperatures=[temperature], max_new_tokens=8)
    (found,) = made.temperatures
    monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())  # another process
    monkeypatch.setattr(costs, "measured", None)
    auto = load_drafter(name, target, temperature)
    assert sorted(found.rungs) == sorted(rung.name for rung in auto.tuned)
    assert auto.candidate_trees[-len(auto.tuned) :] == auto.tuned
    assert [rung.nodes for rung in auto.tuned] == sorted(rung.nodes for rung in auto.tuned)
    assert auto.uses_target_noise == (found.chosen.proposal == "noise")
    known = costs.policy(target, auto, 1).statistics
    assert all(known.average(i, 0).rounds > GUESS for i in range(1, len(auto.candidate_trees)))
    shown = Console(width=300, file=io.StringIO())
    shown.print(costs.explained(target, auto))
    assert "Found by tune: " in shown.file.getvalue()
    assert load_drafter(str(home), target, temperature).tree_spec.name == found.chosen.tree
    assert not load_drafter(name, target, 1.0 - temperature).tuned


def test_masks_are_among_what_auto_tunes(target, home, monkeypatch, tmp_path):
    """Guesses in the target's own passes: rounds of both kinds are timed and counted."""
    config, tensors = tiny.bita(target).pack()
    save_drafter(tmp_path / "bita", "bita", target, config, tensors, {}, dtype=None)
    (found,) = tune(target, str(tmp_path / "bita"), ASKED, temperatures=[0.0], max_new_tokens=8).temperatures
    auto = load_drafter(f"auto:head={tmp_path / 'bita'}", target)
    assert sorted(found.rungs) == sorted(rung.name for rung in auto.tuned)
    known = costs.statistics(target, auto)
    assert all(known.average(i, 0).rounds > GUESS for i in range(4, len(auto.candidate_trees)))


def test_several_texts_have_trees_of_their_own(target, home):
    """What was found for one text taken for eight, behind another context, or an older file misread."""
    save_tuned(home, target.place, {0.0: {"tree": "chain-2"}})  # as earlier versions wrote it
    report = tune(target, str(home), ASKED, temperatures=[0.0], max_new_tokens=8, batch=3, context=40)
    assert (report.batch, report.context) == (3, 40)
    chosen = report.temperatures[0].chosen.tree
    trees = [load_drafter(str(home), target, texts=texts).tree_spec.name for texts in (1, 2, 3, 8)]
    assert trees == ["chain-2", chosen, chosen, chosen]
    autos = [load_drafter(f"auto:head={home}", target, texts=texts) for texts in (1, 3)]
    assert [len(auto.tuned) > 0 for auto in autos] == [False, True]
    assert set(costs.statistics(target, autos[1]).seconds) == {3}
    with pytest.raises(ValueError, match="context is 127; this target reads 128 tokens"):
        tune(target, str(home), ASKED, max_new_tokens=8, context=127)


@pytest.mark.parametrize(
    "damaged",
    [
        *({"tree": "chain-2", "rungs": trees} for trees in (["chain-0"], [3], "chain-2", 7)),
        {"tree": "chain-0"},
        {"tree": 7},
    ],
)
def test_damaged_trees_are_ignored_with_one_line(target, home, damaged, capsys):
    """A file that nobody had looked at for weeks ended every command that named its head."""
    save_tuned(home, target.place, {0.0: damaged})
    untuned = load_drafter(f"auto:head={home}", target, 1.0)
    for _ in range(2):
        assert load_drafter(f"auto:head={home}", target).candidate_trees == untuned.candidate_trees
        assert load_drafter(str(home), target).tree_spec == load_drafter(str(home), target, 1.0).tree_spec
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{home / 'tuned.json'} is damaged and ignored: ")


@pytest.mark.parametrize("text", ["", '{"her', "[]", '{"here": 3}', '{"here": {"T = 0": 3}}'])
def test_a_damaged_file_of_trees_is_ignored_with_one_line(target, home, text, capsys):
    save_tuned(home, target.place, {0.0: {"tree": "chain-2"}})
    (home / "tuned.json").write_text(text.replace("here", target.place))
    assert load_drafter(str(home), target).tree_spec == load_drafter(str(home), target, 1.0).tree_spec
    assert "is damaged and ignored: " in capsys.readouterr().err
    if "T = 0" not in text:
        with pytest.raises(ValueError, match=r"tuned\.json .*: move it away"):
            tune(target, str(home), ASKED, temperatures=[0.0], max_new_tokens=8)


def test_guesses_that_are_never_right_have_no_tree(target, monkeypatch):
    """A head of another target's fell over the race of no tree."""
    monkeypatch.setattr("slipstream.measure.tune.acceptance", lambda *_: [[0.0] * 4] * 2)
    with pytest.raises(ValueError, match="no guess of this drafter is the target's"):
        tune(target, tiny.DRAFTERS["fasteagle"](target, []), ASKED, temperatures=[0.0], max_new_tokens=4)


def test_one_temperature_above_0_is_stored(target):
    """The last of several was kept, without a word."""
    with pytest.raises(ValueError, match="give one temperature above 0"):
        tune(target, "auto", ASKED, temperatures=[0.7, 1.0])


def test_auto_without_a_head_has_nothing_to_tune(target):
    with pytest.raises(ValueError, match="auto has no head to tune"):
        tune(target, "auto", ASKED)


def test_the_table_is_in_the_order_of_its_figures(target, tuned):
    """A winner of 1.20 stood above rows of 1.60, which had lost earlier races and were not marked."""
    for found in tuned.temperatures:
        rounds = [entry.rounds for entry in found.candidates]
        assert rounds == sorted(rounds, reverse=True)
        for count in set(rounds):
            speeds = [entry.speedup for entry in found.candidates if entry.rounds == count]
            assert speeds == sorted(speeds, reverse=True)
    names = tuned.static_trees("self-speculative:skip=0", best=99)
    statics = {e.tree for f in tuned.temperatures for e in f.candidates if e.tree.startswith("[")}
    pasted = [shlex.split(line.partition("--drafter ")[2])[0] for line in names]
    grown = {load_drafter(spec, target).tree_spec.paths for spec in pasted}
    assert grown == {TreeSpec.parse(tree).paths for tree in statics}
    last = next(e.tree for e in reversed(tuned.temperatures[0].candidates) if e.tree.startswith("["))
    held = tuned.temperatures[0].model_copy(update={"rungs": [last]})  # auto's, below the rows that are shown
    (line,) = tuned.model_copy(update={"temperatures": [held]}).static_trees(
        "self-speculative:skip=0", best=0
    )
    assert last.replace(" ", "") in line


@pytest.mark.parametrize("width", [44, 60, 80, 120])
def test_tables_are_read_at_any_width(tuned, width):
    """Words folded in the middle, and figures cut off."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(tuned)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for entry in tuned.temperatures[0].candidates[:8]:
        assert f"{entry.speedup:.2f}" in text
        assert entry.tree in text or "static 1" in text
    assert "…" not in text


def test_a_tuned_tree_is_grown_unless_another_is_named(target, drafter, tmp_path):
    config, tensors = drafter.pack()
    save_drafter(tmp_path, "eagle", target, config, tensors, {}, dtype=None)
    chosen = {
        0.0: {"tree": "dynamic-2x3x6", "proposal": "top-k"},
        1.0: {"tree": "chain-2", "proposal": "noise"},
    }
    save_tuned(tmp_path, target.place, {0.0: chosen[0.0]})
    save_tuned(tmp_path, target.place, {1.0: chosen[1.0]})  # the other one stays
    cold, hot = (load_drafter(str(tmp_path), target, temperature) for temperature in (0.0, 0.7))
    assert (cold.tree_spec.name, cold.proposal, hot.tree_spec.name, hot.proposal) == (
        "dynamic-2x3x6",
        "top-k",
        "chain-2",
        "noise",
    )
    assert load_drafter(f"{tmp_path}:tree=chain-3", target).tree_spec.name == "chain-3"
    assert load_drafter(f"{tmp_path}:proposal=noise", target).tree_spec.name == "fig9"
    assert read_tuned(tmp_path, "another machine", 0.0) == {}
    (tmp_path / "tuned.json").write_text("{")
    assert load_drafter(str(tmp_path), target).tree_spec.name == "fig9"


def test_a_draft_model_is_tuned_as_well(target, monkeypatch, tmp_path):
    """γ and the tree of speculative sampling: kept by what the model is called, whatever tree it was called
    with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = "self-speculative:skip=0"
    named = f"{spec},tree=chain-2,proposal=noise"
    (found,) = tune(target, named, ASKED, temperatures=[0.0], max_new_tokens=12).temperatures
    last_race = [each.speedup for each in found.candidates if each.rounds == found.chosen.rounds]
    assert found.chosen.speedup == max(last_race)
    assert [chain.tree for chain in found.gammas] == [f"chain-{gamma}" for gamma in range(2, 11)]
    best = max(found.gammas, key=lambda chain: chain.estimate).tree
    assert best in [each.tree for each in found.candidates]
    assert load_drafter(spec, target).tree_spec.name == found.chosen.tree
    assert load_drafter("self-speculative:skip=1", target).tree_spec.name == "chain-5"


def test_a_block_that_does_nothing_is_skipped_first():
    """Blocks ranked the wrong way round, or agreement judged one token off."""
    model = tiny.build(LlamaConfig(**(tiny.GROUPED | {"num_hidden_layers": 5})))
    for linear in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
        linear.weight.data.zero_()
    found = skippable(HFTarget(model), tiny.prompts(9, 4, 14), new=12)
    first, *others = found
    assert (first.skip, first.alpha) == ("2", 1.0)
    assert [len(each.skip.split(",")) for each in found] == [1, 2, 3]
    assert all("2" in each.skip and each.alpha < 1 for each in others)
    with pytest.raises(ValueError, match="has 2 blocks"):
        skippable(tiny.target("llama"), tiny.prompts(9))


def test_tables_and_pictures(target, tuned, tmp_path):
    costs = cost_curve(target, contexts=(16, 256, 512), batches=(1, 2))
    assert {each.context for each in costs.passes} == {
        16,
        target.window - 64,
    }  # as measured
    for report in (costs, tuned):
        report.plot(str(tmp_path / "picture.svg"))
        assert "<svg" in (tmp_path / "picture.svg").read_text()
        assert str(report)
        with pytest.raises(ValueError, match="cannot be written"):
            report.plot(str(tmp_path / "missing" / "picture.svg"))


def test_a_cascade_is_followed_as_deep_as_it_drafts(target):
    """Every depth's law is known at once, and says nothing of the draft before it."""
    cascade = tiny.fasteagle(target)
    recorded = record(target, tiny.prompts(5, 9, 12, 7), 60, cascade.taps)
    rates = acceptance(cascade, recorded, "top-k")
    assert len(rates) == cascade.deepest == 3
    assert all(0 < sum(row) <= 1 for row in rates)


def test_a_model_that_drafts_for_itself_is_right_first_at_every_depth(target):
    """A rank that is compared with another text's token, or a text's end that counts as a miss."""
    itself = DraftModel(target, target)
    recorded = record(target, tiny.prompts(5, 9, 4), 12, ())
    assert acceptance(itself, recorded, "top-k") == [[1.0] + [0.0] * (RANKS - 1)] * GAMMA
    _, drafts, _ = ranks(itself, recorded, TreeSpec.parse("backbone-3x2"))
    ends = [int(n) for n in recorded.lengths - recorded.prompts]
    assert (drafts == -1).sum() == 3 * len(ends)  # one, two and three tokens before the end of a text
    assert len(drafts) == sum(ends) - len(ends)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposal", ["top-k", "noise"])
def test_ranks_are_those_of_drafts_from_every_position(target, drafter, proposal, temperature):
    """Counted by hand: from every token, the head steps along its own first guesses, as far as the text that
    is known to follow bears them out."""
    recorded = record(target, tiny.prompts(5, 9), 60, ("final",), temperature=temperature)
    ranked, ten = proposing(drafter, proposal), TreeSpec.parse("[[0],[1],[2],[3],[4],[5],[6],[7],[8],[9]]")
    hits = torch.zeros(2, 10)
    tried = [0, 0]
    for b, row in enumerate(recorded.sampling):
        text = recorded.tokens[b, : recorded.lengths[b]]
        for at in range(int(recorded.prompts[b]), len(text) - 1):
            sampler = Sampler([row], [[]], target.vocab)
            state = drafter.start(1, target.device)
            cache = target.new_cache(1)
            read = Span(
                text[None, :at], text[None, 1 : at + 1], torch.zeros(1).long(), torch.tensor([at]), cache
            )
            drafter.update(
                Span(**{**vars(read), "features": recorded.tapped(("final",))[b : b + 1, :at]}), state
            )
            for depth in range(min(2, len(text) - 1 - at)):
                if depth:  # the guess is fed instead of the feature: what a draft has
                    one, fed = torch.ones(1).long(), text[None, at + depth : at + depth + 1]
                    step = Span(fed, fed, state.cache.lengths, one, cache, state.hidden[:, None])
                    drafter.update(step, state)
                state.root = text[at + depth][None]
                found = ranked.propose(state, sampler, ten).tokens[0, 1:].tolist()
                tried[depth] += 1
                if int(text[at + depth + 1]) in found:
                    hits[depth, found.index(int(text[at + depth + 1]))] += 1
                if int(text[at + depth + 1]) != found[0]:
                    break
    expected = hits / torch.tensor(tried)[:, None]
    assert hits.sum() > 3
    assert torch.allclose(torch.tensor(acceptance(drafter, recorded, proposal))[:2], expected, atol=1e-6)


def test_more_rows_cost_no_less():
    assert _rising({1: 5.0, 2: 3.0, 4: 4.0, 8: 7.0, 16: 6.0, 32: 9.0}) == {
        1: 4.0,
        2: 4.0,
        4: 4.0,
        8: 6.5,
        16: 6.5,
        32: 9.0,
    }
