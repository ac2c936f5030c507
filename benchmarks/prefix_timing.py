"""What does the time to the first token tell of other texts, in a session that keeps prefixes as servers do?

    python benchmarks/prefix_timing.py smollm2 --json benchmarks/results/prefix_timing.json

In each turn a text of random tokens is answered and kept. Then prompts that begin with all of it, with a half
and not at all, each of as many tokens, are admitted, with its salt and with another. Stored are medians, and
how often one is right who sees two times, of a prompt that begins as the text does and of one that does not,
and takes the quicker one for the first: 0.5 is a guess.
"""

import random
from collections import defaultdict
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer

from common import run
from slipstream.cli import common as cli
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request
from slipstream.files import check_writable, write_json
from slipstream.results import heading
from slipstream.targets import HFTarget, load_target

SALTS = {"same_salt": 1, "other_salt": 2}


def told(target: HFTarget, tokens: int, turns: int, seed: int = 0) -> dict[str, Any]:
    """Milliseconds to the first token, and what they tell, by salt and by what a prompt begins with."""
    draw, times = random.Random(seed), defaultdict[tuple[str, str], list[float]](list)

    def some(count: int) -> list[int]:
        return [draw.randrange(target.vocab) for _ in range(count)]

    engine = Engine(target, Vanilla(), rows=1, capacity=2 * tokens, keep=4 * tokens)

    def first(prompt: list[int], salt: int) -> float:
        began = perf_counter()
        [request] = engine.admit(Request(prompt, salt=salt))
        took = perf_counter() - began
        engine.cancel(request)
        engine.free()
        return 1000 * took

    for turn in range(turns + 1):  # the first one warms up
        arms = [(name, what) for name in SALTS for what in ("all", "half", "nothing")]
        for name, what in draw.sample(arms, len(arms)):
            text = some(tokens)
            first(text, SALTS["same_salt"])
            known = {"all": tokens, "half": tokens // 2, "nothing": 0}[what]
            took = first(text[:known] + some(2 * tokens - known - 2), SALTS[name])
            if turn:
                times[name, what].append(took)
    made: dict[str, Any] = {"tokens": tokens, "prompt_tokens": 2 * tokens - 2, "turns": turns}
    for name in SALTS:
        unknown = times[name, "nothing"]
        arm: dict[str, Any] = {f"{what}_ms": round(median(times[name, what]), 1) for what in ("all", "half")}
        arm |= {"nothing_ms": round(median(unknown), 1)}
        for what in ("all", "half"):
            pairs = [(a < b) + (a == b) / 2 for a in times[name, what] for b in unknown]
            arm[f"{what}_is_told"] = round(sum(pairs) / len(pairs), 2)
        made[name] = arm
    return made


def main(
    target: Annotated[str, typer.Argument()],
    json: Annotated[str, cli.option("the result", "FILE")],
    tokens: Annotated[int, cli.option("of a text", "N")] = 128,
    turns: Annotated[int, cli.option("of each kind of prompt", "N")] = 40,
    dtype: Annotated[str, cli.option("of the target", "NAME")] = "bfloat16",
) -> None:
    """Measure, print, store."""
    check_writable(json)
    loaded = load_target(target, dtype)
    write_json(json, heading(loaded) | (found := told(loaded, tokens, turns)))
    cli.out.print(found)


if __name__ == "__main__":
    run(main)
