"""Displays of a training run: the loss mask of examples, progress with predicted τ, and curves."""

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.progress import Progress, TaskID
from rich.text import Text

from slipstream.core.target import Target
from slipstream.picture import picture
from slipstream.training.data import load_examples
from slipstream.training.progress import Evaluation, Seen
from slipstream.training.recipe import Data

LEARNT, GIVEN = "black on green", "dim"


def preview(target: Target, data: Data, count: int = 3) -> Group:
    """The first examples as the drafter reads them: what it learns to predict is green, the rest dim."""
    assert target.text is not None
    examples = load_examples(data.files, target, data.max_length, data.limit, data.greedy)
    panels = []
    for i, example in enumerate(examples[:count]):
        text = Text()
        for token, learnt in zip(example.tokens, example.loss, strict=True):
            text.append(target.text.decode([token], special=True), LEARNT if learnt else GIVEN)
        count_learnt = f"{sum(example.loss)} of {len(example.tokens)} tokens are learnt"
        panels.append(Panel(text, title=f"example {i + 1}: {count_learnt}"))
    legend = Text.assemble(
        ("learnt", LEARNT), "  ", ("only read", GIVEN), "  · a token counts as an assistant's, or as its end"
    )
    return Group(*panels, legend)


def draw(history: Sequence[Evaluation], path: str) -> None:
    """Draw predicted τ and acceptance by depth against the tokens trained on, as an SVG."""
    trained = [entry.trained / 1e6 for entry in history]
    with picture(path, 2, "; log.jsonl has the figures") as (left, right):
        left.plot(trained, [entry.tau for entry in history], marker="o", markersize=3)
        left.set(xlabel="tokens trained on (millions)", ylabel="predicted τ")
        for depth, rates in enumerate(zip(*(entry.acceptance for entry in history), strict=True), 1):
            right.plot(trained, rates, marker="o", markersize=3, label=f"depth {depth}")
        right.set(xlabel="tokens trained on (millions)", ylabel="share of rounds that accept this deep")
        right.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


class Watch:
    """Progress bars of a run. `Trainer` calls `filling` and `show`."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._stages: dict[int, TaskID] = {}
        self._told = 0.0

    def filling(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a bar for long work, and return what advances it by a number of tokens."""
        task = self._bar.add_task(what, total=total, note="(tokens)")
        return lambda n: self._bar.update(task, advance=n)

    def show(self, seen: Seen) -> None:
        """Update the stage's bar with the latest figures, of which predicted τ matters most."""
        if seen.stage not in self._stages:
            self._stages[seen.stage] = self._bar.add_task(f"stage {seen.stage + 1}", total=seen.of, note="")
        note = f"predicted τ {seen.tau:.2f}  loss {seen.loss:.3f}  agree {seen.agree:.0%}"
        note += f"  {seen.tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._stages[seen.stage], completed=seen.step, note=note)
        if not self._bar.console.is_terminal and seen.tau != self._told:  # a log gets a line per prediction
            self._told = seen.tau
            line = f"stage {seen.stage + 1}, step {seen.step} of {seen.of}: {note}"
            self._bar.console.print(line, soft_wrap=True)
