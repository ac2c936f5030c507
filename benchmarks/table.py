r"""The tables of auto.md, drafters.md, exactness.md, gpu.md, peers.md, tables.md and throughput.md, from
stored results, between markers.

    python benchmarks/table.py benchmarks/results/drafters.json docs/drafters.md \
        --pair 'fasteagle over ngram'
    python benchmarks/table.py benchmarks/results/families.json docs/exactness.md
    python benchmarks/table.py benchmarks/results/gpu_7b.json docs/gpu.md
    python benchmarks/table.py benchmarks/results/peers_zen4.json docs/peers.md
    python benchmarks/table.py benchmarks/results/policy_zen4_all.json docs/auto.md
    python benchmarks/table.py benchmarks/results/tables.json docs/tables.md
    python benchmarks/table.py benchmarks/results/throughput.json docs/throughput.md

Speeds are means over the question sets. The last column of the third table of drafters is a prediction:
tokens per pass, over a round in which every pass takes as long as a plain one, as on a GPU, and drafting
takes the share of a plain pass that it took here.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from common import run
from families import FamiliesReport
from gpu import GPUReport
from peers import PeersReport
from policy import ENOUGH, PolicyReport
from slipstream.cli import common as cli
from slipstream.files import check_writable, read_text, replacing
from slipstream.measure.bootstrap import Paired, paired
from slipstream.measure.papers.reproduce_report import ReproduceReport, Table
from slipstream.measure.results import BenchReport, DrafterResult
from slipstream.results import Report
from throughput import ThroughputReport, arms_of

MOST_COLUMNS = 5  # that a page is wide enough for
MANY = {"holds": "hold", "does not hold": "do not hold"}
BEGIN, END = "<!-- made by benchmarks/table.py -->", "<!-- end -->"


Stored = (
    BenchReport | FamiliesReport | GPUReport | PeersReport | PolicyReport | ReproduceReport | ThroughputReport
)
PASSES = ("1", "8", "16", "32", "64")  # rows of those that are shown


def tables(report: Stored, link: str) -> str:
    """Those of a report."""
    if isinstance(report, ReproduceReport):
        return papers_tables(report, link)
    if isinstance(report, ThroughputReport):
        return throughput_tables(report, link)
    if isinstance(report, PolicyReport):
        return policy_tables(report, link)
    if isinstance(report, GPUReport):
        return gpu_tables(report, link)
    if isinstance(report, FamiliesReport):
        return families_table(report, link)
    return peers_table(report, link) if isinstance(report, PeersReport) else drafter_tables(report, link)


def papers_tables(report: ReproduceReport, link: str) -> str:
    """How many relations hold, every table that has a figure of ours, and the names of all others."""
    measured = [table for table in report.tables if any(value.ours is not None for value in table.values)]
    verdicts = Counter(relation.verdict for table in measured for relation in table.relations)
    sizes = [len(asked.categories) for asked in report.settings.sets.values()]
    about = f"{min(sizes)} to {max(sizes)} questions of each set, {report.max_new_tokens} tokens an answer"
    told = ", ".join(f"{count} {MANY.get(verdict, verdict)}" for verdict, count in verdicts.most_common())
    others = ", ".join(f"`{table.name}`" for table in report.tables if table not in measured)
    return "\n\n".join(
        [
            _settings(report, about, link),
            f"It took {report.seconds / 60:.0f} minutes; it told {report.estimate_seconds / 60:.0f}.",
            f"Relations of the papers here: {told}.",
            *map(_paper_table, measured),
            f"Without a figure in this run: {others}.",
        ]
    )


def _paper_table(table: Table) -> str:
    """The longer side goes down the page."""
    cells = {(value.row, value.column): str(value) for value in table.values}
    rows, columns = (list(dict.fromkeys(side)) for side in zip(*cells, strict=True))
    if len(columns) > max(len(rows), MOST_COLUMNS):
        cells = {(column, row): told for (row, column), told in cells.items()}
        rows, columns = columns, rows
    body = [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    verdicts = [f"- **{relation.verdict}**: {relation.text}" for relation in table.relations]
    few = "Fewer than 20 questions of a set: smoke." if table.smoke else ""
    about = " ".join(filter(None, (f"The paper's target is {table.model}.", table.note, few)))
    parts = [f"## `{table.name}`: {table.shows}", about, _table(["", *columns], body), "\n".join(verdicts)]
    return "\n\n".join(parts).strip()


def peers_table(report: PeersReport, link: str) -> str:
    """One row for each arm, the fastest first."""
    rows = []
    for arm in sorted(report.arms, key=lambda each: -each.speed):
        speeds = [arm.speed, *(pace.tokens_per_second for pace in arm.by_file.values())]
        times = [f"{arm.decode_tokens_per_second:.1f}", f"{arm.prompt_ms:.0f}"]
        rows.append([arm.arm, *(f"{speed:.1f}" for speed in speeds), *times, str(arm.over_plain)])
    sets = [Path(file).stem for file in report.prompts]
    head = ["engine", "tokens/s", *sets, "behind the prompt", "prompt, ms", "× plain [95 %]"]
    about = f"{sum(report.prompts.values())} questions, {report.max_new_tokens} tokens an answer"
    return f"{_settings(report, f'T = 0, {about}', link)}\n\n{_table(head, rows)}"


def families_table(report: FamiliesReport, link: str) -> str:
    """One row for each family."""
    rows = [
        [name, each.layers, *each.exactness.values(), f"{each.difference:.0e}"]
        for name, each in report.families.items()
    ]
    head = ["family", "layers", *next(iter(report.families.values())).exactness, "difference"]
    return f"{_settings(report, 'passes of 1 to 64 rows', link)}\n\n{_table(head, rows)}"


def throughput_tables(report: ThroughputReport, link: str) -> str:
    """Tokens per second of every arm by texts at once, a table for each length of prompts."""
    answers = ", ".join(str(new) for new in dict.fromkeys(cell.new for cell in report.cells))
    parts = [_settings(report, f"T = 0, {answers} tokens an answer, tokens/s with prompts", link)]
    for context, cells in report.by_context.items():
        rows = [[arm, *(cell.shown(arm) for cell in cells)] for arm in arms_of(cells)]
        parts += [f"Prompts of {context} tokens:", _table(["texts at once", *(c.asked for c in cells)], rows)]
    return "\n\n".join(parts)


def policy_tables(report: PolicyReport, link: str) -> str:
    """auto over plain decoding by texts at once, a table for each precision with and without compilation."""
    parts = [_settings(report, "`auto` over plain decoding for so many texts [95 %]", link)]
    for passes, cells in report.by_passes.items():
        lows, over = [cell.over_plain[1] for cell in cells], [cell.over_best[0] for cell in cells]
        held, near = (sum(each >= ENOUGH for each in some) for some in (lows, over))
        decoded = Counter(cell.texts for cell in cells)
        more = [f" {n} of the cells decoded {texts} texts." for texts, n in sorted(decoded.items())[1:]]
        told = (
            f"**{passes}**: the lower bound is at most five percent below plain decoding in {held} of "
            f"{len(cells)} cells. `auto` comes within five percent of the best fixed choice in {near}."
        )
        texts = sorted({cell.batch for cell in cells})
        by_place = {(cell.temperature, cell.context, cell.batch): cell.over_plain for cell in cells}
        rows = []
        for T, context in dict.fromkeys(sorted(place[:2] for place in by_place)):
            ratios = (by_place.get((T, context, batch)) for batch in texts)
            shown = ("–" if each is None else "{:.2f} [{:.2f}, {:.2f}]".format(*each) for each in ratios)
            rows.append([f"{T:g}", str(context), *shown])
        head = ["T", "context", *(f"{batch} text{'s' * (batch > 1)}" for batch in texts)]
        parts += [fill("".join([told, *more]), 110), _table(head, rows)]
    return "\n\n".join(parts)


def gpu_tables(report: GPUReport, link: str) -> str:
    """Milliseconds of passes by mode and rows, and of our kernels beside torch's."""
    parts = [_settings(report, f"memory read at {report.bandwidth_gb_s:.0f} GB/s", link)]
    for context in report.results[0].passes_ms:
        rows = [
            [
                m.mode,
                f"{m.plain_tokens_per_second:.0f}",
                f"{m.share:.0%}",
                *(f"{m.passes_ms[context][n]:.2f}" for n in PASSES),
            ]
            for m in report.results
        ]
        head = ["target", "plain, tokens/s", "of the bandwidth", "1 row", *(f"{n} rows" for n in PASSES[1:])]
        parts += [f"Plain decoding, and a pass behind {context} tokens in ms:", _table(head, rows)]
    costs = [*report.attention, *report.products]
    by_size = {(cost.what, cost.rows): f"{cost.ours_ms:.3f} / {cost.torch_ms:.3f}" for cost in costs}
    kernels = dict.fromkeys(cost.what for cost in costs)
    rows = [[what, *(by_size.get((what, n), "–") for n in (1, 8, 32, 64, 512))] for what in kernels]
    head = ["", "1 row", "8 rows", "32 rows", "64 rows", "512 rows"]
    return "\n\n".join([*parts, "One call of ours / of torch's, ms:", _table(head, rows)])


