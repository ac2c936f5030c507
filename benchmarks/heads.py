r"""Trained drafters side by side: sizes, τ by tree and question file, acceptance by depth, what a round
costs, the speed-up expected of it, and τ against the first one's with an interval.

    python benchmarks/heads.py runs/eagle3 runs/eagle runs/fasteagle --questions mt_bench.jsonl \
        --questions gsm8k.jsonl --tree chain-3 --tree best-first-2x4 --compile \
        --json benchmarks/results/heads.json --plot docs/heads.svg

The target answers once, and every drafter is held against these answers; `bita`, which is the target, decodes
for itself, at T = 0. Intervals are over questions (95 %, bootstrap): they say nothing of other seeds of
training. α is of the first tree that is a chain: the share of drafted tokens, of those that the ones before
them let through, that are accepted, and by how much more than the first one's. Kept: accepted at a depth, of
those accepted at the depth before. c: drafting, in plain passes, over the tree's depth.
Heads that grow one tree share its pass: the speed expected charges all of them one verify time, the median.
`bita`, whose masks are further rows of the pass, is charged its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Float
from rich.console import Group
from torch import Tensor

from common import Plot, between, compiled, digits, drawn_of, pooled, prompts_by_file, records, run, shortest
from slipstream.cli import common as cli
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter
from slipstream.drafters.draft_model.model import DraftModel
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.store import find_drafter, read_drafter
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.replay import Prediction, decoded, predict
from slipstream.files import check_writable
from slipstream.measure.cost import Rounds
from slipstream.measure.datasets import Asking
from slipstream.measure.results import PARTS
from slipstream.measure.tune import proposing
from slipstream.plotting import picture
from slipstream.provenance import public
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget, RecordedTarget

TREES = ("chain-3", "best-first-2x4", "best-first-3x8", "best-first-3x16")
Interval = tuple[float, float]
Temperatures = Annotated[list[float], cli.option("answered in turn; repeatable", "T", "--temperature", min=0)]


class TreeTau(Part):
    """τ of a head with one tree at one temperature.

    Attributes:
        nodes: rows of the target's pass.
        share: τ over the first head's with this tree.
        over_first_tree: τ over this head's with its first tree.
        kept_by_depth: accepted at a depth, of those accepted at the depth before.
        kept_last_of_first: the last of them over the first.
        alpha: of a chain; alpha_gain: by how much it exceeds the first head's.
    """

    temperature: float
    tree: str
    nodes: int
    tau: float
    by_file: dict[str, float]
    acceptance_by_depth: list[float]
    share: float
    interval: Interval
    over_first_tree: float | None = None
    over_first_tree_interval: Interval | None = None
    kept_by_depth: list[float] | None = None
    kept_intervals: list[Interval] | None = None
    kept_last_of_first: Interval | None = None
    alpha: float | None = None
    alpha_interval: Interval | None = None
    alpha_gain: Interval | None = None


class HeadResult(Part):
    """One drafter directory: its sizes, how it was trained, and its trees."""

    method: str
    parameters: int
    bytes: int
    draft_vocab: int
    trained_tokens: int | None
    minutes: float | None
    trees: list[TreeTau]


class RoundMs(Part):
    """Milliseconds of a round's parts, the cost c, and by temperature the speed expected over plain."""

    draft: float
    verify: float
    host: float
    c: float
    expected: dict[str, float]


class Costs(Part):
    """Rounds of all heads and of plain decoding in one race, by head and tree."""

    plain_ms: float
    heads: dict[str, dict[str, RoundMs]]


