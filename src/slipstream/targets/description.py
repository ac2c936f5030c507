"""A model's layers as a description, which is read from Hugging Face's configuration and modules. Families of
models differ in little: norms and where they stand, biases, rotary positions, windows, activations, merged
projections."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.machine import available_memory
from slipstream.targets import decoder, linear
from slipstream.targets.decoder import (
    Decoder,
    DecoderConfig,
    Description,
    Layer,
    Undescribed,
    Weights,
    eps_of,
)
from slipstream.targets.executor_torch import Layers
from slipstream.targets.shadow_model import Blocks, CompiledForward, Taps

BEFORE = "input_layernorm", None, "post_attention_layernorm", None
SPLIT = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
HEADS = "q_norm", "k_norm"
PANEL = 32  # columns of a weight in tiles


@dataclass(frozen=True)
class Family:
    """What the layers of some model types are made of, by the names of their modules."""

    norms: tuple[str | None, ...] = BEFORE  # as in `Layer`
    read: tuple[str, ...] = SPLIT  # queries, keys and values, or all of them
    up: tuple[str, ...] = GATED  # gate and up of an MLP, both in one, or up alone where it is not `gated`
    down: str = "down_proj"
    gated: bool = True
    more: float = 0.0  # what a norm's weight lacks, 1 where it is stored as its distance from 1
    attention: str = "self_attn"
    o: str = "o_proj"
    final: str = "norm"  # after all layers
    parallel: bool = False  # the MLP always reads what attention reads
    by_head: bool = False  # as in `DecoderConfig`, like `pairs` and `clamped`
    pairs: bool = False
    clamped: bool = False


LLAMA = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "stablelm")
ROUTED = ("mixtral", "qwen3_moe", "olmoe")
AFTER = "post_attention_layernorm", "post_feedforward_layernorm"
AROUND = "input_layernorm", AFTER[0], "pre_feedforward_layernorm", AFTER[1]
FAMILIES = {
    **dict.fromkeys((*LLAMA, *ROUTED), Family()),
    **dict.fromkeys(("olmo2", "olmo3"), Family((None, AFTER[0], None, AFTER[1]))),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family(AROUND, more=1.0)),
    "phi3": Family(read=("qkv_proj",), up=("gate_up_proj",)),
    "starcoder2": Family(up=("c_fc",), down="c_proj", gated=False),
    **dict.fromkeys(
        ("cohere", "cohere2"), Family(("input_layernorm", None, None, None), parallel=True, pairs=True)
    ),
    "gpt_neox": Family(
        read=("query_key_value",), up=("dense_h_to_4h",), down="dense_4h_to_h", gated=False,
        attention="attention", o="dense", final="final_layer_norm", by_head=True,
    ),
    "gpt_oss": Family(clamped=True),
}  # fmt: skip
HUGGING_FACE = "transformers.models."


class ModelDecoder(Decoder):
    """The layers, or some of them, and the last norm of a causal LM, whose linear layers share its packed
    weights. `windows`: the types of attention; `exact`: on a GPU, too, no row's bits depend on its
    neighbours. Raises Undescribed: its layers have something that no family here has."""

    def __init__(self, model: Any, blocks: Blocks, windows: Sequence[str], exact: bool = True) -> None:
        super().__init__(*_described(model, blocks, windows, exact))
        self._hooks = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        own = (blocks, *blocks.between(model).values())
        self.weights = Weights(module for part in own for module in part.modules())

    @property
    def is_watched(self) -> bool:
        """Whether somebody's hooks look into the model, but for those of `Taps`, which see what a call
        returns."""
        hooks = (hook for hooks in self._hooks if hooks for hook in hooks.values())
        return any(getattr(hook, "__module__", None) != Taps.__module__ for hook in hooks)


def _described(
    model: Any, blocks: Blocks, windows: Sequence[str], exact: bool
) -> tuple[Description, Callable[..., list[Tensor]] | None]:
    """A description, and what executes it where our kernels do not."""
    config = blocks.decoder_of(model).config  # of these layers, where they are some of a model's
    if (family := FAMILIES.get(config.model_type)) is None:
        raise Undescribed(f"a model of type {config.model_type}")
    if getattr(config, "clip_qkv", None):
        raise Undescribed("clipped queries")
    if sum(p.nbytes for p in blocks.parameters() if p.dim() > 2) > 0.8 * available_memory():
        raise Undescribed("no room for packed experts")
    _check_class(model)
    _check_forward(model)
    others: dict[str, Any] = blocks.between(model)
    if {name for name in others if "dropout" not in name} != {"rotary_emb", family.final}:
        raise Undescribed(f"beside its layers {', '.join(others)}")
    kinds = getattr(config, "layer_types", None) or [""] * len(blocks)
    # Rotary positions: one for each type of attention, where each has frequencies of its own.
    turned, final = others["rotary_emb"], others[family.final]
    turns = [f"{kind}_" for kind in sorted(set(kinds))] if hasattr(turned, "layer_types") else [""]
    layers = list[Layer]()
    for block, kind in zip(blocks, kinds, strict=True):
        turn = turns.index(f"{kind}_") if len(turns) > 1 else 0
        layers.append(_layer(block, family, turn, windows.index(kind) if len(windows) > 1 else 0))
    decoder_config = _decoder_config(config, blocks, family)
    parts, run = list[Tensor | None](), None
    if linear.packs(final.weight.dtype, final.weight.device):
        parts = [part for layer in layers for part in _parts(layer, family)]
        parts += decoder.norm(final, family.more)
    else:
        run = Layers(decoder_config, layers, final, exact).run
    which = [n for layer in layers for n in (layer.angles, layer.window, _experts(layer.mlp))]
    rotary = [_rotary(turned, turn, family) for turn in turns]
    factor = getattr(config, "embedding_multiplier", 1.0)
    return Description(decoder_config, parts, which, rotary, windows, factor), run


def _rotary(module: Any, kind: str, family: Family) -> decoder.Rotary:
    """What a model's module says for a `kind` of attention, with which its names begin; "" where all have the
    same. Raises Undescribed where it says something else."""
    frequencies = getattr(module, f"{kind}inv_freq", torch.empty(0)).float()
    rotary = decoder.Rotary(frequencies, getattr(module, f"{kind}attention_scaling", 1.0), family.pairs)
    positions = torch.tensor([[0, 1, 2, 3, 5, 77, 1000]], device=frequencies.device)
    theirs = module(torch.empty(1, device=positions.device), positions, *[kind[:-1]][: bool(kind)])
    off = 0 if positions.device.type == "cpu" else 1e-3  # a GPU may multiply otherwise in matrices
    for mine, other in zip(rotary(positions, torch.float32), theirs, strict=True):
        if not torch.allclose(mine[..., : other.shape[-1]], other, rtol=0, atol=off):
            raise Undescribed(f"a {type(module).__name__}")
    return rotary


def _decoder_config(config: Any, blocks: Blocks, family: Family) -> DecoderConfig:
    attention = getattr(blocks[0], family.attention)
    dim = getattr(attention, "head_dim", None) or attention.head_size
    first = next(getattr(blocks[0], name) for name in family.norms if name)
    heads_norm = getattr(attention, "q_norm", None)
    described = DecoderConfig(
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads if family.by_head else config.num_key_value_heads,
        head_dim=dim,
        scale=float(attention.scaling),
        cap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        activation=getattr(config, "hidden_activation", None) or config.hidden_act,
        eps=eps_of(first),
        head_eps=0.0 if heads_norm is None else eps_of(heads_norm),
        read=len(family.read),
        up=len(family.up),
        gated=family.gated,
        parallel=family.parallel or getattr(blocks[0], "use_parallel_residual", False),
        centred="LayerNorm" in type(first).__name__,
        whole=heads_norm is not None and heads_norm.weight.numel() != dim,
        by_head=family.by_head,
        pairs=family.pairs,
        more=family.more,
    )
    if routed := next((block.mlp for block in blocks if _experts(block.mlp)), None):
        router = _router(routed)
        described = replace(described, chosen=router.top_k, shared=getattr(router, "norm_topk_prob", True))
    if family.clamped:
        experts = blocks[0].mlp.experts
        described = replace(described, activation="clamped", alpha=experts.alpha, limit=experts.limit)
    return described


def _layer(block: Any, family: Family, turn: int, window: int) -> Layer:
    """The modules of a layer, of which nothing is left out."""
    mlp, attention = block.mlp, getattr(block, family.attention)
    experts = _experts(mlp)
    for module in block.modules():
        _check_forward(module)
    _check_parts(block, *filter(None, family.norms), family.attention, "mlp")
    _check_parts(attention, *family.read, family.o, *HEADS)
    if experts:
        _check_parts(mlp, "experts", "gate", "router")
        _check_parts(mlp.experts, "act_fn")
        _check_class(_router(mlp))
    else:
        _check_parts(mlp, *family.up, family.down, "act_fn", "act", "activation_fn")
    sinks = getattr(attention, "sinks", None)
    # Cohere 2's attention turns queries and keys within a window alone.
    windowed = getattr(attention, "sliding_window", None) is not None
    turns = getattr(attention, "use_rope", windowed or "Cohere2" not in type(attention).__name__)
    return Layer(
        read=[getattr(attention, name) for name in family.read],
        o=getattr(attention, family.o),
        mlp=mlp,
        up=[] if experts else [getattr(mlp, name) for name in family.up],
        down=None if experts else getattr(mlp, family.down),
        norms=[getattr(block, place, None) if place else None for place in family.norms],
        heads=[getattr(attention, name, None) for name in HEADS],
        factor=getattr(block, "residual_multiplier", 1.0),
        sinks=None if sinks is None else sinks.detach().float(),
        angles=turn if turns else -1,
        window=window,
    )


def _parts(layer: Layer, family: Family) -> Iterator[Tensor | None]:
    """What `Decoder` in csrc/decoder.h takes of a layer."""
    for read in layer.read:
        yield from decoder.matrix(read)
    yield from decoder.matrix(layer.o, layer.factor)
    if experts := _experts(layer.mlp):
        yield from decoder.NO_MATRIX * (len(family.up) + 1)
        yield from decoder.stored(_router(layer.mlp).weight, getattr(_router(layer.mlp), "bias", None))
        for i in range(experts):
            yield from _expert(layer.mlp.experts, i)
    else:
        for up in layer.up:
            yield from decoder.matrix(up)
        if family.gated and len(family.up) == 1 and layer.down.in_features % PANEL:
            raise Undescribed(f"gate and up in one, {layer.down.in_features} wide")
        yield from decoder.matrix(layer.down, layer.factor)
    for module in (*layer.norms, *layer.heads):
        yield from decoder.norm(module, family.more)
    yield layer.sinks


def _experts(mlp: Any) -> int:
    return len(mlp.experts.gate_up_proj) if hasattr(mlp, "experts") else 0


def _router(mlp: Any) -> Any:
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def _expert(experts: Any, i: int) -> Iterator[Tensor | None]:
    """Gate, up and down of an expert: as they are, or as gpt-oss has them, turned and gate and up in turn."""
    both, down = experts.gate_up_proj[i], experts.down_proj[i]
    if not hasattr(experts, "gate_up_proj_bias"):
        for weight in (*both.chunk(2), down):
            yield from decoder.stored(weight)
        return
    bias = experts.gate_up_proj_bias[i]
    yield from decoder.stored(both.t()[::2], bias[::2])
    yield from decoder.stored(both.t()[1::2], bias[1::2])
    yield from decoder.stored(down.t(), experts.down_proj_bias[i])


def _check_class(module: nn.Module) -> None:
    """Raise Undescribed for a module of a class that is not Hugging Face's, and may do something else."""
    if not type(module).__module__.startswith(HUGGING_FACE):
        raise Undescribed(f"a {type(module).__name__} of another's")


def _check_forward(module: nn.Module) -> None:
    """Raise Undescribed for a module whose `forward` somebody replaced."""
    if not isinstance(vars(module).get("forward"), CompiledForward | None):
        raise Undescribed(f"a {type(module).__name__} with another's forward")


def _check_parts(module: nn.Module, *known: str) -> None:
    """Raise Undescribed as `_check_class`, and for parts of a module that are not known, but for dropout."""
    _check_class(module)
    names = {name for name, _ in module.named_children() if "dropout" not in name} - {*known}
    if names:
        raise Undescribed(f"{type(module).__name__} with {', '.join(sorted(names))}")
