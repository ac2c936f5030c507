"""bench's arithmetic and its JSON; several runs of it as a sweep."""

import json
import sys
from copy import deepcopy
from dataclasses import replace
from math import inf

import pytest
import torch
from rich.console import Console

import tiny
from slipstream.drafters.auto import Auto
from slipstream.engine.engine import Seconds
from slipstream.engine.request import Step
from slipstream.files import check_writable, write_json
from slipstream.measure import runner
from slipstream.measure.bench import Runner, bench, sweep
from slipstream.measure.certify import certify
from slipstream.measure.datasets import Question
from slipstream.measure.metrics import Answered, Tally, expected, factors
from slipstream.measure.results import BenchReport, Difference, Expected, Sweep
from slipstream.measure.resume import marks
from slipstream.measure.runner import drafters_of
from slipstream.provenance import commanded, current, public
from slipstream.targets import HFTarget


@pytest.fixture(scope="module")
def target():
    return HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer())


def tally(rounds, seconds=None):
    return Tally([Answered([], 0.0, rounds, seconds or Seconds()).counted])


def test_tau_and_acceptance_by_depth():
    """Passes that drafted nothing count in the unconditional rates and not in the conditional ones."""
    some = tally([Step(3, 2, 3), Step(3, 0, 1), Step(0, 0, 1), Step(1, 1, 2)])
    assert some.tau == 7 / 4
    assert some.acceptance(conditional=False) == [0.5, 0.25, 0.0]
    assert some.acceptance(conditional=True) == [round(2 / 3, 4), 1.0, 0.0]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError("no room"), ValueError("a later turn is too long")]
)
def test_what_ends_a_run_leaves_the_figures_of_whole_turns(target, monkeypatch, error):
    """The sixth question's prompt was longer than the window: five questions' figures were thrown away."""
    questions = [
        Question("a", "1", "one", ("Say hello.", "And again.")),
        Question("b", "1", "two", ("Count.",)),
    ]
    asks, ask = [], Runner.ask

    def interrupted(self, method, prompt, streamer=None):
        asks.append(method)
        if len(asks) == stop:
            raise error
        return ask(self, method, prompt, streamer)

    monkeypatch.setattr(Runner, "ask", interrupted)
    stop, kept = 3 + 2 * 3 + 2, []  # after the warm-up and two turns, in the midst of the third
    with pytest.raises(type(error)):
        bench(target, ["ngram"], questions, max_new_tokens=8, keep=kept.append)
    unfinished, report = kept  # after the first question, and at the end
    assert unfinished.stopped == "not finished"
    assert (report.prompts, report.stopped) == (["a:1"], str(error) or "KeyboardInterrupt")
    assert {result.questions for result in report.results} == {2}
    assert "ngram" in str(report)
    stop = len(asks) + 3 + 2
    with pytest.raises(type(error)):
        bench(target, ["ngram"], questions, max_new_tokens=8, keep=kept.append)
    assert len(kept) == 2  # of no whole turn there is nothing to say


def test_expected_speedup_is_the_papers_formula():
    """Leviathan et al., Theorem 3.8, with α from the tokens that were judged."""
    ours = tally([Step(3, 2, 3), Step(3, 0, 1), Step(3, 3, 4)], Seconds(draft=0.9, verify=9.0))
    plain = tally([Step(0, 0, 1)] * 4, Seconds(verify=8.0))
    alpha, c = 5 / (3 + 1 + 3), 0.1 / 2
    wanted = (1 - alpha**4) / ((1 - alpha) * (3 * c + 1))
    assert expected(ours, plain) == Expected(alpha=round(alpha, 4), c=c, speedup=round(wanted, 4))
    assert expected(tally([Step(2, 2, 3)]), plain).speedup == 3  # all accepted
    found_once = tally([Step(2, 2, 3), Step(0, 0, 1)])
    assert expected(found_once, plain).speedup == 2
    seldom = tally([Step(4, 0, 1), Step(0, 0, 1)], Seconds(draft=0.8))
    assert expected(seldom, plain).c == 0.1  # of a level, not of a round
    found_nothing = tally([Step(0, 0, 1)], Seconds(draft=1.0))
    assert expected(found_nothing, plain).c == 0
    assert expected(plain, plain).speedup == 1


