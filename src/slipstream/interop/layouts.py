"""How others write heads: EAGLE-1/2 and EAGLE-3 (SafeAILab/EAGLE), speculators' EAGLE-3, two Medusas, and
FastEagle, which our plugin of vLLM reads."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, final

import torch
import yaml
from torch import Tensor
from transformers import LlamaConfig

from slipstream.core.drafter import FINAL, INPUT
from slipstream.core.target import Target
from slipstream.drafters.eagle.model import EagleConfig
from slipstream.drafters.eagle3.model import Eagle3Config
from slipstream.drafters.fasteagle.model import FastEagleConfig
from slipstream.drafters.heads import HeadConfig, block_taps, rows_of
from slipstream.drafters.layers import ACTIVATIONS, SCALED, LayerConfig
from slipstream.drafters.medusa.model import MedusaConfig
from slipstream.drafters.store import VOCAB
from slipstream.files import several
from slipstream.interop.vllm_plugin import FASTEAGLE
from slipstream.methods import METHODS

Config = dict[str, Any]  # what a config.json holds
Tensors = dict[str, Tensor]
FOR_ITS_TARGET = "import it for the target it was made for"
SIZES = [f.name for f in fields(LayerConfig)]
# Keys of a layer that are read here.
LAYER = {*SIZES, "num_hidden_layers", "vocab_size", "rope_parameters", "partial_rotary_factor", "qkv_bias",
         "model_type"} - {"output_bias"}  # fmt: skip
IDS, NESTED = "eagle_aux_hidden_state_layer_ids", "eagle_config."
_KEYS = yaml.safe_load(Path(__file__).with_name("config_keys.yaml").read_text())
NOT_COPIED, INERT, ONLY = frozenset(_KEYS["not_copied"]), frozenset(_KEYS["inert"]), _KEYS["only"]
LLAMA = LlamaConfig().to_dict()


class Layout(ABC):
    """A public format of a method's weights, for one target."""

    keys: ClassVar[set[str]]  # of config.json that are read
    mark: ClassVar[str] = "(?!)"  # regular expression of a tensor, key or architecture of no other layout
    names: ClassVar[Mapping[str, str]] = {}  # beginnings of our tensors' names and theirs; {} is a number
    file: ClassVar[str] = "model.safetensors"  # of tensors
    # Checkpoints hold a "copy" of the target's embedding, "may" hold it or their own, or hold "none".
    embedding: ClassVar[Literal["copy", "may", "none"]] = "may"
    vocabulary: ClassVar[bool] = True  # the draft vocabulary is a tensor, not our own key of config.json
    d2t: ClassVar[bool] = False  # that tensor is d2t [Vd]: target id = i + d2t[i]
    tree: ClassVar[str] = "fig9"  # the drafter's default, which may name sizes of the head, such as {depth}
    notes: list[str]  # on what was read or written, for the user

    def __init__(self, target: Target) -> None:
        self.target, self.notes = target, []

    def knows(self, config: Config, tensors: Tensors) -> bool:
        """Whether a checkpoint is written in this layout. By default, whether it has the layout's `mark`."""
        words = ["", *tensors, *config, *several(config.get("architectures"))]
        return any(re.match(self.mark, word) for word in words)

    @abstractmethod
    def sizes(self, config: Config, tensors: Tensors) -> Any:
        """The head's sizes, from the `flat` config and tensors under our names. Raises ValueError where they
        do not fit the target."""

    @abstractmethod
    def config(self, head: Any, name: str) -> Config:
        """config.json of our own head; `name` is the target's. Raises ValueError if it cannot express it."""

    def flat(self, config: Config) -> Config:
        """config.json without sections."""
        return config

    def take(self, tensors: Tensors) -> Tensors:
        """Their tensors under our names. Raises ValueError."""
        tensors = renamed(tensors, {theirs: ours for ours, theirs in self.names.items()})
        if self.d2t and (d2t := tensors.pop("d2t", None)) is not None:
            tensors[VOCAB] = d2t + torch.arange(len(d2t))
        return tensors | ({VOCAB: tensors[VOCAB].long()} if VOCAB in tensors else {})

    def give(self, tensors: Tensors) -> Tensors:
        """Our tensors under their names."""
        public = renamed(tensors, self.names)
        if self.d2t and (vocab := public.pop(VOCAB, None)) is not None:
            public["d2t"] = vocab.long() - torch.arange(len(vocab))
        return public

    def _described(self, head: HeadConfig, architecture: str) -> Config:
        """What is copied from the target's config.json, and the layer's sizes under Hugging Face's names."""
        copied = {key: value for key, value in self.target.described.items() if key not in NOT_COPIED}
        sizes = {name: getattr(head, name) for name in SIZES if name not in ("output_bias", "rope_scaling")}
        if head.attention_bias and not head.output_bias:
            sizes["qkv_bias"] = True
        scaling = head.rope_scaling or {}
        sizes["rope_parameters"] = {"rope_type": "default", **scaling, "rope_theta": head.rope_theta}
        if scaling:
            sizes["rope_scaling"] = scaling
        llama = {"architectures": [architecture], "model_type": "llama"}
        return {**copied, "num_hidden_layers": 1, **sizes, **llama}

    def _layer(self, config: Config, tensors: Tensors) -> dict[str, Any]:
        """Sizes of a head's one layer, checked against the target. Raises ValueError."""
        for name, own in (("num_hidden_layers", 1), ("vocab_size", self.target.vocab)):
            check_size(name, config.get(name, own), own)
        if missing := [name for name in ("intermediate_size", "num_attention_heads") if name not in config]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if (activation := config.get("hidden_act", "silu")) not in ACTIVATIONS:
            raise ValueError(f"hidden_act {activation!r}; available: {', '.join(ACTIVATIONS)}")
        stated = {name: value for name, value in config.items() if value is not None}
        heads = config["num_attention_heads"]
        sizes = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
        sizes |= {name: stated[name] for name in SIZES if name in stated} | _rope(config)
        default = stated.get("attention_bias", config.get("model_type") == "qwen2")
        sizes["attention_bias"] = bool(stated.get("qkv_bias", default))
        sizes["output_bias"] = any(name.endswith("self_attn.o_proj.bias") for name in tensors)
        return sizes


