"""What rounds cost is measured once, and what they bring is kept."""

from copy import deepcopy
from weakref import WeakKeyDictionary

import pytest

import tiny
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.auto import SAMPLED, Auto
from slipstream.engine import costs, generate
from slipstream.files import cache_home, read_results
from slipstream.targets import HFTarget

PROMPT = tiny.prompts(12)[0]


@pytest.fixture
def auto(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(generate, "policy", costs.policy)
    monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())
    target = tiny.target("llama")
    return target, Auto(tiny.eagle(target), "auto:head=tiny")


def test_rounds_are_measured_once_for_each_number_of_texts(auto, monkeypatch):
    target, drafter = auto
    for texts in (1, 4):
        costs.policy(target, drafter, texts)
    seconds = costs.statistics(target, drafter).seconds
    assert set(seconds) == {1, 4}
    assert all(0 < each < 1 for some in seconds.values() for each in some)
    monkeypatch.setattr(costs, "measured", None)
    monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())  # another process
    again = Auto(drafter.hybrid.head, drafter.name)
    costs.policy(target, again, 4)
    assert costs.statistics(target, again).seconds[4] == pytest.approx(seconds[4], abs=1e-6)


def test_rounds_that_were_measured_at_one_temperature_are_not_at_another(auto, monkeypatch):
    """`generate`, which samples where its model says so, measured what `demo` had just measured. Trees that
    tune found for one temperature alone stood in each other's way."""
    target, drafter = auto
    head, timed = drafter.hybrid.head, []
    sampling = Auto(head, drafter.name + SAMPLED)
    tuned = Auto(head, drafter.name + SAMPLED, tuned=(TreeSpec.parse("chain-2"),))
    monkeypatch.setattr(
        costs, "measured", lambda _, given, texts: timed.append(given) or [2.0] * len(given.candidate_trees)
    )
    for each in (drafter, sampling, tuned, drafter, sampling, tuned):
        monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())  # another process
        costs.policy(target, each, 1)
        assert costs.statistics(target, each).seconds[1] == [2.0] * len(each.candidate_trees)
    assert timed == [drafter, tuned]


def test_texts_that_are_left_of_many_are_weighed_by_what_fewer_cost(auto, monkeypatch):
    """The last text of eight was decoded plainly, as trees had not paid for eight."""
    target, drafter = auto
    for texts, tree in ((1, 1.1), (8, 7.0)):
        monkeypatch.setattr(
            costs, "measured", lambda *_, tree=tree: [1.0] + [tree] * (len(drafter.candidate_trees) - 1)
        )
        costs.policy(target, drafter, texts)
    monkeypatch.setattr(costs, "measured", None)
    monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())  # another process
    chooses = costs.policy(target, drafter, 8)
    assert chooses.choose([*range(8)], [0] * 8) is drafter.candidate_trees[0]
    assert chooses.choose([7], [0]) is not drafter.candidate_trees[0]


def test_the_first_lap_reads_one_token_alone(auto, monkeypatch):
    """A graph that is compiled in the midst of an answer: a second in which nothing is said."""
    target, drafter = auto
    events: list[str | int] = []
    step, head = costs.Engine.step, drafter.hybrid.head
    update = head.update

    def stepped(session, spec):
        events.append(spec.name)
        return step(session, spec=spec)

    def read(span, state):
        events.append(span.tokens.shape[1])
        update(span, state)

    monkeypatch.setattr(costs.Engine, "step", stepped)
    monkeypatch.setattr(head, "update", read)
    next(costs._laps(target, drafter, 4))
    for tree in (spec.name for spec in drafter.candidate_trees if spec.children):
        assert ("plain", tree, 1) in zip(events, events[1:], events[2:], strict=False)


def test_what_a_head_must_read_is_charged_from_the_first_tree_on(auto, monkeypatch):
    """A drafter made anew in each call, or in another process, whose head would read prompts for nothing."""
    target, drafter = auto
    costs.policy(target, drafter, 2)
    assert 0 < drafter.catch_up_per_token < 0.1
    again = Auto(drafter.hybrid.head, drafter.name)
    costs.policy(target, again, 2)
    assert again.catch_up_per_token == drafter.catch_up_per_token
    monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())
    again = Auto(drafter.hybrid.head, drafter.name)
    costs.policy(target, again, 2)
    assert again.catch_up_per_token == pytest.approx(drafter.catch_up_per_token, abs=1e-9)


