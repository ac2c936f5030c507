"""How others write heads: EAGLE-1/2 and EAGLE-3 (SafeAILab/EAGLE), speculators' EAGLE-3, two Medusas."""

import re
from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from slipstream.core.drafter import INPUT
from slipstream.core.target import Target
from slipstream.drafters.eagle import EagleConfig
from slipstream.drafters.eagle3 import Eagle3Config
from slipstream.drafters.heads import rows_of
from slipstream.drafters.medusa import MedusaConfig
from slipstream.drafters.store import VOCAB
from slipstream.interop.sizes import IDS, NESTED, SHARED, described, fits, layer, taps, written
from slipstream.methods import METHODS

BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.(weight|bias)")  # of a Medusa head, as we name it


Config = dict[str, Any]  # what a config.json holds
Tensors = dict[str, Tensor]


class Layout(ABC):
    """A public format of a method's weights, for one target.

    Attributes:
        notes: on what was read or written, for the user.
        keys: keys of config.json that are read.
        file: name of the file of tensors.
        embedding: checkpoints always hold a "copy" of the target's embedding, "may" hold it or one of their
            own, or hold "none".
        vocabulary: the draft vocabulary is stored in tensors; otherwise in our own key of config.json.
    """

    keys: ClassVar[set[str]]
    file: ClassVar[str] = "model.safetensors"
    embedding: ClassVar[Literal["copy", "may", "none"]] = "may"
    vocabulary: ClassVar[bool] = True

    def __init__(self, target: Target) -> None:
        self.target = target
        self.notes: list[str] = []

    @abstractmethod
    def knows(self, config: Config, tensors: Tensors) -> bool:
        """Whether a checkpoint is written in this layout."""

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

    def tree(self, sizes: Any) -> str:
        """The drafter's default tree."""
        return "fig9"

    def own_embedding(self, sizes: Any) -> bool:
        """Whether a head of these sizes has an embedding of its own."""
        return False

    def take(self, tensors: Tensors) -> Tensors:
        """Their tensors under our names. Raises ValueError."""
        return tensors

    def give(self, tensors: Tensors) -> Tensors:
        """Our tensors under their names."""
        return tensors


class EagleLayout(Layout):
    """EAGLE-1/2: config.json is the target's with one layer; beside the head's tensors a copy of the target's
    embedding."""

    keys, embedding, vocabulary = SHARED | {"bias"}, "copy", False

    def knows(self, config: Config, tensors: Tensors) -> bool:
        return True  # nothing marks it: what no other layout knows is read as this one

    def sizes(self, config: Config, tensors: Tensors) -> EagleConfig:
        has_bias = config.get("bias") is not False  # of the fc: the key's absence means that there is one
        fits("hidden_size", config.get("hidden_size"), self.target.width)
        return EagleConfig(**layer(config, tensors, self.target), bias=has_bias)

    def config(self, head: EagleConfig, name: str) -> Config:
        if head.input_norm:
            raise ValueError(
                "this head has a norm before attention, which layout eagle cannot express: train one without"
            )
        if head.inputs != "shifted":
            raise ValueError(
                f"this head reads {head.inputs} inputs, which layout eagle cannot express: train one with "
                "head.inputs=shifted"
            )
        bias = {} if head.bias else {"bias": False}
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return {**described(self.target), **written(head), **bias, **llama}

    def give(self, tensors: Tensors) -> Tensors:
        if "fc.bias" in tensors:
            self.notes.append(
                'fc.bias: vLLM leaves it out, and reads the key "bias" as one of attention; SGLang and EAGLE '
                "use it"
            )
        return tensors


@final
class SGLangEagleLayout(EagleLayout):
    """The same as SGLang reads it, whose fc always has a bias, and whose class has a name of its own."""

    name = "LlamaForCausalLMEagle"

    def knows(self, config: Config, tensors: Tensors) -> bool:
        return self.name in (config.get("architectures") or [])

    def config(self, head: EagleConfig, name: str) -> Config:
        made = super().config(head, name) | {"architectures": [self.name]}
        made.pop("bias", None)  # one of attention's there
        return made

    def give(self, tensors: Tensors) -> Tensors:
        weight = tensors["fc.weight"]
        return {"fc.bias": torch.zeros(len(weight), dtype=weight.dtype), **tensors}


