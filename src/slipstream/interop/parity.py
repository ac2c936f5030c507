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
IN_VLLM = {"eagle": "eagle", "eagle3": "eagle3", "fasteagle": "eagle3", "medusa": "medusa"}  # methods
LAYOUTS = {"medusa": "medusa-vllm"}  # that vLLM reads, where it is not the method's first
MODULES = {"attention": "self_attn.o_proj", "the norm after it": "post_attention_layernorm", "mlp": "mlp"}
INSTALL = "`make vllm` makes an environment"
Tensors = dict[str, Tensor]
Pairs = dict[str, tuple[Tensor, Tensor]]  # ours and vLLM's, in order of computation


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

    def __str__(self) -> str:
        how = f"leaves plain vLLM at {self.position}, margin {self.margin:.2g}"
        how = "ends elsewhere than plain vLLM" if self.position is None else how
        return f"{self.answer}, question {self.question + 1}: {how}"


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
        lines = [Text(str(deviation)) for deviation in self.divergences]
        if self.first_tensor_that_differs:
            lines.append(Text(f"first tensor that differs: {self.first_tensor_that_differs}", "bold red"))
        verdict = Text("agrees", "bold green") if self.agrees else Text("does NOT agree", "bold red")
        return Group(table, *lines, verdict)

    def _rows(self) -> list[dict[str, Any]]:
        rates = zip(self.acceptance.slipstream, self.acceptance.vllm, self.difference, strict=True)
        columns = ("position", "slipstream", "vllm", "difference")
        return [dict(zip(columns, (i, *row), strict=True)) for i, row in enumerate(rates, 1)]


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
    steps, acceptance = _accepted(answers, draft_tokens)
    progress("vLLM, plainly and with the head (minutes)")
    job = {
        "method": IN_VLLM[ours.method],
        "prompts": list(prompts),
        "new": max_new_tokens,
        "draft": draft_tokens,
        "dtype": target.dtype_name,
        "window": min(target.window, max(map(len, prompts)) + max_new_tokens + draft_tokens + 1),
    }
    plain, drafted, tensors = _served(target, drafter, ours.method, job, python)
    texts = {"vLLM with the head": drafted["tokens"], "ours": [answer.tokens for answer in answers]}
    divergences = _deviations(target, prompts, plain["tokens"], texts)
    difference = [round(a - b, 4) for a, b in zip(acceptance, drafted["acceptance"], strict=True)]
    same_text = all(text.margin <= target.margin for text in divergences)
    return ParityReport(
        **heading(target),
        questions=len(prompts),
        max_new_tokens=max_new_tokens,
        draft_tokens=draft_tokens,
        acceptance=Acceptance(slipstream=[round(a, 4) for a in acceptance], vllm=drafted["acceptance"]),
        difference=difference,
        drafts=Drafts(slipstream=steps, vllm=drafted["drafts"]),
        margin=target.margin,
        divergences=divergences,
        first_tensor_that_differs=first_difference(target, ours, tensors, prompts[0]),
        agrees=max(map(abs, difference)) <= POINTS and same_text,
    )


def _accepted(answers: Sequence[Generation], draft_tokens: int) -> tuple[int, list[float]]:
    """Rounds, and the share that accepted d drafts or more. Raises ValueError where there are none."""
    counts = [step.accepted for answer in answers for step in answer.rounds]
    if not counts:
        raise ValueError("no answer has a round that drafts: give a larger max_new_tokens")
    return len(counts), [sum(n >= d for n in counts) / len(counts) for d in range(1, draft_tokens + 1)]


def _chain(target: HFTarget, drafter: str, draft_tokens: int) -> HeadDrafter:
    """The head as the engine runs it: a chain, whose candidates are those of the exported LM head."""
    trained = load_drafter(drafter, target)
    if not isinstance(trained, HeadDrafter) or trained.method not in IN_VLLM:
        raise ValueError(f"drafter {drafter!r} is no {', '.join(IN_VLLM)} head: vLLM is given one of those")
    method, head, vocab = trained.method, trained.head, trained.vocab
    depth = getattr(head.config, "depth", draft_tokens)
    if draft_tokens > depth or (method == "medusa" and draft_tokens < depth):
        raise ValueError(f"draft_tokens is {draft_tokens}; this {method} head drafts {depth} tokens")
    if method == "medusa" and head.own_lm_head and len(vocab) < target.vocab:
        raise ValueError(
            f"this medusa head has LM heads of {len(vocab)} tokens, and vLLM loads those of all "
            f"{target.vocab} alone: train one with head.draft_vocab=0"
        )
    return type(trained)(head, target, None if method == "eagle" else vocab, f"chain-{draft_tokens}")


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
            ties = [tie for text in (answer, reference) for tie in audit(target, prompt, text, Sampling())]
            margin = math.inf if at is None else max((tie.margin for tie in ties), default=0.0)
            deviations.append(Deviation(answer=name, question=i, position=at, margin=margin))
    return deviations


