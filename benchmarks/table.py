r"""A table of stored figures for a page of the docs, between its markers.

slipstream bench --drafter … --json benchmarks/results/drafters.json
python benchmarks/table.py benchmarks/results/drafters.json docs/drafters.md
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from slipstream.files import replacing

BEGIN, END = "<!-- made by benchmarks/table.py -->", "<!-- end -->"

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("results", help="what `slipstream bench --json` wrote")
options.add_argument("page", help="Markdown with the markers")
given = options.parse_args()

found, page = json.loads(Path(given.results).read_text()), Path(given.page).read_text()
files = list(found["results"][0]["by_file"])
columns = ["drafter", "τ", "rows", "draft", "c", "α", *(Path(name).stem for name in files), "mean", "× HF"]
lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
for result in found["results"]:
    result["mean"] = fmean(part["speedup"]["vanilla"] for part in result["by_file"].values())
for result in sorted(found["results"], key=lambda each: -each["mean"]):
    ledger, expected = result["ledger"], result["expected"]
    plain = result["drafter"] == "vanilla"
    cells = [f"`{result['drafter']}`", f"{result['tau']:.2f}", *(f"{ledger[part]:.2f}" for part in ("rows", "draft"))]
    cells += ["", ""] if plain else [f"{expected['c']:.3f}", f"{expected['alpha']:.2f}"]
    cells += [f"{result['by_file'][name]['speedup']['vanilla']:.2f}" for name in files]
    cells += [f"{result['mean']:.2f}", f"{result['speedup']['hf_generate']:.2f}"]
    lines.append(f"| {' | '.join(cells)} |")
hardware = found["hardware"]
name, compiled = Path(given.results).name, ", compiled" if found["compiled"] else ""
turns, most = found["results"][0]["questions"], found["max_new_tokens"]
about = (
    f"{found['target']}, {found['dtype']}{compiled}, T = {found['temperature']:g}, {turns} turns of {most} tokens, "
    f"{hardware['threads']} cores of {hardware['cpu']}; speed as a multiple of plain decoding's "
    f"([`{name}`](../benchmarks/results/{name}))"
)
before, _, rest = page.partition(BEGIN)
_, _, after = rest.partition(END)
with replacing(given.page) as file:
    file.write(f"{before}{BEGIN}\n\n{about}:\n\n" + "\n".join(lines) + f"\n\n{END}{after}")
