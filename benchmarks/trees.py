r"""τ and speed of an eagle drafter with many trees and with its tuned one, along the target's greedy answers
to question files. Minutes, not hours: the target answers once, each tree is then held against the record, and
some of its rounds are timed, all trees in alternation.

    python benchmarks/trees.py --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/trees.json
"""

from collections.abc import Sequence
from typing import Annotated, Any

from rich.console import Group
from rich.text import Text

from common import digits, pooled, prompts_by_file, records, run, shortest
from slipstream.cli import common as cli
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter
from slipstream.drafters.store import find_drafter, read_tuned
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.replay import predict
from slipstream.files import check_writable
from slipstream.measure.cost import Rounds
from slipstream.measure.datasets import Asking
from slipstream.measure.results import PARTS
from slipstream.provenance import public
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget

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
TUNED = "tuned: "


class TreeResult(Part):
    """A tree's τ along the record, and what its rounds cost. `speedup`: over plain decoding."""

    tree: str
    nodes: int
    depth: int
    tau: float
    by_file: dict[str, float]
    acceptance_by_depth: list[float]
    speedup: float
    draft_ms: float
    verify_ms: float
    host_ms: float


class TreesReport(Report):
    """What `trees` found. `questions`: of each file; `plain_ms`: of a round of plain decoding."""

    drafter: str
    max_new_tokens: int
    questions: dict[str, int]
    plain_ms: float
    results: list[TreeResult]

    def __rich__(self) -> Group:
        """One line a tree, and how near the tuned one is to the best of the others."""
        parts = ("draft", "verify", "host ms")
        table = Figures(None, "tree", "nodes", "depth", *self.questions, "τ", *parts, "× plain")
        for row in self.results:
            taus = (f"{tau:.2f}" for tau in (*row.by_file.values(), row.tau))
            ms = (f"{part:.1f}" for part in (row.draft_ms, row.verify_ms, row.host_ms))
            table.add_row(row.tree, str(row.nodes), str(row.depth), *taus, *ms, f"{row.speedup:.2f}")
        *others, last = self.results
        if not (others and last.tree.startswith(TUNED)):
            return Group(table)
        share = last.speedup / max(row.speedup for row in others)
        return Group(
            table, Text(f"the tuned tree reaches {share:.1%} of the best of the other {len(others)}")
        )


@public
def compare_trees(
    target: HFTarget,
    drafter: str = "eagle",
    questions: Sequence[Asking] = (),
    trees: Sequence[str] = TREES,
    *,
    limit: int | None = 20,
    max_new_tokens: int = 128,
    rounds: int = 9,
) -> TreesReport:
    """Hold every tree, and the tuned one if there is one, against the target's answers, and time its rounds.

    Args:
        drafter: a name or a directory.
        limit: questions of each file.
        rounds: of each tree that are timed.

    Raises:
        ValueError: a drafter, a tree or a file is unknown, or the drafter does not grow these trees.
    """
    head, specs = load_drafter(drafter, target), {tree: TreeSpec.parse(tree) for tree in trees}
    if tuned := read_tuned(find_drafter(drafter, target), target.place, 0.0):
        specs[TUNED + tuned["tree"]] = TreeSpec.parse(tuned["tree"])
    prompts = prompts_by_file(target, questions, limit)
    recorded = records(target, prompts, max_new_tokens, head.taps)
    arms = [(head, spec) for spec in specs.values()]
    timed = Rounds(target, [(Vanilla(), None), *arms], [shortest(prompts)], most=rounds)
    plain, *costs = timed.run(rounds)
    results = []
    for (tree, spec), cost in zip(specs.items(), costs, strict=True):
        parts = {file: predict(head, answers, spec) for file, answers in recorded.items()}
        every = pooled(parts)
        row = TreeResult(
            tree=tree,
            nodes=spec.nodes,
            depth=spec.depth,
            tau=digits(every.tau),
            by_file=digits({file: part.tau for file, part in parts.items()}),
            acceptance_by_depth=digits(every.acceptance),
            speedup=digits(every.tau * plain.total / cost.total),
            **{f"{part}_ms": round(1e3 * getattr(cost, part), 3) for part in PARTS},
        )
        results.append(row)
    return TreesReport(
        **heading(target),
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        questions={file: len(asked) for file, asked in prompts.items()},
        plain_ms=round(1e3 * plain.total, 3),
        results=results,
    )


def main(
    target: cli.TargetName = "smollm2",
    drafter: cli.DrafterName = "eagle",
    questions: cli.Files = [],  # noqa: B006
    limit: cli.Limit = 20,
    max_new_tokens: cli.MaxNewTokens = 128,
    dtype: cli.Dtype = "float32",
    compile: cli.Compile = False,
    rounds: Annotated[int, cli.option("of each tree that are timed", "N", min=1)] = 9,
    json_path: cli.JsonPath = None,
) -> None:
    check_writable(json_path, reads=cli.inputs(target, [drafter], questions))
    loaded = cli.load(target, dtype, "cpu", compile)
    how: dict[str, Any] = {"limit": limit, "max_new_tokens": max_new_tokens, "rounds": rounds}
    cli.deliver(compare_trees(loaded, drafter, questions, **how), json_path)


if __name__ == "__main__":
    run(main)
