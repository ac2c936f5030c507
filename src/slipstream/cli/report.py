"""report: runs, certificates and traces as a page."""

from typing import Annotated

import typer

from slipstream.cli.common import command, err, inputs, option
from slipstream.files import STANDARD, check_writable, replacing

GIVEN = "what bench or certify --json and generate --trace wrote"
OUT = "the page; - is standard output"


@command(
    "report bench.json",
    "report before.json after.json --out both.html",
    "report bench.json answer.jsonl",
    "report certificate.json --out certificate.html",
)
def report(
    files: Annotated[
        list[str], typer.Argument(help=GIVEN, metavar="RUN.json… TRACE.jsonl…", show_default=False)
    ],
    out: Annotated[str, option(OUT, "FILE")] = "report.html",
) -> None:
    """Make one HTML page of runs, certificates and traces: tables, pictures, and answers round by round.

    The page needs no other file and no network. Several runs are compared, two at a time. Each
    round of an answer shows the tree that was drafted, and what the target made of it.
    """
    check_writable(out, reads=inputs(files=files))
    from slipstream.measure.report.page import page

    made = page(files)
    with replacing(out) as file:
        file.write(made)
    if out not in STANDARD:
        err.print(f"{out}: {len(made.encode()) / 1000:,.0f} kB", style="dim", soft_wrap=True)