def test_a_speed_up_is_the_product_of_its_factors():
    """7 tokens a prompt and 6 a second, against 3: every factor by hand."""
    plain = Tally([Answered([0] * 3, 1.0, [Step(0, 0, 1)] * 2, Seconds(0.2, 0.0, 0.6, 0.2)).counted])
    drafted = Tally([Answered([0] * 7, 1.2, [Step(3, 2, 3)] * 2, Seconds(0.2, 0.2, 0.7, 0.1)).counted])
    made = factors(drafted, plain)
    assert made.tau == 3
    assert made.rows == pytest.approx(0.6 / 0.7, abs=1e-4)
    assert made.draft == pytest.approx(0.7 / 0.9, abs=1e-4)
    assert made.host == pytest.approx(0.9 / 0.75, abs=1e-4)
    assert made.prompt == pytest.approx((7 / 6 * 1.0 / 1.2) / (3 / 2 * 0.8 / 1.0), abs=1e-4)
    assert made.predicted == pytest.approx(made.measured, abs=1e-3) == pytest.approx(7 / 1.2 / 3, abs=1e-3)


@pytest.fixture(scope="module")
def report(target):
    questions = [Question("f", "1", "chat", ("a b c", "d e")), Question("f", "2", "math", ("a b a b a b",))]
    steps = []
    made = bench(target, ["ngram"], questions, max_new_tokens=12, progress=steps.append)
    assert len(steps) == 1 + 3 * 3
    return made


def test_each_turn_begins_with_another_method(target):
    """Of four methods and four texts at once the same one began always."""
    steps, asked = [], [Question("f", str(i), "c", ("a b",)) for i in range(16)]
    bench(target, ["ngram", "suffix"], asked, max_new_tokens=2, batch=4, progress=steps.append)
    begin = [step.split()[-1] for step in steps[1::4]]
    assert len({*begin}) == len(begin) == 4


def test_second_turns_begin_with_every_method(target):
    """With four methods they began with two of them only, and first turns with the two others."""
    steps, asked = [], [Question("f", str(i), "c", ("a b", "c d")) for i in range(4)]
    bench(target, ["ngram", "suffix"], asked, max_new_tokens=2, progress=steps.append)
    begin = [step.split()[-1] for step in steps[1::4]]
    assert len({*begin[::2]}) == len({*begin[1::2]}) == 4


def test_every_file_begins_with_every_method(target):
    """Of four files that take turns each began with one method always."""
    steps, asked = [], [Question(f"f{i % 4}", str(i), "c", ("a b",)) for i in range(16)]
    bench(target, ["ngram", "suffix"], asked, max_new_tokens=2, progress=steps.append)
    begin = [step.split()[-1] for step in steps[1::4]]
    assert all(len({*begin[file::4]}) == 4 for file in range(4))


def test_a_turn_without_room_is_named(target):
    """It ended a run with "the prompt has 64 tokens", whose it did not say."""
    long = Question("f", "7", "c", ("a b", " ".join(["a"] * target.window)))
    with pytest.raises(ValueError, match="question f:7, turn 2: the prompt has"):
        bench(target, "ngram", [long], max_new_tokens=2)


def test_an_infinite_margin_is_json():
    made = Difference(question="f/1", position=2, token=-1, plain=5, margin=inf)
    text = json.dumps(made.model_dump(), allow_nan=False)
    assert Difference.model_validate_json(text) == made


def test_a_call_is_stored_without_its_data():
    """Of 50,000 rows 41 MB were kept as the command; within another command they were written for nothing."""
    seen = []

    @public
    def called(rows, names):
        seen.append(current())

    called([{"text": "a"}] * 65, ["b"])
    with commanded("outside"):
        called([1], ["b"])
    assert seen[0].endswith("called(rows=list of 65, names=['b'])")
    assert seen[1] == "outside"