class HeadsReport(Report):
    """What `heads` found. `costs`: eager and compiled, where rounds were timed."""

    max_new_tokens: int
    questions: dict[str, int]
    proposal: str
    heads: dict[str, HeadResult]
    costs: dict[str, Costs]

    def of_temperatures(self) -> dict[float, list[tuple[str, TreeTau]]]:
        """Heads and their trees, by temperature."""
        by: dict[float, list[tuple[str, TreeTau]]] = {}
        for name, head in self.heads.items():
            for tree in head.trees:
                by.setdefault(tree.temperature, []).append((name, tree))
        return by

    def __rich__(self) -> Group:
        tables = []
        for temperature, rows in self.of_temperatures().items():
            columns = ("tree", "nodes", *self.questions, "τ", "of the first", "α", "by depth")
            tables.append(Figures(f"T = {temperature:g}", "drafter", *columns))
            for name, row in sorted(
                rows, key=lambda named: [tree.tree for _, tree in rows].index(named[1].tree)
            ):
                taus = (*(f"{tau:.2f}" for tau in row.by_file.values()), f"{row.tau:.3f}")
                share = "{:.3f} [{:.3f}, {:.3f}]".format(row.share, *row.interval)
                alpha = ""
                if row.alpha is not None and row.alpha_gain is not None:
                    alpha = "{:.3f} [{:+.3f}, {:+.3f}]".format(row.alpha, *row.alpha_gain)
                depths = " ".join(f"{rate:.2f}" for rate in row.acceptance_by_depth)
                tables[-1].add_row(name, row.tree, str(row.nodes), *taus, share, alpha, depths)
        for how, costs in self.costs.items():
            temperatures = (f"× plain, T = {temperature:g}" for temperature in self.of_temperatures())
            tables.append(Figures(how, "drafter", "tree", "draft ms", "verify", "host", "c", *temperatures))
            for name, trees in costs.heads.items():
                for tree, cost in trees.items():
                    ms = (f"{part:.1f}" for part in (cost.draft, cost.verify, cost.host))
                    speeds = (f"{speed:.2f}" for speed in cost.expected.values())
                    tables[-1].add_row(name, tree, *ms, f"{cost.c:.3f}", *speeds)
        return Group(*tables)

    def draw(self, path: str) -> None:
        """Acceptance by depth of the longest chain, and τ by nodes of the best-first trees, where there are
        several; at the first temperature. Raises ValueError."""
        temperature, rows = next(iter(self.of_temperatures().items()))
        sized = {row.tree for _, row in rows if row.tree.startswith("best-first")}
        with picture(path, 1 + (len(sized) > 1)) as axes:
            for name, head in self.heads.items():
                trees = [row for row in head.trees if row.temperature == temperature]
                chains = [row for row in trees if row.tree.startswith("chain")]
                if chains:
                    longest = max(chains, key=lambda row: len(row.acceptance_by_depth))
                    reached = longest.acceptance_by_depth
                    ratios = [after / max(before, 1e-9) for before, after in pairwise([1.0, *reached])]
                    kept = longest.kept_by_depth or ratios  # older results have no intervals either
                    ends = longest.kept_intervals or [(each, each) for each in kept]
                    off = [[abs(k - end[side]) for k, end in zip(kept, ends, strict=True)] for side in (0, 1)]
                    depths = range(1, len(kept) + 1)
                    axes[0].errorbar(depths, kept, yerr=off, marker="o", capsize=3, label=name)
                if len(sized) > 1:
                    sizes = sorted((row.nodes, row.tau) for row in trees if row.tree in sized)
                    axes[1].plot(*zip(*sizes, strict=True), marker="o", label=name)
                    axes[1].set(
                        xlabel="nodes of the tree", ylabel="τ", title="Tokens a target pass (best-first)"
                    )
            title = "Acceptance by depth (chain)"
            axes[0].set(xlabel="depth", ylabel="accepted, of those accepted before", ylim=(0, 1), title=title)
            axes[0].xaxis.get_major_locator().set_params(integer=True)
            axes[0].legend(frameon=False, fontsize=8)


