"""Each fault is planted, and named by its check and by no other: faults of heads and texts in SmolLM2 with
the head that ships, faults of the machine in planted times."""

import json
import shutil
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from slipstream import load_target
from slipstream.drafters.store import find_drafter, restored
from slipstream.measure.datasets import Question, load_questions
from slipstream.measure.doctor import head_checks, machine_checks
from slipstream.measure.doctor.diagnosis import Diagnosis
from slipstream.measure.doctor.doctor import CHECKS, DoctorReport, Finding, doctor
from slipstream.measure.doctor.head_fit import unnormed
from slipstream.measure.tune import Costs
from slipstream.spec import Spec
from slipstream.targets import HFTarget

OF_HEADS = [fault for fault, check in CHECKS.items() if check.__module__ == head_checks.__name__]
TREES = (machine_checks.shallow, machine_checks.oversized, machine_checks.crowded)
OF_TREES = [fault for fault, check in CHECKS.items() if check in TREES]
ASKED = load_questions(limit=6)
CHATML = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
BARE = f"{{% for m in messages %}}{CHATML}{{% endfor %}}<|im_start|>assistant\n"  # without a system prompt
LLAMA = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2", "bfloat16")


@pytest.fixture(scope="module")
def recorded(target):
    """Answers that all of these tests share, with every state that one of their heads may read."""
    diagnosis = Diagnosis(target, Spec.parse("eagle"), ASKED, new=20)
    return diagnosis.recorded


def test_a_target_without_a_tokenizer_is_refused():
    """An assertion of ours failed."""
    bare = HFTarget(deepcopy(tiny.reference("llama")), None, "bare")
    with pytest.raises(ValueError, match="target bare has no tokenizer"):
        doctor(bare, "ngram", ASKED)


def found(diagnosis: Diagnosis, faults) -> list[str]:
    return [fault for fault in faults if Finding.of(fault, diagnosis).verdict == "found"]


def planted(target, tmp_path, config=None, tensors=None) -> Spec:
    """The head that ships, with another config.json or other tensors."""
    home = tmp_path / "planted"
    shutil.copytree(find_drafter("eagle", target), home)
    about = json.loads((home / "config.json").read_text())
    weights = restored(load_file(home / "model.safetensors"))  # of 8 bits
    if config is not None:
        config(about)
    if tensors is not None:
        tensors(weights)
    (home / "config.json").write_text(json.dumps(about))
    save_file(weights, home / "model.safetensors")
    return Spec.parse(str(home))


def examined(target, recorded, spec=None, **how) -> Diagnosis:
    diagnosis = Diagnosis(target, spec or Spec.parse("eagle"), ASKED, new=20, **how)
    diagnosis.recorded = recorded
    return diagnosis


def lower(config):
    config["taps"] = ["input of block 29"]


def short_based(config):
    config["head"]["rope_theta"] = 10000.0


def foreign(weights):
    """Reads states in another order of their entries, as of another target with the same sizes."""
    order = torch.randperm(576, generator=torch.Generator().manual_seed(0))
    parts = weights["fc.weight"].split(576, 1)
    weights["fc.weight"] = torch.cat([part[:, order] for part in parts], 1).contiguous()


def rare(weights):
    """The tokens that come last in the vocabulary, which English hardly uses."""
    weights["draft_vocab"] = torch.arange(49152 - 8192, 49152, dtype=torch.int32)


def echoing(weights):
    """What a head learns whose labels stand one token early: f_i, which says t_{i+1}."""
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    copied = torch.cat([torch.zeros(576, 576), torch.eye(576)], 1)
    weights["fc.weight"] = copied.to(weights["fc.weight"].dtype)


