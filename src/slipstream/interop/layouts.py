"""How heads are written elsewhere: EAGLE-1/2 and EAGLE-3 (SafeAILab/EAGLE), speculators' EAGLE-3, and Medusa twice.

Each layout says which sizes its config.json gives and what its tensors are called, which are otherwise the head's own.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from slipstream.core.drafter import INPUT, Ends
from slipstream.drafters.eagle import EagleConfig
from slipstream.drafters.eagle3 import Eagle3Config
from slipstream.drafters.heads import HeadConfig, block_taps
from slipstream.drafters.layers import ACTIVATIONS, LayerConfig
from slipstream.drafters.medusa import MedusaConfig
from slipstream.drafters.store import VOCAB

PLAIN_ROPE = (None, "default")
HELD = {"num_hidden_layers", "vocab_size", "rope_scaling", "rope_parameters", "model_type"}  # read, and checked

BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.(weight|bias)")  # of a Medusa head, as we name it


@dataclass
class Report:
    """What became of every tensor and configuration key."""

    used: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Layout(ABC):
    """How a method's heads are written elsewhere."""

    method: ClassVar[str]
    keys: ClassVar[set[str]]  # of config.json, that are used
    file: ClassVar[str] = "model.safetensors"  # that it is written to

    @abstractmethod
    def sizes(self, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends, source: str) -> Any:
        """The head's sizes; tensors are under our names. Raises ValueError for one that this target cannot have."""

    @abstractmethod
    def config(self, head: Any, ends: Ends) -> dict[str, Any]:
        """config.json of a head of our own."""

    def tree(self, sizes: Any) -> str:
        """What a head of it drafts by default."""
        return "fig9"

    def take(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        """Their tensors under our names. Raises ValueError."""
        return tensors

    def give(self, tensors: dict[str, Tensor], ends: Ends, report: Report) -> dict[str, Tensor]:
        """Our tensors under their names."""
        return tensors


@final
class EagleLayout(Layout):
    """EAGLE-1/2: config.json is the target's with one layer; beside the head's tensors a copy of the target's embedding."""

    method = "eagle"
    keys: ClassVar = {f.name for f in fields(EagleConfig)} - {"input_norm", "taps"}

    def sizes(self, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends, source: str) -> EagleConfig:
        has_bias = config.get("bias") is not False  # of the fc: the key's absence means that there is one
        return EagleConfig(**_layer(config, ends, source), bias=has_bias)

    def config(self, head: EagleConfig, ends: Ends) -> dict[str, Any]:
        sizes = {name: value for name, value in vars(head).items() if name in self.keys and not (name == "bias" and value)}
        return {**_targets(ends), **sizes, **_rope(head), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}

    def give(self, tensors: dict[str, Tensor], ends: Ends, report: Report) -> dict[str, Tensor]:
        if VOCAB in tensors:
            n = len(tensors[VOCAB])
            report.notes.append(f"{VOCAB}: left out; engines take candidates from all tokens, not from these {n}")
        if "fc.bias" in tensors:
            report.notes.append(
                'fc.bias: vLLM leaves it out, and reads the key "bias" as one of attention; SGLang and EAGLE use it'
            )
        return {name: tensor for name, tensor in tensors.items() if name != VOCAB}


class Eagle3Layout(Layout):
    """EAGLE-3: its own LM head; d2t [Vd] and t2d [V] say the draft vocabulary (target id = i + d2t[i])."""

    method, layer = "eagle3", "midlayer."
    keys: ClassVar = {f.name for f in fields(Eagle3Config)} - {"taps"} | {
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
    }

    def sizes(self, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends, source: str) -> Eagle3Config:
        blocks = ends.config.num_hidden_layers
        own = config.get("eagle_config") or {}
        ids = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
        if ids is not None and not all(0 <= i < blocks for i in ids):
            raise ValueError(
                f"checkpoint {source} reads the inputs of blocks {ids}; this target has blocks 0 to {blocks - 1}"
            )
        if (width := config.get("target_hidden_size")) not in (None, ends.config.hidden_size):
            raise ValueError(f"checkpoint {source}: target_hidden_size={width}; this target's is {ends.config.hidden_size}")
        return Eagle3Config(
            **_layer(config, ends, source),
            taps=block_taps(blocks) if ids is None else tuple(f"{INPUT}{i}" for i in ids),
            draft_vocab_size=config.get("draft_vocab_size") or len(ends.head),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )

    def config(self, head: Eagle3Config, ends: Ends) -> dict[str, Any]:
        sizes = {name: value for name, value in vars(head).items() if name in self.keys}
        ids = {"eagle_aux_hidden_state_layer_ids": [int(tap.removeprefix(INPUT)) for tap in head.taps]}
        own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "tie_word_embeddings": False}
        return {**_targets(ends), **sizes, **_rope(head), **own, **ids}

    def take(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        taken = {name.replace(self.layer, "midlayer.", 1): tensor for name, tensor in tensors.items()}
        d2t, t2d = taken.pop("d2t", None), taken.pop("t2d", None)
        if d2t is not None:
            taken[VOCAB] = d2t + torch.arange(len(d2t))
            if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], taken[VOCAB]):
                raise ValueError(
                    f"checkpoint {source}: d2t and t2d do not say the same draft vocabulary, in ascending order"
                )
        return taken

    def give(self, tensors: dict[str, Tensor], ends: Ends, report: Report) -> dict[str, Tensor]:
        given = {name.replace("midlayer.", self.layer, 1): tensor for name, tensor in tensors.items()}
        if (vocab := given.pop(VOCAB, None)) is not None:
            given["d2t"] = vocab.long() - torch.arange(len(vocab))
            given["t2d"] = torch.zeros(len(ends.head), dtype=torch.bool).index_fill_(0, vocab.long(), True)
        return given


