"""The scripts under benchmarks/: each one's function on a tiny model, and stored results of each."""

import json
import re
import sys
from copy import deepcopy
from pathlib import Path

import jsonschema
import pytest
import torch

import answers
import budget
import common
import confidence
import crowd
import gpu
import grammars
import heads
import kills
import matches
import perplexity
import policy
import precisions
import prefix_timing
import proposals
import race
import rows_free
import schemas
import serve
import structured
import table
import tiny
import training
import trees
from slipstream.drafters import load_drafter
from slipstream.drafters.store import save_drafter
from slipstream.kernels import ops as kernels
from slipstream.machine import hardware
from slipstream.measure.datasets import Question
from slipstream.measure.papers import reproduce, reproduce_report as reproduced
from slipstream.measure.papers.measurements import Cell
from slipstream.measure.results import BenchReport
from slipstream.measure.runner import Runner
from slipstream.targets import HFTarget, load_target

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ASKED = [
    Question(file, "1", "", (text,)) for file, text in (("a", "one two three"), ("b", "four"), ("b", "six"))
]
SMALL = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama")


@pytest.fixture(scope="module")
def runs(target, tmp_path_factory):
    """Two drafter directories."""
    home = tmp_path_factory.mktemp("runs")
    for name in ("eagle", "fasteagle"):
        drafter = getattr(tiny, name)(target, "chain-3")
        save_drafter(home / name, name, target, *drafter.pack(), {"minutes": 1.5}, dtype=None)
    return [str(home / name) for name in ("eagle", "fasteagle")]


def test_heads_share_one_verify_time_and_the_first_is_compared_with_itself(target, runs, tmp_path):
    specs = ("chain-2", "best-first-2x3", "best-first-2x4")
    report = heads.compare_heads(target, runs, ASKED[1:], specs, (1.0,), rounds=1, **SMALL)
    assert list(report.heads) == ["eagle", "fasteagle"]
    assert report.questions == {"b": 2}
    for head in report.heads.values():
        assert [(row.temperature, row.tree) for row in head.trees] == [(1.0, spec) for spec in specs]
        assert all(row.alpha is not None for row in head.trees if row.tree == "chain-2")
    assert all(row.share == 1 and row.interval == (1, 1) for row in report.heads["eagle"].trees)
    costs = report.costs["eager"]
    cost, other = (costs.heads[name]["chain-2"] for name in report.heads)
    verify, tau = (cost.verify + other.verify) / 2, report.heads["eagle"].trees[0].tau
    assert cost.expected["1.0"] == pytest.approx(
        tau * costs.plain_ms / (cost.draft + verify + cost.host), rel=0.05
    )
    assert "best-first-2x4" in str(report)
    assert heads.HeadsReport.from_json(report.to_json()) == report
    report.draw(str(tmp_path / "heads.svg"))
    assert "fasteagle" in (tmp_path / "heads.svg").read_text()


def test_masks_are_charged_their_own_wider_pass(target, runs, tmp_path):
    """Medians over the heads of a tree charged bita for a pass without its masks' rows."""
    save_drafter(tmp_path / "bita", "bita", target, *tiny.bita(target).pack(), {}, dtype=None)
    report = heads.compare_heads(
        target, [*runs, str(tmp_path / "bita")], ASKED[:1], ("chain-2",), rounds=1, **SMALL
    )
    costs = report.costs["eager"]
    cost, (row,) = costs.heads["bita"]["chain-2"], report.heads["bita"].trees
    assert row.nodes == 3 + 3 * 2  # two masks behind each node
    own = row.tau * costs.plain_ms / (cost.draft + cost.verify + cost.host)
    assert cost.expected["0.0"] == pytest.approx(own, rel=0.02)


