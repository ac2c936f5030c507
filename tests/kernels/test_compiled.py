"""Products of one input in a graph, by torch and by our kernels for GPUs, become one."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.kernels import compiled


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> Tensor:
    full = weight if scales is None else (weight * scales[:, None]).to(x.dtype)
    return F.linear(x, full, bias)


def _linears(x: Tensor, weights: list[Tensor], scales: list[Tensor], exact: bool) -> Tensor:
    each = zip(weights, scales or [None] * len(weights), strict=True)
    return torch.cat([_linear(x, weight, None, scale) for weight, scale in each], -1)


# On the CPU the operations for GPUs are torch's.
LIBRARY = torch.library.Library("slipstream", "FRAGMENT")
if find_spec("triton"):
    import slipstream.kernels.triton  # noqa: F401
else:
    LIBRARY.define("linear_cuda(Tensor x, Tensor weight, Tensor? bias, Tensor? scales) -> Tensor")
    LIBRARY.define("linears_cuda(Tensor x, Tensor[] weights, Tensor[] scales, bool exact) -> Tensor")
    torch.library.register_fake("slipstream::linear_cuda", _linear, lib=LIBRARY)
    torch.library.register_fake("slipstream::linears_cuda", _linears, lib=LIBRARY)
LIBRARY.impl("linear_cuda", _linear, "CPU")
LIBRARY.impl("linears_cuda", _linears, "CPU")


class Block(nn.Module):
    """Three products of one input, and one of what they say."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = (8, 4, 4, 16)
        self.kind = kind
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(n, 8 if i < 3 else 16).to(dtype)) for i, n in enumerate(sizes)
        )
        self.bias = nn.Parameter(torch.randn(8).to(dtype)) if kind == "bias" else None
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(n)) for n in sizes)

    def product(self, x: Tensor, i: int) -> Tensor:
        bias = self.bias if i == 0 else None
        if self.kind == "ours":
            return torch.ops.slipstream.linear_cuda(x, self.weights[i], bias, None)
        if self.kind == "8 bits":
            return torch.ops.slipstream.linear_cuda(x, self.weights[i], None, self.scales[i])
        return F.linear(x, self.weights[i] * 1 if self.kind == "computed" else self.weights[i], bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        q, k = self.product(x, 0), self.product(x, 1)
        if self.kind == "in place":
            x.add_(1)
        return self.product(torch.cat([q.sin(), k, self.product(x, 2)], -1), 3)


def calls_of(block: Block, x: Tensor) -> tuple[list[str], Tensor]:
    """The products in a block's graph once it was rewritten, and what it says."""
    names: list[str] = []

    def backend(module, inputs):
        compiled.merge(module.graph)
        module.recompile()
        names.extend(str(getattr(n.target, "__name__", n.target)) for n in module.graph.nodes)
        return module.forward

    torch.compiler.reset()
    with torch.inference_mode():
        said = torch.compile(block, backend=backend)(x)
    return [name for name in names if "linear" in name], said


@pytest.mark.parametrize(
    ("kind", "dtype", "left"),
    [
        ("torch", torch.bfloat16, 2),
        ("ours", torch.bfloat16, 2),
        ("8 bits", torch.float16, 2),
        ("bias", torch.bfloat16, 3),  # it stays as it is, the others are merged
        ("computed", torch.bfloat16, 4),
        ("in place", torch.bfloat16, 4),
        ("torch", torch.float32, 4),
    ],
)
def test_products_of_one_input_become_one(kind, dtype, left):
    """Another product's part; what was read before it changed; a bias or scales that are lost."""
    torch.manual_seed(0)
    block, x = Block(kind, dtype), torch.randn(2, 3, 8).to(dtype)
    with torch.inference_mode():
        want = block(x.clone())
    names, said = calls_of(block, x.clone())
    assert len(names) == left
    assert torch.equal(said, want)


@pytest.mark.parametrize(
    ("device", "capability", "hip", "said"),
    [
        ("cpu", (9, 0), None, False),
        ("cuda", (9, 0), None, True),
        ("cuda", (7, 5), None, False),  # its programs have 64 KiB
        ("cuda", (9, 4), "6.2", False),
    ],
)
def test_a_gpu_must_hold_a_tile(device, capability, hip, said, monkeypatch):
    """A compiled target on an older GPU that fails where it only was slower."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(compiled, "has_kernels", lambda device, dtype: True)
    assert compiled.merges(torch.device(device)) is said