class EagleLayout(Layout):
    """EAGLE-1/2: config.json is the target's with one layer; the file has a copy of the target's embedding.
    Nothing marks it: what no other layout knows is read as this one."""

    keys, mark, embedding, vocabulary = LAYER | {"bias"}, "", "copy", False

    def sizes(self, config: Config, tensors: Tensors) -> EagleConfig:
        check_size("hidden_size", config.get("hidden_size"), self.target.width)
        has_bias = config.get("bias") is not False  # of the fc: the key's absence means that there is one
        return EagleConfig(**self._layer(config, tensors), bias=has_bias)

    def config(self, head: EagleConfig, name: str) -> Config:
        cannot = "which layout eagle cannot express: train one"
        if head.input_norm:
            raise ValueError(f"this head has a norm before attention, {cannot} without")
        if head.inputs != "shifted":
            raise ValueError(f"this head reads {head.inputs} inputs, {cannot} with head.inputs=shifted")
        return self._described(head, "LlamaForCausalLM") | ({} if head.bias else {"bias": False})

    def give(self, tensors: Tensors) -> Tensors:
        if "fc.bias" in tensors:
            use = 'vLLM leaves it out, and reads the key "bias" as one of attention; SGLang and EAGLE use it'
            self.notes.append(f"fc.bias: {use}")
        return tensors


@final
class SGLangEagleLayout(EagleLayout):
    """The same as SGLang reads it, whose fc always has a bias, and whose class has a name of its own."""

    mark = "LlamaForCausalLMEagle$"

    def config(self, head: EagleConfig, name: str) -> Config:
        config = super().config(head, name) | {"architectures": [self.mark[:-1]]}
        config.pop("bias", None)  # one of attention's there
        return config

    def give(self, tensors: Tensors) -> Tensors:
        weight = tensors["fc.weight"]
        return {"fc.bias": torch.zeros(len(weight), dtype=weight.dtype), **tensors}


