"""What trained heads share: their target's embedding and LM head, a draft vocabulary, their directory."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.core.drafter import FINAL, INPUT
from slipstream.core.kv_cache import KVCache
from slipstream.core.target import Target
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters.layers import ACTIVATIONS, LayerConfig
from slipstream.drafters.proposer import Proposer, Vocab
from slipstream.drafters.store import VOCAB, load_weights
from slipstream.kernels.compiled import compiled, freed

NEAR = 256  # tokens before the root: with so many a head drafts nearly as well as with all (docs/log.md)
EMBEDDING = "embed_tokens.weight"  # public checkpoints hold a copy of the target's


@dataclass(frozen=True)
class HeadConfig(LayerConfig):
    """Sizes of a head, and the `Drafter.taps` that it reads."""

    taps: tuple[str, ...] = (FINAL,)


def check_one_tap(taps: Sequence[str]) -> None:
    """Raise ValueError unless a head that reads one state has one."""
    if len(taps) != 1:
        raise ValueError(f"taps is {[*taps]}; this head reads one state")


class Head(nn.Module):
    """A trained module: its weights are its whole state."""

    sizes: ClassVar[type[Any]]
    own_lm_head: bool = False  # `logits`, in place of the target's LM head
    config: Any  # of type `sizes`

    def scale_inputs(self, embedding: Float[Tensor, ""], taps: Float[Tensor, " taps"]) -> None:
        """Fold the scales of the inputs in training into the weights. By default there is nothing to fold:
        the final state's scale is 1, and embeddings are not read."""


