"""Many texts through one session: does each say what it says alone, and does memory stay level?

    python benchmarks/crowd.py smollm2 --questions mt_bench.jsonl --questions alpaca.jsonl --no-compile \
        --json benchmarks/results/crowd.json

Texts have prompts, lengths and settings of their own (greedy; sampled with top-p, min-p or top-k; penalties).
They join in groups when rows are free, prompts are read in chunks between rounds, and each leaves at its own
length. The reference is plain decoding of each text alone. Then `--through` short texts pass through one call
of `generate`, and the process's memory is looked at after every hundred.
"""

import os
import random
from itertools import cycle, islice, takewhile
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import typer

from common import prompts_by_file, run
from slipstream.cli import common as cli
from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampling
from slipstream.drafters import load_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.engine import Engine
from slipstream.engine.generate import Job
from slipstream.engine.request import Request
from slipstream.files import check_writable, write_json
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget, load_target

ROWS = 16  # texts under way at once
SHORTEST, LONGEST = 4, 24  # tokens of an answer
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0},
    {"repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 40, "presence_penalty": 0.5},
    {"temperature": 0.9, "min_p": 0.05, "frequency_penalty": 0.3},
]
DRAFTERS = (
    "ngram", "suffix", "lookahead", "eagle", "eagle3", "fasteagle", "medusa", "bita", "glide", "hybrid",
    "auto",
)  # fmt: skip


class Wanted(NamedTuple):
    """A text to make."""

    prompt: list[int]
    sampling: Sampling
    new: int


def texts(prompts: list[list[int]], count: int) -> list[Wanted]:
    """`count` texts, each with settings and a length of its own."""
    chance = random.Random(0)
    asked = islice(cycle(prompts), count)
    return [
        Wanted(
            prompt,
            Sampling(seed=i // 7, row=i, **SETTINGS[i % len(SETTINGS)]),
            chance.randint(SHORTEST, LONGEST),
        )
        for i, prompt in enumerate(asked)
    ]


def alone(target: HFTarget, wanted: Wanted) -> list[int]:
    """Plain decoding, one text."""
    engine = Engine(target, Vanilla(), capacity=len(wanted.prompt) + wanted.new)
    request = Request(wanted.prompt, wanted.sampling, wanted.new)
    engine.add(request)
    while engine.busy:
        engine.step()
    return request.tokens


def together(target: HFTarget, drafter: Drafter, wanted: list[Wanted], rows: int = ROWS) -> list[list[int]]:
    """All of them, in one engine."""
    chance, requests = random.Random(1), [Request(each.prompt, each.sampling, each.new) for each in wanted]
    waiting, capacity = requests[:], max(len(each.prompt) + each.new for each in wanted)
    engine = Engine(target, drafter, rows=rows, capacity=capacity, specs=drafter.candidate_trees)
    while waiting or engine.busy:
        engine.free()
        free = 0 if engine.prefill else min(len(waiting), rows - len(engine.running))
        if free and (not engine.running or chance.random() < 0.3):
            engine.begin(*(waiting.pop(0) for _ in range(chance.randint(1, free))))
        # Trees of every size, as a policy may choose them.
        spec = chance.choice(drafter.candidate_trees) if drafter.candidate_trees else None
        if engine.prefill is not None and (not engine.running or chance.random() < 0.5):
            engine.read()
        else:
            engine.decode(spec=spec)
    return [request.tokens for request in requests]


def resident() -> float:
    """MiB of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def level(
    target: HFTarget, prompts: list[list[int]], drafter: str, count: int, new: int = 4
) -> dict[str, Any]:
    """Memory while `count` short texts pass through one engine, after every hundred; all must end."""
    asked = [prompt[-32:] for prompt in islice(cycle(prompts), count)]
    how: Any = {"batch": ROWS, "max_new_tokens": new, "temperature": 0.0, "eos_token_ids": ()}
    job, seen = Job.of(target, asked, drafter, **how), list[float]()
    for _ in job.steps():
        ended = sum(each.finish is not None for each in job.requests)
        if ended >= 100 * (len(seen) + 1):
            seen.append(round(resident(), 1))
    answers = [len(each.tokens) for each in job.requests]
    return {"texts": count, "whole": answers.count(new), "drafter": drafter, "mib_by_hundred": seen}


def main(
    target: Annotated[str, typer.Argument()],
    questions: Annotated[list[str], cli.option("JSONL file", "FILE")],
    json: Annotated[str, cli.option("the result", "FILE")],
    drafter: Annotated[list[str], cli.option("a drafter; repeat it", "NAME")] = list(DRAFTERS),  # noqa: B006
    count: Annotated[int, cli.option("texts of each session", "N")] = 200,
    through: Annotated[int, cli.option("texts whose memory is looked at", "N")] = 2000,
    dtype: Annotated[str, cli.option("precision", "NAME")] = "auto",
    compile: Annotated[bool, cli.option("compile every pass")] = True,
) -> None:
    """Answer, compare, print."""
    check_writable(json, reads=questions)
    loaded = load_target(target, dtype, compile=compile)
    prompts = [prompt for some in prompts_by_file(loaded, questions, 25).values() for prompt in some]
    wanted = texts(prompts, count)
    head, rows = heading(loaded) | {"exactness": loaded.exactness, "rows": ROWS}, list[dict[str, Any]]()
    plain = [alone(loaded, each) for each in wanted]
    for name in drafter:
        began = perf_counter()
        made = together(loaded, load_drafter(name, loaded, temperature=1.0, texts=ROWS), wanted)
        same = [
            sum(1 for _ in takewhile(lambda t: t[0] == t[1], zip(*pair, strict=True)))
            for pair in zip(plain, made, strict=True)
        ]
        found = {
            "drafter": name,
            "texts": count,
            "equal_texts": sum(a == b for a, b in zip(plain, made, strict=True)),
        }
        found |= {"tokens": sum(map(len, plain)), "equal_tokens": sum(same)}
        rows.append(found | {"seconds": round(perf_counter() - began, 1)})
        write_json(json, head | {"arms": rows})
        print(rows[-1], flush=True)
    memory = level(loaded, prompts, "ngram", through) if through else None
    write_json(json, head | {"arms": rows, "memory": memory})
    table = Figures(
        f"{target}, {loaded.dtype_name}: equal to plain decoding alone",
        "drafter",
        "texts",
        "equal",
        "tokens",
        "equal",
    )
    for row in rows:
        table.add_row(row["drafter"], row["texts"], row["equal_texts"], row["tokens"], row["equal_tokens"])
    cli.out.print(table)
    if memory:
        cli.out.print(memory)


if __name__ == "__main__":
    run(main)
