"""Two checkouts of this project in one alternating race: times and texts of the same prompts, paired.

    python benchmarks/before_after.py ../before . --questions mt_bench.jsonl --drafter vanilla --drafter ngram

Each checkout answers in a process of its own, with the `slipstream` in its `src`. The order of the two
changes from prompt to prompt, so that a machine that slows down slows both.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from slipstream import machine
from slipstream.measure.bootstrap import student

WORKER = """
import json, sys, time, slipstream
target = slipstream.load_target(sys.argv[1], sys.argv[2], "cpu", sys.argv[3] == "True")
for line in sys.stdin:
    asked = json.loads(line)
    drafter = asked.pop("drafter")
    began = time.perf_counter()
    made = slipstream.generate(target, asked.pop("prompt"), drafter, **asked)
    print(json.dumps({"seconds": time.perf_counter() - began, "tokens": made.tokens}), flush=True)
"""


class Checkout:
    """A process that answers with the code of one checkout."""

    def __init__(self, home: str, target: str, dtype: str, compiles: bool) -> None:
        env = os.environ | {"PYTHONPATH": str(Path(home).resolve() / "src"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", WORKER, target, dtype, str(compiles)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=home
        )

    def ask(self, **asked: object) -> dict[str, Any]:
        """One answer: its tokens, and the seconds from the prompt to the last of them."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a checkout ended early: its error stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("before")
    options.add_argument("after")
    options.add_argument("--questions", action="append", required=True, metavar="FILE")
    options.add_argument("--limit", type=int, default=4, help="questions of each file")
    options.add_argument("--drafter", action="append", required=True, metavar="NAME")
    options.add_argument("--target", default="smollm2")
    options.add_argument("--max-new-tokens", type=int, default=96)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--compile", action="store_true")
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--json", metavar="FILE")
    given = options.parse_args()
    rows = [
        json.loads(line)["turns"][0]
        for name in given.questions
        for line in Path(name).read_text("utf-8").splitlines()[: given.limit]
    ]
    homes = (given.before, given.after)
    sides = [Checkout(home, given.target, given.dtype, given.compile) for home in homes]
    results = []
    for drafter in given.drafter:
        settings = {"drafter": drafter, "max_new_tokens": given.max_new_tokens, "temperature": 0.0}
        for side in sides:  # compilation and first allocations
            side.ask(prompt=rows[0], **settings)
        ratios, alike, spent = [], 0, [0.0, 0.0]
        for number, prompt in enumerate(rows * given.repeats):
            answers: dict[int, dict[str, Any]] = {}
            for i in (0, 1) if number % 2 else (1, 0):
                answers[i] = sides[i].ask(prompt=prompt, **settings)
            seconds = [answers[i]["seconds"] / max(len(answers[i]["tokens"]), 1) for i in (0, 1)]  # a token
            spent = [total + own for total, own in zip(spent, seconds, strict=True)]
            ratios.append(math.log(seconds[0] / seconds[1]))
            alike += answers[0]["tokens"] == answers[1]["tokens"]
        own = [mean(ratios[i :: len(rows)]) for i in range(len(rows))]  # a prompt once
        interval = None
        if len(own) > 1:
            wide = student(len(own) - 1) * stdev(own) / len(own) ** 0.5
            interval = [round(math.exp(mean(ratios) + sign * wide), 4) for sign in (-1, 1)]
        result = {
            "drafter": drafter,
            "answers": len(ratios),
            "identical": alike,
            "speed_after_over_before": round(math.exp(mean(ratios)), 4),
            "interval": interval,
            "of_totals": round(spent[0] / spent[1], 4),
        }
        print(json.dumps(result), flush=True)
        results.append(result)
    if given.json:
        commits = [
            subprocess.run(
                ["git", "-C", home, "rev-parse", "HEAD"], capture_output=True, text=True
            ).stdout.strip()
            for home in homes
        ]
        report = {"schema": machine.SCHEMA, "command": " ".join(["python", *sys.argv])}
        report |= {"hardware": machine.hardware(), "versions": machine.versions()}
        report |= {"commits": commits, "dtype": given.dtype}
        report |= {"compiled": given.compile, "results": results}
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
