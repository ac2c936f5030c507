"""tune: measure costs, choose trees."""

from typing import Annotated, Any

import typer

from slipstream.cli.common import (
    DRAFTERS,
    Compile,
    Device,
    Dtype,
    Files,
    JsonPath,
    TargetName,
    app,
    err,
    examples,
    load,
    out,
    progress_bar,
)


@app.command(
    epilog=examples(
        "tune --drafter eagle --dtype auto --compile",
        "tune --drafter runs/eagle --questions gsm8k.jsonl --json tuned.json --plot tuned.svg",
        "tune --drafter draft-model:model=./small --compile",
        "tune --drafter self-speculative",
        "tune --measure --plot costs.svg",
    )
)
def tune(
    target: TargetName = "smollm2",
    drafter: Annotated[str, typer.Option(help=f"one that grows trees: {DRAFTERS}")] = "eagle",
    questions: Files = [],  # noqa: B006
    limit: Annotated[int, typer.Option(min=1, help="prompts that drafts are held against, in all")] = 8,
    measure: Annotated[bool, typer.Option("--measure", help="only measure what passes of 1 to 64 rows cost")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    compile: Compile = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="draw it, as SVG")] = None,
    json_path: JsonPath = None,
) -> None:
    """Find the tree that pays most on this machine; generate and bench then grow it unless told otherwise."""
    from slipstream.bench import cost, draw
    from slipstream.bench.questions import load_questions
    from slipstream.bench.report import cost_table, tuned_table
    from slipstream.bench.skip import skippable
    from slipstream.bench.tune import tune as run
    from slipstream.drafters import load_drafter, tuned_home
    from slipstream.drafters.proposer import Proposer
    from slipstream.drafters.store import save_tuned
    from slipstream.files import cache_home, check_writable, evenly, update_json, write_json

    check_writable(plot, json_path)
    asked = evenly(load_questions(questions), limit)
    loaded = load(target, dtype, device, compile)
    with progress_bar(None) as progress:
        if measure:
            report = cost.cost_curve(loaded, progress=progress)
        else:
            prompts, skipping = [loaded.encode(question.turns[0]) for question in asked], dict[str, Any]()
            if drafter == "self-speculative":
                skipping = skippable(loaded, prompts, progress=progress)
            made = load_drafter(f"{drafter}:skip={skipping['skip']}" if skipping else drafter, loaded.ends)
            if not isinstance(made, Proposer):
                raise ValueError(f"drafter {drafter!r} grows no trees: it has no candidates to choose among")
            report = run(loaded, made, prompts, progress=progress)
            if skipping:
                report["skipping"] = skipping["tried"]
                for found in report["temperatures"]:
                    found["chosen"]["skip"] = skipping["skip"]
    if json_path is not None:
        write_json(json_path, report)
    if plot is not None:
        (draw.draw_costs if measure else draw.draw_tuned)(report, plot)
    out.print((cost_table if measure else tuned_table)(report))
    if measure:
        kept = cache_home() / "costs.json"
        update_json(kept, loaded.ends.place, {loaded.name: report})
    else:
        chosen = {found["temperature"]: found["chosen"] for found in report["temperatures"]}
        kept = save_tuned(tuned_home(drafter, loaded.ends), loaded.ends.place, chosen)
    err.print(f"kept in {kept}", style="dim")