def test_a_sound_head_has_no_fault(target, recorded):
    assert found(examined(target, recorded), OF_HEADS) == []


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        ({"config": lower}, "tap shifted by one block"),
        ({"config": short_based}, "rope base wrong"),
        ({"tensors": foreign}, "another target's drafter"),
        ({"tensors": rare}, "draft vocabulary of other texts"),
        ({"tensors": echoing}, "loss mask off by one"),
    ],
)
def test_a_fault_of_a_head_is_named_and_no_other(target, recorded, tmp_path, plant, fault):
    """The record holds the states that the sound head and its neighbours read, so does the planted one's."""
    spec = planted(target, tmp_path, **plant)
    diagnosis = examined(target, recorded, spec)
    if plant.get("config") is lower:
        del diagnosis.recorded  # block 28's states, too
    assert found(diagnosis, OF_HEADS) == [fault]


def test_states_without_the_final_norm_are_named(target, recorded):
    bare = recorded.with_states("final", unnormed(recorded, target))
    diagnosis = examined(target, bare)
    (fault,) = [Finding.of(each, diagnosis) for each in OF_HEADS if CHECKS[each] is head_checks.norm]
    assert fault.verdict == "found"
    assert "final norm applied" in fault.remedy
    assert found(diagnosis, OF_HEADS) == ["final norm missing"]


@pytest.mark.parametrize(
    ("template", "fault"), [(LLAMA, "wrong chat template"), (BARE, "missing system prompt")]
)
def test_a_fault_of_the_framing_is_named(target, recorded, monkeypatch, template, fault):
    monkeypatch.setattr(target.text.tokenizer, "chat_template", template)
    framed = [each for each in OF_HEADS if CHECKS[each] in (head_checks.template, head_checks.system)]
    assert found(examined(target, recorded), framed) == [fault]


def test_heat_and_length_are_named(target, recorded, monkeypatch):
    """The head that ships was trained on greedy answers in texts of 384 tokens. It bears longer ones, so what
    it reads behind 384 tokens is made worthless: each state stands where another one stood."""
    used = [each for each in OF_HEADS if CHECKS[each] in (head_checks.context, head_checks.temperature)]
    hot = examined(target, recorded, temperature=1.0)
    assert found(hot, used) == ["temperature above training"]
    long = examined(target, recorded, context=1200)
    assert found(long, used) == []
    record = Diagnosis.record

    def lost(diagnosis: Diagnosis, *texts):
        made = record(diagnosis, *texts)
        states = made.tapped(("final",)).clone()
        states[:, 384:] = states[:, 384:].roll(7, dims=1)
        return made.with_states("final", states)

    monkeypatch.setattr(Diagnosis, "record", lost)
    assert found(long, used) == ["context past training length"]


class Planted(Costs):
    """Costs as they are given: of a pass by its rows, and of a step in depth; a plain pass costs 1."""

    depth = 5

    def __init__(self, row: float = 0.01, step: float = 0.05) -> None:
        self.row, self.deeper = row, step

    def speedup(self, tau: float, rows: int, depth: int) -> float:
        return tau / (1 + self.row * (rows - 1) + self.deeper * depth)


RATES = [[0.7, 0.1, 0.05]] * 5


def grown(tree: str, tau: float, costs: Planted, batch: int = 1, crowd: Planted | None = None) -> Diagnosis:
    """A drafter of a tree that is accepted and costs as given."""
    target = tiny.target("llama")
    diagnosis = Diagnosis(target, Spec.parse("eagle"), [Question("f", "1", "letters", ("a b",))], batch=batch)
    diagnosis.drafter = diagnosis.proposer = tiny.eagle(target, tree)
    diagnosis.rates, diagnosis.predicted = RATES, SimpleNamespace(tau=tau)
    diagnosis._costs = {1: costs, 2: costs, 4: costs, batch: crowd or costs}
    return diagnosis


@pytest.mark.parametrize(
    ("diagnosis", "faults"),
    [
        (lambda: grown("best-first-4x8", 2.6, Planted()), []),
        (lambda: grown("chain-1", 1.7, Planted()), ["depth too small"]),
        (lambda: grown("best-first-5x48", 2.9, Planted(row=0.05)), ["tree too large"]),
        (lambda: grown("best-first-4x8", 2.6, Planted(), 8, Planted(row=0.5)), ["batch past break-even"]),
        (lambda: grown("chain-2", 1.2, Planted(row=1.0)), ["batch past break-even"]),
    ],
)
def test_faults_of_trees_follow_from_what_they_cost_and_bring(diagnosis, faults):
    assert found(diagnosis(), OF_TREES) == faults


