"""Parity with vLLM: the same head there must accept the same drafts and leave the text alone."""

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from safetensors.torch import load_file
from torch import Tensor

from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampling
from slipstream.drafters import load_drafter
from slipstream.drafters.heads import HeadDrafter
from slipstream.drafters.layers import attend_cache
from slipstream.engine.audit import audit
from slipstream.engine.generate import Generation, generate
from slipstream.engine.sampling_params import SamplingParams
from slipstream.files import check_counts, check_given, check_interpreter
from slipstream.interop.public import export
from slipstream.provenance import public
from slipstream.results import Figures, Margin, Part, Report, heading
from slipstream.targets import HFTarget
from slipstream.targets.load import AnyTarget, loaded

WORKER = Path(__file__).with_name("vllm_worker.py")
POINTS = 0.02  # acceptance per position may differ by this much
LOOSE = 2e-2  # relative difference of two tensors that are the same but for rounding
METHODS = {"eagle": "eagle", "eagle3": "eagle3", "fasteagle": "eagle3", "medusa": "medusa"}  # in vLLM
LAYOUTS = {"medusa": "medusa-vllm"}  # that vLLM reads, where it is not the method's first
PARTS = {
    "attention": "self_attn.o_proj",
    "the norm after it": "post_attention_layernorm",
    "mlp": "mlp",
}  # of a layer


class Acceptance(Part):
    """By position in the draft: the share of rounds that accept it, here and in vLLM."""

    slipstream: list[float]
    vllm: list[float]


class Drafts(Part):
    """Rounds that drafted."""

    slipstream: int
    vllm: int


class Deviation(Part):
    """An answer that is not plain vLLM's: from where on, and by what margin in logits."""

    answer: str
    question: int
    against: str = "vLLM, plain"
    position: int | None  # None: one of the answers only ends earlier
    margin: Margin


class ParityReport(Report):
    """What `parity` found.

    Attributes:
        difference: our acceptance minus vLLM's, by position.
        margin: the precision's, in logits.
        first_tensor_that_differs: in order of computation; None if all agree.
        agrees: acceptance agrees within 0.02 at every position, and texts within the margin.
    """

    questions: int
    max_new_tokens: int
    draft_tokens: int
    acceptance: Acceptance
    difference: list[float]
    drafts: Drafts
    margin: float
    divergences: list[Deviation]
    first_tensor_that_differs: str | None
    agrees: bool

    def __rich__(self) -> Group:
        title = f"{self.target}, {self.dtype}, {self.questions} questions, {self.draft_tokens} draft tokens"
        table = Figures(title, "accepted at position", *map(str, range(1, self.draft_tokens + 1)))
        for name, rates in self.acceptance:
            table.add_row(name, *(f"{rate:.3f}" for rate in rates))
        table.add_row("difference", *(f"{rate:+.3f}" for rate in self.difference))
        lines = []
        for each in self.divergences:
            leaves = f"leaves plain vLLM at {each.position}, margin {each.margin:.2g}"
            leaves = "ends elsewhere than plain vLLM" if each.position is None else leaves
            lines.append(Text(f"{each.answer}, question {each.question + 1}: {leaves}"))
        if self.first_tensor_that_differs:
            lines.append(Text(f"first tensor that differs: {self.first_tensor_that_differs}", "bold red"))
        verdict = Text("agrees", "bold green") if self.agrees else Text("does NOT agree", "bold red")
        return Group(table, *lines, verdict)

    def _rows(self) -> list[dict[str, Any]]:
        each = zip(self.acceptance.slipstream, self.acceptance.vllm, self.difference, strict=True)
        columns = ("position", "slipstream", "vllm", "difference")
        return [dict(zip(columns, (i, *row), strict=True)) for i, row in enumerate(each, 1)]


