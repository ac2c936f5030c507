"""Products with packed weights, which compiled passes use on the CPU, are those of plain ones."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import SmolLM3Config

import tiny
from slipstream.drafters.fasteagle import FastEagleConfig, FastEagleHead
from slipstream.kernels.compiled import backend_for, freed, graph_of
from slipstream.kernels.weight_packing import HAS_BF16, packing


class Layers(nn.Module):
    """Three linear layers of one input, side by side, the second without a bias; and one of what the last of
    them says."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, n, bias=n != 16, dtype=dtype) for n in (64, 16, 24))
        self.after = nn.Linear(24, 8, dtype=dtype)
        self.requires_grad_(False)

    def forward(self, x, n):
        said = [layer(x) for layer in self.layers[:n]]
        return [*said, self.after(said[-1])] if n == 3 else said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_linear_layers_side_by_side(dtype):
    """Weights in the wrong order, a bias that is left out, a copy that was packed for other neighbours or
    modules."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = partial(packing, then=lambda module, inputs: module)
    made = torch.compile(Layers.forward, backend=backend)
    modules, tolerance = (
        [Layers(dtype), Layers(dtype)],
        {torch.float64: 0.0, torch.float32: 1e-5, torch.bfloat16: 0.05},
    )
    for rows in (1, 2, 9):
        x = torch.randn(1, rows, 32).to(dtype)
        for module in modules:
            for n in (3, 1, 3):  # all of them, and the first one alone
                for ours, theirs in zip(made(module, freed(x), n), module(x, n), strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance[dtype])
        read_plain = dtype == torch.float64 or (dtype == torch.bfloat16 and not HAS_BF16 and rows == 1)
        assert [len(getattr(m.layers[0].weight, "packed", [])) for m in modules] == [
            0 if read_plain else 2
        ] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
@torch._inductor.config.patch(fx_graph_cache=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_takes_packed_weights_of_every_layout(dtype):
    """Tiles were lowered as oneDNN's layout, so that compiled Medusa in bf16 ended in an error."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Layers(dtype)
    made = torch.compile(Layers.forward, backend=packing)
    for x in torch.randn(2, 1, 32), torch.randn(2, 3, 32):
        for ours, theirs in zip(made(module, freed(x.to(dtype)), 3), module(x.to(dtype), 3), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)


class Halves(nn.Module):
    """A product, and for two rows another one behind a break of the graph. Adds its own number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.layer = number, nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x, *, plus=0.0):
        x = self.layer(x) + self.number + plus
        if x.shape[1] == 2:
            torch._dynamo.graph_break()
            x = self.layer(x)
        return [x]


def test_a_graph_without_checks_is_the_one_that_dynamo_takes():
    """A graph of other rows or another kind, weights or numbers of another module, a broken graph without its
    second half."""
    torch._dynamo.reset()
    backend, other = (partial(packing, then=lambda module, inputs: module) for _ in range(2))
    modules = [Halves(5), Halves(7)]
    x = torch.randn(1, 3, 4)
    assert graph_of(modules[0].forward, backend, (x,), {}) is None
    with torch.no_grad(), torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        for rows in (3, 4, 2):
            for module in modules:
                torch.compile(module.forward, backend=backend)(freed(x[:, :1].repeat(1, rows, 1)), plus=1.0)
        graph = graph_of(modules[0].forward, backend, (freed(x),), {"plus": 1.0})
        for module in modules:
            torch.testing.assert_close(graph(module, x, plus=1.0), module(x, plus=1.0), rtol=0, atol=1e-5)
        assert graph_of(modules[0].forward, other, (freed(x),), {"plus": 1.0}) is None
        assert graph_of(modules[0].forward, backend, (freed(x),), {"plus": 2.0}) is None
        assert graph_of(modules[0].forward, backend, (freed(x[:, :2].clone()),), {"plus": 1.0}) is None
    assert graph_of(lambda x: x, backend, (x,), {}) is None


def test_layers_that_differ_in_a_number_share_no_graph():
    """SmolLM3 turns the keys of three layers in four, as a number of each says: the fourth took the graph of
    the first, and its text was another model's."""
    shape = tiny.GROUPED | {"num_hidden_layers": 4, "pad_token_id": 0}
    model = tiny.build(SmolLM3Config(**shape, no_rope_layers=[1, 1, 1, 0]))
    backends = [backend_for(layer) for layer in model.model.layers]
    assert backends[0] is backends[1] is backends[2]
    assert backends[3] is not backends[0]


def test_layers_that_differ_in_an_adapter_or_a_hook_share_no_graph():
    """PEFT keeps the adapter in use in an attribute of its own, and factors in dictionaries: a target with
    another one took the graph of the first."""

    def layer(**more):
        made = nn.Sequential(nn.Linear(4, 4))
        vars(made[0]).update({"_active_adapter": ["one"], "scaling": {"one": 2.0}} | more)
        return made

    hooked = layer()
    hooked[0].register_forward_hook(lambda module, args, out: 0 * out)
    others = [layer(_active_adapter=["two"]), layer(scaling={"one": 1.0}), hooked]
    first, same, *rest = map(backend_for, [layer(), layer(), *others])
    assert first is same
    assert len({id(first), *map(id, rest)}) == 4


def test_heads_of_one_kind_share_a_backend_and_no_others_do():
    """A graph of another head whose weights have the same shapes: Dynamo would not look."""
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "taps": ("input of block 0", "final"),
        "depth": 2,
    }
    changes: list[dict[str, Any]] = [{}, {}, {"cascade": False}, {"hidden_act": "gelu"}]
    heads = [FastEagleHead(FastEagleConfig(**sizes | change)) for change in changes]
    first, same, *others = (backend_for(head, nn.Embedding(4, 8)) for head in heads)
    assert first is same
    assert first not in [*others, backend_for(heads[0], nn.Embedding(5, 8))]
