"""Tables and coloured text for the terminal."""

import shlex
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from slipstream.drafters.spec import Spec

ACCEPTED, OWN = "bold green", "default"
DROPPED = "dim"  # rows that lost an earlier race
WIDE = 12  # letters of a name that columns are called by
FACTORS = {"tau": "τ", "rows": "rows", "draft": "draft", "host": "host", "prompt": "prompt"}


class Figures(Table):
    """A table of what was measured, whose rows are stacked where the terminal is too narrow for its columns.

    All is printed as it is: a name may hold what would be rich's markup.
    """

    def __init__(self, title: str | None, first: str, *others: str) -> None:
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        self._title, self._records = title, list[list[Text]]()
        self.add_column(Text(first))
        for name in others:
            self.add_column(Text(name), justify="right")

    def add_row(self, *cells: Any, **about: Any) -> None:
        texts = [cell if isinstance(cell, Text) else Text(cell, about.get("style") or "") for cell in cells]
        self._records.append(texts)
        super().add_row(*texts, **about)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self._title:
            yield Text(self._title, "bold")
        if Measurement.get(console, options.update_width(10_000), self).maximum <= options.max_width:
            yield from super().__rich_console__(console, options)  # type: ignore[misc]
        else:
            yield from self._stacked(options.max_width)

    def _stacked(self, width: int) -> Iterator[Text]:
        """Each row's name, and below it as many figures to a line as there is room for."""
        first, *others = (column.header.plain for column in self.columns if isinstance(column.header, Text))
        widths = [max(map(len, column)) for column in zip(*self._records, strict=True)][1:]
        for name, *cells in self._records:
            yield Text.assemble((f"{first} ", "dim"), name) if len(first) + len(name) < width else name
            line = Text()
            for header, cell, wide in zip(others, cells, widths, strict=True):
                pair = Text.assemble("  ", (header, "dim"), " " * (1 + wide - len(cell)), cell)
                if line and cell and len(line) + len(pair) > width:
                    yield line
                    line = Text()
                line += pair if cell else ""
            yield line
        yield Text()


def bench_table(report: dict[str, Any]) -> Group:
    """One line per drafter, then one per category and drafter."""
    hf = report["hf_generate"]["tokens_per_second"]
    title = (
        f"{report['target']}, {report['dtype']}, T = {report['temperature']:g}, {report['hardware']['cpu']}"
    )
    main = Figures(title, "drafter", "τ", "tok/s", "× plain", "× HF", "draft", "verify", "host", "same")
    for row in report["results"]:
        spent = row["seconds"]
        busy = max(spent["draft"] + spent["verify"] + spent["host"], 1e-9)
        main.add_row(
            row["drafter"],
            f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']['vanilla']:.2f}",
            f"{row['speedup']['hf_generate']:.2f}",
            *(f"{spent[part] / busy:.1%}" for part in ("draft", "verify", "host")),
            _sameness(row),
        )
    main.add_row("HF generate", "1.00", f"{hf:.1f}", "", "1.00", "", "", "", "", style="dim")
    return Group(main, _categories(report), *_depths(report), *_ledgers(report))


def _categories(report: dict[str, Any]) -> Figures:
    drafters = [row for row in report["results"] if row["drafter"] != "vanilla"] or report["results"]
    names = [row["drafter"] for row in drafters]
    title, short = "τ, and speed × plain", [f"#{number}" for number in range(1, 1 + len(names))]
    if max(map(len, names)) > WIDE:
        title += "".join(f"; {number} {name}" for number, name in zip(short, names, strict=True))
        names = short
    table = Figures(title, "questions", "turns", *names)
    for kind in ("by_category", "by_file"):
        for key, first in drafters[0][kind].items():
            parts = (row[kind][key] for row in drafters)
            cells = (f"{part['tau']:.2f}  {part['speedup']['vanilla']:.2f}×" for part in parts)
            table.add_row(key, str(first["questions"]), *cells)
        table.add_section()
    means = [row["of_files"]["vanilla"] for row in drafters]
    table.add_row("mean of the files", "", *(f"{of['mean']:.2f}×" for of in means))
    if means[0]["interval"]:
        table.add_row("95 % interval", "", *("{:.2f}–{:.2f}×".format(*of["interval"]) for of in means))
    return table


