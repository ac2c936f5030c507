"""Captured rounds, with a tape in place of a CUDA graph: the same operators, in order, on the same memory, no
others."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock
from weakref import ref

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
from slipstream.core.sampling import Sampling, rows_of
from slipstream.core.tree_spec import PLAIN, TreeSpec
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine import cuda_graphs as capture, engine
from slipstream.engine.generate import Job
from slipstream.engine.request import Request
from slipstream.kernels import ops as kernels
from slipstream.targets import HFTarget, linear as products
from slipstream.targets.executor_torch import Layers

DRAFTERS = {
    name: make for name, make in tiny.DRAFTERS.items() if name not in ("oracle", "random, probes, memory")
}
PROMPTS = tiny.prompts(7, 13, 40)
NEW = 30  # past a multiple of the span below
pytestmark = pytest.mark.usefixtures("unchecked")  # shapes and types are checked by the exactness suite


WAIT = (  # on a GPU, which a capture does not allow
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._unique2.default,
)


class Host(TorchFunctionMode):
    """Numbers from the host, for which a GPU waits, too."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, torch.from_numpy), (
            "a captured round asks the host"
        )
        return function(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Records operators as they run; `replay` runs them again and fills the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        assert operator not in WAIT, "a captured round looks at a value"
        if operator in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), "a captured round counts a mask"
        out = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for operator, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(operator(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def tapes(monkeypatch):
    made: list[Tape] = []

    def record(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        function()  # as outside of a CUDA graph
        made.append(Tape())
        with Host(), made[-1]:
            return function(), made[-1].replay

    tiny.replace_is_host(monkeypatch, lambda x: False)
    monkeypatch.setattr(capture, "SPAN", 32)
    monkeypatch.setattr(engine, "recorder", lambda target: record)
    return made


def texts(target, drafter, prompts, rows) -> tiny.Texts:
    each = enumerate(zip(prompts, rows, strict=True))
    requests = [Request(prompt, row, NEW - 8 * i) for i, (prompt, row) in each]  # rows leave one by one
    Job(target, drafter, requests).run()
    return [request.tokens for request in requests]


@pytest.mark.parametrize("name", ["ngram", "hybrid", "eagle", "fasteagle", "glide", "draft model", "bita"])
def test_captured_rounds_may_grow_other_trees_in_turn(tapes, name, monkeypatch):
    """A capture that goes on from a state which another one, or a round that was not captured, has left
    behind."""
    target = tiny.target("llama")
    drafter = DRAFTERS[name](target, [])
    specs = [None, PLAIN, TreeSpec.parse("chain-2"), TreeSpec.parse("best-first-3x8")]

    def answer(specs, drafter) -> list[int]:
        made = engine.Engine(target, drafter)
        request = Request(PROMPTS[1], Sampling(temperature=0.8, seed=5))
        made.admit(request)
        for i in range(40):
            made.step(limit=1 if i % 7 == 6 else None, spec=specs[i % len(specs)])
        return request.tokens[:41]

    captured = answer(specs, drafter)
    monkeypatch.undo()
    assert captured == answer([None], Vanilla())
    assert len(tapes) > 8


@pytest.mark.parametrize(
    ("batch", "sampling"),
    [(1, Sampling()), (3, Sampling(temperature=0.8, top_p=0.9, seed=5))],
    ids=["T=0", "T=0.8"],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_captured_rounds_say_what_plain_decoding_says(tapes, name, sampling, batch, monkeypatch):
    """State that moves instead of staying put, a length or a choice that was baked in, a value that was
    looked at."""
    target, rows = tiny.target("llama"), rows_of(sampling, batch)
    drafter = DRAFTERS[name](target, [])
    captured = texts(target, drafter, PROMPTS[:batch], rows)
    monkeypatch.undo()
    assert captured == texts(target, Vanilla(), PROMPTS[:batch], rows)
    assert len(tapes) > 2  # two halves, more than once


@pytest.mark.parametrize("name", ["ngram", "eagle"])
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_described_layers_are_captured_without_compilation(tapes, name, family, monkeypatch):
    """As on a GPU, with torch operations in the place of Hugging Face's modules."""
    if not kernels.available():
        pytest.skip("there are no kernels, which read lists of keys")
    monkeypatch.setattr(products, "packs", lambda *_: False)
    target = HFTarget(tiny.build(tiny.FAMILIES[family]).float())
    assert target.decoder is not None
    assert isinstance(target.decoder._run.__self__, Layers)
    captured = texts(target, DRAFTERS[name](target, []), PROMPTS[:2], rows_of(Sampling(), 2))
    assert len(tapes) > 2
    monkeypatch.undo()
    assert captured == texts(target, Vanilla(), PROMPTS[:2], rows_of(Sampling(), 2))


def test_a_graph_keeps_what_it_reads(monkeypatch):
    """Else its memory is given to others: slots of a step's mask were, once another batch was read."""

    class Held:
        pass

    def function(held):
        return held

    for name in ("Stream", "CUDAGraph", "graph", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    held = Held()
    replay, known = capture.cuda_graph(partial(function, held))[1], ref(held)
    del held
    gc.collect()
    replay()
    assert known() is not None
    del replay
    assert known() is None