def test_trees_of_one_head_are_held_against_the_same_answers(target, runs):
    report = trees.compare_trees(target, runs[0], ASKED, ("chain-1", "chain-2", "fig9"), rounds=1, **SMALL)
    one, two, _ = report.results
    assert [row.tree for row in report.results] == ["chain-1", "chain-2", "fig9"]
    assert report.command.startswith("trees.compare_trees(target=HFTarget, ")
    assert one.by_file.keys() == {"a", "b"}
    assert one.tau <= two.tau
    assert one.acceptance_by_depth[0] == pytest.approx(one.tau - 1, abs=1e-4)
    assert "chain-2" in str(report)


def test_proposals_are_decoded_and_paired(target, runs):
    how = {"seeds": 1, "new": 4, "temperature": 1.0}
    found = proposals.compare(target, [f"{runs[0]}:tree=chain-1"], ASKED[:2], **how)
    arms = list(found["arms"].values())
    assert [len(arm["by_question"]) for arm in arms] == [2, 2, 2]
    (ratios,) = found["ratios"].values()
    assert ratios["sampled over noise"]["ratio"] == pytest.approx(arms[2]["tau"] / arms[1]["tau"], abs=1e-3)


def test_a_race_charges_one_verify_time(target, runs):
    drafters = {Path(name).name: load_drafter(name, target) for name in runs}
    races = race.race(target, drafters, ["chain-1"], [1, 2, 3], races=2, rounds=1)
    arms = [{"tree": "chain-1", "temperature": 0.0, "tau": 1.5, "share": 1.0, "interval": [0.9, 1.1]}]
    found = race.report(races, ["chain-1"], {"heads": {name: {"trees": arms} for name in drafters}})
    own = [found["chain-1"]["heads"][name]["verify_ms"]["mean"] for name in drafters]
    assert found["chain-1"]["shared_verify_ms"]["mean"] == pytest.approx(sum(own) / 2, abs=1e-3)
    race.show(found, "eager")


def test_the_history_of_a_run_leaves_its_data_files_out(tmp_path):
    (tmp_path / "recipe.yaml").write_text("data: {files: [a.jsonl], limit: 3}\n")
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "config.json").write_text('{"training": {"minutes": 2.5}}')
    assert training.history(tmp_path) == {
        "recipe": {"data": {"limit": 3}},
        "history": [{"step": 1}, {"step": 2}],
        "minutes": 2.5,
    }


def test_the_calibration_error_is_the_mean_distance_over_bins(target, tmp_path):
    report = confidence.calibrate(target, {"eagle": tiny.eagle(target)}, ASKED, **SMALL)
    found = report.drafters["eagle"]
    assert sum(part.tokens for part in found.bins) == found.tokens > 10
    assert all(part.top_1 <= part.top_3 <= part.top_5 <= part.top_7 for part in found.bins)
    error = sum(part.tokens * abs(part.confidence - part.top_1) for part in found.bins) / found.tokens
    assert found.calibration_error == pytest.approx(error, abs=1e-4)
    assert "eagle" in str(report)
    report.plot(str(tmp_path / "confidence.svg"))


def test_matches_are_counted_at_equal_nodes(target, runs):
    """Tokens past an answer's end, an arm that forgets what it should remember, nodes beyond the limit."""
    texts = matches.answers(target, {"a": tiny.prompts(9) * 2, "b": tiny.prompts(7, 5, 11, 13)}, 12)
    arms = {(arm.drafter, arm.nodes): arm for arm in matches.alone(target, texts)}
    assert len(arms) == 4 * len(matches.NODES)
    for (name, nodes), arm in arms.items():
        assert arm.drafted <= nodes
        assert arm.tau >= arms["ngram:shortest=2", 1].tau
        assert set(arm.by_file) == {"a", "b"}
        assert bool(arm.calibration) == (name.startswith("suffix") and arm.drafted > 0)
    assert arms["suffix, remembering", 8].tau > arms["suffix", 8].tau  # the same question again
    assert [arm.nodes for arm in matches.with_a_head(target, texts, runs[0])] == [7, 7, 11, 11, 15, 15]
    assert [round(matches.cost(rows), 3) for rows in (1, 8, 12, 16, 24)] == [1, 1.2, 1.275, 1.35, 1.5]


