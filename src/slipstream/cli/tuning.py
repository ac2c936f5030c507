"""tune: measure costs, choose trees."""

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from slipstream.cli.common import (
    ASKED,
    RESULTS,
    Compile,
    Device,
    Dtype,
    Files,
    JsonPath,
    TargetName,
    app,
    deliver,
    err,
    examples,
    inputs,
    kept,
    load,
    out,
    progress_bar,
)

TUNABLE = """[bold]Drafters that grow trees[/bold]
  eagle, fasteagle       trained heads, whose weights for smollm2 ship
  DIR                    a directory that slipstream train or import wrote
                         (not of bita, which drafts in the target's passes)
  draft-model:model=DIR  a smaller model of the same tokenizer
  self-speculative       the target without some blocks; tune finds which
"""
TREELESS = (
    "grows no trees that tune could choose among: it takes eagle, fasteagle, draft-model, self-speculative "
    "or a drafter "
    "directory; of the others compare options by bench (--drafter ngram:depth=4 --drafter ngram:depth=8); of "
    "hybrid tune "
    "the head"
)


@app.command(
    epilog=TUNABLE
    + "\n"
    + examples(
        "tune --drafter eagle --dtype auto --compile",
        "tune --drafter runs/eagle --questions gsm8k.jsonl --json tuned.json --plot tuned.svg",
        "tune --drafter draft-model:model=./small --compile",
        "tune --drafter self-speculative",
        "tune --measure --plot costs.svg",
    )
)
def tune(
    target: TargetName = "smollm2",
    drafter: Annotated[str, typer.Option(metavar="NAME", help="one of those below")] = "eagle",
    questions: Files = [],  # noqa: B006
    limit: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", rich_help_panel=ASKED, help="prompts that drafts are held against, in all"
        ),
    ] = 8,
    measure: Annotated[
        bool, typer.Option("--measure", help="only measure what passes of 1 to 64 rows cost")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", rich_help_panel=RESULTS, help="draw it, as SVG")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Find the tree that pays most on this machine; generate and bench then grow it unless told otherwise."""
    from slipstream.drafters import load_drafter, tuned_home
    from slipstream.drafters.proposer import Proposer
    from slipstream.drafters.spec import Spec
    from slipstream.drafters.store import save_tuned, tuned_file
    from slipstream.files import cache_home, check_writable, evenly, read_results, update_json
    from slipstream.measure import cost, draw
    from slipstream.measure.questions import load_questions
    from slipstream.measure.report import cost_table, tuned_names, tuned_table
    from slipstream.measure.run import first_prompts
    from slipstream.measure.skip import skippable
    from slipstream.measure.tune import tune as run

    check_writable(plot, json_path, reads=inputs(target, [drafter], questions))
    asked = evenly(load_questions(questions), limit)
    loaded = load(target, dtype, device, compile)
    place, costs = loaded.ends.place, cache_home() / "costs.json"
    if measure:
        read_results(costs)
        with progress_bar(None) as progress:
            report = cost.cost_curve(loaded, progress=progress)
        with ExitStack() as last:  # the last first, and each whatever becomes of the others
            last.callback(update_json, costs, place, {loaded.name: report})
            if plot is not None:
                last.callback(draw.draw_costs, report, plot)
            last.callback(deliver, cost_table(report), report, json_path)
        err.print(f"kept in {costs}", style="dim", soft_wrap=True)
        return
    skipping, spec = dict[str, Any](), Spec.parse(drafter)

    def show(report: dict[str, Any]) -> None:
        if skipping:
            report["skipping"] = skipping["tried"]
        for found in report["temperatures"]:
            found["chosen"] |= {"skip": skipping["skip"]} if skipping else {}
        chosen = {found["temperature"]: found["chosen"] for found in report["temperatures"]}
        with ExitStack() as last:
            last.callback(save_tuned, tuned_home(drafter, loaded.ends), place, chosen)
            if plot is not None:
                last.callback(draw.draw_tuned, report, plot)
            last.callback(deliver, tuned_table(report), report, json_path)
        for line in tuned_names(report, spec):
            out.print(line, soft_wrap=True)
        err.print(f"kept in {tuned_file(tuned_home(drafter, loaded.ends))}", style="dim", soft_wrap=True)

    with kept(show) as keep, progress_bar(None) as progress:
        if spec == Spec("self-speculative"):
            skipping |= skippable(loaded, first_prompts(loaded, asked), progress=progress)
            spec = spec.replace(skip=skipping["skip"])
        made = load_drafter(spec, loaded.ends)
        if not isinstance(made, Proposer):
            raise ValueError(f"drafter {drafter!r} {TREELESS}")
        prompts = first_prompts(loaded, asked)
        read_results(tuned_file(tuned_home(drafter, loaded.ends)))
        keep(run(loaded, made, prompts, progress=progress, keep=keep))
