"""A copy of a model whose linear layers, embedding and LM head have weights of 8 or 4 bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from slipstream.files import install
from slipstream.kernels import ops
from slipstream.targets import quantized
from slipstream.targets.shadow_model import shadow_of

NEEDS = "float32, bfloat16 or, on a GPU, float16, and a C++ compiler or, on a GPU, Triton"
INT4_LAYOUT, GROUP = "tile_packed_to_4d", 32  # torchao's: how a GPU reads 4 bits; weights that share a scale


def is_quantised(model: nn.Module) -> bool:
    """Whether a model's weights are quantised already, by us or by anyone else."""
    config = getattr(model, "config", None)
    ours = any(isinstance(module, quantized.Quantised) for module in model.modules())
    return ours or quantized.of_torchao(model) or getattr(config, "quantization_config", None) is not None


def quantised(model: PreTrainedModel, kind: str, name: str) -> PreTrainedModel:
    """A copy of a model with weights of 8 bits, or with linear layers of 4 bits, but embedding and LM head of
    8. What no linear layer holds, such as experts, is shared with the model, which stays as it is. On a GPU
    the embedding stays as it is, too, and states are not rounded. Raises ValueError: the kind is unknown, the
    model is quantised already, or there are no kernels for it."""
    if kind not in quantized.KINDS:
        raise ValueError(f"Unknown quantisation: {kind!r}. Available: {', '.join(quantized.KINDS)}")
    if is_quantised(model):
        raise ValueError(f"target {name} is quantised already: leave quantize={kind!r} out")
    if not ops.load(model.device, model.dtype):
        how = f"{str(model.dtype).removeprefix('torch.')} on {model.device}"
        raise ValueError(f"target {name} cannot be {kind} in {how}: that takes {NEEDS}")
    copy = shadow_of(model)
    if model.device.type != "cpu":
        return on_gpu(copy, kind, name)
    embedding: Any = copy.get_input_embeddings()
    head: Any = copy.get_output_embeddings()
    finer = (id(embedding.weight), id(head.weight))  # rounded to 4 bits they cost a model most
    stored: dict[int, tuple[Tensor, Tensor, int, torch.dtype]] = {}  # a weight may be embedding and LM head

    def replacement(module: Any) -> nn.Module | None:
        linear = is_linear(module)
        if not linear and module is not embedding:
            return None
        key = id(module.weight)
        if key not in stored:
            weight = (module.weight.t() if isinstance(module, Conv1D) else module.weight).detach()
            if kind == "int8" or key in finer:
                whole, scales = ops.whole_numbers(weight)
                packed = ops.int8_tiles(whole), scales
            else:
                packed = ops.int4_tiles(weight)
            stored[key] = *packed, weight.shape[1], model.dtype
        if linear:
            return quantized.QuantisedLinear(*stored[key], module.bias)
        factor = getattr(module, "embed_scale", None)
        return quantized.QuantisedEmbedding(*stored[key], None if factor is None else torch.as_tensor(factor))

    _replace(copy, replacement)
    return copy


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a product with its weight. Subclasses may do more, such as routers of experts."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward, FalconLinear.forward)


def _replace(model: nn.Module, replacement: Callable[[Any], nn.Module | None]) -> None:
    """Replace a model's modules. None: a module stays."""
    for module in list(model.modules()):
        for child, part in module.named_children():
            if (new := replacement(part)) is not None:
                setattr(module, child, new)


def on_gpu(copy: PreTrainedModel, kind: str, name: str) -> PreTrainedModel:
    """Replace a copy's linear layers in place: by those of 8 bits, or by torchao's of 4 bits with a scale for
    each `GROUP`. The LM head has 8, and so has what groups do not divide. Raises ValueError where torchao
    is needed and not there."""
    head = copy.get_output_embeddings()

    def turned(part: Any) -> nn.Module | None:  # GPT-2's, whose weight lies [K, N], as one of torch's
        return (
            quantized.linear_of(part.weight.t().contiguous(), part.bias) if isinstance(part, Conv1D) else None
        )

    _replace(copy, turned)
    if kind == "int4":
        try:
            from torchao.quantization import Int4WeightOnlyConfig, quantize_
        except ImportError as error:
            raise ValueError(
                f"target {name} cannot be int4 on {copy.device} without torchao: {install('gpu')}"
            ) from error
        four = Int4WeightOnlyConfig(GROUP, set_inductor_config=False, int4_packing_format=INT4_LAYOUT)
        quantize_(copy, four, lambda m, _: is_linear(m) and m is not head and m.in_features % GROUP == 0)

    def eight_bits(part: Any) -> nn.Module | None:
        if not is_linear(part) or quantized.parts_of(part.weight):
            return None
        whole = ops.whole_numbers(part.weight.detach())
        return quantized.WholeLinear(*whole, part.in_features, copy.dtype, part.bias)

    _replace(copy, eight_bits)
    return copy
