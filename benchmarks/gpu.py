"""Rounds on a GPU, eager, compiled and captured: that they say the same, and what they cost.

    python benchmarks/gpu.py --json benchmarks/results/gpu_smollm2.json
    python benchmarks/gpu.py --shape 7b --json benchmarks/results/gpu_7b.json
    python benchmarks/gpu.py --shape tiny --device cpu --contexts 16 --max-new-tokens 8
    python benchmarks/gpu.py --answers --max-new-tokens 128 --json benchmarks/results/gpu_answers.json

Proves first, in float64: texts of every drafter, captured, and texts written at once are those of eager plain
decoding. Then measures in the given precision the cost curve, plain decoding, and the share of the memory's
speed at which weights are read; our attention and products beside torch's; then the same costs of an exact
target, what it finds out about its rows, whether its drafters' texts are plain decoding's, token for token;
and of targets of 8 and 4 bits. The result is written after every mode: a lease that ends too soon leaves what
was measured. --mode captured takes the least time; --mode described captures layers that have a description
(targets/description.py), without compilation. On a CPU nothing is captured, and compiled rounds stand for
captured ones.

--answers instead times whole answers at T = 0, prompts included: plain decoding, every drafter that there is
for the target, `auto`, Hugging Face's generate and, where it is installed, vLLM, one and eight texts at once,
on a GPU in the last --mode. Arms take turns over the questions, and the result is written after each. After
--budget seconds it ends with what it has.
"""

import gc
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from rich.console import Group
from rich.text import Text
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from typer import Exit

import answers
from common import compiled, run
from slipstream.cli import common as cli
from slipstream.drafters import load_drafter
from slipstream.engine.cuda_graphs import cuda_graph
from slipstream.engine.generate import Generation, Job, generate
from slipstream.files import check_writable
from slipstream.kernels import ops as kernels
from slipstream.measure.cost import ROWS, pass_seconds, read_bandwidth
from slipstream.measure.datasets import load_questions
from slipstream.provenance import public
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget
from slipstream.targets.load import device_of
from slipstream.targets.prompts import encode
from slipstream.targets.quantized import KINDS
from slipstream.training.batch_generation import BatchGenerator

MODES = ("eager", "described", "compiled", "captured")
UNCOMPILED = MODES[:2]
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
        plain_tokens_per_second: by the median of a call's later rounds.
        gb_s: the bytes of the weights over the seconds of such a round.
        share: of the bandwidth.
        passes_ms: of a target pass, by tokens of context and rows.
    """

    mode: str
    plain_tokens_per_second: float
    gb_s: float
    share: float
    passes_ms: dict[str, dict[str, float]]


class Against(Part):
    """Milliseconds of one of our kernels and of torch's, for so many rows."""

    what: str
    rows: int
    ours_ms: float
    torch_ms: float


class GPUReport(Report):
    """What `gpu` found.

    Attributes:
        bandwidth_gb_s: of the device's memory.
        results: of each mode and, where a target can be exact or quantised, of such ones.
        exactness: what exact targets found out about their rows, by mode.
        proved_exact: of the last exact target, in the report's precision, against its own plain decoding.
        attention, products: of this target's sizes, of ours and torch's.
    """

    bandwidth_gb_s: float
    proved: list[Proof]
    results: list[ModeCosts]
    exactness: dict[str, str]
    proved_exact: list[Proof]
    attention: list[Against]
    products: list[Against]

    def __rich__(self) -> Group:
        lines = [
            f"{how}{proof.drafter} at T = {proof.temperature:g}: {_said(proof.same)}"
            for how, proofs in (("", self.proved), ("exact, ", self.proved_exact))
            for proof in proofs
        ]
        lines += [f"{mode}: {found}" for mode, found in self.exactness.items()]
        context, rows = next(iter(self.results[0].passes_ms.items()))
        title = f"{self.target}, {self.dtype}: ms of a pass behind {context} tokens"
        table = Figures(title, "mode", "plain tok/s", "GB/s", "share", *(f"{n} rows" for n in rows))
        for mode in self.results:
            speeds = (f"{mode.plain_tokens_per_second:.1f}", f"{mode.gb_s:.0f}", f"{mode.share:.0%}")
            table.add_row(mode.mode, *speeds, *(f"{ms:.2f}" for ms in mode.passes_ms[context].values()))
        return Group(*map(Text, lines), table, *map(_beside, filter(None, (self.attention, self.products))))


