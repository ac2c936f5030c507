"""Which differences the promise allows: none where rows keep their bits, elsewhere near-ties."""

import io
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import tiny
from slipstream.core import verify
from slipstream.core.tree import PAD, chain
from slipstream.drafters.suffix import NGram
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.measure import runner as running
from slipstream.measure.bench import HF, Runner, bench
from slipstream.measure.certify import certify
from slipstream.measure.datasets import Question
from slipstream.measure.demo import demo
from slipstream.measure.results import BenchReport, Certificate
from slipstream.targets import HFTarget

QUESTION = Question("f", "1", "chat", ("a b c a b",))
NEAR = 0.4  # in logits: below bf16's margin, with room for what rounding adds


@pytest.fixture
def target():
    return HFTarget(deepcopy(tiny.reference("llama")).bfloat16(), tiny.tokenizer())


def promising(target, exactness):
    """The target, as if it had found that of itself."""
    vars(target)["exactness"] = exactness
    return target


def swapped(logits):
    """Logits in which the two best change places if they are near."""
    best, tokens = logits.topk(2)
    near = best[..., :1] - best[..., 1:] < NEAR
    return torch.where(near, logits.scatter(-1, tokens, best.flip(-1)), logits)


@pytest.fixture
def rounding(monkeypatch):
    """A target whose tree passes turn near-ties, as rounding does."""
    exact = HFTarget.__call__

    def turned(self, tree, cache, taps=(), rows=None):
        out = exact(self, tree, cache, taps, rows)
        return out if tree.is_chain else replace(out, logits=swapped(out.logits))

    monkeypatch.setattr(HFTarget, "__call__", turned)


@pytest.fixture
def plain(target):
    """A runner on the target, its question's prompt and plain decoding's answer."""
    runner = Runner.of(target, {}, 16, 0.0, 0)
    prompt = tiny.tokenizer()(QUESTION.turns[0])["input_ids"]
    return runner, prompt, runner.ask("vanilla", prompt)


def ended_with_a_near_tie(target, prompt, tokens):
    """The first tokens of an answer, the last of them turned to the second best."""
    texts = torch.tensor([prompt + tokens])
    logits = target(chain(texts), target.new_cache(1)).logits[0, len(prompt) - 1 : -1]
    other = swapped(logits).argmax(-1)
    at = next(i for i, token in enumerate(tokens) if other[i] != token)
    return [*tokens[:at], int(other[at])]


@pytest.mark.parametrize(
    ("exactness", "method", "unexplained"),
    [("bits", "mine", 1), ("bits", HF, 0), ("audited", "mine", 0), ("audited", HF, 0)],
)
def test_a_near_tie_is_explained_unless_bits_are_promised(target, plain, exactness, method, unexplained):
    """A drafter's wrong token passed for rounding where nothing rounds, or Hugging Face's rounding for an
    error."""
    runner, prompt, answer = plain
    turned = replace(answer, tokens=ended_with_a_near_tie(target, prompt, answer.tokens))
    audited = replace(runner, exactness=exactness).audited(method, turned, answer, QUESTION, prompt)
    (difference,) = audited.differences
    assert 0 <= difference.margin < target.margin
    assert (audited.identical, audited.unexplained) == (False, unexplained)


@pytest.mark.parametrize("exactness", ["bits", "audited"])
@pytest.mark.parametrize("method", ["mine", HF])
def test_an_answer_that_ends_elsewhere_is_never_explained(plain, exactness, method):
    """Each of its tokens is plain decoding's, so an audit of the tokens alone certified it."""
    runner, prompt, answer = plain
    short = replace(answer, tokens=answer.tokens[:5])
    audited = replace(runner, exactness=exactness).audited(method, short, answer, QUESTION, prompt)
    assert audited.unexplained == 1
    assert [(each.position, each.token) for each in audited.differences] == [(5, PAD)]


def test_plain_decoding_that_does_not_repeat_itself_breaks_the_promise(target, plain):
    """The audit decodes plainly once more, and agrees with what was not plain decoding's at first."""
    runner, prompt, answer = plain
    first = replace(answer, tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % target.vocab])
    strict, lenient = (
        replace(runner, exactness=exactness).audited("mine", answer, first, QUESTION, prompt)
        for exactness in ("bits", "audited")
    )
    assert (strict.unexplained, lenient.unexplained) == (1, 0)