class Eagle3Layout(Layout):
    """EAGLE-3: its own LM head; d2t [Vd] and t2d [V] say the draft vocabulary.

    Two keys name the states that it reads, one apart: `eagle_aux_hidden_state_layer_ids` counts inputs of
    blocks (vLLM), the same key in `eagle_config` outputs of blocks (SGLang, SpecForge, ModelOpt).
    """

    mark, d2t = r"midlayer\.", True
    flags: ClassVar = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
    own: ClassVar = (*flags, "draft_vocab_size", "target_hidden_size", "embed_requires_grad", IDS)
    keys: ClassVar = LAYER | {*own, f"{NESTED}{IDS}", f"{NESTED}norm_before_fc"}

    def flat(self, config: Config) -> Config:
        nested = {f"{NESTED}{name}": value for name, value in (config.get("eagle_config") or {}).items()}
        return {name: value for name, value in config.items() if name != "eagle_config"} | nested

    def sizes(self, config: Config, tensors: Tensors) -> Eagle3Config:
        H, wide = config.get("hidden_size"), config.get("target_hidden_size")
        target_width = self.target.sizes.hidden_size
        check_size("target_hidden_size" if wide else "hidden_size", wide or H, target_width)
        flags: dict[str, Any] = {name: bool(config.get(name)) for name in self.flags}
        flags["norm_before_fc"] = bool(config.get(f"{NESTED}norm_before_fc", flags["norm_before_fc"]))
        own_embedding = bool(config.get("embed_requires_grad")) or target_width != H
        return Eagle3Config(
            **self._layer(config, tensors),
            **flags,
            taps=_taps(config, self.target.sizes.blocks),
            draft_vocab_size=config.get("draft_vocab_size") or self.target.vocab,
            target_hidden_size=0 if wide in (None, H) else wide,
            vocab_size=self.target.vocab if own_embedding else 0,
        )

    def config(self, head: Eagle3Config, name: str) -> Config:
        inputs = [int(tap.removeprefix(INPUT)) for tap in head.taps if tap.startswith(INPUT)]
        if len(inputs) < len(head.taps) or inputs != sorted(set(inputs)):
            raise ValueError(
                f"this head reads {', '.join(map(repr, head.taps))}, and engines inputs of blocks alone, in "
                "ascending order: train one that reads those (head.taps)"
            )
        config = self._described(head, "LlamaForCausalLMEagle3") | {"tie_word_embeddings": False}
        config |= {name: getattr(head, name) for name in (*self.flags, "draft_vocab_size")}
        config |= {"target_hidden_size": head.target_hidden_size or head.hidden_size}
        config |= {"embed_requires_grad": bool(head.vocab_size), IDS: inputs}
        return config | {"eagle_config": {IDS: [i - 1 for i in inputs], "use_aux_hidden_state": True}}

    def take(self, tensors: Tensors) -> Tensors:
        tensors = super().take(tensors)
        t2d, vocab = tensors.pop("t2d", None), tensors.get(VOCAB)
        if t2d is not None and vocab is not None and not torch.equal(t2d.bool().nonzero()[:, 0], vocab):
            raise ValueError("d2t and t2d do not say the same draft vocabulary, in ascending order")
        return tensors

    def give(self, tensors: Tensors) -> Tensors:
        public = super().give(tensors)
        if VOCAB in tensors:
            public["t2d"] = torch.isin(torch.arange(self.target.vocab), tensors[VOCAB])
        return public


@final
class SpeculatorsLayout(Eagle3Layout):
    """The same in the vLLM project's speculators: the layer's sizes in `transformer_layer_config`."""

    mark = "speculators_model_type$"
    names: ClassVar = {"midlayer.": "layers.0."}

    def flat(self, config: Config) -> Config:
        if (kind := config["speculators_model_type"]) != "eagle3":
            raise ValueError(f"this is one of speculators' {kind!r} heads; of those, eagle3 is read here")
        sections = {name: value for name, value in config.items() if name != "transformer_layer_config"}
        return super().flat({**config.get("transformer_layer_config", {}), **sections})

    def sizes(self, config: Config, tensors: Tensors) -> Eagle3Config:
        if (flag := "norm_before_residual") not in config:
            self.notes.append(f"{flag}: absent, false as speculators has it; vLLM takes it as true")
        return super().sizes(config, tensors)

    def config(self, head: Eagle3Config, name: str) -> Config:
        flat = super().config(head, name)
        layer = {name: value for name, value in flat.items() if name not in (*self.own, "eagle_config")}
        greedy = {"proposal_type": "greedy", "speculative_tokens": 3}
        greedy |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        proposing = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy]}
        verifier = {"name_or_path": name, "architectures": self.target.described.get("architectures") or []}
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3DraftModel"],
            **{name: flat[name] for name in self.own},
            "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"]},
            "speculators_config": {**proposing, "verifier": verifier},
            "tie_word_embeddings": False,
        }


