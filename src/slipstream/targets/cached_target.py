"""Targets in the user's cache as descriptions, which start without Hugging Face's modules: to import these
takes more than a second, and to fill them as long."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig

from slipstream.core.target import Sizes
from slipstream.core.tree import chain
from slipstream.kernels.weight_packing import packed_weight
from slipstream.targets import model_cache
from slipstream.targets.decoder import Decoder, DecoderConfig, Description, Rotary
from slipstream.targets.decoder_target import DecoderTarget
from slipstream.targets.linear import Packed, own_products, packed_copy
from slipstream.targets.prompts import HFText
from slipstream.targets.quantized import Quantised, QuantisedEmbedding, QuantisedLinear, linear_of

TARGET = "target.pt"
MOST = 2**26  # bytes of parts that are no tensor of the model, such as norms in float32
FACTS = ("fingerprint", "source", "vocab", "width", "window", "windows", "scale", "cap", "_weights")


def _of_modules(name: str) -> Any:
    """An attribute that only modules have, so that the target becomes one of modules."""
    return property(lambda target: getattr(target.whole(), name))


@final
class CachedTarget(DecoderTarget):
    """A target on the CPU of a directory that `write` filled, and of the model's tensors by name. Where
    somebody asks for what only modules can say, such as `model`, it becomes the `HFTarget` that `modules`
    makes."""

    def __init__(
        self,
        place: Path,
        weights: Callable[[str], Tensor],
        modules: Callable[[], DecoderTarget],
        name: str,
        dtype: torch.dtype,
        quantize: str | None,
    ) -> None:
        record, own = model_cache.mapped(place / TARGET), dict[str, Tensor]()

        def tensor(stored: Any) -> Any:
            if not isinstance(stored, tuple):
                return stored
            key, is_packed = stored
            if is_packed:
                return packed_weight(weights(key))
            if key not in own:  # a copy: the user's own files may be written again
                own[key] = weights(key) if quantize else weights(key).clone()
            return own[key]

        self.name, self.device, self.dtype, self.quantize = name, torch.device("cpu"), dtype, quantize
        self.compiles = self.captures = False
        self._ours, self._modules, self._record = True, modules, record
        vars(self).update(record["facts"])
        self.sizes = Sizes(**record["sizes"])
        embedding, scales, width, _, factor = map(tensor, record["embed"])
        self.embed = Embedding(embedding, factor)
        if width is not None:
            self.embed = QuantisedEmbedding(embedding, scales, width, dtype, factor)
        head, scales, width, bias, _ = map(tensor, record["head"])
        if width is not None:
            self._head = QuantisedLinear(head, scales, width, dtype, bias)
        else:
            self._head = linear_of(head, bias)
            own_products(self._head, dtype, self.device)
        kind, parts, which, rotary, *more = record["description"]
        turns = [Rotary(tensor(frequencies), *rest) for frequencies, *rest in rotary]
        description = Description(DecoderConfig(**kind), list(map(tensor, parts)), which, turns, *more)
        self._decoder: Decoder | None = Decoder(description)
        self._generation_config = GenerationConfig.from_pretrained(place)
        self.text = None
        if record["tokenizer"] is not None:
            self.text = HFText(model_cache.tokenizer_of(place, record["tokenizer"]), name)

    def whole(self) -> Any:
        """This target with its modules. Raises ValueError if it is released."""
        with self.lock:
            if type(self) is CachedTarget:
                if self._decoder is None:
                    raise ValueError(self._released)
                target: Any = self._modules()
                target.text, target.model.generation_config = self.text, self._generation_config
                vars(self).pop("_to_logits", None)
                vars(self).update(vars(target))
                self.__class__ = type(target)
                del self._decoder  # which may hold packed weights
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def release(self) -> None:
        super().release()
        self._decoder = None

    decoder: Any = property(lambda self: self._decoder)
    layers: Any = property(lambda self: self.sizes.blocks)
    described: Any = property(lambda self: self._record["config"])
    read_bytes: Any = property(lambda self: self._record["read_bytes"])
    exactness: Any = property(lambda self: self._record["exactness"])
    generation_config: Any = property(lambda self: self._generation_config)
    margin: Any = _of_modules("margin")
    values: Any = _of_modules("values")
    rope: Any = _of_modules("rope")
    part: Any = _of_modules("part")
    trunk: Any = _of_modules("trunk")
    states: Any = _of_modules("states")
    explain_non_finite: Any = _of_modules("explain_non_finite")


class Embedding(nn.Module):
    """An embedding [V, H], of which each row is multiplied by a factor, as in Gemma."""

    weight: Tensor
    factor: Tensor | None

    def __init__(self, weight: Tensor, factor: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("factor", factor, persistent=False)

    def forward(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n H"]:
        """The rows of tokens."""
        rows = F.embedding(tokens, self.weight)
        return rows if self.factor is None else rows * self.factor.to(rows.dtype)


def write(target: Any, place: Path, read: Callable[[Path], CachedTarget]) -> None:
    """Fill a directory with what `CachedTarget` reads beside the model's own tensors. Raises ValueError: the
    layers are not described or have experts, or what is `read` again differs."""
    description = None if target.decoder is None else target.decoder.description
    if description is None or description.kind.chosen:
        raise ValueError("its passes run through modules")
    places = dict[Any, Any]()  # a name among the model's tensors, and whether packed; or a tensor of its own
    for name, module in target.shadow_model.named_modules():
        buffers = module._buffers if isinstance(module, Quantised) else {}  # others stand in no file
        for own, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None:
                places.setdefault(_key(tensor), (f"{name}.{own}", False))
        if type(module) is Packed:
            places.setdefault(_key(packed_copy(module)[0]), (f"{name}.weight", True))

    def ref(tensor: Tensor | None) -> Any:
        if tensor is not None and _key(tensor) not in places:
            places[_key(tensor)] = model_cache.apart(tensor)
        return None if tensor is None else places[_key(tensor)]

    def stored(module: Any) -> tuple[Any, ...]:
        names = ("weight", "scales", "width", "bias", "factor")
        weight, scales, width, bias, factor = (getattr(module, name, None) for name in names)
        if hasattr(module, "embed_scale"):
            factor = torch.as_tensor(module.embed_scale)
        return ref(weight), ref(scales), width, ref(bias), ref(factor)

    kind, parts = asdict(description.kind), list(map(ref, description.parts))
    rotary = [(ref(one.frequencies), one.factor, one.pairs) for one in description.rotary]
    tokenizer = None if target.text is None else target.text.tokenizer
    record = {
        "facts": {name: getattr(target, name) for name in FACTS},
        "sizes": asdict(target.sizes),
        "config": target.described,
        "read_bytes": target.read_bytes,
        "exactness": target.exactness,
        "embed": stored(target.embed),
        "head": stored(target._head),
        "description": (kind, parts, description.which, rotary, description.windows, description.factor),
        "tokenizer": tokenizer and type(tokenizer).__name__,
    }
    if sum(part.nbytes for part in places.values() if isinstance(part, Tensor)) > MOST:
        raise ValueError("its parts are no tensors of the model")
    place.mkdir()
    torch.save(record, place / TARGET)
    target.generation_config.save_pretrained(place)
    if tokenizer is not None:
        tokenizer.save_pretrained(place)
    text, again = chain(torch.arange(1, 5)[None] % target.vocab), read(place)
    logits = (one(text, one.new_cache(1)).logits for one in (again, target))
    facts = ("described", "manner", "sizes", "read_bytes", "exactness", *FACTS)
    if not torch.equal(*logits) or any(getattr(again, name) != getattr(target, name) for name in facts):
        raise ValueError("what was read again differs")


def _key(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.dtype