@final
class SpeculatorsLayout(Eagle3Layout):
    """The same in the vLLM project's speculators: the layer's sizes in `transformer_layer_config`."""

    layer = "layers.0."
    keys: ClassVar = Eagle3Layout.keys | {"transformer_layer_config", "target_hidden_size"}

    def sizes(self, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends, source: str) -> Eagle3Config:
        return super().sizes({**config.get("transformer_layer_config", {}), **config}, tensors, ends, source)

    def config(self, head: Eagle3Config, ends: Ends) -> dict[str, Any]:
        flat = super().config(head, ends)
        own = ("draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
        greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        verifier = {"name_or_path": "", "architectures": list(getattr(ends.config, "architectures", None) or [])}
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3DraftModel"],
            **{name: flat.pop(name) for name in own},
            "target_hidden_size": head.hidden_size,
            "transformer_layer_config": {**flat, "architectures": ["LlamaForCausalLM"]},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [greedy],
                "verifier": verifier,
            },
            "tie_word_embeddings": False,
        }


class MedusaLayout(Layout):
    """Medusa (FasterDecoding/Medusa): `{head}.{block}.linear`, and behind the blocks the LM head. Its config.json may count
    fewer heads than the file has, which counts."""

    method, file = "medusa", "medusa_lm_head.safetensors"
    keys: ClassVar = {"medusa_num_heads", "medusa_num_layers"}
    block: ClassVar = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")

    def sizes(self, config: dict[str, Any], tensors: dict[str, Tensor], ends: Ends, source: str) -> MedusaConfig:
        found = [match for match in map(BLOCK.fullmatch, tensors) if match]
        depth, layers = (1 + max((int(match[i]) for match in found), default=-1) for i in (1, 2))
        first, bias = tensors.get("lm_heads.0.weight"), "blocks.0.0.bias" in tensors
        if first is None or not layers:
            raise ValueError(f"checkpoint {source} has no Medusa heads: {', '.join(sorted(tensors)[:3])}, …")
        Vd, H = first.shape
        if ends.head.shape[1] != H or Vd != len(tensors.get(VOCAB, ends.head)):
            raise ValueError(
                f"checkpoint {source}: LM heads of {Vd} tokens and width {H}; this target has {len(ends.head)} and "
                f"{ends.head.shape[1]}: import it for the target it was made for"
            )
        return MedusaConfig(H, Vd, depth, layers, bias)

    def tree(self, sizes: MedusaConfig) -> str:
        return f"best-first-{sizes.depth}x16"

    def config(self, head: MedusaConfig, ends: Ends) -> dict[str, Any]:
        base = getattr(ends.config, "_name_or_path", "") or ""
        return {"medusa_num_heads": head.depth, "medusa_num_layers": head.layers, "base_model_name_or_path": base}

    def take(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        layers = {match[1]: int(match[2]) + 1 for match in map(self.block.fullmatch, sorted(tensors)) if match}
        renamed = {f"{i}.{n}.weight": f"lm_heads.{i}.weight" for i, n in layers.items()}
        return {renamed.get(name, self.block.sub(r"blocks.\1.\2.\3", name)): tensor for name, tensor in tensors.items()}

    def give(self, tensors: dict[str, Tensor], ends: Ends, report: Report) -> dict[str, Tensor]:
        if VOCAB in tensors:
            raise ValueError(
                f"this head says {len(tensors[VOCAB])} of {len(ends.head)} tokens, which layout medusa cannot express: "
                "export it as medusa-vllm, or train one with head.draft_vocab=0"
            )
        layers = 1 + max(int(match[2]) for match in map(BLOCK.fullmatch, tensors) if match)
        named = {name: BLOCK.sub(r"\1.\2.linear.\3", name) for name in tensors}
        return {re.sub(r"lm_heads\.(\d+)", rf"\1.{layers}", named[name]): tensor for name, tensor in tensors.items()}


@final
class VLLMMedusaLayout(MedusaLayout):
    """The same as vLLM and other engines read it; `token_map` is the draft vocabulary."""

    file = "model.safetensors"
    keys: ClassVar = {"num_heads", "num_hidden_layers", "medusa_fc_bias", "truncated_vocab_size"}

    def config(self, head: MedusaConfig, ends: Ends) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": head.hidden_size,
            "vocab_size": len(ends.head),
            "truncated_vocab_size": head.draft_vocab_size,
            "num_heads": head.depth,
            "num_hidden_layers": head.layers,
            "medusa_fc_bias": head.bias,
        }

    def take(self, tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
        taken = {re.sub(r"(blocks\.\d+)\.layers\.", r"\1.", name): tensor for name, tensor in tensors.items()}
        if (vocab := taken.pop("token_map", None)) is not None:
            taken[VOCAB] = vocab.long()
        return taken

    def give(self, tensors: dict[str, Tensor], ends: Ends, report: Report) -> dict[str, Tensor]:
        given = {re.sub(r"(blocks\.\d+)\.", r"\1.layers.", name): tensor for name, tensor in tensors.items()}
        if (vocab := given.pop(VOCAB, None)) is not None:
            given["token_map"] = vocab.long()
        return given


LAYOUTS: dict[str, Layout] = {
    "eagle": EagleLayout(),
    "eagle3": Eagle3Layout(),
    "speculators": SpeculatorsLayout(),
    "medusa": MedusaLayout(),
    "medusa-vllm": VLLMMedusaLayout(),
}


def layout_of(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Which of `LAYOUTS` a checkpoint is written in."""
    if "speculators_model_type" in config:
        return "speculators"
    if any(map(MedusaLayout.block.fullmatch, tensors)):
        return "medusa"
    if any(name.startswith("blocks.0.layers.") for name in tensors):
        return "medusa-vllm"
    return "eagle3" if any(name.startswith(Eagle3Layout.layer) for name in tensors) else "eagle"


def _targets(ends: Ends) -> dict[str, Any]:
    """What a head's config.json takes over from the target's."""
    gone = {
        "rope_parameters",
        "rope_scaling",
        "layer_types",
        "quantization_config",
        "_name_or_path",
        "transformers_version",
    }
    return {key: value for key, value in ends.config.to_dict().items() if key not in gone} | {"num_hidden_layers": 1}


def _rope(head: HeadConfig) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": head.rope_theta}}


def _layer(config: dict[str, Any], ends: Ends, source: str) -> dict[str, Any]:
    """Sizes of a head's one layer, checked against the target. Raises ValueError."""
    layers, vocab = config.get("num_hidden_layers", 1), config.get("vocab_size", len(ends.head))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    H = config.get("hidden_size")
    if layers != 1 or vocab != len(ends.head) or kind not in PLAIN_ROPE or ends.head.shape[1] != H:
        raise ValueError(
            f"checkpoint {source}: num_hidden_layers={layers}, vocab_size={vocab}, hidden_size={H}, "
            f"rope {kind or 'default'!r}; this target takes num_hidden_layers=1, vocab_size={len(ends.head)}, "
            f"hidden_size={ends.head.shape[1]} and plain rope"
        )
    missing = [name for name in ("intermediate_size", "num_attention_heads") if name not in config]
    if missing or config.get("hidden_act", "silu") not in ACTIVATIONS:
        raise ValueError(
            f"checkpoint {source}: config.json lacks {', '.join(missing)}"
            if missing
            else f"checkpoint {source}: hidden_act {config['hidden_act']!r}; available: {', '.join(ACTIVATIONS)}"
        )
    heads = config["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": H // heads,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "attention_bias": config.get("model_type") == "qwen2",
    }
    names = {f.name for f in fields(LayerConfig)}
    return {**defaults, **{name: config[name] for name in names if config.get(name) is not None}}
