"""Whole answers of every drafter, prompts included, beside Hugging Face and vLLM: `gpu.py --answers`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from math import inf
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from rich.console import Group
from rich.text import Text

from common import ratio
from engines import Answers, Engine, started
from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.files import first_line
from slipstream.measure.datasets import Question
from slipstream.measure.metrics import Answered, Tally
from slipstream.measure.results import HF
from slipstream.measure.runner import Runner, first_prompts
from slipstream.methods import named
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget

PLAIN, VLLM = "vanilla", "vLLM"
TEXTS = (1, 8)
SHARE = 0.3  # of the GPU's memory, for vLLM beside us
Ask = Callable[[list[list[int]]], list[Answered]]
Made = dict[tuple[int, str], dict[int, list[Answered]]]  # by texts at once and arm: by group of questions


class Arm(Part):
    """Answers of one arm, so many `texts` at once.

    Attributes:
        answers: that are counted.
        tau: None where it is not known.
        over_plain: tokens per second over plain decoding's on the same questions, and the ends of its 95 %.
        same: answers of which every token is plain decoding's.
        first_seconds: of the first call, which compiles and is not counted.
    """

    arm: str
    texts: int
    answers: int
    tokens_per_second: float
    tau: float | None
    over_plain: list[float]
    same: int
    first_seconds: float


class AnswersReport(Report):
    """What `race` found. `skipped`: arms that failed, and why."""

    exactness: str
    max_new_tokens: int
    questions: int
    arms: list[Arm]
    skipped: dict[str, str]

    def __rich__(self) -> Group:
        title = f"{self.model}, T = 0, at most {self.max_new_tokens} tokens, rows {self.exactness}"
        table = Figures(
            title, "arm", "texts", "answers", "tok/s", "τ", "× plain", "95 %", "as plain", "first, s"
        )
        for arm in self.arms:
            over, low, high = arm.over_plain
            tau = "–" if arm.tau is None else f"{arm.tau:.2f}"
            ends = "–" if low == high else f"{low:.2f} to {high:.2f}"
            speeds = (f"{arm.tokens_per_second:.1f}", tau, f"{over:.2f}", ends)
            table.add_row(arm.arm, arm.texts, arm.answers, *speeds, arm.same, f"{arm.first_seconds:.1f}")
        return Group(table, *(Text(f"{arm} is left out: {why}") for arm, why in self.skipped.items()))


def race(
    target: HFTarget,
    questions: Sequence[Question],
    *,
    texts: Sequence[int] = TEXTS,
    max_new_tokens: int = 128,
    until: float = inf,
    keep: Callable[[AnswersReport], None] = lambda report: None,
    progress: Callable[[str], None] = lambda what: None,
) -> AnswersReport:
    """Let every arm answer the first turn of every question at T = 0, in an order that rotates, with one and
    with several texts at once in turn.

    Args:
        texts: at once. Questions that fill no group are not asked.
        until: when no further arm is asked, as `perf_counter` counts.
        keep: called with what is known after each arm's turn.
    """
    prompts = first_prompts(target, questions, max_new_tokens)
    made, first, skipped = Made(), dict[tuple[int, str], float](), dict[str, str]()
    head = heading(target)

    def found() -> AnswersReport:
        return AnswersReport(
            **head,
            exactness=target.exactness,
            max_new_tokens=max_new_tokens,
            questions=len(prompts),
            arms=sorted((_arm(made, first[place], *place) for place in made), key=_place),
            skipped=skipped,
        )

    with ExitStack() as last:
        others = {VLLM: vllm(target, max(texts), max_new_tokens, last)} if find_spec("vllm") else {}
        asked = {n: _arms(target, n, max_new_tokens) | others for n in texts}
        for number, n, group in _groups(prompts, texts):
            names, turn = [*asked[n]], number % len(asked[n])
            for name in names[turn:] + names[:turn]:
                if perf_counter() > until:
                    return found().stopped_by("its time was over")
                progress(f"{name}, {n} at once, group {number}")
                try:
                    if (n, name) not in first:
                        began = perf_counter()
                        asked[n][name](group)
                        first[n, name] = perf_counter() - began
                    made.setdefault((n, name), {})[number] = asked[n][name](group)
                except Exception as error:  # what was measured stays, and the others go on
                    if name == PLAIN:
                        raise
                    skipped[f"{name}, {n} at once"] = first_line(error)
                    del asked[n][name]
                keep(found())
    return found()


def _groups(prompts: list[list[int]], texts: Sequence[int]) -> Iterator[tuple[int, int, list[list[int]]]]:
    """Groups of each size in turn: their number, size and prompts."""
    for number, n in product(range(len(prompts)), texts):
        if (number + 1) * n <= len(prompts):
            yield number, n, prompts[number * n : (number + 1) * n]


def _arms(target: HFTarget, texts: int, new: int) -> dict[str, Ask]:
    """What answers so many prompts at once, by name, plain decoding first."""
    runner = Runner.of(target, drafters(target, texts), new, 0.0, 0, texts)
    return {name: partial(runner.ask_all, name) for name in (PLAIN, HF, *runner.drafters)}


def drafters(target: HFTarget, texts: int) -> dict[str, Drafter]:
    """Those that a name alone makes for the target."""
    made = {}
    for method in named():
        with suppress(ValueError):
            made[method.name] = load_drafter(method.name, target, texts=texts)
    return made


def vllm(target: HFTarget, texts: int, new: int, last: ExitStack) -> Ask:
    """vLLM for so many prompts, in a process that starts when it is first asked and ends with `last`."""

    @cache
    def process() -> Answers:
        model = last.enter_context(TemporaryDirectory())
        target.save(model)
        options: dict[str, Any] = {"model": model, "dtype": target.dtype_name, "texts": texts}
        if target.device.type == "cuda":
            options["gpu_memory_utilization"] = SHARE
        answers = started(Engine(VLLM, "VLLM", {**options, "threads": torch.get_num_threads()}))
        last.callback(answers.close)
        return answers

    def ask(prompts: list[list[int]]) -> list[Answered]:
        said = process().ask(prompts=prompts, new=new, ends=True)
        wall = (said["seconds_prompt"] + said["seconds_decode"]) / len(prompts)
        return [Answered(tokens, wall) for tokens in said["tokens"]]

    return ask


def _arm(made: Made, first: float, texts: int, name: str) -> Arm:
    own, plain = made[texts, name], made[texts, PLAIN]
    tally = Tally(answer.counted for group in own.values() for answer in group)
    both = sorted(own.keys() & plain.keys())
    pairs = [pair for group in both for pair in zip(own[group], plain[group], strict=True)]
    ours, theirs = ([_turn(some[group]) for group in both] for some in (own, plain))
    return Arm(
        arm=name,
        texts=texts,
        answers=len(tally.answers),
        tokens_per_second=round(tally.tokens_per_second, 2),
        tau=round(tally.tau, 4) if tally.rounds else None,
        over_plain=ratio(ours, theirs),
        same=sum(answer.tokens == other.tokens for answer, other in pairs),
        first_seconds=round(first, 2),
    )


def _turn(group: Sequence[Answered]) -> tuple[int, float]:
    return sum(len(answer.tokens) for answer in group), sum(answer.wall for answer in group)


def _place(arm: Arm) -> tuple[int, float]:
    """Of an arm in the table."""
    return arm.texts, -arm.tokens_per_second
