"""Runs of bench for several targets, temperatures and numbers of texts."""

from copy import deepcopy

import pytest
import torch

import tiny
from slipstream.measure.bench import bench
from slipstream.measure.questions import Question
from slipstream.measure.sweep import Sweep, sweep
from slipstream.targets import HFTarget

ASKED = [Question("f", str(i), "c", (f"a b {i}",)) for i in range(3)]
HOW = {"temperatures": [0.0, 1.0], "batches": [1, 2], "max_new_tokens": 6}


@pytest.fixture(scope="module")
def target():
    return HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), "first")


def test_what_ends_a_sweep_between_runs_loses_none(target):
    """As Ctrl-C while the next target is loaded: without a file the first run's figures were gone."""
    kept = []

    def targets():
        yield target
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(targets(), "ngram", ASKED, max_new_tokens=4, keep=kept.append)
    assert [each.stopped for each in kept] == ["not finished"] * 3 + ["KeyboardInterrupt"]
    assert [run.stopped for run in kept[-1].runs] == [None]


def test_targets_of_one_name_are_told_apart_or_refused(target, monkeypatch):
    """A compiled target beside itself, or a second model without a name, was taken for the first one's run,
    which "cannot be gone on with". In a picture one line went through both."""
    compiled = HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), "first")
    monkeypatch.setattr(compiled, "compiles", True)

    def run(model, *given, **how):
        return bench(target, *given, **how).model_copy(update={"compiled": model.compiles})

    monkeypatch.setattr("slipstream.measure.sweep.bench", run)
    made = sweep([target, compiled], "ngram", ASKED, max_new_tokens=4)
    assert [run.model for run in made.runs] == ["first, float64", "first, float64, compiled"]
    assert "first, float64, compiled" in str(made)
    other = HFTarget(deepcopy(tiny.reference("qwen2")), tiny.tokenizer(), "first")
    kept = []
    with pytest.raises(ValueError, match="two targets are called first: name each"):
        sweep([target, other], "ngram", ASKED, max_new_tokens=4, keep=kept.append)
    assert len(kept[-1].runs) == 1


def test_each_pair_is_a_run_and_a_sweep_goes_on(target):
    kept = []

    def stop(found):
        kept.append(found)
        if len(found.runs) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep([target], "ngram", ASKED, **HOW, keep=stop)
    begun = Sweep.from_json(kept[-1].to_json())
    assert [run.stopped for run in begun.runs] == [None, None, "KeyboardInterrupt"]
    other = HFTarget(deepcopy(tiny.reference("qwen2")), tiny.tokenizer(), "second")
    made = sweep([target, other], "ngram", ASKED, **HOW, begun=begun)
    places = [(run.target, run.temperature, run.batch) for run in made.runs]
    assert places == [
        (name, temperature, n) for name in ("first", "second") for temperature in (0, 1) for n in (1, 2)
    ]
    assert made.stopped is None
    with pytest.raises(ValueError, match="drafters are others"):  # the file of the whole sweep stays as it is
        sweep([target], "suffix", ASKED, **HOW, begun=made, keep=lambda found: pytest.fail("kept"))
    with pytest.raises(ValueError, match="drafters are others"):  # of plain decoding alone
        sweep([target], [], ASKED, **HOW, begun=made)
    assert sweep([target, other], ["vanilla", "ngram"], ASKED, **HOW, begun=made).runs == made.runs
    assert made.runs[:2] == begun.runs[:2]
    assert all(row.identical for run in made.runs for row in run.results)
    assert str(made).count("ngram") == 9  # a line of each run, and the verdict
    assert Sweep.from_json(made.to_json()) == made


def test_a_sweep_holds_runs_of_one_kind_and_says_which_did_not_end(target):
    """Runs that are not asked now stayed in it, whatever they had been asked, and it was called whole."""
    made = sweep([target], "ngram", ASKED, max_new_tokens=4)
    for other in ({"seed": 5}, {"max_new_tokens": 6}, {"questions": ASKED[:2]}):
        how = {"questions": ASKED, "max_new_tokens": 4, "temperatures": [1.0]} | other
        with pytest.raises(ValueError, match="this sweep cannot be gone on with"):
            sweep([target], "ngram", **how, begun=made)
    elsewhere = made.model_copy(update={"runs": [made.runs[0].model_copy(update={"hardware": {}})]})
    tuned = HFTarget(deepcopy(target.model), target.text.tokenizer, target.name)
    with torch.no_grad():
        tuned.model.model.norm.weight.mul_(1.5)
    others = [Question(each.file, each.id, each.category, ("another",)) for each in ASKED]
    for model, drafter, asked, begun, told in (
        (target, "ngram", ASKED, elsewhere, "hardware are others"),
        (target, "suffix", ASKED, made, "drafters are others"),
        (target, "ngram", others, made, "texts was"),
        (tuned, "ngram", ASKED, made, "two targets are called first"),
    ):
        with pytest.raises(ValueError, match=told):
            sweep([model], drafter, asked, max_new_tokens=4, temperatures=[1.0], begun=begun)
    killed = made.model_copy(update={"runs": [made.runs[0].model_copy(update={"stopped": "killed"})]})
    whole = sweep([target], "ngram", ASKED, max_new_tokens=4, temperatures=[1.0], begun=killed)
    assert whole.stopped == "killed"
