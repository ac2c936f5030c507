"""The tables of docs/drafters.md, between its markers, from what `slipstream bench --json` wrote.

    python benchmarks/table.py benchmarks/results/drafters.json docs/drafters.md --pair hybrid ngram

Speeds are means over the question sets. The last column of the third table is a prediction: tokens per pass,
over a round in which every pass takes as long as a plain one, as on a GPU, and drafting takes the share of a
plain pass that it took here.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.files import replacing
from slipstream.measure.paired import paired

BEGIN, END = "<!-- made by benchmarks/table.py -->", "<!-- end -->"


def tables(report: dict[str, Any], link: str) -> str:
    """Three Markdown tables of a report: speed, speed by question set, and where a round's time goes."""
    plain = next(result for result in report["results"] if result["drafter"] == "vanilla")
    one_pass = plain["seconds"]["verify"] / plain["target_passes"]
    sets = list(plain["by_file"])
    speed, by_set, cost = [], [], []
    for result in sorted(report["results"], key=lambda each: -each["of_files"]["vanilla"]["mean"]):
        name, tau, ledger = f"`{result['drafter']}`", result["tau"], result["ledger"]
        baselines = [_with_interval(result["of_files"][each]) for each in ("vanilla", "hf_generate")]
        speed.append([name, f"{tau:.2f}", str(result["rows"]), *baselines])
        if result is not plain:
            by_set.append([name, *(f"{result['by_file'][each]['speedup']['vanilla']:.2f}" for each in sets)])
            draft = result["seconds"]["draft"] / result["target_passes"] / one_pass
            expected = [f"{result['expected']['c']:.3f}", f"{result['expected']['alpha']:.2f}"]
            factors = [f"{ledger['rows']:.2f}", f"{ledger['draft']:.2f}"]
            cost.append([name, *factors, *expected, f"{tau / (1 + draft):.2f}"])
    hardware, compiled = report["hardware"], ", compiled" if report["compiled"] else ""
    settings = (
        f"{report['target']}, {report['dtype']}{compiled}, T = {report['temperature']:g}, "
        f"{len(report['prompts'])} questions ({plain['questions']} turns), "
        f"{report['max_new_tokens']} tokens a turn, {hardware['threads']} cores of "
        f"{hardware['cpu']} ([`{Path(link).name}`]({link}))"
    )
    return "\n\n".join(
        [
            f"{settings}:",
            _table(["drafter", "τ", "rows", "× plain [95 %]", "× Hugging Face [95 %]"], speed),
            "The same speed over plain decoding's, by question set:",
            _table(["drafter", *(Path(each).stem for each in sets)], by_set),
            "Where a round's time goes, and a prediction for a GPU:",
            _table(["drafter", "× rows", "× draft", "c", "α", "GPU"], cost),
        ]
    )


def _with_interval(ratio: dict[str, Any]) -> str:
    low, high = ratio["interval"]
    return f"{ratio['mean']:.2f} [{low:.2f}, {high:.2f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(row)} |" for row in [head, *rows])
    return "\n".join([first, "|" + "---|" * len(head), *others])


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("results", help="what `slipstream bench --json` wrote")
    options.add_argument("page", help="a Markdown page with the markers")
    options.add_argument(
        "--pair", nargs=2, action="append", default=[], help="print one drafter's speed over another's"
    )
    given = options.parse_args()
    report, page = json.loads(Path(given.results).read_text()), Path(given.page).read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    with replacing(given.page) as file:
        made = tables(report, f"../benchmarks/results/{Path(given.results).name}")
        file.write(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
    by_name = {result["drafter"]: result for result in report["results"]}
    for ours, theirs in given.pair:
        print(f"{ours} over {theirs}: {paired(by_name[ours], by_name[theirs])}")
