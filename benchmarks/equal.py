"""Are texts equal, token for token? Plain decoding, one text at a time, against everything else.

    python benchmarks/equal.py smollm2 --questions mt_bench.jsonl --questions gsm8k.jsonl --dtype float32 \
        --limit 20 --json benchmarks/results/equal_float32.json

Every arm answers the same questions at each temperature: plain decoding with several texts at once, and each
drafter, which takes another batch size at each temperature. Texts come and go, and prompts are read in chunks
of another size in every batch. The result is written after every arm.
"""

from collections.abc import Sequence
from itertools import takewhile
from time import perf_counter
from typing import Annotated, Any
from unittest import mock

import typer

from common import prompts_by_file, run
from slipstream import generate
from slipstream.cli import common as cli
from slipstream.engine import engine
from slipstream.files import check_writable, write_json
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget, load_target

BATCHES = {1: 512, 3: 100, 8: 37}  # texts at once, and prompt tokens in a chunk
DRAFTERS = ("ngram", "lookahead", "eagle", "fasteagle", "hybrid")


def answers(
    target: HFTarget, prompts: list[list[int]], drafter: str, batch: int, temperature: float, new: int
) -> list[list[int]]:
    """One answer a prompt."""
    options: Any = {"batch": batch, "temperature": temperature, "max_new_tokens": new, "seed": 0}
    with mock.patch.object(engine, "CHUNK", BATCHES[batch]):
        return [list(made.tokens) for made in generate(target, prompts, drafter, **options)]


def arm(plain: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """How many answers and tokens are equal, up to the first difference of each answer."""
    pairs = list(zip(plain, other, strict=True))
    same = [sum(1 for _ in takewhile(lambda t: t[0] == t[1], zip(a, b, strict=False))) for a, b in pairs]
    return {
        "answers": len(plain),
        "equal_answers": sum(a == b for a, b in pairs),
        "tokens": sum(map(len, plain)),
        "equal_tokens": sum(same),
    }


def equal(
    target: HFTarget,
    prompts: list[list[int]],
    drafters: Sequence[str],
    temperatures: Sequence[float],
    new: int,
    keep: Any = lambda rows: None,
) -> list[dict[str, Any]]:
    """One row for each arm; `keep` gets all rows so far."""
    rows: list[dict[str, Any]] = []
    sizes = list(BATCHES)
    for i, temperature in enumerate(temperatures):
        plain = answers(target, prompts, "vanilla", 1, temperature, new)
        arms = [("vanilla", size) for size in sizes[1:]]
        arms += [(drafter, sizes[(i + j) % len(sizes)]) for j, drafter in enumerate(drafters)]
        for drafter, batch in arms:
            began = perf_counter()
            found = arm(plain, answers(target, prompts, drafter, batch, temperature, new))
            named = {"drafter": drafter, "temperature": temperature, "batch": batch}
            rows.append({**named, **found, "seconds": round(perf_counter() - began, 1)})
            keep(rows)
    return rows


def main(
    target: Annotated[str, typer.Argument()],
    questions: Annotated[list[str], cli.option("JSONL file", "FILE")],
    json: Annotated[str, cli.option("the result", "FILE")],
    drafter: Annotated[list[str], cli.option("a drafter; repeat it", "NAME")] = list(DRAFTERS),  # noqa: B006
    temperature: Annotated[list[float], cli.option("repeat it", "T")] = [0.0, 0.7, 1.0],  # noqa: B006
    limit: Annotated[int, cli.option("questions of each file", "N")] = 10,
    max_new_tokens: Annotated[int, cli.option("tokens an answer", "N")] = 128,
    dtype: Annotated[str, cli.option("precision", "NAME")] = "auto",
    compile: Annotated[bool, cli.option("compile every pass")] = False,
    quantize: cli.Quantize = None,
) -> None:
    """Answer, compare, print."""
    check_writable(json, reads=questions)
    loaded = load_target(target, dtype, compile=compile, quantize=quantize)
    prompts = [prompt for some in prompts_by_file(loaded, questions, limit).values() for prompt in some]
    head = heading(loaded) | {"exactness": loaded.exactness}

    def keep(rows: list[dict[str, Any]]) -> None:
        counts = ("answers", "equal_answers", "tokens", "equal_tokens")
        whole = {key: sum(row[key] for row in rows) for key in counts}
        write_json(json, head | {"all": whole, "arms": rows})
        print(rows[-1], flush=True)

    rows = equal(loaded, prompts, drafter, temperature, max_new_tokens, keep)
    columns = ("T", "batch", "answers", "equal", "tokens", "equal")
    table = Figures(f"{target}, {loaded.dtype_name}: equal to plain decoding", "drafter", *columns)
    for row in rows:
        counts = (row["answers"], row["equal_answers"], row["tokens"], row["equal_tokens"])
        table.add_row(row["drafter"], f"{row['temperature']:g}", row["batch"], *counts)
    cli.out.print(table)


if __name__ == "__main__":
    run(main)
