"""Answers within JSON schemas: do they validate, are they plain constrained decoding's, and how fast do they
come? The pairs of schema and prompt are those of benchmarks/schemas.py. Every drafter answers a group of
pairs in turn, plain decoding among them.
"""

import json
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Annotated, Any

import jsonschema
import typer

from common import run
from schemas import Pair, pairs
from slipstream.cli import common as cli
from slipstream.core.drafter import Drafter
from slipstream.drafters import load_drafter
from slipstream.engine.generate import Job
from slipstream.engine.request import mean_accepted_length
from slipstream.engine.sampling_params import SamplingParams
from slipstream.files import check_writable, write_json
from slipstream.results import heading
from slipstream.targets import HFTarget, load_target
from slipstream.targets.prompts import encode

PLAIN = "vanilla"
FREE = "vanilla without grammar"


def job(
    target: HFTarget, drafter: Drafter, group: Sequence[Pair], new: int, temperature: float, free: bool
) -> Job:
    """What answers these pairs at once, each within its schema, or `free`."""
    requests = []
    for i, pair in enumerate(group):
        schema = None if free else pair.schema
        params = SamplingParams.of(target, new, temperature=temperature, seed=7, json_schema=schema)
        requests.append(params.request(i, encode(target, pair.prompt), new))
    return Job(target, drafter, requests)


def fault(pair: Pair, text: str) -> str | None:
    """Why a finished answer does not validate."""
    try:
        jsonschema.Draft202012Validator(pair.schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def compare(
    target: HFTarget,
    asked: Sequence[Pair],
    drafters: Sequence[str],
    temperature: float,
    new: int,
    batch: int,
) -> list[dict[str, Any]]:
    """A result for each drafter, plain decoding first. Where texts stand alone, what masks cost is seen in
    the last: plain decoding without a grammar."""
    names = [PLAIN, *drafters, *([FREE] if batch == 1 else [])]
    loaded = {name: load_drafter(name.split()[0], target, temperature, batch) for name in names}
    results = {name: Counter[str]() for name in names}
    rounds: dict[str, list[Any]] = {name: [] for name in names}
    faults: list[str] = []
    groups = [asked[at : at + batch] for at in range(0, len(asked), batch)]
    for turn, group in enumerate([groups[0], *groups]):  # the first group once more, for what is made once
        plain: list[list[int]] = []
        for name in names:
            free = name == FREE
            work = job(target, loaded[name], group, new, temperature, free)
            began = perf_counter()
            work.run()
            seconds = perf_counter() - began
            if not turn:
                continue
            made, found = work.requests, results[name]
            plain = plain or [answer.tokens for answer in made]
            found["answers"] += len(made)
            found["new_tokens"] += sum(len(answer.tokens) for answer in made)
            found["microseconds"] += round(1e6 * seconds)
            rounds[name] += [step for answer in made for step in answer.steps]
            if free:
                continue
            found["identical"] += sum(a.tokens == b for a, b in zip(made, plain, strict=True))
            for pair, answer in zip(group, made, strict=True):
                if answer.finish == "eos":
                    found["finished"] += 1
                    wrong = fault(pair, answer.text)
                    found["valid"] += wrong is None
                    faults += [f"{pair.kind}: {wrong}"] if wrong else []
    rows = [_row(name, temperature, results[name], rounds[name], results[PLAIN]) for name in names]
    for row in rows:
        row["faults"] = sorted(set(faults))[:5] if row["drafter"] == PLAIN else []
    return rows


def _row(
    name: str, temperature: float, found: Counter[str], rounds: list[Any], plain: Counter[str]
) -> dict[str, Any]:
    speed = found["new_tokens"] / found["microseconds"] * 1e6
    made: dict[str, Any] = {"drafter": name, "temperature": temperature}
    made |= {key: found[key] for key in ("answers", "finished", "valid", "identical", "new_tokens")}
    made |= {"tokens_per_second": round(speed, 2), "tau": round(mean_accepted_length(rounds), 3)}
    return made | {"over_plain": round(speed / plain["new_tokens"] * plain["microseconds"] / 1e6, 3)}


def main(
    target: Annotated[str, typer.Argument()],
    json: Annotated[str, cli.option("the result", "FILE")],
    drafter: Annotated[list[str], cli.option("beside plain decoding; repeatable", "NAME")],
    temperature: Annotated[list[float], cli.option("repeatable", "T")],
    limit: Annotated[int, cli.option("pairs", "N")] = 300,
    max_new_tokens: Annotated[int, cli.option("of an answer", "N")] = 128,
    batch: Annotated[int, cli.option("answers at once", "N")] = 1,
    dtype: Annotated[str, cli.option("of the target", "NAME")] = "bfloat16",
    compile: cli.Compile = False,
) -> None:
    """Compare, print, store."""
    check_writable(json)
    loaded = load_target(target, dtype, compile=compile)
    loaded.warm_up()
    results: list[dict[str, Any]] = []
    for T in temperature:
        results += compare(loaded, pairs(limit), drafter, T, max_new_tokens, batch)
        write_json(json, heading(loaded) | {"pairs": limit, "batch": batch, "results": results})
    cli.out.print(results)


if __name__ == "__main__":
    run(main)
