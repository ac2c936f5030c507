"""What products with weights of 8 and 4 bits cost by several kernels, on a CPU: all of a target's in turn.
The LM head of our int4 is of 8 bits, as in a target.

python benchmarks/int8_products.py smollm2 --json benchmarks/results/int8_products.json
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer

from common import run
from passes import ROWS, Shapes, ms
from slipstream.cli import common as cli
from slipstream.files import check_writable, write_json
from slipstream.kernels import ops as kernels
from slipstream.results import Figures, heading
from slipstream.targets import load_target

Product = Callable[[torch.Tensor], torch.Tensor]
GROUP = 32  # of ATen's weights of 4 bits


def ours(N: int, K: int) -> Product:
    """Rows and weights of 8 bits."""
    tiles, scales = kernels.int8_tiles(torch.randint(-127, 128, (N, K), dtype=torch.int8)), torch.ones(N)
    return lambda x: kernels.tiled_linear(x, tiles, scales)


def ours_int4(N: int, K: int) -> Product:
    """Rows of 8 bits and weights of 4."""
    tiles, scales = kernels.int4_tiles(torch.randn(N, K))
    return lambda x: kernels.tiled_linear(x, tiles, scales)


def onednn(N: int, K: int) -> Product:
    """The same by oneDNN, rows unsigned; they are rounded outside, which is not counted."""
    weight = torch.randint(-127, 128, (N, K), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    scales, zeros = torch.ones(N), torch.zeros(N, dtype=torch.long)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        given = x[0].to(torch.uint8), 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16
        made: torch.Tensor = torch.ops.onednn.qlinear_pointwise(*given, "none", [], "")
        return made

    return multiply


def aten_int8(N: int, K: int) -> Product:
    """Weights of 8 bits, rows as they are."""
    weight, scales = torch.randint(-127, 128, (N, K), dtype=torch.int8), torch.ones(N).bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x[0], weight, scales)


def aten_int4(N: int, K: int) -> Product:
    """Weights of 4 bits, rows as they are."""
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.randint(0, 16, (N, K), dtype=torch.int), 2
    )
    scales = torch.ones(K // GROUP, N, 2).bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x[0], weight, GROUP, scales)


MAKERS = {  # of the layers' products, and of the LM head's
    "ours, int8": (ours, ours),
    "ours, int4": (ours_int4, ours),
    "oneDNN, int8": (onednn, onednn),
    "ATen, int8": (aten_int8, aten_int8),
    "ATen, int4": (aten_int4, aten_int4),
}


def _all(calls: list[partial[torch.Tensor]]) -> None:
    for call in calls:
        call()


@torch.inference_mode()
def measured(sizes: list[tuple[int, int]], repeats: int) -> dict[str, dict[int, float]]:
    """Milliseconds by kernel and rows."""
    found: dict[str, dict[int, float]] = {}
    for name, (layer, head) in MAKERS.items():
        products = [*(layer(N, K) for N, K in sizes[:-1]), head(*sizes[-1])]
        found[name] = {}
        for rows in ROWS:
            states = {K: torch.randn(1, rows, K).abs().bfloat16() for _, K in sizes}
            calls = [partial(product, states[K]) for product, (_, K) in zip(products, sizes, strict=True)]
            found[name][rows] = ms(partial(_all, calls), repeats)
    return found


def main(
    target: Annotated[str, typer.Argument()],
    json: Annotated[str, cli.option("the result", "FILE")],
    repeats: Annotated[int, cli.option("calls, of which the median counts", "N")] = 15,
) -> None:
    """Measure and print."""
    check_writable(json)
    loaded = load_target(target, "bfloat16")
    shapes = Shapes(loaded)
    bf16 = {rows: ms(shapes.products(rows, shapes.own), repeats) for rows in ROWS}
    found: dict[str, Any] = {"ours, bf16": bf16, **measured(shapes.sizes, repeats)}
    rounded = {name: {rows: round(time, 3) for rows, time in times.items()} for name, times in found.items()}
    write_json(json, heading(loaded) | {"products": rounded})
    table = Figures(f"{loaded.name}, {loaded.place}: ms of all products", "kernel", *map(str, ROWS))
    for name, times in rounded.items():
        table.add_row(name, *(f"{time:.2f}" for time in times.values()))
    cli.out.print(table)


if __name__ == "__main__":
    run(main)