class MedusaLayout(Layout):
    """Medusa (FasterDecoding/Medusa): `{head}.{block}.linear`, and after the blocks the LM head. Its
    config.json may count fewer heads than the file has; the file is right."""

    file, embedding = "medusa_lm_head.safetensors", "none"
    keys: ClassVar = {"medusa_num_heads", "medusa_num_layers", "version"}  # which the tensors say, too
    mark, tree = r"\d+\.\d+\.linear\.(weight|bias)$", "best-first-{depth}x16"

    def sizes(self, config: Config, tensors: Tensors) -> MedusaConfig:
        depth, layers = _medusa_sizes(tensors)
        shared, bias = "lm_heads.0.weight" not in tensors, "blocks.0.0.bias" in tensors
        if shared:
            self.notes.append("lm_heads: absent, the target's LM head is used at every depth")
        H, drafted = tensors["blocks.0.0.weight"].shape[1], len(tensors.get(VOCAB, range(self.target.vocab)))
        Vd = drafted if shared else len(tensors["lm_heads.0.weight"])
        if self.target.width != H or Vd != drafted:
            has = f"this target has {self.target.vocab} and {self.target.width}"
            raise ValueError(f"LM heads of {Vd} tokens and width {H}; {has}: {FOR_ITS_TARGET}")
        return MedusaConfig(H, Vd, depth, layers, bias, shared)

    def config(self, head: MedusaConfig, name: str) -> Config:
        sizes = {"medusa_num_heads": head.depth, "medusa_num_layers": head.layers}
        return sizes | {"base_model_name_or_path": name}

    def take(self, tensors: Tensors) -> Tensors:
        blocks = renamed(tensors, {"{}.{}.linear.": "blocks.{}.{}."})
        return renamed(blocks, {f"{{}}.{_medusa_sizes(blocks)[1]}.": "lm_heads.{}."})

    def give(self, tensors: Tensors) -> Tensors:
        if VOCAB in tensors:
            raise ValueError(
                f"this head drafts {len(tensors[VOCAB])} of {self.target.vocab} tokens, which layout medusa "
                "cannot express: export it as medusa-vllm, or train one with head.draft_vocab=0"
            )
        lm_heads = f"{{}}.{_medusa_sizes(tensors)[1]}."
        return renamed(tensors, {"blocks.{}.{}.": "{}.{}.linear.", "lm_heads.{}.": lm_heads})


@final
class VLLMMedusaLayout(MedusaLayout):
    """The same as vLLM and other engines read it; `token_map` is the draft vocabulary."""

    file, mark = Layout.file, r"blocks\.0\.layers\."
    of_head: ClassVar = {"hidden_size": "hidden_size", "truncated_vocab_size": "draft_vocab_size",
                         "num_heads": "depth", "num_hidden_layers": "layers", "medusa_fc_bias": "bias",
                         "original_lm_head": "shared"}  # fmt: skip
    keys: ClassVar = {*of_head, "vocab_size"}
    names: ClassVar = {"blocks.{}.": "blocks.{}.layers.", VOCAB: "token_map"}

    def sizes(self, config: Config, tensors: Tensors) -> MedusaConfig:
        theirs = tensors.pop("lm_heads.0.weight") if config.get("original_lm_head") else None
        if theirs is not None and not close(theirs, lm_head_rows(self.target, tensors.get(VOCAB))):
            wrong = "original_lm_head=True, and lm_heads.0.weight is not this target's LM head"
            raise ValueError(f"{wrong}: {FOR_ITS_TARGET}")
        return super().sizes(config, tensors)

    def config(self, head: MedusaConfig, name: str) -> Config:
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "vocab_size": self.target.vocab}
        return config | {key: getattr(head, size) for key, size in self.of_head.items()}

    take = Layout.take

    def give(self, tensors: Tensors) -> Tensors:
        public = Layout.give(self, tensors)
        if "lm_heads.0.weight" not in public:
            rows = lm_head_rows(self.target, tensors.get(VOCAB))
            public["lm_heads.0.weight"] = rows.to(tensors["blocks.0.0.weight"].dtype)
        if VOCAB in tensors:
            public["token_map"] = tensors[VOCAB].long()
            if "lm_heads.1.weight" in public:
                fix = "not beside LM heads of its own: for vLLM train one with head.draft_vocab=0"
                takes = "vLLM 0.32 takes one beside the target's LM head alone"
                self.notes.append(f"token_map: {takes}, {fix}")
        return public


