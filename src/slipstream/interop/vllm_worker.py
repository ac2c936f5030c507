"""Answers prompts in vLLM, plainly and with a head. vLLM's own Python runs it, with this package on its path.

    python vllm_worker.py JOB.json PART

JOB: {"method", "target", "head", "prompts": [[ids]], "new", "draft", "dtype", "window", "plain": OUT,
"drafted": OUT, "tensors": OUT}. A PART is one of the three files, of one engine each: plain answers, answers
and acceptance with the head, and what the head's modules put out for the first prompt.
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process: the model can be looked at
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def engine(job: dict, head: bool) -> Any:
    from vllm import LLM

    from slipstream.interop.vllm_plugin import register

    register()  # as vLLM does itself where Slipstream is installed
    drafting = {"method": job["method"], "model": job["head"], "num_speculative_tokens": job["draft"]}
    return LLM(
        job["target"],
        dtype=job["dtype"],
        max_model_len=job["window"],
        enforce_eager=True,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=drafting if head else None,
    )


def generate(llm: Any, prompt: list, new: int) -> list:
    """The tokens of an answer."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new)
    outputs = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    return list(outputs[0].outputs[0].token_ids)


def answer(job: dict, head: bool) -> dict:
    """Tokens of every answer, and acceptance per position."""
    llm = engine(job, head)
    tokens = [generate(llm, prompt, job["new"]) for prompt in job["prompts"]]
    if not head:
        return {"tokens": tokens}
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values[: job["draft"]]
    return {"tokens": tokens, "drafts": drafts, "acceptance": [a / max(drafts, 1) for a in accepted]}


def record(job: dict) -> None:
    """Write what the modules of the head read and put out in their first pass over the first prompt."""
    import torch
    from safetensors.torch import save_file

    llm, tensors = engine(job, True), {}

    def hook_of(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            if f"out.{name}" not in tensors:
                out = out[0] if isinstance(out, tuple) else out
                tensors[f"out.{name}"] = out.detach().float().clone()
                for i, arg in enumerate([*args, *kwargs.values()]):
                    if isinstance(arg, torch.Tensor):
                        tensors[f"in.{name}.{i}"] = arg.detach().clone()

        return hook

    worker = llm.llm_engine.model_executor.driver_worker.worker
    for name, module in worker.model_runner.drafter.model.named_modules():
        if name:
            module.register_forward_hook(hook_of(name), with_kwargs=True)
    generate(llm, job["prompts"][0], 2)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, job["tensors"])


if __name__ == "__main__":
    path, part = sys.argv[1:]
    with open(path) as file:
        job = json.load(file)
    if part == "tensors":
        record(job)
    else:
        with open(job[part], "w") as file:
            json.dump(answer(job, part == "drafted"), file)
