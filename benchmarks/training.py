"""A training run as a stored result: its recipe, its predictions of τ, and the minutes that its steps took.

slipstream train eagle --recipe recipes/eagle_smollm2.yaml --data answers.jsonl.gz --out runs/eagle
python benchmarks/training.py runs/eagle --json benchmarks/results/eagle_training.json
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from slipstream.files import check_writable, write_json
from slipstream.results import heading
from slipstream.targets import load_target


def history(home: Path) -> dict[str, Any]:
    """What the directory of a run says: recipe without its data files, evaluations, minutes of all steps."""
    recipe = yaml.safe_load((home / "recipe.yaml").read_text("utf-8"))
    recipe["data"].pop("files", None)
    lines = (home / "log.jsonl").read_text("utf-8").splitlines()
    minutes = json.loads((home / "config.json").read_text("utf-8"))["training"]["minutes"]
    return {"recipe": recipe, "history": [json.loads(line) for line in lines], "minutes": minutes}


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("run", help="the directory that `slipstream train` wrote")
    options.add_argument("--target", default="smollm2")
    options.add_argument("--dtype", default="float32", help="that the run was trained in")
    options.add_argument("--json", required=True)
    given = options.parse_args()
    check_writable(given.json)
    target = load_target(given.target, given.dtype)
    command = {"command": f"python benchmarks/training.py {shlex.join(sys.argv[1:])}"}
    write_json(given.json, {**heading(target), **command, **history(Path(given.run))})


if __name__ == "__main__":
    main()