@final
class FastEagleLayout(Layout):
    """FastEagle for our plugin of vLLM (`vllm_fasteagle`): no other engine knows it.

    config.json is that of an EAGLE-3 head with N layers. Further tensors are d2t, the LM head's rows of that
    vocabulary, and the target's last norm, because engines hand over the final state before it.
    """

    keys: ClassVar = LAYER | {"draft_vocab_size", "cascade", "input_norm", IDS}
    embedding, mark, d2t, tree = "none", f"{FASTEAGLE}$", True, "best-first-{depth}x8"
    draft_vocab = 0  # tokens of the head that was written; 0: all

    def sizes(self, config: Config, tensors: Tensors) -> FastEagleConfig:
        depth, blocks = config.get("num_hidden_layers"), self.target.sizes.blocks
        check_size("hidden_size", config.get("hidden_size"), self.target.width)
        ids = config.get(IDS) or []
        if not (isinstance(depth, int) and depth > 0 and ids and all(0 <= i <= blocks for i in ids)):
            raise ValueError(f"num_hidden_layers={depth!r} and {IDS}={ids!r} name no layers of this target")
        taps = tuple(FINAL if i == blocks else f"{INPUT}{i}" for i in ids)
        sizes: Any = self._layer(config | {"num_hidden_layers": 1}, tensors)
        sizes |= {name: bool(config.get(name)) for name in ("cascade", "input_norm")}
        return FastEagleConfig(**sizes, taps=taps, depth=depth)

    def config(self, head: FastEagleConfig, name: str) -> Config:
        blocks = self.target.sizes.blocks
        ids = [blocks if tap == FINAL else int(tap.removeprefix(INPUT)) for tap in head.taps]
        if ids != sorted(set(ids)):
            raise ValueError(
                f"this head reads {', '.join(map(repr, head.taps))}, and engines hand states over in "
                "ascending order, the final one last: train one that reads them so (head.taps)"
            )
        if head.rank:
            cannot = "which vLLM's way of drafting cannot express: train one with head.rank=0"
            raise ValueError(f"this head's laws know the token above them (head.rank), {cannot}")
        config = self._described(head, FASTEAGLE) | {"tie_word_embeddings": False}
        config |= {"num_hidden_layers": head.depth, "cascade": head.cascade, "input_norm": head.input_norm}
        return config | {"draft_vocab_size": self.draft_vocab or self.target.vocab, IDS: ids}

    def take(self, tensors: Tensors) -> Tensors:
        tensors = super().take(tensors)
        lm_head = partial(lm_head_rows, self.target, tensors.get(VOCAB))
        for name, own in (("lm_head.weight", lm_head), ("norm.weight", self._norm)):
            if name in tensors and not close(tensors.pop(name), own()):
                raise ValueError(f"{name} is not this target's: {FOR_ITS_TARGET}")
        self.notes.append("lm_head.weight, norm.weight: the target's own, left out")
        return tensors

    def give(self, tensors: Tensors) -> Tensors:
        public, dtype = super().give(tensors), tensors["fuse.weight"].dtype
        public["norm.weight"] = self._norm().to(dtype)
        if (vocab := tensors.get(VOCAB)) is not None:
            self.draft_vocab = len(vocab)
            public["lm_head.weight"] = lm_head_rows(self.target, vocab).to(dtype)
        return public

    def _norm(self) -> Tensor:
        """The weight of the target's last norm. Raises ValueError where it is no plain RMSNorm."""
        for module in self.target.trunk()["between"].children():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.shape == (self.target.width,):
                x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)
                plain = torch.nn.functional.rms_norm(x, x.shape, weight, self.target.sizes.rms_norm_eps)
                if torch.allclose(module(x[None])[0], plain, rtol=2e-2, atol=1e-3):
                    return weight.detach().cpu()
        raise ValueError("the last norm of this target is no plain RMSNorm, which this layout cannot express")