@public
def parity(
    target: AnyTarget,
    drafter: str,
    prompts: Sequence[list[int]],
    python: str,
    max_new_tokens: int = 128,
    draft_tokens: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> ParityReport:
    """Compare acceptance and text of an exported head in vLLM with our chain decoding, at T = 0.

    Args:
        drafter: an eagle, eagle3, fasteagle or medusa drafter directory, or a name whose weights ship.
        python: the interpreter of the environment that vLLM is installed in (`make vllm`).
        draft_tokens: drafted a round. A medusa head drafts one with each of its heads in vLLM.

    Raises:
        ValueError: vLLM cannot be run or cannot draft so many tokens, the drafter cannot be exported, or
            there is nothing to ask.
    """
    check_interpreter(python)
    target = loaded(target)
    check_given(prompts=prompts)
    check_counts(max_new_tokens=max_new_tokens, draft_tokens=draft_tokens)
    for prompt in prompts:
        SamplingParams.of(target, max_new_tokens).limit(prompt)
    ours = _chain(target, drafter, draft_tokens)
    greedy: Any = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "repetition_penalty": 1.0}
    answers = list[Generation]()
    for number, prompt in enumerate(prompts, 1):
        progress(f"ours, question {number}")
        answers.append(generate(target, prompt, ours, **greedy))
    rounds, acceptance = _accepted(answers, draft_tokens)
    progress("vLLM, plainly and with the head (minutes)")
    job = {
        "method": METHODS[ours.method],
        "prompts": list(prompts),
        "new": max_new_tokens,
        "draft": draft_tokens,
        "dtype": target.dtype_name,
        "window": min(target.window, max(map(len, prompts)) + max_new_tokens + draft_tokens + 1),
    }
    plain, drafted, tensors = _served(target, drafter, ours.method, job, python)
    texts = {"vLLM with the head": drafted["tokens"], "ours": [answer.tokens for answer in answers]}
    divergences = _deviations(target, prompts, plain["tokens"], texts)
    apart = [round(a - b, 4) for a, b in zip(acceptance, drafted["acceptance"], strict=True)]
    return ParityReport(
        **heading(target),
        questions=len(prompts),
        max_new_tokens=max_new_tokens,
        draft_tokens=draft_tokens,
        acceptance=Acceptance(slipstream=[round(a, 4) for a in acceptance], vllm=drafted["acceptance"]),
        difference=apart,
        drafts=Drafts(slipstream=rounds, vllm=drafted["drafts"]),
        margin=target.margin,
        divergences=divergences,
        first_tensor_that_differs=first_difference(target, ours, tensors, prompts[0]),
        agrees=max(map(abs, apart)) <= POINTS and all(each.margin <= target.margin for each in divergences),
    )


def _accepted(answers: Sequence[Generation], draft_tokens: int) -> tuple[int, list[float]]:
    """Rounds, and the share that accepted d drafts or more. Raises ValueError where there are none."""
    rounds = [each.accepted for answer in answers for each in answer.rounds]
    if not rounds:
        raise ValueError("no answer has a round that drafts: give a larger max_new_tokens")
    return len(rounds), [sum(n >= d for n in rounds) / len(rounds) for d in range(1, draft_tokens + 1)]


def _chain(target: HFTarget, drafter: str, draft_tokens: int) -> HeadDrafter:
    """The head as the engine runs it: a chain, whose candidates are those of the exported LM head."""
    trained = load_drafter(drafter, target)
    if not isinstance(trained, HeadDrafter) or trained.method not in METHODS:
        raise ValueError(f"drafter {drafter!r} is no {', '.join(METHODS)} head: vLLM is given one of those")
    depth = getattr(trained.head.config, "depth", draft_tokens)
    if draft_tokens > depth or (trained.method == "medusa" and draft_tokens < depth):
        raise ValueError(f"draft_tokens is {draft_tokens}; this {trained.method} head drafts {depth} tokens")
    if trained.method == "medusa" and trained.head.own_lm_head and len(trained.vocab) < target.vocab:
        raise ValueError(
            f"this medusa head has LM heads of {len(trained.vocab)} tokens, and vLLM loads those of all "
            f"{target.vocab} alone: train one with head.draft_vocab=0"
        )
    vocab = None if trained.method == "eagle" else trained.vocab
    return type(trained)(trained.head, target, vocab, f"chain-{draft_tokens}")


def _deviations(
    target: HFTarget, prompts: Sequence[list[int]], plain: list[list[int]], texts: dict[str, list[list[int]]]
) -> list[Deviation]:
    """Answers that are not plain vLLM's, audited. One that only ends earlier is no tie."""
    deviations = []
    for name, answers in texts.items():
        for i, (prompt, answer, reference) in enumerate(zip(prompts, answers, plain, strict=True)):
            if answer == reference:
                continue
            at = next((j for j, (a, b) in enumerate(zip(answer, reference, strict=False)) if a != b), None)
            audits = (audit(target, prompt, text, Sampling()) for text in (answer, reference))
            margin = max((each.margin for audited in audits for each in audited), default=0.0)
            margin = math.inf if at is None else margin
            off = Deviation(answer=name, question=i, position=at, margin=margin)
            deviations.append(off)
    return deviations