def _said(same: bool) -> str:
    return "the same" if same else "NOT THE SAME"


def _beside(costs: Sequence[Against]) -> Figures:
    """A table of ours and torch's."""
    rows = [*dict.fromkeys(cost.rows for cost in costs)]
    table = Figures("ms of ours / of torch's", "of", *(f"{n} rows" for n in rows))
    for what in dict.fromkeys(cost.what for cost in costs):
        some = (cost for cost in costs if cost.what == what)
        table.add_row(what, *(f"{cost.ours_ms:.3f} / {cost.torch_ms:.3f}" for cost in some))
    return table


def random_llama(shape: str, dtype: str, device: str) -> HFTarget:
    """A Llama of a size in `SHAPES`, with random weights and without a tokenizer. Raises ValueError where
    there is no such device."""
    with device_of(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=getattr(torch, dtype))
    return HFTarget(model, name=f"random {shape}")


def in_mode(target: HFTarget, mode: str) -> HFTarget:
    """A target over the same weights in one of `MODES`."""
    return _in_mode(copy(target) if mode in UNCOMPILED else compiled(target), mode)


def _in_mode(made: HFTarget, mode: str) -> HFTarget:
    """A fresh target whose rounds are captured where the mode says so, and they can be."""
    described = made.device.type == "cuda" and made.decoder is not None
    made.captures = described if mode == "described" else made.captures and mode == "captured"
    return made


def another_in(target: HFTarget, mode: str, **how: Any) -> HFTarget | None:
    """A target of the same model, made `exact` or to `quantize`, in one of `MODES`, if there can be one."""
    tokenizer = target.text and target.text.tokenizer
    try:
        made = HFTarget(target.model, tokenizer, target.name, compile=mode not in UNCOMPILED, **how)
    except ValueError:
        return None
    return _in_mode(made, mode)


def prove(
    target: HFTarget, drafters: Sequence[str], mode: str = "captured", max_new_tokens: int = 48
) -> list[Proof]:
    """Compare texts in one mode with those of eager plain decoding, at T = 0 and T = 0.8.

    Args:
        target: an eager one, in float64.
    """
    other, proved = in_mode(target, mode), []
    for temperature in (0.0, 0.8):
        plain = _texts(target, "vanilla", temperature, max_new_tokens)
        for drafter in drafters:
            same = _texts(other, drafter, temperature, max_new_tokens) == plain
            proved.append(Proof(drafter=drafter, temperature=temperature, same=same))
    return proved


def prove_at_once(target: HFTarget, max_new_tokens: int = 48) -> Proof:
    """Compare texts that are written at once with those of plain decoding. Each batch finds what the graphs
    of those before it left.

    Args:
        target: as `prove` takes it.
    """
    wide, plain = BatchGenerator(target, (), slots=2**14), _texts(target, "vanilla", 0.0, max_new_tokens)
    sizes, asked = (8, 32, 8, 1, 32), _prompts(target)
    batches = [wide.write(asked * n, 0.0, max_new_tokens, seed=1) == plain * n for n in sizes]
    return Proof(drafter="texts at once", temperature=0.0, same=all(batches))


def _prompts(target: HFTarget) -> list[list[int]]:
    return [encode(target, text) if target.text else [*text.encode()] for text in PROMPTS]


