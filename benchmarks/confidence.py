r"""How often a drafted token is accepted, by the drafter's own confidence in it (GLIDE with a CAPE §4.2, Fig.
1b).

    python benchmarks/confidence.py eagle fasteagle --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/confidence.json --plot docs/confidence.svg

Drafts start at every position of the target's own greedy answers and follow them: each drafted token is
judged where all before it were right. The calibration error is the mean distance of confidence and acceptance
over bins, by their size.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slipstream.core.grow import Expand
from slipstream.core.shape import Shape
from slipstream.core.tree import Tree
from slipstream.decode.predict import record
from slipstream.drafters import load_drafter
from slipstream.files import check_writable, write_json
from slipstream.measure.questions import load_questions
from slipstream.measure.tune import ranks
from slipstream.picture import picture
from slipstream.results import heading
from slipstream.targets import load_target
from slipstream.targets.prompts import encode

BINS, RANKS = 10, (1, 3, 5, 7)  # CAPE takes 1, 3, 5 or 7 candidates

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("drafters", nargs="+", help="as in `slipstream bench`")
options.add_argument("--target", default="smollm2")
options.add_argument("--questions", action="append", default=[])
options.add_argument("--limit", type=int, default=10)
options.add_argument("--max-new-tokens", type=int, default=128)
options.add_argument("--dtype", default="float32")
options.add_argument("--depth", type=int, default=3, help="tokens drafted ahead, where the drafter can")
options.add_argument("--json", default=None)
options.add_argument("--plot", default=None)
given = options.parse_args()
check_writable(given.json)


@dataclass(frozen=True)
class Watched(Shape):
    """A backbone that notes how sure the drafter is of the first candidate at each depth."""

    sure: list[Float[Tensor, "B depth"]] = field(default_factory=list)

    def grow(self, root: Int[Tensor, " B"], expand: Expand) -> Tree:
        levels: list[Tensor] = []

        def watched(tokens: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            ids, log_q = expand(tokens, origin)
            levels.append(log_q[:, 0, 0].exp())
            return ids, log_q

        tree = super().grow(root, watched)
        self.sure.append(torch.stack(levels, 1))
        return tree


target = load_target(given.target, given.dtype)
drafters: dict[str, Any] = {Path(name).name: load_drafter(name, target) for name in given.drafters}
prompts = [encode(target, question.turns[0]) for question in load_questions(given.questions, given.limit)]
taps = tuple(dict.fromkeys(tap for drafter in drafters.values() for tap in drafter.taps))
recorded = record(target, prompts, given.max_new_tokens, taps, batch=20)
entries: dict[str, dict[str, Any]] = {}
table = Table(
    "drafter", "tokens", "confidence", "accepted", "calibration error", *(f"top {k}" for k in RANKS)
)
for label, drafter in drafters.items():
    depth = min(given.depth, drafter.deepest or given.depth)
    shape = Watched(**vars(Shape.parse(f"backbone-{depth}x{max(RANKS)}")))
    rank = ranks(drafter, recorded, shape)
    confidence = torch.cat(shape.sure).double()
    confidence, rank = confidence[rank >= 0], rank[rank >= 0]
    bins = []
    for b in range(BINS):
        inside = (confidence >= b / BINS) & ((confidence < (b + 1) / BINS) | (b == BINS - 1))
        if n := int(inside.sum()):
            hits = {f"top_{k}": round(float((rank[inside] < k).double().mean()), 4) for k in RANKS}
            bins.append({"tokens": n, "confidence": round(float(confidence[inside].mean()), 4), **hits})
    error = sum(each["tokens"] * abs(each["confidence"] - each["top_1"]) for each in bins) / len(rank)
    entries[label] = {"tokens": len(rank), "depth": depth, "calibration_error": round(error, 4), "bins": bins}
    hits = [f"{float((rank < k).double().mean()):.3f}" for k in RANKS]
    table.add_row(label, str(len(rank)), f"{float(confidence.mean()):.3f}", hits[0], f"{error:.3f}", *hits)
Console().print(table)

if given.json:
    about = {
        "command": f"python benchmarks/confidence.py {shlex.join(sys.argv[1:])}",
        "max_new_tokens": given.max_new_tokens,
        "questions": [Path(name).name for name in given.questions],
    }
    write_json(given.json, {**heading(target), **about, "limit": given.limit, "drafters": entries})
if given.plot:
    with picture(given.plot, 2) as (left, right):
        left.plot([0, 1], [0, 1], color="0.8", linewidth=1)
        for label, entry in entries.items():
            xs, ys = zip(*((each["confidence"], each["top_1"]) for each in entry["bins"]), strict=True)
            left.plot(
                xs, ys, marker="o", markersize=3, label=f"{label} (error {entry['calibration_error']:.3f})"
            )
        left.set(
            xlabel="confidence", ylabel="accepted", xlim=(0, 1), ylim=(0, 1), title="Accepted, by confidence"
        )
        left.legend(frameon=False, fontsize=8)
        label, entry = next(iter(entries.items()))
        for k in RANKS:
            xs, ys = zip(*((each["confidence"], each[f"top_{k}"]) for each in entry["bins"]), strict=True)
            right.plot(xs, ys, marker="o", markersize=3, label=f"among the first {k}")
        right.set(
            xlabel="confidence",
            xlim=(0, 1),
            ylim=(0, 1),
            title=f"The right token among the candidates ({label})",
        )
        right.legend(frameon=False, fontsize=8)
