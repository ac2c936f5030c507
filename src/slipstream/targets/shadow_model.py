"""The shadow model of a Hugging Face model, or of some of its layers, what replaces its parts, and what looks
into it."""

from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from itertools import chain
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from slipstream.core.drafter import CACHE, FINAL
from slipstream.core.kv_cache import KVCache, LayerView
from slipstream.kernels.compiled import compiled, freed, freed_view
from slipstream.targets.decoder_target import Features, block_of, side_by_side
from slipstream.targets.linear import pack_for_graphs
from slipstream.targets.quantized import rows_of_head
from slipstream.targets.support import SUPPORTED

Model = TypeVar("Model", bound=nn.Module)


def shadow_of(model: Model) -> Model:
    """The same model in eval mode: new modules over the same memory. The two share changes of weights in
    place, and nothing else: no module, mode, configuration or gradient."""
    weights = {  # quantised weights have types of their own, which carry more than numbers: they are shared
        id(p): nn.Parameter(p.detach(), requires_grad=False) if type(p) is nn.Parameter else p
        for p in model.parameters()
    }
    return deepcopy(model, {**weights, **{id(buffer): buffer for buffer in model.buffers()}}).eval()


class Blocks(nn.ModuleList):
    """A model's layers, with the numbers by which they ask for their part of a cache: those of a larger model
    where they are some of its layers."""

    def __init__(self, layers: Iterable[nn.Module], numbers: Sequence[int] | None = None) -> None:
        super().__init__(layers)
        self.numbers = range(len(self)) if numbers is None else numbers

    def __getitem__(self, index: Any) -> Any:
        """All layers are these layers: Hugging Face slices them in each pass."""
        every = isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1)
        return self if every else super().__getitem__(index)

    def decoder_of(self, model: Any) -> Any:
        """The model without its LM head. To `get_decoder` that is what is named `decoder`, which in
        ModernBertDecoderForCausalLM is the head."""
        decoder = model.get_decoder()
        return decoder if any(module is self for module in decoder.modules()) else model.base_model

    def between(self, model: Any) -> dict[str, nn.Module]:
        """The modules beside the blocks between embedding and LM head: the last norm, perhaps positions."""
        others = (id(model.get_input_embeddings()), id(self))
        children = self.decoder_of(model).named_children()
        return {name: module for name, module in children if id(module) not in others}

    def part(
        self, whole: PreTrainedModel, which: Sequence[int], own: bool, vocab: Int[Tensor, " Vd"] | None
    ) -> tuple[PreTrainedModel, "Blocks", list[tuple[nn.Module, int]]]:
        """A model of those of the whole's blocks that have these indices, its blocks, and the modules made
        for it, with the number of each block: see `Target.part`."""
        L, indices = len(self), sorted(set(which))
        if not indices or not set(indices) <= set(range(L)):
            there = f"this target has 0 to {L - 1}"
            raise ValueError(f"a model of blocks {indices} cannot be made: {there}; keep one")
        model = _shallow(whole)
        numbers = [self.numbers[i] for i in indices]
        blocks = Blocks([_copied(self[i]) if own else self[i] for i in indices], numbers)
        fresh = list(zip(blocks, numbers, strict=True)) if own else []
        _put(model, self, blocks)
        decoder = blocks.decoder_of(model)
        if types := getattr(decoder.config, "layer_types", None):  # a layer's index selects its mask
            decoder.config = copy(decoder.config)
            decoder.config.layer_types = [types[i] for i in indices]
        holder: Any = next(module for module in model.modules() if blocks in module._modules.values())
        if crossed := getattr(holder, "cross_attention_layers", None):  # Mllama's, which text alone passes by
            holder.cross_attention_layers = [indices.index(i) for i in crossed if i in indices]
        if own:
            decoder._modules.update({name: deepcopy(x) for name, x in blocks.between(model).items()})
        if vocab is not None:
            head: Any = whole.get_output_embeddings()
            narrow = rows_of_head(head, vocab)
            _put(model, head, narrow)
            fresh.append((narrow, 0))
        return model, blocks, fresh


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


