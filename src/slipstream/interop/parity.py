"""Parity with vLLM: the same head in a serving engine must accept the same drafts and leave the text
alone."""

import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.core.cache import KVCache
from slipstream.core.sampling import Sampling
from slipstream.decode.answer import Round
from slipstream.decode.audit import audit, margin_of
from slipstream.decode.generate import Generation, generate
from slipstream.decode.settings import Settings
from slipstream.drafters import load_drafter
from slipstream.drafters.eagle import Eagle
from slipstream.drafters.layers import attend_cache
from slipstream.drafters.recursive import RecursiveDrafter
from slipstream.files import check_counts
from slipstream.interop.public import export_head
from slipstream.machine import heading
from slipstream.targets import Target

WORKER = Path(__file__).with_name("vllm_worker.py")
POINTS = 0.02  # acceptance per position may differ by this much
LOOSE = 2e-2  # relative difference of two tensors that are the same but for rounding


def parity(
    target: Target,
    drafter: str,
    prompts: Sequence[list[int]],
    python: str,
    new: int = 128,
    draft: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Serve a target with an exported head in vLLM, and hold acceptance and text against our chain decoding
    at T = 0.

    Args:
        drafter: an eagle or eagle3 drafter directory, or a name whose weights ship.
        python: the interpreter of the environment that vLLM is installed in (`make vllm`).
        draft: draft tokens a round.

    Returns:
        Acceptance per position, both; answers that differ, audited; and, where they do not agree, the first
        tensor that differs.

    Raises:
        ValueError: vLLM cannot be run, the drafter cannot be exported, or there is nothing to ask.
    """
    if not Path(python).is_file():
        raise ValueError(
            f"vLLM's interpreter {python} is not there: run `make vllm`, or name another with --python"
        )
    check_counts(prompts=len(prompts), max_new_tokens=new, draft_tokens=draft)
    for prompt in prompts:
        Settings.of(target, new).limit(prompt)
    trained = load_drafter(drafter, target.ends)
    if not isinstance(trained, RecursiveDrafter):
        raise ValueError(f"drafter {drafter!r} is no eagle or eagle3 head: vLLM is given one of those")
    vocab = (
        trained.vocab if trained.head.own_lm_head else None
    )  # otherwise all tokens are candidates, as in the engine
    ours = type(trained)(trained.head, target.ends, vocab, f"chain-{draft}")
    rounds: list[Round] = []
    answers: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        progress(f"ours, question {i + 1}")
        made: Generation = generate(
            target, prompt, ours, max_new_tokens=new, temperature=0.0, repetition_penalty=1.0
        )
        rounds += made.rounds
        answers.append(made.tokens)
    acceptance = [sum(r.accepted >= d for r in rounds) / len(rounds) for d in range(1, draft + 1)]
    with tempfile.TemporaryDirectory() as home:
        progress("vLLM, plainly and with the head (minutes)")
        job = {
            "method": ours.method,
            "prompts": list(prompts),
            "new": new,
            "draft": draft,
            "dtype": target.dtype_name,
        }
        theirs = _serve(target, drafter, job, python, Path(home))
        differing = first_difference(target, ours, theirs["seen"], prompts[0])
    divergences: list[dict[str, Any]] = []
    for name, said in (("vLLM with the head", theirs["drafted"]["tokens"]), ("ours", answers)):
        for i, (prompt, answer, reference) in enumerate(
            zip(prompts, said, theirs["plain"]["tokens"], strict=True)
        ):
            if answer != reference:
                found = {"answer": name, "question": i, "against": "vLLM, plain"}
                at = next(
                    (j for j, (a, b) in enumerate(zip(answer, reference, strict=False)) if a != b), None
                )
                margins = [
                    d.margin for text in (answer, reference) for d in audit(target, prompt, text, Sampling())
                ]
                behind = (
                    math.inf if at is None else max(margins, default=0.0)
                )  # one that only ends early is no tie
                divergences.append({**found, "position": at, "margin": behind})
    apart = [round(a - b, 4) for a, b in zip(acceptance, theirs["drafted"]["acceptance"], strict=True)]
    agrees = max(map(abs, apart)) <= POINTS and all(d["margin"] <= margin_of(target) for d in divergences)
    return {
        **heading(target),
        "questions": len(prompts),
        "max_new_tokens": new,
        "draft_tokens": draft,
        "acceptance": {
            "slipstream": [round(a, 4) for a in acceptance],
            "vllm": theirs["drafted"]["acceptance"],
        },
        "difference": apart,
        "drafts": {"slipstream": len(rounds), "vllm": theirs["drafted"]["drafts"]},
        "margin": margin_of(target),
        "divergences": divergences,
        "first_tensor_that_differs": differing,
        "agrees": agrees,
    }


def _serve(target: Target, drafter: str, job: dict[str, Any], python: str, home: Path) -> dict[str, Any]:
    assert target.tokenizer is not None
    target.model.save_pretrained(home / "target")
    target.tokenizer.save_pretrained(home / "target")
    export_head(drafter, str(home / "head"), target.ends)
    job |= {name: str(home / name) for name in ("target", "head")} | {
        "tensors": str(home / "seen.safetensors")
    }
    job |= {name: str(home / f"{name}.json") for name in ("plain", "drafted")}
    (home / "job.json").write_text(json.dumps(job))
    try:
        done = subprocess.run([python, str(WORKER), str(home / "job.json")], capture_output=True, text=True)
    except OSError as error:
        raise ValueError(
            f"--python {python} cannot be run: {error.strerror}: `make vllm` makes an environment"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"vLLM ({python}) stopped with exit code {done.returncode}: {' | '.join(lines[-6:])}"
        )
    if not (home / "drafted.json").exists():
        raise ValueError(
            f"--python {python} is no interpreter with vLLM in it: `make vllm` makes an environment"
        )
    answers = {name: json.loads((home / f"{name}.json").read_text()) for name in ("plain", "drafted")}
    return {**answers, "seen": load_file(home / "seen.safetensors")}


def first_difference(
    target: Target, drafter: RecursiveDrafter, seen: dict[str, Tensor], prompt: list[int]
) -> str | None:
    """The first tensor, in order of computation, that vLLM's head has otherwise than ours over the first
    prompt: its inputs are held against what ours would read, its parts against ours on the inputs that it
    had. None if all agree."""
    head, T, fused = drafter.head, len(prompt), seen["in.model.fc.0"].to(target.dtype)
    if isinstance(drafter, Eagle):
        layer, (embedded, features) = "layers.0", fused.split(head.config.hidden_size, 1)
    else:
        layer, embedded, features = "midlayer", seen["in.model.layers.0.1"].to(target.dtype), fused
    positions = seen["in.model.layers.0.0"][None]
    if positions[0].tolist() != list(range(T)):
        return "positions"
    ours: dict[str, Tensor] = {}

    def theirs(name: str) -> Tensor:
        return seen[f"out.model.layers.0.{name}"]

    for name, module in head.named_modules():
        module.register_forward_hook(lambda module, args, out, name=name: ours.update({name: out[0]}))
    with torch.inference_mode():
        [attend], _ = attend_cache(KVCache(1, 1, T), T)
        said = head(embedded[None], head.fuse(features[None]), positions, attend)[0]
        logits = drafter.logits(said[-1:])
        qkv = torch.cat([ours[f"{layer}.self_attn.{x}_proj"] for x in "qkv"], 1)
        pairs = {
            "the tokens that it reads": (target.ends.embed(torch.tensor(prompt[1:])), embedded[:-1]),
            "the target's features": (target.features([prompt], head.config.taps)[0], features),
            "fc": (ours["fc"], seen["out.model.fc"]),
            "q, k, v": (qkv, theirs("self_attn.qkv_proj")),
            "attention": (ours[f"{layer}.self_attn.o_proj"], theirs("self_attn.o_proj")),
            "the norm after it": (
                ours[f"{layer}.post_attention_layernorm"],
                theirs("post_attention_layernorm"),
            ),
            "mlp": (ours[f"{layer}.mlp"], theirs("mlp")),
            "logits": (logits, seen["out.logits_processor"]),
        }
    for name, (mine, served) in pairs.items():
        off = float((mine.float() - served.float()).norm() / mine.float().norm().clamp(min=1e-9))
        if off > LOOSE:
            return f"{name} (relative difference {off:.1e})"
    return None
