"""Rounds on a GPU, eager, compiled and captured: that they say the same, and what they cost.

    python benchmarks/gpu.py --json benchmarks/results/gpu_smollm2.json
    python benchmarks/gpu.py --shape 7b --json benchmarks/results/gpu_7b.json
    python benchmarks/gpu.py --shape tiny --device cpu --contexts 16 --max-new-tokens 8

Proves first, in float64: texts of every drafter, captured, are those of eager plain decoding. Then measures
in the given precision the cost curve, plain decoding, and the share of the memory's speed at which weights
are read. On a CPU nothing is captured: the compiled rounds stand in the captured ones' place.
"""

import gc
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from rich.console import Group
from rich.text import Text
from transformers import AutoModelForCausalLM, LlamaConfig
from typer import Exit

from common import compiled, run
from slipstream.cli import common as cli
from slipstream.command import public
from slipstream.decode.generate import Generation, generate
from slipstream.drafters import load_drafter
from slipstream.files import check_writable
from slipstream.measure.cost import ROWS, pass_seconds, read_bandwidth
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget
from slipstream.targets.prompts import encode

MODES = ("eager", "compiled", "captured")
UNTRAINED = ("vanilla", "ngram")
TRAINED = ("eagle:tree=fig9", "eagle:tree=dynamic-5x8x16", "eagle:proposal=noise")  # ship for SmolLM2
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SHAPES: dict[str, dict[str, Any]] = {  # of Llamas
    "7b": dict(zip(SIZES, (4096, 11008, 32, 32, 32000), strict=True)),
    "tiny": dict(zip(SIZES, (64, 128, 2, 4, 256), strict=True)),
}
PROMPTS = ("Who wrote Hamlet?", "List three prime numbers, and say what makes a number prime, step by step.")
Contexts = Annotated[list[int], cli.option("tokens behind which passes are timed; repeatable", "N", min=1)]


class Proof(Part):
    """Whether a drafter's captured texts are those of eager plain decoding, in float64."""

    drafter: str
    temperature: float
    same: bool


class ModeCosts(Part):
    """What one mode costs.

    Attributes:
        gb_s: the bytes of the weights over the seconds of a plain round.
        share: of the bandwidth.
        passes_ms: of a target pass, by tokens of context and rows.
    """

    mode: str
    plain_tokens_per_second: float
    gb_s: float
    share: float
    passes_ms: dict[str, dict[str, float]]


class GPUReport(Report):
    """What `gpu` found. `bandwidth_gb_s`: of the device's memory."""

    bandwidth_gb_s: float
    proved: list[Proof]
    results: list[ModeCosts]

    def __rich__(self) -> Group:
        lines = [
            f"{proof.drafter} at T = {proof.temperature:g}: {'the same' if proof.same else 'NOT THE SAME'}"
            for proof in self.proved
        ]
        context, rows = next(iter(self.results[0].passes_ms.items()))
        title = f"{self.target}, {self.dtype}: ms of a pass behind {context} tokens"
        table = Figures(title, "mode", "plain tok/s", "GB/s", "share", *(f"{n} rows" for n in rows))
        for mode in self.results:
            speeds = (f"{mode.plain_tokens_per_second:.1f}", f"{mode.gb_s:.0f}", f"{mode.share:.0%}")
            table.add_row(mode.mode, *speeds, *(f"{ms:.2f}" for ms in mode.passes_ms[context].values()))
        return Group(*map(Text, lines), table)


