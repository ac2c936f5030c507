"""A decoder-only Hugging Face causal LM as a target, through its own modelling code. All that makes a tree
pass possible is outside the model: our cache in the place of its own, a 4-D mask of what each row sees
(sliding windows included), explicit positions, and probe rows through `inputs_embeds`."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from slipstream.core.kv_cache import KVCache
from slipstream.core.tree import TreeLayout
from slipstream.kernels import ops
from slipstream.targets import attention_patch, support
from slipstream.targets.batch_invariance import agrees, own_noise, rounds_alike
from slipstream.targets.cached_target import CachedTarget
from slipstream.targets.decoder import Undescribed
from slipstream.targets.decoder_target import DecoderTarget, Features
from slipstream.targets.description import ModelDecoder
from slipstream.targets.masks import Masks, additive, dense
from slipstream.targets.prompts import HFText
from slipstream.targets.quantize import quantised
from slipstream.targets.quantized import of_torchao, stored_bytes
from slipstream.targets.shadow_model import (
    Blocks,
    CompiledForward,
    Earlier,
    Taps,
    View,
    own_blocks,
    shadow_of,
)


@final
class HFTarget(DecoderTarget):
    """A Hugging Face causal LM.

    The model stays the caller's. Passes run through a shadow model: modules of our own over the same weights,
    in which attention is replaced and layers are compiled. Of later changes of the model only those of
    weights in place reach it, as optimizers make them. Changes by `.data`, which PyTorch does not count, need
    a new `HFTarget`.

    Args:
        model: a Hugging Face causal LM.
        tokenizer: not needed if prompts are token ids.
        name: the user's name for the target.
        compile: run layers and LM head as compiled graphs, and on a GPU capture rounds as CUDA graphs
            (`engine.cuda_graphs`). On a CPU described layers stay one call of our kernels, which is quicker;
            graphs of others keep packed copies of weights, which do not follow later changes.
        exact: on a GPU, too, no row's bits depend on its neighbours (docs/exactness.md). There it may
            cost time; on a CPU it costs none, and is so wherever it can be.
        quantize: "int8" or "int4": decode a copy of the model whose linear layers, LM head and, on a CPU,
            embedding have weights of 8 bits, or of 4 and 8 (docs/quantised.md). The model stays as it is.

    Raises:
        ValueError: the model is no Hugging Face model, cannot be decoded exactly (`check_supported`,
            `check_causal`) or quantised, or has no kernels to be `exact` with.
    """

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
        support.check_whole(model)
        support.check_supported(config, model._is_stateful, signature(model.forward).parameters)
        if model.get_output_embeddings() is None:
            raise ValueError(f"a {type(model).__name__} has no LM head: load it with AutoModelForCausalLM")
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.device, self.dtype, self.quantize = model.device, model.dtype, quantize
        origin = getattr(model, "origin", None)  # of a quantised model from the cache
        self.fingerprint = origin.fingerprint if origin else support.fingerprint_of(model)
        self._weights = origin.weights if origin else model.num_parameters()
        self.model = model
        if quantize is not None and (origin is None or origin.quantize != quantize):
            self.model = quantised(model, quantize, self.name)
        self.text = None if tokenizer is None else HFText(tokenizer, self.name)
        support.check_causal(self.plain)
        self._shadow_model: PreTrainedModel | None = shadow_of(self.plain)
        self.config = self.shadow_model.config.get_text_config(decoder=True)
        self.source, self.vocab = self.config.name_or_path or "", self.config.vocab_size
        self.window = support.longest_text(self.plain)
        self.windows, self.sizes = support.attention_windows(self.config), support.sizes_of(self.config)
        self.scale, self.cap = support.scale_and_cap(self.config)
        self.blocks = own_blocks(self.shadow_model, self.sizes.blocks)
        self.embed: Any = self.shadow_model.get_input_embeddings()
        self._head: Any = self.shadow_model.get_output_embeddings()
        self.width = self._head.in_features
        self.compiles = self.captures = compile and self.device.type == "cuda"
        self._ours = False
        self._calls: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "cpu" or exact:
            self._take_ours()
        else:
            self._try_description()
        if exact and not self._ours:
            needs = attention_patch.NEEDS
            raise ValueError(f"target {self.name} cannot be exact in {self.precision}: {needs}")
        self.compiles = compile and self.decoder is None
        if self.compiles:
            one_call = hasattr(self._head, "product")
            for i, module in enumerate([*self.blocks, *[self._head] * (not one_call)]):
                module.forward = CompiledForward(module, self.device, i)

    def _take_ours(self) -> None:
        """Use our attention and products where they serve this model, and say what Hugging Face's own say."""
        theirs = self.config._attn_implementation
        settable = self.shadow_model._can_set_attn_implementation()
        known = settable or self.config.model_type in attention_patch.OWN_SDPA
        self._ours = known and ops.load(self.device, self.dtype) and not of_torchao(self.shadow_model)
        if settable and (self._ours or theirs == "sdpa"):
            self.shadow_model.set_attn_implementation(attention_patch.OURS)
        if self._ours:
            if attention_patch.called_directly(self.shadow_model, self.config):
                self._calls = attention_patch.OwnFunctions()
            attention_patch.own_parts(self.shadow_model, self.dtype, self.device)
            self._try_description()
            if self.decoder is None and not agrees(self, self.plain):
                self._ours, self._calls = False, nullcontext()
                if settable:
                    self.shadow_model.set_attn_implementation(theirs)

    def _try_description(self) -> None:
        """Use the description of the layers only where it says what Hugging Face's modules say."""
        if self.decoder is not None and not agrees(self, self.plain):
            self.decoder = None

    @cached_property
    def exactness(self) -> str:
        kinds = getattr(self.config, "layer_types", None) or [""] * len(self.blocks)
        first = {(kinds[i], str(block)): i for i, block in reversed([*enumerate(self.blocks)])}
        return "bits" if self._ours and rounds_alike(self.part(list(first.values()))) else "audited"

    @cached_property
    def margin(self) -> float:
        noise = 0.0 if self.dtype == torch.float64 else own_noise(self, self.plain)
        return max(super().margin, 2 * noise)  # both of two scores may be off by it

    @property
    def shadow_model(self) -> PreTrainedModel:
        """The model that passes run through. Raises ValueError once the target is released."""
        if self._shadow_model is None:
            raise ValueError(self._released)
        return self._shadow_model

    @cached_property
    def plain(self) -> PreTrainedModel:
        """Another shadow model, with Hugging Face's own attention and layers: the outside baseline. A model
        with a softcap gets eager attention, because `sdpa` ignores the softcap without a warning."""
        plain = shadow_of(self.model)
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
        super().release()
        self._shadow_model, self.blocks = None, Blocks(())
        for name in ("plain", "_taps"):
            vars(self).pop(name, None)

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def generation_config(self) -> GenerationConfig:
        return self.model.generation_config or GenerationConfig()

    @property
    def described(self) -> dict[str, Any]:
        return json.loads(self.config.to_json_string(use_diff=False))

    @property
    def read_bytes(self) -> int:
        embedding, head = self.embed.weight, self._head.weight
        return stored_bytes(self.shadow_model) - (embedding is not head) * embedding.nbytes

    def save(self, directory: str | Path) -> None:
        """Write model and tokenizer as Hugging Face does. Raises ValueError for a quantised one."""
        if self.quantize is not None:
            raise ValueError(f"target {self.name} is {self.quantize}, which Hugging Face cannot read again")
        self.model.save_pretrained(directory)
        if self.text is not None:
            self.text.tokenizer.save_pretrained(directory)

    def new_cache(self, batch: int, memory: Tensor | None = None) -> KVCache:
        if self.decoder is not None and self.decoder.weights.changed:  # here: it takes 1 % of a pass
            del self.decoder
        return super().new_cache(batch, memory)

    def rope(self, block: int) -> tuple[list[float], float]:
        return support.rope(self.config, block)

    def part(
        self, blocks: Sequence[int], own: bool = False, vocab: Int[Tensor, " Vd"] | None = None
    ) -> "HFTarget":
        target = copy(self)
        for name in ("_taps", "decoder", "_to_logits"):  # what passes over one model's modules are made with
            vars(target).pop(name, None)
        if self.decoder is None:  # a description that was tried, and found wrong, is no part's either
            target.decoder = None
        target._shadow_model, target.blocks, fresh = self.blocks.part(self.shadow_model, blocks, own, vocab)
        target._head = target.shadow_model.get_output_embeddings()
        for module, layer in fresh if self.compiles else ():
            module.forward = CompiledForward(module, self.device, layer)
        return target

    def trunk(self) -> dict[str, nn.Module]:
        return {"blocks": self.blocks, "between": nn.ModuleDict(self.blocks.between(self.shadow_model))}

    def states(
        self,
        embedded: Float[Tensor, "B R H"],
        positions: Int[Tensor, "#B R"],
        visible: Bool[Tensor, "#B R S"],
        columns: Int[Tensor, "#B S"],
        earlier: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> tuple[Float[Tensor, "B R H"], list[tuple[Tensor, Tensor]]]:
        masks = {}
        for kind, window in self.windows.items():
            in_window = positions[:, :, None] - columns[:, None] < (window or self.window + 1)
            masks[kind] = visible & (in_window | (columns < 0)[:, None])
        embedded = embedded.to(next(self.blocks.parameters()).dtype)
        cache = Earlier(earlier)
        out = self.blocks.decoder_of(self.shadow_model)(
            inputs_embeds=embedded,
            attention_mask=additive(masks, embedded.dtype),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state, cache.own

    def _pass(
        self, inputs: dict[str, Any], cache: KVCache, keep: Tensor | None, taps: tuple[str, ...]
    ) -> tuple[Float[Tensor, "B K V"], Features]:
        with self.lock:
            if self._described() is not None:
                return super()._pass(inputs, cache, keep, taps)
            self._taps.watch(taps)
            if self._selects_rows:
                inputs = inputs | {"logits_to_keep": 0 if keep is None else keep}
            with self._calls:
                view = View(cache, self.blocks)
                logits = self.shadow_model(**inputs, past_key_values=view, use_cache=True).logits
            if keep is not None and logits.shape[1] != len(keep):  # it has made those of all rows
                logits = logits[:, keep]
            features = self._taps.take(taps, cache)
        return logits if logits.dtype == torch.float64 else logits.float(), features

    @cached_property
    def _whole_embed(self) -> nn.Module:
        support.check_embedding(self.plain, self.embed)
        return self.embed

    @cached_property
    def _selects_rows(self) -> bool:
        """Whether the model can be told which rows its LM head reads."""
        return "logits_to_keep" in signature(type(self.model).forward).parameters

    @cached_property
    def _taps(self) -> Taps:
        return Taps(self.blocks.decoder_of(self.shadow_model), self.blocks)

    def _described(self) -> ModelDecoder | None:
        """The layers in one call, where there is a description of them and nobody looks into them."""
        return None if self.decoder is None or self.decoder.is_watched else self.decoder

    @cached_property
    def decoder(self) -> ModelDecoder | None:
        ready = self._ours
        if self.device.type == "cuda":
            known = ops.load(self.device, self.dtype)
            ready = known and not (self.compiles or of_torchao(self.shadow_model))
        if not ready:
            return None
        try:
            return ModelDecoder(self.shadow_model, self.blocks, list(self.windows), self._ours)
        except Undescribed:
            return None

    def explain_non_finite(self, tokens: Sequence[int]) -> str:
        module = support.first_non_finite(self.plain, tokens) or "no module of Hugging Face's own pass"
        return (
            f"target {self.name} says numbers that are not finite after {len(tokens)} tokens, first in "
            f"{module}: its weights are damaged, or {self.precision} is too narrow: load it in float32"
        )

    def _masks(
        self, layout: TreeLayout, positions: Int[Tensor, "B A"], cache: KVCache, nodes: int, depth: int
    ) -> Masks:
        lists = super()._masks(layout, positions, cache, nodes, depth)
        by_lists = self._ours or self._described() is not None
        return lists if by_lists else dense(lists, cache.view, self.dtype)


HFTarget.register(CachedTarget)  # which becomes one when somebody asks for its modules
