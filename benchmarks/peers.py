r"""Slipstream beside other engines, on the same prompts: tokens per second of each, in one alternating run.

    python benchmarks/peers.py smollm2 --questions mt_bench.jsonl --questions gsm8k.jsonl --limit 4 \
        --json benchmarks/results/peers_zen4.json --plot docs/peers.svg

Hugging Face `generate`, vLLM, llama.cpp and OpenVINO answer beside our drafters: docs/peers.md says how. Each
engine is a process of its own, which is stopped while another answers. vLLM, llama.cpp and OpenVINO get
environments in the user's cache, the first of which compiles for some ten minutes. An engine that cannot be
had is left out, with one line that says why.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from rich.text import Text

from common import Plot, run
from engines import OURS, Answers, Engine, Way, begun, engines, started
from slipstream.cli import common as cli
from slipstream.files import cache_home, check_counts, check_writable
from slipstream.measure.bootstrap import Paired, QuestionResult, paired
from slipstream.measure.datasets import Asking, Question, batches, load_questions
from slipstream.measure.runner import first_prompts
from slipstream.plotting import picture
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget

PLAIN = f"{OURS}, vanilla"
DRAFTERS = ["vanilla", "auto", "hybrid"]
WARM_UP = 16  # tokens


class Timed(QuestionResult):
    """One arm's answer to one question. `agree`: tokens from the start that are our plain decoding's."""

    prompt_tokens: int
    seconds_prompt: float
    agree: int


class Pace(Part):
    """An arm's figures over some questions.

    Attributes:
        tokens_per_second: prompts included.
        decode_tokens_per_second: of the tokens behind the first, in the time behind the prompt.
        prompt_ms: until the first token, the mean over the questions.
        agree: the mean over the questions.
    """

    tokens_per_second: float
    decode_tokens_per_second: float
    prompt_ms: float
    agree: float


class Arm(Pace):
    """What one engine did, in one of its ways. `speed` is the mean of the sets' tokens per second."""

    arm: str
    speed: float
    over_plain: Paired
    by_file: dict[str, Pace]
    by_question: dict[str, Timed]
    versions: dict[str, str]


class PeersReport(Report):
    """What `compare` found. `skipped`: why arms are missing."""

    max_new_tokens: int
    prompts: dict[str, int]  # questions of each file
    arms: list[Arm]
    skipped: dict[str, str]

    def __rich__(self) -> Group:
        title = f"{self.target}, {self.dtype}, T = 0, {self.max_new_tokens} tokens, {self.hardware['cpu']}"
        sets = [Path(file).stem for file in self.prompts]
        columns = ("tok/s", *sets, "prompt ms", "decode tok/s", "× plain [95 %]", "as plain")
        table = Figures(title, "engine", *columns)
        for arm in self.arms:
            speeds = [arm.speed, *(pace.tokens_per_second for pace in arm.by_file.values())]
            paces = (f"{arm.prompt_ms:.0f}", f"{arm.decode_tokens_per_second:.1f}", str(arm.over_plain))
            style = "bold" if arm.arm.startswith(OURS) else ""
            cells = (*(f"{speed:.1f}" for speed in speeds), *paces, f"{arm.agree:.0f}")
            table.add_row(arm.arm, *cells, style=style)
        return Group(table, *(Text(f"{arm} is left out: {why}") for arm, why in self.skipped.items()))

    def draw(self, path: str) -> None:
        """Bars of tokens per second, with a mark for each question set, and of the prompts' time. Raises
        ValueError."""
        arms = sorted(self.arms, key=lambda arm: arm.speed)
        names = [arm.arm.partition(":")[0] for arm in arms]
        if len({*names}) < len(names):  # drafters that differ in their options alone
            names = [arm.arm for arm in arms]
        colours = ["#2f81f7" if name.startswith(OURS) else "#8b949e" for name in names]
        with picture(path, 2, "; the result is stored") as (speed, prompt):
            speed.barh(names, [arm.speed for arm in arms], color=colours, zorder=2)
            for file, mark in zip(self.prompts, "os^Dv*P" * len(self.prompts), strict=False):
                each = [arm.by_file[file].tokens_per_second for arm in arms]
                how: Any = {"marker": mark, "s": 14, "color": "black", "zorder": 3, "linewidths": 0}
                speed.scatter(each, names, label=Path(file).stem, **how)
            speed.set_xlabel("tokens/s, prompts included")
            speed.legend(fontsize=7, loc="lower right")
            prompt.barh(names, [arm.prompt_ms for arm in arms], color=colours, zorder=2)
            prompt.set_xlabel("ms until the first token")
            prompt.set_yticklabels([])
            speed.tick_params(axis="y", labelsize=7)


