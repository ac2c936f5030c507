"""A pass without the model's own Python: its modules, called as the model was seen to call them.

Between its modules a Hugging Face model does little, and takes long for it while weights pass through a
processor's caches. Where all layers run in one call, and all that goes into a module comes from outside or
out of another one, calling the modules is the whole pass.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.targets.inside import LOOKS, TOGETHER, Blocks, View
from slipstream.targets.part import decoder_of

WATCHED = 3  # passes of a kind: in the first ones layers are compiled, and run one by one
GIVEN = ("tokens", "positions", "mask", "view")


class Made(NamedTuple):
    """What a call says, or a part of that where it is a tuple; of the layers, what the last one says."""

    call: int
    part: int | None = None


class Fixed(NamedTuple):
    """A number, a word, a switch or nothing."""

    value: Any


class Call(NamedTuple):
    """A call of a module. What it takes is a name of `GIVEN`, `Made`, `Fixed` or a tuple of these."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Known(NamedTuple):
    """A pass: its calls, and which of what they say are the logits and the final states."""

    calls: list[Call]
    logits: Any
    final: Any


class Straight:
    """Passes of one model.

    Args:
        model: a causal LM.
        blocks: its layers.
        between: its decoder's other modules.
    """

    def __init__(self, model: Any, blocks: Blocks, between: Sequence[nn.Module]) -> None:
        self._model, self._blocks, self._first = model, blocks, blocks[0]
        self._modules = [model.get_input_embeddings(), *between, self._first, model.get_output_embeddings()]
        self._decoder = decoder_of(model, blocks)
        passed_over = model, self._decoder, *blocks.children()
        self._hooks = [hooks for m in passed_over for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        # By kind of pass, between which Python may see a difference; and how many of each were watched.
        self._known, self._watched = dict[Hashable, Known](), Counter[Hashable]()

    def run(self, tokens: Tensor, positions: Tensor, mask: Any, view: View) -> Tensor | None:
        """A pass: its logits; None if it has to be the model's own."""
        others = any(not hasattr(hook, LOOKS) for hooks in self._hooks if hooks for hook in hooks.values())
        if others or tokens.numel() > TOGETHER or not view.stored:
            return None
        given, kind = (tokens, positions, mask, view), (len(tokens) == 1, tokens.shape[1] == 1)
        if kind not in self._known and self._watched[kind] < WATCHED:
            self._watched[kind] += 1
            if (learned := self._learned(given)) is not None:
                self._known[kind] = learned
        known = self._known.get(kind)
        return None if known is None else self._run(given, known)

    def _run(self, given: Sequence[Any], known: Known) -> Tensor | None:
        values: dict[Any, Any] = dict(zip(GIVEN, given, strict=True))
        view: View = values["view"]
        view.straight = True
        for i, (module, args, kwargs) in enumerate(known.calls):
            made = module(
                *[_value(x, values) for x in args], **{name: _value(x, values) for name, x in kwargs.items()}
            )
            if module is self._first:
                if not view.says:
                    return None
                made = view.says[-1]
            values[Made(i)] = made
        view.final, logits = _value(known.final, values), _value(known.logits, values)
        return logits

    def _learned(self, given: Sequence[Any]) -> Known | None:
        """Watch a pass of the model's own. Its calls are known if on their own they say the same."""
        tokens, positions, mask, view = given
        with self._watching() as (calls, finals):
            out = self._model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=view,
                use_cache=True,
            )
        if view.together is None or not view.together.proven:
            return None
        sources: list[tuple[Any, Any]] = [(value, name) for name, value in zip(GIVEN, given, strict=True)]
        known = Known([], None, None)
        for i, (module, args, kwargs, made) in enumerate(calls):
            taken = _source(args, sources), {name: _source(x, sources) for name, x in kwargs.items()}
            if None in (taken[0], *taken[1].values()):
                return None
            known.calls.append(Call(module, *taken))
            made = view.says[-1] if module is self._first else made
            sources += [(x, Made(i, part)) for part, x in enumerate(made if type(made) is tuple else ())]
            sources.append((made, Made(i)))
        known = known._replace(logits=_source(out.logits, sources), final=_source(finals[0], sources))
        if None in known or (logits := self._run([*given[:3], again := view.again()], known)) is None:
            return None
        same = torch.equal(logits, out.logits) and torch.equal(again.final, finals[0])
        return known if same else None

    @contextmanager
    def _watching(self) -> Iterator[tuple[list[tuple[Any, ...]], list[Tensor]]]:
        """Inside, what is called, what it takes and says, and the final states."""
        calls, finals = list[tuple[Any, ...]](), list[Tensor]()

        def called(module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
            calls.append((module, args, kwargs, made))

        def ended(decoder: nn.Module, args: Any, made: Any) -> None:
            finals.append(made.last_hidden_state)

        with ExitStack() as hooks:
            for module in self._modules:
                hooks.callback(module.register_forward_hook(called, with_kwargs=True).remove)
            hooks.callback(self._decoder.register_forward_hook(ended).remove)
            yield calls, finals


def _source(x: Any, sources: Sequence[tuple[Any, Any]]) -> Any:
    """Where a value comes from; None: from elsewhere."""
    for value, source in sources:
        if x is value or (isinstance(x, Tensor) and isinstance(value, Tensor) and _same(x, value)):
            return source
    if type(x) is tuple:
        parts = tuple(_source(part, sources) for part in x)
        return None if None in parts else parts
    return Fixed(x) if x is None or isinstance(x, (bool, int, float, str)) else None


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)


def _value(source: Any, values: dict[Any, Any]) -> Any:
    if isinstance(source, Fixed):
        return source.value
    if isinstance(source, Made):
        made = values[Made(source.call)]
        return made if source.part is None else made[source.part]
    return tuple(_value(x, values) for x in source) if type(source) is tuple else values[source]