class Eagle3Layout(Layout):
    """EAGLE-3: its own LM head; d2t [Vd] and t2d [V] say the draft vocabulary (target id = i + d2t[i]).

    Two keys name the states that it reads, one apart: `eagle_aux_hidden_state_layer_ids` counts inputs of
    blocks (vLLM), the same key in `eagle_config` outputs of blocks (SGLang, SpecForge, ModelOpt).
    """

    layer = "midlayer."
    flags: ClassVar = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
    own: ClassVar = (*flags, "draft_vocab_size", "target_hidden_size", "embed_requires_grad", IDS)
    keys: ClassVar = SHARED | {*own, f"{NESTED}{IDS}", f"{NESTED}norm_before_fc"}

    def knows(self, config: Config, tensors: Tensors) -> bool:
        return any(name.startswith(self.layer) for name in tensors)

    def flat(self, config: Config) -> Config:
        nested = {f"{NESTED}{name}": value for name, value in (config.get("eagle_config") or {}).items()}
        return {name: value for name, value in config.items() if name != "eagle_config"} | nested

    def sizes(self, config: Config, tensors: Tensors) -> Eagle3Config:
        H, wide = config.get("hidden_size"), config.get("target_hidden_size")
        fits("target_hidden_size" if wide else "hidden_size", wide or H, self.target.sizes.hidden_size)
        flags: dict[str, Any] = {name: bool(config.get(name)) for name in self.flags}
        flags["norm_before_fc"] = bool(config.get(f"{NESTED}norm_before_fc", flags["norm_before_fc"]))
        own = bool(config.get("embed_requires_grad")) or self.target.sizes.hidden_size != H
        return Eagle3Config(
            **layer(config, tensors, self.target),
            **flags,
            taps=taps(config, self.target.sizes.blocks),
            draft_vocab_size=config.get("draft_vocab_size") or self.target.vocab,
            target_hidden_size=0 if wide in (None, H) else wide,
            vocab_size=self.target.vocab if own else 0,
        )

    def own_embedding(self, sizes: Eagle3Config) -> bool:
        return sizes.vocab_size > 0

    def config(self, head: Eagle3Config, name: str) -> Config:
        inputs = [int(tap.removeprefix(INPUT)) for tap in head.taps if tap.startswith(INPUT)]
        if len(inputs) < len(head.taps) or inputs != sorted(set(inputs)):
            raise ValueError(
                f"this head reads {', '.join(map(repr, head.taps))}, and engines inputs of blocks alone, in "
                "ascending order: train one that reads those (head.taps)"
            )
        own: Config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        own |= {"tie_word_embeddings": False}
        own |= {name: getattr(head, name) for name in (*self.flags, "draft_vocab_size")}
        own |= {"target_hidden_size": head.target_hidden_size or head.hidden_size}
        own |= {"embed_requires_grad": bool(head.vocab_size), IDS: inputs}
        nested = {IDS: [i - 1 for i in inputs], "use_aux_hidden_state": True}
        return {**described(self.target), **written(head), **own, "eagle_config": nested}

    def take(self, tensors: Tensors) -> Tensors:
        taken = {name.replace(self.layer, "midlayer.", 1): tensor for name, tensor in tensors.items()}
        d2t, t2d = taken.pop("d2t", None), taken.pop("t2d", None)
        if d2t is not None:
            taken[VOCAB] = d2t + torch.arange(len(d2t))
            if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], taken[VOCAB]):
                raise ValueError("d2t and t2d do not say the same draft vocabulary, in ascending order")
        return taken

    def give(self, tensors: Tensors) -> Tensors:
        given = {name.replace("midlayer.", self.layer, 1): tensor for name, tensor in tensors.items()}
        if (vocab := given.pop(VOCAB, None)) is not None:
            given["d2t"] = vocab.long() - torch.arange(len(vocab))
            given["t2d"] = torch.zeros(self.target.vocab, dtype=torch.bool).index_fill_(0, vocab.long(), True)
        return given