def test_a_mode_is_proved_and_measured(target):
    proved = gpu.prove(target, gpu.UNTRAINED, "eager", max_new_tokens=6)
    assert len(proved) == 4
    assert all(proof.same for proof in proved)
    assert gpu.prove_at_once(target, max_new_tokens=6).same
    how = {"max_new_tokens": 4, "rows": (1, 4), "mib": 1, "proved": proved}
    report = gpu.measure(target, ("eager",), (8, 16), **how)
    assert report.results[0].passes_ms.keys() == {"8", "16"}
    assert "ngram at T = 0.8: the same" in str(report)
    wrong = report.model_copy(update={"proved": [proved[0].model_copy(update={"same": False})]})
    assert "NOT THE SAME" in str(wrong)
    assert (report.exactness, report.attention, report.products) == ({}, [], [])  # float64


def test_a_random_target_needs_its_device():
    """A traceback where there is no GPU."""
    with pytest.raises(ValueError, match="Unknown or missing device: 'cuda:99'"):
        gpu.random_llama("tiny", "float32", "cuda:99")


def test_whole_answers_of_every_arm(target, monkeypatch):
    """Tokens held against another group's, an arm's first call that counts, a size that nobody answers, one
    that fails and takes the others along, a result that lacks what was measured before."""
    kept, ask = [], Runner.ask_all

    def failing(contest, method, prompts):
        if (method, contest.batch, len(kept) > 9) == ("suffix", 2, True):
            raise RuntimeError("out of memory")
        return ask(contest, method, prompts)

    monkeypatch.setattr(Runner, "ask_all", failing)
    monkeypatch.setattr(answers, "find_spec", lambda name: "here")
    monkeypatch.setattr(answers, "started", Recorded)
    report = answers.race(target, ASKED, texts=(1, 2), max_new_tokens=6, keep=kept.append)
    counts = {(arm.arm, arm.texts): arm.answers for arm in report.arms}
    names = {"vanilla", "hf_generate", "auto", "ngram", "lookahead", "vLLM"}
    assert counts == {(name, 1): 3 for name in {*names, "suffix"}} | {(name, 2): 2 for name in names}
    assert report.skipped == {"suffix, 2 at once": "out of memory"}
    assert all(arm.same == arm.answers for arm in report.arms if arm.arm != "vLLM")
    assert all(arm.over_plain == [1, 1, 1] for arm in report.arms if arm.arm == "vanilla")
    assert [(arm.same, arm.tau, arm.tokens_per_second) for arm in report.arms if arm.arm == "vLLM"] == [
        (0, None, 4.0),
        (0, None, 8.0),
    ]
    assert [arm.texts for arm in report.arms] == sorted(arm.texts for arm in report.arms)
    assert [len(each.arms) for each in kept[:3]] == [1, 2, 3]
    assert answers.AnswersReport.from_json(report.to_json()) == report
    assert "suffix, 2 at once is left out: out of memory" in str(report)


class Recorded:
    """An engine's process that says two tokens in half a second."""

    def __init__(self, engine):
        assert Path(engine.options["model"], "config.json").exists()

    def ask(self, prompts, new, ends):
        assert (new, ends) == (6, True)
        return {"tokens": [[1, 2]] * len(prompts), "seconds_prompt": 0.25, "seconds_decode": 0.25}

    def close(self):
        pass


def test_whole_answers_end_when_their_time_is_over(target, tmp_path, monkeypatch, capsys):
    path = tmp_path / "answers.json"
    monkeypatch.setattr(gpu.cli, "load", lambda *given, **how: target)
    words = ["gpu.py", "--device", "cpu", "--answers", "--max-new-tokens", "4", "--limit", "1"]
    for seconds, stopped in (("60", None), ("0", "its time was over")):
        monkeypatch.setattr(sys, "argv", [*words, "--budget", seconds, "--json", str(path)])
        with pytest.raises(SystemExit) as ended:
            gpu.run(gpu.main)
        report = answers.AnswersReport.read(path)
        assert (ended.value.code or 0, report.stopped) == (0, stopped)
        assert (len(report.arms) > 5) == (stopped is None)
    monkeypatch.setattr(sys, "argv", [*words, "--shape", "tiny"])
    with pytest.raises(SystemExit) as ended:
        gpu.run(gpu.main)
    assert ended.value.code == 2
    assert "leave --shape out" in capsys.readouterr().err


