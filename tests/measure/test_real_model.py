"""The promise on SmolLM2-135M-Instruct itself. `make exactness` runs the audit at full size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream import generate, load_drafter, load_target
from slipstream.core.sampling import Sampling
from slipstream.drafters.store import find_drafter
from slipstream.engine.audit import audit
from slipstream.engine.replay import predict, record
from slipstream.engine.request import mean_accepted_length
from slipstream.measure.certify import certify
from slipstream.measure.datasets import load_questions
from slipstream.targets.prompts import encode


@pytest.fixture(scope="module")
def target():
    return load_target("smollm2", "float32")


def test_certify_finds_no_unexplained_token(target):
    """n-gram, eagle and tree oracle at T = 0 and 1, and Hugging Face generate at T = 0: 3 answers of 24
    tokens each. `make exactness` draws more."""
    drafters, how = ["ngram", "eagle:proposal=noise"], {"max_new_tokens": 24, "draws": 16}
    report = certify(target, drafters, load_questions(limit=3), temperatures=[0.0, 1.0], **how)
    rows = {(row.drafter, row.temperature): row for row in report.results}
    names = [*drafters, "tree-oracle"]
    assert set(rows) == {(name, T) for name in names for T in (0, 1)} | {("hf_generate", 0)}
    assert all(row.unexplained == 0 and row.questions == 3 for row in rows.values())
    assert report.certified


def test_inside_hugging_face_generate_no_token_is_unexplained(target):
    """Two prompts in a batch, padded on the left, with the head that ships."""
    tokenizer = target.text.tokenizer
    prompts = [encode(target, question.turns[0]) for question in load_questions(limit=2)]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    how = {"max_new_tokens": 24, "do_sample": False}
    theirs = target.model.generate(**inputs, **how)
    ours = target.model.generate(**inputs, **how, custom_generate=slipstream.custom_generate, drafter="eagle")
    assert ours.shape == theirs.shape
    width = inputs["input_ids"].shape[1]
    for prompt, row, other in zip(prompts, ours[:, width:].tolist(), theirs[:, width:].tolist(), strict=True):
        margins = [each.margin for each in audit(target, prompt, row, Sampling())]
        assert row == other or max(margins) <= target.margin


@pytest.mark.parametrize(
    ("name", "deep", "wanted"),
    [("eagle", "chain-5", 1.8), ("fasteagle", "chain-2", 1.6), ("draft-model", "chain-2", 1.4)],
)
def test_a_head_that_ships_drafts_well_and_as_predicted(target, name, deep, wanted):
    """Weights that were packed wrongly, or a head that no longer reads what it was trained on."""
    home, tree = find_drafter(name, target), load_drafter(name, target)
    assert (home / "model.safetensors").stat().st_size <= 13 * 2**20  # three layers in int8
    prompts = [encode(target, question.turns[0]) for question in load_questions(limit=5)]
    recorded = record(target, prompts, 40, tree.taps)
    predicted, chain = (predict(d, recorded).tau for d in (tree, load_drafter(f"{name}:tree={deep}", target)))
    answers = generate(target, prompts, tree, max_new_tokens=40, temperature=0.0)
    decoded = mean_accepted_length([r for answer in answers for r in answer.rounds])
    assert predicted > wanted
    assert predicted > chain + 0.1
    assert abs(predicted / decoded - 1) < 0.1


def test_the_readmes_lines_run(capsys):
    """The first thing a newcomer types."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    answering, measuring = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(compile(answering, "README.md", "exec"), {})
    assert "gravity" in capsys.readouterr().out.lower()
    assert {*re.findall(r"slipstream\.(\w+)", measuring)} <= {*slipstream.__all__}  # it would take minutes


LONG = """
from pathlib import Path
from slipstream import generate, load_target
from slipstream.measure.datasets import load_questions
from slipstream.targets.prompts import encode
target = load_target("smollm2", "auto")
ids = encode(target, " ".join(question.turns[0] for question in load_questions()))
ids = (ids * 3)[:7000]
answers = [generate(target, ids, drafter, max_new_tokens=16).tokens for drafter in ("vanilla", "ngram")]
# Not getrusage: what the process that began this one held counts there.
(peak,) = (line.split()[1] for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))
print(answers[0] == answers[1], int(peak) / 2**20)
"""


def test_a_prompt_of_7000_tokens_fits_in_memory_and_decodes_exactly():
    """Prefill in one piece would take a 7,000 x 7,000 mask and 7,000 rows of logits: 1.4 GB of those
    alone."""
    one = os.environ | {"OMP_NUM_THREADS": "1"}  # the other core is another test's
    done = subprocess.run(
        [sys.executable, "-c", LONG], capture_output=True, text=True, timeout=300, check=True, env=one
    )
    same, peak_gib = done.stdout.split()
    assert same == "True"
    assert float(peak_gib) < 2.5
