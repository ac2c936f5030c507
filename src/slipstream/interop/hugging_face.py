"""Slipstream inside Hugging Face's own `generate`, through its `custom_generate`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from slipstream.core.drafter import Drafter
from slipstream.core.target import lock
from slipstream.drafters.draft_model.model import DraftModel
from slipstream.engine.generate import Job
from slipstream.engine.request import Request
from slipstream.spec import Named
from slipstream.targets import HFTarget
from slipstream.targets.shadow_model import shadow_of
from slipstream.targets.support import check_whole

DIRECTORY = str(Path(__file__).with_name("hf"))  # for those who give `custom_generate` a directory
GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# Arguments of `generate` that ask for what is not done here, beside those of generation_config.
REFUSED = ("prefix_allowed_tokens_fn", "negative_prompt_ids", "negative_prompt_attention_mask", "synced_gpus")
OF_MODULES = vars(nn.Module()).keys()
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def custom_generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B T"],
    generation_config: Any,
    stopping_criteria: StoppingCriteriaList,
    drafter: Named | Drafter | None = None,
    seed: int | None = None,
    compile: bool = False,
    **prepared: Any,
) -> Any:
    """Answer inside Hugging Face's `generate`, which calls this with what it has prepared.

        model.generate(**inputs, max_new_tokens=64, custom_generate=slipstream.custom_generate)

    Its arguments hold as they do there, padding on the left, streamers and stopping criteria included, or are
    refused by name. Each row's answer is that to its prompt alone. The model stays as it is, and changes of
    its weights, hooks and adapters are seen.

    Args:
        model, input_ids, generation_config, stopping_criteria, prepared: from Hugging Face.
        drafter: as in `slipstream.generate`. Default: the `assistant_model` if one is given, or else "auto".
        seed: of the noise where `do_sample` is set; default: drawn from torch's generator, which
            `torch.manual_seed` sets.
        compile: see `HFTarget`; the first call then compiles.

    Returns:
        ids [B, T + new], padded on the right, or with `return_dict_in_generate` an output that holds them.

    Raises:
        ValueError: an argument cannot be honoured, or it is not Hugging Face's `generate` that calls.
    """
    arguments = _arguments()
    _check(arguments, generation_config)
    with lock(model.device):
        target, assistant = _target(model, compile), arguments["assistant_model"]
        target.model.generation_config = _per_row(generation_config)
        if seed is None:
            seed = int(torch.randint(2**62, ())) if generation_config.do_sample else 0
        if not drafter and assistant is not None:
            drafter = DraftModel(_target(assistant, compile), target)
        options = {"seed": seed, "processors": list(arguments["logits_processor"] or ())}
        mask = prepared.get("attention_mask")
        job = _job(target, input_ids, mask, stopping_criteria, drafter=drafter or "auto", **options)
    streamer, streamed, pad = arguments["streamer"], 0, generation_config._pad_token_tensor
    for _ in job.steps():
        if streamer is not None:  # gets the columns that no row still lacks, one by one
            under_way = [len(request.tokens) for request in job.requests if request.finish is None]
            end = min(under_way) if under_way else None
            columns = _columns(job.requests, pad, end)
            for column in columns[:, streamed:].T:
                streamer.put(column)
            streamed = max(streamed, columns.shape[1])
    ids: Any = torch.cat([input_ids, _columns(job.requests, pad).to(input_ids.device)], 1)
    if streamer is not None:
        streamer.end()
    return GenerateDecoderOnlyOutput(sequences=ids) if generation_config.return_dict_in_generate else ids


def _per_row(config: Any) -> Any:
    """generation_config without what is done outside: rows are repeated already, criteria are called."""
    config = copy(config)
    config.num_return_sequences = 1
    config.max_time = config.stop_strings = None
    return config


def _job(
    target: HFTarget,
    ids: Int[Tensor, "B T"],
    mask: Tensor | None,
    stopping: StoppingCriteriaList,
    **options: Any,
) -> Job:
    """What `generate` would do. Raises ValueError."""
    prompts, criteria = _unpadded(ids, mask), list[Any](stopping)
    longest, limit = max(map(len, prompts)), int(stopping.max_length or target.window) - ids.shape[1]
    if longest + limit > target.window:
        raise ValueError(
            f"the prompt has {longest} tokens and the answer may have {limit}; {target.name} has a window "
            f"of {target.window} for both: give a smaller max_new_tokens"
        )
    ends = {int(i) for rule in criteria if isinstance(rule, EosTokenCriteria) for i in rule.eos_token_id}
    eos = sorted(i for i in ends if i < target.vocab)
    job = Job.of(target, prompts, max_new_tokens=limit, eos_token_ids=eos, **options)
    called = [rule for rule in criteria if not isinstance(rule, (EosTokenCriteria, MaxLengthCriteria))]
    for request, row in zip(job.requests, ids.tolist(), strict=True):
        request.ended = _criterion(called, row, ids.device) if called else None
    return job


def _columns(requests: Sequence[Request], pad: Tensor | None, end: int | None = None) -> Int[Tensor, "B T2"]:
    """The first columns of the answers, default all, one for each token, padded where a row has ended. Raises
    ValueError where there is no padding token."""
    rows = [request.tokens[:end] for request in requests]
    longest = max(map(len, rows))
    if pad is None and any(len(row) < longest for row in rows):
        raise ValueError("answers have different lengths, and there is no pad_token_id: give one")
    filler = 0 if pad is None else int(pad)
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


_targets: WeakKeyDictionary[PreTrainedModel, tuple[Any, dict[bool, HFTarget]]] = WeakKeyDictionary()


def _target(model: PreTrainedModel, compile: bool) -> HFTarget:
    """A target over the model's weights, made again once they have changed. It holds a copy over the same
    weights, so it ends with the model, whose generation_config also stays its own. Raises ValueError as
    `check_whole` does."""
    check_whole(model)
    weights = [*model.named_parameters(), *model.named_buffers()]
    stamp: list[Any] = [
        (name, x.data_ptr(), x.dtype, 0 if x.is_inference() else x._version) for name, x in weights
    ]
    stamp.append(torch.cat([_some(x) for _, x in weights]).tolist())  # changes by `.data` have no version
    stamp += map(_switches, model.modules())
    known, targets = _targets.get(model, (None, {}))
    if known != stamp:
        targets = {}
        _targets[model] = stamp, targets
    if compile not in targets:
        targets[compile] = HFTarget(shadow_of(model), compile=compile)
    return targets[compile]


def _some(x: Tensor) -> Tensor:
    """Numbers from all over a tensor that lies in one piece, up to 17."""
    flat = x.detach().view(-1) if x.is_contiguous() else x.new_zeros(0)
    return flat[:: max(1, flat.numel() // 16)].double().cpu()


def _switches(module: nn.Module) -> Any:
    """What else a module goes by: numbers and words that it holds, such as the adapter that PEFT has chosen,
    and hooks."""
    own = [(name, _plainly(value)) for name, value in vars(module).items() if name not in OF_MODULES]
    return own, list(module._forward_pre_hooks), list(module._forward_hooks)


def _plainly(value: Any) -> Any:
    """Numbers and words, in lists and dictionaries too; None for anything else."""
    if isinstance(value, dict):
        return [(name, _plainly(item)) for name, item in value.items()]
    if isinstance(value, (list, tuple, set)):
        return list(map(_plainly, value))
    return value if isinstance(value, (bool, int, float, str)) else None


def _arguments() -> Mapping[str, Any]:
    """The arguments that Hugging Face's `generate` was called with. Up to 5.23 at least it does not hand a
    callable its streamer, assistant and processors, so they are read where it runs. Raises ValueError."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    if frame is None:
        raise ValueError("call model.generate(…, custom_generate=slipstream.custom_generate)")
    return frame.f_locals


