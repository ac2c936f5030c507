"""What a pass of a Llama-like target costs on a CPU: whole, its products alone, and its attention alone.

    python benchmarks/passes.py smollm2 --dtype bfloat16 --json benchmarks/results/passes_layers.json

Products are those of all layers with packed weights, joined where they read the same states, and of the LM
head: as the compiled target makes them, and by oneDNN. Attention is that of all layers. Its limit is the
larger of reading its keys and values once, at the rate at which the products of one row read weights, and its
operations at the rate of the products of 32 rows.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from common import run
from slipstream.cli import common as cli
from slipstream.core.tree import chain
from slipstream.files import check_writable, write_json
from slipstream.kernels import ops as kernels
from slipstream.kernels.weight_packing import PACKED_FOR, packed_linear, packed_weight
from slipstream.results import Figures, heading
from slipstream.targets import HFTarget, load_target

ROWS = (1, 2, 4, 8, 16, 32)
MANY = ROWS[-1]
COLUMNS = ("pass", "products", "onednn", "attention", "limit")


PACKS = packed_weight, lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)


def ms(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a call."""
    times = []
    for i in range(repeats + 3):
        began = perf_counter()
        call()
        times += [perf_counter() - began] * (i >= 3)
    return 1e3 * median(times)


class Shapes:
    """What a target multiplies and reads."""

    def __init__(self, target: HFTarget) -> None:
        config, self.dtype = target.config, target.dtype
        H, self.heads, self.kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.layers, self.D = config.num_hidden_layers, getattr(config, "head_dim", None) or H // self.heads
        inner, attended = config.intermediate_size, self.heads * self.D
        sizes = [(attended + 2 * self.kv * self.D, H), (H, attended), (2 * inner, H), (H, inner)]
        self.sizes = [*sizes * self.layers, (config.vocab_size, H)]
        self.own, self.onednn = (
            [pack(torch.randn(*size).to(self.dtype)) for size in self.sizes] for pack in PACKS
        )

    def products(self, rows: int, weights: list[torch.Tensor]) -> Callable[[], None]:
        """All products of a pass. A single row is multiplied by oneDNN as two, which is no slower."""
        rows = max(rows, 2) if weights is self.onednn else rows
        states = {K: torch.randn(1, rows, K).to(self.dtype) for _, K in self.sizes}

        def multiply() -> None:
            for (N, K), weight in zip(self.sizes, weights, strict=True):
                packed_linear(states[K], weight, None, N)

        return multiply

    def attention(self, rows: int, context: int) -> Callable[[], None]:
        """The attention of all layers: rows of a chain behind `context` tokens."""
        made = torch.randn(self.layers, 2, 1, self.kv, context + rows, self.D).to(self.dtype)
        q = torch.randn(1, self.heads, rows, self.D).to(self.dtype)
        ends = context + 1 + torch.arange(rows)
        lists = torch.stack([ends * 0, ends * 0, ends], -1).int()[None, None]

        def attend() -> None:
            for k, v in made:
                kernels.attention(q, k, v, lists, self.D**-0.5)

        return attend

    def limit(self, rows: int, context: int, one: float, many: float) -> float:
        """Of attention, in milliseconds; `one`, `many`: those of the products of one row and of `MANY`."""
        weights = sum(N * K for N, K in self.sizes)
        read = 2 * self.kv * self.D * (context + rows) * self.layers
        return max(read * one, rows * read * self.heads / self.kv * many / MANY) / weights


@torch.inference_mode()
def measured(target: HFTarget, contexts: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each context and number of rows, in milliseconds."""
    shapes = Shapes(target)
    one, many = (ms(shapes.products(rows, shapes.own), repeats) for rows in (1, MANY))
    found = []
    for context in contexts:
        tokens = torch.arange(context + MANY)[None] % target.vocab
        cache = target.new_cache(1)
        target(chain(tokens[:, :context]), cache, rows=tokens[:, :0])
        cache.keep(None, torch.tensor([context]))
        for rows in ROWS:
            new = chain(tokens[:, context : context + rows])
            times = (
                ms(partial(target, new, cache), repeats),
                ms(shapes.products(rows, shapes.own), repeats),
                ms(shapes.products(rows, shapes.onednn), repeats),
                ms(shapes.attention(rows, context), repeats),
                shapes.limit(rows, context, one, many),
            )
            found.append({"context": context, "rows": rows, **dict(zip(COLUMNS, times, strict=True))})
    return found


def main(
    target: Annotated[str, typer.Argument()],
    json: Annotated[str, cli.option("the result", "FILE")],
    context: Annotated[list[int], cli.option("tokens before; repeat it", "N")] = [512, 2048],  # noqa: B006
    repeats: Annotated[int, cli.option("calls, of which the median counts", "N")] = 25,
    dtype: Annotated[str, cli.option("precision", "NAME")] = "auto",
    compile: Annotated[bool, cli.option("compile every pass")] = True,
    quantize: cli.Quantize = None,
) -> None:
    """Measure and print."""
    check_writable(json)
    loaded = load_target(target, dtype, "cpu", compile=compile, quantize=quantize)
    rows = measured(loaded, context, repeats)
    rows = [{key: round(value, 3) for key, value in row.items()} for row in rows]
    write_json(json, heading(loaded) | {"passes": rows})
    ratios = ("pass / products", "pass / onednn")
    table = Figures(f"{loaded.name}, {loaded.place}: ms", "context", "rows", *COLUMNS, *ratios)
    for row in rows:
        times = [f"{row[column]:.2f}" for column in COLUMNS]
        over = [f"{row['pass'] / row[column]:.2f}" for column in ("products", "onednn")]
        table.add_row(str(row["context"]), row["rows"], *times, *over)
    cli.out.print(table)


if __name__ == "__main__":
    run(main)