def _texts(target: HFTarget, drafter: str, temperature: float, max_new_tokens: int) -> list[list[int]]:
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_ids": (), "seed": 1}
    guide = load_drafter(drafter, target)
    answers: list[Generation] = generate(target, _prompts(target), guide, temperature=temperature, **how)
    return [answer.tokens for answer in answers]


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
    drafters: Sequence[str] = UNTRAINED,
    keep: Callable[[GPUReport], None] = lambda report: None,
) -> GPUReport:
    """The cost curve and plain decoding of each mode, of the first and the last mode also exact, of the last
    also quantised.

    Args:
        target: an eager one.
        contexts: tokens behind which passes are timed.
        rows: of the passes.
        mib: of memory that is read to measure the bandwidth.
        proved: stored with the figures.
        drafters: whose texts in an exact target are compared with plain decoding.
        keep: called with what is known after every mode.
    """
    report = GPUReport(
        **heading(target),
        bandwidth_gb_s=round(read_bandwidth(target.device, mib), 1),
        proved=list(proved),
        results=[],
        exactness={},
        proved_exact=[],
        attention=[],
        products=[],
    )

    def measured(made: HFTarget, mode: str) -> None:
        report.results.append(
            _costs(made, mode, report.bandwidth_gb_s, contexts, max_new_tokens, rows),
        )
        keep(report)
        _free(target.device)

    for mode in modes:
        measured(in_mode(target, mode), mode)
    report.attention.extend(attention_costs(target, mib=min(mib, 256)))
    report.products.extend(product_costs(target, mib=min(mib, 256)))
    for mode in dict.fromkeys((modes[0], modes[-1])):
        if (exact := another_in(target, mode, exact=True)) is not None:
            name = f"exact, {mode}"
            report.exactness[name] = exact.exactness
            report.proved_exact[:] = prove(exact, drafters, "eager", min(48, max_new_tokens))
            measured(exact, name)
    for kind in KINDS:
        if (small := another_in(target, modes[-1], quantize=kind)) is not None:
            measured(small, f"{kind}, {modes[-1]}")
    return report