def test_what_was_learnt_is_kept_for_the_next_process(auto, monkeypatch):
    """What was accepted, and costs, which may have been measured in a busy second."""
    target, drafter = auto
    monkeypatch.setattr(costs, "NEWS", 10)
    costs.policy(target, drafter, 1)
    measured = list(costs.statistics(target, drafter).seconds[1])
    generate.generate(target, PROMPT, drafter, max_new_tokens=60, eos_token_ids=())
    kept = read_results(cache_home() / costs.FILE)[costs.ACCEPTED]
    known = costs.statistics(target, drafter)
    monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())  # another process
    again = costs.statistics(target, Auto(drafter.hybrid.head, drafter.name))
    assert again is not known
    assert list(kept) == [f"{target.fingerprint} auto:head=tiny"]
    assert all(
        again.average(*key).mean == pytest.approx(known.average(*key).mean, abs=1e-3)
        for key in known.accepted
    )
    costs.policy(target, Auto(drafter.hybrid.head, drafter.name), 1)
    assert again.seconds[1] == pytest.approx(known.seconds[1], abs=1e-6) != measured


def test_rounds_that_nobody_drafted_in_teach_nothing(auto):
    """The server raised at its end where all had asked for plain decoding."""
    target, drafter = auto
    costs.policy(target, drafter, 1)
    costs.statistics(target, drafter).chosen[0] += 2 * costs.NEWS
    costs.keep(target, drafter)
    assert "accepted" not in read_results(cache_home() / costs.FILE)


def test_news_of_all_numbers_of_texts_is_one_writing(auto, monkeypatch):
    """Each number of texts that a process had met cost the end of every answer a writing."""
    target, drafter = auto
    monkeypatch.setattr(costs, "measured", lambda *_: [1.0] * len(drafter.candidate_trees))
    for texts in (1, 2, 8):
        costs.policy(target, drafter, texts)
    known = costs.statistics(target, drafter)
    known.average(4, 0).mean, known.chosen[4] = 0.4321, costs.NEWS
    for texts in (1, 2, 8):
        known.time(texts, 0, 1.1, 1)
    written, write = [], costs.update_json
    monkeypatch.setattr(costs, "update_json", lambda *news: [written.append(news), write(*news)])
    costs.keep(target, drafter)
    assert len(written) == 1
    assert len(read_results(cache_home() / costs.FILE)) == 4


def test_a_drafter_with_one_tree_has_no_policy(auto):
    assert costs.policy(auto[0], tiny.eagle(auto[0]), 1) is None


def test_every_choice_is_explained(auto):
    target, drafter = auto
    made = generate.generate(target, PROMPT, drafter, max_new_tokens=30, eos_token_ids=())
    table, _ = costs.explained(target, drafter).renderables
    rounds = [int(str(cell)) for cell in table.columns[1].cells]
    assert sum(rounds) == len(made.rounds)
    assert len(rounds) == len(drafter.candidate_trees)


def test_a_cache_that_cannot_be_read_or_written_stops_nobody(auto, tmp_path, capsys):
    """An answer lost over a file of measurements. A damaged one was never written over, so that each process
    measured for seconds."""
    target, drafter = auto
    (tmp_path / "slipstream").mkdir()
    (tmp_path / "slipstream" / costs.FILE).write_text("{")
    assert generate.generate(target, PROMPT, drafter, max_new_tokens=4).tokens
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("costs of rounds are measured again: file of results ")
    assert read_results(cache_home() / costs.FILE)
    (tmp_path / "slipstream" / costs.FILE).unlink()
    (tmp_path / "slipstream" / costs.FILE).mkdir()
    assert costs.policy(target, drafter, 2)


