"""A part of a target, as a model of its own, and passes through which gradients flow: what drafters are
trained with."""

from collections.abc import Sequence
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from slipstream.targets.inside import Behind, additive, compile_forward

if TYPE_CHECKING:
    from slipstream.targets.hf import Target


def part(target: "Target", blocks: Sequence[int], own: bool, vocab: Int[Tensor, " Vd"] | None) -> "Target":
    """Some of the blocks between the same ends (Zhang et al. 2023, "Draft & Verify").

    Args:
        own: copies of all but the ends, which may be changed; otherwise nothing is copied.
        vocab: the tokens that it has logits of; all by default.

    Raises:
        ValueError: there is no such block, or none is named.
    """
    L = len(target.blocks)
    if not blocks or not set(blocks) <= set(range(L)):
        raise ValueError(
            f"a model of blocks {sorted(blocks)} cannot be made: this target has 0 to {L - 1}; keep one"
        )
    kept = sorted(set(blocks))
    made = copy(target)
    made._twin = _shallow(target.twin)
    made.__dict__.pop("ends", None)
    made.blocks = nn.ModuleList([_copied(target, i) if own else target.blocks[i] for i in kept])
    _put(made, target.blocks, made.blocks)
    decoder: Any = made.twin.get_decoder()
    if types := getattr(decoder.config, "layer_types", None):  # masks are picked by a layer's place
        decoder.config = copy(decoder.config)
        decoder.config.layer_types = [types[i] for i in kept]
    if own:
        decoder._modules.update({name: deepcopy(each) for name, each in between(made).items()})
    if vocab is not None:
        head: Any = target.twin.get_output_embeddings()
        narrow = nn.Linear(1, 1, head.bias is not None, device="meta")
        narrow.weight = nn.Parameter(head.weight[vocab], requires_grad=False)
        if head.bias is not None:
            narrow.bias = nn.Parameter(head.bias[vocab], requires_grad=False)
        _put(made, head, _compiled_as(target, narrow))
    return made


def between(target: "Target") -> dict[str, nn.Module]:
    """What stands between the ends beside the blocks: the last norm, perhaps positions."""
    decoder: Any = target.twin.get_decoder()
    others = (target.twin.get_input_embeddings(), target.blocks)
    return {
        name: each for name, each in decoder.named_children() if not any(each is other for other in others)
    }


def states(target: "Target", tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
    """The final states of whole texts, right-padded, in the blocks' precision; gradients flow."""
    embedded = target.twin.get_input_embeddings()(tokens).to(next(target.blocks.parameters()).dtype)
    at = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return states_behind(target, embedded, at, at[:, :, None] >= at[:, None], at)


def states_behind(
    target: "Target",
    embedded: Float[Tensor, "B R H"],
    positions: Int[Tensor, "#B R"],
    seen: Bool[Tensor, "#B R S"],
    columns: Int[Tensor, "#B S"],
    behind: Behind | None = None,
) -> Float[Tensor, "B R H"]:
    """The final states of rows given as vectors; gradients flow through them, and through what they read.

    Args:
        seen: what each row may see of the S columns, sliding windows apart: those `behind`, and then the
            rows.
        columns: where the columns stand; before everything (negative) is in every window.
    """
    every = {}
    for kind, window in target.windows.items():
        near = positions[:, :, None] - columns[:, None] < (window or target.window + 1)
        every[kind] = seen & (near | (columns < 0)[:, None])
    mask = additive(every, embedded.dtype)
    decoder: Any = target.twin.get_decoder()
    cache = Behind() if behind is None else behind
    about = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
    return decoder(inputs_embeds=embedded, **about).last_hidden_state


def _put(target: "Target", old: nn.Module, new: nn.Module) -> None:
    """Another module in one's place; the modules around it become this target's own."""
    path = next(name for name, module in target.twin.named_modules() if module is old).split(".")
    holder: Any = target.twin
    for name in path[:-1]:
        holder._modules[name] = _shallow(holder._modules[name])
        holder = holder._modules[name]
    holder._modules[path[-1]] = new


def _shallow(module: Any) -> Any:
    """Another module with the same parts, one of which may be exchanged."""
    made = copy(module)
    made._modules = dict(module._modules)
    return made


def _copied(target: "Target", i: int) -> nn.Module:
    plain = _shallow(target.blocks[i])
    plain.__dict__.pop("forward", None)  # of a compiled one, which cannot be copied
    return _compiled_as(target, deepcopy(plain), i)


def _compiled_as(target: "Target", module: nn.Module, layer: int = 0) -> nn.Module:
    if target.compiles:
        compile_forward(module, target.device, layer)
    return module
