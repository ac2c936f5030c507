"""bench: drafters beside both baselines, in alternation, on the same prompts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampling
from slipstream.decode.answer import Round, mean_accepted_length
from slipstream.decode.audit import audit, margin_of
from slipstream.decode.generate import Generation, generate, stream
from slipstream.decode.round import Seconds
from slipstream.decode.settings import Settings
from slipstream.drafters import load_drafter
from slipstream.machine import heading
from slipstream.measure.baseline import hf_answer
from slipstream.measure.cost import promised
from slipstream.measure.paired import paired
from slipstream.measure.questions import Question, alternated
from slipstream.targets.hf import Target

HF = "hf_generate"
BASELINES = ("vanilla", HF)


@dataclass(frozen=True)
class Answered:
    """One answer of one method; `wall` seconds include the prompt. Hugging Face says nothing of its rounds
    and sampling."""

    tokens: list[int]
    wall: float
    rounds: list[Round] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Contest:
    """Methods that answer the same prompts under the same settings: Hugging Face, plain decoding, and the
    drafters."""

    target: Target
    drafters: dict[str, Drafter]
    max_new_tokens: int
    temperature: float
    seed: int

    @classmethod
    def of(
        cls, target: Target, drafters: Sequence[str], max_new_tokens: int, temperature: float, seed: int
    ) -> "Contest":
        """Both baselines and the named drafters. Raises ValueError for a name that is not known."""
        made = {
            name: load_drafter(name, target.ends, temperature)
            for name in dict.fromkeys(["vanilla", *drafters])
        }
        return cls(target, made, max_new_tokens, temperature, seed)

    @property
    def methods(self) -> list[str]:
        return [HF, *self.drafters]

    def warm_up(self, prompt: list[int]) -> None:
        """First calls allocate and choose kernels; they are not timed. Raises ValueError for settings out of
        range."""
        Settings.of(self.target, self.max_new_tokens).limit(prompt)
        short = replace(self, max_new_tokens=4)
        for method in self.methods:
            short.ask(method, prompt)

    def ask(
        self, method: str, prompt: list[int], show: Callable[[list[str]], None] | None = None
    ) -> Answered:
        """One answer, timed from the prompt's first token to the answer's last; `show` is called after each
        round, with the text that each of its tokens brought."""
        settings: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        began = time.perf_counter()
        if method == HF:
            tokens = hf_answer(self.target, prompt, **settings)
            return Answered(tokens, time.perf_counter() - began)
        if show is None:
            done: Generation = generate(self.target, prompt, self.drafters[method], **settings)
        else:
            pieces = stream(self.target, prompt, self.drafters[method], **settings)
            for texts in pieces.rounds:
                show(texts)
            assert pieces.generation is not None
            done = pieces.generation
        return Answered(done.tokens, time.perf_counter() - began, done.rounds, done.seconds, done.sampling)


@dataclass
class Tally:
    """All answers of one method, or of one part of the questions."""

    questions: int = 0
    new_tokens: int = 0
    wall: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    divergences: list[dict[str, Any]] = field(default_factory=list)

    def add(self, answered: Answered, divergences: Sequence[dict[str, Any]] = ()) -> None:
        """Count one more answer."""
        self.questions, self.new_tokens = self.questions + 1, self.new_tokens + len(answered.tokens)
        self.wall, self.rounds = self.wall + answered.wall, self.rounds + answered.rounds
        self.seconds = self.seconds + answered.seconds
        self.divergences += divergences

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.wall if self.wall else 0.0

    @property
    def tau(self) -> float:
        """`mean_accepted_length` over all answers."""
        return mean_accepted_length(self.rounds)

    def acceptance(self, conditional: bool) -> list[float]:
        """By depth d: the share of passes that accepted d drafted tokens or more; conditional: of those that
        drafted d and accepted d − 1."""
        rates = []
        for depth in range(1, max((r.drafted for r in self.rounds), default=0) + 1):
            tried = self.rounds
            if conditional:
                tried = [r for r in tried if r.drafted >= depth and r.accepted >= depth - 1]
            rates.append(round(sum(r.accepted >= depth for r in tried) / len(tried), 4) if tried else 0.0)
        return rates


Keep = Callable[[dict[str, Any]], None]
Place = tuple[str, str, str]  # a question's file, category and name
Tallies = dict[str, dict[Place, Tally]]  # by method and question


def bench(
    target: Target,
    drafters: Sequence[str],
    questions: Sequence[Question],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    keep: Keep = lambda report: None,
) -> dict[str, Any]:
    """Answer every turn of every question with every method, one after the other, and compare.

    Each turn is asked of all methods in turn, in an order that rotates, so that a machine that slows down
    slows all of them. A later turn continues plain decoding's conversation, so all methods read the same
    prompts. Answers that differ from plain decoding's are audited after the clock has stopped. Files take
    turns.

    Args:
        keep: is given what the turns say that all methods answered, where an error or Ctrl-C ends it early;
            the report then says in `stopped` what it was.

    Returns:
        DESIGN's schema 1; beside it `by_category`, `by_file`, `by_question`, and in `of_files` the mean over
        the files of the speed-up, with its interval.

    Raises:
        ValueError: a drafter or a setting is unknown or out of range, or a question leaves no room for an
            answer.
    """
    contest = Contest.of(target, drafters, max_new_tokens, temperature, seed)
    methods = contest.methods
    tallies: Tallies = {name: {} for name in methods}
    progress("warming up")
    contest.warm_up(first_prompts(target, questions, max_new_tokens)[0])
    turns, questions = 0, alternated(questions)
    asked = questions[:0]
    try:
        for number, question in enumerate(questions, 1):
            messages: list[dict[str, str]] = []
            for turn in question.turns:
                messages.append({"role": "user", "content": turn})
                prompt = target.encode(messages if target.has_chat else turn)
                answers, divergences = dict[str, Answered](), dict[str, list[dict[str, Any]]]()
                for name in methods[turns % len(methods) :] + methods[: turns % len(methods)]:
                    progress(f"{question.name} {name}")
                    answers[name] = contest.ask(name, prompt)
                plain = answers["vanilla"].tokens
                for name in contest.drafters:
                    if answers[name].tokens != plain and contest.drafters[name].law == "coupled":
                        found = audit(target, prompt, answers[name].tokens, answers[name].sampling)
                        where = {"question": question.name, "turn": len(messages) // 2}
                        divergences[name] = [{**where, **asdict(d)} for d in found]
                for name, answered in answers.items():
                    tally = tallies[name].setdefault(
                        (question.file, question.category, question.name), Tally()
                    )
                    tally.add(answered, divergences.get(name, []))
                messages.append({"role": "assistant", "content": target.decode(plain)})
                turns, asked = turns + 1, questions[:number]
    except BaseException as error:
        if turns:
            keep(_report(contest, tallies, asked) | {"stopped": stopped_by(error)})
        raise
    return _report(contest, tallies, asked)


def first_prompts(target: Target, questions: Sequence[Question], max_new_tokens: int = 1) -> list[list[int]]:
    """The first turn of every question, as tokens. Raises ValueError for one that leaves no room for an
    answer, by name."""
    if not questions:
        raise ValueError("no questions: give one at least")
    prompts = []
    for question in questions:
        try:
            prompts.append(target.encode(question.turns[0]))
            Settings.of(target, max_new_tokens).limit(prompts[-1])
        except ValueError as error:
            raise ValueError(f"question {question.name}: {error}") from error
    return prompts


def stopped_by(error: BaseException) -> str:
    """What a report says that did not come to its end."""
    return str(error).split("\n")[0] or type(error).__name__


def _report(contest: Contest, tallies: Tallies, asked: Sequence[Question]) -> dict[str, Any]:
    hf = _sum(list(tallies[HF].values()))
    results = [_result(contest, name, tallies) for name in contest.drafters]
    others = {"vanilla": results[0], HF: {"by_question": _by_question(tallies[HF])}}
    for result in results:
        result["of_files"] = {name: asdict(paired(result, other)) for name, other in others.items()}
    return {
        **heading(contest.target),
        "margin": margin_of(contest.target),
        "temperature": contest.temperature,
        "seed": contest.seed,
        "max_new_tokens": contest.max_new_tokens,
        "prompts": [question.name for question in asked],
        HF: {"tokens_per_second": round(hf.tokens_per_second, 2), "new_tokens": hf.new_tokens, **others[HF]},
        "results": results,
    }


def _result(contest: Contest, name: str, tallies: Tallies) -> dict[str, Any]:
    tally, plain = (_sum(list(tallies[method].values())) for method in (name, "vanilla"))
    decoding, law = tally.seconds.total - tally.seconds.prefill, contest.drafters[name].law
    return {
        "drafter": name,
        **_figures(tally, {baseline: _sum(list(tallies[baseline].values())) for baseline in BASELINES}),
        "tree": getattr(getattr(contest.drafters[name], "shape", None), "name", None),
        "rows": contest.drafters[name].rows,
        "target_passes": len(tally.rounds),
        "acceptance_by_depth": tally.acceptance(conditional=False),
        "acceptance_by_depth_conditional": tally.acceptance(conditional=True),
        "law": law,
        "identical": not tally.divergences
        if law == "coupled"
        else None,  # multi-round: equal in distribution
        "unexplained": sum(d["margin"] > margin_of(contest.target) for d in tally.divergences),
        "divergences": tally.divergences,
        "seconds": {key: round(value, 3) for key, value in asdict(tally.seconds).items()},
        "host_share": round(tally.seconds.host / decoding, 4) if decoding else 0.0,
        "expected": expected(tally, plain),
        "ledger": ledger(tally, plain),
        "by_category": _parts(name, tallies, 1),
        "by_file": _parts(name, tallies, 0),
        "by_question": _by_question(tallies[name]),
    }


def _by_question(tallies: dict[Place, Tally]) -> dict[str, Any]:
    return {
        name: {"file": file, "new_tokens": tally.new_tokens, "seconds": round(tally.wall, 4)}
        for (file, _, name), tally in tallies.items()
    }


def _parts(name: str, tallies: Tallies, of: int) -> dict[str, Any]:
    """Figures by file (of 0) or category (of 1)."""

    def part(method: str, key: str) -> Tally:
        return _sum([tally for place, tally in tallies[method].items() if place[of] == key])

    keys = dict.fromkeys(place[of] for place in tallies[name])
    return {key: _figures(part(name, key), {each: part(each, key) for each in BASELINES}) for key in keys}


def _figures(tally: Tally, baselines: dict[str, Tally]) -> dict[str, Any]:
    """τ, speed, and ratios of tokens per second, so that answers of different length compare."""
    speed = tally.tokens_per_second
    return {
        "questions": tally.questions,
        "new_tokens": tally.new_tokens,
        "tau": round(tally.tau, 4),
        "tokens_per_second": round(speed, 2),
        "speedup": {
            name: round(speed / max(base.tokens_per_second, 1e-9), 3) for name, base in baselines.items()
        },
    }


def expected(tally: Tally, plain: Tally) -> dict[str, float]:
    """What speed-up a draft's quality and cost alone promise (GLIDE §3; Leviathan et al. 2023, Theorem 3.8):
    passes over several rows are taken to cost what one row costs, and tokens to be accepted independently.
    Rounds count with as many tokens as they drafted, so that one that found nothing promises nothing.

    Returns:
        alpha: of the tokens that were judged, the share accepted; of a chain E[min(p, q)] of the laws that it
            was drafted
        and judged by (at T = 0 both are certain), of a tree the chance that some child agrees. c: drafting
        over a target
        pass, a token of the deepest draft. speedup: what they promise.
    """
    judged = sum(min(r.accepted + 1, r.drafted) for r in tally.rounds)
    alpha = sum(r.accepted for r in tally.rounds) / max(judged, 1)
    rounds, gammas = max(len(tally.rounds), 1), [r.drafted for r in tally.rounds]
    one_pass = plain.seconds.verify / max(len(plain.rounds), 1)
    deepest = max(gammas, default=0)
    c = tally.seconds.draft / rounds / max(one_pass, 1e-9) / deepest if deepest else 0.0
    speedup = sum(promised(alpha, gamma, 0.0) for gamma in gammas) / rounds / (1 + c * deepest)
    return {"alpha": round(alpha, 4), "c": round(c, 4), "speedup": round(speedup, 4)}


def ledger(tally: Tally, plain: Tally) -> dict[str, float]:
    """A speed-up over plain decoding, factor by factor; the product is held against what the clock says.

    Returns:
        tau: tokens a round. rows: plain's pass over the tree's. draft: the pass over pass and draft. host:
            the share of a
        round that is not the host's, over plain's. prompt: the same of prompts, and of the token that each
        yields.
        predicted: their product; measured: tokens per second over plain's; remainder: what the product leaves
            unexplained.
    """
    rounds, plain_rounds = max(len(tally.rounds), 1), max(len(plain.rounds), 1)
    ours, theirs = tally.seconds, plain.seconds

    def decoding(s: Seconds) -> float:
        return max(s.total - s.prefill, 1e-9)

    def prompted(t: Tally) -> float:
        return (
            t.new_tokens / max(t.tau * len(t.rounds), 1e-9) * decoding(t.seconds) / max(t.seconds.total, 1e-9)
        )

    factors = {
        "tau": tally.tau,
        "rows": (theirs.verify / plain_rounds) / max(ours.verify / rounds, 1e-9),
        "draft": ours.verify / max(ours.verify + ours.draft, 1e-9),
        "host": (1 - ours.host / decoding(ours)) / max((theirs.verify / decoding(theirs)), 1e-9),
        "prompt": prompted(tally) / max(prompted(plain), 1e-9),
    }
    predicted, measured = prod(factors.values()), tally.tokens_per_second / max(plain.tokens_per_second, 1e-9)
    factors |= {
        "predicted": predicted,
        "measured": measured,
        "remainder": measured / max(predicted, 1e-9) - 1,
    }
    return {name: round(value, 4) for name, value in factors.items()}


def _sum(parts: Sequence[Tally]) -> Tally:
    whole = Tally()
    for part in parts:
        whole = Tally(
            whole.questions + part.questions,
            whole.new_tokens + part.new_tokens,
            whole.wall + part.wall,
            whole.rounds + part.rounds,
            whole.seconds + part.seconds,
            whole.divergences + part.divergences,
        )
    return whole
