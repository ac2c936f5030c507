r"""Trained drafters side by side: sizes, τ by tree and question file, acceptance by depth, what a round
costs, the speed-up expected of it, and τ against the first one's with an interval.

    python benchmarks/heads.py runs/eagle3 runs/eagle runs/fasteagle --questions mt_bench.jsonl --questions
    gsm8k.jsonl \
        --tree chain-3 --tree best-first-2x4 --compile --json benchmarks/results/heads.json --plot
        docs/heads.svg

The target answers once, and every drafter is held against these answers; `bita`, which is the target, decodes
for itself, at T = 0. Intervals are over questions (95 %, bootstrap): they say nothing of other seeds of
training. α is of the first tree that is a chain: the share of drafted tokens, of those that the ones before
them let through, that are accepted, and by how much more than the first one's. Kept: accepted at a depth, of
those accepted at the depth before. c: drafting, in plain passes, over the tree's depth.
Heads that grow one tree share its pass: the speed expected charges all of them one verify time, the median.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from torch.nn import functional as F

from slipstream.core.shape import Shape
from slipstream.decode.predict import Prediction, decoded, predict, record
from slipstream.drafters import load_drafter
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.store import find_drafter, read_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.files import check_writable, write_json
from slipstream.measure.cost import Rounds
from slipstream.measure.paired import interval
from slipstream.measure.questions import load_questions
from slipstream.measure.tune import proposing
from slipstream.picture import picture
from slipstream.results import heading
from slipstream.targets import load_target
from slipstream.targets.prompts import encode

TREES = ("chain-3", "best-first-2x4", "best-first-3x8", "best-first-3x16")
SAMPLES = 2000

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("heads", nargs="+", help="drafter directories; τ is compared with the first one's")
options.add_argument("--tree", action="append", default=None, help=f"default: {', '.join(TREES)}")
options.add_argument("--proposal", default="noise", help="at T > 0: top-k, noise or sampled")
options.add_argument("--target", default="smollm2")
options.add_argument("--questions", action="append", default=[])
options.add_argument("--limit", type=int, default=20)
options.add_argument("--max-new-tokens", type=int, default=128)
options.add_argument(
    "--temperature", type=float, action="append", default=None, help="several are answered in turn"
)
options.add_argument("--dtype", default="float32")
options.add_argument("--compile", action="store_true", help="rounds are timed compiled as well")
options.add_argument("--rounds", type=int, default=15, help="of each tree that are timed; 0: none")
options.add_argument("--json", default=None)
options.add_argument("--plot", default=None)
given = options.parse_args()
TREES, TEMPERATURES = tuple(given.tree or TREES), given.temperature or [0.0]
check_writable(given.json)
console = Console(width=None if sys.stdout.isatty() else 180)


def grows(drafter: Proposer, tree: str) -> bool:
    """Whether the drafter is deep enough."""
    return drafter.deepest is None or Shape.parse(tree).depth <= drafter.deepest


def pooled(parts: list[Prediction]) -> Prediction:
    """All texts in one."""
    rounds = max(len(part.committed) for part in parts)
    padded = [F.pad(part.committed, (0, 0, 0, rounds - len(part.committed))) for part in parts]
    return Prediction(torch.cat(padded, 1), parts[0].depth)


@dataclass(frozen=True)
class Draws:
    """Figures of the questions drawn anew, with replacement; the same draws for all drafters.

    Attributes:
        kept: by depth, the share accepted of those accepted before.
    """

    tau: Float[Tensor, " draws"]
    alpha: Float[Tensor, " draws"]
    kept: Float[Tensor, "depth draws"]

    @classmethod
    def of(cls, found: Prediction) -> "Draws":
        """α is of a chain."""
        committed, depths = found.committed, range(1, found.depth + 1)
        reached = [
            (committed > d).sum(0) for d in range(found.depth + 1)
        ]  # by depth, rounds of each question
        sums = torch.stack([committed.sum(0), committed.clamp(max=found.depth).sum(0), *reached]).double()
        drawn = torch.randint(
            sums.shape[1], (SAMPLES, sums.shape[1]), generator=torch.Generator().manual_seed(0)
        )
        tokens, looked, *reached = sums[:, drawn].sum(-1)
        kept = torch.stack([reached[d] / reached[d - 1].clamp(min=1) for d in depths])
        return cls(tokens / reached[0], (tokens - reached[0]) / looked, kept)


def rounded(draws: Tensor) -> list[float]:
    """95 % of them."""
    return [round(end, 4) for end in interval(draws)]


target = load_target(given.target, given.dtype)
heads: dict[str, Proposer] = {}
entries: dict[str, dict] = {}
for name in given.heads:
    drafter: Any = load_drafter(name, target)
    home, label = find_drafter(name, target), Path(name).name
    training = read_drafter(home, target)[0]["training"]
    heads[label] = drafter
    entries[label] = {
        "method": drafter.method,
        "parameters": sum(
            p.numel()
            for p in (drafter.part if isinstance(drafter, DraftModel) else drafter.head).parameters()
        ),
        "bytes": (home / "model.safetensors").stat().st_size,
        "draft_vocab": len(drafter.vocab),
        **{name: training.get(name) for name in ("trained_tokens", "minutes")},
        "trees": {},
    }
asked: dict[str, list[list[int]]] = {}
for question in load_questions(given.questions, given.limit):
    asked.setdefault(question.file, []).append(encode(target, question.turns[0]))
taps = tuple(dict.fromkeys(tap for drafter in heads.values() for tap in drafter.taps))

for temperature in TEMPERATURES:
    records = {}  # one for each file: their prompts differ in length, and rows of a record are padded
    for file, prompts in asked.items():
        with console.status(f"T = {temperature}: the target answers {file}"):
            records[file] = record(
                target, prompts, given.max_new_tokens, taps, batch=20, temperature=temperature
            )
    table = Table(Column("drafter"), Column("tree"), "nodes", *asked, "τ", "of the first", "α", "by depth")
    firsts: dict[str, tuple[float, Draws]] = {}  # of each drafter's first tree
    for tree in TREES:
        base: tuple[float, Draws] | None = None  # of the first one that grows this tree
        for label, drafter in heads.items():
            if not grows(drafter, tree):
                continue
            made = proposing(drafter, given.proposal if temperature else "top-k", tree)
            with console.status(f"T = {temperature}: {label} {tree}"):
                known = made.probes is None and not (temperature and made.law == "multi-round")
                judge = predict if known else decoded
                parts = {file: judge(made, recorded) for file, recorded in records.items()}
            found = pooled(list(parts.values()))
            draws, reached = Draws.of(found), [1.0, *found.acceptance]
            base = base or (found.tau, draws)
            first = firsts.setdefault(label, (found.tau, draws))
            by_file = {file: round(part.tau, 4) for file, part in parts.items()}
            entry = {
                "temperature": temperature, "tree": tree, "nodes": made.rows, "tau": round(found.tau, 4),
                "by_file": by_file, "acceptance_by_depth": [round(a, 4) for a in found.acceptance],
                "share": round(found.tau / base[0], 4), "interval": rounded(draws.tau / base[1].tau),
                "over_first_tree": round(found.tau / first[0], 4),
                "over_first_tree_interval": rounded(draws.tau / first[1].tau),
                "kept_by_depth": [round(b / max(a, 1e-9), 4) for a, b in pairwise(reached)],
                "kept_intervals": [rounded(depth) for depth in draws.kept],
                "kept_last_of_first": rounded(draws.kept[-1] / draws.kept[0].clamp(min=1e-9)),
            }  # fmt: skip
            if tree.startswith("chain"):
                entry |= {
                    "alpha": round(float(draws.alpha.mean()), 4),
                    "alpha_interval": rounded(draws.alpha),
                }
                entry["alpha_gain"] = rounded(
                    draws.alpha - base[1].alpha
                )  # over the first one, on the same questions
            entries[label]["trees"][temperature, tree] = entry
            low, high = entry["interval"]
            table.add_row(
                label, tree, str(made.rows), *(f"{t:.2f}" for t in by_file.values()), f"{found.tau:.3f}",
                f"{entry['share']:.3f} [{low:.3f}, {high:.3f}]",
                "{:.3f} [{:+.3f}, "
                "{:+.3f}]".format(entry["alpha"], *entry["alpha_gain"]) if "alpha" in entry else "",
                " ".join(f"{a:.2f}" for a in found.acceptance),
            )  # fmt: skip
        table.add_section()
    console.print(f"T = {temperature}")
    console.print(table)

probe = min((prompt for prompts in asked.values() for prompt in prompts), key=len)
costs: dict[str, dict] = {}
for compiled in ((False, True) if given.compile else (False,)) if given.rounds else ():
    timed = load_target(given.target, given.dtype, compile=True) if compiled else target
    kinds = [(label, tree) for label, drafter in heads.items() for tree in TREES if grows(drafter, tree)]
    own = dict(zip(heads, (load_drafter(name, timed) for name in given.heads), strict=True))
    arms = [(own[label], Shape.parse(tree)) for label, tree in kinds]
    plain, *spent = Rounds(timed, [(Vanilla(), None), *arms], probe, most=given.rounds).run(given.rounds)
    how = "compiled" if compiled else "eager"
    costs[how] = {"plain_ms": round(1e3 * plain.total, 2), "heads": {label: {} for label in heads}}
    passes: dict[str, list[float]] = {}  # by tree, of every head
    for (_, tree), cost in zip(kinds, spent, strict=True):
        passes.setdefault(tree, []).append(cost.verify)
    expected = [f"× plain, T = {temperature}" for temperature in TEMPERATURES]
    table = Table(Column("drafter"), Column("tree"), "draft ms", "verify", "host", "c", *expected, title=how)
    for (label, tree), cost in zip(kinds, spent, strict=True):
        times = {part: round(1e3 * getattr(cost, part), 2) for part in ("draft", "verify", "host")}
        c = cost.draft / plain.total / Shape.parse(tree).depth
        total = cost.draft + median(passes[tree]) + cost.host
        speedups = [entries[label]["trees"][T, tree]["tau"] * plain.total / total for T in TEMPERATURES]
        said = dict(zip(map(str, TEMPERATURES), (round(each, 4) for each in speedups), strict=True))
        costs[how]["heads"][label][tree] = {**times, "c": round(c, 4), "expected": said}
        shown = (f"{each:.2f}" for each in speedups)
        table.add_row(label, tree, *(f"{ms:.1f}" for ms in times.values()), f"{c:.3f}", *shown)
    console.print(table)

if given.json:
    for entry in entries.values():
        entry["trees"] = list(entry["trees"].values())
    counts = {file: len(prompts) for file, prompts in asked.items()}
    command = f"python benchmarks/heads.py {shlex.join(sys.argv[1:])}"
    about = {"command": command, "max_new_tokens": given.max_new_tokens, "questions": counts}
    write_json(
        given.json, {**heading(target), **about, "proposal": given.proposal, "heads": entries, "costs": costs}
    )
if given.plot:
    sized = [tree for tree in TREES if tree.startswith("best-first")]
    with picture(given.plot, 1 + (len(sized) > 1)) as axes:
        for label, entry in entries.items():
            first = [e for e in entry["trees"] if e["temperature"] == TEMPERATURES[0]]
            chains = [e for e in first if e["tree"].startswith("chain")]
            if chains:
                longest = max(chains, key=lambda e: len(e["kept_by_depth"]))
                kept, ends = longest["kept_by_depth"], zip(*longest["kept_intervals"], strict=True)
                by = [[abs(k - end) for k, end in zip(kept, side, strict=True)] for side in ends]
                axes[0].errorbar(range(1, len(kept) + 1), kept, yerr=by, marker="o", capsize=3, label=label)
            if len(sized) > 1:
                sizes = sorted((e["nodes"], e["tau"]) for e in first if e["tree"] in sized)
                axes[1].plot(*zip(*sizes, strict=True), marker="o", label=label)
                axes[1].set(xlabel="nodes of the tree", ylabel="τ", title="Tokens a target pass (best-first)")
        axes[0].set(
            xlabel="depth",
            ylabel="accepted, of those accepted before",
            ylim=(0, 1),
            title="Acceptance by depth (chain)",
        )
        axes[0].xaxis.get_major_locator().set_params(integer=True)
        axes[0].legend(frameon=False, fontsize=8)
