"""The outside baseline: Hugging Face's own generate, under the settings of ours."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.decode.settings import Settings
from slipstream.targets.hf import HFTarget

# fields of generation_config that make Hugging Face draft, or change its cache
OTHERWISE = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "cache_implementation")


def hf_generate(target: HFTarget, tokens: Int[Tensor, "B T"], **kwargs: Any) -> Int[Tensor, "B T2"]:
    """Hugging Face's `generate` on the same weights, with its own attention and layers."""
    plain: Any = target.plain
    plain.generation_config = target.model.generation_config  # which the user may have changed since
    return plain.generate(tokens, attention_mask=torch.ones_like(tokens), **kwargs)


def hf_answer(
    target: HFTarget, prompt: list[int], max_new_tokens: int, temperature: float, seed: int = 0
) -> list[int]:
    """Its tokens, with the same settings, end tokens and stop strings. It reads the rest of generation_config
    itself. Raises ValueError as `generate` does."""
    settings = Settings.of(target, max_new_tokens, temperature=temperature, seed=seed)
    how: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature:
        torch.manual_seed(seed)
        sampling = settings.row(0, prompt)
        how |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    if settings.stop and target.text is not None:
        how |= {"stop_strings": list(settings.stop), "tokenizer": target.text.tokenizer}
    how |= {name: None for name in OTHERWISE if getattr(target.generation_config, name, None)}
    made = hf_generate(
        target,
        torch.tensor([prompt], device=target.device),
        max_new_tokens=settings.limit(prompt),
        eos_token_id=sorted(settings.eos) or None,
        use_cache=True,
        return_dict_in_generate=False,
        **how,
    )
    return made[0, len(prompt) :].tolist()
