"""A target whose passes one call of our kernels executes, by a description of its layers."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from slipstream.core.drafter import CACHE, FINAL, INPUT
from slipstream.core.kv_cache import KVCache
from slipstream.core.span import Output
from slipstream.core.target import LMHead, Target
from slipstream.core.tree import Tree, TreeLayout, chain
from slipstream.kernels.weight_packing import EIGHT
from slipstream.machine import where
from slipstream.targets.decoder import Decoder
from slipstream.targets.linear import own_products
from slipstream.targets.masks import Masks, Windows, key_lists
from slipstream.targets.prompts import HFText
from slipstream.targets.quantized import rows_of_head

Features = Float[Tensor, "B R F"] | None


class DecoderTarget(Target):
    """What targets with described layers have in common.

    Attributes:
        windows: the sliding window of each type of attention.
        scale, cap: of logits, see `LMHead`.
    """

    text: HFText | None
    windows: Windows
    scale: float
    cap: float | None
    _head: Any
    _weights: int  # numbers in the weights, as loaded
    _ours: bool  # attention and products are ours

    @property
    @abstractmethod
    def decoder(self) -> Decoder | None:
        """Executes the layers; None where Hugging Face's modules do."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """The number of layers."""

    def __repr__(self) -> str:
        kind = f"{self.described['model_type']}, {self.layers} blocks, {self._weights / 1e6:,.1f} M weights"
        compiled = ", compiled" if self.compiles else ""
        return f"HFTarget({self.name}: {kind}, {self.precision} on {self.device}{compiled})"

    def release(self) -> None:
        """Release the weights, with their packed copies, but not the caller's model. `with HFTarget(model) as
        target:` does this at the end."""
        self.embed = self._head = None  # type: ignore[assignment]
        for name in ("drafters", "decoder", "_to_logits"):
            vars(self).pop(name, None)

    @property
    def _released(self) -> str:
        """The error message for what is asked of it after that."""
        return f"target {self.name} was released: make another one, HFTarget(model) or load_target(…)"

    def __enter__(self) -> "DecoderTarget":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def place(self) -> str:
        return f"{where(self.device)}, {self.precision}{', compiled' if self.compiles else ''}"

    def new_cache(self, batch: int, memory: Tensor | None = None) -> KVCache:
        return KVCache(self.layers, batch, self.device, memory, self._cached if self.compiles else None)

    def lm_head(self, vocab: Int[Tensor, " Vd"] | None = None) -> LMHead:
        head = self._head
        if vocab is not None:
            head = rows_of_head(head, vocab)
            self.lend_products(head)
        product = getattr(head, "product", F.linear)
        if self._ours and self.device.type == "cpu" and self.scale == 1 and not self.cap:
            product = partial(_widened, product)
        return LMHead(head.weight, head.bias, self.scale, self.cap, product)

    def lend_products(self, module: nn.Module) -> None:
        if self._ours:
            for weight in module.parameters() if self.quantize else ():
                setattr(weight, EIGHT, True)
            own_products(module, self.dtype, self.device)

    @torch.inference_mode()
    def __call__(
        self, tree: Tree, cache: KVCache, taps: Sequence[str] = (), rows: Int[Tensor, "B K"] | None = None
    ) -> Output:
        layout = tree.layout()
        cache.reserve(tree.rows)
        # Only padding lies beyond the window.
        positions = (cache.lengths[:, None] + layout.depths).clamp(max=self.window - 1)
        tokens, inputs = tree.tokens.clamp(min=0), dict[str, Any](position_ids=positions)
        if tree.probes is None:
            inputs["input_ids"] = tokens
        else:
            vectors, hosts = tree.probes
            embedded = self._whole_embed(tokens)
            probes = vectors.to(embedded).repeat(hosts.shape[1], 1).expand(len(tokens), -1, -1)
            inputs["inputs_embeds"] = torch.cat([embedded, probes], 1)
        keep: Tensor | None = None
        if rows is not None or tree.probes is not None:
            keep = torch.arange(tree.nodes, device=self.device) if rows is None else rows.unique()
            # One row by its index: sliced states are not contiguous, and each text would copy the head.
            keep = keep if len(keep) else positions.new_zeros(1)
        each_host = 0 if tree.probes is None else len(tree.probes.vectors)
        depth = 0 if tree.is_chain and not each_host else tree.depth + 1 + each_host
        inputs["attention_mask"] = self._masks(layout, positions, cache, tree.nodes, depth)
        began = perf_counter()
        logits, features = self._pass(inputs, cache, keep, tuple(taps))
        seconds = perf_counter() - began
        if rows is not None and keep is not None:
            at = torch.searchsorted(keep, rows)
            logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
        return Output(logits, features, seconds)

    @torch.inference_mode()
    def extend(
        self, tokens: Int[Tensor, "B R"], layout: TreeLayout, cache: KVCache, after: int
    ) -> Float[Tensor, "B R V"]:
        cache.reserve(tokens.shape[1], after)
        positions = (cache.lengths[:, None] + layout.depths).clamp(max=self.window - 1)
        mask = self._masks(layout, positions, cache, tokens.shape[1], layout.visible.shape[2])
        own = positions[:, after:].expand(len(tokens), -1)
        inputs = {"input_ids": tokens.clamp(min=0), "position_ids": own, "attention_mask": mask}
        return self._pass(inputs, cache, None, ())[0]

    def _pass(
        self, inputs: dict[str, Any], cache: KVCache, keep: Tensor | None, taps: tuple[str, ...]
    ) -> tuple[Float[Tensor, "B K V"], Features]:
        """The logits of the rows to keep (None: all), in float32 at least, and the features of all rows, by
        inputs under Hugging Face's names."""
        with self.lock:
            if (decoder := self.decoder) is None:
                raise ValueError(self._released)
            embedded = self.embed(inputs["input_ids"]) if "input_ids" in inputs else inputs["inputs_embeds"]
            blocks = {tap: block_of(tap, self.layers) for tap in taps if tap.startswith(INPUT)}
            positions, mask = inputs["position_ids"], inputs["attention_mask"]
            final, states = decoder(embedded, positions, mask, cache, list(blocks.values()))
            logits = self._to_logits(final if keep is None else final[:, keep])
            by_tap = {FINAL: final, **{tap: states[block] for tap, block in blocks.items()}}
            return logits, side_by_side(taps, by_tap, cache, self.layers)

    @property
    def _whole_embed(self) -> nn.Module:
        """The embedding, where nothing behind it reads tokens."""
        return self.embed

    @cached_property
    def _to_logits(self) -> LMHead:
        return self.lm_head()

    def widths(self, taps: Sequence[str]) -> list[int]:
        def width(tap: str) -> int:
            if tap.startswith(CACHE):
                return sum(x.shape[1] * x.shape[3] for x in self._cached)
            return self.width if tap == FINAL else self.sizes.hidden_size

        return [width(tap) for tap in taps]

    @cached_property
    def _cached(self) -> tuple[Tensor, Tensor]:
        """Keys and values of one block and no token, [1, heads, 0, D], from which a cache is allocated before
        its first pass, as compiled passes need it."""
        cache = KVCache(self.layers, 1, self.device)
        self(chain(torch.zeros(1, 1, dtype=torch.long, device=self.device)), cache)
        keys, values = (stored[0, :, :, :0].clone() for stored in cache.stored)
        return keys, values

    def features(self, rows: Sequence[Sequence[int]], taps: Sequence[str]) -> Float[Tensor, "B T F"]:
        width = max(map(len, rows))
        if not taps:
            return torch.zeros(len(rows), width, 0, dtype=self.dtype, device=self.device)
        tokens = torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], device=self.device)
        out = self(chain(tokens), self.new_cache(len(rows)), taps, rows=tokens[:, :0])
        assert out.features is not None
        for row, finite in zip(rows, out.features.isfinite().all(-1).cpu(), strict=True):
            if not finite[: len(row)].all():
                raise ValueError(self.explain_non_finite(row))
        return out.features.clone()  # outside inference mode, so that autograd may read it

    def warm_up(self) -> None:
        """Compile the passes that rounds of one text take: of one row and of several."""
        cache, tokens = self.new_cache(1), torch.zeros(1, 2, dtype=torch.long, device=self.device)
        for rows in (2, 1):
            self(chain(tokens[:, :rows]), cache)

    def _masks(
        self, layout: TreeLayout, positions: Int[Tensor, "B A"], cache: KVCache, nodes: int, depth: int
    ) -> Masks:
        """What the new rows read, for the attention at hand."""
        return key_lists(layout, positions, cache, self.windows, nodes, depth)


def block_of(tap: str, blocks: int) -> int:
    """The block that a tap names. Raises ValueError."""
    name, _, block = tap.rpartition(" ")
    if f"{name} " in (INPUT, CACHE) and block.isdecimal() and int(block) < blocks:
        return int(block)
    raise ValueError(
        f"Unknown tap: {tap!r}. Available: '{FINAL}', '{INPUT}0' to '{INPUT}{blocks - 1}', '{CACHE}0' to "
        f"'{CACHE}{blocks - 1}'"
    )


def side_by_side(taps: Sequence[str], states: Mapping[str, Tensor], cache: KVCache, blocks: int) -> Features:
    """States by tap, and what a pass wrote to its cache; None without taps. Raises ValueError for a tap that
    there is not."""
    parts = [states[tap] if tap in states else cache.written(block_of(tap, blocks)) for tap in taps]
    return torch.cat(parts, -1) if parts else None


def _widened(product: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
    """A product, in float32 where it is bf16, by the threads of our products: an LM head may be cast."""
    out = product(*args)
    is_kept = torch.is_grad_enabled() or out.dtype != torch.bfloat16
    return out if is_kept else torch.ops.slipstream.widened(out)
