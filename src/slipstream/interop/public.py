"""The public layouts of EAGLE-1/2 and EAGLE-3 (SafeAILab/EAGLE), and speculators' of EAGLE-3, in and out.

A directory with config.json and model.safetensors or pytorch_model.bin. Each layout says which sizes its config.json gives
and what its tensors are called; the tensors are otherwise the head's own.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.core.drafter import INPUT, Ends
from slipstream.core.shape import Shape
from slipstream.drafters import drafter_class
from slipstream.drafters.eagle import EagleConfig
from slipstream.drafters.eagle3 import Eagle3Config
from slipstream.drafters.heads import EMBEDDING, HeadConfig, block_taps
from slipstream.drafters.layers import ACTIVATIONS, LayerConfig
from slipstream.drafters.store import VOCAB, find_drafter, load_weights, read_drafter, save_drafter, write_directory

PLAIN_ROPE = (None, "default")
HELD = {"num_hidden_layers", "vocab_size", "rope_scaling", "rope_parameters", "model_type"}  # read, and checked
PICKLE, SAFE = "pytorch_model.bin", "model.safetensors"


@dataclass
class Report:
    """What became of every tensor and configuration key."""

    used: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Layout(ABC):
    """How a method's heads are written elsewhere."""

    method: ClassVar[str]
    keys: ClassVar[set[str]]  # of config.json, that are used

    @abstractmethod
    def sizes(self, config: dict[str, Any], ends: Ends, source: str) -> HeadConfig:
        """The head's sizes. Raises ValueError for one that this target cannot have."""

    @abstractmethod
    def config(self, head: Any, ends: Ends) -> dict[str, Any]:
        """config.json of a head of our own."""

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

    def sizes(self, config: dict[str, Any], ends: Ends, source: str) -> EagleConfig:
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

    def sizes(self, config: dict[str, Any], ends: Ends, source: str) -> Eagle3Config:
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

    def sizes(self, config: dict[str, Any], ends: Ends, source: str) -> Eagle3Config:
        return super().sizes({**config.get("transformer_layer_config", {}), **config}, ends, source)

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


LAYOUTS: dict[str, Layout] = {"eagle": EagleLayout(), "eagle3": Eagle3Layout(), "speculators": SpeculatorsLayout()}


def layout_of(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """Which of `LAYOUTS` a checkpoint is written in."""
    if "speculators_model_type" in config:
        return "speculators"
    return "eagle3" if any(name.startswith(Eagle3Layout.layer) for name in tensors) else "eagle"


def import_head(source: str, directory: str, target: str, ends: Ends, tree: str = "fig9") -> Report:
    """Make a drafter directory of a public checkpoint; its tensors keep their precision.

    Args:
        target: what the target is called.

    Raises:
        ValueError: a file is missing or damaged, a tensor missing, unknown or misshapen (by name), or the head does not fit
            this target.
    """
    Shape.parse(tree)
    config, tensors = _read(Path(source).expanduser())
    report, called = Report(), layout_of(config, tensors)
    layout = LAYOUTS[called]
    sizes = layout.sizes(config, ends, source)
    embedding, own = tensors.pop(EMBEDDING, None), _embedding(ends)
    kept: dict[str, Tensor] = {}
    if embedding is None:
        report.notes.append(f"{EMBEDDING}: absent, the target's is used")
    elif embedding.shape == own.shape and torch.equal(embedding, own.to(embedding)):
        report.notes.append(f"{EMBEDDING}: the target's own, left out")
    elif embedding.shape == own.shape and torch.allclose(embedding.float(), own.float().cpu(), rtol=1e-2, atol=1e-3):
        report.notes.append(f"{EMBEDDING}: the target's up to rounding; kept for export, the target's is used")
        kept = {EMBEDDING: embedding}
    else:
        raise ValueError(
            f"checkpoint {source}: {EMBEDDING} ({list(embedding.shape)}) is not this target's embedding: import it for the "
            "target it was made for"
        )
    report.used = [*tensors, *sorted((layout.keys | HELD) & set(config))]
    taken = layout.take(tensors, source)
    head = drafter_class(layout.method, source).module(sizes)
    load_weights(head, {name: t for name, t in taken.items() if name != VOCAB}, f"checkpoint {source}")
    ignored = sorted(set(config) - layout.keys - HELD)
    report.notes.append(f"config keys kept for export but not used here: {', '.join(ignored) or 'none'}")
    named = asdict(sizes)
    about: dict[str, Any] = {"taps": list(named.pop("taps")), "head": named, "tree": tree, "public": config}
    about["layout"], about["public_embedding"] = called, None if embedding is None else _about(embedding)
    training = {"imported_from": Path(source).name}
    save_drafter(directory, layout.method, target, ends, about, {**taken, **kept}, training, dtype=None)
    return report


def export_head(source: str, directory: str, ends: Ends, layout: str | None = None) -> Report:
    """Write a drafter directory in a public layout, for vLLM, SGLang or the reference code.

    Args:
        layout: of `LAYOUTS`; default: the one that it was imported from, or its method's own.

    Raises:
        ValueError: it is no drafter for this target, or one that the layout cannot express.
    """
    config, tensors = read_drafter(find_drafter(source, ends), ends)
    method = config["method"]
    named = layout or config.get("layout", method)
    if named not in LAYOUTS or LAYOUTS[named].method != method:
        fitting = ", ".join(name for name, each in LAYOUTS.items() if each.method == method)
        raise ValueError(f"drafter {source} is made by {method!r}, which has layout {fitting or 'none'}, not {named!r}")
    if config["head"].get("input_norm"):
        raise ValueError(
            f"drafter {source} has a norm before attention, which the public layout does not: train one without"
        )
    report, written = Report(), LAYOUTS[named]
    drafter = drafter_class(method, source).load(config, tensors, ends)
    stored = config.get("public_embedding", _about(_embedding(ends)) if method == "eagle" else None)
    embedding = tensors.pop(EMBEDDING, None)
    given = written.give(tensors, ends, report)
    if embedding is not None:
        given[EMBEDDING] = embedding
        report.notes.append(f"{EMBEDDING}: as it was imported")
    elif stored is not None:
        given[EMBEDDING] = _embedding(ends).to(getattr(torch, stored["dtype"])).cpu().contiguous()
        if _about(given[EMBEDDING]) != stored:
            raise ValueError(f"drafter {source}: load the target in the precision this head was imported with (--dtype)")
        report.notes.append(f"{EMBEDDING}: a copy of the target's")
    report.used = list(given)
    as_imported = config.get("public") if named == config.get("layout", method) else None
    write_directory(directory, as_imported or written.config(drafter.head.config, ends), given)
    return report


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


def _about(embedding: Tensor) -> dict[str, str]:
    """Enough to know an embedding again."""
    data = embedding.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {"dtype": str(embedding.dtype).removeprefix("torch."), "sha256": hashlib.sha256(data).hexdigest()}


def _embedding(ends: Ends) -> Tensor:
    weight: Any = ends.embed.weight
    return weight.detach()


def _read(home: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads((home / "config.json").read_text("utf-8"))
        if (home / SAFE).exists():
            return config, load_file(home / SAFE)
        return config, torch.load(home / PICKLE, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"checkpoint {home} has no {Path(error.filename or SAFE).name}: give a directory with config.json and "
            f"{SAFE} or {PICKLE}"
        ) from error
    except Exception as error:  # whatever a damaged or a harmful file makes of itself
        raise ValueError(
            f"checkpoint {home} cannot be read: {str(error).strip().split(chr(10))[0] or type(error).__name__}"
        ) from error
