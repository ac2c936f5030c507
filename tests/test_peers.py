"""benchmarks/peers.py, engines.py: a run with tiny models, and what is said of engines that are not there."""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch

import busy
import engines
import peer_worker
import peers
import table
import throughput
import tiny
from slipstream import HFTarget, generate, load_drafter, load_target
from slipstream.engine.memory import GIB, memory
from slipstream.measure.datasets import Question
from slipstream.results import heading

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NEW = 6
ASKED = [Question(file, "1", "", (text,)) for file, text in (("a", "one two three"), ("b", "four"))]
ASKED += [Question(file, "2", "", (text,)) for file, text in (("a", "five"), ("b", "six seven"))]
ECHO = """
import json, sys
print(json.dumps({"fake": "1"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["new"] == 0:
        sys.exit("RuntimeError: no more\\n")
    print(json.dumps({"error": "too many"} if asked["new"] > 9 else asked), flush=True)
"""


class Inside:
    """An engine in this process."""

    def __init__(self, engine):
        if engine.environment or "quantize" in engine.options:
            raise ValueError("it is not here")
        self.engine, self.versions = getattr(peer_worker, engine.kind)(**engine.options), {"torch": "1"}
        self.asked = []

    def ask(self, **request):
        self.asked.append(request)
        return self.engine.answer(**request).answer()

    def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny model on the disk, whose answers would end after their second token."""
    made = HFTarget(tiny.build(tiny.FAMILIES["llama"]), tiny.tokenizer())
    tokens = generate(made, "one two three", max_new_tokens=3, temperature=0.0, eos_token_ids=()).tokens
    made.model.generation_config.eos_token_id = tokens[1]
    home = tmp_path_factory.mktemp("target")
    made.save(home)
    return load_target(home, "float64")


@pytest.fixture(scope="module")
def run(target):
    """The report of a run with every engine that this process can be, and these engines."""
    started = []

    def start(engine):
        started.append(Inside(engine))
        return started[-1]

    how = {"max_new_tokens": NEW, "compiles": False, "start": start}
    return peers.compare(target, ["vanilla", "ngram", "nothing"], ASKED, **how), started


def test_every_engine_says_the_same_in_float64(run):
    report, _ = run
    names = ["Slipstream, vanilla", "Slipstream, ngram"]
    names += [f"Hugging Face, {how}" for how in ("plain", "prompt lookup", "assisted")]
    assert [arm.arm for arm in report.arms] == names
    assert report.prompts == {"a": 2, "b": 2}
    for arm in report.arms:
        assert [each.agree for each in arm.by_question.values()] == [NEW] * len(ASKED)
        assert [each.new_tokens for each in arm.by_question.values()] == [NEW] * len(ASKED)
        assert all(0 < each.seconds_prompt < each.seconds for each in arm.by_question.values())
        assert arm.by_file.keys() == {"a", "b"}
        rates = [pace.tokens_per_second for pace in arm.by_file.values()]
        assert arm.speed == pytest.approx(sum(rates) / 2, abs=0.01)
    assert report.arms[0].over_plain.mean == 1


def test_busy_neighbours_come_and_go(target, monkeypatch):
    """Figures of a quiet machine in the column of a busy one, or neighbours that outlive the run."""
    answers, counts = Inside.ask, list[int]()

    class Neighbour:
        def __init__(self, command, **how):
            running.append(self)

        def kill(self):
            running.remove(self)

        def wait(self): ...

    running = list[Neighbour]()
    monkeypatch.setattr(busy, "subprocess", SimpleNamespace(Popen=Neighbour))
    monkeypatch.setattr(busy, "sleep", lambda seconds: None)
    monkeypatch.setattr(
        Inside, "ask", lambda self, **how: counts.append(len(running)) or answers(self, **how)
    )
    report = busy.measure(target, [0, 2], 2, NEW, start=Inside)
    arms = ["Slipstream, vanilla", "Slipstream, one thread, vanilla", "Hugging Face, plain"]
    assert [(cell.arm, cell.neighbours) for cell in report.cells] == [
        (arm, n) for n in (0, 2) for arm in arms
    ]
    assert counts == [0] * 3 + [0] * 6 + [2] * 6
    assert running == []
    assert all(speed > 0 for cell in report.cells for speed in cell.tokens_per_second)
    assert "llama.cpp Q4_1, plain is left out: it is not here" in str(report)


def test_what_is_missing_is_said_in_a_line(run):
    report, _ = run
    assert "Unknown drafter: 'nothing'" in report.skipped.pop("Slipstream, nothing")
    assert set(report.skipped.values()) == {"it is not here"}
    assert {"OpenVINO int8, plain", "llama.cpp Q4_1, plain", "vLLM, n-gram"} <= report.skipped.keys()
    assert "\nvLLM, plain is left out: it is not here" in str(report)


def test_only_named_engines_answer(target):
    """A minute of compiling for engines that nobody asked for."""
    with pytest.raises(ValueError, match=r"Unknown engine: 'llamas'\. Available: Slipstream, Slipstr"):
        peers.compare(target, ["vanilla"], ASKED, only=["llamas"])
    how = {"max_new_tokens": NEW, "compiles": False, "start": Inside}
    report = peers.compare(target, ["vanilla"], ASKED, only=["Slipstream"], **how)
    assert [arm.arm for arm in report.arms] == ["Slipstream, vanilla"]
    assert report.skipped == {}


def test_engines_are_asked_in_turn_and_closed(run):
    """The order rotates: no arm is always the first behind another."""
    _, started = run
    ours, theirs = started
    assert all(engine.closed for engine in started)
    assert [request["new"] for request in theirs.asked[:4]] == [peers.WARM_UP] * 3 + [NEW]
    drafters = [request["drafter"] for request in ours.asked]
    assert drafters[:5] == ["vanilla", "ngram", "nothing", "ngram", "vanilla"]
    assert len(drafters) == 3 + 2 * len(ASKED)


def test_a_result_is_stored_drawn_and_read_back(run, tmp_path):
    report, _ = run
    path = tmp_path / "peers.json"
    report.write(str(path))
    assert peers.PeersReport.read(path) == report
    stored = json.loads(path.read_text())
    assert stored["command"].startswith("peers.compare(") or stored["command"] == ""
    assert stored["arms"][0].keys() >= {"arm", "speed", "over_plain", "by_file", "by_question", "versions"}
    report.draw(str(tmp_path / "peers.svg"))
    assert "Hugging Face, assisted" in (tmp_path / "peers.svg").read_text()


def test_an_arm_that_fails_is_left_out_from_then_on():
    class Failing:
        versions: dict[str, str] = {}  # noqa: RUF012
        left = 2

        def ask(self, prompts, new):
            self.left -= 1
            if self.left < 0:
                raise ValueError("out of memory")
            return {"tokens": [[0] * new for _ in prompts]}

    arms, skipped = {"a": engines.Way(Failing(), {}), "b": engines.Way(Failing(), {})}, {}
    arms["a"].answers.left = 9
    made = peers.rounds(arms, [([1], 2)] * 4, skipped, lambda _: None)
    assert (made.keys(), skipped) == ({"a"}, {"b": "out of memory"})
    assert len(made["a"]) == 3


def stops(pid):
    """Whether a process is stopped within ten seconds: the signal takes its time."""
    until = monotonic() + 10
    while os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is None:
        if monotonic() > until:
            return False
        sleep(0.01)
    return os.waitid(os.P_PID, pid, os.WSTOPPED) is not None


def test_a_worker_is_stopped_while_it_is_not_asked():
    worker = engines.Worker([sys.executable, "-c", ECHO], {})
    assert worker.versions == {"fake": "1"}
    assert stops(worker.process.pid)
    assert worker.ask(new=3, prompt=[1]) == {"new": 3, "prompt": [1]}
    assert stops(worker.process.pid)
    with pytest.raises(ValueError, match=r"^too many$"):
        worker.ask(new=10)
    with pytest.raises(ValueError, match=r"^RuntimeError: no more$"):
        worker.ask(new=0)
    worker.close()
    assert worker.process.returncode


def test_an_environment_is_made_once_or_its_error_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = tmp_path / "slipstream" / "peers" / "openvino"
    fine = [sys.executable, "-c", f"import pathlib; pathlib.Path({str(home)!r}).mkdir()"]  # fails when there
    monkeypatch.setattr(engines, "steps", lambda *_: [fine])
    assert engines.environment("openvino") == engines.environment("openvino") == str(home / "bin" / "python")
    wrong = [sys.executable, "-c", "raise SystemExit('ERROR: No matching distribution\\nnotice: more')"]
    monkeypatch.setattr(engines, "steps", lambda *_: [wrong])
    with pytest.raises(
        ValueError, match=r"^its environment cannot be made: ERROR: No matching distribution$"
    ):
        engines.environment("openvino")
    monkeypatch.setattr(engines, "steps", lambda *_: [["no-such-program"]])
    with pytest.raises(ValueError, match=r"^no-such-program cannot be run"):
        engines.environment("openvino")


def test_environments_are_pinned(tmp_path):
    assert engines.steps("vllm", tmp_path)[0][:1] == ["make"]
    for name in engines.RECIPES:
        venv, *calls = engines.steps(name, tmp_path)
        wanted = [word for call in calls for word in call if word[0] not in "-/"]
        assert venv[1:3] == ["-m", "venv"]
        assert all("==" in word or word in ("pip", "install") for word in wanted)
    assert f"torch=={torch.__version__.partition('+')[0]}" in engines.steps("openvino", tmp_path)[1]


def test_llama_cpp_needs_a_gguf_file(target, tmp_path):
    (made,) = (
        each for each in engines.engines(target, tmp_path, ["vanilla"], 2) if each.environment == "llama.cpp"
    )
    with pytest.raises(ValueError, match="it reads GGUF files"):
        engines.started(made)


def test_the_stored_result_is_read_and_its_table_is_the_pages(tmp_path):
    source, page = RESULTS / "peers_zen4.json", tmp_path / "peers.md"
    assert json.loads(peers.PeersReport.read(source).to_json()) == json.loads(source.read_text("utf-8"))
    made = (ROOT / "docs" / "peers.md").read_text("utf-8")
    page.write_text(made.replace("| Slipstream, vanilla |", "| other |"), "utf-8")
    table.write_tables(str(source), str(page))
    assert page.read_text("utf-8") == made


def crowd(target, home):
    """Engines of this process that answer many prompts."""
    made = engines.crowded(target, home, ["vanilla", "ngram"], 2, 4, compiles=False)
    return {
        name: engines.Way(Inside(engine), options)
        for engine in made
        if not engine.environment
        for name, options in engine.named().items()
    }


def test_many_texts_at_once_say_what_each_says_alone(target, tmp_path):
    """Padding that is read, answers in another order, or an arm that makes fewer tokens."""
    prompts = tiny.prompts(9, 5, 12)
    for answers, options in crowd(target, tmp_path).values():
        made = answers.ask(prompts=prompts, new=NEW, **options)
        alone = [answers.ask(prompts=[prompt], new=NEW, **options)["tokens"][0] for prompt in prompts]
        assert made["tokens"] == alone
        assert made["seconds_prompt"] > 0 < made["seconds_decode"]


def test_throughput_of_all_arms_and_of_as_many_texts_as_fit(target, tmp_path):
    arms, prompts = crowd(target, tmp_path), tiny.prompts(9, 5, 12)
    turns = throughput.groups(prompts, 2, 8)
    assert [len(each) for each in turns] == [2] * (throughput.TEXTS // 2)
    assert {len(prompt) for each in turns for prompt in each} == {8}
    made = throughput.race(arms, dict.fromkeys(arms, turns), NEW)
    assert made.keys() == {"Slipstream, vanilla", "Slipstream, ngram", "Hugging Face, plain"}
    assert made["Slipstream, vanilla"].over_plain == [1, 1, 1]
    assert all(each.behind > 0 < each.tokens_per_second for each in made.values())
    text = memory(target, load_drafter("vanilla", target), 8 + NEW).text
    fit = throughput.fitting(target, ["vanilla"], 3.5 * text / GIB, prompts, 8, NEW)
    assert [len(each) for each in fit["Slipstream, vanilla"]] == [3] * (throughput.TEXTS // 3)
    largest = throughput.race({name: arms[name] for name in fit}, fit, NEW)
    fewer = {name: arm for name, arm in made.items() if name != "Hugging Face, plain"}  # it was not there
    cells = [
        throughput.Cell(context=8, batch=1, memory=0.0, new=NEW, arms=fewer),
        throughput.Cell(context=8, batch=2, memory=0.0, new=NEW, arms=made),
        throughput.Cell(context=8, batch=0, memory=0.25, new=NEW, arms=largest),
    ]
    report = throughput.ThroughputReport(**heading(target), skipped={"vLLM": "it is not here"}, cells=cells)
    report.write(str(tmp_path / "throughput.json"))
    assert throughput.ThroughputReport.read(tmp_path / "throughput.json") == report
    shown = str(report)
    assert "in 0.25 GiB" in shown
    assert shown.count("(3)") == 1
    assert "vLLM is left out" in shown
    report.draw(str(tmp_path / "throughput.svg"))
    assert "Hugging Face, plain" in (tmp_path / "throughput.svg").read_text()


def test_an_engine_that_cannot_be_had_is_left_out(target, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "steps", lambda *_: [["no-such-program"]])
    made = engines.crowded(target, tmp_path, ["nothing"], 2, 4, compiles=False)
    with ExitStack() as last:
        arms, skipped = engines.begun(made[2:], last, print)
    assert (arms, skipped) == (
        {},
        {"vLLM, plain": "no-such-program cannot be run: No such file or directory"},
    )
