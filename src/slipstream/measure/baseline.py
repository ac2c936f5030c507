"""The outside baseline: Hugging Face's own generate, under the settings of ours."""

from itertools import count
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.engine.sampling_params import SamplingParams
from slipstream.targets.hf import HFTarget

# fields of generation_config that make Hugging Face draft, or change its cache
OTHERWISE = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "cache_implementation")


def hf_generate(target: HFTarget, tokens: Int[Tensor, "B T"], **kwargs: Any) -> Int[Tensor, "B T2"]:
    """Hugging Face's `generate` on the same weights, with its own attention and layers."""
    plain: Any = target.plain
    plain.generation_config = target.model.generation_config  # which the user may have changed since
    return plain.generate(tokens, **{"attention_mask": torch.ones_like(tokens)} | kwargs)


def hf_answer(target: HFTarget, prompt: list[int], *settings: Any, **named: Any) -> list[int]:
    """Its tokens for one prompt; the rest as `hf_answers` takes it."""
    return hf_answers(target, [prompt], *settings, **named)[0]


def hf_answers(
    target: HFTarget, prompts: list[list[int]], max_new_tokens: int, temperature: float, seed: int = 0
) -> list[list[int]]:
    """Its tokens for prompts that are given at once, padded on the left; with the same settings, end tokens
    and stop strings. It reads the rest of generation_config itself. Raises ValueError as `generate` does."""
    settings = SamplingParams.of(target, max_new_tokens, temperature=temperature, seed=seed)
    how: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature:
        torch.manual_seed(seed)
        sampling = settings.row(0, prompts[0])
        how |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    if settings.stop and target.text is not None:
        how |= {"stop_strings": list(settings.stop), "tokenizer": target.text.tokenizer}
    how |= {name: None for name in OTHERWISE if getattr(target.generation_config, name, None)}
    pad, longest = next(token for token in count() if token not in settings.eos), max(map(len, prompts))
    if len(prompts) > 1:
        how["pad_token_id"] = pad
    rows = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = hf_generate(
        target,
        rows.to(target.device),
        attention_mask=real.to(target.device),
        max_new_tokens=min(settings.limit(prompt) for prompt in prompts),
        eos_token_id=sorted(settings.eos) or None,
        use_cache=True,
        return_dict_in_generate=False,
        **how,
    )
    answers = made[:, longest:].tolist()
    filler = pad if settings.stop else None  # without stop strings none but an end token ends a row early
    return answers if len(prompts) == 1 else [_ended(answer, settings.eos, filler) for answer in answers]


def _ended(answer: list[int], eos: frozenset[int], pad: int | None) -> list[int]:
    """An answer without what fills its row up to the longest answer's length."""
    ends = next((i + 1 for i, token in enumerate(answer) if token in eos), None)
    if ends is None:  # a stop string ended it, or the limit
        ends = max((i + 1 for i, token in enumerate(answer) if token != pad), default=0)
    return answer[:ends]
