"""The public EAGLE-1/2 layout (SafeAILab/EAGLE), in and out.

A directory with config.json, the target's with one layer, and model.safetensors or pytorch_model.bin. The tensors are
`EagleHead`'s, and `embed_tokens.weight`, a copy of the target's embedding.
"""

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.core.drafter import Ends
from slipstream.core.shape import Shape
from slipstream.drafters.eagle import EMBEDDING, EagleConfig, EagleHead
from slipstream.drafters.layers import ACTIVATIONS
from slipstream.drafters.store import find_drafter, load_weights, read_drafter, save_drafter, write_directory

PLAIN_ROPE = (None, "default")
SIZES = {f.name for f in fields(EagleConfig)} - {"input_norm"}
HELD = {"num_hidden_layers", "vocab_size", "rope_scaling", "rope_parameters", "model_type"}  # read, and checked
PICKLE, SAFE = "pytorch_model.bin", "model.safetensors"


@dataclass
class Report:
    """What became of every tensor and configuration key."""

    used: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def import_eagle(source: str, directory: str, target: str, ends: Ends, tree: str = "fig9") -> Report:
    """Make a drafter directory of a public checkpoint; its tensors keep their precision.

    Args:
        target: what the target is called.

    Raises:
        ValueError: a file is missing or damaged, a tensor missing, unknown or misshapen (by name), or the head does not fit
            this target.
    """
    Shape.parse(tree)
    config, tensors = _read(Path(source).expanduser())
    report = Report()
    head = EagleHead(_sizes(config, ends, source))
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
    load_weights(head, tensors, f"checkpoint {source}")
    report.used = [*tensors, *sorted((SIZES | HELD) & set(config))]
    ignored = sorted(set(config) - SIZES - HELD)
    report.notes.append(f"config keys kept for export but not used here: {', '.join(ignored) or 'none'}")
    about: dict[str, Any] = {"head": vars(head.config), "taps": ["final"], "tree": tree, "public": config}
    about["public_embedding"] = None if embedding is None else _about(embedding)
    save_drafter(
        directory, "eagle", target, ends, about, {**tensors, **kept}, {"imported_from": Path(source).name}, dtype=None
    )
    return report


def export_eagle(source: str, directory: str, ends: Ends) -> Report:
    """Write a drafter directory in the public layout, for vLLM, SGLang or the reference code.

    Raises:
        ValueError: it is no eagle drafter for this target, or a variant that the layout cannot express.
    """
    config, tensors = read_drafter(find_drafter(source, ends), ends)
    if config["method"] != "eagle":
        raise ValueError(f"drafter {source} is made by {config['method']!r}: this layout holds eagle")
    if config["head"]["input_norm"]:
        raise ValueError(
            f"drafter {source} has a norm before attention, which the public layout does not: train one without"
        )
    report = Report()
    if (vocab := tensors.pop("draft_vocab", None)) is not None:
        report.notes.append(f"draft_vocab: left out; engines take candidates from all tokens, not from these {len(vocab)}")
    head = EagleHead(EagleConfig(**config["head"]))
    load_weights(head, {name: t for name, t in tensors.items() if name != EMBEDDING}, f"drafter {source}")
    stored = config.get("public_embedding", _about(_embedding(ends)))
    if EMBEDDING in tensors:
        report.notes.append(f"{EMBEDDING}: as it was imported")
    elif stored is not None:
        tensors[EMBEDDING] = _embedding(ends).to(getattr(torch, stored["dtype"])).cpu().contiguous()
        if _about(tensors[EMBEDDING]) != stored:
            raise ValueError(f"drafter {source}: load the target in the precision this head was imported with (--dtype)")
        report.notes.append(f"{EMBEDDING}: a copy of the target's")
    if head.config.bias:
        report.notes.append(
            'fc.bias: vLLM leaves it out, and reads the key "bias" as one of attention; SGLang and EAGLE use it'
        )
    report.used = list(tensors)
    public = config.get("public") or _public_config(head.config, ends)
    write_directory(directory, public, tensors)
    return report


def _public_config(head: EagleConfig, ends: Ends) -> dict[str, Any]:
    """The target's configuration, with one layer and the head's own sizes."""
    target = ends.config.to_dict()
    gone = (
        "rope_parameters",
        "rope_scaling",
        "layer_types",
        "quantization_config",
        "_name_or_path",
        "transformers_version",
    )
    kept = {key: value for key, value in target.items() if key not in gone}
    sizes = {name: value for name, value in vars(head).items() if name != "input_norm"}
    plain = {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": head.rope_theta}}
    if head.bias:
        del sizes["bias"]
    return {**kept, **sizes, **plain, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _sizes(config: dict[str, Any], ends: Ends, source: str) -> EagleConfig:
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
        "bias": True,  # of the fc: the key's absence means that there is one
    }
    given = {name: config[name] for name in SIZES if config.get(name) is not None}
    return EagleConfig(**{**defaults, **given})


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
