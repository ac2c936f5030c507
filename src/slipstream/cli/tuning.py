"""tune: measure costs and choose trees."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

from slipstream.cli.common import (
    ASKED,
    DIRECTORY,
    RESULTS,
    Compile,
    Device,
    Dtype,
    Files,
    JsonPath,
    TargetName,
    command,
    deliver,
    err,
    flag,
    inputs,
    kept,
    listed,
    load,
    option,
    out,
    progress_bar,
)
from slipstream.methods import named

if TYPE_CHECKING:
    from slipstream.targets import HFTarget

TUNED = [method for method in named() if method.tunes]
TUNABLE = listed("[bold]Drafters that grow trees[/bold]", *TUNED, others=[DIRECTORY])


Prompts = Annotated[int, option("prompts that drafts are held against, in all", "N", panel=ASKED, min=1)]
Measure = Annotated[bool, flag("only measure what passes of 1 to 64 rows cost", "--measure")]


@command(
    "tune --drafter eagle --dtype auto --compile",
    "tune --drafter runs/eagle --questions gsm8k.jsonl --json tuned.json --plot tuned.svg",
    "tune --drafter draft-model:model=./small --compile",
    "tune --drafter self-speculative",
    "tune --measure --plot costs.svg",
    lists=TUNABLE,
)
def tune(
    target: TargetName = "smollm2",
    drafter: Annotated[str, option("one of those below", "NAME")] = "eagle",
    questions: Files = [],  # noqa: B006
    limit: Prompts = 8,
    measure: Measure = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    plot: Annotated[str | None, option("draw it, as SVG", "FILE", panel=RESULTS)] = None,
    json_path: JsonPath = None,
) -> None:
    """Find the tree that pays most on this machine; generate and bench then grow it unless told otherwise."""
    from slipstream.drafters import tuned_home
    from slipstream.drafters.store import tuned_file
    from slipstream.files import check_writable, evenly
    from slipstream.measure.draw import draw_tuned
    from slipstream.measure.questions import load_questions
    from slipstream.measure.tune import tune as run
    from slipstream.measure.tuned import TuneReport

    check_writable(plot, json_path, reads=inputs(target, [drafter], questions))
    asked = evenly(load_questions(questions), limit)
    loaded = load(target, dtype, device, compile)
    if measure:
        _measure(loaded, plot, json_path)
        return

    def show(report: TuneReport) -> None:
        with ExitStack() as last:  # in reverse order, each even if another fails
            if plot is not None:
                last.callback(draw_tuned, report, plot)
            last.callback(deliver, report, json_path)
        for line in report.static_trees(drafter):
            out.print(line, soft_wrap=True)
        home = tuned_home(drafter, loaded)
        err.print(f"kept in {tuned_file(home)}", style="dim", soft_wrap=True)

    with kept(show) as keep, progress_bar(None) as progress:
        keep(run(loaded, drafter, asked, limit=None, progress=progress, keep=keep))


def _measure(target: "HFTarget", plot: str | None, json_path: str | None) -> None:
    """Measure the cost of passes, show it and store it."""
    from slipstream.files import read_results
    from slipstream.measure import cost
    from slipstream.measure.draw import draw_costs

    read_results(cost.costs_file())
    with progress_bar(None) as progress:
        report = cost.cost_curve(target, progress=progress)
    with ExitStack() as last:  # in reverse order, each even if another fails
        last.callback(cost.save_costs, target, report)
        if plot is not None:
            last.callback(draw_costs, report, plot)
        last.callback(deliver, report, json_path)
    err.print(f"kept in {cost.costs_file()}", style="dim", soft_wrap=True)
