"""Methods that answer the same prompts under the same settings, timed: drafters and both baselines."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from typing import Any

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampling
from slipstream.core.target import Target
from slipstream.core.tree import PAD
from slipstream.drafters import load_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.audit import Divergence, audit
from slipstream.engine.engine import Seconds
from slipstream.engine.generate import Generation, generate, stream
from slipstream.engine.sampling_params import SamplingParams
from slipstream.files import check_counts, several
from slipstream.machine import peak_memory
from slipstream.measure.baseline import hf_answer, hf_answers
from slipstream.measure.bench_report import Difference
from slipstream.measure.metrics import Answered
from slipstream.measure.questions import Question
from slipstream.targets import HFTarget
from slipstream.targets.prompts import encode

HF = "hf_generate"
BASELINES = ("vanilla", HF)
ORACLE = "tree-oracle"  # of a certificate
Drafters = str | Sequence[str] | Mapping[str, Drafter]  # drafters to load, or drafters by a name


@dataclass(frozen=True)
class Contest:
    """Methods that answer the same prompts under the same settings: Hugging Face's generate, and drafters.

    Attributes:
        exactness: the target's, which it finds out before anything is timed.
        batch: prompts that are answered at once.
    """

    target: HFTarget
    drafters: dict[str, Drafter]
    exactness: str
    max_new_tokens: int
    temperature: float
    seed: int
    batch: int = 1

    @classmethod
    def of(
        cls,
        target: HFTarget,
        drafters: Drafters,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        batch: int = 1,
    ) -> "Contest":
        """Both baselines and the drafters. Raises ValueError for a name that is not known, and for settings
        out of range."""
        check_counts(max_new_tokens=max_new_tokens)
        Sampling(temperature=temperature, seed=seed)
        contestants = {"vanilla": Vanilla(), **drafters_of(drafters, target, temperature, batch)}
        return cls(target, contestants, target.exactness, max_new_tokens, temperature, seed, batch)

    @property
    def methods(self) -> list[str]:
        return [HF, *self.drafters]

    @property
    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed, "max_new_tokens": self.max_new_tokens}

    def warm_up(self, prompt: list[int]) -> None:
        """Ask each method once, untimed: first calls allocate and choose kernels. Raises ValueError for
        settings out of range."""
        SamplingParams.of(self.target, self.max_new_tokens).limit(prompt)
        short = replace(self, max_new_tokens=4)
        for method in self.methods:
            if self.batch == 1:
                short.ask(method, prompt)
            else:
                short._ask_together(method, [prompt] * self.batch)

    def ask(
        self, method: str, prompt: list[int], show: Callable[[list[str]], None] | None = None
    ) -> Answered:
        """One answer, timed with its prompt's pass. `show` is called after each round, with the text of each
        of its tokens."""
        began = time.perf_counter()
        if method == HF:
            tokens = hf_answer(self.target, prompt, **self.settings)
            return Answered(tokens, time.perf_counter() - began)
        drafter = self.drafters[method]
        if show is None:
            done: Generation = generate(self.target, prompt, drafter, **self.settings)
        else:
            pieces = stream(self.target, prompt, drafter, **self.settings)
            for texts in pieces.rounds:
                show(texts)
            assert pieces.generation is not None
            done = pieces.generation
        return Answered(done.tokens, time.perf_counter() - began, done.rounds, done.seconds, done.sampling)

    def ask_all(self, method: str, prompts: list[list[int]]) -> list[Answered]:
        """Answers to prompts that are given at once. They share the time equally, and each knows the most
        memory that the process held."""
        with peak_memory(self.target.device) as memory:
            if len(prompts) == 1:
                answers = [self.ask(method, prompts[0])]
            else:
                answers = self._ask_together(method, prompts)
        return [replace(answer, memory_mib=memory.mib) for answer in answers]

    def _ask_together(self, method: str, prompts: list[list[int]]) -> list[Answered]:
        began, rows = time.perf_counter(), len(prompts)
        if method == HF:
            texts = hf_answers(self.target, prompts, **self.settings)
            wall = (time.perf_counter() - began) / rows
            return [Answered(tokens, wall) for tokens in texts]
        made = generate(self.target, prompts, self.drafters[method], batch=rows, **self.settings)
        wall = (time.perf_counter() - began) / rows
        spent = Seconds(*(seconds / rows for seconds in astuple(made[0].seconds)))
        shared = max(len(each.rounds) for each in made) / rows
        return [
            Answered(each.tokens, wall, each.rounds, spent, each.sampling, shared=shared) for each in made
        ]

    def keeps_text(self, method: str) -> bool:
        """Whether a drafter's text must be plain decoding's. Greedy text does not depend on the law."""
        return not self.temperature or self.drafters[method].law == "coupled"

    def promises_bits(self, method: str) -> bool:
        """Whether every token must be plain decoding's. Hugging Face's generate has attention and products of
        its own, which round otherwise, and so do trees where the target is only audited: there a near-tie
        within the precision's margin may turn."""
        return self.exactness == "bits" and method != HF

    def audited(
        self,
        method: str,
        answer: Answered,
        plain: Answered,
        question: Question,
        prompt: list[int],
        turn: int = 0,
    ) -> Answered:
        """The answer with what the audit found, where it is not plain decoding's."""
        if answer.tokens == plain.tokens:
            return answer
        found = audit(self.target, prompt, answer.tokens, plain.sampling) or [_parting(answer, plain)]
        strict, margin = self.promises_bits(method), self.target.margin
        return replace(
            answer,
            identical=False,
            differences=[Difference(question=question.name, turn=turn, **vars(each)) for each in found],
            unexplained=sum(strict or each.margin > margin for each in found),
        )


def _parting(answer: Answered, plain: Answered) -> Divergence:
    """Where an answer leaves plain decoding's, though each of its tokens is what the audit chooses, too. No
    rounding makes it end elsewhere."""
    pairs = enumerate(zip_longest(answer.tokens, plain.tokens, fillvalue=PAD))
    at, (token, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return Divergence(at, token, other, math.inf if PAD in (token, other) else 0.0)


def drafters_of(
    given: Drafters, target: HFTarget, temperature: float = 0.0, batch: int = 1
) -> dict[str, Drafter]:
    """Drafters by name, loaded where they are only named. Raises ValueError for an unknown one."""
    if isinstance(given, Mapping):
        for name, drafter in given.items():
            if name in (HF, ORACLE) or (name == "vanilla" and not isinstance(drafter, Vanilla)):
                raise ValueError(f"{name!r} names what drafters are held against: give yours another name")
        return dict(given)
    names = dict.fromkeys(several(given))
    return {name: load_drafter(name, target, temperature, batch) for name in names}


def first_prompts(target: Target, questions: Sequence[Question], max_new_tokens: int = 1) -> list[list[int]]:
    """The first turn of every question, as tokens. Raises ValueError, by name, for one that leaves no room
    for an answer."""
    if not questions:
        raise ValueError("no questions: give one at least")
    return [prompt_of(target, question, 0, question.turns[0], max_new_tokens) for question in questions]


def prompt_of(target: Target, question: Question, turn: int, told: Any, max_new_tokens: int) -> list[int]:
    """The tokens of a question's turn, or of the talk that leads to it. Raises ValueError, by name, where no
    room is left for an answer."""
    try:
        prompt = encode(target, told)
        SamplingParams.of(target, max_new_tokens).limit(prompt)
    except ValueError as error:
        raise ValueError(f"question {question.name}{f', turn {1 + turn}' * bool(turn)}: {error}") from error
    return prompt