def drafter_tables(report: BenchReport, link: str) -> str:
    """Three Markdown tables of a report: speed, speed by question set, and where a round's time goes."""
    plain = _of(report, "vanilla")
    speed, by_set, cost = [], [], []
    for result in sorted(report.results, key=lambda each: -each.of_files["vanilla"].mean):
        name, tau, ledger, expected = f"`{result.drafter}`", result.tau, result.ledger, result.expected
        over = [str(result.of_files[baseline]) for baseline in ("vanilla", "hf_generate")]
        speed.append([name, f"{tau:.2f}", str(result.rows), *over])
        if result is not plain and ledger and expected:
            by_set.append([name, *(f"{part.speedup.vanilla:.2f}" for part in result.by_file.values())])
            figures = (ledger.rows, ledger.draft, expected.alpha, on_a_gpu(report, result))
            rows, draft, alpha, gpu = (f"{figure:.2f}" for figure in figures)
            cost.append([name, rows, draft, f"{expected.c:.3f}", alpha, gpu])
    about = (
        f"{len(report.prompts)} questions ({plain.questions} turns), {report.max_new_tokens} tokens a turn"
    )
    return "\n\n".join(
        [
            _settings(report, f"T = {report.temperature:g}, {about}", link),
            _table(["drafter", "τ", "rows", "× plain [95 %]", "× Hugging Face [95 %]"], speed),
            "The same speed over plain decoding's, by question set:",
            _table(["drafter", *(Path(each).stem for each in plain.by_file)], by_set),
            "Where a round's time goes, and a prediction for a GPU:",
            _table(["drafter", "× rows", "× draft", "c", "α", "GPU"], cost),
        ]
    )


