"""Methods that answer the same prompts under the same settings, timed: drafters and both baselines, of which
the outside one is Hugging Face's own generate."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import count, zip_longest
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampling
from slipstream.core.target import Target
from slipstream.core.tree import PAD
from slipstream.drafters import load_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.audit import Divergence, audit
from slipstream.engine.engine import Seconds
from slipstream.engine.generate import generate, stream
from slipstream.engine.sampling_params import SamplingParams
from slipstream.files import check_counts, several
from slipstream.machine import peak_memory
from slipstream.measure.datasets import Question
from slipstream.measure.metrics import Answered
from slipstream.measure.results import HF, Difference
from slipstream.targets import HFTarget
from slipstream.targets.prompts import encode

ORACLE = "tree-oracle"  # of a certificate
Drafters = str | Sequence[str] | Mapping[str, Drafter]  # drafters to load, or drafters by a name
# fields of generation_config that make Hugging Face draft, or change its cache
OTHERWISE = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "cache_implementation")


@dataclass(frozen=True)
class Runner:
    """Methods that answer the same prompts under the same settings: Hugging Face's generate, and drafters."""

    target: HFTarget
    drafters: dict[str, Drafter]
    exactness: str  # the target's, which it finds out before anything is timed
    max_new_tokens: int
    temperature: float
    seed: int
    batch: int = 1  # prompts that are answered at once

    @classmethod
    def of(
        cls,
        target: HFTarget,
        drafters: Drafters,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        batch: int = 1,
    ) -> "Runner":
        """Both baselines and the drafters. Raises ValueError for a name that is not known, and for settings
        out of range."""
        check_counts(max_new_tokens=max_new_tokens)
        Sampling(temperature=temperature, seed=seed)
        methods = {"vanilla": Vanilla(), **drafters_of(drafters, target, temperature, batch)}
        return cls(target, methods, target.exactness, max_new_tokens, temperature, seed, batch)

    @property
    def methods(self) -> list[str]:
        return [HF, *self.drafters]

    @property
    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "seed": self.seed, "max_new_tokens": self.max_new_tokens}

    def warm_up(self, prompt: list[int]) -> None:
        """Ask each method once, untimed: first calls allocate and choose kernels."""
        for method in self.methods:
            replace(self, max_new_tokens=4).ask_all(method, [prompt] * self.batch)

    def ask(
        self, method: str, prompt: list[int], show: Callable[[list[str]], None] | None = None
    ) -> Answered:
        """One answer, timed with its prompt's pass. `show` is called after each round, with the text of each
        of its tokens."""
        if show is None or method == HF:
            return self._answers(method, [prompt])[0]
        start = time.perf_counter()
        pieces = stream(self.target, prompt, self.drafters[method], **self.settings)
        for texts in pieces.rounds:
            show(texts)
        wall, answer = time.perf_counter() - start, pieces.generation
        assert answer is not None
        return Answered(answer.tokens, wall, answer.rounds, answer.seconds, answer.sampling)

    def ask_all(self, method: str, prompts: list[list[int]]) -> list[Answered]:
        """Answers to prompts that are given at once. They share the time equally, and each knows the most
        memory that the process held."""
        alone, peak = len(prompts) == 1, peak_memory(self.target.device)
        answers = [self.ask(method, prompts[0])] if alone else self._answers(method, prompts)
        mib = peak()
        return [replace(answer, memory_mib=mib) for answer in answers]

    def _answers(self, method: str, prompts: list[list[int]]) -> list[Answered]:
        start, rows = time.perf_counter(), len(prompts)
        if method == HF:
            texts = hf_answers(self.target, prompts, **self.settings)
            wall = (time.perf_counter() - start) / rows
            return [Answered(tokens, wall) for tokens in texts]
        answers = generate(self.target, prompts, self.drafters[method], batch=rows, **self.settings)
        wall = (time.perf_counter() - start) / rows
        spent = Seconds(*(seconds / rows for seconds in astuple(answers[0].seconds)))
        shared = max(len(a.rounds) for a in answers) / rows if rows > 1 else None
        return [Answered(a.tokens, wall, a.rounds, spent, a.sampling, shared=shared) for a in answers]

    def keeps_text(self, method: str) -> bool:
        """Whether a drafter's text must be plain decoding's. Greedy text does not depend on the law."""
        return not self.temperature or self.drafters[method].law == "coupled"

    def promises_bits(self, method: str) -> bool:
        """Whether every token must be plain decoding's. Elsewhere near-ties within the precision's margin may
        turn: Hugging Face's generate rounds otherwise, and so do trees where the target is only audited."""
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
        differences = audit(self.target, prompt, answer.tokens, plain.sampling) or [_parting(answer, plain)]
        strict, margin = self.promises_bits(method), self.target.margin
        return replace(
            answer,
            identical=False,
            differences=[Difference(question=question.name, turn=turn, **vars(one)) for one in differences],
            unexplained=sum(strict or one.margin > margin for one in differences),
        )


