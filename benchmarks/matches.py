"""Tokens a pass of drafters that look matches up, at equal drafted nodes, along the target's own answers.

    python benchmarks/matches.py --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/matches.json --plot docs/matches.svg

The target answers once, and every drafter is held against the record. `remembering`: questions of all files
take turns, one at a time, and earlier answers are matched, too. A head's trees are taken alone and with
matches. `gain` is τ over the cost of a pass over the rows that were drafted, a pass over one row being 1, as
`COST` has it. The head's own time is not in it.
"""

from itertools import chain, pairwise, zip_longest
from typing import Annotated, Any

import torch

from common import Plot, Prompts, digits, prompts_by_file, run
from slipstream.cli import common as cli
from slipstream.core.drafter import Drafter
from slipstream.core.tree import PAD
from slipstream.drafters import load_drafter
from slipstream.drafters.hybrid import Hybrid
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.suffix import NGram, Suffix
from slipstream.engine.generate import generate
from slipstream.engine.replay import steps
from slipstream.files import check_writable
from slipstream.plotting import picture
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget, RecordedTarget

NODES, SIZES = (1, 2, 4, 8, 16), (8, 12, 16)  # drafted by matches alone; rows of a head's trees
MEMORY = 64  # thousands of tokens
COST = ((1, 1.0), (8, 1.2), (16, 1.35))  # of a pass, by rows: compiled bf16, docs/log.md
Texts = dict[str, list[tuple[list[int], list[int]]]]  # prompts and answers, by file of questions


class Arm(Part):
    """What one drafter accepted. `drafted`: nodes below the root in the mean; `calibration`: of nodes with a
    score, by their probability in tenths: (nodes, mean probability, share that was accepted)."""

    drafter: str
    nodes: int
    tau: float
    by_file: dict[str, float]
    drafted: float
    gain: float
    calibration: list[tuple[int, float, float]]


class MatchesReport(Report):
    """What `matches` found. `questions`: of each file."""

    head: str
    max_new_tokens: int
    questions: dict[str, int]
    arms: list[Arm]

    def __rich__(self) -> Figures:
        table = Figures(None, "drafter", "nodes", *self.questions, "τ", "drafted", "gain")
        for arm in self.arms:
            taus = (f"{arm.by_file.get(file, float('nan')):.2f}" for file in self.questions)
            others = f"{arm.tau:.2f}", f"{arm.drafted:.1f}", f"{arm.gain:.2f}"
            table.add_row(arm.drafter, str(arm.nodes), *taus, *others)
        return table

    def draw(self, path: str) -> None:
        """τ by drafted nodes, and how often nodes were accepted by their scores. Raises ValueError."""
        alone = [arm for arm in self.arms if arm.nodes in NODES and len(arm.by_file) == len(self.questions)]
        with picture(path, 2) as (left, right):
            for name in dict.fromkeys(arm.drafter for arm in alone):
                some = [arm for arm in alone if arm.drafter == name]
                nodes = [arm.nodes for arm in some]
                left.plot(nodes, [arm.tau for arm in some], label=name, marker="o", markersize=3)
            left.set(xlabel="drafted tokens, at most", ylabel="tokens a pass", title="By drafted nodes")
            right.plot([0, 1], [0, 1], color="0.8", linewidth=1)
            for arm in alone:
                if arm.nodes == max(NODES) and arm.calibration:
                    _, said, accepted = zip(*arm.calibration, strict=True)
                    right.plot(said, accepted, label=arm.drafter, marker="o", markersize=3)
            right.set(xlabel="probability by its score", ylabel="accepted", title="Of 16 nodes, each")
            for axes in (left, right):
                axes.legend(frameon=False, fontsize=8)


