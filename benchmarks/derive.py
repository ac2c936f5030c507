"""Figures that follow from stored results by arithmetic, stored under `derived` beside what they follow from.

    python benchmarks/derive.py

Every page of the docs quotes stored figures. A ratio, a mean over question sets or a prediction that a page
needs and that no script stores is computed here, from the numbers of the same file and of nothing else.
`tests/test_figures.py` computes all of them again.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import table
from common import digits
from growth import growth
from slipstream.measure.results import BenchReport

RESULTS = Path(__file__).parent / "results"
Result = dict[str, Any]


def trees(result: Result, head: str) -> dict[str, Result]:
    """The entries of one head, by tree and temperature."""
    return {f"{e['tree']}, T = {e['temperature']:g}": e for e in result["heads"][head]["trees"]}


def first_over(result: Result, head: str) -> Result:
    """τ of the first head over another's, with its interval: the inverse of what heads.py stores."""
    ratios = {}
    for name, entry in trees(result, head).items():
        low, high = entry["interval"]
        ratios[name] = [1 / entry["share"], 1 / high, 1 / low]
    return ratios


def alpha_gain(result: Result) -> Result:
    """α of each head's chain less the first head's, with the interval that heads.py stores."""
    chains = {head: next(e for e in trees(result, head).values() if "alpha" in e) for head in result["heads"]}
    first = next(iter(chains.values()))["alpha"]
    return {head: [entry["alpha"] - first, *entry["alpha_gain"]] for head, entry in chains.items()}


def kept(result: Result) -> Result:
    """Of each head's chain at T = 0: accepted at a depth, of those accepted at the depth before."""
    found = {}
    for head in result["heads"]:
        chain = next(
            e for name, e in trees(result, head).items() if name.startswith("chain") and "T = 0" in name
        )
        by_depth = [1.0, *chain["acceptance_by_depth"]]
        found[head] = [below / above for above, below in pairwise(by_depth)]
    return found


def n_alpha(result: Result, tree: str) -> list[float]:
    """Accepted at each depth of a chain, of what was accepted at the depth before (trees.py)."""
    entry = next(entry for entry in result["results"] if entry["tree"] == tree)
    return [below / above for above, below in pairwise([1.0, *entry["acceptance_by_depth"]])]


def shared_verify(result: Result) -> Result:
    """Expected speeds where all heads are charged one verify time for one tree: the median over the heads.

    `over_first` is a head's expected speed over the first head's, with the interval of τ alone: a single race
    of costs has none.
    """
    found: Result = {}
    first = next(iter(result["heads"]))
    for how, costs in result["costs"].items():
        for tree in costs["heads"][first]:
            verify = median(head[tree]["verify"] for head in costs["heads"].values())
            rounds = {
                name: head[tree]["draft"] + verify + head[tree]["host"]
                for name, head in costs["heads"].items()
            }
            entry: Result = {"verify_ms": verify, "heads": {}}
            for name, total in rounds.items():
                entry["heads"][name] = {}
                for temperature in costs["heads"][name][tree]["expected"]:
                    tau = trees(result, name)[f"{tree}, T = {float(temperature):g}"]
                    over = [end * rounds[first] / total for end in (tau["share"], *tau["interval"])]
                    speed = tau["tau"] * costs["plain_ms"] / total
                    entry["heads"][name][temperature] = {"expected": speed, "over_first": over}
            found[f"{how}, {tree}"] = entry
    return found


def drafting(result: Result, head: str, other: str) -> Result:
    """Drafting time of one head over another's."""
    return {
        f"{how}, {tree}": costs["heads"][head][tree]["draft"] / costs["heads"][other][tree]["draft"]
        for how, costs in result["costs"].items()
        for tree in costs["heads"][head]
    }