def _parting(answer: Answered, plain: Answered) -> Divergence:
    """Where an answer leaves plain decoding's, though the audit finds nothing: no rounding ends it."""
    pairs = enumerate(zip_longest(answer.tokens, plain.tokens, fillvalue=PAD))
    at, (token, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return Divergence(at, token, other, math.inf if PAD in (token, other) else 0.0)


def drafters_of(
    drafters: Drafters, target: HFTarget, temperature: float = 0.0, batch: int = 1
) -> dict[str, Drafter]:
    """Drafters by name, loaded where they are only named. Raises ValueError for an unknown one."""
    if isinstance(drafters, Mapping):
        for name, drafter in drafters.items():
            if name in (HF, ORACLE) or (name == "vanilla" and not isinstance(drafter, Vanilla)):
                raise ValueError(f"{name!r} names what drafters are held against: give yours another name")
        return dict(drafters)
    names = dict.fromkeys(several(drafters))
    return {name: load_drafter(name, target, temperature, batch) for name in names}


def first_prompts(target: Target, questions: Sequence[Question], max_new_tokens: int = 1) -> list[list[int]]:
    """The first turn of every question, as tokens. Raises ValueError as `prompt_of` does."""
    if not questions:
        raise ValueError("no questions: give one at least")
    return [prompt_of(target, question, 0, question.turns[0], max_new_tokens) for question in questions]


def prompt_of(target: Target, question: Question, turn: int, text: Any, max_new_tokens: int) -> list[int]:
    """The tokens of a question's turn, or of the chat that leads to it. Raises ValueError, by name, where no
    room is left for an answer."""
    try:
        prompt = encode(target, text)
        SamplingParams.of(target, max_new_tokens).limit(prompt)
    except ValueError as error:
        raise ValueError(f"question {question.name}{f', turn {1 + turn}' * bool(turn)}: {error}") from error
    return prompt


def hf_generate(target: HFTarget, tokens: Int[Tensor, "B T"], **kwargs: Any) -> Int[Tensor, "B T2"]:
    """Hugging Face's `generate` on the same weights, with its own attention and layers."""
    plain: Any = target.plain
    plain.generation_config = target.model.generation_config  # which the user may have changed since
    return plain.generate(tokens, **{"attention_mask": torch.ones_like(tokens)} | kwargs)


def hf_answers(
    target: HFTarget, prompts: list[list[int]], max_new_tokens: int, temperature: float, seed: int = 0
) -> list[list[int]]:
    """Its tokens for prompts that are given at once, padded on the left. It reads what is no argument from
    generation_config itself. Raises ValueError as `generate` does."""
    settings = SamplingParams.of(target, max_new_tokens, temperature=temperature, seed=seed)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature:
        torch.manual_seed(seed)
        sampling = settings.row(0, prompts[0])
        options |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    if settings.stop and target.text is not None:
        options |= {"stop_strings": list(settings.stop), "tokenizer": target.text.tokenizer}
    options |= {name: None for name in OTHERWISE if getattr(target.generation_config, name, None)}
    pad, longest = next(token for token in count() if token not in settings.eos), max(map(len, prompts))
    if len(prompts) > 1:
        options["pad_token_id"] = pad
    rows = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    read = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    generated = hf_generate(
        target,
        torch.tensor(rows, device=target.device),
        attention_mask=torch.tensor(read, device=target.device),
        max_new_tokens=min(settings.limit(prompt) for prompt in prompts),
        eos_token_id=sorted(settings.eos) or None,
        use_cache=True,
        return_dict_in_generate=False,
        **options,
    )
    answers = generated[:, longest:].tolist()
    filler = pad if settings.stop else None  # without stop strings none but an end token ends a row early
    return answers if len(prompts) == 1 else [_ended(answer, settings.eos, filler) for answer in answers]


def _ended(answer: list[int], eos: frozenset[int], pad: int | None) -> list[int]:
    """An answer without what fills its row up to the longest answer's length."""
    ends = next((i + 1 for i, token in enumerate(answer) if token in eos), None)
    if ends is None:  # a stop string ended it, or the limit
        ends = max((i + 1 for i, token in enumerate(answer) if token != pad), default=0)
    return answer[:ends]