@pytest.mark.parametrize(("exactness", "allowed"), [("bits", False), ("audited", True)])
@pytest.mark.usefixtures("rounding")
def test_a_target_whose_trees_round_otherwise(target, exactness, allowed):
    """`certify` and `bench` must fail it by the promise, and let it pass by the margin alone."""
    certificate = certify(promising(target, exactness), "ngram", [QUESTION], max_new_tokens=24)
    oracle = next(row for row in certificate.results if row.drafter == "tree-oracle")
    assert oracle.divergences
    assert oracle.unexplained == (0 if allowed else len(oracle.divergences))
    assert (certificate.exactness, certificate.certified) == (exactness, allowed)
    assert ("NOT certified" in str(certificate)) is not allowed
    prompt = tiny.tokenizer()(QUESTION.turns[0])["input_ids"]
    text = prompt + Runner.of(target, {}, 24, 0.0, 0).ask("vanilla", prompt).tokens
    report = bench(target, {"oracle": TreeOracle([text], target.vocab)}, [QUESTION], max_new_tokens=24)
    row = report.results[1]
    assert row.identical is False
    assert (row.unexplained == 0) is allowed
    assert ("NO: " in str(report), " ties" in str(report)) == (not allowed, allowed)


@pytest.mark.parametrize(
    ("exactness", "says"),
    [("bits", "NOT the same text token for token"), ("audited", "rounding turned a near-tie")],
)
@pytest.mark.usefixtures("rounding")
def test_the_demo_calls_it_rounding_only_where_rows_round(target, exactness, says):
    """A wrong token that the screen excuses."""
    prompt = tiny.tokenizer()(QUESTION.turns[0])["input_ids"]
    runner = Runner.of(promising(target, exactness), {}, 24, 0.0, 0)
    oracle = TreeOracle([prompt + runner.ask("vanilla", prompt).tokens], target.vocab)
    console = Console(file=io.StringIO(), width=200)
    demo(replace(runner, drafters={**runner.drafters, "oracle": oracle}), "oracle", [QUESTION], console)
    assert says in console.file.getvalue()


@pytest.mark.parametrize(
    ("exactness", "held", "verdict"),
    [
        (
            "bits",
            "plain decoding token for token",
            "certified: every answer is plain decoding's, token for token",
        ),
        (
            "audited",
            "up to near-ties within 0.5 logits",
            "certified: every token is plain decoding's, near-ties",
        ),
    ],
)
def test_reports_say_which_promise_was_checked(target, exactness, held, verdict):
    """The weaker promise under the words of the stronger one."""
    certificate = certify(promising(target, exactness), "ngram", [QUESTION], max_new_tokens=8)
    assert held in str(certificate)
    assert verdict in str(certificate)
    report = bench(target, "ngram", [QUESTION], max_new_tokens=8)
    assert held in str(report)
    assert report.exactness == BenchReport.from_json(report.to_json()).exactness == exactness


def test_results_of_before_were_audited(target):
    """Files that do not say so, read as if bits had been checked."""
    made = certify(promising(target, "bits"), "ngram", [QUESTION], max_new_tokens=8)
    fields = made.stored()
    del fields["exactness"]
    old = Certificate.model_validate(fields)
    assert old.exactness == "audited"
    assert "near-ties within the margin aside" in str(old)
    assert "exactness" not in old.stored()


def test_hugging_face_is_not_held_to_a_quantised_target():
    """Two right drafters and a verdict of NOT certified, over roundings of Hugging Face's own."""
    target = HFTarget(deepcopy(tiny.reference("llama")).float(), tiny.tokenizer(), "m", quantize="int8")
    report = certify(target, "ngram", [QUESTION], temperatures=[0.0], max_new_tokens=8)
    assert [result.drafter for result in report.results] == ["ngram", "tree-oracle"]
    assert report.certified
    assert HF not in str(report)


def sampled(target):
    return {"mine": tiny.eagle(target, proposal="sampled"), "ngram": NGram()}


HOW = {"temperatures": [0.0, 1.0], "max_new_tokens": 8, "draws": 16}


def test_a_drafter_of_another_law_is_tested_where_it_keeps_the_distribution_alone():
    """It was refused at T > 0."""
    target = tiny.target("llama")
    made = certify(target, sampled(target), [QUESTION], **HOW)
    assert {(row.drafter, row.temperature) for row in made.results if row.temperature} == {
        ("ngram", 1.0),
        ("tree-oracle", 1.0),
    }
    assert ("mine", 0.0) in {(row.drafter, row.temperature) for row in made.results}
    tests = [(row.drafter, row.temperature, row.law, row.answers) for row in made.distribution]
    assert tests == [("vanilla", 1.0, "coupled", 16), ("mine", 1.0, "multi-round", 16)]
    assert made.certified
    assert "finds with 95%" in str(made)
    assert f"distance {made.distribution[0].detectable:.3f}" in str(made)