def test_the_report_has_designs_schema(report):
    stored = json.loads(report.to_json())
    assert stored["schema"] == report.schema_version == 1
    assert stored["command"].startswith("slipstream.bench(target=")
    assert "max_new_tokens=12" in stored["command"]
    assert {"cpu", "threads"} <= set(report.hardware)
    assert {"torch", "transformers", "slipstream", "commit"} <= set(report.versions)
    vanilla, ngram = stored["results"]
    assert (vanilla["drafter"], ngram["drafter"]) == ("vanilla", "ngram")
    for row in (vanilla, ngram):
        assert row["questions"] == 3
        assert row["identical"] is True
        assert row["divergences"] == []
        assert set(row["speedup"]) == {"vanilla", "hf_generate"}
        assert set(row["seconds"]) == {"prefill", "draft", "verify", "host"}
        assert set(row["by_category"]) == {"chat", "math"}
        # every pass commits tau tokens, and each turn's first token comes from its prompt's pass
        assert row["new_tokens"] == pytest.approx(
            row["tau"] * row["target_passes"] + row["questions"], abs=0.01
        )
    assert vanilla["tau"] == 1
    assert vanilla["speedup"]["vanilla"] == 1
    assert vanilla["new_tokens"] == ngram["new_tokens"]
    assert ngram["target_passes"] <= vanilla["target_passes"]
    assert BenchReport.from_json(report.to_json()) == report


def test_tables_show_every_drafter(target, report, capsys):
    console = Console(width=200)
    console.print(report)
    console.print(certify(target, "ngram", [Question("f", "1", "c", ("a b c",))], max_new_tokens=8))
    shown = capsys.readouterr().out
    assert all(
        word in shown
        for word in ("vanilla", "ngram", "HF generate", "τ", "host", "math", "tree-oracle", "certified")
    )


@pytest.mark.parametrize("name", ["vanilla", "hf_generate", "tree-oracle"])
def test_no_drafter_takes_the_name_of_what_it_is_held_against(target, name):
    """It was the baseline, or was certified without having run."""
    with pytest.raises(ValueError, match=f"'{name}' names what drafters are held against"):
        drafters_of({name: tiny.eagle(target)}, target)


def test_rounds_that_texts_share_are_counted_once(target):
    """A round's milliseconds were up to as many times too many as there were texts, which end apart."""
    contest = Runner.of(target, {"e": tiny.eagle(target)}, 24, 0.0, 0, batch=2)
    answers = contest.ask_all("e", tiny.prompts(9, 5))
    alone = contest.ask_all("e", tiny.prompts(9))
    made = Tally(answer.counted for answer in (*answers, *alone))
    assert made.shared == max(len(answer.rounds) for answer in answers) + len(alone[0].rounds)