@dataclass(frozen=True)
class Draws:
    """A prediction, and its figures: of all questions, and behind that of questions drawn anew, with
    replacement; the same draws for all drafters.

    Attributes:
        alpha: of a chain.
        kept: by depth, the share accepted of those accepted before.
    """

    found: Prediction
    tau: Float[Tensor, " draws"]
    alpha: Float[Tensor, " draws"]
    kept: Float[Tensor, "depth draws"]

    @classmethod
    def of(cls, found: Prediction) -> "Draws":
        committed, depth = found.committed, found.depth
        reached = [(committed > d).sum(0) for d in range(depth + 1)]  # by depth, rounds of each question
        sums = torch.stack([committed.sum(0), committed.clamp(max=depth).sum(0), *reached]).double()
        drawn = sums[:, drawn_of(sums.shape[1])].sum(-1)
        # The first of all questions, the others drawn.
        tokens, looked, *reached = torch.cat([sums.sum(1, keepdim=True), drawn], 1)
        kept = torch.stack([below / above.clamp(min=1) for above, below in pairwise(reached)])
        return cls(found, tokens / reached[0], (tokens - reached[0]) / looked, kept)

    def between(self, figure: Float[Tensor, " draws"]) -> Interval:
        """The interval of a figure."""
        return between(figure[1:], self.found.committed.shape[1])

    def against(self, base: "Draws", first: "Draws", chain: bool) -> dict[str, Any]:
        """The figures of `TreeTau`. `base`: of the first head with this tree; `first`: of this head's first
        tree."""
        reached, of_chain = [1.0, *self.found.acceptance], dict[str, Any]()
        if chain:
            of_chain = {"alpha": float(self.alpha[0]), "alpha_interval": self.between(self.alpha)}
            of_chain["alpha_gain"] = self.between(self.alpha - base.alpha)
        return digits(
            {
                "tau": self.found.tau,
                "acceptance_by_depth": self.found.acceptance,
                "share": self.found.tau / base.found.tau,
                "interval": self.between(self.tau / base.tau),
                "over_first_tree": self.found.tau / first.found.tau,
                "over_first_tree_interval": self.between(self.tau / first.tau),
                "kept_by_depth": [below / max(above, 1e-9) for above, below in pairwise(reached)],
                "kept_intervals": [self.between(depth) for depth in self.kept],
                "kept_last_of_first": self.between(self.kept[-1] / self.kept[0].clamp(min=1e-9)),
                **of_chain,
            }
        )