class Count:
    """Rounds of one drafter, added up."""

    def __init__(self) -> None:
        self.by_file = dict[str, list[int]]()  # committed tokens, passes
        self.drafted, self.cost = 0, 0.0
        self.said, self.right = list[float](), list[bool]()

    @torch.inference_mode()
    def along(self, drafter: Drafter, file: str, recorded: RecordedTarget) -> None:
        """Rounds over all texts of a record."""
        ends, sums = recorded.lengths.tolist(), self.by_file.setdefault(file, [0, 0])
        for engine in steps(drafter, recorded, recorded.law):
            assert engine.span is not None
            assert engine.span.tree is not None
            assert engine.span.path is not None
            tree = engine.span.tree
            for row, request in enumerate(engine.running):
                sums[0] += len(request.committed) - max(len(request.sequence) - ends[request.number], 0)
                sums[1] += 1
                real = (tree.tokens[row, 1:] != PAD).tolist()
                self.drafted += sum(real)
                self.cost += cost(1 + sum(real))
                if tree.scores is not None:
                    accepted = set(engine.span.path[row, : len(request.committed)].tolist())
                    scored = enumerate(zip(real, tree.scores[row, 1:].exp().tolist(), strict=True), 1)
                    said = [(slot, score) for slot, (there, score) in scored if there]
                    self.said += [score for _, score in said]
                    self.right += [slot in accepted for slot, _ in said]

    def arm(self, drafter: str, nodes: int) -> Arm:
        committed, passes = (sum(each) for each in zip(*self.by_file.values(), strict=True))
        said, right = torch.tensor(self.said), torch.tensor(self.right, dtype=torch.float)
        tenths = [(said * 10).long().clamp(max=9) == tenth for tenth in range(10)]
        bins = [(int(t.sum()), digits(said[t].mean()), digits(right[t].mean())) for t in tenths if t.any()]
        return Arm(
            drafter=drafter,
            nodes=nodes,
            tau=digits(committed / passes),
            by_file=digits({file: sums[0] / sums[1] for file, sums in self.by_file.items()}),
            drafted=digits(self.drafted / passes),
            gain=digits(committed / self.cost),
            calibration=bins,
        )


def cost(rows: int) -> float:
    """Of a pass over so many rows, between those that were measured."""
    for (below, least), (above, most) in pairwise(COST):
        if rows <= above or (above, most) == COST[-1]:
            return least + (most - least) * (rows - below) / (above - below)
    raise AssertionError


def alone(target: HFTarget, texts: Texts) -> list[Arm]:
    """Drafters that only look matches up."""
    files = {file: RecordedTarget(target, some, ()) for file, some in texts.items()}
    turns = chain.from_iterable(zip_longest(*([(file, one) for one in some] for file, some in texts.items())))
    single = [(each[0], RecordedTarget(target, [each[1]], ())) for each in turns if each]
    arms = []
    for nodes in NODES:
        for name, drafter in {
            "ngram:shortest=2": NGram(nodes),
            "ngram:shortest=1": NGram(nodes, shortest=1),
            "suffix": Suffix(nodes + 1),
            "suffix, remembering": Suffix(nodes + 1, remember=MEMORY),
        }.items():
            count = Count()
            for file, recorded in single if "remembering" in name else files.items():
                count.along(drafter, file, recorded)
            arms.append(count.arm(name, nodes))
    return arms


def with_a_head(target: HFTarget, texts: Texts, head: str) -> list[Arm]:
    """A head alone, and with matches."""
    drafter = load_drafter(head, target)
    if not isinstance(drafter, Proposer):
        raise ValueError(f"drafter {head} grows no tree: give a trained one")
    files = {file: RecordedTarget(target, some, drafter.taps) for file, some in texts.items()}
    arms = []
    for rows in SIZES:
        drafter.grow_as(f"best-first-{drafter.deepest or 4}x{rows}")
        for name, each in {head: drafter, f"hybrid:head={head}": Hybrid(drafter, Suffix(rows))}.items():
            count = Count()
            for file, recorded in files.items():
                count.along(each, file, recorded)
            arms.append(count.arm(name, rows - 1))
    return arms


def answers(target: HFTarget, prompts: Prompts, new: int) -> Texts:
    """Greedy answers of two tokens or more."""
    made = Texts()
    for file, asked in prompts.items():
        said = generate(target, asked, "vanilla", max_new_tokens=new, temperature=0.0, batch=10)
        made[file] = [(each.prompt, each.tokens) for each in said if len(each.tokens) > 1]
    return made


def main(
    target: cli.TargetName = "smollm2",
    questions: cli.Files = [],  # noqa: B006
    head: Annotated[str, cli.option("a trained drafter", "NAME")] = "fasteagle",
    headed: Annotated[int, cli.option("files, the first ones, that it drafts for", "N", min=1)] = 4,
    limit: cli.Limit = 10,
    max_new_tokens: cli.MaxNewTokens = 128,
    dtype: cli.Dtype = "bfloat16",
    json_path: cli.JsonPath = None,
    plot: Plot = None,
) -> None:
    check_writable(json_path, plot, reads=cli.inputs(target, [head], questions))
    loaded = cli.load(target, dtype, "cpu")
    texts = answers(loaded, prompts_by_file(loaded, questions, limit), max_new_tokens)
    how: dict[str, Any] = {"head": head, "max_new_tokens": max_new_tokens}
    arms = alone(loaded, texts) + with_a_head(loaded, dict(list(texts.items())[:headed]), head)
    counts = {file: len(some) for file, some in texts.items()}
    report = MatchesReport(**heading(loaded), **how, questions=counts, arms=arms)
    cli.deliver(report, json_path)
    if plot is not None:
        report.draw(plot)


if __name__ == "__main__":
    run(main)