def attention_costs(
    target: HFTarget,
    contexts: Sequence[int] = (512, 2048),
    rows: Sequence[int] = (1, 8, 16, 32, 64),
    mib: int = 256,
) -> list[Against]:
    """Attention over lists of keys beside Hugging Face's sdpa under a dense mask. Row r reads the context,
    itself and at most seven rows before it. Calls go through so many MiB of keys and values, that no cache
    holds."""
    if not kernels.has_kernels(target.device, target.dtype):
        return []
    how: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
    sizes, found = target.sizes, []
    heads, kv, D = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
    layer: Any = SimpleNamespace(num_key_value_groups=heads // kv, is_causal=False)
    sdpa = partial(sdpa_attention_forward, layer, scaling=D**-0.5)
    for context in contexts:
        S = context + max(rows)
        copies = _copies(2 * kv * S * D * target.dtype.itemsize, mib)
        stored = torch.randn(copies, 2, 1, kv, S, D, **how).unbind()
        for R in rows:
            q, row = torch.randn(1, heads, R, D, **how), torch.arange(R, device=target.device)[:, None]
            listed = (row - 7).clamp(min=0) + torch.arange(8, device=target.device)
            slots = torch.where(listed <= row, context + listed, -1)
            bounds = torch.tensor([[0, 0, context]], device=target.device).expand(R, 3)
            keys = torch.cat([bounds, slots], 1).int()[None, None]
            at = torch.arange(S, device=target.device)
            seen = (at < context) | ((at > context + row - 8) & (at <= context + row))
            mask = torch.zeros(1, 1, R, S, **how).masked_fill_(~seen, -torch.inf)
            ours = [partial(kernels.attention, q, k, v, keys, D**-0.5) for k, v in stored]
            theirs = [partial(sdpa, query=q, key=k, value=v, attention_mask=mask) for k, v in stored]
            found.append(_against(f"attention behind {context} tokens", R, ours, theirs, target.device))
    return found


def product_costs(
    target: HFTarget, rows: Sequence[int] = (1, 8, 16, 32, 64, 512), mib: int = 256
) -> list[Against]:
    """Products of the sizes of the target's linear layers beside torch's, by weights that no cache holds."""
    if not kernels.has_kernels(target.device, target.dtype):
        return []
    how: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
    found = []
    for N, K in sorted({m.weight.shape for m in target.shadow_model.modules() if isinstance(m, nn.Linear)}):
        weights = torch.randn(_copies(N * K * target.dtype.itemsize, mib), N, K, **how)
        for R in rows:
            x = torch.randn(R, K, **how)
            ours, theirs = ([partial(f, x, weight) for weight in weights] for f in (kernels.linear, F.linear))
            found.append(_against(f"product of {K} by {N}", R, ours, theirs, target.device))
    return found


def _copies(size: int, mib: int) -> int:
    """Of tensors of so many bytes, to fill so many MiB; at most 64."""
    return min(64, -(-mib * 2**20 // size))


@torch.inference_mode()
def _against(
    what: str,
    rows: int,
    ours: Sequence[Callable[[], Any]],
    theirs: Sequence[Callable[[], Any]],
    device: torch.device,
) -> Against:
    ms = [round(_call_ms(calls, device), 4) for calls in (ours, theirs)]
    return Against(what=what, rows=rows, ours_ms=ms[0], torch_ms=ms[1])


def _call_ms(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Median milliseconds of one of the calls, which run one after the other; on a GPU captured."""

    def each() -> None:
        for call in calls:
            call()

    on_gpu, laps = device.type == "cuda", []
    replay = cuda_graph(each)[1] if on_gpu else each
    for _ in range(6):
        began = perf_counter()
        replay()
        if on_gpu:
            torch.cuda.synchronize()
        laps.append(perf_counter() - began)
    return 1e3 * median(laps[1:]) / len(calls)


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
    generate(target, prompt, "vanilla", **how)  # compiles
    laps = [perf_counter()]
    for _ in Job.of(target, prompt, "vanilla", **how).steps():
        laps.append(perf_counter())
    rounds = [end - begin for begin, end in pairwise(laps)]
    seconds = median(rounds[len(rounds) // 2 :])  # each call captures anew, in its first rounds
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
    modes: Annotated[list[str], cli.option("of rounds; repeatable", "MODE", "--mode")] = [*MODES],  # noqa: B006
    contexts: Contexts = [256, 1024],  # noqa: B006
    max_new_tokens: cli.MaxNewTokens = 256,
    whole: Annotated[bool, cli.flag("whole answers instead", "--answers")] = False,
    questions: cli.Files = [],  # noqa: B006
    limit: cli.Limit = 16,
    budget: Annotated[int, cli.option("seconds for --answers", "N", min=0)] = 480,
    json_path: cli.JsonPath = None,
) -> None:
    until = perf_counter() + budget
    check_writable(json_path, reads=[] if shape else cli.inputs(target, files=questions))
    if shape not in (None, *SHAPES):
        raise ValueError(f"Unknown shape: {shape!r}. Available: {', '.join(SHAPES)}")
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"Unknown mode: {unknown[0]!r}. Available: {', '.join(MODES)}")

    keep: Callable[[Any], None] = (
        (lambda report: report.write(json_path)) if json_path else lambda report: None
    )
    if whole:
        if shape is not None:
            raise ValueError(
                "--answers are to questions, which random weights cannot read: leave --shape out"
            )
        mode = modes[-1] if torch.device(device).type == "cuda" else "eager"
        model = in_mode(cli.load(target, dtype, device), mode)
        with cli.progress_bar(None) as step:
            how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "until": until, "keep": keep}
            found = answers.race(model, load_questions(questions, limit), **how, progress=step)
        return cli.deliver(found, json_path)

    def loaded(dtype: str) -> HFTarget:
        return cli.load(target, dtype, device) if shape is None else random_llama(shape, dtype, device)

    proved: list[Proof] = []
    drafters = UNTRAINED if shape else (*UNTRAINED, *TRAINED)
    if shape != "7b":  # in float64 it is too large for most GPUs
        eager = loaded("float64")
        proved = [prove_at_once(eager), *prove(eager, drafters)]
        del eager
        _free(torch.device(device))
    on_gpu = torch.device(device).type == "cuda"
    how = {"max_new_tokens": max_new_tokens, "mib": 4096 if on_gpu else 512, "keep": keep}
    modes = [mode for mode in modes if on_gpu or mode not in ("described", "captured")] or ["compiled"]
    report = measure(loaded(dtype), modes, contexts, **how, proved=proved, drafters=drafters)
    cli.deliver(report, json_path)
    if not all(proof.same for proof in (*proved, *report.proved_exact)):
        raise Exit(1)


if __name__ == "__main__":
    run(main)
