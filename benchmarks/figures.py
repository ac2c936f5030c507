"""Everything in README and docs that follows from stored results, made anew from them.

    python benchmarks/figures.py

That is what is `derived` in the results themselves, each picture in `PICTURES`, and the tables of `TABLES`.
Other figures in the text are written by hand; `tests/test_figures.py` finds each of them in a
stored result, and holds pictures and tables to what is made here.
"""

import json
from collections.abc import Callable
from pathlib import Path

import derive
import growth
from heads import HeadsReport
from peers import PeersReport
from slipstream.measure.tune_report import TuneReport
from slipstream.training.run import draw
from slipstream.training.trainer import Evaluation
from table import write_tables
from throughput import ThroughputReport

DOCS = Path(__file__).parents[1] / "docs"
TABLES = {"tables.md": "tables.json", "throughput.md": "throughput.json"}  # pages, and what they show


def curve(result: Path, path: str) -> None:
    """Draw a training run's predictions of τ."""
    history = json.loads(result.read_text("utf-8"))["history"]
    draw([Evaluation(**entry) for entry in history], path)


PICTURES: dict[str, tuple[str, Callable[[Path, str], None]]] = {
    "eagle_training.svg": ("eagle_training.json", curve),
    "growth.svg": ("heads_growth.json", growth.draw),
    "heads.svg": ("heads.json", lambda result, path: HeadsReport.read(result).draw(path)),
    "heads_sizes.svg": ("heads_sizes.json", lambda result, path: HeadsReport.read(result).draw(path)),
    "peers.svg": ("peers_zen4.json", lambda result, path: PeersReport.read(result).draw(path)),
    "throughput.svg": ("throughput.json", lambda result, path: ThroughputReport.read(result).draw(path)),
    "tuned.svg": ("tune_fp32.json", lambda result, path: TuneReport.read(result).plot(path)),
}
BY_HAND = {
    "round.svg": "drawn by hand; it has no measured figure",
    "demo.svg": "a real run of benchmarks/picture.py, which needs the model",
}


def main() -> None:
    """Write what is derived, tables and pictures."""
    derive.main()
    for page, result in TABLES.items():
        write_tables(str(derive.RESULTS / result), str(DOCS / page))
    for name, (result, make) in PICTURES.items():
        make(derive.RESULTS / result, str(DOCS / name))


if __name__ == "__main__":
    main()
