r"""How often a drafted token is accepted, by the drafter's own confidence in it (GLIDE with a CAPE §4.2, Fig.
1b).

    python benchmarks/confidence.py eagle fasteagle --questions mt_bench.jsonl --questions gsm8k.jsonl \
        --json benchmarks/results/confidence.json --plot docs/confidence.svg

Drafts start at every position of the target's own greedy answers and follow them: each drafted token is
judged where all before it were right. The calibration error is the mean distance of confidence and acceptance
over bins, by their size.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from common import Plot, run
from slipstream.cli import common as cli
from slipstream.drafters import load_drafter
from slipstream.drafters.proposer import Proposer
from slipstream.files import check_writable
from slipstream.measure.confidence import calibrate


def main(
    drafters: Annotated[list[str], typer.Argument(help="as in `slipstream bench`")],
    target: cli.TargetName = "smollm2",
    questions: cli.Files = [],  # noqa: B006
    limit: cli.Limit = 10,
    max_new_tokens: cli.MaxNewTokens = 128,
    dtype: cli.Dtype = "float32",
    depth: Annotated[int, cli.option("tokens drafted ahead, where the drafter can", "N", min=1)] = 3,
    json_path: cli.JsonPath = None,
    plot: Plot = None,
) -> None:
    check_writable(json_path, plot, reads=cli.inputs(target, drafters, questions))
    loaded = cli.load(target, dtype, "cpu")
    named: dict[str, Proposer] = {}
    for name in drafters:
        if not isinstance(drafter := load_drafter(name, loaded), Proposer):
            raise ValueError(f"drafter {name} has no confidence: give a trained one")
        named[Path(name).name] = drafter
    how: dict[str, Any] = {"depth": depth, "limit": limit, "max_new_tokens": max_new_tokens}
    report = calibrate(loaded, named, questions, **how)
    cli.deliver(report, json_path)
    if plot is not None:
        report.plot(plot)


if __name__ == "__main__":
    run(main)
