"""τ and speed of an eagle drafter with many trees and with its tuned one, along the target's greedy answers
to question files. Minutes, not hours: the target answers once, each tree is then held against the record, and
some of its rounds are timed, all trees in alternation.

    python benchmarks/trees.py --questions mt_bench.jsonl --questions gsm8k.jsonl --json
    benchmarks/results/trees.json
"""

import argparse
import shlex
import sys

from rich.console import Console
from rich.table import Column, Table

from slipstream.core.shape import Shape
from slipstream.decode.predict import predict, record
from slipstream.drafters import load_drafter
from slipstream.drafters.store import find_drafter, read_tuned
from slipstream.drafters.vanilla import Vanilla
from slipstream.files import check_writable, write_json
from slipstream.measure.cost import Rounds
from slipstream.measure.questions import load_questions
from slipstream.results import heading
from slipstream.targets import load_target
from slipstream.targets.prompts import encode

BUDGETS = {
    2: (3, 4, 5, 6, 8, 10),
    3: (4, 5, 6, 8, 10, 12),
    4: (6, 8, 12, 16),
    5: (8, 10, 12, 16, 20, 26),
    6: (26,),
}
TREES = [f"best-first-{depth}x{nodes}" for depth, budgets in BUDGETS.items() for nodes in budgets]
TREES += [*(f"chain-{depth}" for depth in range(1, 6)), "[[0],[1],[2],[3]]", "fig9"]
TREES += ["dynamic-5x4x16", "dynamic-5x8x16", "dynamic-5x8x26"]

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--target", default="smollm2")
options.add_argument("--drafter", default="eagle", help="a name or a directory")
options.add_argument("--questions", action="append", default=[])
options.add_argument("--limit", type=int, default=20)
options.add_argument("--max-new-tokens", type=int, default=128)
options.add_argument("--dtype", default="float32")
options.add_argument("--compile", action="store_true")
options.add_argument("--rounds", type=int, default=9, help="of each tree that are timed")
options.add_argument("--json", default=None)
given = options.parse_args()
check_writable(given.json)

target = load_target(given.target, given.dtype, compile=given.compile)
parts: dict[str, list[list[int]]] = {}
for question in load_questions(given.questions, given.limit):
    parts.setdefault(question.file, []).append(encode(target, question.turns[0]))
records = {
    file: record(target, prompts, given.max_new_tokens, ("final",), batch=8)
    for file, prompts in parts.items()
}

drafter = load_drafter(given.drafter, target)
shapes = {tree: Shape.parse(tree) for tree in TREES}
if tuned := read_tuned(find_drafter(given.drafter, target), target.place, 0.0):
    shapes["tuned"] = Shape.parse(tuned["tree"])
probe = min((prompt for prompts in parts.values() for prompt in prompts), key=len)
arms = [(drafter, shape) for shape in shapes.values()]
plain, *costs = Rounds(target, [(Vanilla(), None), *arms], probe, most=given.rounds).run(given.rounds)

rows = []
table = Table(
    Column("tree", min_width=20), "nodes", "depth", *records, "τ", "draft", "verify", "host ms", "× plain"
)
for (tree, shape), cost in zip(shapes.items(), costs, strict=True):
    found = {file: predict(drafter, recorded, shape) for file, recorded in records.items()}
    rounds = sum(p.rounds for p in found.values())
    tau = sum(p.tau * p.rounds for p in found.values()) / rounds
    depths = [sum(p.acceptance[d] * p.rounds for p in found.values()) / rounds for d in range(shape.depth)]
    speedup, ms = (
        tau * plain.total / cost.total,
        [1e3 * part for part in (cost.draft, cost.verify, cost.host)],
    )
    parts_ms = [f"{part:.1f}" for part in ms]
    name = f"tuned: {shape.name}" if tree == "tuned" else tree
    by_file = {file: round(p.tau, 4) for file, p in found.items()}
    table.add_row(
        name, str(shape.nodes), str(shape.depth), *(f"{t:.2f}" for t in by_file.values()), f"{tau:.2f}",
        *parts_ms,
        f"{speedup:.2f}",
    )  # fmt: skip
    rows.append(
        {
            "tree": name,
            "nodes": shape.nodes,
            "depth": shape.depth,
            "tau": round(tau, 4),
            "by_file": by_file,
        }
    )
    rows[-1] |= {"acceptance_by_depth": [round(a, 4) for a in depths], "speedup": round(speedup, 4)}
    rows[-1] |= dict(zip(("draft_ms", "verify_ms", "host_ms"), (round(part, 3) for part in ms), strict=True))
Console().print(table)
if tuned:
    share = rows[-1]["speedup"] / max(row["speedup"] for row in rows[:-1])
    Console().print(f"the tuned tree reaches {share:.1%} of the best of the other {len(TREES)}")
if given.json:
    command = f"python benchmarks/trees.py {shlex.join(sys.argv[1:])}"
    about = {"command": command, "drafter": given.drafter, "max_new_tokens": given.max_new_tokens}
    about |= {
        "questions": {file: len(prompts) for file, prompts in parts.items()},
        "plain_ms": round(1e3 * plain.total, 3),
    }
    write_json(given.json, {**heading(target), **about, "results": rows})
