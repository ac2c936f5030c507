r"""A table of stored figures for a page of the docs, between its markers.

Its last column is a prediction: tokens a pass over what a round costs where a pass takes the same time for
any of these trees, as on a GPU, and the draft takes the share of a plain pass that it took here.

slipstream bench --drafter … --json benchmarks/results/drafters.json
python benchmarks/table.py benchmarks/results/drafters.json docs/drafters.md --pair hybrid ngram
"""

import argparse
import json
from pathlib import Path

from slipstream.files import replacing
from slipstream.measure.paired import paired

BEGIN, END = "<!-- made by benchmarks/table.py -->", "<!-- end -->"

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("results", help="what `slipstream bench --json` wrote")
options.add_argument("page", help="Markdown with the markers")
options.add_argument(
    "--pair",
    nargs=2,
    action="append",
    default=[],
    help="two drafters: the one's speed over the other's is printed",
)
given = options.parse_args()

found, page = json.loads(Path(given.results).read_text()), Path(given.page).read_text()
files = list(found["results"][0]["by_file"])
head = ["drafter", "τ", "rows", "× rows", "× draft", "c", "α"]
columns = [*head, *(Path(name).stem for name in files), "mean [95 %]", "× HF", "GPU"]
lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
plain = next(result for result in found["results"] if result["drafter"] == "vanilla")
one_pass = plain["seconds"]["verify"] / plain["target_passes"]
for result in sorted(found["results"], key=lambda each: -each["of_files"]["vanilla"]["mean"]):
    tau, of, expected = result["tau"], result["ledger"], result["expected"]
    draft = result["seconds"]["draft"] / result["target_passes"] / one_pass
    speeds = [f"{result['by_file'][name]['speedup']['vanilla']:.2f}" for name in files]
    speeds += [
        str(paired(result, plain)),
        f"{result['speedup']['hf_generate']:.2f}",
        f"{tau / (1 + draft):.2f}",
    ]
    cells = [
        f"`{result['drafter']}`",
        f"{tau:.2f}",
        str(result["rows"]),
        f"{of['rows']:.2f}",
        f"{of['draft']:.2f}",
    ]
    cells += ["", ""] if result is plain else [f"{expected['c']:.3f}", f"{expected['alpha']:.2f}"]
    lines.append(f"| {' | '.join([*cells, *speeds])} |")
hardware = found["hardware"]
name, compiled = Path(given.results).name, ", compiled" if found["compiled"] else ""
turns, most = found["results"][0]["questions"], found["max_new_tokens"]
about = (
    f"{found['target']}, {found['dtype']}{compiled}, T = {found['temperature']:g}, {turns} turns of {most} "
    f"tokens, "
    f"{hardware['threads']} cores of {hardware['cpu']}; speed as a multiple of plain decoding's "
    f"([`{name}`](../benchmarks/results/{name}))"
)
before, _, rest = page.partition(BEGIN)
_, _, after = rest.partition(END)
with replacing(given.page) as file:
    file.write(f"{before}{BEGIN}\n\n{about}:\n\n" + "\n".join(lines) + f"\n\n{END}{after}")
by_name = {result["drafter"]: result for result in found["results"]}
for ours, theirs in given.pair:
    print(f"{ours} over {theirs}: {paired(by_name[ours], by_name[theirs])}")
