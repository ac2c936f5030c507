"""What trained heads share: the target's ends, a draft vocabulary, and their directory."""

from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.compiled import compiled, freed
from slipstream.core.drafter import FINAL, INPUT, Ends
from slipstream.core.shape import Shape
from slipstream.drafters.layers import ACTIVATIONS, LayerConfig
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.store import VOCAB, load_weights

EMBEDDING = "embed_tokens.weight"  # public checkpoints carry a copy of the target's


@dataclass(frozen=True)
class HeadConfig(LayerConfig):
    """Sizes of a head, and what it reads.

    Attributes:
        taps: of the target, named as in `Drafter.taps`.
    """

    taps: tuple[str, ...] = (FINAL,)


class Head(nn.Module):
    """A trained module: its weights are its whole state."""

    sizes: ClassVar[type[Any]]
    own_lm_head: bool = False  # `logits`, in place of the target's LM head
    config: Any  # of type `sizes`


class HeadDrafter(Proposer):
    """Drafts with a trained head.

    Args:
        head: the trained module.
        ends: the target's embedding and LM head.
        vocab: target ids that the head's candidates are taken from, sorted; all by default.
        tree, proposal: see `Proposer`.

    Raises:
        ValueError: an unknown tree or proposal, or a pair of them that is not exact.
    """

    method: ClassVar[str]
    module: ClassVar[type[Head]]
    head: Any
    lm_head: Float[Tensor, "Vd H"] | None  # borrowed of the target
    lm_bias: Float[Tensor, " Vd"] | None

    def __init__(
        self,
        head: Head,
        ends: Ends,
        vocab: Int[Tensor, " Vd"] | None = None,
        tree: str | Shape = "fig9",
        proposal: str = "top-k",
    ) -> None:
        at, V = ends.head.device, ends.head.shape[0]
        self.head, self.ends, self.taps = (
            head.to(at, ends.head.dtype).requires_grad_(False),
            ends,
            head.config.taps,
        )
        if vocab is not None and not (len(vocab) and int(vocab.min()) >= 0 and int(vocab.max()) < V):
            raise ValueError(
                f"the draft vocabulary of this {self.method} head names other tokens than this target's {V}"
            )
        super().__init__(
            torch.arange(V, device=at) if vocab is None else vocab.to(at).long(), V, tree, proposal
        )
        self.lm_head, self.lm_bias = (None, None) if self.head.own_lm_head else borrowed(ends, self.vocab)
        self._compiled_read, self._compiled_logits = self._read, self.logits
        if ends.compiles:
            self._compiled_read, self._compiled_logits = compiled(self._read, at), compiled(self.logits, at)

    @classmethod
    def load(
        cls, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends, **options: Any
    ) -> "HeadDrafter":
        """A drafter from what `pack` gave. Raises ValueError for tensors that do not fit."""
        tensors = dict(tensors)
        try:
            sizes, tree = cls.module.sizes(**config["head"], taps=tuple(config["taps"])), config["tree"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"config.json of this {cls.method} head is not complete: {error}") from error
        vocab = tensors.pop(VOCAB, None)
        head = cls.module(sizes)
        if EMBEDDING not in head.state_dict():
            tensors.pop(EMBEDDING, None)  # kept for export only
        load_weights(head, tensors, f"this {cls.method} head")
        return cls(head, ends, vocab, **{"tree": tree, **options})

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a drafter directory says of this drafter: configuration and tensors, without the target's
        own."""
        tensors = dict(self.head.state_dict())
        if len(self.vocab) < len(self.ends.head):
            tensors[VOCAB] = self.vocab.int()
        sizes = asdict(self.head.config)
        return {"taps": list(sizes.pop("taps")), "head": sizes, "tree": self.shape.name}, tensors

    @abstractmethod
    def _read(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the head says of tokens and of what it sees of the target: what is compiled."""

    def logits(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... Vd"]:
        """Over the draft vocabulary, float32 at least."""
        weight = self.lm_head
        if weight is None:
            logits = self.head.logits(hidden)
        else:
            logits = bent(F.linear(hidden, weight, self.lm_bias), self.ends.config)
        return logits if logits.dtype == torch.float64 else logits.float()

    def scores(self, hidden: Float[Tensor, "B F H"]) -> Float[Tensor, "B F Vd"]:
        """`logits`, compiled where the target is."""
        return self._compiled_logits(freed(hidden)) if self.ends.compiles else self.logits(hidden)


def bent(logits: Float[Tensor, "*n Vd"], config: Any) -> Float[Tensor, "*n Vd"]:
    """What the target makes of its LM head's products: Cohere and Granite scale them, Gemma caps them
    softly."""
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits if scale == 1 else logits * scale
    return cap * torch.tanh(logits / cap) if cap else logits


def borrowed(
    ends: Ends, vocab: Int[Tensor, " Vd"]
) -> tuple[Float[Tensor, "Vd H"], Float[Tensor, " Vd"] | None]:
    """The rows of the target's LM head that say the draft vocabulary, and their biases."""
    if len(vocab) == len(ends.head):
        return ends.head, ends.bias
    return ends.head[vocab].contiguous(), None if ends.bias is None else ends.bias[vocab]


def layer_sizes(ends: Ends, intermediate_size: int | None = None) -> dict[str, Any]:
    """Sizes of a decoder layer like the target's own: its width, heads and rope, with plain rotary positions.

    Raises:
        ValueError: the target's LM head is not as wide as its features.
    """
    target = ends.config
    H, heads = target.hidden_size, target.num_attention_heads
    if ends.head.shape[1] != H:
        raise ValueError(
            f"the target's LM head is {ends.head.shape[1]} wide and its features {H}: no head fits"
        )
    rope: dict[str, Any] = getattr(target, "rope_parameters", None) or {}
    inner = intermediate_size or getattr(target, "intermediate_size", None) or 4 * H
    act = getattr(target, "hidden_act", None)
    return {
        "hidden_size": H,
        "intermediate_size": int(inner),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or H // heads,
        "rope_theta": float(rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0),
        "rms_norm_eps": float(getattr(target, "rms_norm_eps", None) or 1e-6),
        "hidden_act": act if act in ACTIVATIONS else "silu",
    }


def target_rope(config: Any, block: int) -> tuple[list[float], float]:
    """(frequencies of the rotary positions of one of the target's blocks, factor of their cos and sin): its
    own base, width and scaling; no frequencies where it has no rotary positions."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = (getattr(config, "layer_types", None) or {block: None})[block]
    nested = kind in rope
    rope = rope[kind] if nested else rope
    if not rope:
        return [], 1.0
    if (scaled := rope.get("rope_type", "default")) != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaled](
            config, torch.device("cpu"), layer_type=kind if nested else None
        )
        return frequencies.tolist(), float(factor)
    D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(D * (rope.get("partial_rotary_factor") or 1.0))
    return (1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)).tolist(), 1.0


def block_taps(layers: int) -> tuple[str, ...]:
    """A low, a middle and a high state of the target's residual stream: the inputs of blocks 2, L//2 and L−3,
    as EAGLE-3's public checkpoints read them; nearest ones where there are fewer."""
    return tuple(f"{INPUT}{min(max(i, 0), layers - 1)}" for i in (2, layers // 2, layers - 3))


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