class HeadDrafter(Proposer):
    """Drafts with a trained head. The target lends it its embedding and, where the head has none, its LM
    head. Candidates are of the sorted target ids `vocab`, by default of all. Raises ValueError if these are
    others than the head's own LM head has, and as `Proposer` does."""

    method: ClassVar[str]
    module: ClassVar[type[Head]]
    taps_optional: ClassVar[bool] = False  # a head may read nothing of the target
    lm_head: nn.Module | None  # the target's, where the head has none of its own

    def __init__(
        self,
        head: Head,
        target: Target,
        vocab: Vocab | None = None,
        tree: str | TreeSpec = "fig9",
        proposal: str = "top-k",
    ) -> None:
        device, V = target.device, target.vocab
        self.head: Any = head.to(device, target.dtype).requires_grad_(False)
        self.target, self.taps = target, head.config.taps
        target.lend_products(self.head)
        ids = torch.arange(V, device=device) if vocab is None else vocab.to(device).long()
        super().__init__(ids, V, tree, proposal)
        if (rows := getattr(head.config, "draft_vocab_size", 0)) not in (0, len(ids)):
            raise ValueError(
                f"this {self.method} head's LM head has {rows} tokens, and its draft vocabulary {len(ids)}"
            )
        self.lm_head = None if self.head.own_lm_head else target.lm_head(None if len(ids) == V else ids)
        # On a CPU a layer is one call, and what stands around it is little.
        self.compiles = target.compiles and device.type != "cpu"
        self._compiled: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}

    def new_cache(self, layers: int, batch: int) -> KVCache:
        heads, D = self.head.config.num_key_value_heads, self.head.config.head_dim
        like = torch.empty(1, heads, 0, D, dtype=self.target.dtype, device=self.target.device)
        return KVCache(layers, batch, self.target.device, like=(like, like))

    @classmethod
    def load(
        cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target, **options: Any
    ) -> "HeadDrafter":
        """A drafter from what `pack` gave. Raises ValueError for tensors that do not fit."""
        head, vocab, tree = cls.unpack(config, tensors)
        return cls(head, target, vocab, **{"tree": tree, **options})

    @classmethod
    def unpack(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Any, Vocab | None, str]:
        """Head, draft vocabulary and tree, from what `pack` gave, in the precision of the tensors. Raises
        ValueError for tensors that do not fit."""
        tensors = dict(tensors)
        try:
            sizes, tree = cls.module.sizes(**config["head"], taps=tuple(config["taps"])), config["tree"]
            if not (sizes.taps or cls.taps_optional):
                raise ValueError("taps is []")
        except (KeyError, TypeError, ValueError) as error:
            reason = "does not fit" if isinstance(error, ValueError) else "is not complete"
            raise ValueError(f"config.json of this {cls.method} head {reason}: {error}") from error
        vocab, head = tensors.pop(VOCAB, None), cls.module(sizes)
        if EMBEDDING not in head.state_dict():
            tensors.pop(EMBEDDING, None)  # kept for export only
        load_weights(head, tensors, f"this {cls.method} head")
        return head, vocab, tree

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a drafter directory holds: configuration and tensors, without the target's own."""
        sizes = asdict(self.head.config)
        return self.packed(self.head, {"taps": list(sizes.pop("taps")), "head": sizes})

    def run(self, method: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """`method(*inputs)`, compiled where that pays. The pass that allocates a cache is not compiled."""
        attends = (part for x in inputs if isinstance(x, list) for part in x)
        if not self.compiles or any(isinstance(getattr(part, "cache", None), KVCache) for part in attends):
            return method(*inputs)
        if method not in self._compiled:
            self._compiled[method] = compiled(method, self.target.device)
        return self._compiled[method](*(freed(x) if isinstance(x, Tensor) else x for x in inputs))

    def logits(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... Vd"]:
        """Over the draft vocabulary, float32 at least."""
        logits: Tensor = self.head.logits(hidden) if self.lm_head is None else self.lm_head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def scores(self, hidden: Float[Tensor, "B F H"]) -> Float[Tensor, "B F Vd"]:
        """`logits`, compiled unless they are one product."""
        return self.logits(hidden) if self.lm_head is not None else self.run(self.logits, hidden)


def layer_sizes(target: Target, intermediate_size: int | None = None) -> dict[str, Any]:
    """Sizes of a decoder layer like the target's own: its width, heads and rope, with plain rotary positions.
    Raises ValueError if the target's LM head is not as wide as its features."""
    sizes, H = asdict(target.sizes), target.sizes.hidden_size
    if target.width != H:
        raise ValueError(f"the target's LM head is {target.width} wide and its features {H}: no head fits")
    del sizes["blocks"]
    sizes["intermediate_size"] = intermediate_size or sizes["intermediate_size"]
    if sizes["hidden_act"] not in ACTIVATIONS:
        sizes["hidden_act"] = "silu"
    return sizes


def rows_of(lm_head: nn.Module, like: Float[Tensor, "*n H"]) -> Float[Tensor, "Vd H"]:
    """The rows of an LM head, from its logits of unit vectors on the device of `like`."""
    unit = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return (lm_head(unit) - lm_head(0 * unit[:1])).T


def block_taps(layers: int) -> tuple[str, ...]:
    """A low, a middle and a high state, as EAGLE-3's public checkpoints read them: the inputs of blocks 2,
    L//2 and L−3, or the nearest ones where there are fewer, in the ascending order of engines."""
    blocks = sorted(min(max(i, 0), layers - 1) for i in (2, layers // 2, layers - 3))
    return tuple(f"{INPUT}{i}" for i in blocks)


@torch.no_grad()
def randomise(head: nn.Module, generator: torch.Generator) -> None:
    """Random weights under which every layer adds nothing to what passes through it."""
    for name, p in head.named_parameters():
        if p.dim() > 1:
            p.copy_(torch.randn(p.shape, generator=generator) * p.shape[1] ** -0.5)
        elif name.endswith("bias"):
            p.zero_()
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            p.zero_()


def copying(width: int, of: int, among: int) -> Float[Tensor, "H F"]:
    """The weight of a linear layer that copies one of the states that it reads side by side."""
    return torch.cat([torch.eye(width) if i == of else torch.zeros(width, width) for i in range(among)], 1)