def _depths(report: dict[str, Any]) -> list[Text]:
    lines = []
    for row in report["results"]:
        if row["acceptance_by_depth"]:
            of_all = " ".join(f"{rate:.2f}" for rate in row["acceptance_by_depth"])
            given = " ".join(f"{rate:.2f}" for rate in row["acceptance_by_depth_conditional"])
            lines.append(
                Text(f"{row['drafter']}: accepted by depth {of_all}; where drafted that far {given}")
            )
            alpha, c, speedup = (row["expected"][key] for key in ("alpha", "c", "speedup"))
            lines.append(
                Text(
                    f"{row['drafter']}: α {alpha:.2f}, c {c:.3f}: {speedup:.2f} × expected if rows cost "
                    f"nothing"
                )
            )
    return lines


def _ledgers(report: dict[str, Any]) -> list[Text]:
    lines = []
    for row in report["results"]:
        if row["drafter"] != "vanilla":
            of = row["ledger"]
            factors = " × ".join(f"{name} {of[key]:.2f}" for key, name in FACTORS.items())
            measured = f"measured {of['measured']:.2f}, {of['remainder']:+.1%} unexplained"
            lines.append(Text(f"{row['drafter']}: {factors} = {of['predicted']:.2f}; {measured}"))
    return lines


def _sameness(row: dict[str, Any]) -> Text:
    if row["unexplained"]:
        return Text(f"NO: {row['unexplained']} unexplained", "bold red")
    if row["identical"] is None:
        return Text("in law", "cyan")
    return Text("yes", "green") if row["identical"] else Text(f"{len(row['divergences'])} ties", "yellow")


def certificate(report: dict[str, Any]) -> Group:
    """What `certify` found, one line per drafter and temperature, and the verdict."""
    title = f"{report['target']}, {report['dtype']}, margin {report['margin']:g} in logits"
    table = Figures(title, "drafter", "T", "answers", "same", "tokens", "ties", "max margin", "unexplained")
    for row in report["results"]:
        margin = row["largest_margin"]
        table.add_row(
            row["drafter"],
            f"{row['temperature']:g}",
            str(row["questions"]),
            str(row["identical"]),
            str(row["tokens"]),
            str(len(row["divergences"]) - row["unexplained"]),
            f"{margin:.2g}" if isinstance(margin, float) else margin,
            Text(str(row["unexplained"]), "bold red" if row["unexplained"] else "green"),
        )
    if "stopped" in report:
        return Group(table, Text(f"not certified: stopped early: {report['stopped']}", "yellow"))
    verdict = (
        Text("certified: every token is plain decoding's, near-ties within the margin aside", "bold green")
        if report["certified"]
        else Text(
            "NOT certified: some tokens are not plain decoding's; please report this with the JSON",
            "bold red",
        )
    )
    return Group(table, verdict)


def parity_table(report: dict[str, Any]) -> Group:
    """Acceptance per position here and in vLLM, differing answers, and the verdict."""
    title = f"{report['target']}, {report['dtype']}, {report['questions']} questions"
    title += f", {report['draft_tokens']} draft tokens"
    table = Figures(title, "accepted at position", *map(str, range(1, report["draft_tokens"] + 1)))
    for name, rates in (*report["acceptance"].items(), ("difference", report["difference"])):
        table.add_row(name, *(f"{rate:+.3f}" if name == "difference" else f"{rate:.3f}" for rate in rates))
    lines = [
        Text(
            f"{d['answer']}, question {d['question'] + 1}: leaves plain vLLM at {d['position']}, margin "
            f"{d['margin']:.2g}"
        )
        for d in report["divergences"]
    ]
    if report["first_tensor_that_differs"]:
        lines.append(Text(f"first tensor that differs: {report['first_tensor_that_differs']}", "bold red"))
    verdict = Text("agrees", "bold green") if report["agrees"] else Text("does NOT agree", "bold red")
    return Group(table, *lines, verdict)


