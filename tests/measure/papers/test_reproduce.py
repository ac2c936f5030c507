"""The papers' tables on a tiny model: what is measured, shared, gone on with and told."""

import json
from copy import deepcopy

import pytest

import tiny
from slipstream.engine.replay import predict, record
from slipstream.files import evenly
from slipstream.measure.datasets import SHIPPED, Question, load_questions
from slipstream.measure.papers import reproduce as module
from slipstream.measure.papers.entry import ARMS, ENTRIES
from slipstream.measure.papers.measurements import KINDS
from slipstream.measure.papers.reproduce import OWN, listed, reproduce
from slipstream.measure.papers.reproduce_report import ReproduceReport
from slipstream.measure.runner import first_prompts
from slipstream.methods import METHODS
from slipstream.spec import Spec
from slipstream.targets import HFTarget

MADE = {"eagle": tiny.eagle, "fasteagle": tiny.fasteagle, "medusa": tiny.medusa, "bita": tiny.bita}
HOW = {"limit": 3, "max_new_tokens": 10}


@pytest.fixture(scope="module")
def target():
    return HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), "tiny")


@pytest.fixture
def heads(monkeypatch, target):
    """Random heads in the place of those that ship; GLIDE and EAGLE-3 are not there. Questions that ship are
    longer than the window: each set has three short ones."""

    def load(name, of, temperature=0.0, texts=1):
        spec = Spec.parse(name)
        if spec.name == "lookahead":
            return tiny.Lookahead(window=2, ngram=2, guesses=1)
        if spec.name not in MADE:
            raise ValueError(f"no {spec.name} ships for tiny")
        how = {"hosts": int(spec.options["hosts"])} if "hosts" in spec.options else {}
        return MADE[spec.name](of, spec.options["tree"], "top-k", **how)

    monkeypatch.setattr(module, "load_drafter", load)
    short = [
        Question("own", str(i), kind, (f"abc {i}",))
        for kind in ("code", *dict.fromkeys(kind for kinds in OWN.values() for kind in kinds))
        for i in range(3)
    ]

    def questions(given=(), limit=None):
        if given and given[0] not in SHIPPED:
            return load_questions(given, limit)
        return evenly([q for q in short if q.category == "code"] if "humaneval" in given else short, limit)

    monkeypatch.setattr(module, "load_questions", questions)


def test_every_entry_can_be_measured():
    """Names are the papers', kinds and sets are known, and every head ships, or is told how to train."""
    assert len(ENTRIES) == 13 + 4 + 11 + 11
    for name, entry in ENTRIES.items():
        assert entry.lines or entry.note, name
        for figure in entry.figures:
            assert figure.kind in KINDS
            assert {each.partition("/")[0] for each in figure.sets} <= OWN.keys()
            assert figure.head in METHODS.keys() | ARMS.keys() | {"vanilla", "hf_generate"}, figure


def test_a_table_says_what_is_measured_and_what_follows(target, heads):
    told, kept, steps = [], [], []
    names = ["eagle-table-2", "fasteagle-figure-3", "glide-table-2", "glide-figure-1b"]
    made = reproduce(
        target, names, **HOW, announce=lambda *all: told.extend(all), progress=steps.append, keep=kept.append
    )
    assert "minutes" in told[0]
    assert told[1] == len(steps)
    assert [table.name for table in made.tables] == names
    second, third, glide, sure = made.tables
    assert second.smoke
    values = {value.column: value for value in second.values}
    prompts = first_prompts(target, module.wanted(names[:1], {}, {}, 3)[1]["mt_bench"])
    head = tiny.eagle(target, "fig9")
    found = predict(head, record(target, prompts, 10, head.taps))
    assert values["τ"].ours == round(found.tau, 4)
    assert values["τ"].paper == 3.94
    assert len(values) == 12
    there = {
        value.row for value in third.values if value.ours is not None
    }  # depths that none reached have none
    assert {value.row for value in third.values} - there == {"EAGLE-3"}
    assert any("slipstream train eagle3" in line for line in third.missing)
    assert [each.verdict for each in third.relations].count("not measured") == 1
    assert all(value.ours is None for value in glide.values)
    assert any(ARMS["glide_hard"] in line for line in glide.missing)
    known = {(value.row, value.column): value.ours for value in sure.values}
    assert known["GLIDE", "sure"] is None
    assert 0 <= known["EAGLE", "calibration error"] <= 1
    shown = str(made)
    assert all(word in shown for word in ("SMOKE", "3.94", "not measured", "relations:"))
    assert ReproduceReport.from_json(made.to_json()) == made
    assert [found.stopped for found in kept] == ["not finished"] * len(kept)


def test_a_table_of_a_mixture_of_experts_says_nothing_of_another_target(target, heads):
    (dense,) = reproduce(target, ["eagle-table-3"], **HOW, speed=False).tables
    assert not dense.values
    assert not dense.relations
    assert "mixture of experts" in dense.note
    sparse = HFTarget(deepcopy(tiny.reference("mixtral")), tiny.tokenizer(), "tiny")
    (mixed,) = reproduce(sparse, ["eagle-table-3"], **HOW, speed=False).tables
    assert {value.column: value.ours for value in mixed.values}["τ"] >= 1