def test_results_are_written_beside_and_renamed(tmp_path, monkeypatch):
    """A run that dies while writing must not take the last results with it, and its own lie elsewhere."""
    path, elsewhere = tmp_path / "deep" / "out.json", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    check_writable(str(path))
    write_json(str(path), {"a": 1})
    monkeypatch.setattr(
        "os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(ValueError, match=r"No space left.*the results are in") as told:
        write_json(str(path), {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]
    (kept,) = elsewhere.iterdir()
    assert str(told.value).endswith(str(kept))
    assert json.loads(kept.read_text()) == {"a": 2}


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "out.json"):
        with pytest.raises(ValueError, match="cannot be written"):
            check_writable(str(path))


TURNS = (("a b",), ("a c", "d e"), ("a d",))
LONG = [Question("f", str(i), "ab"[i % 2], turns) for i, turns in enumerate(TURNS)]


def test_a_run_goes_on_where_it_was_ended(target, monkeypatch):
    """Turns that were answered are not asked again, and the figures are those of one run."""
    how = {"max_new_tokens": 8, "temperature": 1.0}
    kept, ask, asks = [], Runner.ask, []

    def ending(self, method, prompt, show=None):
        asks.append(method)
        if len(asks) == stop:
            raise KeyboardInterrupt
        return ask(self, method, prompt, show)

    monkeypatch.setattr(Runner, "ask", ending)
    stop = 3 + 3 + 3 + 2  # the warm-up, the first question, and in the midst of the second
    with pytest.raises(KeyboardInterrupt):
        bench(target, "ngram", LONG, **how, keep=kept.append)
    begun = BenchReport.from_json(kept[-1].to_json())
    assert (begun.stopped, begun.prompts) == ("KeyboardInterrupt", ["f:0", "f:1"])
    asks.clear()
    steps, stop = [], 0
    made = bench(target, "ngram", LONG, **how, begun=begun, progress=steps.append)
    assert len(asks) == 3 + 3 * 3  # the second question from its first turn
    assert len(steps) == 1 + 3 * 4
    assert (made.stopped, made.turns, made.prompts) == (None, [], ["f:0", "f:1", "f:2"])
    whole = bench(target, "ngram", LONG, **how)
    for ours, theirs in zip(made.results, whole.results, strict=True):
        for figure in ("tau", "new_tokens", "target_passes", "acceptance_by_depth", "identical"):
            assert getattr(ours, figure) == getattr(theirs, figure)
    assert bench(target, "ngram", LONG, **how, begun=made) is made


def test_a_run_whose_drafter_remembers_answers_begins_anew(target, capsys):
    """Behind an interruption it drafted from fewer answers, and a run that was gone on with had another τ."""
    drafter, how, kept = "suffix:remember=1", {"max_new_tokens": 24, "temperature": 0.0}, []
    whole = bench(target, drafter, LONG, **how, keep=kept.append)
    capsys.readouterr()
    made = bench(target, drafter, LONG, **how, begun=kept[0])
    for figure in ("tau", "target_passes", "acceptance_by_depth"):
        assert getattr(made.results[-1], figure) == getattr(whole.results[-1], figure)
    told = "the run begins anew: its file does not hold the answers that suffix:remember=1 remembers\n"
    assert capsys.readouterr().err == told
    assert bench(target, drafter, LONG, **how, begun=made) is made


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"temperature": 0.5}, "temperature was 1.0, and is 0.5"),
        ({"batch": 2}, "batch was 1, and is 2"),
        ({"drafters": ["ngram", "suffix"]}, "drafters are others"),
        ({"questions": [*LONG[:2], Question("f", "2", "a", ("another",))]}, "texts was"),
        ({"max_new_tokens": 9}, "max_new_tokens was 8, and is 9"),
    ],
)
def test_another_run_is_not_gone_on_with(target, changed, told):
    how = {"drafters": ["ngram"], "questions": LONG, "max_new_tokens": 8, "temperature": 1.0}
    begun = bench(target, **how)
    with pytest.raises(ValueError, match=told):
        bench(target, **how | changed, begun=begun)


def test_a_run_goes_on_with_the_drafters_that_it_began_with(target):
    """A head that was trained on, or tuned, meanwhile: half of a line's figures were another head's."""
    how = {"questions": LONG, "max_new_tokens": 8}
    begun = bench(target, {"mine": tiny.eagle(target, "chain-3")}, **how)
    assert bench(target, {"mine": tiny.eagle(target, "chain-3")}, **how, begun=begun) is begun
    trained = tiny.eagle(target, "chain-3")
    trained.head.fc.weight.data[0, 0] += 1
    wrapped = [Auto(trained), Auto(tiny.eagle(target, "chain-3"))]
    assert marks(wrapped[0]) != marks(wrapped[1])
    for other in (tiny.eagle(target, "chain-2"), trained):
        with pytest.raises(ValueError, match="fingerprint was"):
            bench(target, {"mine": other}, **how, begun=begun)


def test_a_run_goes_on_under_the_generation_config_that_it_began_with(target, monkeypatch):
    """A penalty that was written into it meanwhile: half of the turns were other texts."""
    how = {"drafters": ["ngram"], "questions": LONG, "max_new_tokens": 8}
    begun = bench(target, **how)
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 1.5)
    with pytest.raises(ValueError, match="weights was"):
        bench(target, **how, begun=begun)


def test_texts_at_once_are_the_texts_of_one_at_a_time(target):
    """Greedy answers do not depend on the batch; Hugging Face's rows are padded on the left."""
    one, two = (bench(target, "ngram", LONG, max_new_tokens=8, batch=batch) for batch in (1, 2))
    assert two.batch == two.settings.batch == 2
    assert two.hf_generate.new_tokens == one.hf_generate.new_tokens
    for row, other in zip(two.results, one.results, strict=True):
        assert row.identical
        assert row.questions == 4
        assert (row.new_tokens, row.tau) == (other.new_tokens, other.tau)
        assert [each.group for each in row.by_question.values()] == [0, 0, 1]
        times = [each.seconds / (2 if name == "f:1" else 1) for name, each in row.by_question.items()]
        assert times[0] < row.by_question["f:1"].seconds  # its second turn was asked alone
    assert two.results[0].intervals["vanilla"] == pytest.approx((1, 1))