def test_a_batch_is_told_how_many_texts_pay():
    diagnosis = grown("best-first-4x8", 2.6, Planted(), batch=8, crowd=Planted(row=0.5))
    assert "at most 4 texts" in machine_checks.crowded(diagnosis).remedy


@pytest.fixture
def machine(monkeypatch):
    """A diagnosis whose passes take the planted seconds: by precision, compiled or not, and threads."""
    monkeypatch.setattr(machine_checks, "HAS_BF16", True)
    monkeypatch.setattr(machine_checks, "cores", lambda: 2)
    ticks = iter([(0.0, 0.0), (10.0, 100.0)] * 9)
    monkeypatch.setattr(machine_checks, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(machine_checks, "_own_ticks", lambda: 0.0)

    def made(wide: float = 1.0, plain: float = 1.0, by_threads=lambda n: 1 / min(n, 2), dtype=torch.bfloat16):
        def small_pass(self, dtype=None, compile=None):
            slow = wide if (dtype or self.target.dtype) == torch.float32 else 1.0
            compiled = self.target.compiles if compile is None else compile
            return slow * (1.0 if compiled else plain) * by_threads(torch.get_num_threads())

        monkeypatch.setattr(Diagnosis, "small_pass", small_pass)
        about = SimpleNamespace(type="cpu")
        shown = {"device": about, "dtype": dtype, "dtype_name": str(dtype), "quantize": None}
        fake = SimpleNamespace(**shown, compiles=False, decoder=None)
        diagnosis = grown("chain-1", 1.7, Planted())
        diagnosis.target = fake
        return diagnosis

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield made
    torch.set_num_threads(before)


def judged(diagnosis: Diagnosis) -> list[str]:
    of = (machine_checks.uncompiled, machine_checks.precision, machine_checks.threads)
    return found(diagnosis, [fault for fault, check in CHECKS.items() if check in of])


def test_a_machine_that_is_used_well_has_no_fault(machine):
    assert judged(machine()) == []


def test_passes_that_could_be_quicker_are_named(machine):
    assert judged(machine(plain=2.0)) == ["uncompiled"]
    assert judged(machine(wide=2.0, dtype=torch.float32)) == ["precision too wide"]


def test_too_many_threads_and_others_work_are_named(machine, monkeypatch):
    torch.set_num_threads(8)
    diagnosis = machine(by_threads=lambda n: 1 / min(n, 2) if n <= 2 else 4.0)
    outcome = machine_checks.threads(diagnosis)
    assert outcome.found
    assert "OMP_NUM_THREADS=2" in outcome.remedy
    assert torch.get_num_threads() == 8  # as it was
    torch.set_num_threads(2)
    ticks = iter([(0.0, 0.0), (60.0, 100.0)])
    monkeypatch.setattr(machine_checks, "_ticks", lambda: next(ticks))
    outcome = machine_checks.threads(machine())
    assert outcome.found
    assert "taskset" in outcome.remedy


def test_a_report_says_cause_and_remedy_and_reads_back():
    fault = Finding(fault="threads", verdict="found", measured="8", cause="too many", remedy="set fewer")
    fine = Finding(fault="uncompiled", verdict="ok", measured="1 ms")
    heading = {"hardware": {}, "versions": {}, "target": "t", "dtype": "float32", "schema": 1}
    about = {"drafter": "auto", "temperature": 0.0, "batch": 1, "findings": [fine, fault]}
    report = DoctorReport(**heading, **about)
    assert report.found == [fault]
    for said in ("FOUND", "too many", "remedy: set fewer", "uncompiled"):
        assert said in str(report)
    assert DoctorReport.from_json(report.to_json()).found == [fault]