def test_what_is_certified_is_what_answers_at_that_temperature(monkeypatch):
    """At T = 1 `auto` guesses with the target's noise, and was certified as it guesses at T = 0."""
    target, asked = tiny.target("llama"), []

    def load(name, of, temperature=0.0, texts=1):
        asked.append(temperature > 0)
        return tiny.eagle(of, "chain-3", "noise" if temperature else "top-k")

    monkeypatch.setattr(running, "load_drafter", load)
    ask = Runner.ask

    def watched(self, method, prompt, show=None):
        if method == "mine":
            assert self.drafters[method].uses_target_noise == (self.temperature > 0)
        return ask(self, method, prompt, show)

    monkeypatch.setattr(Runner, "ask", watched)
    made = certify(target, "mine", [QUESTION], temperatures=[0.0, 0.7, 1.0], max_new_tokens=8, draws=2)
    assert made.certified
    assert sorted(asked) == [False, True]
    assert made.settings.drafters == ["mine"]


def test_a_failed_test_certifies_nothing(monkeypatch):
    monkeypatch.setattr(verify, "acceptance", lambda p, q, x: torch.ones(len(x), dtype=torch.float64))
    target = tiny.target("llama")
    made = certify(target, sampled(target), [QUESTION], temperatures=[1.0], max_new_tokens=32)
    assert [row.kept for row in made.distribution] == [True, False]
    assert not any(row.unexplained for row in made.results)
    assert not made.certified
    assert "NOT certified: draws do not follow" in str(made)


QUESTIONS = [Question("f", str(i), "chat", (text,)) for i, text in enumerate(("a b c", "d e", "c c a"))]


@pytest.mark.parametrize("pieces", [1, 4, 6, 7])
def test_a_run_that_was_killed_goes_on(pieces):
    """After any piece, and from what the file says alone; the certificate is the one of a whole run."""
    target, kept = tiny.target("llama"), []
    whole = certify(target, sampled(target), QUESTIONS, **HOW, keep=kept.append)
    assert len(kept) == 2 * len(QUESTIONS) + 2 * 2
    assert all(each.stopped and not each.certified for each in kept)
    begun = Certificate.from_json(kept[pieces - 1].to_json())
    more = []
    again = certify(target, sampled(target), QUESTIONS, **HOW, begun=begun, keep=more.append)
    assert len(more) == len(kept) - pieces
    assert (again.results, again.distribution, again.certified) == (whole.results, whole.distribution, True)
    assert again.stopped is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens was 8, and is 9"),
        ({"temperatures": [0.0, 0.7]}, "temperatures are others"),
        ({"draws": 8}, "draws was 16, and is 8"),
        ({"seed": 1}, "seed was 0, and is 1"),
    ],
)
def test_a_run_under_other_settings_does_not_go_on(change, says):
    target = tiny.target("llama")
    begun = certify(target, "ngram", [QUESTION], **HOW)
    with pytest.raises(ValueError, match=says):
        certify(target, "ngram", [QUESTION], **{**HOW, **change}, begun=begun)


def test_a_run_of_other_questions_or_drafters_does_not_go_on():
    target = tiny.target("llama")
    begun = certify(target, "ngram", [QUESTION], **HOW)
    other = replace(QUESTION, turns=("another text",))
    with pytest.raises(ValueError, match="fingerprint was"):
        certify(target, "ngram", [other], **HOW, begun=begun)
    with pytest.raises(ValueError, match="drafters are others"):
        certify(target, "suffix", [QUESTION], **HOW, begun=begun)
    mine = certify(target, {"mine": tiny.eagle(target, "chain-3")}, [QUESTION], **HOW)
    with pytest.raises(ValueError, match="fingerprint was"):
        certify(target, {"mine": tiny.eagle(target, "chain-2")}, [QUESTION], **HOW, begun=mine)
    old = begun.model_copy(update={"settings": None})
    with pytest.raises(ValueError, match="does not say what was asked"):
        certify(target, "ngram", [QUESTION], **HOW, begun=old)