def test_greedy_text_is_held_to_plain_decoding_whatever_the_law(target, monkeypatch):
    """A drafter with sampled children was excused at T = 0, too, where nothing is sampled."""
    mine = {"mine": tiny.eagle(target, "chain-3", "sampled")}
    how = {"questions": LONG[:1], "max_new_tokens": 8}
    assert bench(target, mine, **how).results[1].identical is True
    assert bench(target, mine, **how, temperature=1.0).results[1].identical is None
    ask = Runner.ask

    def shortened(self, method, prompt, show=None):
        answer = ask(self, method, prompt, show)
        return replace(answer, tokens=answer.tokens[:-1]) if method == "mine" else answer

    monkeypatch.setattr(Runner, "ask", shortened)
    cut = bench(target, mine, **how).results[1]
    assert (cut.identical, cut.unexplained) == (False, 1)


def test_a_token_of_an_answer_is_no_padding(target, monkeypatch):
    """Rows of Hugging Face's are filled with a token that ends none, which an answer up to the limit may end
    with: it counted a token less."""
    rows = torch.tensor([[5, 6, 1, 0, 0], [5, 6, 1, tiny.EOS, 0]])
    monkeypatch.setattr(runner, "hf_generate", lambda *_, **__: rows)
    assert runner.hf_answers(target, [[5, 6], [5, 6]], 3, 0.0) == [[1, 0, 0], [1, tiny.EOS]]


def test_memory_is_what_the_process_held(target):
    report = bench(target, "ngram", LONG[:1], max_new_tokens=4)
    held = [row.memory_mib for row in (*report.results, report.hf_generate)]
    assert all(100 < mib < 100_000 for mib in held) or (held == [None] * 3 and sys.platform != "linux")


def test_speeds_are_of_planted_times(target, monkeypatch):
    """Ratios upside down, or a prompt's pass that is not counted."""
    ask, walls = Runner.ask, {"hf_generate": 4.0, "vanilla": 2.0, "ngram": 1.0}

    def planted(self, method, prompt, show=None):
        made = ask(self, method, prompt, show)
        assert made.wall >= made.seconds.total >= made.seconds.prefill
        assert method == "hf_generate" or made.seconds.prefill > 0
        return replace(made, wall=walls[method])

    monkeypatch.setattr(Runner, "ask", planted)
    asked = [Question("f", str(i), "c", ("a b",)) for i in range(3)]
    row = bench(target, "ngram", asked, max_new_tokens=6).results[1]
    assert (row.speedup.vanilla, row.speedup.hf_generate) == (2, 4)
    assert row.intervals["vanilla"] == pytest.approx((2, 2))
    assert row.of_files["hf_generate"].mean == 4
    assert row.tokens_per_second == row.new_tokens / 3


def test_every_speed_has_an_interval(report):
    """Over all turns, by category and by file; of one question there is none."""
    ngram = report.results[1]
    low, high = ngram.intervals["vanilla"]
    assert low <= ngram.speedup.vanilla * 1.01
    assert high >= ngram.speedup.vanilla * 0.99
    assert set(ngram.by_file["f"].intervals) == {"vanilla", "hf_generate"}
    assert ngram.by_category["math"].intervals == {"vanilla": None, "hf_generate": None}
    assert f"[{low:.2f}, {high:.2f}]" in str(report)
    assert ngram.by_question["f:1"].category == "chat"


ASKED = [Question("f", str(i), "c", (f"a b {i}",)) for i in range(3)]
SWEPT = {"temperatures": [0.0, 1.0], "batches": [1, 2], "max_new_tokens": 6}


@pytest.fixture(scope="module")
def first():
    return HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), "first")


def test_what_ends_a_sweep_between_runs_loses_none(first):
    """As Ctrl-C while the next target is loaded: without a file the first run's figures were gone."""
    kept = []

    def targets():
        yield first
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(targets(), "ngram", ASKED, max_new_tokens=4, keep=kept.append)
    assert [each.stopped for each in kept] == ["not finished"] * 3 + ["KeyboardInterrupt"]
    assert [run.stopped for run in kept[-1].runs] == [None]


