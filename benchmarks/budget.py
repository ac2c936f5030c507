r"""Should texts that share rounds share a budget of nodes? τ of the same tree for every text, and of one
budget that is spent where drafts are surest, at equal rows of the target's passes.

    python benchmarks/budget.py smollm2 --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/budget.json

Along the target's answers, which are recorded once, every text grows a large best-first tree. With a budget
of n nodes a text, the same tree for all is its first n nodes. The shared budget takes the likeliest nodes
of all texts' trees together, so that a sure text gets more of them and an unsure one a bare root. No pass
is made and nothing is timed: at equal rows a pass costs the same, so that the gain in τ bounds the gain in
speed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from common import between, drawn_of, pooled, prompts_by_file, records, run
from slipstream.cli import common as cli
from slipstream.core.drafter import Drafter, ScratchSlots, State
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.tree import PAD, Tree
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter
from slipstream.drafters.proposer import Proposer
from slipstream.engine.replay import Prediction, predict
from slipstream.files import check_writable, write_json
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget

BUDGETS = (2, 3, 4, 6, 8)  # nodes a text, the root included
GROWN = 16  # of which the shared budget chooses


class Shared(Drafter):
    """A drafter's trees, of which the likeliest nodes of all texts are kept: so many a text, on average."""

    def __init__(self, drafter: Proposer, budget: int) -> None:
        self.drafter, self.budget = drafter, budget
        self.rows, self.depth = drafter.rows, drafter.depth
        self.taps, self.uses_target_noise = drafter.taps, drafter.uses_target_noise

    def start(self, batch: int, device: torch.device) -> State:
        return self.drafter.start(batch, device)

    def update(self, span: Span, state: State) -> None:
        self.drafter.update(span, state)

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        return self.drafter.scratch_slots(spec)

    def propose(self, state: State, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        tree = self.drafter.propose(state, sampler, spec)
        assert tree.scores is not None, "a best-first tree knows its scores"
        return replace(tree, tokens=tree.tokens.masked_fill(~likeliest(tree.scores, self.budget), PAD))


def likeliest(scores: Tensor, budget: int) -> Tensor:
    """Which nodes (B, N) of B texts a budget of B·`budget` nodes keeps: all roots, and the likeliest others.
    A node is never likelier than its parent, so what is kept are trees."""
    texts = len(scores)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[:, 0] = True
    guesses = scores[:, 1:].flatten()
    first = guesses.sort(descending=True, stable=True).indices[: texts * (budget - 1)]
    kept[:, 1:] = torch.zeros_like(guesses, dtype=torch.bool).index_fill_(0, first, True).view(texts, -1)
    return kept


def gained(shared: Prediction, same: Prediction) -> list[float]:
    """The ratio of two τ, and the ends of the bootstrap's 95 % of it over texts."""
    count = shared.committed.shape[1]
    drawn = drawn_of(count)

    def taus(made: Prediction) -> Tensor:
        tokens, rounds = made.committed.sum(0).double(), (made.committed > 0).sum(0).double()
        return tokens[drawn].sum(1) / rounds[drawn].sum(1)

    ends = between(taus(shared) / taus(same), count)
    return [round(float(each), 4) for each in (shared.tau / same.tau, *ends)]


def compare(
    target: HFTarget, name: str, questions: Sequence[str], limit: int, new: int, texts: int
) -> list[dict[str, Any]]:
    """A drafter's figures with every budget, of `texts` texts at once. Raises ValueError."""
    drafter = load_drafter(name, target)
    if not isinstance(drafter, Proposer):
        raise ValueError(f"drafter {name!r} grows no trees: name a head such as fasteagle")
    depth = min(5, drafter.deepest or 5)
    prompts = [each for some in prompts_by_file(target, questions, limit).values() for each in some]
    count = max(1, len(prompts) // texts)
    groups = {str(i): prompts[i::count] for i in range(count)}
    recorded, rows = records(target, groups, new, drafter.taps).values(), []
    for budget in BUDGETS:
        drafter.grow_as(f"best-first-{min(depth, budget - 1)}x{budget}")
        same = pooled({str(i): predict(drafter, each) for i, each in enumerate(recorded)})
        drafter.grow_as(f"best-first-{depth}x{GROWN}")
        shared = pooled({str(i): predict(Shared(drafter, budget), each) for i, each in enumerate(recorded)})
        figures = {"same": round(same.tau, 4), "shared": round(shared.tau, 4), "gain": gained(shared, same)}
        rows.append({"drafter": name, "nodes": budget, **figures})
    return rows


def main(
    target: Annotated[str, typer.Argument(help=cli.NAMED)],
    questions: cli.Files,
    drafter: cli.DrafterNames = ["fasteagle", "eagle"],  # noqa: B006
    texts: Annotated[int, cli.option("that share rounds", "N", min=1)] = 8,
    limit: Annotated[int, cli.option("questions of each file", "N", min=1)] = 12,
    max_new_tokens: cli.MaxNewTokens = 64,
    dtype: cli.Dtype = "auto",
    json_path: cli.JsonPath = None,
) -> None:
    """Record, predict, print."""
    check_writable(json_path, reads=questions)
    model = cli.load(target, dtype, "cpu")
    rows = [row for name in drafter for row in compare(model, name, questions, limit, max_new_tokens, texts)]
    table = Figures(
        f"τ, {texts} texts at once", "drafter", "nodes a text", "same tree", "shared", "gain [95 %]"
    )
    for row in rows:
        gain, low, high = row["gain"]
        figures = (f"{row['same']:.3f}", f"{row['shared']:.3f}", f"{gain:.3f} [{low:.3f}, {high:.3f}]")
        table.add_row(row["drafter"], str(row["nodes"]), *figures)
    if json_path is not None:
        write_json(json_path, {**heading(model), "texts": texts, "results": rows})
    cli.out.print(table)


if __name__ == "__main__":
    run(main)
