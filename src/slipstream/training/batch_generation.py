"""Plain decoding of thousands of texts at once, for training data written on a GPU.

An engine's host work for each text would leave a GPU idle. Here a step is one captured graph over all texts,
and the host looks at them every few steps. All texts of a call end on the same slot of the cache: prompts
are padded on their left. Rounding depends on the neighbours, which is harmless in training data.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, Cache

from slipstream.engine.cuda_graphs import cuda_graph
from slipstream.targets.hf import HFTarget
from slipstream.targets.shadow_model import shadow_of

ATTENTION = "slipstream_wide"
SPAN = 128  # slots by which what a step reads grows
LOOK = 16  # steps between two checks of which texts have ended
LEAST = 64  # rows below which a batch is not made smaller
SHARE = 0.45  # of a GPU's free memory for keys and values
CHUNK = 2**16  # tokens of prompts that are read at once
# Texts and batches differ in shape. cuDNN plans for each new shape, which takes longer than a step.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention under an additive mask. Where a text has one row, the heads that share keys stand in the
    place of its rows, and keys are read once."""
    (B, heads, R, D), KV = query.shape, key.shape[1]
    if R == 1:
        query = query.reshape(B, KV, heads // KV, D)
    else:
        key, value = (x.repeat_interleave(heads // KV, 1) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return out.reshape(B, heads, R, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)


class _Batch(Cache):
    """B texts under way, of at most C slots each. Graphs read and write its tensors where they are.

    Args:
        keys, values: [L, B, heads, C, D].
        tokens: [B, C], from the end of the prompts on.
        pads: [B] slots before each text.
        ended: [B].
        next: [1] the slot of the last tokens, yet to be read.
    """

    used = 0  # slots that a step reads
    rows = slice(None)  # whose prompts are being read

    def __init__(
        self, keys: Tensor, values: Tensor, tokens: Tensor, pads: Tensor, ended: Tensor, next: Tensor
    ) -> None:
        super().__init__(layers=[])
        self.keys, self.values, self.tokens = keys, values, tokens
        self.pads, self.ended, self.next = pads, ended, next

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if (width := key_states.shape[2]) > 1:
            keys[self.rows, :, :width], values[self.rows, :, :width] = key_states, value_states
            return key_states, value_states
        keys.index_copy_(2, self.next, key_states)
        values.index_copy_(2, self.next, value_states)
        return keys[:, :, : self.used], values[:, :, : self.used]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions are explicit

    def __len__(self) -> int:
        return len(self.keys)


class BatchGenerator:
    """A target that decodes many texts at once.

    Args:
        eos: tokens that end a text.
        slots: rows times slots of keys and values; default: what fits in `SHARE` of the GPU's free memory.
    """

    def __init__(self, target: HFTarget, eos: Iterable[int], slots: int | None = None) -> None:
        self.target, self.device, sizes = target, target.device, target.sizes
        self.model = shadow_of(target.model)
        self.model.set_attn_implementation(ATTENTION)
        self._shape = sizes.blocks, sizes.num_key_value_heads, sizes.head_dim
        token = sizes.blocks * sizes.num_key_value_heads * sizes.head_dim
        if slots is None:
            free = int(SHARE * torch.cuda.mem_get_info(self.device)[0])
            slots = free // (2 * token * target.dtype.itemsize)
        self.slots = slots
        # Batches of all sizes lie at the beginning of the same memory.
        self._memory = torch.zeros(2, slots * token, dtype=target.dtype, device=self.device)
        self._tokens, self._pads = torch.zeros(2, slots, dtype=torch.long, device=self.device)
        self._ended, self._next = self._pads.bool(), self._pads[:1].clone()
        self._ends = frozenset(eos)
        self._eos = torch.tensor(sorted(self._ends), device=self.device)
        self._temperature = torch.zeros((), device=self.device)
        self._steps: dict[tuple[int, int, int], Callable[[], Any]] = {}
        self._pool: Any = None  # the memory that all graphs share

    @staticmethod
    def serves(target: Any) -> bool:
        """Whether a target is on a GPU, and reads everything before a row by attention that can be set."""
        return (
            isinstance(target, HFTarget)
            and target.device.type == "cuda"
            and set(target.windows.values()) == {None}
            and getattr(target.config, "attn_logit_softcapping", None) is None
            and target.model._can_set_attn_implementation()
        )

    @torch.inference_mode()
    def write(
        self, prompts: Sequence[Sequence[int]], temperature: float, limit: int, seed: int
    ) -> list[list[int]]:
        """At most `limit` tokens after each prompt, up to the one that ends the text. Raises ValueError if
        the memory does not hold one text."""
        torch.manual_seed(seed)
        self._temperature.fill_(temperature)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        texts: dict[int, list[int]] = {}
        while order:
            width = -(-len(prompts[order[0]]) // 16) * 16
            capacity = -(-(width + limit) // (2 * SPAN)) * 2 * SPAN
            if capacity > self.slots:
                raise ValueError(f"a prompt of {len(prompts[order[0]])} tokens leaves the GPU no memory")
            rows = min(1 << ((self.slots // capacity).bit_length() - 1), _power(len(order)))
            some, order = order[:rows], order[rows:]
            written = self._write([prompts[i] for i in some], rows, capacity, width, limit)
            for i, tokens in zip(some, written, strict=True):
                end = next((j + 1 for j, token in enumerate(tokens) if token in self._ends), len(tokens))
                texts[i] = tokens[:end]
        return [texts[i] for i in range(len(prompts))]

    def _write(
        self, prompts: Sequence[Sequence[int]], rows: int, capacity: int, width: int, limit: int
    ) -> list[list[int]]:
        """Texts after some prompts. Graphs stay for the next texts of the same sizes."""
        batch, texts = self._batch(rows, capacity), [*range(len(prompts))]  # the text of each row
        written: list[list[int]] = [[] for _ in prompts]

        def keep(count: int) -> None:
            for text, tokens in zip(texts, batch.tokens[:, width : width + count].tolist(), strict=False):
                written[text] = tokens

        self._read(batch, prompts, width)
        for step in range(1, limit):
            if step % LOOK == 0 and (ended := batch.ended.tolist()).count(False) <= rows // 2:
                keep(step)
                alive = [row for row in range(len(texts)) if not ended[row]]
                if not alive:
                    return written
                if (fewer := max(LEAST, _power(len(alive)))) < rows:
                    batch, rows = self._shrunk(batch, alive, fewer, width + step), fewer
                    texts = [texts[row] for row in alive]
            used = min(-(-(width + step) // SPAN) * SPAN, capacity)
            if (rows, capacity, used) not in self._steps:
                self._steps[rows, capacity, used] = self._step(batch, used)
            self._steps[rows, capacity, used]()
        keep(limit)
        return written

    def _batch(self, rows: int, capacity: int) -> _Batch:
        L, heads, D = self._shape
        count = L * rows * heads * capacity * D
        keys, values = (x[:count].view(L, rows, heads, capacity, D) for x in self._memory)
        tokens = self._tokens[: rows * capacity].view(rows, capacity)
        return _Batch(keys, values, tokens, self._pads[:rows], self._ended[:rows], self._next)

    def _shrunk(self, batch: _Batch, rows: Sequence[int], count: int, used: int) -> _Batch:
        """Some rows, which go on in a batch of `count`. Each layer moves to the front of its memory."""
        smaller = self._batch(count, batch.tokens.shape[1])
        index = torch.tensor([*rows, *[rows[0]] * (count - len(rows))], device=self.device)
        for old, new in zip([*batch.keys, *batch.values], [*smaller.keys, *smaller.values], strict=True):
            new[:, :, :used] = old[index, :, :used]  # the right side is a copy
        for name in ("tokens", "pads", "ended"):
            getattr(smaller, name).copy_(getattr(batch, name)[index])
        smaller.ended[len(rows) :] = True
        return smaller

    def _read(self, batch: _Batch, prompts: Sequence[Sequence[int]], width: int) -> None:
        """Read the prompts, and choose the first token of each."""
        batch.next.fill_(width)
        batch.pads.zero_()
        batch.ended.fill_(True)
        slots, at_once = torch.arange(width, device=self.device), max(1, CHUNK // width)
        for first in range(0, len(prompts), at_once):
            some = prompts[first : first + at_once]
            batch.rows = rows = slice(first, first + len(some))
            tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in some], device=self.device)
            pads = torch.tensor([width - len(p) for p in some], device=self.device)
            # Padding reads itself: a fully masked row is NaN.
            visible = (slots <= slots[:, None]) & (slots >= pads[:, None, None]) | (slots == slots[:, None])
            logits = self._logits(tokens, slots - pads[:, None], visible[:, None], batch)
            batch.pads[rows], batch.tokens[rows, width] = pads, self._choose(logits)
            batch.ended[rows] = torch.isin(batch.tokens[rows, width], self._eos)

    def _step(self, batch: _Batch, used: int) -> Callable[[], Any]:
        """A step in which texts read the first `used` slots."""
        slots = torch.arange(used, device=self.device)

        def step() -> None:
            batch.used = used
            token = batch.tokens.index_select(1, batch.next)
            visible = (slots >= batch.pads[:, None]) & (slots <= batch.next)
            positions = (batch.next - batch.pads)[:, None]
            logits = self._logits(token, positions, visible[:, None, None], batch)
            token = torch.where(batch.ended, token[:, 0], self._choose(logits))
            batch.next.add_(1)
            batch.tokens.index_copy_(1, batch.next, token[:, None])
            batch.ended.logical_or_(torch.isin(token, self._eos))

        if self.device.type != "cuda":
            return step
        # A capture is preceded by a step, whose changes are put back.
        changed = (batch.tokens, batch.ended, batch.next)
        before = [x.clone() for x in changed]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        replay = cuda_graph(step, self._pool)[1]
        for x, was in zip(changed, before, strict=True):
            x.copy_(was)
        return replay

    def _logits(self, tokens: Tensor, positions: Tensor, visible: Tensor, batch: _Batch) -> Tensor:
        mask = torch.zeros_like(visible, dtype=self.target.dtype).masked_fill_(~visible, -torch.inf)
        with sdpa_kernel(BACKENDS):
            out: Any = self.model(
                input_ids=tokens,
                position_ids=positions.clamp(0, self.target.window - 1),
                attention_mask=mask,
                past_key_values=batch,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def _choose(self, logits: Tensor) -> Tensor:
        """The likeliest token at T = 0, else one drawn: of p / e, with exponential noise e, the largest."""
        T = self._temperature
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-30)
        drawn = (logits / T.clamp(min=1e-3)).softmax(-1) / noise
        return torch.where(T > 0, drawn, logits).argmax(-1)


def _power(n: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (n - 1).bit_length()