def _served(
    target: HFTarget, drafter: str, method: str, job: dict[str, Any], python: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """What the worker wrote: plain answers, answers with the head, and tensors of the first prompt. Raises
    ValueError where it fails."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        target.save(home / "target")
        export(target, drafter, home / "head", layout=LAYOUTS.get(method))
        job |= {name: str(home / name) for name in ("target", "head")}
        job |= {name: str(home / f"{name}.json") for name in ("plain", "drafted")}
        (home / "job.json").write_text(json.dumps({**job, "tensors": str(home / "seen.safetensors")}))
        try:
            worker = [python, str(WORKER), str(home / "job.json")]
            path = os.pathsep.join(filter(None, (str(WORKER.parents[2]), os.environ.get("PYTHONPATH"))))
            environment = os.environ | {"PYTHONPATH": path}
            done = subprocess.run(worker, capture_output=True, text=True, env=environment)
        except OSError as error:
            raise ValueError(
                f"--python {python} cannot be run: {error.strerror}: `make vllm` makes an environment"
            ) from error
        if done.returncode:
            last = " | ".join([line for line in done.stderr.splitlines() if line.strip()][-6:])
            raise ValueError(f"vLLM ({python}) stopped with exit code {done.returncode}: {last}")
        if not (home / "drafted.json").exists():
            raise ValueError(
                f"--python {python} is no interpreter with vLLM in it: `make vllm` makes an environment"
            )
        plain, drafted = (json.loads((home / f"{name}.json").read_text()) for name in ("plain", "drafted"))
        return plain, drafted, load_file(home / "seen.safetensors")


def first_difference(
    target: HFTarget, drafter: HeadDrafter, tensors: dict[str, Tensor], prompt: list[int]
) -> str | None:
    """The first tensor, in order of computation, in which vLLM's head differs from ours over the first
    prompt: its inputs from what ours would read, its parts from ours on its own inputs. None if all agree."""
    ours: dict[str, Tensor] = {}
    for name, module in drafter.head.named_modules():
        module.register_forward_hook(lambda module, args, out, name=name: ours.update({name: out[0]}))
    tensors = {name: tensor.to(target.device) for name, tensor in tensors.items()}
    with torch.inference_mode():
        pairs = (_medusa if drafter.method == "medusa" else _layers)(target, drafter, tensors, prompt, ours)
    for name, (mine, served) in pairs.items():
        if not mine.is_floating_point() and not torch.equal(mine, served.to(mine)):
            return name
        off = float((mine.float() - served.float()).norm() / mine.float().norm().clamp(min=1e-9))
        if off > LOOSE:
            return f"{name} (relative difference {off:.1e})"
    return None


Pairs = dict[str, tuple[Tensor, Tensor]]  # ours and vLLM's, in order of computation


def _layers(
    target: HFTarget,
    drafter: HeadDrafter,
    seen: dict[str, Tensor],
    prompt: list[int],
    ours: dict[str, Tensor],
) -> Pairs:
    """Of a head with decoder layers. `ours` gets what our modules put out."""
    head, T, fused = drafter.head, len(prompt), seen["in.model.fc.0"].to(target.dtype)
    layers, H = ["layers.0"], head.config.hidden_size
    if drafter.method == "eagle":
        embedded, features = fused.split(H, 1)
    elif drafter.method == "eagle3":
        layers, embedded, features = ["midlayer"], seen["in.model.layers.0.1"].to(target.dtype), fused
    else:
        layers = [f"layers.{i}" for i in range(len(head.layers))]
        embedded, features = fused[:, H:], seen["in.model.fuse.0"].to(target.dtype)
    positions = seen["in.model.layers.0.0"][None]
    attends, own = attend_cache(KVCache(len(layers), 1, target.device), T)
    read = torch.tensor(prompt[1:], device=target.device)
    if drafter.method == "fasteagle":
        states = head(embedded[None], features[None], positions, attends)[0, :, 0]
    else:
        states = head(embedded[None], head.fuse(features[None]), positions, attends[0])[0]
    pairs = {
        "positions": (own[0], positions[0]),
        "the tokens that it reads": (target.embed(read), embedded[:-1]),
        "the target's features": (target.features([prompt], head.config.taps)[0], features),
        "fc": (ours["fc"], seen["out.model.fc"]),
    }
    for i, name in enumerate(layers):
        qkv = torch.cat([ours[f"{name}.self_attn.{x}_proj"] for x in "qkv"], 1)
        pairs[f"q, k, v of layer {i}"] = (qkv, seen[f"out.model.layers.{i}.self_attn.qkv_proj"])
        for part, module in PARTS.items():
            pairs[f"{part} of layer {i}"] = (ours[f"{name}.{module}"], seen[f"out.model.layers.{i}.{module}"])
    return pairs | {"logits": (drafter.logits(states[-1:]), seen["out.logits_processor"])}


def _medusa(
    target: HFTarget,
    drafter: HeadDrafter,
    seen: dict[str, Tensor],
    prompt: list[int],
    ours: dict[str, Tensor],
) -> Pairs:
    """Of Medusa's heads, which read the prompt's last state alone."""
    features = seen["in.blocks.0.0"].to(target.dtype)
    states = drafter.head(features[None])[0, -1]
    pairs = {"the target's features": (target.features([prompt], drafter.taps)[0][-1:], features)}
    for i, state in enumerate(states):
        pairs[f"block {i}"] = (state[None], seen[f"out.blocks.{i}"])
    return pairs | {"logits": (drafter.logits(states)[:1], seen["out.logits_processor"])}
