"""Checks of a head and of the texts that it drafts for: does it still see what it was trained on?"""

from statistics import mean

import torch

from slipstream.drafters.store import VOCAB
from slipstream.engine.replay import predict
from slipstream.measure.doctor.diagnosis import Diagnosis, Outcome, Unmeasured
from slipstream.measure.doctor.head_fit import GAIN, Gain, fit
from slipstream.measure.doctor.template_check import system_surprise
from slipstream.measure.tune import proposing
from slipstream.provenance import suggested

SURPRISED = 0.5  # nats a token: marks of a template that the target knows surprise it less
MISSED = 1.0  # the same of what a system prompt changes
COVERED = 0.7  # of the coverage in training
FITS = 0.25  # of the acceptance in training: other questions may take half of it, another target takes all
HEATED = 0.75  # of the acceptance at T = 0
LONG_TEXTS = 4


def template(diagnosis: Diagnosis) -> Outcome:
    """How certain the target is of the marks between question and answer."""
    own, public = diagnosis.framing
    name, best = min(public.items(), key=lambda item: item[1])
    if own is not None:
        wrong, measured = own > SURPRISED + best, f"{own:.2f} nats a token; {name} {best:.2f}"
    elif diagnosis.target.text is not None and diagnosis.target.text.has_chat:
        raise Unmeasured("the chat template writes nothing behind a question")
    else:
        wrong, measured = best < SURPRISED, f"none; {name} {best:.2f} nats a token"
    return Outcome(
        found=wrong,
        measured=measured,
        normal=f"at most {SURPRISED} above the best known",
        cause="the marks of the chat template in use surprise the target, which knows those of "
        f"{name}: it answers, and the head drafts, in a form that neither was trained on",
        remedy=f"give the tokenizer the {name} template (tokenizer.chat_template, or the model's own "
        "tokenizer_config.json or chat_template.jinja)",
        figures={"best": best} if own is None else {"own": own, "best": best},
    )


def system(diagnosis: Diagnosis) -> Outcome:
    """How certain the target is of the marks before a question, as given and behind a system prompt."""
    text = diagnosis.target.text
    if text is None or not text.has_chat:
        raise Unmeasured("no chat template")
    if template(diagnosis).found:
        raise Unmeasured("the template itself is wrong")
    surprises = [system_surprise(diagnosis.target, question) for question in diagnosis.framed]
    pairs = [pair for pair in surprises if pair is not None]
    if not pairs:
        raise Unmeasured("its template takes no system prompt")
    alone, prompted = (mean(side) for side in zip(*pairs, strict=True))
    return Outcome(
        found=alone - prompted > MISSED,
        measured=f"{alone:.2f} nats a token; behind one {prompted:.2f}",
        normal=f"at most {MISSED:.1f} above",
        cause="the target expects a system prompt before the first question, and there is none",
        remedy='begin with one: messages=[{"role": "system", "content": "…"}, …], best the one that the '
        "drafter's training data had, or restore the template's own",
        figures={"given": alone, "behind": prompted},
    )


def tap(diagnosis: Diagnosis) -> Outcome:
    """Whether the head fits better one block up or down."""
    return _undone(diagnosis, "tap", "the head reads states one block beside those that it was trained on")


def norm(diagnosis: Diagnosis) -> Outcome:
    """Whether the head fits better on the other side of the final norm, or with it."""
    cause = "the head reads or says states on the other side of the target's final norm"
    return _undone(diagnosis, "norm", cause)


