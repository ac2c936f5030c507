"""A Hugging Face model's twin, and what replaces its parts: attention, cache, compiled modules' `forward`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import dropwhile, pairwise, takewhile
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache

from slipstream.compiled import Backend, backend_for, compiled, freed, graph_of
from slipstream.core.cache import KVCache, LayerView
from slipstream.kernels import Layers
from slipstream.packing import gathering

Model = TypeVar("Model", bound=nn.Module)
LOOKS = "looks_at_took"  # marks a hook of ours, which is not needed where `View.took` holds what it would see
TOGETHER = 64  # rows at most of which the states of all layers are kept at once


def twin(model: Model) -> Model:
    """The same model in eval mode: new modules over the same memory.

    The two share changes of weights in place, and nothing else: no module, mode, configuration or gradient.
    """
    weights = {  # quantised weights have types of their own, which carry more than numbers: they are shared
        id(p): nn.Parameter(p.detach(), requires_grad=False) if type(p) is nn.Parameter else p
        for p in model.parameters()
    }
    return deepcopy(model, {**weights, **{id(buffer): buffer for buffer in model.buffers()}}).eval()


class Blocks(nn.ModuleList):
    """A model's layers, which a pass goes through without those that another layer has spoken for.

    Args:
        numbers: by which the layers ask for their part of a cache, where they are some of a larger model's.
    """

    def __init__(self, layers: Iterable[nn.Module], numbers: Sequence[int] | None = None) -> None:
        super().__init__(layers)
        self.spoken_for: set[nn.Module] = set()
        self.numbers = range(len(self)) if numbers is None else numbers

    def __getitem__(self, index: Any) -> Any:
        """All layers are these layers: Hugging Face slices them in each pass."""
        every = isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1)
        return self if every else super().__getitem__(index)

    def __iter__(self) -> Iterator[nn.Module]:
        for block in super().__iter__():
            if block in self.spoken_for:
                self.spoken_for.remove(block)
            else:
                yield block


class View(Cache):
    """Gives the model's layers our cache for one pass.

    Args:
        blocks: the model's layers in their order.

    Attributes:
        first: the pass's first call of each kind of compiled layer.
        ahead: what layers that have run already took and say.
        together: all layers, if they ran in one call and each so far has taken what the one before says.
        says: what each of the layers says that ran in the last call of several.
        straight: the first layer alone is called (`Straight`); `says` is empty unless all ran with it.
        final: the final states of a pass that is straight.
        spoken_for: layers that need not be called.
        took: what these took.
    """

    def __init__(self, cache: KVCache | LayerView, blocks: Blocks | None = None) -> None:
        super().__init__(layers=[])
        self._cache, self.blocks, self.spoken_for = cache, blocks or (), set[nn.Module]()
        self._place = {number: place for place, number in enumerate(blocks.numbers if blocks else ())}
        self.first: dict[Backend, First | None] = {}
        self.ahead: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.together: Together | None = None
        self.says, self.straight = list[Tensor](), False
        self.final: Tensor | None = None
        self.took: dict[nn.Module, Tensor] = {}
        if blocks is not None:
            blocks.spoken_for = self.spoken_for

    def pop(self, block: nn.Module, took: Tensor) -> Tensor | None:
        """What a layer that has run already says, if it took these states then."""
        states, says = self.ahead.pop(block, (None, None))
        if states is not took:
            self.together = None
            self.spoken_for.clear()
        elif self.together is not None and not self.ahead:
            self.together.proven = True
        return says if states is took else None

    def again(self) -> "View":
        """The view for the same pass, made another time."""
        assert isinstance(self._cache, KVCache) and isinstance(self.blocks, Blocks)
        return View(self._cache, self.blocks)

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
        return View(self._cache.layer(self._place[layer])) if isinstance(self._cache, KVCache) else self

    def stored_of(self, layers: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """All stored keys and values of some layers."""
        assert isinstance(self._cache, KVCache)
        keys, values = (stored.unbind(0) for stored in self._cache.stored)  # a call for all is quicker
        places = [self._place[layer] for layer in layers]
        return [keys[place] for place in places], [values[place] for place in places]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions are explicit, and nothing may be derived from this

    def __len__(self) -> int:
        return self._cache.layers


class Behind(Cache):
    """Keys and values that a pass reads before its own. Nothing is written in place, so gradients flow.

    Args:
        layers: keys and values of each layer [B, heads, S, D]; none by default.
    """

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


class First(NamedTuple):
    """The first call of a kind of layer in a pass, whose graph later layers take without Dynamo's checks.

    Attributes:
        given: its arguments, with `View` in the place of the view, and the names of those that have one.
        tensors: the ids of all tensors among them.
        graph: see `graph_of`.
    """

    given: tuple[Any, ...]
    tensors: frozenset[int]
    graph: Any

    @classmethod
    def of(cls, given: tuple[Any, ...], graph: Callable[..., Any] | None) -> "First | None":
        """None where there is no graph, or other arguments than values that nobody can change."""
        tensors = [id(x) for x in _leaves(given) if isinstance(x, Tensor)]
        fixed = all(isinstance(x, (Tensor, bool, str, type, type(None))) for x in _leaves(given))
        once = len(set(tensors)) == len(tensors)
        return None if graph is None or not (fixed and once) else cls(given, frozenset(tensors), graph)

    def states(self, given: tuple[Any, ...]) -> Tensor | None:
        """The states among other arguments of which Dynamo would find the same: all are the same objects, but
        for one tensor of the same layout that was not among them. None: they differ in more."""
        changed = [(x, y) for x, y in zip(given, self.given, strict=False) if x is not y]
        if len(given) != len(self.given) or len(changed) != 1:
            return None
        (new, old), *_ = changed
        return new if id(new) not in self.tensors and _layout(new) == _layout(old) != () else None


def _leaves(given: tuple[Any, ...]) -> Iterator[Any]:
    for x in given:
        yield from _leaves(x) if type(x) is tuple else (x,)


def _layout(x: Any) -> tuple[Any, ...]:
    return (x.shape, x.stride(), x.dtype) if type(x) is Tensor else ()


@dataclass
class Together:
    """Layers that run in one call.

    Attributes:
        proven: in an earlier pass each took what the one before says, with the same other arguments. So the
            model does nothing between them, and they need not be called.
    """

    layers: list["StandIn"]
    run: Layers
    proven: bool = False


class StandIn:
    """Replaces the `forward` of a module by compiled graphs, which all modules of its kind share."""

    def __init__(self, module: nn.Module, device: torch.device, layer: int = 0) -> None:
        self.plain, self._module = module.forward, module
        self._backend = backend_for(module)
        self._compiled = compiled(module.forward, device, self._backend)
        self._layer = layer
        # By graph and number: the layers that run in one call from this one on.
        self._together: dict[tuple[CodeType, int], Together] = {}
        self._alike: tuple[Any, list[StandIn]] = (None, [])  # see `_behind`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        view = next((x for x in (*args, *kwargs.values()) if isinstance(x, View)), None)
        if view is not None and not view.stored:
            return self.plain(*args, **kwargs)
        # The view holds its first calls: a call that held the view would keep its tensors alive.
        given = tuple(View if x is view else x for x in (*args, *kwargs.values(), *kwargs))
        first = None if view is None else view.first.get(self._backend)
        if view is not None and first is not None and (states := first.states(given)) is not None:
            says = view.pop(self._module, states)
            return self._run(first.graph, view, args, kwargs) if says is None else says
        owned = tuple(map(self._own, args)), {name: self._own(x) for name, x in kwargs.items()}
        graph = graph_of(self.plain, self._backend, *owned)
        says = self._compiled(*owned[0], **owned[1]) if graph is None else None
        if view is not None and not view.straight and self._backend not in view.first:
            graph = graph or graph_of(self.plain, self._backend, *owned)
            view.first[self._backend] = First.of(given, graph)
        if says is None and view is not None:
            return self._run(graph, view, args, kwargs)
        return graph(self._module, *owned[0], **owned[1]) if says is None else says

    def _run(self, graph: Any, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this layer. Where its graph is one call, the layers right behind it that share the graph run in
        the same call, for the case that each takes what the one before says: Python is slow while weights
        pass through a processor's caches."""
        states = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        behind = self._behind(view) if states.shape[:-1].numel() <= TOGETHER else [self]
        with gathering() as calls:
            says = self._alone(graph, view, args, kwargs)
            key = graph.__code__, len(behind)
            known = self._together.get(key)
            if calls and (known is None or known.layers != behind):
                for each in behind[1:]:
                    each._alone(graph, view, args, kwargs)
                known = self._together[key] = Together(behind, Layers(calls))
        if not calls or known is None:
            return says
        said = view.says = known.run(calls[0], *view.stored_of([each._layer for each in behind]))
        if view.straight:
            if not known.proven or len(behind) < len(view.blocks):
                view.says = []
            view.took = {each._module: took for each, took in zip(behind, [states, *said], strict=False)}
            return said[0]
        view.together = known if len(behind) == len(view.blocks) else None
        called = [i for i, each in enumerate(behind) if i == 0 or not known.proven or looked_at(each._module)]
        for i, after in pairwise([*called, len(behind)]):
            view.ahead[behind[i]._module] = said[i - 1] if i else states, said[after - 1]
            for j in range(i + 1, after):
                view.spoken_for.add(behind[j]._module)
                view.took[behind[j]._module] = said[j - 1]
        return view.pop(self._module, states)

    def _behind(self, view: View) -> list["StandIn"]:
        """This layer and those right behind it that share its graphs."""
        if self._alike[0] is view.blocks:
            return self._alike[1]
        blocks = dropwhile(lambda block: block is not self._module, view.blocks)
        forwards: Iterator[Any] = (block.forward for block in blocks)
        alike = takewhile(lambda forward: getattr(forward, "_backend", None) is self._backend, forwards)
        self._alike = view.blocks, list(alike) or [self]
        return self._alike[1]

    def _alone(
        self, graph: Callable[..., Any], view: View, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a graph says of this layer's module and its part of the cache."""
        mine = view.of(self._layer)
        args = tuple(mine if x is view else x for x in args)
        return graph(self._module, *args, **{name: mine if x is view else x for name, x in kwargs.items()})

    def _own(self, x: Any) -> Any:
        """An argument as the graphs take it: tensors of any size, and this layer's part of the cache."""
        if isinstance(x, Tensor):
            return freed(x, *range(x.dim()))
        if isinstance(x, View):
            return x.of(self._layer)
        return tuple(map(self._own, x)) if type(x) is tuple else x


def looked_at(module: nn.Module) -> bool:
    """Whether someone looks at what a module takes or says, and not at `View.took`."""
    hooks = module._forward_pre_hooks, module._forward_hooks
    return any(hooks) and not all(hasattr(hook, LOOKS) for each in hooks for hook in each.values())


def compile_forward(module: nn.Module, device: torch.device, layer: int = 0) -> None:
    """Run a module as a compiled graph from now on."""
    module.forward = StandIn(module, device, layer)