def pairs(result: Result, *named: tuple[str, str]) -> Result:
    """One drafter's speed over another's on the same questions: mean of the sets, with its interval."""
    report, found = BenchReport.model_validate(result), {}
    for ours, theirs in named:
        both = table.pair(report, ours, theirs)
        found[f"{ours} over {theirs}"] = [both.mean, *(both.interval or ())]
    return found


def on_a_gpu(result: Result) -> Result:
    """Predicted speeds where a pass takes the same time for any tree."""
    report = BenchReport.model_validate(result)
    return {drafter.drafter: table.on_a_gpu(report, drafter) for drafter in report.results}


def mean_of_files(result: Result) -> Result:
    """The mean over the question sets of the speed over either baseline, where none is stored."""
    found: Result = {}
    for entry in result["results"]:
        speeds = [part["speedup"] for part in entry["by_file"].values()]
        found[entry["drafter"]] = {name: mean(each[name] for each in speeds) for name in speeds[0]}
    return found


BITA, GLIDE, HYBRID = (
    "runs/bita:tree=",
    "runs/glide:tree=",
    "hybrid:head=fasteagle,tree=best-first-2x8,depth=4",
)
STRAIGHT, EFFICIENT = f"{BITA}chain-3,hosts=1", f"{BITA}backbone-3x5,hosts=4"
TRIANGULAR = f"{BITA}[[0],[1],[2],[3],[4],[0,0],[0,1],[0,2],[0,3],[0,0,0],[0,0,1],[0,0,2]],hosts=4"
FULL = f"{BITA}full-3x2,hosts=4", f"{BITA}full-3x3,hosts=4"
BEST = f"{BITA}best-first-3x8,hosts=4"
CAPE, FIXED, BEAM4, BEAM8 = (
    f"{GLIDE}{tree}" for tree in ("cape-5x32", "backbone-5x5", "beam-5x4", "beam-5x8")
)


def of_drafters(result: Result) -> Result:
    """The pairs that docs/bita.md, docs/glide.md and docs/drafters.md speak of."""
    bita = [*((tree, STRAIGHT) for tree in (BEST, TRIANGULAR, EFFICIENT, *FULL)), (TRIANGULAR, EFFICIENT)]
    bita += [*((EFFICIENT, tree) for tree in (*FULL, f"{BITA}backbone-3x5,hosts=0")), (BEST, EFFICIENT)]
    glide = [
        (CAPE, FIXED),
        (CAPE, BEAM4),
        (CAPE, BEAM8),
        (FIXED, BEAM4),
        (FIXED, BEAM8),
        (CAPE, f"{GLIDE}chain-2"),
    ]
    return {"gpu": on_a_gpu(result), "pairs": pairs(result, *bita, *glide, (HYBRID, "fasteagle"))}


FORMULAS: dict[str, Callable[[Result], Result]] = {
    "heads.json": lambda d: {
        "fasteagle over eagle3": first_over(d, "eagle3"),
        "kept_by_depth": kept(d),
        "shared_verify": shared_verify(d),
        "drafting of fasteagle over eagle3": drafting(d, "fasteagle", "eagle3"),
    },
    "heads_growth.json": lambda d: {"growth": growth(d)},
    "heads_sizes.json": lambda d: {"fasteagle over eagle3": first_over(d, "eagle3")},
    "glide_heads.json": lambda d: {"alpha_gain": alpha_gain(d)},
    "glide_layers.json": lambda d: {"alpha_gain": alpha_gain(d)},
    "drafters.json": of_drafters,
    "trees_compiled.json": lambda d: {"n-alpha": {"chain-5": n_alpha(d, "chain-5")}},
    "bench_four_sets.json": lambda d: {"pairs": pairs(d, (HYBRID, "fasteagle"))},
    "bench_fasteagle_bf16.json": lambda d: {"mean_of_files": mean_of_files(d)},
}


def main() -> None:
    """Write `derived` into every result that has formulas."""
    for name, formula in FORMULAS.items():
        path = RESULTS / name
        result = json.loads(path.read_text("utf-8"))
        result["derived"] = digits(formula(result))
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
