"""A training run as a stored result: its recipe, its predictions of τ, and the minutes that its steps took.

slipstream train eagle --recipe recipes/eagle_smollm2.yaml --data answers.jsonl.gz --out runs/eagle
python benchmarks/training.py runs/eagle --json benchmarks/results/eagle_training.json
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from common import run
from slipstream.cli import common as cli
from slipstream.files import check_writable, write_json
from slipstream.results import heading


def history(home: Path) -> dict[str, Any]:
    """What the directory of a run says: recipe without its data files, evaluations, minutes of all steps."""
    recipe = yaml.safe_load((home / "recipe.yaml").read_text("utf-8"))
    recipe["data"].pop("files", None)
    lines = (home / "log.jsonl").read_text("utf-8").splitlines()
    minutes = json.loads((home / "config.json").read_text("utf-8"))["training"]["minutes"]
    return {"recipe": recipe, "history": [json.loads(line) for line in lines], "minutes": minutes}


def main(
    home: Annotated[Path, typer.Argument(metavar="RUN", help="the directory that `slipstream train` wrote")],
    json_path: Annotated[str, cli.option(cli.JSON, "FILE", "--json")],
    target: cli.TargetName = "smollm2",
    dtype: cli.Dtype = "float32",
) -> None:
    files = [str(home / name) for name in ("recipe.yaml", "log.jsonl")]
    check_writable(json_path, reads=cli.inputs(target, [], [str(home), *files]))
    write_json(json_path, {**heading(cli.load(target, dtype, "cpu")), **history(home)})


if __name__ == "__main__":
    run(main)