def test_targets_of_one_name_are_told_apart_or_refused(first, monkeypatch):
    """A compiled target beside itself, or a second model without a name, was taken for the first one's run,
    which "cannot be gone on with". In a picture one line went through both."""
    compiled = HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), "first")
    monkeypatch.setattr(compiled, "compiles", True)

    def run(model, *given, **how):
        return bench(first, *given, **how).model_copy(update={"compiled": model.compiles})

    monkeypatch.setattr("slipstream.measure.bench.bench", run)
    made = sweep([first, compiled], "ngram", ASKED, max_new_tokens=4)
    assert [run.model for run in made.runs] == ["first, float64", "first, float64, compiled"]
    assert "first, float64, compiled" in str(made)
    other = HFTarget(deepcopy(tiny.reference("qwen2")), tiny.tokenizer(), "first")
    kept = []
    with pytest.raises(ValueError, match="two targets are called first: name each"):
        sweep([first, other], "ngram", ASKED, max_new_tokens=4, keep=kept.append)
    assert len(kept[-1].runs) == 1


def test_each_pair_is_a_run_and_a_sweep_goes_on(first):
    kept = []

    def stop(found):
        kept.append(found)
        if len(found.runs) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep([first], "ngram", ASKED, **SWEPT, keep=stop)
    begun = Sweep.from_json(kept[-1].to_json())
    assert [run.stopped for run in begun.runs] == [None, None, "KeyboardInterrupt"]
    other = HFTarget(deepcopy(tiny.reference("qwen2")), tiny.tokenizer(), "second")
    made = sweep([first, other], "ngram", ASKED, **SWEPT, begun=begun)
    places = [(run.target, run.temperature, run.batch) for run in made.runs]
    assert places == [
        (name, temperature, n) for name in ("first", "second") for temperature in (0, 1) for n in (1, 2)
    ]
    assert made.stopped is None
    with pytest.raises(ValueError, match="drafters are others"):  # the file of the whole sweep stays as it is
        sweep([first], "suffix", ASKED, **SWEPT, begun=made, keep=lambda found: pytest.fail("kept"))
    with pytest.raises(ValueError, match="drafters are others"):  # of plain decoding alone
        sweep([first], [], ASKED, **SWEPT, begun=made)
    assert sweep([first, other], ["vanilla", "ngram"], ASKED, **SWEPT, begun=made).runs == made.runs
    assert made.runs[:2] == begun.runs[:2]
    assert all(row.identical for run in made.runs for row in run.results)
    assert str(made).count("ngram") == 9  # a line of each run, and the verdict
    assert Sweep.from_json(made.to_json()) == made


def test_a_sweep_holds_runs_of_one_kind_and_says_which_did_not_end(first):
    """Runs that are not asked now stayed in it, whatever they had been asked, and it was called whole."""
    made = sweep([first], "ngram", ASKED, max_new_tokens=4)
    for other in ({"seed": 5}, {"max_new_tokens": 6}, {"questions": ASKED[:2]}):
        how = {"questions": ASKED, "max_new_tokens": 4, "temperatures": [1.0]} | other
        with pytest.raises(ValueError, match="this sweep cannot be gone on with"):
            sweep([first], "ngram", **how, begun=made)
    elsewhere = made.model_copy(update={"runs": [made.runs[0].model_copy(update={"hardware": {}})]})
    tuned = HFTarget(deepcopy(first.model), first.text.tokenizer, first.name)
    with torch.no_grad():
        tuned.model.model.norm.weight.mul_(1.5)
    others = [Question(each.file, each.id, each.category, ("another",)) for each in ASKED]
    for model, drafter, asked, begun, told in (
        (first, "ngram", ASKED, elsewhere, "hardware are others"),
        (first, "suffix", ASKED, made, "drafters are others"),
        (first, "ngram", others, made, "texts was"),
        (tuned, "ngram", ASKED, made, "two targets are called first"),
    ):
        with pytest.raises(ValueError, match=told):
            sweep([model], drafter, asked, max_new_tokens=4, temperatures=[1.0], begun=begun)
    killed = made.model_copy(update={"runs": [made.runs[0].model_copy(update={"stopped": "killed"})]})
    whole = sweep([first], "ngram", ASKED, max_new_tokens=4, temperatures=[1.0], begun=killed)
    assert whole.stopped == "killed"
