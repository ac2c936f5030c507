"""A decoder-only Hugging Face causal LM as a target, through its own modelling code.

All that makes a tree pass possible is outside the model: our cache in the place of its own, a 4-D mask of
what each row sees (sliding windows included), explicit positions, and probe rows through `inputs_embeds`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from slipstream import kernels
from slipstream.core.cache import KVCache
from slipstream.core.drafter import CACHE, FINAL, INPUT
from slipstream.core.span import Output
from slipstream.core.target import LMHead, Target
from slipstream.core.tree import Layout, Tree, chain
from slipstream.machine import where
from slipstream.packing import EIGHT
from slipstream.targets import ours, support
from slipstream.targets.alike import agrees, own_noise, rounds_alike
from slipstream.targets.decoder import Decoder, Undescribed
from slipstream.targets.inside import Behind, Blocks, View, compile_forward, twin
from slipstream.targets.masks import Masks, additive, dense, key_lists
from slipstream.targets.part import between, decoder_of, own_blocks, part, rows_of_head
from slipstream.targets.prompts import HFText
from slipstream.targets.quantised import of_torchao, quantised, stored_bytes
from slipstream.targets.taps import Taps, index_of, side_by_side

OF_PASSES = (
    "_taps",
    "_straight",
    "decoder",
    "_to_logits",
)  # what passes over one model's modules are made with


@final
class HFTarget(Target):
    """A Hugging Face causal LM.

    The model stays the caller's. Passes run through a twin: modules of our own over the same weights, in
    which attention is replaced and layers are compiled. Later changes of the model do not reach the twin,
    except for weights that are changed in place, as optimizers do. Changes by `.data`, which PyTorch does not
    count, want a new `HFTarget`.

    Args:
        model: a Hugging Face causal LM. On the CPU the twin's `sdpa` attention reads grouped keys as they
            are.
        tokenizer: not needed if prompts are token ids.
        name: the user's name for the target.
        compile: run layers and LM head as compiled graphs. On a CPU with bf16 instructions they keep a packed
            copy of bf16 weights, which does not follow later changes. On a GPU rounds are also captured as
            CUDA graphs (`decode.capture`).
        exact: on a GPU, too, no row's bits depend on its neighbours (docs/exactness.md). There it may
            cost time; on a CPU it costs none, and is so wherever it can be.
        quantize: "int8" or "int4": decode a copy of the model whose linear layers, LM head and, on a CPU,
            embedding have weights of 8 bits, or of 4 and 8 (docs/quantised.md). The model stays as it is.

    Raises:
        ValueError: the model is no Hugging Face model, cannot be decoded exactly (`check_supported`,
            `check_causal`) or quantised, or has no kernels to be `exact` with.
    """

    text: HFText | None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        compile: bool = False,
        exact: bool = False,
        quantize: str | None = None,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            if hasattr(model, "merge_and_unload"):
                raise ValueError("a target is made of a whole model: give PEFT's model.merge_and_unload()")
            raise ValueError(
                f"a target is made of a Hugging Face model, not of a {type(model).__name__}: load_target(…) "
                "takes names"
            )
        config = model.config.get_text_config(decoder=True)
        support.check_model(model, config)
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.device, self.dtype, self.quantize = model.device, model.dtype, quantize
        origin = getattr(model, "origin", None)  # of a quantised model that was kept
        self.fingerprint = origin.fingerprint if origin else support.fingerprint_of(model)
        self._weights = origin.weights if origin else model.num_parameters()
        self.model = model
        if quantize is not None and (origin is None or origin.quantize != quantize):
            self.model = quantised(model, quantize, self.name)
        self.text = None if tokenizer is None else HFText(tokenizer, self.name)
        support.check_causal(self.plain)
        self._twin: PreTrainedModel | None = twin(self.plain)
        self.config = self.twin.config.get_text_config(decoder=True)
        self.source, self.vocab = self.config.name_or_path or "", self.config.vocab_size
        self.window = support.longest_text(self.plain)
        self.windows, self.sizes = support.attention_windows(self.config), support.sizes_of(self.config)
        self.blocks = own_blocks(self.twin, self.sizes.blocks)
        self.embed: Any = self.twin.get_input_embeddings()
        self._head: Any = self.twin.get_output_embeddings()
        self.width = self._head.in_features
        self.compiles, self.captures = compile, compile and self.device.type == "cuda"
        self._ours = False
        self._calls: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "cpu" or exact:
            self._take_ours()
        else:
            self._try_description()
        if exact and not self._ours:
            raise ValueError(f"target {self.name} cannot be exact in {self.precision}: {ours.NEEDS}")
        if compile:
            one_call = hasattr(self._head, "product")
            for i, each in enumerate([*self.blocks, *[self._head] * (not one_call)]):
                compile_forward(each, self.device, i)

    def _take_ours(self) -> None:
        """Use our attention and products where they serve this model, and say what Hugging Face's own say."""
        theirs = self.config._attn_implementation
        settable = self.twin._can_set_attn_implementation()
        known = settable or self.config.model_type in ours.OWN_SDPA
        self._ours = known and kernels.has_kernels(self.device, self.dtype) and not of_torchao(self.twin)
        if settable and (self._ours or theirs == "sdpa"):
            self.twin.set_attn_implementation(ours.OURS)
        if self._ours:
            if ours.called_directly(self.twin, self.config):
                self._calls = ours.Calls()
            ours.own_parts(self.twin, self.dtype, self.device)
            self._try_description()
            if self.decoder is None and not agrees(self, self.plain):
                self._ours, self._calls = False, nullcontext()
                if settable:
                    self.twin.set_attn_implementation(theirs)

    def _try_description(self) -> None:
        """Use the description of the layers only where it says what Hugging Face's modules say."""
        if self.decoder is not None and not agrees(self, self.plain):
            self.decoder = None

    @cached_property
    def exactness(self) -> str:
        kinds = getattr(self.config, "layer_types", None) or [""] * len(self.blocks)
        first = {(kinds[i], str(block)): i for i, block in reversed(list(enumerate(self.blocks)))}
        return "bits" if self._ours and rounds_alike(self.part(list(first.values()))) else "audited"

    @cached_property
    def margin(self) -> float:
        noise = 0.0 if self.dtype == torch.float64 else own_noise(self, self.plain)
        return max(super().margin, 2 * noise)  # both of two scores may be off by it

    def __repr__(self) -> str:
        how = f"{self.precision} on {self.device}{', compiled' if self.compiles else ''}"
        kind = f"{self.config.model_type}, {len(self.blocks)} blocks, {self._weights / 1e6:,.1f} M weights"
        return f"HFTarget({self.name}: {kind}, {how})"

    @property
    def twin(self) -> PreTrainedModel:
        """The model that passes run through. Raises ValueError once the target is released."""
        if self._twin is None:
            raise ValueError(f"target {self.name} was released: make another one, HFTarget(model)")
        return self._twin

    @cached_property
    def plain(self) -> PreTrainedModel:
        """Another twin, with Hugging Face's own attention and layers, which is the outside baseline. A model
        with a softcap gets eager attention, because `sdpa` ignores the softcap without a warning."""
        plain = twin(self.model)
        config = plain.config.get_text_config(decoder=True)
        if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
            plain.set_attn_implementation("eager")
        if self.dtype == torch.float64 and hasattr(plain, "set_experts_implementation"):
            plain.set_experts_implementation("eager")  # others know no float64
        return plain

    @cached_property
    def values(self) -> str:
        return support.hash_of(self.model)

    def release(self) -> None:
        """Release the weights, with their packed copies, but not the caller's model. `with HFTarget(model) as
        target:` does this at the end."""
        self._twin = self.embed = self._head = None
        self.blocks = Blocks(())
        for name in ("plain", "drafters", *OF_PASSES):
            vars(self).pop(name, None)

    def __enter__(self) -> "HFTarget":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def place(self) -> str:
        return f"{where(self.device)}, {self.precision}{', compiled' if self.compiles else ''}"

    @property
    def generation_config(self) -> GenerationConfig:
        return self.model.generation_config or GenerationConfig()

    @property
    def described(self) -> dict[str, Any]:
        return self.config.to_dict()

    @property
    def read_bytes(self) -> int:
        embedding, head = self.embed.weight, self._head.weight
        return stored_bytes(self.twin) - (embedding is not head) * embedding.nbytes

    def save(self, directory: str | Path) -> None:
        """Write model and tokenizer as Hugging Face does. Raises ValueError for a quantised one."""
        if self.quantize is not None:
            raise ValueError(f"target {self.name} is {self.quantize}, which Hugging Face cannot read again")
        self.model.save_pretrained(directory)
        if self.text is not None:
            self.text.tokenizer.save_pretrained(directory)

    def new_cache(self, batch: int, memory: Tensor | None = None) -> KVCache:
        if self.decoder is not None and self.decoder.is_stale:  # asked here, since it takes 1 % of a pass
            del self.decoder
        return KVCache(len(self.blocks), batch, self.device, memory, self._cached if self.compiles else None)

    def lm_head(self, vocab: Int[Tensor, " Vd"] | None = None) -> LMHead:
        config, head = self.config, self._head
        if vocab is not None:
            head = rows_of_head(head, vocab)
            self.lend_products(head)
        factor = getattr(config, "logits_scaling", None) or 1  # all models but one divide by it
        own = factor if config.model_type == "hyperclovax" else 1 / factor
        scale = getattr(config, "logit_scale", None) or own
        cap = getattr(config, "final_logit_softcapping", None)
        product = getattr(head, "product", F.linear)
        if self._ours and self.device.type == "cpu" and scale == 1 and not cap:
            product = partial(_widened, product)
        return LMHead(head.weight, head.bias, scale, cap, product)

    def lend_products(self, module: nn.Module) -> None:
        if self._ours:
            for weight in module.parameters() if self.quantize else ():
                setattr(weight, EIGHT, True)
            ours.own_products(module, self.dtype, self.device)

    def rope(self, block: int) -> tuple[list[float], float]:
        return support.rope(self.config, block)

    def part(
        self, blocks: Sequence[int], own: bool = False, vocab: Int[Tensor, " Vd"] | None = None
    ) -> "HFTarget":
        made = copy(self)
        for name in OF_PASSES:
            vars(made).pop(name, None)
        if self.decoder is None:  # a description that was tried, and found wrong, is no part's either
            made.decoder = None
        made._twin, made.blocks, fresh = part(self.twin, self.blocks, blocks, own, vocab)
        made._head = made.twin.get_output_embeddings()
        for module, layer in fresh if self.compiles else ():
            compile_forward(module, self.device, layer)
        return made

    def trunk(self) -> dict[str, nn.Module]:
        return {"blocks": self.blocks, "between": nn.ModuleDict(between(self.twin, self.blocks))}

    def states(
        self,
        embedded: Float[Tensor, "B R H"],
        positions: Int[Tensor, "#B R"],
        seen: Bool[Tensor, "#B R S"],
        columns: Int[Tensor, "#B S"],
        behind: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> tuple[Float[Tensor, "B R H"], list[tuple[Tensor, Tensor]]]:
        masks = {}
        for kind, window in self.windows.items():
            near = positions[:, :, None] - columns[:, None] < (window or self.window + 1)
            masks[kind] = seen & (near | (columns < 0)[:, None])
        embedded = embedded.to(next(self.blocks.parameters()).dtype)
        cache = Behind(behind)
        out = decoder_of(self.twin, self.blocks)(
            inputs_embeds=embedded,
            attention_mask=additive(masks, embedded.dtype),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state, cache.own

    @torch.inference_mode()
    def __call__(
        self, tree: Tree, cache: KVCache, taps: Sequence[str] = (), rows: Int[Tensor, "B K"] | None = None
    ) -> Output:
        layout = tree.layout()
        cache.reserve(tree.rows)
        # Only padding lies beyond the window.
        positions = (cache.lengths[:, None] + layout.depths).clamp(max=self.window - 1)
        tokens = tree.tokens.clamp(min=0)
        if tree.probes is None:
            inputs = {"input_ids": tokens}
        else:
            vectors, hosts = tree.probes
            embedded = self._whole_embed(tokens)
            behind = vectors.to(embedded).repeat(hosts.shape[1], 1).expand(len(tokens), -1, -1)
            inputs = {"inputs_embeds": torch.cat([embedded, behind], 1)}
        keep: int | Tensor = 0
        if rows is not None or tree.probes is not None:
            keep = torch.arange(tree.nodes, device=self.device) if rows is None else rows.unique()
            # One row by its index: sliced states are not contiguous, and each text would copy the head.
            keep = keep if len(keep) else positions.new_zeros(1)
        probes = 0 if tree.probes is None else len(tree.probes.vectors)
        depth = 0 if tree.is_chain and not probes else tree.depth + 1 + probes
        mask = self._masks(layout, positions, cache, tree.nodes, depth)
        began = perf_counter()
        logits, features = self._pass(inputs, positions, mask, cache, keep, tuple(taps))
        seconds = perf_counter() - began
        if rows is not None:
            at = torch.searchsorted(keep, rows) if isinstance(keep, Tensor) else rows
            logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
        return Output(logits, features, seconds)

    @torch.inference_mode()
    def extend(
        self, tokens: Int[Tensor, "B R"], layout: Layout, cache: KVCache, after: int
    ) -> Float[Tensor, "B R V"]:
        cache.reserve(tokens.shape[1], after)
        positions = (cache.lengths[:, None] + layout.depths).clamp(max=self.window - 1)
        mask = self._masks(layout, positions, cache, tokens.shape[1], layout.visible.shape[2])
        own = positions[:, after:].expand(len(tokens), -1)
        return self._pass({"input_ids": tokens.clamp(min=0)}, own, mask, cache, 0, ())[0]

    def _pass(
        self,
        inputs: dict[str, Tensor],
        positions: Int[Tensor, "B R"],
        mask: Masks,
        cache: KVCache,
        keep: int | Tensor,
        taps: tuple[str, ...],
    ) -> tuple[Float[Tensor, "B K V"], Float[Tensor, "B R F"] | None]:
        """The logits of the rows to keep, and the features of all rows."""
        with self.lock:
            if (decoder := self._described()) is not None:
                given = inputs.get("inputs_embeds")
                embedded = self.embed(inputs["input_ids"]) if given is None else given
                asked = [tap for tap in taps if tap.startswith(INPUT)]
                taken = [index_of(tap, len(self.blocks)) for tap in asked]
                final, took = decoder(embedded, positions, mask, cache, taken)
                logits = self._to_logits(final if isinstance(keep, int) else final[:, keep])
                said = {tap: took[block] for tap, block in zip(asked, taken, strict=True)}
                features = side_by_side(taps, {FINAL: final, **said}, cache, len(self.blocks))
            else:
                self._taps.watch(taps)
                view = View(cache, self.blocks)
                own: Any = {"position_ids": positions, "attention_mask": mask, "past_key_values": view}
                if self._selects_rows:
                    own["logits_to_keep"] = keep
                with self._calls:
                    logits = self.twin(**inputs, **own, use_cache=True).logits
                if isinstance(keep, Tensor) and logits.shape[1] != len(keep):  # it has made those of all rows
                    logits = logits[:, keep]
                features = self._taps.take(taps, cache)
        return logits if logits.dtype == torch.float64 else logits.float(), features

    @cached_property
    def _whole_embed(self) -> Any:
        support.check_embedding(self.plain, self.embed)
        return self.embed

    @cached_property
    def _selects_rows(self) -> bool:
        """Whether the model can be told which rows its LM head reads."""
        return "logits_to_keep" in signature(type(self.model).forward).parameters

    @cached_property
    def _taps(self) -> Taps:
        return Taps(decoder_of(self.twin, self.blocks), self.blocks)

    @cached_property
    def _to_logits(self) -> LMHead:
        return self.lm_head()

    def _described(self) -> Decoder | None:
        """The layers in one call, where there is a description of them and nobody looks into them."""
        return None if self.decoder is None or self.decoder.is_watched else self.decoder

    @cached_property
    def decoder(self) -> Decoder | None:
        """The layers as their description is executed; None where they are Hugging Face's modules."""
        ready = self._ours
        if self.device.type == "cuda":
            has_kernels = kernels.has_kernels(self.device, self.dtype)
            ready = has_kernels and not (self.compiles or of_torchao(self.twin))
        if not ready:
            return None
        try:
            return Decoder(self.twin, self.blocks, list(self.windows), self._ours)
        except Undescribed:
            return None

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
        cache = KVCache(len(self.blocks), 1, self.device)
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
        for row, sound in zip(rows, out.features.isfinite().all(-1).cpu(), strict=True):
            if not sound[: len(row)].all():
                raise ValueError(self.unsound(row))
        return out.features.clone()  # outside inference mode, so that autograd may read it

    def unsound(self, tokens: Sequence[int]) -> str:
        module = support.first_unsound(self.plain, tokens) or "no module of Hugging Face's own pass"
        return (
            f"target {self.name} says numbers that are not finite after {len(tokens)} tokens, first in "
            f"{module}: its weights are damaged, or {self.precision} is too narrow: load it in float32"
        )

    def warm_up(self) -> None:
        """Compile the passes that rounds of one text take: of one row and of several."""
        cache, tokens = self.new_cache(1), torch.zeros(1, 2, dtype=torch.long, device=self.device)
        for rows in (2, 1):
            self(chain(tokens[:, :rows]), cache)

    def _masks(
        self, layout: Layout, positions: Int[Tensor, "B A"], cache: KVCache, nodes: int, depth: int
    ) -> Masks:
        """What the new rows read, for the attention at hand."""
        if self._ours or self._described() is not None:
            return key_lists(layout, positions, cache, self.windows, nodes, depth)
        return dense(layout, positions, cache, self.windows, nodes, self.dtype)


def _widened(product: Callable[..., Tensor], *given: Tensor | None) -> Tensor:
    """A product, in float32 where it is bf16: an LM head may be cast."""
    out = product(*given)
    return out if torch.is_grad_enabled() or out.dtype != torch.bfloat16 else kernels.widened(out)