def on_a_gpu(report: BenchReport, result: DrafterResult) -> float:
    """Predicted speed where a pass takes the same time for any tree: τ / (1 + draft / plain pass)."""
    plain = _of(report, "vanilla")
    one_pass = plain.seconds.verify / plain.target_passes
    return result.tau / (1 + result.seconds.draft / result.target_passes / one_pass)


def pair(report: BenchReport, ours: str, theirs: str) -> Paired:
    """One drafter's speed over another's on the same questions. Raises ValueError for a drafter that the
    report does not have, and for a report that does not store its questions."""
    asked = [_of(report, name).by_question for name in (ours, theirs)]
    if not all(asked):
        raise ValueError("the result was written without `by_question`: run `slipstream bench` again")
    return paired(*asked)


def write_tables(results: str, page: str) -> Stored:
    """Put the tables of a result between the markers of a page. Returns the result. Raises ValueError."""
    check_writable(page, reads=[results])
    text, report = read_text(page, "page"), read(results)
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"page {page} has no place for the tables: write {BEGIN} and {END} into it")
    with replacing(page) as file:
        made = tables(report, f"../benchmarks/results/{Path(results).name}")
        file.write(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
    return report


def read(results: str) -> Stored:
    """A result of any kind. Raises ValueError."""
    for kind in (FamiliesReport, GPUReport, PeersReport, PolicyReport, ReproduceReport, ThroughputReport):
        with suppress(ValueError):
            return kind.read(results)
    return BenchReport.read(results)


def _settings(report: Report, about: str, link: str) -> str:
    cores = f"{report.hardware['threads']} cores of {report.hardware['cpu']}"
    machine = str(report.hardware.get("gpu", cores)) if isinstance(report, GPUReport) else cores
    parts = (report.target, report.dtype, "compiled" * report.compiled, about, machine)
    settings = f"{', '.join(filter(None, parts))} ([`{Path(link).name}`]({link})):"
    return fill(settings, 110, break_long_words=False, break_on_hyphens=False)


def _of(report: BenchReport, drafter: str) -> DrafterResult:
    by_name = {result.drafter: result for result in report.results}
    if drafter not in by_name:
        raise ValueError(f"the result has no drafter {drafter!r}; it has {', '.join(by_name)}")
    return by_name[drafter]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(row)} |" for row in [head, *rows])
    return "\n".join([first, "|" + "---|" * len(head), *others])


def main(
    results: Annotated[str, typer.Argument(help="what `slipstream bench`, `reproduce` or peers.py stored")],
    page: Annotated[str, typer.Argument(help="a Markdown page with the markers")],
    pairs: Annotated[
        list[str],
        cli.option("print one drafter's speed over another's; repeatable", "'OURS over THEIRS'", "--pair"),
    ] = [],  # noqa: B006
) -> None:
    named = [name.split(" over ") for name in pairs]
    if wrong := [name for name, names in zip(pairs, named, strict=True) if len(names) != 2]:
        raise ValueError(f"--pair takes 'OURS over THEIRS', two drafters of the result, not {wrong[0]!r}")
    report = write_tables(results, page)
    if isinstance(report, BenchReport):
        for ours, theirs in named:
            cli.out.print(f"{ours} over {theirs}: {pair(report, ours, theirs)}", soft_wrap=True)
    elif named:
        raise ValueError("--pair takes drafters of what `slipstream bench --json` wrote")


if __name__ == "__main__":
    run(main)
