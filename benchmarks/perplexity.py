r"""What rounding a target's weights costs: the perplexity of texts, and how often the likeliest token stays.

    python benchmarks/perplexity.py smollm2 --questions ../shared/data/questions/cnn_dm.jsonl --limit 16 \
        --json benchmarks/results/perplexity.json

Texts are the questions as they stand, without a chat template. Passes are eager.
"""

from typing import Annotated

import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from common import run
from slipstream.cli import common as cli
from slipstream.core.tree import chain
from slipstream.files import check_writable, write_json
from slipstream.measure.datasets import Question, load_questions
from slipstream.progress import bars
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget, load_target
from slipstream.targets.quantized import KINDS, stored_bytes


def texts_of(target: HFTarget, asked: list[Question], tokens: int) -> list[list[int]]:
    """The first turn of every question, at most `tokens` of it."""
    assert target.text is not None
    return [target.text.tokenizer(question.turns[0])["input_ids"][:tokens] for question in asked]


@torch.inference_mode()
def judged(target: HFTarget, texts: list[list[int]]) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
    """The loss of every token behind a text's first, and the token that is likeliest there."""
    losses, likeliest = [], []
    for text in texts:
        rows = torch.tensor([text])
        logits = target(chain(rows), target.new_cache(1)).logits[0, :-1].double()
        losses.append(F.cross_entropy(logits, rows[0, 1:], reduction="none"))
        likeliest.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(likeliest)


def main(
    target: Annotated[str, typer.Argument()],
    questions: Annotated[list[str], cli.option(cli.QUESTIONS, "FILE")],
    json: Annotated[str, cli.option("the result", "FILE")],
    limit: Annotated[int, cli.option("texts of each file", "N")] = 16,
    tokens: Annotated[int, cli.option("tokens of a text, at most", "N")] = 256,
) -> None:
    """Measure and print."""
    check_writable(json)
    found: dict[str, dict[str, float]] = {}
    with bars(cli.err) as progress:
        task = progress.add_task("targets", total=1 + len(KINDS), note="")
        for kind in (None, *KINDS):
            loaded = load_target(target, "bfloat16", quantize=kind)
            if kind is None:
                plain, texts = loaded, texts_of(loaded, load_questions(questions, limit), tokens)
            losses, likeliest = judged(loaded, texts)
            if kind is None:
                first = likeliest
            found[loaded.precision] = {
                "perplexity": losses.mean().exp().item(),
                "same_likeliest": (likeliest == first).double().mean().item(),
                "megabytes": stored_bytes(loaded.model) / 1e6,
            }
            progress.update(task, advance=1, note=loaded.precision)
    found = {name: {key: round(value, 4) for key, value in each.items()} for name, each in found.items()}
    write_json(json, heading(plain) | {"tokens": len(losses), "targets": found})
    table = Figures(f"{plain.name}, {len(losses):,} tokens", "target", "perplexity", "same likeliest", "MB")
    for name, each in found.items():
        perplexity, same, size = each.values()
        table.add_row(name, f"{perplexity:.3f}", f"{same:.1%}", f"{size:.1f}")
    cli.out.print(table)


if __name__ == "__main__":
    run(main)
