"""How many tokens a pass commits at T > 0 by the way drafts are proposed, measured by decoding.

    python benchmarks/proposals.py eagle:tree=chain-5 fasteagle:tree=chain-2 \
        --questions mt_bench.jsonl --questions gsm8k.jsonl --json benchmarks/results/proposals.json

Every drafter decodes the same prompts with each of the three proposals, and with several seeds. τ pools all
rounds. Its interval (95 %, bootstrap) is over the questions, whose seeds are added up. The ratio of two
proposals takes the same questions for both. A known text cannot judge `sampled`: a token drawn from q matches
a token drawn from p with probability Σ p·q, while the multi-round law accepts it with Σ min(p, q).
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import slipstream
from common import between, digits, drawn_of, run
from slipstream.cli import common as cli
from slipstream.files import check_writable, write_json
from slipstream.measure.datasets import Question, load_questions
from slipstream.results import Figures, heading

PROPOSALS = ("top-k", "noise", "sampled")


@dataclass
class Counts:
    """Tokens committed, target passes and accepted drafts by depth, of one question or more."""

    committed: int = 0
    passes: int = 0
    reached: list[int] = field(default_factory=list)  # [d]: rounds that accepted d + 1 drafted tokens or more

    def add(self, answer: Any) -> None:
        """Count one more answer's rounds."""
        for r in answer.rounds:
            self.committed, self.passes = self.committed + r.kept, self.passes + 1
            self.reached += [0] * (r.accepted - len(self.reached))
            for depth in range(r.accepted):
                self.reached[depth] += 1


def decode(
    target: Any, drafter: str, questions: Sequence[Question], seeds: int, new: int, temperature: float
) -> dict[str, Counts]:
    """What each question's rounds came to; the questions of a file are one batch."""
    counts = {question.name: Counts() for question in questions}
    for file in dict.fromkeys(question.file for question in questions):
        batch = [question for question in questions if question.file == file]
        prompts = [question.turns[0] for question in batch]
        settings: dict[str, Any] = {"max_new_tokens": new, "temperature": temperature}
        for seed in range(seeds):
            answers = slipstream.generate(target, prompts, drafter, seed=seed, **settings)
            for question, answer in zip(batch, answers, strict=True):
                counts[question.name].add(answer)
    return counts


def summary(counts: dict[str, Counts]) -> dict[str, Any]:
    """τ with its interval, and the figures that it is made of."""
    committed, passes = (sum(getattr(c, name) for c in counts.values()) for name in ("committed", "passes"))
    depth = max((len(c.reached) for c in counts.values()), default=0)
    reached = [sum(c.reached[d] for c in counts.values() if len(c.reached) > d) for d in range(depth)]
    return {
        "tau": digits(committed / passes),
        "interval": digits(between(draws(counts), len(counts))),
        "committed": committed,
        "target_passes": passes,
        "acceptance_by_depth": digits([r / passes for r in reached]),
        "by_question": {name: [c.committed, c.passes] for name, c in counts.items()},
    }


def draws(counts: dict[str, Counts]) -> Tensor:
    """τ of the questions drawn anew, the same draws for all proposals."""
    sums = torch.tensor([[c.committed, c.passes] for c in counts.values()], dtype=torch.float64)
    committed, passes = sums[drawn_of(len(sums))].sum(1).unbind(-1)
    return committed / passes


def compare(
    target: Any, drafters: Sequence[str], questions: Sequence[Question], **how: Any
) -> dict[str, Any]:
    """τ of every drafter with every proposal, and the ratios of any two proposals of one drafter."""
    arms, ratios = dict[str, Any](), dict[str, Any]()
    for drafter in drafters:
        found = {}
        for proposal in PROPOSALS:
            named = str(slipstream.Spec.parse(drafter).replace(proposal=proposal))
            found[proposal] = decode(target, named, questions, **how)
            arms[named] = arm = summary(found[proposal])
            print(drafter, proposal, arm["tau"], file=sys.stderr, flush=True)
        ratios[drafter] = {}
        for below, above in combinations(PROPOSALS, 2):
            share = draws(found[above]) / draws(found[below])
            mean = summary(found[above])["tau"] / summary(found[below])["tau"]
            made = {"ratio": mean, "interval": between(share, len(found[above]))}
            ratios[drafter][f"{above} over {below}"] = digits(made)
    return {"arms": arms, "ratios": ratios}


def main(
    drafters: Annotated[list[str], typer.Argument(help="such as eagle:tree=chain-5, with a static tree")],
    target: cli.TargetName = "smollm2",
    questions: cli.Files = [],  # noqa: B006
    limit: cli.Limit = 8,
    max_new_tokens: cli.MaxNewTokens = 64,
    temperature: cli.Temperature = 1.0,
    seeds: Annotated[int, cli.option("of each question", "N", min=1)] = 3,
    dtype: cli.Dtype = "float32",
    json_path: cli.JsonPath = None,
) -> None:
    check_writable(json_path, reads=cli.inputs(target, drafters, questions))
    loaded, asked = cli.load(target, dtype, "cpu"), load_questions(questions, limit)
    found = compare(loaded, drafters, asked, seeds=seeds, new=max_new_tokens, temperature=temperature)
    table = Figures(None, "drafter", "τ", "95 %", "by depth")
    for name, arm in found["arms"].items():
        ends, depths = arm["interval"], " ".join(f"{a:.2f}" for a in arm["acceptance_by_depth"])
        table.add_row(name, f"{arm['tau']:.3f}", "[{:.3f}, {:.3f}]".format(*ends), depths)
    cli.out.print(table)
    if json_path is not None:
        settings = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seeds": seeds,
            "questions": dict(Counter(question.file for question in asked)),
        }
        write_json(json_path, {**heading(loaded), **settings, **found})


if __name__ == "__main__":
    run(main)
