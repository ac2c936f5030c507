r"""Trained heads side by side: sizes, τ by tree and question file, acceptance by depth, what a round costs, the speed-up
expected of it, and τ against the first head's with an interval.

    python benchmarks/heads.py runs/eagle3 runs/eagle runs/fasteagle --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/heads.json --plot docs/heads.svg

The target answers once; every head is held against the same answers. Intervals are over questions (95 %, bootstrap): they
say nothing of other seeds of training.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

from slipstream.bench.cost import Rounds
from slipstream.bench.questions import load_questions
from slipstream.bench.tune import reshaped
from slipstream.core.shape import Shape
from slipstream.drafters import load_drafter
from slipstream.drafters.heads import HeadDrafter
from slipstream.drafters.store import find_drafter, read_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.files import check_writable, write_json
from slipstream.machine import heading
from slipstream.targets import load_target
from slipstream.train.replay import Prediction, Record, predict
from slipstream.train.show import picture

TREES = ("chain-1", "chain-2", "chain-3", "chain-5", "[[0],[1],[0,0]]", "best-first-2x4", "best-first-2x8")
TREES += ("backbone-3x4", "best-first-3x8", "best-first-3x16", "best-first-5x26", "dynamic-5x8x16")
TIMED = ("chain-2", "chain-3", "chain-5", "best-first-2x4", "best-first-3x8", "best-first-3x16")
SAMPLES = 2000

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("heads", nargs="+", help="drafter directories; τ is compared with the first one's")
options.add_argument("--target", default="smollm2")
options.add_argument("--questions", action="append", default=[])
options.add_argument("--limit", type=int, default=20)
options.add_argument("--max-new-tokens", type=int, default=128)
options.add_argument("--temperature", type=float, action="append", default=None, help="several are answered in turn")
options.add_argument("--dtype", default="float32")
options.add_argument("--compile", action="store_true", help="rounds are timed compiled as well")
options.add_argument("--rounds", type=int, default=15, help="of each tree that are timed")
options.add_argument("--json", default=None)
options.add_argument("--plot", default=None)
given = options.parse_args()
check_writable(given.json)
console = Console()


def grows(drafter: HeadDrafter, tree: str) -> bool:
    """Whether the head is deep enough."""
    return drafter.deepest is None or Shape.parse(tree).depth <= drafter.deepest


def resampled(found: list[Prediction], samples: int = SAMPLES) -> torch.Tensor:
    """τ of the questions drawn anew, with replacement; the same draws for all heads."""
    tokens = torch.cat([p.committed.sum(0) for p in found]).double()
    passes = torch.cat([(p.committed > 0).sum(0) for p in found]).double()
    drawn = torch.randint(len(tokens), (samples, len(tokens)), generator=torch.Generator().manual_seed(0))
    return tokens[drawn].sum(1) / passes[drawn].sum(1)


def pooled(found: list[Prediction]) -> tuple[float, list[float]]:
    """τ and acceptance by depth over all files."""
    rounds = sum(p.rounds for p in found)
    by_depth = [sum(p.acceptance[d] * p.rounds for p in found) / rounds for d in range(found[0].depth)]
    return sum(p.tau * p.rounds for p in found) / rounds, by_depth


target = load_target(given.target, given.dtype)
heads: dict[str, HeadDrafter] = {}
entries: dict[str, dict] = {}
for name in given.heads:
    drafter = load_drafter(name, target.ends)
    assert isinstance(drafter, HeadDrafter), f"{name} is no trained head"
    home, label = find_drafter(name, target.ends), Path(name).name
    training = read_drafter(home, target.ends)[0]["training"]
    heads[label] = drafter
    entries[label] = {
        "method": drafter.method,
        "parameters": sum(p.numel() for p in drafter.head.parameters()),
        "bytes": (home / "model.safetensors").stat().st_size,
        "draft_vocab": len(drafter.vocab),
        **{name: training.get(name) for name in ("trained_tokens", "minutes")},
        "trees": {},
    }
parts: dict[str, list[list[int]]] = {}
for question in load_questions(given.questions, given.limit):
    parts.setdefault(question.file, []).append(target.encode(question.turns[0]))
taps = tuple(dict.fromkeys(tap for drafter in heads.values() for tap in drafter.taps))

for temperature in given.temperature or [0.0]:
    records = {
        file: Record.of(target, prompts, given.max_new_tokens, taps, batch=10, temperature=temperature)
        for file, prompts in parts.items()
    }
    table = Table(Column("head"), Column("tree"), "nodes", *records, "τ", "of the first", "by depth")
    for tree in TREES:
        base: tuple[float, torch.Tensor] | None = None  # the first head that grows this tree
        for label, drafter in heads.items():
            if not grows(drafter, tree):
                continue
            made = reshaped(drafter, tree)
            found = [predict(made, record) for record in records.values()]
            tau, by_depth = pooled(found)
            draws = resampled(found)
            base = (tau, draws) if base is None else base
            share, shares = tau / base[0], draws / base[1]
            low, high = shares.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
            by_file = {file: round(p.tau, 4) for file, p in zip(records, found, strict=True)}
            entries[label]["trees"][temperature, tree] = {
                "temperature": temperature, "tree": tree, "nodes": made.rows, "tau": round(tau, 4), "by_file": by_file,
                "acceptance_by_depth": [round(a, 4) for a in by_depth], "share": round(share, 4),
                "interval": [round(low, 4), round(high, 4)],
            }  # fmt: skip
            table.add_row(
                label, tree, str(made.rows), *(f"{t:.2f}" for t in by_file.values()), f"{tau:.3f}",
                f"{share:.3f} [{low:.3f}, {high:.3f}]", " ".join(f"{a:.2f}" for a in by_depth),
            )  # fmt: skip
        table.add_section()
    console.print(f"T = {temperature}")
    console.print(table)

probe = min((prompt for prompts in parts.values() for prompt in prompts), key=len)
costs: dict[str, dict] = {}
for compiled in (False, True) if given.compile else (False,):
    timed = load_target(given.target, given.dtype, compile=True) if compiled else target
    kinds = [(label, tree) for label, drafter in heads.items() for tree in TIMED if grows(drafter, tree)]
    own = dict(zip(heads, (load_drafter(name, timed.ends) for name in given.heads), strict=True))
    drafters = [reshaped(own[label], tree) for label, tree in kinds]
    plain, *spent = Rounds(timed, [Vanilla(), *drafters], probe, most=given.rounds).run(given.rounds)
    how = "compiled" if compiled else "eager"
    costs[how] = {"plain_ms": round(1e3 * plain.total, 2), "heads": {label: {} for label in heads}}
    table = Table(Column("head"), Column("tree"), "draft ms", "verify", "host", "c", "expected × plain, T = 0", title=how)
    for (label, tree), cost in zip(kinds, spent, strict=True):
        tau = next(e["tau"] for (_, name), e in entries[label]["trees"].items() if name == tree)
        times = {part: round(1e3 * getattr(cost, part), 2) for part in ("draft", "verify", "host")}
        c, speedup = cost.draft / plain.total, tau * plain.total / cost.total
        costs[how]["heads"][label][tree] = {**times, "c": round(c, 4), "expected": round(speedup, 4)}
        table.add_row(label, tree, *(f"{ms:.1f}" for ms in times.values()), f"{c:.3f}", f"{speedup:.2f}")
    console.print(table)

if given.json:
    for entry in entries.values():
        entry["trees"] = list(entry["trees"].values())
    about = {"max_new_tokens": given.max_new_tokens, "questions": {file: len(prompts) for file, prompts in parts.items()}}
    write_json(given.json, {**heading(target), **about, "heads": entries, "costs": costs})
if given.plot:
    with picture(given.plot, 2) as (left, right):
        for label, entry in entries.items():
            first = [e for e in entry["trees"] if e["temperature"] == (given.temperature or [0.0])[0]]
            by_depth = max((e["acceptance_by_depth"] for e in first if e["tree"].startswith("chain")), key=len)
            kept = [b / a for a, b in zip([1.0, *by_depth], by_depth, strict=False)]
            left.plot(range(1, len(kept) + 1), kept, marker="o", label=label)
            sizes = sorted((e["nodes"], e["tau"]) for e in first if e["tree"].startswith("best-first"))
            right.plot(*zip(*sizes, strict=True), marker="o", label=label)
        left.set(
            xlabel="depth", ylabel="accepted, of those accepted before", ylim=(0, 1), title="Acceptance by depth (chain)"
        )
        right.set(xlabel="nodes of the tree", ylabel="τ", title="Tokens a target pass (best-first)")
        left.legend(frameon=False, fontsize=8)
