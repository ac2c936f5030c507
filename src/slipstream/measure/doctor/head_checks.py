"""Checks of a head and of the texts that it drafts for: does it still see what it was trained on?"""

from statistics import mean

import torch

from slipstream.drafters.store import VOCAB
from slipstream.engine.replay import predict
from slipstream.measure.doctor.diagnosis import Patient, Seen, Unmeasured
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


def template(patient: Patient) -> Seen:
    """How certain the target is of the marks between question and answer."""
    found = patient.framing
    best, figures = found.public[found.best], {}
    if found.own is not None:
        figures["own"] = found.own
    elif patient.target.text is not None and patient.target.text.has_chat:
        raise Unmeasured("the chat template writes nothing behind a question")
    if found.own is None:
        measured = f"none; {found.best} {best:.2f} nats a token"
        wrong = best < SURPRISED
    else:
        measured = f"{found.own:.2f} nats a token; {found.best} {best:.2f}"
        wrong = found.own > SURPRISED + best
    return Seen(
        found=wrong,
        measured=measured,
        normal=f"at most {SURPRISED} above the best known",
        cause="the marks of the chat template in use surprise the target, which knows those of "
        f"{found.best}: it answers, and the head drafts, in a form that neither was trained on",
        remedy=f"give the tokenizer the {found.best} template (tokenizer.chat_template, or the model's own "
        "tokenizer_config.json or chat_template.jinja)",
        figures={**figures, "best": best},
    )


def system(patient: Patient) -> Seen:
    """How certain the target is of the marks before a question, as given and behind a system prompt."""
    text = patient.target.text
    if text is None or not text.has_chat:
        raise Unmeasured("no chat template")
    if template(patient).found:
        raise Unmeasured("the template itself is wrong")
    pairs = [pair for question in patient.asked if (pair := system_surprise(patient.target, question))]
    if not pairs:
        raise Unmeasured("its template takes no system prompt")
    given, behind = (mean(each) for each in zip(*pairs, strict=True))
    return Seen(
        found=given - behind > MISSED,
        measured=f"{given:.2f} nats a token; behind one {behind:.2f}",
        normal=f"at most {MISSED:.1f} above",
        cause="the target expects a system prompt before the first question, and there is none",
        remedy='begin with one: messages=[{"role": "system", "content": "…"}, …], best the one that the '
        "drafter's training data had, or restore the template's own",
        figures={"given": given, "behind": behind},
    )


def _undone(patient: Patient, fault: str, normal: str, cause: str) -> Seen:
    """Whether a change of this kind undoes a fault, and of all gains most."""
    some = [each for each in patient.tried if each.change.fault == fault]
    if not some:
        raise Unmeasured("this head has nothing of the kind")
    best = max(some, key=lambda each: each.gain.nats)
    undoes = patient.undoes
    return Seen(
        found=best is undoes,
        measured=f"right {patient.fit.hits:.0%}; changed {best.fit.hits:.0%} ({best.gain.nats:+.2f} nats)",
        normal=normal,
        cause=f"{cause}: with {best.change.name} it is right {best.fit.hits:.0%} and not "
        f"{patient.fit.hits:.0%} of the time",
        remedy=best.change.remedy,
        figures={
            "right": patient.fit.hits,
            "changed": best.fit.hits,
            "nats": best.gain.nats,
            "errors": best.gain.errors,
        },
    )


WORSE = f"no change gains {GAIN} nats a token"


def tap(patient: Patient) -> Seen:
    """Whether the head fits better one block up or down."""
    return _undone(
        patient, "tap", WORSE, "the head reads states one block beside those that it was trained on"
    )


def norm(patient: Patient) -> Seen:
    """Whether the head fits better on the other side of the final norm, or with it."""
    cause = "the head reads or says states on the other side of the target's final norm"
    return _undone(patient, "norm", WORSE, cause)


def rope(patient: Patient) -> Seen:
    """A wrong base may cost little in short texts: one that is not the target's has to be better than it."""
    cause = "the head's rotary positions have another base than it was trained with"
    seen = _undone(patient, "rope", WORSE, cause)
    theirs = next((each for each in patient.tried if each.change.name == patient.own_base), None)
    if seen.found or theirs is None or patient.undoes is not None:
        return seen
    gain, own = theirs.gain, patient.head.head.config.rope_theta
    return Seen(
        found=gain.errors > -2,
        measured=f"base {own:,.0f}; the target's: {gain.nats:+.3f} nats, {gain.errors:+.1f} errors",
        normal="the target's, or better than it",
        cause=f"the head's rotary positions have a base of {own:,.0f}, the target's have another, and the "
        "head's own fits these texts no better: long ones will fit worse",
        remedy=theirs.change.remedy,
        figures={"nats": gain.nats, "errors": gain.errors},
    )


def renamed(patient: Patient) -> Seen:
    """What is accepted, against what training measured, among tokens that the head can say."""
    tree = patient.training["predicted"]["tree"] if patient.promised else ""
    made = predict(proposing(patient.head, "top-k", tree), patient.recorded)
    now, then = made.acceptance[0] / max(patient.coverage, 1e-9), patient.promised[0]
    explained = patient.undoes is not None or _shift(patient)[0].sure
    return Seen(
        found=now < FITS * then and not explained,
        measured=f"accepted at depth 1: {now:.2f}",
        normal=f"above {FITS * then:.2f} (training: {then:.2f})",
        cause=f"almost nothing is accepted ({now:.2f}; {then:.2f} in training), and no other states or "
        "positions help: these are the weights of another target's head, whatever config.json says",
        remedy="take this target's own head (--drafter auto), or train one: "
        + suggested(f"train {patient.config.get('method', 'eagle')}"),
        figures={"now": now, "training": then},
    )


