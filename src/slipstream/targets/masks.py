"""What each row of a pass reads: as lists of keys for our attention, or as a dense mask for any other."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.kv_cache import KVCache
from slipstream.core.tree import SharedLayout, TreeLayout

Windows = dict[str, int | None]  # the sliding window of each type of attention; None: it reads everything
Masks = Tensor | dict[str, Tensor]  # one for each type of attention, if there are several


def key_lists(
    layout: TreeLayout,
    positions: Int[Tensor, "#B A"],
    cache: KVCache,
    windows: Windows,
    nodes: int,
    depth: int,
) -> Masks:
    """Lists [B, 1, R, 3 + L], int32, as `kernels.ops.attention` takes them.

    The R new rows are the last of the step's A scratch rows. Ancestors stand before their descendants, so
    slots in rising order are positions in rising order. Rows after the `nodes` are probes, which also read
    memory. A row reads at most `depth` scratch rows; 0: all before it and itself, as in a chain.
    """
    if isinstance(layout, SharedLayout) and list(windows.values()) == [None]:
        key = cache.prefix, nodes, depth
        if key not in layout.derived:
            layout.derived[key] = _at_start(layout, windows, *key)
        fixed, moving = layout.derived[key]
        return torch.addcmul(fixed, moving, cache.lengths.int()[:, None, None])[:, None]
    return _lists(layout, positions, cache.lengths, windows, cache.prefix, nodes, depth)


def _lists(
    layout: TreeLayout, positions: Tensor, lengths: Tensor, windows: Windows, P: int, nodes: int, depth: int
) -> Masks:
    """The lists after so many tokens."""
    device = positions.device
    R, A = layout.visible.shape[1:]
    B, rows, scratch = len(lengths), torch.arange(R, device=device), torch.arange(A, device=device)
    lengths, positions = lengths[:, None], positions.expand(B, A)
    own = positions[:, A - R :]
    memory = torch.where(rows >= nodes, P, -P).expand(B, R)
    end = (lengths if depth else lengths + rows + 1).expand(B, R)
    lists = {}
    for kind, window in windows.items():
        first, visible = torch.zeros_like(own), layout.visible.expand(B, R, A)
        if window is not None:
            first = torch.minimum((own - window + 1).clamp(min=0), end)
            visible = visible & (own[:, :, None] - positions[:, None] < window)
        bounds = torch.stack([memory, first + P, end + P], -1)
        if depth:
            listed = torch.where(visible, scratch, A).sort(-1).values[..., :depth]
            slots = torch.where(listed < A, listed + lengths[..., None] + P, -1)
            bounds = torch.cat([bounds, slots], -1)
        lists[kind] = bounds.int()[:, None]
    return lists if len(lists) > 1 else lists[kind]


@torch.inference_mode(False)
def _at_start(layout: TreeLayout, windows: Windows, *how: int) -> tuple[Tensor, Tensor]:
    """The lists [B, R, 3 + L] of texts without tokens, and which of their numbers grow with each token: the
    ends of runs and the slots, but not memory nor first slots, which stay without a window."""
    none = torch.zeros(len(layout.visible), dtype=torch.long)
    lists: Any = _lists(layout, layout.depths, none, windows, *how)
    fixed = lists[:, 0]
    moving = (fixed >= 0).int()
    moving[..., :2] = 0
    return fixed, moving


def dense(lists: Masks, view: int, dtype: torch.dtype) -> Masks:
    """Additive masks [B, 1, R, S] of what `key_lists` lists, over the first S slots."""

    def seen(keys: Tensor) -> Tensor:
        slots = torch.arange(view, device=keys.device)
        memory, first, end = keys[:, 0, :, :3, None].unbind(2)
        listed = keys[:, 0, :, 3:].long()
        marks = torch.zeros(*listed.shape[:2], view + 1, dtype=torch.bool, device=keys.device)
        marks.scatter_(2, listed.where(listed >= 0, view), True)
        return marks[..., :view] | (slots < memory) | ((slots >= first) & (slots < end))

    by_kind = lists if isinstance(lists, dict) else {"": lists}
    return additive({kind: seen(keys) for kind, keys in by_kind.items()}, dtype)


def additive(seen: dict[str, Tensor], dtype: torch.dtype) -> Masks:
    """Attention masks of rows [B, R] over columns [S], by attention type, as Hugging Face takes them."""
    masks = {}
    for kind, visible in seen.items():
        zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        masks[kind] = zeros.masked_fill_(~visible, -torch.inf)[:, None]
    return masks if len(masks) > 1 else masks[kind]
