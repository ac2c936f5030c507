"""Tables and coloured text for the terminal."""

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

ACCEPTED, OWN = "bold green", "default"
FACTORS = {"tau": "τ", "rows": "rows", "draft": "draft", "host": "host", "prompt": "prompt"}


def bench_table(report: dict[str, Any]) -> Group:
    """One line per drafter, then one per category and drafter."""
    hf = report["hf_generate"]["tokens_per_second"]
    title = f"{report['target']}, {report['dtype']}, T = {report['temperature']:g}, {report['hardware']['cpu']}"
    main = _table(title, "drafter", "τ", "tok/s", "× plain", "× HF", "draft", "verify", "host", "same")
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


def _categories(report: dict[str, Any]) -> Table:
    drafters = [row for row in report["results"] if row["drafter"] != "vanilla"] or report["results"]
    table = _table("τ, and speed × plain", "questions", "turns", *(row["drafter"] for row in drafters))
    for kind in ("by_category", "by_file"):
        for key, first in drafters[0][kind].items():
            parts = (row[kind][key] for row in drafters)
            cells = (f"{part['tau']:.2f}  {part['speedup']['vanilla']:.2f}×" for part in parts)
            table.add_row(key, str(first["questions"]), *cells)
        table.add_section()
    means = [row["of_files"]["vanilla"] for row in drafters]
    table.add_row("mean of the files", "", *(f"{of['mean']:.2f}×" for of in means))
    if means[0]["interval"]:
        table.add_row("95 % interval", "", *("{:.2f} to {:.2f}×".format(*of["interval"]) for of in means))
    return table


def _depths(report: dict[str, Any]) -> list[Text]:
    lines = []
    for row in report["results"]:
        if row["acceptance_by_depth"]:
            of_all = " ".join(f"{rate:.2f}" for rate in row["acceptance_by_depth"])
            given = " ".join(f"{rate:.2f}" for rate in row["acceptance_by_depth_conditional"])
            lines.append(Text(f"{row['drafter']}: accepted by depth {of_all}; where drafted that far {given}"))
            alpha, c, speedup = (row["expected"][key] for key in ("alpha", "c", "speedup"))
            lines.append(Text(f"{row['drafter']}: α {alpha:.2f}, c {c:.3f}: {speedup:.2f} × expected if rows cost nothing"))
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
    table = _table(title, "drafter", "T", "answers", "same", "tokens", "ties", "max margin", "unexplained")
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
        else Text("NOT certified: some tokens are not plain decoding's; please report this with the JSON", "bold red")
    )
    return Group(table, verdict)


def parity_table(report: dict[str, Any]) -> Group:
    """Acceptance per position here and in vLLM, differing answers, and the verdict."""
    title = f"{report['target']}, {report['dtype']}, {report['questions']} questions, {report['draft_tokens']} draft tokens"
    table = _table(title, "accepted at position", *map(str, range(1, report["draft_tokens"] + 1)))
    for name, rates in (*report["acceptance"].items(), ("difference", report["difference"])):
        table.add_row(name, *(f"{rate:+.3f}" if name == "difference" else f"{rate:.3f}" for rate in rates))
    lines = [
        Text(f"{d['answer']}, question {d['question'] + 1}: leaves plain vLLM at {d['position']}, margin {d['margin']:.2g}")
        for d in report["divergences"]
    ]
    if report["first_tensor_that_differs"]:
        lines.append(Text(f"first tensor that differs: {report['first_tensor_that_differs']}", "bold red"))
    verdict = Text("agrees", "bold green") if report["agrees"] else Text("does NOT agree", "bold red")
    return Group(table, *lines, verdict)


def _table(title: str | None, first: str, *others: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def cost_table(report: dict[str, Any]) -> Group:
    """Milliseconds of a pass by rows, one column per context and batch, and how near the one-row pass is to the limit."""
    settings = dict.fromkeys((entry["context"], entry["batch"]) for entry in report["passes"])
    title = f"{report['target']}, {report['dtype']}{', compiled' if report['compiled'] else ''}: ms a pass"
    table = _table(title, "rows", *(f"{context} tokens × {batch}" for context, batch in settings))
    by = {(e["rows"], e["context"], e["batch"]): e for e in report["passes"]}
    for rows in dict.fromkeys(entry["rows"] for entry in report["passes"]):
        table.add_row(str(rows), *(f"{by[rows, *setting]['ms']:.1f}" for setting in settings))
    one = report["passes"][0]
    limit = 1e3 * report["weights_gb"] / report["bandwidth_gb_s"]
    reads = f"one row reads weights at {one['gb_s']:.1f} GB/s, {one['share']:.0%} of {report['bandwidth_gb_s']:.1f}"
    return Group(table, Text(f"{reads}: at least {limit:.1f} ms"))


def tuned_table(report: dict[str, Any], best: int = 8) -> Group:
    """The best candidates at each temperature."""
    tables: list[Table | Text] = []
    for found in report["temperatures"]:
        title = f"T = {found['temperature']:g}: plain {found['plain']['tokens_per_second']:.1f} tokens/s; ms of a round"
        table = _table(title, "tree", "proposal", "nodes", "τ", "draft", "verify", "host", "× plain")
        table.columns[0].min_width = 18
        for entry in found["candidates"][:best]:
            name = entry["tree"].replace(" ", "")
            parts = (f"{entry[f'{part}_ms']:.1f}" for part in ("draft", "verify", "host"))
            shape = (entry["proposal"], str(entry["nodes"]), f"{entry['tau']:.2f}")
            table.add_row(name if len(name) < 19 else "static", *shape, *parts, f"{entry['speedup']:.2f}")
        tables.append(table)
        if found["chosen"]["speedup"] < 1:
            tables.append(Text("no tree pays here: plain decoding (--drafter vanilla) is quicker", "yellow"))
    return Group(*tables)