class View(Cache):
    """Gives the model's layers our cache for one pass."""

    def __init__(self, cache: KVCache | LayerView, blocks: Blocks | None = None) -> None:
        super().__init__(layers=[])
        self._cache = cache
        self._place = {number: place for place, number in enumerate(blocks.numbers if blocks else ())}

    @property
    def stored(self) -> bool:
        """Whether keys and values have storage; a pass that makes it is not compiled."""
        return isinstance(self._cache, LayerView) or bool(self._cache.stored)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        place = self._place.get(layer_idx, layer_idx)
        self._cache.write(place, key_states, value_states)
        return self._cache.read(place)

    def of(self, layer: int) -> "View":
        """The view for one compiled layer."""
        if not isinstance(self._cache, KVCache):
            return self
        return View(freed_view(self._cache.layer(self._place[layer])))

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions are explicit, and nothing may be derived from this

    def __len__(self) -> int:
        return self._cache.layers


class Earlier(Cache):
    """Keys and values of each layer [B, heads, S, D], if any, that a pass reads before its own. Nothing is
    written in place, so gradients flow."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        super().__init__(layers=[])
        self._layers = layers
        self.own: list[tuple[Tensor, Tensor]] = []  # keys and values of the pass's rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.own.append((key_states, value_states))
        if not self._layers:
            return key_states, value_states
        keys, values = self._layers[layer_idx]
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


class CompiledForward:
    """Replaces the `forward` of a module, of this number among its model's layers, by compiled graphs, which
    all modules of its class share."""

    def __init__(self, module: nn.Module, device: torch.device, layer: int = 0) -> None:
        pack_for_graphs(module)
        self._plain, self._layer = module.forward, layer
        self._compiled = compiled(module.forward, device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, View) and not x.stored for x in (*args, *kwargs.values())):
            return self._plain(*args, **kwargs)
        return self._compiled(*map(self._own, args), **{name: self._own(x) for name, x in kwargs.items()})

    def _own(self, x: Any) -> Any:
        """An argument as the graphs take it: tensors of any size, and this layer's part of the cache."""
        if isinstance(x, Tensor):
            return freed(x, *range(x.dim()))
        if isinstance(x, View):
            return x.of(self._layer)
        return tuple(map(self._own, x)) if type(x) is tuple else x


class Taps:
    """The taps of one model, whose `decoder` says the final states, named as `Drafter.taps` says. Hugging
    Face's own recorder keeps the states of all layers, by hooks inside them, which cannot be compiled."""

    def __init__(self, decoder: nn.Module, blocks: Blocks) -> None:
        self._decoder, self._blocks = decoder, blocks
        self._states, self._watched = dict[str, Tensor](), set[str]()

    def watch(self, taps: Sequence[str]) -> None:
        """Let the next pass leave its states. Raises ValueError for a tap that there is not."""
        states = self._states
        for tap in set(taps) - self._watched:

            def after(module: nn.Module, args: Any, out: Any) -> None:
                states[FINAL] = out.last_hidden_state

            def before(module: nn.Module, args: Any, kwargs: Any, tap: str = tap) -> None:
                states[tap] = args[0] if args else kwargs["hidden_states"]

            if tap == FINAL:
                self._decoder.register_forward_hook(after)
            elif not tap.startswith(CACHE):  # the cache is read after the pass
                block = self._blocks[block_of(tap, len(self._blocks))]
                block.register_forward_pre_hook(before, with_kwargs=True)
            self._watched.add(tap)
        states.clear()  # of a pass that failed

    def take(self, taps: Sequence[str], cache: KVCache) -> Features:
        """What the pass left, side by side; None without taps."""
        for tap in taps:
            if tap in self._states and self._states[tap].dim() > 3:
                raise ValueError(
                    f"this target hands on several streams of states at {tap!r}, which no head can read: "
                    "take a drafter that reads the final states, such as eagle"
                )
        features = side_by_side(taps, self._states, cache, len(self._blocks))
        self._states.clear()
        return features