def rope(diagnosis: Diagnosis) -> Outcome:
    """A wrong base may cost little in short texts: one that is not the target's has to be better than it."""
    cause = "the head's rotary positions have another base than it was trained with"
    outcome = _undone(diagnosis, "rope", cause)
    targets_base = f"rotary positions of base {diagnosis.target.sizes.rope_theta:,.0f}"
    theirs = next((change for change in diagnosis.changes if change.name == targets_base), None)
    if outcome.found or theirs is None or diagnosis.cure is not None:
        return outcome
    (nats, errors), base = theirs.gain, diagnosis.head.head.config.rope_theta
    return Outcome(
        found=errors > -2,
        measured=f"base {base:,.0f}; the target's: {nats:+.3f} nats, {errors:+.1f} errors",
        normal="the target's, or better than it",
        cause=f"the head's rotary positions have a base of {base:,.0f}, the target's have another, and the "
        "head's own fits these texts no better: long ones will fit worse",
        remedy=theirs.remedy,
        figures={"nats": nats, "errors": errors},
    )


def _undone(diagnosis: Diagnosis, fault: str, cause: str) -> Outcome:
    """Whether a change of this kind undoes a fault, and of all gains most."""
    changes = [change for change in diagnosis.changes if change.fault == fault]
    if not changes:
        raise Unmeasured("this head has nothing of the kind")
    best = max(changes, key=lambda change: change.gain.nats)
    right, changed, (nats, errors) = diagnosis.fit.hits, best.fit.hits, best.gain
    return Outcome(
        found=best is diagnosis.cure,
        measured=f"right {right:.0%}; changed {changed:.0%} ({nats:+.2f} nats)",
        normal=f"no change gains {GAIN} nats a token",
        cause=f"{cause}: with {best.name} it is right {changed:.0%} and not {right:.0%} of the time",
        remedy=best.remedy,
        figures={"right": right, "changed": changed, "nats": nats, "errors": errors},
    )


def renamed(diagnosis: Diagnosis) -> Outcome:
    """What is accepted, against what training measured, among tokens that the head can say."""
    promised = diagnosis.training.get("predicted", {})
    if not promised.get("acceptance"):
        raise Unmeasured("its config.json holds no acceptance of its training")
    trained = promised["acceptance"][0]
    prediction = predict(proposing(diagnosis.head, "top-k", promised["tree"]), diagnosis.recorded)
    now = prediction.acceptance[0] / max(diagnosis.coverage, 1e-9)
    explained = diagnosis.cure is not None or _shift(diagnosis)[0].sure
    return Outcome(
        found=now < FITS * trained and not explained,
        measured=f"accepted at depth 1: {now:.2f}",
        normal=f"above {FITS * trained:.2f} (training: {trained:.2f})",
        cause=f"almost nothing is accepted ({now:.2f}; {trained:.2f} in training), and no other states or "
        "positions help: these are the weights of another target's head, whatever config.json says",
        remedy="take this target's own head (--drafter auto), or train one: "
        + suggested(f"train {diagnosis.config.get('method', 'eagle')}"),
        figures={"now": now, "training": trained},
    )


def vocabulary(diagnosis: Diagnosis) -> Outcome:
    """The share of the target's tokens that the head can say."""
    if len(diagnosis.head.vocab) == diagnosis.target.vocab:
        raise Unmeasured("it says every token")
    now, trained = diagnosis.coverage, diagnosis.config.get("vocabulary", {}).get("coverage", 1.0)
    return Outcome(
        found=now < COVERED * trained,
        measured=f"{now:.1%} of the answers' tokens",
        normal=f"above {COVERED * trained:.1%} (training: {trained:.1%})",
        cause=f"the draft vocabulary holds {now:.1%} of what the target says here: it was chosen on texts of "
        "another language or kind",
        remedy=f"train a head on such texts ({suggested('train')}, head.draft_vocab), or give the drafter "
        f"their {VOCAB}",
        figures={"now": now, "training": trained},
    )


