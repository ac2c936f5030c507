"""Which relations of the papers would hold where rows cost what they cost on another machine? Computed, not
measured there.

    python benchmarks/rows_free.py benchmarks/results/tables.json benchmarks/results/gpu_7b.json \
        --json benchmarks/results/rows_free.json

Takes the rounds that `reproduce` raced, one text at a time, and the passes that `gpu.py` timed. A round costs
a pass of the rows of its tree, and what it drafts: for each guess in a row a layer and an LM head, `--layer`
and `--head` of a plain pass. FastEagle has one LM head a round, Medusa no layers. Prompts cost nothing.
Self-speculation, whose share of the target is its own, is left out.
"""

import json as words
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from common import run
from slipstream.cli import common as cli
from slipstream.drafters import load_drafter
from slipstream.files import check_writable
from slipstream.machine import versions
from slipstream.measure.papers.entry import ENTRIES
from slipstream.measure.papers.measurements import ABSENT, RACE, Cell, Measurements
from slipstream.measure.papers.reproduce_report import ReproduceReport
from slipstream.results import Figures, Part, Result, made
from slipstream.targets import load_target

PLAIN = {"vanilla": 1, "hf_generate": 1}  # rows of their passes
LEFT_OUT = {"self-speculative"}
NOTHING = ("bita", "lookahead", "ngram", "suffix", *PLAIN)  # reads no weights to draft
SPEED = "× plain"
Passes = Mapping[int, float]


class Computed(Part):
    """A relation, as it was measured and as the other machine's costs would have it."""

    table: str
    claim: str
    measured: str
    computed: str
    difference: float | None
    interval: tuple[float, float] | None


class RowsFree(Result):
    """All relations of speed. `passes`: of the other machine, in its plain passes, by rows; `rows`: of the
    trees, by drafter."""

    versions: dict[str, str]
    of: str
    gpu: str
    passes: dict[int, float]
    rows: dict[str, int]
    layer: float
    head: float
    speeds: dict[str, float]
    relations: list[Computed]

    def __rich__(self) -> Group:
        speeds = Figures(f"computed from the passes of {self.gpu}, not measured", "drafter", "× plain")
        for name, speed in self.speeds.items():
            speeds.add_row(name, f"{speed:.2f}")
        table = Figures(None, "relation", "measured here", "computed")
        for each in self.relations:
            table.add_row(f"{each.table}: {each.claim}", each.measured, each.computed)
        return Group(speeds, table)


def read_passes(path: str, mode: str) -> tuple[str, dict[int, float]]:
    """The GPU, and its passes by rows over that of one row. Raises ValueError."""
    try:
        found = words.loads(Path(path).read_text())
        [result] = [each for each in found["results"] if each["mode"] == mode]
        [passes] = result["passes_ms"].values()
        return found["hardware"]["gpu"], {int(n): round(ms / passes["1"], 4) for n, ms in passes.items()}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of benchmarks/gpu.py with {mode!r} at one context") from error


def cost_of(rows: int, passes: Passes) -> float:
    """A pass of so many rows: that of the next larger number that was timed. Raises ValueError."""
    if rows > max(passes):
        raise ValueError(f"a tree of {rows} rows; passes of at most {max(passes)} were timed")
    return passes[min(n for n in passes if n >= rows)]


def drafts(head: str, rounds: float, levels: float, layer: float, lm_head: float) -> float:
    """Plain passes that drafting takes."""
    if head in NOTHING:
        return 0.0
    layers, heads = (0.0 if head == "medusa" else levels), (rounds if head == "fasteagle" else levels)
    return layers * layer + heads * lm_head


def computed(cell: Cell, rows: int, passes: Passes, layer: float, lm_head: float) -> Cell:
    """A raced cell with the seconds of the other machine, of which a plain pass takes one."""
    questions, head = {}, cell.drafter.partition(":")[0]
    for name, figures in cell.questions.items():
        one = dict(zip(cell.columns, figures, strict=True))
        one["draft seconds"] = drafts(head, one["rounds"], one["levels"], layer, lm_head)
        one["seconds"] = one["rounds"] * cost_of(rows, passes) + one["draft seconds"]
        one["plain seconds"] = one["plain verify"] = one["plain rounds"]
        questions[name] = [*one.values()]
    return cell.model_copy(update={"questions": questions})


def compare(
    report: ReproduceReport, passes: Passes, rows: Mapping[str, int], layer: float, head: float
) -> dict[str, Any]:
    """Relations between speeds over plain decoding, and these speeds on MT-bench at T = 0."""
    raced = [each for each in report.cells if each.how == RACE and each.batch == 1 and each.drafter in rows]
    cells = {each.key: computed(each, rows[each.drafter], passes, layer, head) for each in raced}
    categories = {name: questions.categories for name, questions in report.settings.sets.items()}
    measurements = Measurements(cells, categories)
    relations, speeds = list[Computed](), dict[str, float]()
    for table in report.tables:
        entry, here = ENTRIES[table.name], {each.claim: each.verdict for each in table.relations}
        timed = [each for each in entry.claims if {each.left.kind, each.right.kind} == {SPEED}]
        for claim in timed:
            verdict, difference, interval = measurements.verdict(claim)
            if verdict != ABSENT and claim.text in here:
                what: dict[str, Any] = {
                    "claim": claim.text,
                    "measured": here[claim.text],
                    "computed": verdict,
                }
                what |= {"difference": difference, "interval": interval}
                relations.append(Computed(table=table.name, **what))
        for figure in entry.figures:
            value = measurements.value(figure)[0] if figure.kind == SPEED else None
            if value is not None and figure.sets == ("mt_bench",) and not figure.temperature:
                speeds[figure.drafter] = value
    return {"relations": relations, "speeds": speeds}


def main(
    tables: Annotated[str, typer.Argument()],
    gpu: Annotated[str, typer.Argument()],
    json: Annotated[str, cli.option("the result", "FILE")],
    mode: Annotated[str, cli.option("of the GPU's passes", "NAME")] = "captured",
    layer: Annotated[float, cli.option("a draft's layer, in plain passes", "SHARE")] = 0.035,
    head: Annotated[float, cli.option("its LM head, in plain passes", "SHARE")] = 0.02,
) -> None:
    """Compute, print, store."""
    check_writable(json, reads=[tables, gpu])
    report, (name, passes) = ReproduceReport.read(tables), read_passes(gpu, mode)
    target, raced = load_target(report.target), {each.drafter for each in report.cells if each.how == RACE}
    rows = {name: load_drafter(name, target).rows for name in sorted(raced - PLAIN.keys() - LEFT_OUT)}
    costs: dict[str, Any] = {"passes": passes, "rows": PLAIN | rows, "layer": layer, "head": head}
    about: dict[str, Any] = {"versions": versions(), "of": Path(tables).name, "gpu": name}
    result = RowsFree(**made(), **about, **costs, **compare(report, **costs))
    result.write(json)
    cli.out.print(result)


if __name__ == "__main__":
    run(main)