def _served(
    target: HFTarget, drafter: str, method: str, job: dict[str, Any], python: str
) -> tuple[dict[str, Any], dict[str, Any], Tensors]:
    """The worker's plain answers, its answers with the head, and tensors of the first prompt."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        target.save(home / "target")
        export(target, drafter, home / "head", layout=LAYOUTS.get(method))
        job |= {name: str(home / name) for name in ("target", "head", "plain", "drafted", "tensors")}
        (home / "job.json").write_text(json.dumps(job))
        path = os.pathsep.join(filter(None, (str(WORKER.parents[2]), os.environ.get("PYTHONPATH"))))
        for part in ("plain", "drafted", "tensors"):
            words = [python, str(WORKER), str(home / "job.json"), part]
            try:
                how: Any = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": path}}
                worker = subprocess.run(words, **how)
            except OSError as error:
                raise ValueError(f"--python {python} cannot be run: {error.strerror}: {INSTALL}") from error
            if worker.returncode:
                last = " | ".join([line for line in worker.stderr.splitlines() if line.strip()][-6:])
                raise ValueError(f"vLLM ({python}) stopped with exit code {worker.returncode}: {last}")
            if not os.path.exists(job[part]):
                raise ValueError(f"--python {python} is no interpreter with vLLM in it: {INSTALL}")
        plain, drafted = (json.loads(Path(job[name]).read_text()) for name in ("plain", "drafted"))
        return plain, drafted, load_file(job["tensors"])


def first_difference(
    target: HFTarget, drafter: HeadDrafter, tensors: Tensors, prompt: list[int]
) -> str | None:
    """The first tensor, in order of computation, in which vLLM's head differs from ours over the first
    prompt: its inputs from what ours would read, its parts from ours on its own inputs. None if all agree."""
    ours: Tensors = {}
    for name, module in drafter.head.named_modules():
        module.register_forward_hook(lambda module, args, out, name=name: ours.update({name: out[0]}))
    tensors = {name: tensor.to(target.device) for name, tensor in tensors.items()}
    with torch.inference_mode():
        pairs = (_medusa if drafter.method == "medusa" else _layers)(target, drafter, tensors, prompt, ours)
    for name, (own, served) in pairs.items():
        if not own.is_floating_point() and not torch.equal(own, served.to(own)):
            return name
        off = float((own.float() - served.float()).norm() / own.float().norm().clamp(min=1e-9))
        if off > LOOSE:
            return f"{name} (relative difference {off:.1e})"
    return None


def _layers(
    target: HFTarget, drafter: HeadDrafter, theirs: Tensors, prompt: list[int], ours: Tensors
) -> Pairs:
    """Of a head with decoder layers. `ours` gets what our modules put out."""
    head, fused = drafter.head, theirs["in.model.fc.0"].to(target.dtype)
    layers, H = ["layers.0"], head.config.hidden_size
    if drafter.method == "eagle":
        embedded, features = fused.split(H, 1)
    elif drafter.method == "eagle3":
        layers, embedded, features = ["midlayer"], theirs["in.model.layers.0.1"].to(target.dtype), fused
    else:
        layers = [f"layers.{i}" for i in range(len(head.layers))]
        embedded, features = fused[:, H:], theirs["in.model.fuse.0"].to(target.dtype)
    positions = theirs["in.model.layers.0.0"][None]
    attends, own_positions = attend_cache(KVCache(len(layers), 1, target.device), len(prompt))
    if drafter.method == "fasteagle":
        states = head(embedded[None], features[None], positions, attends)[0, :, 0]
    else:
        states = head(embedded[None], head.fuse(features[None]), positions, attends[0])[0]
    read = target.embed(torch.tensor(prompt[1:], device=target.device))
    pairs = {
        "positions": (own_positions[0], positions[0]),
        "the tokens that it reads": (read, embedded[:-1]),
        "the target's features": (target.features([prompt], head.config.taps)[0], features),
        "fc": (ours["fc"], theirs["out.model.fc"]),
    }
    for i, name in enumerate(layers):
        qkv = torch.cat([ours[f"{name}.self_attn.{x}_proj"] for x in "qkv"], 1)
        pairs[f"q, k, v of layer {i}"] = (qkv, theirs[f"out.model.layers.{i}.self_attn.qkv_proj"])
        for part, module in MODULES.items():
            served = theirs[f"out.model.layers.{i}.{module}"]
            pairs[f"{part} of layer {i}"] = (ours[f"{name}.{module}"], served)
    return pairs | {"logits": (drafter.logits(states[-1:]), theirs["out.logits_processor"])}


def _medusa(
    target: HFTarget, drafter: HeadDrafter, theirs: Tensors, prompt: list[int], ours: Tensors
) -> Pairs:
    """Of Medusa's heads, which read the prompt's last state alone."""
    features = theirs["in.blocks.0.0"].to(target.dtype)
    states = drafter.head(features[None])[0, -1]
    pairs = {"the target's features": (target.features([prompt], drafter.taps)[0][-1:], features)}
    for i, state in enumerate(states):
        pairs[f"block {i}"] = (state[None], theirs[f"out.blocks.{i}"])
    return pairs | {"logits": (drafter.logits(states)[:1], theirs["out.logits_processor"])}
