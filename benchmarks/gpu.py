"""Rounds on a GPU, eager, compiled and captured: that they say the same, and what they cost.

Proves first, in float64: texts of every drafter, captured, are those of eager plain decoding. Then measures
in the given precision the cost curve, plain decoding, and the share of the memory's speed at which weights
are read.

    python benchmarks/gpu.py --json benchmarks/results/gpu_smollm2.json
    python benchmarks/gpu.py --shape 7b --json benchmarks/results/gpu_7b.json
"""

import argparse
import gc
import shlex
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.decode.generate import generate
from slipstream.drafters import load_drafter
from slipstream.files import check_writable, write_json
from slipstream.machine import SCHEMA
from slipstream.measure.cost import ROWS, pass_seconds, read_bandwidth
from slipstream.results import heading
from slipstream.targets import HFTarget, load_target
from slipstream.targets.prompts import encode

MODES = ("eager", "compiled", "captured")
SEVEN_B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--target", default="smollm2")
options.add_argument(
    "--shape", choices=["7b"], help="random weights of a Llama of this size, instead of a target"
)
options.add_argument("--dtype", default="bfloat16")
options.add_argument("--device", default="cuda")
options.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
options.add_argument("--max-new-tokens", type=int, default=256)
options.add_argument("--json", default=None)
given = options.parse_args()
check_writable(given.json)
console = Console()


def load(dtype: str, mode: str) -> HFTarget:
    """The target in one of the three modes."""
    if given.shape is None:
        target = load_target(given.target, dtype, given.device, compile=mode != "eager")
    else:
        with torch.device(given.device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**SEVEN_B), dtype=getattr(torch, dtype))
        target = HFTarget(model, name=f"random {given.shape}", compile=mode != "eager")
    target.captures = target.captures and mode == "captured"
    return target


def texts(target: HFTarget, drafter: str, temperature: float) -> list[list[int]]:
    """Answers to two prompts of different length; one of them stops early."""
    some = ["Who wrote Hamlet?", "List three prime numbers, and say what makes a number prime, step by step."]
    made = generate(target, [encode(target, prompt) for prompt in some], load_drafter(drafter, target),
                    max_new_tokens=48, temperature=temperature, eos_token_ids=(), seed=1)  # fmt: skip
    return [answer.tokens for answer in made]


def prove() -> list[dict[str, Any]]:
    """Texts of captured rounds against those of eager plain decoding, in float64."""
    eager, captured, proved = load("float64", "eager"), load("float64", "captured"), []
    for temperature in (0.0, 0.8):
        plain = texts(eager, "vanilla", temperature)
        for drafter in (
            "vanilla",
            "ngram",
            "eagle:tree=fig9",
            "eagle:tree=dynamic-5x8x16",
            "eagle:proposal=noise",
        ):
            same = texts(captured, drafter, temperature) == plain
            proved.append({"drafter": drafter, "temperature": temperature, "same": same})
            console.print(f"{drafter} at T = {temperature:g}: {'the same' if same else 'NOT THE SAME'}")
    return proved


def measure(mode: str, bandwidth: float) -> dict[str, Any]:
    """Cost curve and plain decoding of one mode."""
    target = load(given.dtype, mode)
    passes = {context: pass_seconds(target, context=context, repeats=9) for context in given.contexts}
    prompt = list(range(1, 65))
    for _ in range(2):  # the first compiles and captures
        plain = generate(
            target, prompt, max_new_tokens=given.max_new_tokens, eos_token_ids=(), temperature=0.0
        )
    spent = (plain.seconds.total - plain.seconds.prefill) / len(plain.rounds)
    speed = target.read_bytes / spent / 1e9
    about = {"mode": mode, "plain_tokens_per_second": round(1 / spent, 1), "gb_s": round(speed, 1)}
    about |= {"share": round(speed / bandwidth, 3), **heading(target)}
    curve = {str(c): {str(n): round(s * 1e3, 4) for n, s in found.items()} for c, found in passes.items()}
    return {**about, "passes_ms": curve}


proved = prove() if given.shape is None else []
gc.collect()
bandwidth = read_bandwidth(torch.device(given.device), mib=4096 if given.device == "cuda" else 512)
results = []
for mode in MODES if given.device == "cuda" else MODES[:2]:
    results.append(measure(mode, bandwidth))
    gc.collect()
    if given.device == "cuda":
        torch.cuda.empty_cache()

table = Table("mode", "plain tok/s", "GB/s", "share", *(f"{n} rows" for n in ROWS))
for result in results:
    curve = next(iter(result["passes_ms"].values()))
    figures = (f"{result['plain_tokens_per_second']:.1f}", f"{result['gb_s']:.0f}", f"{result['share']:.0%}")
    table.add_row(result["mode"], *figures, *(f"{ms:.2f}" for ms in curve.values()))
console.print(table)
if given.json:
    command = f"python benchmarks/gpu.py {shlex.join(sys.argv[1:])}"
    about = {"schema": SCHEMA, "command": command, "bandwidth_gb_s": round(bandwidth, 1)}
    write_json(given.json, {**about, "proved": proved, "results": results})
if not all(entry["same"] for entry in proved):
    raise SystemExit(1)