@pytest.mark.skipif(not kernels.available(), reason="there is no C++ compiler")
def test_an_exact_target_is_measured_beside_another():
    """A mode that is not exact under its name; a drafter's text in an exact target that nobody compares."""
    target = gpu.random_llama("tiny", "float32", "cpu")
    report = gpu.measure(target, ("eager",), (8,), max_new_tokens=4, rows=(1, 4), mib=1)
    assert [costs.mode for costs in report.results] == ["eager", "exact, eager", "int8, eager", "int4, eager"]
    assert report.exactness.keys() == {"exact, eager"}
    assert [(proof.drafter, proof.same) for proof in report.proved_exact] == [
        ("vanilla", True),
        ("ngram", True),
    ] * 2
    assert [cost.rows for cost in report.attention] == [1, 8, 16, 32, 64] * 2
    assert {cost.what for cost in report.products} == {
        f"product of {K} by {N}" for K, N in ((64, 64), (64, 128), (128, 64), (64, 256))
    }
    assert all(cost.ours_ms > 0 < cost.torch_ms for cost in report.attention + report.products)
    assert "attention behind 2048 tokens" in str(report)
    assert gpu.GPUReport.from_json(report.to_json()) == report


def test_the_attentions_that_are_timed_say_the_same(monkeypatch):
    """Lists of keys that are not what the mask shows."""
    if not kernels.available():
        pytest.skip("there is no C++ compiler")
    said = []

    def once(what, rows, ours, theirs, device):
        mine, yours = ours[0](), theirs[0]()[0]
        said.append(torch.allclose(mine, yours, atol=1e-4))
        return gpu.Against(what=what, rows=rows, ours_ms=1, torch_ms=1)

    monkeypatch.setattr(gpu, "_against", once)
    target = gpu.random_llama("tiny", "float32", "cpu")
    gpu.attention_costs(target, (16,), (1, 12), mib=1)
    assert said == [True, True]


def test_losses_are_of_the_next_tokens(target):
    """Losses of the tokens themselves, of the first one, or of another text."""
    texts = [list(range(1, 9)), [5, 3, 5]]
    losses, likeliest = perplexity.judged(target, texts)
    want = [target.plain(torch.tensor([text]), labels=torch.tensor([text])).loss.item() for text in texts]
    assert [losses[:7].mean().item(), losses[7:].mean().item()] == pytest.approx(want, rel=1e-4)
    assert likeliest.shape == losses.shape == (9,)


def test_random_weights_need_no_tokenizer():
    target = gpu.random_llama("tiny", "float64", "cpu")
    assert target.dtype == torch.float64
    assert all(proof.same for proof in gpu.prove(target, ("ngram",), "eager", max_new_tokens=4))


