"""A model's layers and last norm as one call, on the CPU of our kernels (csrc/decoder.h)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.kv_cache import KVCache
from slipstream.targets.executor import Kind, Part
from slipstream.targets.masks import Masks


@dataclass(frozen=True)
class Rotary:
    """cos and sin of the angles of positions.

    Attributes:
        frequencies: [D / 2] in float32.
        factor: of cos and sin.
        pairs: neighbouring numbers have the same angle, and not those at one place of both halves.
    """

    frequencies: Tensor
    factor: float
    pairs: bool

    def __call__(self, positions: Int[Tensor, "#B R"], dtype: torch.dtype) -> list[Float[Tensor, "#B R D"]]:
        """cos and sin, rounded to the precision of the states."""
        angles = positions[..., None].float() * self.frequencies
        both = angles.repeat_interleave(2, -1) if self.pairs else torch.cat([angles, angles], -1)
        return [(turned * self.factor).to(dtype).float() for turned in (both.cos(), both.sin())]


@dataclass(frozen=True)
class Description:
    """Layers and the norm behind them, as `Decoder` takes them.

    Attributes:
        kind: what all layers have in common.
        parts: of each layer, and then of the last norm, in the order of csrc/decoder.h.
        which: of each layer its rotary positions, or -1, its window, and its number of experts.
        rotary: one, or one for each type of attention.
        windows: the types of attention, see `support.attention_windows`.
        factor: of embeddings.
    """

    kind: Kind
    parts: Sequence[Part]
    which: Sequence[int]
    rotary: Sequence[Rotary]
    windows: Sequence[str]
    factor: float = 1.0


class Decoder:
    """Executes a description, by our kernels unless something else `run`s it."""

    def __init__(self, description: Description, run: Callable[..., list[Tensor]] | None = None) -> None:
        self.description = description
        self._run = run or description.kind.layers(description.parts, description.which)

    def __call__(
        self,
        embedded: Float[Tensor, "B R H"],
        positions: Int[Tensor, "#B R"],
        lists: Masks,
        cache: KVCache,
        taken: Sequence[int],
    ) -> tuple[Float[Tensor, "B R H"], dict[int, Float[Tensor, "B R H"]]]:
        """The final states, and what the layers of these numbers take. The cache gets keys and values.

        Args:
            lists: see `masks.key_lists`.
        """
        said = self.description
        x = embedded if said.factor == 1 else embedded * said.factor
        cos, sin = map(list, zip(*(rotary(positions, x.dtype) for rotary in said.rotary), strict=True))
        empty = x.new_empty(1, said.kind.kv_heads, 0, said.kind.head_dim)
        cache.allocate(empty, empty)
        keys, values = (each.unbind(0) for each in cache.stored)
        masks = [lists[kind] for kind in said.windows] if isinstance(lists, dict) else [lists]
        before = sorted({i - 1 for i in taken if i})
        *states, last = self._run(x, None, cos, sin, keys, values, cache.slots, masks, cache.view, before)
        return last, {0: x, **{i + 1: each for i, each in zip(before, states, strict=True)}}
