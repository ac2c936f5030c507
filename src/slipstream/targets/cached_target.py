"""Targets in the user's cache as descriptions, which start without Hugging Face's modules: to import these
takes more than a second, and to fill them as long."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig

from slipstream.core.target import Sizes, Target
from slipstream.core.tree import chain
from slipstream.files import read_json
from slipstream.kernels.weight_packing import packed_weight
from slipstream.targets import model_cache as kept
from slipstream.targets.decoder import Decoder, Description, Rotary
from slipstream.targets.decoder_target import DecoderTarget
from slipstream.targets.executor import Kind
from slipstream.targets.linear import Packed, own_products, packed_copy
from slipstream.targets.prompts import HFText
from slipstream.targets.quantized import Quantised, QuantisedEmbedding, QuantisedLinear, linear_of

TARGET, PARTS = "target.json", "parts.bin"
MOST = 2**26  # bytes of parts that are no tensor of the model, such as norms in float32
FACTS = (  # attributes that are read as they were
    *("fingerprint", "source", "vocab", "width", "window", "windows", "scale", "cap"),
    "_weights",
)


@final
class KeptTarget(DecoderTarget):
    """A target on the CPU of what `write` wrote. Where somebody asks for what only modules can say, such as
    `model`, it becomes the `HFTarget` that was written.

    Args:
        place: a directory that `write` filled.
        weights: the model's tensors by name, in the precision `dtype`.
        modules: makes the `HFTarget`.
    """

    def __init__(
        self,
        place: Path,
        weights: Callable[[str], Tensor],
        modules: Callable[[], DecoderTarget],
        name: str,
        dtype: torch.dtype,
        quantize: str | None,
    ) -> None:
        said = read_json(place / TARGET, "cache")
        parts, own = kept.mapped(place / PARTS, said["places"]), dict[str, Tensor]()

        def found(ref: list[str] | None) -> Any:
            if ref is None:
                return None
            kind, key = ref
            if kind == "part":
                return parts[key]
            if kind == "packed":
                return packed_weight(weights(key))
            if key not in own:  # a copy: the user's own files may be written again
                own[key] = weights(key) if quantize else weights(key).clone()
            return own[key]

        self.name, self.device, self.dtype, self.quantize = name, torch.device("cpu"), dtype, quantize
        self.compiles = self.captures = False
        self._ours, self._modules, self._said = True, modules, said
        vars(self).update(said["facts"])
        self.sizes = Sizes(**said["sizes"])
        self.embed = _embedding(said["embed"], found, dtype)
        self._head = _head(said["head"], found, dtype)
        kind, layers = Kind(**said["kind"]), list(map(found, said["parts"]))
        rotary = [Rotary(found(ref), *rest) for ref, *rest in said["rotary"]]
        rest = said["which"], rotary, said["types"], said["factor"]
        self._decoder: Decoder | None = Decoder(Description(kind, layers, *rest))
        self._generation_config = GenerationConfig.from_pretrained(place)
        self.text = None
        if said["tokenizer"] is not None:
            self.text = HFText(kept.tokenizer_of(place, said["tokenizer"]), name)

    def whole(self) -> Any:
        """This target with its modules. Raises ValueError if it is released."""
        with self.lock:
            if type(self) is KeptTarget:
                if self._decoder is None:
                    raise ValueError(self._released)
                made: Any = self._modules()
                made.text, made.model.generation_config = self.text, self._generation_config
                vars(self).pop("_to_logits", None)
                vars(self).update(vars(made))
                self.__class__ = type(made)
                del self._decoder  # which may hold packed weights
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def release(self) -> None:
        super().release()
        self._decoder = None

    @property
    def decoder(self) -> Decoder | None:
        return self._decoder

    @property
    def layers(self) -> int:
        return self.sizes.blocks

    @property
    def described(self) -> dict[str, Any]:
        config: dict[str, Any] = self._said["config"]
        return config

    @property
    def read_bytes(self) -> int:
        return int(self._said["read_bytes"])

    @property
    def generation_config(self) -> GenerationConfig:
        return self._generation_config

    @property
    def exactness(self) -> str:
        return str(self._said["exactness"])

    @property
    def margin(self) -> float:
        return self.whole().margin

    @property
    def values(self) -> str:
        return self.whole().values

    def rope(self, block: int) -> tuple[list[float], float]:
        return self.whole().rope(block)

    def part(self, *which: Any, **how: Any) -> Target:
        return self.whole().part(*which, **how)

    def trunk(self) -> dict[str, nn.Module]:
        return self.whole().trunk()

    def states(self, *rows: Any, **how: Any) -> Any:
        return self.whole().states(*rows, **how)

    def explain_non_finite(self, tokens: Any) -> str:
        return self.whole().explain_non_finite(tokens)


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


def _embedding(said: Mapping[str, Any], found: Callable[..., Any], dtype: torch.dtype) -> nn.Module:
    weight, factor = found(said["weight"]), found(said["factor"])
    if said["width"] is None:
        return Embedding(weight, factor)
    return QuantisedEmbedding(weight, found(said["scales"]), said["width"], dtype, factor)


def _head(said: Mapping[str, Any], found: Callable[..., Any], dtype: torch.dtype) -> nn.Module:
    weight, bias = found(said["weight"]), found(said["bias"])
    if said["width"] is not None:
        return QuantisedLinear(weight, found(said["scales"]), said["width"], dtype, bias)
    made = linear_of(weight, bias)
    own_products(made, dtype, torch.device("cpu"))
    return made


def write(target: Any, place: Path, read: Callable[[Path], KeptTarget]) -> None:
    """Fill a directory with what `KeptTarget` reads beside the model's own tensors. Raises ValueError where
    the layers are not described or have experts, or where what is `read` again says anything else."""
    description = None if target.decoder is None else target.decoder.description
    if description is None or description.kind.chosen:
        raise ValueError("its passes run through modules")
    places, parts = dict[Any, list[str]](), dict[str, Tensor]()
    for name, module in target.twin.named_modules():
        buffers = module._buffers if isinstance(module, Quantised) else {}  # others stand in no file
        for own, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None:
                places.setdefault(_key(tensor), ["weight", f"{name}.{own}"])
        if type(module) is Packed:
            places.setdefault(_key(packed_copy(module)[0]), ["packed", f"{name}.weight"])

    def ref(tensor: Tensor | None) -> list[str] | None:
        if tensor is None:
            return None
        if _key(tensor) not in places:
            places[_key(tensor)] = ["part", str(len(parts))]
            parts[str(len(parts))] = tensor
        return places[_key(tensor)]

    def described(each: Any) -> dict[str, Any]:
        factor = getattr(each, "factor", getattr(each, "embed_scale", None))
        tensors = {name: getattr(each, name, None) for name in ("weight", "scales", "bias")}
        tensors["factor"] = None if factor is None else torch.as_tensor(factor)
        return {"width": getattr(each, "width", None)} | {name: ref(x) for name, x in tensors.items()}

    tokenizer = None if target.text is None else target.text.tokenizer
    said = {
        "facts": {name: getattr(target, name) for name in FACTS},
        "sizes": asdict(target.sizes),
        "config": target.described,
        "read_bytes": target.read_bytes,
        "exactness": target.exactness,
        "embed": described(target.embed),
        "head": described(target._head),
        "kind": asdict(description.kind),
        "parts": list(map(ref, description.parts)),
        "which": description.which,
        "rotary": [(ref(one.frequencies), one.factor, one.pairs) for one in description.rotary],
        "types": description.windows,
        "factor": description.factor,
        "tokenizer": tokenizer and type(tokenizer).__name__,
    }
    if sum(part.nbytes for part in parts.values()) > MOST:
        raise ValueError("its parts are no tensors of the model")
    place.mkdir()
    (place / TARGET).write_text(json.dumps({**said, "places": kept.save(parts, place / PARTS)}), "utf-8")
    target.generation_config.save_pretrained(place)
    if tokenizer is not None:
        tokenizer.save_pretrained(place)
    text, again = chain(torch.arange(1, 5)[None] % target.vocab), read(place)
    says = (each(text, each.new_cache(1)).logits for each in (again, target))
    facts = ("described", "manner", "sizes", "read_bytes", "exactness", *FACTS)
    if not torch.equal(*says) or any(getattr(again, name) != getattr(target, name) for name in facts):
        raise ValueError("what was kept says something else")


def _key(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.dtype
