"""Predicted τ of an eagle drafter for many trees, along the target's greedy answers to question files. Minutes, not hours:
the target answers once, and each tree is then held against the record.

    python benchmarks/trees.py --questions mt_bench.jsonl --questions gsm8k.jsonl --json benchmarks/results/trees.json
"""

import argparse

from rich.console import Console
from rich.table import Table

from slipstream.bench.questions import load_questions
from slipstream.drafters import load_drafter
from slipstream.files import check_writable, write_json
from slipstream.machine import heading
from slipstream.targets import load_target
from slipstream.train.data import Example
from slipstream.train.replay import Record, predict

TREES = ["chain-2", "chain-3", "chain-5", "[[0],[1],[2],[3]]", "best-first-3x4", "best-first-4x6", "best-first-4x8"]
TREES += ["best-first-5x10", "best-first-5x12", "best-first-5x16", "best-first-5x20", "best-first-5x26", "best-first-6x26"]
TREES += ["dynamic-5x4x16", "dynamic-5x8x16", "dynamic-5x8x26", "fig9"]

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--target", default="smollm2")
options.add_argument("--drafter", default="eagle", help="a name or a directory")
options.add_argument("--questions", action="append", default=[])
options.add_argument("--limit", type=int, default=20)
options.add_argument("--max-new-tokens", type=int, default=128)
options.add_argument("--dtype", default="float32")
options.add_argument("--json", default=None)
given = options.parse_args()
check_writable(given.json)

target = load_target(given.target, given.dtype)
parts: dict[str, list[Example]] = {}
for question in load_questions(given.questions, given.limit):
    ids = target.encode(question.turns[0])
    parts.setdefault(question.file, []).append(Example([*ids, 0], [False] * len(ids) + [True]))
records = {file: Record.of(target, examples, given.max_new_tokens, ("final",), batch=8) for file, examples in parts.items()}

rows = []
table = Table("tree", "nodes", "draft steps", *records, "all")
for tree in TREES:
    drafter = load_drafter(f"{given.drafter}:tree={tree}", target.ends)
    found = {file: predict(drafter, record) for file, record in records.items()}
    rounds = sum(p.rounds for p in found.values())
    tau = sum(p.tau * p.rounds for p in found.values()) / rounds
    depths = [sum(p.acceptance[d] * p.rounds for p in found.values()) / rounds for d in range(drafter.depth)]
    table.add_row(tree, str(drafter.rows), str(drafter.depth), *(f"{p.tau:.2f}" for p in found.values()), f"{tau:.2f}")
    by_file = {file: round(p.tau, 4) for file, p in found.items()}
    rows.append({"tree": tree, "nodes": drafter.rows, "depth": drafter.depth, "tau": round(tau, 4)})
    rows[-1] |= {"by_file": by_file, "acceptance_by_depth": [round(a, 4) for a in depths]}
Console().print(table)
if given.json:
    about = {
        "drafter": given.drafter,
        "max_new_tokens": given.max_new_tokens,
        "questions": {f: len(e) for f, e in parts.items()},
    }
    write_json(given.json, {**heading(target), **about, "results": rows})