def vocabulary(patient: Patient) -> Seen:
    """The share of the target's tokens that the head can say."""
    if len(patient.head.vocab) == patient.target.vocab:
        raise Unmeasured("it says every token")
    now, then = patient.coverage, patient.config.get("vocabulary", {}).get("coverage", 1.0)
    return Seen(
        found=now < COVERED * then,
        measured=f"{now:.1%} of the answers' tokens",
        normal=f"above {COVERED * then:.1%} (training: {then:.1%})",
        cause=f"the draft vocabulary holds {now:.1%} of what the target says here: it was chosen on texts of "
        "another language or kind",
        remedy=f"train a head on such texts ({suggested('train')}, head.draft_vocab), or give the drafter "
        f"their {VOCAB}",
        figures={"now": now, "training": then},
    )


def temperature(patient: Patient) -> Seen:
    """What is accepted at this temperature against T = 0."""
    if not patient.temperature:
        raise Unmeasured("T = 0")
    recorded = patient.record(patient.prompts, patient.temperature)
    proposal = patient.grower.proposal if patient.grower.law == "coupled" else "top-k"
    made = proposing(patient.head, proposal, "chain-1")
    cold = predict(proposing(patient.head, "top-k", "chain-1"), patient.recorded).acceptance[0]
    hot = predict(made, recorded).acceptance[0]
    greedy = patient.training.get("recipe", {}).get("data", {}).get("greedy")
    trained = "trained on answers at T = 0" if greedy else "its training is not known"
    better = "" if proposal == "noise" else f"--drafter '{patient.spec.replace(proposal='noise')}', or "
    return Seen(
        found=hot < HEATED * cold,
        measured=f"T = {patient.temperature:g}: {hot:.2f}; T = 0: {cold:.2f} ({trained})",
        normal=f"above {HEATED:.0%} of T = 0",
        cause=f"at T = {patient.temperature:g} {hot:.2f} of first guesses are accepted and at T = 0 "
        f"{cold:.2f}: the head does not know what is said so hot",
        remedy=f"{better}train on answers of that temperature: "
        f"{suggested(f'synthesize --temperature {patient.temperature:g}')}, then {suggested('train')}",
        figures={"hot": hot, "cold": cold},
    )


def context(patient: Patient) -> Seen:
    """The same guesses in texts longer than those of training, with all of the text read and with its end
    alone. Shares right in long and in short texts differ by what is said there, too, and decide nothing."""
    most = patient.training.get("recipe", {}).get("data", {}).get("max_length")
    if most is None:
        raise Unmeasured("the length of its training texts is not known")
    longest = patient.context or int(patient.recorded.lengths.median())
    if longest <= most:
        return Seen(False, f"{longest} tokens", f"up to {most}, as in training", "", "", {"tokens": longest})
    recorded = patient.record(patient.long_prompts(longest, LONG_TEXTS))
    whole = fit(patient.head, recorded)
    end = fit(patient.head, recorded.without(int(recorded.prompts.min()) - most // 2))
    gain, short = Gain.of(end.right, whole.right), patient.fit.hits
    return Seen(
        found=gain.sure,
        measured=f"{longest} tokens: {_nats(whole.right)} nats a token; their end alone {_nats(end.right)}",
        normal="all of the text helps, or does no harm",
        cause=f"the head was trained on texts of {most} tokens, and behind {longest} it is right "
        f"{whole.hits:.0%} of the time, {end.hits:.0%} if it sees the end alone ({short:.0%} in short texts)",
        remedy=f"train it on longer texts: {suggested(f'train … data.max_length={longest}')}; until then "
        "--drafter ngram for such texts",
        figures={"tokens": longest, "whole": whole.hits, "end": end.hits, "short": short, "nats": gain.nats},
    )


def mask(patient: Patient) -> Seen:
    """Whether the head says the token before or behind the one that it should say."""
    gain, name, share = _shift(patient)
    return Seen(
        found=gain.sure,
        measured=f"the next {_nats(patient.fit.right)} nats; {name} {share}",
        normal="the next token is likeliest",
        cause=f"the head says {name} rather than the next: its labels, or the mask of its loss, were one "
        "token off in training",
        remedy="train it again: row i, which reads token i + 1, is to say token i + 2 ("
        f"{suggested('train')})",
        figures={"nats": gain.nats, "errors": gain.errors},
    )


def _shift(patient: Patient) -> tuple[Gain, str, str]:
    """What a label one token before or behind gains, the larger of both: gain, name, nats."""
    seen = patient.fit
    both = (("the token that is there already", seen.before), ("the token behind the next", seen.after))
    name, other = max(both, key=lambda each: Gain.of(each[1], seen.right).nats)
    return Gain.of(other, seen.right), name, _nats(other)


def _nats(log_q: torch.Tensor) -> str:
    return f"{-float(log_q.nanmean()):.2f}"