@final
class SpeculatorsLayout(Eagle3Layout):
    """The same in the vLLM project's speculators: the layer's sizes in `transformer_layer_config`."""

    layer = "layers.0."

    def knows(self, config: Config, tensors: Tensors) -> bool:
        return "speculators_model_type" in config

    def flat(self, config: Config) -> Config:
        if (kind := config["speculators_model_type"]) != "eagle3":
            raise ValueError(f"this is one of speculators' {kind!r} heads; of those, eagle3 is read here")
        sections = {name: value for name, value in config.items() if name != "transformer_layer_config"}
        return super().flat({**config.get("transformer_layer_config", {}), **sections})

    def sizes(self, config: Config, tensors: Tensors) -> Eagle3Config:
        if "norm_before_residual" not in config:
            self.notes.append(
                "norm_before_residual: absent, false as speculators has it; vLLM takes it as true"
            )
        return super().sizes(config, tensors)

    def config(self, head: Eagle3Config, name: str) -> Config:
        flat = super().config(head, name)
        greedy = {"proposal_type": "greedy", "speculative_tokens": 3}
        greedy |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        verifier = {"name_or_path": name, "architectures": self.target.described.get("architectures") or []}
        proposing = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy]}
        layer = {name: value for name, value in flat.items() if name not in (*self.own, "eagle_config")}
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3DraftModel"],
            **{name: flat[name] for name in self.own},
            "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"]},
            "speculators_config": {**proposing, "verifier": verifier},
            "tie_word_embeddings": False,
        }


class MedusaLayout(Layout):
    """Medusa (FasterDecoding/Medusa): `{head}.{block}.linear`, and behind the blocks the LM head. Its
    config.json may count fewer heads than the file has, which counts."""

    file, embedding = "medusa_lm_head.safetensors", "none"
    keys: ClassVar = {"medusa_num_heads", "medusa_num_layers", "version"}  # which the tensors say, too
    block: ClassVar = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")

    def knows(self, config: Config, tensors: Tensors) -> bool:
        return any(map(self.block.fullmatch, tensors))

    def sizes(self, config: Config, tensors: Tensors) -> MedusaConfig:
        blocks = [match for match in map(BLOCK.fullmatch, tensors) if match]
        depth, layers = (1 + max((int(match[i]) for match in blocks), default=-1) for i in (1, 2))
        shared, bias = "lm_heads.0.weight" not in tensors, "blocks.0.0.bias" in tensors
        if shared:
            self.notes.append("lm_heads: absent, the target's LM head is used at every depth")
        H = tensors["blocks.0.0.weight"].shape[1]
        own = len(tensors[VOCAB]) if VOCAB in tensors else self.target.vocab
        Vd = own if shared else len(tensors["lm_heads.0.weight"])
        if self.target.width != H or Vd != own:
            raise ValueError(
                f"LM heads of {Vd} tokens and width {H}; this target has {self.target.vocab} and "
                f"{self.target.width}: import it for the target it was made for"
            )
        return MedusaConfig(H, Vd, depth, layers, bias, shared)

    def tree(self, sizes: MedusaConfig) -> str:
        return f"best-first-{sizes.depth}x16"

    def config(self, head: MedusaConfig, name: str) -> Config:
        sizes = {"medusa_num_heads": head.depth, "medusa_num_layers": head.layers}
        return sizes | {"base_model_name_or_path": name}

    def take(self, tensors: Tensors) -> Tensors:
        blocks = (match for match in map(self.block.fullmatch, tensors) if match)
        last = dict(sorted((match[1], int(match[2])) for match in blocks))
        renamed = {f"{i}.{n + 1}.weight": f"lm_heads.{i}.weight" for i, n in last.items()}
        block = self.block
        return {renamed.get(k, block.sub(r"blocks.\1.\2.\3", k)): tensor for k, tensor in tensors.items()}

    def give(self, tensors: Tensors) -> Tensors:
        if VOCAB in tensors:
            raise ValueError(
                f"this head drafts {len(tensors[VOCAB])} of {self.target.vocab} tokens, which layout medusa "
                "cannot express: export it as medusa-vllm, or train one with head.draft_vocab=0"
            )
        layers = 1 + max(int(match[2]) for match in map(BLOCK.fullmatch, tensors) if match)

        def named(name: str) -> str:
            return re.sub(r"lm_heads\.(\d+)", rf"\1.{layers}", BLOCK.sub(r"\1.\2.linear.\3", name))

        return {named(name): tensor for name, tensor in tensors.items()}