@pytest.mark.parametrize("damaged", [7, "1.5", [[]], [[1.5, 20.0, 3.0]], [2.0]])
def test_what_was_accepted_is_learnt_anew_where_it_is_damaged(auto, damaged):
    target, drafter = auto
    for each in (damaged, {spec.name: damaged for spec in drafter.candidate_trees}):
        costs._statistics.clear()
        costs.update_json(
            cache_home() / costs.FILE, {costs.ACCEPTED: {costs._key(target, drafter, costs.ACCEPTED): each}}
        )
        assert not costs.statistics(target, drafter).accepted


@pytest.mark.parametrize("damaged", ["x", None, [], 0, -1.0, float("nan")])
def test_costs_are_measured_anew_where_they_are_damaged(auto, damaged):
    """Arithmetic with whatever the file holds ended in a traceback."""
    target, drafter = auto
    each = {spec.name: damaged for spec in drafter.candidate_trees} | {costs.CATCH_UP: 0.0}
    key = costs._key(target, drafter, "costs")
    stored = {costs._setting(target, texts): {key: each} for texts in (1, "one")}
    costs.update_json(cache_home() / costs.FILE, stored)
    assert min(costs._seconds(target, drafter, 1)[1]) > 0


def test_every_tree_is_told_its_own_time(auto, monkeypatch):
    """Times given to other trees would choose wrong trees, and every answer would stay right."""
    target, drafter = auto
    now, step = [0.0], costs.Engine.step

    def timed(session, spec):
        now[0] += spec.nodes
        return step(session, spec=spec)

    monkeypatch.setattr(costs.Engine, "step", timed)
    monkeypatch.setattr(costs, "perf_counter", lambda: now[0])
    assert costs.measured(target, drafter, 1) == [spec.nodes for spec in drafter.candidate_trees]


def test_rounds_are_measured_in_a_short_window(auto, monkeypatch):
    """Warming up ran past the window's end."""
    target, drafter = auto
    monkeypatch.setattr(target, "window", 16)
    assert min(costs.measured(target, drafter, 1)) > 0


def test_a_drafter_made_anew_in_each_call_measures_nothing_anew(auto, monkeypatch):
    """Rounds to warm up before every answer of `generate(target, prompt)`."""
    target, drafter = auto
    costs.policy(target, drafter, 1)
    monkeypatch.setattr(costs, "_seconds", None)
    again = Auto(tiny.eagle(target), drafter.name)
    assert costs.policy(target, again, 1).statistics is costs.statistics(target, drafter)
    assert costs.statistics(target, Auto(name=drafter.name)) is not costs.statistics(target, drafter)


def test_other_kernels_are_measured_anew(auto, monkeypatch):
    """Costs of the kernels before: trees that have become cheap would not be tried for a thousand rounds."""
    target, drafter = auto
    costs.policy(target, drafter, 1)
    monkeypatch.setattr(costs, "_statistics", WeakKeyDictionary())  # another process
    monkeypatch.setattr(costs, "fingerprint", lambda: "another")
    monkeypatch.setattr(costs, "measured", lambda *_: [1.0] * len(drafter.candidate_trees))
    costs.policy(target, drafter, 1)
    assert costs.statistics(target, drafter).seconds[1] == [1.0] * len(drafter.candidate_trees)


def test_a_quantised_target_begins_with_what_its_model_accepted(auto, monkeypatch):
    """Its own rounds cost something else."""
    model = deepcopy(tiny.reference("llama")).float()
    whole, small = HFTarget(model), HFTarget(model, quantize="int8")
    drafter = Auto(tiny.eagle(whole), "auto:head=tiny")
    monkeypatch.setattr(costs, "measured", lambda *_: [1.0] * len(drafter.candidate_trees))
    costs.policy(whole, drafter, 1)
    known = costs.statistics(whole, drafter)
    known.average(4, 0).mean, known.chosen[4] = 0.4321, costs.NEWS
    costs.keep(whole, drafter)
    assert costs.statistics(small, drafter).average(4, 0).mean == 0.432
    monkeypatch.setattr(costs, "measured", lambda *_: [2.0] * len(drafter.candidate_trees))
    costs.policy(small, drafter, 1)
    assert costs.statistics(small, drafter).seconds[1] == [2.0] * len(drafter.candidate_trees)