def test_what_tables_share_is_measured_once_and_a_run_goes_on(target, heads, monkeypatch):
    calls, held = [], module.predict
    monkeypatch.setattr(module, "predict", lambda *given: calls.append(1) or held(*given))
    first = reproduce(target, ["eagle-table-5"], **HOW)
    assert len(calls) == 2
    begun = ReproduceReport.from_json(first.to_json())
    more = reproduce(target, ["eagle-table-5", "eagle-figure-8"], **HOW, begun=begun)
    assert len(calls) == 2
    assert more.tables[0] == first.tables[0]
    wider = reproduce(target, ["eagle-table-8"], **HOW, begun=begun)
    assert len(calls) == 2 + 6
    assert {cell.asked for cell in wider.cells} == {"mt_bench", "humaneval", "gsm8k", "alpaca"}
    with pytest.raises(ValueError, match="max_new_tokens was 10, and is 11"):
        reproduce(target, ["eagle-table-5"], limit=3, max_new_tokens=11, begun=begun)
    monkeypatch.setitem(MADE, "eagle", lambda of, tree, proposal: tiny.eagle(of, tree, proposal, vocab=32))
    with pytest.raises(ValueError, match="eagle:tree=chain-5 has other trees or weights now"):
        reproduce(target, ["eagle-table-5"], **HOW, begun=begun)
    asked = {"mt_bench": Question("f", "1", "c", ("abc",))}
    with pytest.raises(ValueError, match="sets are others"):
        reproduce(target, ["eagle-table-5"], **HOW, sets=asked, begun=begun)


def test_what_takes_time_is_raced_and_can_be_left_out(target, heads):
    without = reproduce(target, ["bita-figure-7"], **HOW, speed=False)
    tau, speed = (
        {value.row: value for value in without.tables[0].values if value.column == kind}
        for kind in ("τ", "× plain")
    )
    assert [value.ours for value in speed.values()] == [None, None]
    assert all(value.ours >= 1 for value in tau.values())
    made = reproduce(target, ["bita-figure-7", "bita-table-2"], **HOW, begun=without)
    speeds = [v for table in made.tables for v in table.values if v.column == "× plain"]
    measured = [value for value in speeds if value.ours is not None]
    assert len(speeds) == 6  # two of heads that are not here
    assert len(measured) == 4
    assert all(value.ours > 0 and value.interval for value in measured)


def test_a_table_more_takes_no_other_from_the_file(target, heads):
    """As docs/papers.md has it: all tables, then one of another head into the same file. It held that one."""
    first = reproduce(target, ["eagle-table-5", "eagle-table-1"], **HOW, speed=False)
    kept = []
    both = reproduce(
        target, ["eagle-table-8", "eagle-table-1"], **HOW, speed=False, begun=first, keep=kept.append
    )
    assert [table.name for table in both.tables] == ["eagle-table-5", "eagle-table-8", "eagle-table-1"]
    assert both.tables[0] == first.tables[0]
    assert [table.name for table in kept[0].tables] == ["eagle-table-5", "eagle-table-1"]


def test_predictions_are_along_answers_of_the_seed(target, heads):
    """The seed was read for races alone: answers at T = 1 were those of seed 0 whatever was asked."""
    one, again, other = (
        reproduce(target, ["eagle-table-2"], **HOW, speed=False, seed=seed).cells for seed in (1, 1, 2)
    )
    assert one == again
    changed = [ours.temperature for ours, theirs in zip(one, other, strict=True) if ours != theirs]
    assert changed
    assert set(changed) == {1.0}


def test_interrupted_runs_keep_their_cells(target, heads, monkeypatch):
    held, calls, kept = module.predict, [], []

    def failing(*given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return held(*given)

    monkeypatch.setattr(module, "predict", failing)
    with pytest.raises(KeyboardInterrupt):
        reproduce(target, ["eagle-table-5"], **HOW, keep=kept.append)
    assert kept[-1].stopped == "KeyboardInterrupt"
    assert len(kept[-1].cells) == 1
    json.loads(kept[-1].to_json())


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"names": ["eagle-tabel-1"]}, "Did you mean 'eagle-table-1'"),
        ({"names": ["eagle table 2"]}, "Did you mean 'eagle-table-2'"),
        ({"sets": {"mtbench": "x.jsonl"}}, "Unknown set: 'mtbench'. Sets: mt_bench"),
        ({"heads": {"eagel": "runs/x"}}, "Unknown head: 'eagel'"),
        ({"sets": {"xsum": "missing.jsonl"}}, "missing.jsonl cannot be read"),
        ({"heads": {"glide": "missing"}}, "Unknown drafter: 'missing'"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_bad_input_is_told_before_the_work(target, how, told):
    with pytest.raises(ValueError, match=told):
        reproduce(target, **how)


def test_the_list_tells_what_is_stored(target, heads):
    made = reproduce(target, ["eagle-table-5"], **HOW)
    assert "eagle-table-5" in str_of(listed())
    assert "2 of 2 figures" in str_of(listed(made))


def str_of(table):
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as caught:
        console.print(table)
    return caught.get()