def cost_table(report: dict[str, Any]) -> Group:
    """Milliseconds of a pass by rows, one column per context and batch, and how near the one-row pass is to
    the limit."""
    settings = dict.fromkeys((entry["context"], entry["batch"]) for entry in report["passes"])
    title = f"{report['target']}, {report['dtype']}{', compiled' if report['compiled'] else ''}"
    title += ": ms of a pass, by its rows; columns: tokens of context × texts"
    table = Figures(title, "rows", *(f"{context} × {batch}" for context, batch in settings))
    by = {(e["rows"], e["context"], e["batch"]): e for e in report["passes"]}
    for rows in dict.fromkeys(entry["rows"] for entry in report["passes"]):
        table.add_row(str(rows), *(f"{by[rows, *setting]['ms']:.1f}" for setting in settings))
    one = report["passes"][0]
    limit = 1e3 * report["weights_gb"] / report["bandwidth_gb_s"]
    reads = f"one row reads weights at {one['gb_s']:.1f} GB/s"
    reads += f", {one['share']:.0%} of {report['bandwidth_gb_s']:.1f}"
    return Group(table, Text(f"{reads}: at least {limit:.1f} ms"))


def tuned_table(report: dict[str, Any], best: int = 8) -> Group:
    """The best candidates at each temperature, those that lost an earlier race below the others and
    dimmed."""
    tables: list[Figures | Text] = []
    for found in report["temperatures"]:
        plain = found["plain"]["tokens_per_second"]
        title = f"T = {found['temperature']:g}: plain {plain:.1f} tokens/s; ms of a round"
        table = Figures(
            title, "tree", "proposal", "nodes", "τ", "draft", "verify", "host", "× plain", "rounds"
        )
        called, last = _called(found), 0
        for entry in found["candidates"][:best]:
            rounds, most = entry.get("rounds", 0), found["chosen"].get("rounds", 0)
            if table.row_count and rounds < last:
                table.add_section()
            last, lost = rounds, rounds < most
            table.add_row(
                called[entry["tree"]],
                entry["proposal"],
                str(entry["nodes"]),
                f"{entry['tau']:.2f}",
                *(f"{entry[f'{part}_ms']:.1f}" for part in ("draft", "verify", "host")),
                f"({entry['speedup']:.2f})" if lost else f"{entry['speedup']:.2f}",
                str(rounds),
                style=DROPPED if lost else None,
            )
        tables.append(table)
        if found["chosen"]["speedup"] < 1:
            tables.append(Text("no tree pays here: plain decoding (--drafter vanilla) is quicker", "yellow"))
    tables.append(Text("in brackets: as a shorter race had it, whose faster half ran on", "dim"))
    return Group(*tables)


def tuned_names(report: dict[str, Any], drafter: Spec, best: int = 8) -> list[str]:
    """What the static trees of `tuned_table` are called on the command line."""
    lines = []
    for found in report["temperatures"]:
        called = _called(found)
        for entry in found["candidates"][:best]:
            if (name := called[entry["tree"]]) != entry["tree"]:
                spec = drafter.replace(tree=entry["tree"].replace(" ", ""), proposal=entry["proposal"])
                lines.append(f"{name}, T = {found['temperature']:g}: --drafter {shlex.quote(str(spec))}")
    return lines


def _called(found: dict[str, Any]) -> dict[str, str]:
    """Short names for static trees, which have none; other trees keep theirs."""
    trees = dict.fromkeys(entry["tree"] for entry in found["candidates"])
    static = [tree for tree in trees if tree.startswith("[")]
    return {tree: f"static {1 + static.index(tree)}" if tree in static else tree for tree in trees}
