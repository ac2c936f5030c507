"""A model of some of another model's blocks."""

from collections.abc import Sequence
from copy import copy, deepcopy
from itertools import chain
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.targets.quantized import rows_of_head
from slipstream.targets.shadow_model import Blocks
from slipstream.targets.support import SUPPORTED


def part(
    whole: PreTrainedModel, blocks: Blocks, which: Sequence[int], own: bool, vocab: Int[Tensor, " Vd"] | None
) -> tuple[PreTrainedModel, Blocks, list[tuple[nn.Module, int]]]:
    """A model of the blocks with these indices, its blocks, and the modules made for it, with the number of
    each block: see `Target.part`."""
    L, indices = len(blocks), sorted(set(which))
    if not indices or not set(indices) <= set(range(L)):
        there = f"this target has 0 to {L - 1}"
        raise ValueError(f"a model of blocks {indices} cannot be made: {there}; keep one")
    model = _shallow(whole)
    numbers = [blocks.numbers[i] for i in indices]
    chosen = Blocks([_copied(blocks[i]) if own else blocks[i] for i in indices], numbers)
    fresh = list(zip(chosen, numbers, strict=True)) if own else []
    _put(model, blocks, chosen)
    decoder = decoder_of(model, chosen)
    if types := getattr(decoder.config, "layer_types", None):  # a layer's index selects its mask
        decoder.config = copy(decoder.config)
        decoder.config.layer_types = [types[i] for i in indices]
    holder: Any = next(module for module in model.modules() if chosen in module._modules.values())
    if crossed := getattr(holder, "cross_attention_layers", None):  # Mllama's, which text alone passes by
        holder.cross_attention_layers = [indices.index(i) for i in crossed if i in indices]
    if own:
        decoder._modules.update({name: deepcopy(x) for name, x in between(model, chosen).items()})
    if vocab is not None:
        head: Any = whole.get_output_embeddings()
        narrow = rows_of_head(head, vocab)
        _put(model, head, narrow)
        fresh.append((narrow, 0))
    return model, chosen, fresh


def own_blocks(model: PreTrainedModel, count: int) -> Blocks:
    """A model's layers, of which there are so many, as `Blocks` in their place. Raises ValueError."""
    modules = chain(model.get_decoder().modules(), model.modules())  # a vision tower may have as many layers
    lists = (m for m in modules if isinstance(m, nn.ModuleList) and len(m) == count)
    if (layers := next(lists, None)) is None:
        raise ValueError(
            f"Unsupported target: {model.config.model_type}: its {count} layers are not one list of modules, "
            f"each run once in a pass. {SUPPORTED}"
        )
    _put(model, layers, blocks := Blocks(layers))
    return blocks


def decoder_of(model: Any, blocks: nn.ModuleList) -> Any:
    """The model without its LM head. To `get_decoder` that is what is named `decoder`, which in
    ModernBertDecoderForCausalLM is the head."""
    decoder = model.get_decoder()
    return decoder if any(module is blocks for module in decoder.modules()) else model.base_model


def between(model: PreTrainedModel, blocks: nn.ModuleList) -> dict[str, nn.Module]:
    """The modules beside the blocks between embedding and LM head: the last norm, perhaps positions."""
    decoder = decoder_of(model, blocks)
    others = (id(model.get_input_embeddings()), id(blocks))
    return {name: module for name, module in decoder.named_children() if id(module) not in others}


def _put(model: PreTrainedModel, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another. The modules around it are copied, so that they are this model's own."""
    path = next(name for name, module in model.named_modules() if module is old).split(".")
    holder: Any = model
    for name in path[:-1]:
        holder._modules[name] = _shallow(holder._modules[name])
        holder = holder._modules[name]
    holder._modules[path[-1]] = new


def _shallow(module: Any) -> Any:
    """A copy of a module with the same parts, each of which can be replaced."""
    shallow = copy(module)
    shallow._modules = dict(module._modules)
    return shallow


def _copied(block: nn.Module) -> nn.Module:
    plain = _shallow(block)
    plain.__dict__.pop("forward", None)  # a compiled module's `forward` cannot be copied
    return deepcopy(plain)