def compare(
    target: HFTarget,
    drafters: Sequence[str],
    questions: Sequence[Asking] = (),
    *,
    only: Sequence[str] = (),
    limit: int | None = None,
    max_new_tokens: int = 96,
    compiles: bool = True,
    start: Callable[[Engine], Answers] = started,
    progress: Callable[[str], None] = lambda _: None,
) -> PeersReport:
    """Let every arm answer the first turn of every question, in an order that rotates.

    Args:
        only: names of engines; default: all.
        limit: questions of each file, taken evenly over it.
        start: gives what answers for an engine.

    Raises:
        ValueError: a file or a setting is out of range, or plain decoding cannot run.
    """
    check_counts(max_new_tokens=max_new_tokens)
    asked = [question for (question,) in batches(load_questions(questions, limit), 1)]
    prompts = first_prompts(target, asked, max_new_tokens)
    turns = [(max(prompts, key=len), WARM_UP), *((prompt, max_new_tokens) for prompt in prompts)]
    with ExitStack() as last:
        home = cache_home() / "peers" / f"{target.fingerprint}-{target.dtype_name}"  # vLLM's cache knows it
        every = engines(target, home, drafters, torch.get_num_threads(), compiles)
        if unknown := set(only) - {engine.name for engine in every}:
            names = ", ".join(dict.fromkeys(engine.name for engine in every))
            raise ValueError(f"Unknown engine: {min(unknown)!r}. Available: {names}")
        every = [engine for engine in every if not only or engine.name in only]
        arms, skipped = begun(every, last, progress, start)
        made = rounds(arms, turns, skipped, progress)
    if PLAIN not in made:
        raise ValueError(f"plain decoding cannot run: {skipped.get(PLAIN, 'name the drafter vanilla')}")
    plain = [answer["tokens"] for answer in made[PLAIN]]
    timed = {name: _timed(asked, prompts, found, plain) for name, found in made.items()}
    return PeersReport(
        **{**heading(target), "compiled": compiles},
        max_new_tokens=max_new_tokens,
        prompts={file: sum(question.file == file for question in asked) for file in _files(timed[PLAIN])},
        arms=[_arm(name, each, timed[PLAIN], arms[name].answers.versions) for name, each in timed.items()],
        skipped=skipped,
    )


def rounds(
    arms: Mapping[str, Way],
    turns: Sequence[tuple[list[int], int]],
    skipped: dict[str, str],
    progress: Callable[[str], None],
) -> dict[str, list[dict[str, Any]]]:
    """Every arm's answers to all prompts but the first, which warms up. An arm that fails is left out from
    then on, and `skipped` says why."""
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number, (prompt, new) in enumerate(turns):
        names = list(made)
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            progress(f"question {number} of {len(turns) - 1}, {name}" if number else f"warming up {name}")
            try:
                answer = arms[name].answers.ask(prompts=[prompt], new=new, **arms[name].options)
                (answer["tokens"],) = answer["tokens"]
                if (count := len(answer["tokens"])) != new:
                    raise ValueError(f"it made {count} tokens, not {new}")
            except ValueError as error:
                skipped[name] = str(error)
                del made[name]
            else:
                made[name] += [answer] * (number > 0)
    return made


def _timed(
    asked: Sequence[Question],
    prompts: Sequence[list[int]],
    answers: Sequence[dict[str, Any]],
    plain: Sequence[list[int]],
) -> dict[str, Timed]:
    found = {}
    for question, prompt, answer, reference in zip(asked, prompts, answers, plain, strict=True):
        tokens, behind = answer["tokens"], answer["seconds_prompt"]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, reference, strict=True))
        found[question.name] = Timed(
            file=question.file,
            new_tokens=len(tokens),
            seconds=round(behind + answer["seconds_decode"], 4),
            prompt_tokens=len(prompt),
            seconds_prompt=round(behind, 4),
            agree=sum(1 for _ in same),
        )
    return found


def _files(timed: Mapping[str, Timed]) -> list[str]:
    return list(dict.fromkeys(each.file for each in timed.values()))


def _pace(timed: Sequence[Timed]) -> Pace:
    tokens, seconds = sum(each.new_tokens for each in timed), sum(each.seconds for each in timed)
    prompts, count = sum(each.seconds_prompt for each in timed), len(timed)
    return Pace(
        tokens_per_second=round(tokens / seconds, 2),
        decode_tokens_per_second=round((tokens - count) / max(seconds - prompts, 1e-9), 2),
        prompt_ms=round(1e3 * prompts / count, 1),
        agree=round(sum(each.agree for each in timed) / count, 1),
    )


def _arm(name: str, timed: dict[str, Timed], plain: dict[str, Timed], versions: dict[str, str]) -> Arm:
    by_file = {file: _pace([each for each in timed.values() if each.file == file]) for file in _files(timed)}
    return Arm(
        **dict(_pace(list(timed.values()))),
        arm=name,
        speed=round(sum(pace.tokens_per_second for pace in by_file.values()) / len(by_file), 2),
        over_plain=paired(timed, plain),
        by_file=by_file,
        by_question=timed,
        versions=versions,
    )


def main(
    target: Annotated[str, typer.Argument(help=cli.NAMED)],
    questions: cli.Files = [],  # noqa: B006
    drafter: cli.DrafterNames = DRAFTERS,
    engine: Annotated[
        list[str], cli.option("only this one, such as 'llama.cpp Q4_1'; repeatable", "NAME")
    ] = [],  # noqa: B006
    limit: cli.Limit = None,
    max_new_tokens: cli.MaxNewTokens = 96,
    dtype: cli.Dtype = "auto",
    json_path: cli.JsonPath = None,
    plot: Plot = None,
) -> None:
    check_writable(json_path, plot, reads=cli.inputs(target, drafter, questions))
    loaded = cli.load(target, dtype, "cpu")
    with cli.progress_bar(None) as step:
        how: Any = {"limit": limit, "max_new_tokens": max_new_tokens, "progress": step}
        report = compare(loaded, drafter, questions, only=engine, **how)
    cli.deliver(report, json_path, plot, report.draw)


if __name__ == "__main__":
    run(main)