@public
def compare_heads(
    target: HFTarget,
    heads: Sequence[str],
    questions: Sequence[Asking] = (),
    trees: Sequence[str] = TREES,
    temperatures: Sequence[float] = (0.0,),
    *,
    proposal: str = "noise",
    limit: int | None = 20,
    max_new_tokens: int = 128,
    rounds: int = 15,
    compile: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> HeadsReport:
    """Hold heads and trees against the target's answers, and time their rounds.

    Args:
        target: an eager one.
        heads: drafter directories, or methods whose weights ship. τ is compared with the first one's.
        proposal: at T > 0.
        limit: questions of each file.
        rounds: of each head and tree that are timed; 0: none.
        compile: rounds are timed compiled as well.
        progress: told what is under way.

    Raises:
        ValueError: a head, a tree or a file is unknown.
    """
    short = [Path(name).name for name in heads]
    labels = [last if short.count(last) == 1 else name for last, name in zip(short, heads, strict=True)]
    drafters: dict[str, Any] = {
        label: load_drafter(name, target) for label, name in zip(labels, heads, strict=True)
    }
    prompts = prompts_by_file(target, questions, limit)
    taps = [tap for drafter in drafters.values() for tap in drafter.taps]
    rows: dict[str, list[TreeTau]] = {label: [] for label in drafters}
    for temperature in temperatures:
        progress(f"T = {temperature:g}: the target answers")
        recorded = records(target, prompts, max_new_tokens, taps, temperature)
        kind = proposal if temperature else "top-k"
        for label, found in _taus(drafters, recorded, trees, temperature, kind, progress).items():
            rows[label] += found
    costs = {}
    for how in ("eager", *["compiled"] * compile) if rounds else ():
        progress(f"rounds, {how}")
        timed = compiled(target) if how == "compiled" else target
        own = {label: load_drafter(name, timed) for label, name in zip(drafters, heads, strict=True)}
        costs[how] = _costs(timed, own, rows, shortest(prompts), rounds)
    return HeadsReport(
        **heading(target),
        max_new_tokens=max_new_tokens,
        questions={file: len(asked) for file, asked in prompts.items()},
        proposal=proposal,
        heads={
            label: _head(name, drafters[label], target, rows[label])
            for label, name in zip(drafters, heads, strict=True)
        },
        costs=costs,
    )


def _taus(
    drafters: Mapping[str, Proposer],
    recorded: Mapping[str, RecordedTarget],
    trees: Sequence[str],
    temperature: float,
    proposal: str,
    progress: Callable[[str], None],
) -> dict[str, list[TreeTau]]:
    """Every head's trees that it is deep enough for."""
    rows: dict[str, list[TreeTau]] = {label: [] for label in drafters}
    firsts: dict[str, Draws] = {}
    for tree in trees:
        base: Draws | None = None
        for label, drafter in drafters.items():
            if drafter.deepest is not None and TreeSpec.parse(tree).depth > drafter.deepest:
                continue
            progress(f"T = {temperature:g}: {label} {tree}")
            made = proposing(drafter, proposal, tree)
            known = made.probes is None and not (temperature and made.law == "multi-round")
            parts = {file: (predict if known else decoded)(made, text) for file, text in recorded.items()}
            draws = Draws.of(pooled(parts))
            base, first = base or draws, firsts.setdefault(label, draws)
            row = TreeTau(
                temperature=temperature,
                tree=tree,
                nodes=made.rows,
                by_file={file: digits(part.tau) for file, part in parts.items()},
                **draws.against(base, first, tree.startswith("chain")),
            )
            rows[label].append(row)
    return rows


def _costs(
    target: HFTarget,
    drafters: Mapping[str, Any],
    rows: Mapping[str, Sequence[TreeTau]],
    probe: Sequence[int],
    rounds: int,
) -> Costs:
    """One race of plain decoding, all heads and all trees."""
    kinds = list(dict.fromkeys((label, row.tree, row.nodes) for label in rows for row in rows[label]))
    arms = [(drafters[label], TreeSpec.parse(tree)) for label, tree, _ in kinds]
    plain, *spent = Rounds(target, [(Vanilla(), None), *arms], [probe], most=rounds).run(rounds)
    heads: dict[str, dict[str, RoundMs]] = {label: {} for label in drafters}
    shared: dict[tuple[str, int], list[float]] = {}  # by tree and rows
    for (_, tree, nodes), cost in zip(kinds, spent, strict=True):
        shared.setdefault((tree, nodes), []).append(cost.verify)
    for (label, tree, nodes), cost in zip(kinds, spent, strict=True):
        verify = median(shared[tree, nodes])
        speed = plain.total / (cost.draft + verify + cost.host)
        heads[label][tree] = RoundMs(
            **{part: round(1e3 * getattr(cost, part), 2) for part in PARTS},
            c=digits(cost.draft / plain.verify / TreeSpec.parse(tree).depth),
            expected={
                str(row.temperature): digits(row.tau * speed) for row in rows[label] if row.tree == tree
            },
        )
    return Costs(plain_ms=round(1e3 * plain.total, 2), heads=heads)


def _head(name: str, drafter: Any, target: HFTarget, trees: list[TreeTau]) -> HeadResult:
    home = find_drafter(name, target)
    training = read_drafter(home, target)[0]["training"]
    module: Any = drafter.part if isinstance(drafter, DraftModel) else drafter.head
    return HeadResult(
        method=drafter.method,
        parameters=sum(p.numel() for p in module.parameters()),
        bytes=(home / "model.safetensors").stat().st_size,
        draft_vocab=len(drafter.vocab),
        trained_tokens=training.get("trained_tokens"),
        minutes=training.get("minutes"),
        trees=trees,
    )


def main(
    heads: Annotated[
        list[str], typer.Argument(help="drafter directories; τ is compared with the first one's")
    ],
    trees: Annotated[list[str], cli.option("trees; repeatable", "TREE", "--tree")] = [*TREES],  # noqa: B006
    proposal: Annotated[str, cli.option("at T > 0: top-k, noise or sampled", "NAME")] = "noise",
    target: cli.TargetName = "smollm2",
    questions: cli.Files = [],  # noqa: B006
    limit: cli.Limit = 20,
    max_new_tokens: cli.MaxNewTokens = 128,
    temperatures: Temperatures = [0.0],  # noqa: B006
    dtype: cli.Dtype = "float32",
    compile: cli.Compile = False,
    rounds: Annotated[int, cli.option("of each tree that are timed; 0: none", "N", min=0)] = 15,
    json_path: cli.JsonPath = None,
    plot: Plot = None,
) -> None:
    check_writable(json_path, plot, reads=cli.inputs(target, heads, questions))
    how: dict[str, Any] = {"proposal": proposal, "limit": limit, "max_new_tokens": max_new_tokens}
    loaded = cli.load(target, dtype, "cpu")
    with cli.progress_bar(None) as progress:
        report = compare_heads(
            loaded,
            heads,
            questions,
            trees,
            temperatures,
            **how,
            rounds=rounds,
            compile=compile,
            progress=progress,
        )
    cli.deliver(report, json_path)
    if plot is not None:
        report.draw(plot)


if __name__ == "__main__":
    run(main)