def temperature(diagnosis: Diagnosis) -> Outcome:
    """What is accepted at this temperature against T = 0."""
    T = diagnosis.temperature
    if not T:
        raise Unmeasured("T = 0")
    proposal = diagnosis.proposer.proposal if diagnosis.proposer.law == "coupled" else "top-k"
    recorded = diagnosis.record(diagnosis.prompts, T)
    hot = predict(proposing(diagnosis.head, proposal, "chain-1"), recorded).acceptance[0]
    cold = predict(proposing(diagnosis.head, "top-k", "chain-1"), diagnosis.recorded).acceptance[0]
    greedy = diagnosis.training.get("recipe", {}).get("data", {}).get("greedy")
    trained = "trained on answers at T = 0" if greedy else "its training is not known"
    noise = "" if proposal == "noise" else f"--drafter '{diagnosis.spec.replace(proposal='noise')}', or "
    return Outcome(
        found=hot < HEATED * cold,
        measured=f"T = {T:g}: {hot:.2f}; T = 0: {cold:.2f} ({trained})",
        normal=f"above {HEATED:.0%} of T = 0",
        cause=f"at T = {T:g} {hot:.2f} of first guesses are accepted and at T = 0 {cold:.2f}: the head does "
        "not know what is said so hot",
        remedy=f"{noise}train on answers of that temperature: "
        f"{suggested(f'synthesize --temperature {T:g}')}, then {suggested('train')}",
        figures={"hot": hot, "cold": cold},
    )


def context(diagnosis: Diagnosis) -> Outcome:
    """Guesses in texts longer than those of training, with all of the text read and with its end alone.
    Shares right in long and in short texts differ by what is said there, too, and decide nothing."""
    trained = diagnosis.training.get("recipe", {}).get("data", {}).get("max_length")
    if trained is None:
        raise Unmeasured("the length of its training texts is not known")
    tokens = diagnosis.context or int(diagnosis.recorded.lengths.median())
    if tokens <= trained:
        normal = f"up to {trained}, as in training"
        return Outcome(False, f"{tokens} tokens", normal, "", "", {"tokens": tokens})
    recorded = diagnosis.record(diagnosis.long_prompts(tokens, LONG_TEXTS))
    whole = fit(diagnosis.head, recorded)
    end = fit(diagnosis.head, recorded.without(int(recorded.prompts.min()) - trained // 2))
    gain, short = Gain.of(end.right, whole.right), diagnosis.fit.hits
    return Outcome(
        found=gain.sure,
        measured=f"{tokens} tokens: {_nats(whole.right)} nats a token; their end alone {_nats(end.right)}",
        normal="all of the text helps, or does no harm",
        cause=f"the head was trained on texts of {trained} tokens, and behind {tokens} it is right "
        f"{whole.hits:.0%} of the time, {end.hits:.0%} if it sees the end alone ({short:.0%} in short texts)",
        remedy=f"train it on longer texts: {suggested(f'train … data.max_length={tokens}')}; until then "
        "--drafter ngram for such texts",
        figures={"tokens": tokens, "whole": whole.hits, "end": end.hits, "short": short, "nats": gain.nats},
    )


def mask(diagnosis: Diagnosis) -> Outcome:
    """Whether the head says the token before or behind the one that it should say."""
    gain, name, nats = _shift(diagnosis)
    return Outcome(
        found=gain.sure,
        measured=f"the next {_nats(diagnosis.fit.right)} nats; {name} {nats}",
        normal="the next token is likeliest",
        cause=f"the head says {name} rather than the next: its labels, or the mask of its loss, were one "
        "token off in training",
        remedy="train it again: row i, which reads token i + 1, is to say token i + 2 ("
        f"{suggested('train')})",
        figures={"nats": gain.nats, "errors": gain.errors},
    )


def _shift(diagnosis: Diagnosis) -> tuple[Gain, str, str]:
    """What a label one token before or behind gains, the larger of both: gain, name, nats."""
    fit = diagnosis.fit
    before = Gain.of(fit.before, fit.right), "the token that is there already", _nats(fit.before)
    after = Gain.of(fit.after, fit.right), "the token behind the next", _nats(fit.after)
    return max(before, after, key=lambda shift: shift[0].nats)


def _nats(log_q: torch.Tensor) -> str:
    return f"{-float(log_q.nanmean()):.2f}"