def layouts(target: Target) -> dict[str, tuple[str, Layout]]:
    """The method and the layout of each name."""
    return {
        name: (method.name, resolve_name(layout)(target))
        for method in METHODS.values()
        for name, layout in method.layouts.items()
    }


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Tensors under other names: a beginning that `names` has is replaced. `{}` stands for a number."""
    patterns = {re.escape(old).replace(r"\{\}", r"(\d+)"): new for old, new in names.items()}

    def new_name(name: str) -> str:
        matches = ((re.match(old, name), new) for old, new in patterns.items())
        return next((new.format(*m.groups()) + name[m.end() :] for m, new in matches if m), name)

    return {new_name(name): tensor for name, tensor in tensors.items()}


def lm_head_rows(target: Target, vocab: Tensor | None) -> Tensor:
    """The rows of the target's LM head for a draft vocabulary, by default all."""
    lm_head = target.lm_head(None if vocab is None else vocab.long())
    return rows_of(lm_head, target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).cpu()


def close(theirs: Tensor, own: Tensor) -> bool:
    """Whether a matrix is the target's up to rounding."""
    return theirs.shape == own.shape and torch.allclose(theirs.float(), own.float(), rtol=1e-2, atol=1e-3)


def check_size(name: str, value: Any, own: int) -> None:
    """Raise ValueError for a size that is not this target's."""
    if value != own:
        raise ValueError(f"{name}={value}; this target's is {own}: {FOR_ITS_TARGET}")


def unread(config: Config, read: Sequence[str], target: Config) -> list[str]:
    """The keys that are not `read` and change nothing: known ones and those that begin with "_", unset ones,
    and those at Llama's default or at the target's own value. Raises ValueError where there are others."""
    others = {name: value for name, value in config.items() if name not in read}
    windowless = config.get("use_sliding_window") is False or config.get("layer_types") == ONLY["layer_types"]

    def inert(name: str, value: Any) -> bool:
        if name in ONLY:
            return value is None or bool(value == ONLY[name])
        known = name in INERT or name.startswith("_") or (name == "sliding_window" and windowless)
        default = any(name in own and own[name] == value for own in (LLAMA, target))
        return known or default or value is None or value is False or value in ([], {}, "")

    if wrong := [f"{name}={value!r}" for name, value in others.items() if not inert(name, value)]:
        raise ValueError(
            f"config.json says {', '.join(wrong)}, which may change what the head says and is not known "
            "here: import a head without it, or take it out if you know that it changes nothing"
        )
    return sorted(others)


def _medusa_sizes(tensors: Tensors) -> tuple[int, int]:
    """Heads, and blocks of a head, of tensors under our names."""
    blocks = [m for m in (re.match(r"blocks\.(\d+)\.(\d+)\.(weight|bias)$", name) for name in tensors) if m]
    depth, layers = (1 + max((int(match[i]) for match in blocks), default=-1) for i in (1, 2))
    return depth, layers


def _taps(config: Config, blocks: int) -> tuple[str, ...]:
    """The states that an EAGLE-3 head reads. Raises ValueError."""
    inputs, outputs = config.get(IDS), config.get(f"{NESTED}{IDS}")
    after = [i + 1 for i in outputs or ()]
    if inputs and outputs and inputs != after:
        raise ValueError(
            f"{IDS}={inputs} are inputs of blocks, and {NESTED}{IDS}={outputs} outputs, that is inputs of "
            f"{after}: they say different states; take the wrong one out of config.json"
        )
    ids = inputs or after
    if not ids:
        return block_taps(blocks)
    if not all(0 <= i < blocks for i in ids) or ids != sorted(set(ids)):
        has = f"this target has blocks 0 to {blocks - 1}, and engines read them in ascending order"
        raise ValueError(f"the head reads the inputs of blocks {ids}; {has}")
    return tuple(f"{INPUT}{i}" for i in ids)


def _rope(config: Config) -> dict[str, Any]:
    """Base and scaling of a head's rotary positions. Raises ValueError for one that is not known here."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind, old_kind = rope.pop("rope_type", None), rope.pop("type", None) or "default"
    kind = kind or next((name for name in rope if isinstance(rope[name], dict)), old_kind)
    share = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if kind not in ("default", *SCALED) or share != 1.0:
        known = f"default, {', '.join(SCALED)}, over all of it"
        raise ValueError(f"rope {kind!r} over {share} of a head's width; available: {known}")
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    length = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    scaling = {"original_max_position_embeddings": length, **rope, "rope_type": kind}
    return {"rope_theta": float(theta), "rope_scaling": scaling}