@final
class VLLMMedusaLayout(MedusaLayout):
    """The same as vLLM and other engines read it; `token_map` is the draft vocabulary."""

    file = Layout.file
    keys: ClassVar = {
        "num_heads", "num_hidden_layers", "medusa_fc_bias", "hidden_size", "vocab_size",
        "truncated_vocab_size", "original_lm_head",
    }  # fmt: skip

    def knows(self, config: Config, tensors: Tensors) -> bool:
        return any(name.startswith("blocks.0.layers.") for name in tensors)

    def sizes(self, config: Config, tensors: Tensors) -> MedusaConfig:
        theirs = tensors.pop("lm_heads.0.weight") if config.get("original_lm_head") else None
        if theirs is not None and not close(theirs, lm_head_rows(self.target, tensors.get(VOCAB))):
            raise ValueError(
                "original_lm_head=True, and lm_heads.0.weight is not this target's LM head: import it for "
                "the target it was made for"
            )
        return super().sizes(config, tensors)

    def config(self, head: MedusaConfig, name: str) -> Config:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": head.hidden_size,
            "vocab_size": self.target.vocab,
            "truncated_vocab_size": head.draft_vocab_size,
            "num_heads": head.depth,
            "num_hidden_layers": head.layers,
            "medusa_fc_bias": head.bias,
            "original_lm_head": head.shared,
        }

    def take(self, tensors: Tensors) -> Tensors:
        taken = {re.sub(r"(blocks\.\d+)\.layers\.", r"\1.", name): tensor for name, tensor in tensors.items()}
        if (vocab := taken.pop("token_map", None)) is not None:
            taken[VOCAB] = vocab.long()
        return taken

    def give(self, tensors: Tensors) -> Tensors:
        given = {re.sub(r"(blocks\.\d+)\.", r"\1.layers.", name): tensor for name, tensor in tensors.items()}
        if "lm_heads.0.weight" not in given:
            own = lm_head_rows(self.target, tensors.get(VOCAB))
            given["lm_heads.0.weight"] = own.to(tensors["blocks.0.0.weight"].dtype)
        if (vocab := given.pop(VOCAB, None)) is not None:
            given["token_map"] = vocab.long()
            if "lm_heads.1.weight" in given:
                self.notes.append(
                    "token_map: vLLM 0.32 takes one beside the target's LM head alone, not beside LM heads "
                    "of its own: for vLLM train one with head.draft_vocab=0"
                )
        return given


def lm_head_rows(target: Target, vocab: Tensor | None) -> Tensor:
    """The rows of the target's LM head that say a draft vocabulary, by default all."""
    lm_head = target.lm_head(None if vocab is None else vocab.long())
    return rows_of(lm_head, target.embed(torch.zeros(1, dtype=torch.long, device=target.device))).cpu()


def layouts(target: Target) -> dict[str, tuple[str, Layout]]:
    """The method and the layout of each name."""
    return {
        name: (method.name, resolve_name(layout)(target))
        for method in METHODS.values()
        for name, layout in method.layouts.items()
    }


def close(theirs: Tensor, own: Tensor) -> bool:
    """Whether a matrix is the target's up to rounding."""
    return theirs.shape == own.shape and torch.allclose(theirs.float(), own.float(), rtol=1e-2, atol=1e-3)