def _check(arguments: Mapping[str, Any], config: Any) -> None:
    """Raises ValueError for what cannot be honoured. `SamplingParams` checks the fields of
    generation_config."""
    unknown = [
        name
        for name, value in arguments["kwargs"].items()
        if value is not None and not hasattr(config, name) and name not in ("input_ids", "attention_mask")
    ]
    names = [name for name in REFUSED if arguments[name]] + sorted(unknown)
    if config.return_dict_in_generate:
        names += [name for name in OUTPUTS if getattr(config, name, False)]
    if arguments["model_input_name"] != "input_ids":
        names.append(arguments["model_input_name"])
    if names:
        raise ValueError(f"slipstream.custom_generate cannot honour {', '.join(names)}: leave it out")


def _unpadded(ids: Int[Tensor, "B T"], mask: Tensor | None) -> list[list[int]]:
    """Prompts without the padding on their left. Raises ValueError for other masks."""
    if mask is None:
        return list(ids.tolist())
    real = mask.bool()
    if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        fix = "pad on the left (tokenizer.padding_side = 'left')"
        raise ValueError(f"attention_mask masks tokens behind others: {fix}")
    return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]


def _criterion(
    criteria: Sequence[Any], prompt: list[int], device: torch.device
) -> Callable[[list[int]], bool]:
    """Whether any of Hugging Face's stopping criteria ends a row. They see its padding, as there."""

    def ended(tokens: list[int]) -> bool:
        ids = torch.tensor([prompt + tokens], device=device)
        return any(bool(torch.as_tensor(rule(ids, None)).any()) for rule in criteria)

    return ended