def test_the_tables_of_the_page_are_those_of_the_result(tmp_path, monkeypatch, capsys):
    """As written by the command, with a pair whose figures derive.py stores too."""
    page, source = tmp_path / "drafters.md", RESULTS / "drafters.json"
    page.write_text((ROOT / "docs" / "drafters.md").read_text().replace("| `lookahead` |", "| `other` |", 1))
    pair = next(iter(json.loads(source.read_text())["derived"]["pairs"]))
    monkeypatch.setattr(sys, "argv", ["table.py", str(source), str(page), "--pair", pair])
    with pytest.raises(SystemExit) as ended:
        table.run(table.main)
    assert ended.value.code == 0
    assert page.read_text() == (ROOT / "docs" / "drafters.md").read_text()
    mean, low, high = json.loads(source.read_text())["derived"]["pairs"][pair]
    assert capsys.readouterr().out == f"{pair}: {mean:.2f} [{low:.2f}, {high:.2f}]\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["README.md"], "no place for the tables"),
        (["docs/drafters.md", "--pair", "ngram"], "takes 'OURS over THEIRS'"),
        (["no_such_page.md"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("README.md", "docs/drafters.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(sys, "argv", ["table.py", str(RESULTS / "drafters.json"), *words])
    with pytest.raises(SystemExit) as ended:
        table.run(table.main)
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_pairs_need_both_drafters_and_their_questions():
    report = BenchReport.read(RESULTS / "bench_four_sets.json")
    assert table.pair(report, "fasteagle", "fasteagle").mean == 1
    with pytest.raises(ValueError, match="no drafter 'eagle'"):
        table.pair(report, "eagle", "ngram")
    with pytest.raises(ValueError, match="by_question"):
        table.pair(BenchReport.read(RESULTS / "bench_fp32.json"), "ngram", "vanilla")


STORED = {path: heads.HeadsReport for path in RESULTS.glob("*.json") if "heads.py" in path.read_text("utf-8")}
STORED[RESULTS / "trees_compiled.json"] = trees.TreesReport


@pytest.mark.parametrize(("path", "kind"), STORED.items(), ids=[path.stem for path in STORED])
def test_a_stored_result_is_read_and_written_as_it_was(path, kind):
    report = kind.read(path)
    stored = path.read_text("utf-8")
    assert json.loads(report.to_json()) == json.loads(stored)
    named = set(re.findall(r'"tree": "([^"]+)"', stored))
    assert named
    shown = "".join(str(report).split())  # a table may fold a name
    assert all("".join(name.split()) in shown for name in named)


def test_auto_is_compared_at_equal_tokens(target, tmp_path, monkeypatch):
    """A ratio of means of ratios, prompts of another length, or arms that make other numbers of tokens."""
    assert common.ratio([(8, 1.0), (8, 3.0)], [(2, 1.0), (2, 1.0)])[0] == 2.0
    assert common.ratio([(6, 2.0)] * 4, [(6, 3.0)] * 4) == [1.5, 1.5, 1.5]
    ratio, low, high = common.ratio([(8, 1.0), (8, 3.0)], [(8, 4.0), (8, 4.0)])
    assert ratio == 2.0
    assert low <= 1.333 < 4.0 <= high
    assert common.ratio([(8, 1.0), (8, 3.0)], [(8, 2.0), (8, 6.0)]) == [2.0, 2.0, 2.0]
    lines = common.texts_behind([[1, 2, 3], [4, 5], [6]], 4, 20)
    assert {len(line) for line in lines} == {20}
    assert [line[-1] for line in lines] == [3, 5, 6, 3]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(policy, "TURN", 2)
    monkeypatch.setattr(policy, "NEW", 16)
    asked = common.texts_behind(tiny.prompts(9, 7), 2, 8)
    groups = [(policy.read(target, load_drafter("auto", target), asked), asked)] * 2
    for temperature in (0.0, 1.0):
        found = policy.cell(target, groups, temperature)
        assert {"plain", "auto"} < set(found["tokens_per_second"])
        assert len(found["tokens_per_second"]) == 3
        assert found["stretches"] == 2 * 2
        assert found["best"] != "auto"


def test_precisions_race_in_turns(target, monkeypatch):
    """A ratio the other way round; laps that are to be left out; one that is first in every lap."""
    assert precisions.over([2.0, 9.0, 4.0], [1.0, 3.0, 2.0])[0] == 2.0
    racers, wrote = [precisions.Racer(target, 16) for _ in range(2)], []
    monkeypatch.setattr(precisions.Racer, "write", lambda racer: wrote.append(racers.index(racer)))
    precisions.race(racers, 4)
    assert [len(times) for racer in racers for times in racer.passes.values()] == [4] * 8
    assert wrote[::2] == [0, 1, 0, 1, 0, 1, 0]


def test_a_round_spreads_over_the_tokens_that_it_made(monkeypatch):
    monkeypatch.setattr(policy, "NEW", 16)
    arm = policy.Arm(None, made=[0, 4, 12, 20], spent=[0.0, 1.0, 2.0, 6.0])
    assert arm.stretches(1) == [(8, 1.5), (8, 2.5)]


def test_forked_engines_decode_what_one_that_read_the_prompts_does(target):
    """Arms that share caches, or a sampler of another temperature."""
    asked, auto = common.texts_behind(tiny.prompts(9, 7), 2, 12), load_drafter("auto", target)
    engine = policy.read(target, auto, asked)
    for temperature in (0.0, 1.0):
        arms = [policy.Arm(policy.forked(engine, asked, temperature, each)) for each in (None, None, auto)]
        arms[2].spec = auto.candidate_trees[2]
        lines = []
        for arm in arms:
            line = ["", ""]
            while min(map(len, line)) < 12:
                for each in arm.engine.step(spec=arm.spec):
                    line[each.number] += "".join(map(chr, each.committed))
            lines.append([text[:12] for text in line])
        assert lines[0] == lines[1] == lines[2]
    assert engine.lengths == [12, 12]


@pytest.mark.parametrize(
    ("result", "code", "told"), [("policy_zen4_all.json", 0, "568.9"), ("peers.json", 2, "name another file")]
)
def test_cells_that_are_there_are_not_made_again(result, code, told, tmp_path, monkeypatch, capsys):
    """A result that holds every cell that is asked for needs no model, and one of another kind is refused."""
    path = tmp_path / result
    path.write_bytes((RESULTS / result).read_bytes())
    cells = ["--precision", "bfloat16", "--passes", "compiled", "--batch", "8"]
    words = ["policy.py", "nowhere", "--questions", "none.jsonl", "--json", str(path), *cells]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        policy.run(policy.main)
    assert (ended.value.code or 0) == code
    assert told in " ".join("".join(capsys.readouterr()).split())
    assert path.read_bytes() == (RESULTS / result).read_bytes()


def test_undecided_cells_are_made_again_on_more_texts(target, tmp_path, monkeypatch):
    """All cells made again, those that were decided, or the same ones with every call."""
    path, texts = tmp_path / "policy.json", []
    ratio, speeds = [0.98, 0.94, 1.02], {"plain": 100.0, "auto": 98.0}
    stored = policy.PolicyReport.read(RESULTS / "policy_zen4_all.json")
    before = [
        each.model_copy(update={"over_plain": ratio}) if each.texts == 8 and i % 9 == 0 else each
        for i, each in enumerate(stored.cells)
    ]
    here = {"hardware": hardware(), "target": target.name}
    stored.model_copy(update={"cells": before, **here}).write(str(path))
    undecided = [each.place for each in before if not each.enough]
    assert 0 < len(undecided) < len(before)
    found = {"tokens_per_second": speeds, "over_plain": ratio, "best": "plain", "over_best": ratio}

    def cell(target, groups, temperature):
        texts.append(sum(len(some) for _, some in groups))
        return {"stretches": len(groups) * policy.NEW // policy.STRETCH, **found}

    monkeypatch.setattr(policy, "loaded", lambda *asked: target)
    monkeypatch.setattr(policy, "prompts_by_file", lambda *asked: {"file": tiny.prompts(9, 7)})
    monkeypatch.setattr(policy, "read", lambda *asked: None)
    monkeypatch.setattr(policy, "cell", cell)
    words = ["policy.py", "tiny", "--questions", "none.jsonl", "--json", str(path), "--texts", "24"]
    monkeypatch.setattr(sys, "argv", words)
    for _ in range(2):  # the second time there is nothing to do
        with pytest.raises(SystemExit):
            policy.run(policy.main)
    assert texts == [24] * len(undecided)
    after = policy.PolicyReport.read(path).cells
    assert [each.place for each in after] == [each.place for each in before]
    assert [each.place for each, was in zip(after, before, strict=True) if each != was] == undecided
    assert {each.texts for each in after if each.place in undecided} == {24}


def test_a_server_beside_its_engine_and_generate(tmp_path):
    """The clients' process, and texts that must be the same three ways."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chatting = HFTarget(deepcopy(tiny.reference("llama")), tokenizer, "tiny")
    asked = ["abcabc", "one", "two words"]
    found = serve.compare(chatting, load_drafter("ngram"), asked, 6, turns=1, alone=2)
    assert (found["clients"], found["new_tokens"], found["prompt_tokens"]) == (3, 18, 6)
    assert all(found["server_over"].values())
    assert found["first_token_ms"] > 0


def test_a_crowd_says_what_each_says_alone(target):
    """An arm that compares texts with themselves, or a session that nobody joins late."""
    wanted = crowd.texts(tiny.prompts(5, 9, 30, 12), 20)
    plain = [crowd.alone(target, each) for each in wanted]
    assert len({each.sampling.temperature for each in wanted}) > 2
    assert [len(tokens) for tokens in plain] == [each.new for each in wanted]
    for name in ("fasteagle", "auto"):
        assert crowd.together(target, tiny.DRAFTERS[name](target, []), wanted, rows=5) == plain
    seen = crowd.level(target, tiny.prompts(5, 9), "ngram", 200)
    assert seen["whole"] == 200
    assert len(seen["mib_by_hundred"]) == 2


def test_schemas_and_prompts_are_the_same_again():
    """And each schema is one, of every kind that the docs name."""
    made = schemas.pairs(40)
    assert made == schemas.pairs(60)[:40]
    assert made != schemas.pairs(40, seed=1)
    assert {pair.kind for pair in made} == set(schemas.KINDS)
    for pair in made:
        jsonschema.Draft202012Validator.check_schema(pair.schema)
    text = json.dumps([pair.schema for pair in made], ensure_ascii=False)
    assert all(word in text for word in ("$ref", "anyOf", "enum", "prefixItems", "名前", "maxItems"))


def test_answers_within_schemas_are_counted():
    """SmolLM2, as no tiny model has the letters of JSON. A wrong answer would count as one."""
    smollm2 = load_target("smollm2", "bfloat16")
    pair = schemas.Pair("mine", schemas.record({"a": {"enum": ["b"]}, "cd": {"type": "boolean"}}), "Say a.")
    plain, drafted = structured.compare(smollm2, [pair, pair], ["suffix"], 1.0, 24, 2)
    for row in (plain, drafted):
        assert (row["answers"], row["finished"], row["valid"], row["identical"]) == (2, 2, 2, 2)
    assert drafted["tau"] > 2 > plain["tau"] == 1
    assert structured.compare(smollm2, [pair], [], 0.0, 24, 1)[1]["finished"] == 0  # without the grammar
    assert "is not" in structured.fault(pair, '{"a": "c", "cd": true}')
    assert structured.fault(pair, '{"a": "b", "cd": true}') is None
    assert structured.fault(pair, "{") is not None
    kept = grammars.keeps(smollm2, grammars.Guidance(smollm2, 2))
    assert set(kept.values()) <= {"kept", "refused"}  # nothing goes wrong in silence
    assert list(kept.values()).count("kept") >= 37  # and an engine that breaks refuses all


def test_a_shared_budget_keeps_the_likeliest_nodes_of_all_texts():
    """Roots that are dropped, a budget that is another, or a child without its parent."""
    sure, unsure = [0.0, -0.1, -0.2, -0.3], [0.0, -1.0, -2.0, -3.0]
    kept = budget.likeliest(torch.tensor([sure, unsure]), 2)
    assert kept.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert budget.likeliest(torch.tensor([unsure]), 3).tolist() == [[True, True, True, False]]


def test_a_shared_budget_is_compared_with_the_same_tree_for_all(target, runs):
    rows = budget.compare(target, runs[1], ASKED, 2, 8, 2)
    assert [row["nodes"] for row in rows] == list(budget.BUDGETS)
    for row in rows:
        assert 1 <= row["same"] <= row["nodes"] + 1
        assert row["gain"][0] == pytest.approx(row["shared"] / row["same"], abs=1e-3)
        assert row["gain"][1] <= row["gain"][0] <= row["gain"][2]


def test_what_a_killed_run_leaves_is_compared_by_field(tmp_path):
    """A difference behind fields of the clock, or in a file that is missing."""
    for name, tau, seconds in (("a", 1.5, 1), ("b", 1.5, 2), ("c", 1.6, 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "r.json").write_text(
            json.dumps({"results": [{}, {"tau": tau, "seconds": seconds}]})
        )
    (tmp_path / "c" / "more.jsonl").write_text("{}")
    a, b, c = ({Path(file).name: each for file, each in kills.left(tmp_path, name).items()} for name in "abc")
    assert kills.differences(a, b) == []
    assert kills.differences(a, c) == ["more.jsonl", "r.json.results.1.tau"]


def test_no_kill_of_the_stored_result_made_a_difference():
    report = kills.Kills.read(RESULTS / "kills.json")
    assert report.kills == sum(row.kills for row in report.rows)
    assert all(row.ended and not row.different for row in report.rows)


def test_the_time_to_the_first_token_tells_nothing_of_another_salt(monkeypatch):
    """With a clock that counts the tokens which a pass reads."""
    read, call = [0], HFTarget.__call__

    def counted(self, tree, *args, **how):
        read[0] += tree.nodes
        return call(self, tree, *args, **how)

    monkeypatch.setattr(HFTarget, "__call__", counted)
    monkeypatch.setattr(prefix_timing, "perf_counter", lambda: read[0])
    found = prefix_timing.told(tiny.target("llama"), tokens=32, turns=2)
    own, other = found["same_salt"], found["other_salt"]
    assert own["all_ms"] < own["half_ms"] < own["nothing_ms"] == 62_000
    assert own["all_is_told"] == own["half_is_told"] == 1.0
    assert {other[f"{what}_ms"] for what in ("all", "half", "nothing")} == {62_000}
    assert other["all_is_told"] == other["half_is_told"] == 0.5


def test_rows_that_are_free_cost_what_another_machine_measured():
    """A chain of three guesses in two rounds: four rows cost the next larger pass that was timed, a guess a
    layer and a head, one that is drafted in one pass its layers alone, and a mask token nothing."""
    columns = [*reproduce.RACE_COLUMNS]
    figures = dict.fromkeys(columns, 7.0) | {"tokens": 5.0, "rounds": 2.0, "levels": 6.0, "plain rounds": 4.0}
    for drafter, seconds in (
        ("eagle:tree=chain-3", 3.6),
        ("fasteagle:tree=chain-3", 3.2),
        ("medusa:tree=chain-3", 2.8),
        ("bita:tree=chain-3", 2.2),
    ):
        cell = Cell(
            drafter=drafter, asked="a", temperature=0, batch=1, how="race", columns=columns,
            questions={"q": [*figures.values()]},
        )  # fmt: skip
        made = rows_free.computed(cell, 4, {1: 1.0, 8: 1.1, 16: 1.2}, layer=2 / 15, lm_head=0.1)
        one = dict(zip(made.columns, made.questions["q"], strict=True))
        assert (one["tokens"], one["plain seconds"]) == (5.0, 4.0)
        assert one["seconds"] == pytest.approx(seconds)
    with pytest.raises(ValueError, match="a tree of 17 rows; passes of at most 16 were timed"):
        rows_free.cost_of(17, {1: 1.0, 16: 1.2})


def test_what_is_stored_of_free_rows_follows_from_the_raced_rounds():
    found = rows_free.RowsFree.read(RESULTS / "rows_free.json")
    report = reproduced.ReproduceReport.read(RESULTS / found.of)
    made = rows_free.compare(report, found.passes, found.rows, found.layer, found.head)
    assert made == {"relations": found.relations, "speeds": found.speeds}