def random_llama(shape: str, dtype: str, device: str) -> HFTarget:
    """A Llama of a size in `SHAPES`, with random weights and without a tokenizer."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=getattr(torch, dtype))
    return HFTarget(model, name=f"random {shape}")


def in_mode(target: HFTarget, mode: str) -> HFTarget:
    """A target over the same weights in one of `MODES`."""
    if mode == "eager":
        return target
    made = compiled(target)
    made.captures = made.captures and mode == "captured"
    return made


def prove(
    target: HFTarget, drafters: Sequence[str], mode: str = "captured", max_new_tokens: int = 48
) -> list[Proof]:
    """Compare texts in one mode with those of eager plain decoding, at T = 0 and T = 0.8.

    Args:
        target: an eager one, in float64.
    """
    prompts = [encode(target, text) if target.text else [*text.encode()] for text in PROMPTS]

    def texts(target: HFTarget, drafter: str, temperature: float) -> list[list[int]]:
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_ids": (), "seed": 1}
        guide = load_drafter(drafter, target)
        answers: list[Generation] = generate(target, prompts, guide, temperature=temperature, **how)
        return [answer.tokens for answer in answers]

    other, proved = in_mode(target, mode), []
    for temperature in (0.0, 0.8):
        plain = texts(target, "vanilla", temperature)
        for drafter in drafters:
            same = texts(other, drafter, temperature) == plain
            proved.append(Proof(drafter=drafter, temperature=temperature, same=same))
    return proved


@public
def measure(
    target: HFTarget,
    modes: Sequence[str] = MODES,
    contexts: Sequence[int] = (256, 1024),
    *,
    max_new_tokens: int = 256,
    rows: Sequence[int] = ROWS,
    mib: int = 4096,
    proved: Sequence[Proof] = (),
) -> GPUReport:
    """The cost curve and plain decoding of each mode.

    Args:
        target: an eager one.
        contexts: tokens behind which passes are timed.
        rows: of the passes.
        mib: of memory that is read to measure the bandwidth.
        proved: stored with the figures.
    """
    bandwidth, results = read_bandwidth(target.device, mib), []
    for mode in modes:
        results.append(_costs(in_mode(target, mode), mode, bandwidth, contexts, max_new_tokens, rows))
        _free(target.device)
    head = heading(target)
    return GPUReport(**head, bandwidth_gb_s=round(bandwidth, 1), proved=list(proved), results=results)


def _costs(
    target: HFTarget,
    mode: str,
    bandwidth: float,
    contexts: Sequence[int],
    max_new_tokens: int,
    rows: Sequence[int],
) -> ModeCosts:
    passes = {str(context): pass_seconds(target, rows, context=context, repeats=9) for context in contexts}
    prompt = [token % target.vocab for token in range(1, 65)]
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "eos_token_ids": ()}
    generate(target, prompt, **how)  # compiles and captures
    plain = generate(target, prompt, **how)
    seconds = (plain.seconds.total - plain.seconds.prefill) / len(plain.rounds)
    speed = target.read_bytes / seconds / 1e9
    return ModeCosts(
        mode=mode,
        plain_tokens_per_second=round(1 / seconds, 1),
        gb_s=round(speed, 1),
        share=round(speed / bandwidth, 3),
        passes_ms={c: {str(n): round(1e3 * s, 4) for n, s in curve.items()} for c, curve in passes.items()},
    )


def _free(device: torch.device) -> None:
    """Hand back the memory of what is no longer held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(
    target: cli.TargetName = "smollm2",
    shape: Annotated[
        str | None,
        cli.option(f"random weights of this size ({', '.join(SHAPES)}) instead of a target", "SIZE"),
    ] = None,
    dtype: cli.Dtype = "bfloat16",
    device: cli.Device = "cuda",
    contexts: Contexts = [256, 1024],  # noqa: B006
    max_new_tokens: cli.MaxNewTokens = 256,
    json_path: cli.JsonPath = None,
) -> None:
    check_writable(json_path, reads=[] if shape else cli.inputs(target))
    if shape not in (None, *SHAPES):
        raise ValueError(f"Unknown shape: {shape!r}. Available: {', '.join(SHAPES)}")

    def loaded(dtype: str) -> HFTarget:
        return cli.load(target, dtype, device) if shape is None else random_llama(shape, dtype, device)

    proved: list[Proof] = []
    if shape != "7b":  # in float64 it is too large for most GPUs
        proved = prove(loaded("float64"), UNTRAINED if shape else (*UNTRAINED, *TRAINED))
        _free(torch.device(device))
    on_gpu = torch.device(device).type == "cuda"
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "mib": 4096 if on_gpu else 512}
    modes = MODES if on_gpu else MODES[:2]
    cli.deliver(measure(loaded(dtype), modes, contexts, **how, proved=proved), json_path)
    if not all(proof.same for proof in proved):
        raise Exit(1)


if __name__ == "__main__":
    run(main)
