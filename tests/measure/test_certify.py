"""Which differences the promise allows: none where rows keep their bits, elsewhere near-ties."""

import io
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import tiny
from slipstream.core.tree import PAD, chain
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.measure.certify import Certificate, certify
from slipstream.measure.demo import demo
from slipstream.measure.questions import Question
from slipstream.measure.report import BenchReport
from slipstream.measure.run import HF, Contest, bench
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
    """A contest on the target, its question's prompt and plain decoding's answer."""
    contest = Contest.of(target, {}, 16, 0.0, 0)
    prompt = tiny.tokenizer()(QUESTION.turns[0])["input_ids"]
    return contest, prompt, contest.ask("vanilla", prompt)


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
    contest, prompt, answer = plain
    turned = replace(answer, tokens=ended_with_a_near_tie(target, prompt, answer.tokens))
    audited = replace(contest, exactness=exactness).audited(method, turned, answer, QUESTION, prompt)
    (difference,) = audited.differences
    assert 0 <= difference.margin < target.margin
    assert (audited.identical, audited.unexplained) == (False, unexplained)


@pytest.mark.parametrize("exactness", ["bits", "audited"])
@pytest.mark.parametrize("method", ["mine", HF])
def test_an_answer_that_ends_elsewhere_is_never_explained(plain, exactness, method):
    """Each of its tokens is plain decoding's, so an audit of the tokens alone certified it."""
    contest, prompt, answer = plain
    short = replace(answer, tokens=answer.tokens[:5])
    audited = replace(contest, exactness=exactness).audited(method, short, answer, QUESTION, prompt)
    assert audited.unexplained == 1
    assert [(each.position, each.token) for each in audited.differences] == [(5, PAD)]


def test_plain_decoding_that_does_not_repeat_itself_breaks_the_promise(target, plain):
    """The audit decodes plainly once more, and agrees with what was not plain decoding's at first."""
    contest, prompt, answer = plain
    first = replace(answer, tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % target.vocab])
    strict, lenient = (
        replace(contest, exactness=exactness).audited("mine", answer, first, QUESTION, prompt)
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
    text = prompt + Contest.of(target, {}, 24, 0.0, 0).ask("vanilla", prompt).tokens
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
    contest = Contest.of(promising(target, exactness), {}, 24, 0.0, 0)
    oracle = TreeOracle([prompt + contest.ask("vanilla", prompt).tokens], target.vocab)
    console = Console(file=io.StringIO(), width=200)
    demo(replace(contest, drafters={**contest.drafters, "oracle": oracle}), "oracle", [QUESTION], console)
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
