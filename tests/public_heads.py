"""Public checkpoints written by hand, and what their heads compute, from the published formulas alone."""

import json
import math

import torch
from safetensors.torch import save_file

import tiny
from slipstream.targets import HFTarget

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
H = 48


def groups(config: dict) -> int:
    """Heads of keys: as many as of queries where config.json does not say."""
    return config.get("num_key_value_heads", config["num_attention_heads"])


def public(target: HFTarget, kind: dict) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and random tensors of a public checkpoint."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": H,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
    }
    config |= {
        "num_hidden_layers": 1,
        "vocab_size": tiny.VOCAB,
        "hidden_act": "silu",
        "torch_dtype": "float64",
        **kind,
    }
    A, K, D = config["num_attention_heads"], groups(config), H // config["num_attention_heads"]
    width = config["intermediate_size"]
    shapes = {"fc.weight": (H, 2 * H), "layers.0.post_attention_layernorm.weight": (H,)}
    shapes |= {f"layers.0.self_attn.{x}_proj.weight": (n * D, H) for x, n in (("q", A), ("k", K), ("v", K))}
    shapes |= {"layers.0.self_attn.o_proj.weight": (H, A * D), "layers.0.mlp.down_proj.weight": (H, width)}
    shapes |= {f"layers.0.mlp.{x}_proj.weight": (width, H) for x in ("gate", "up")}
    if config.get("bias", True):
        shapes["fc.bias"] = (H,)
    if config.get("attention_bias") or config.get("qkv_bias") or config.get("model_type") == "qwen2":
        shapes |= {f"layers.0.self_attn.{x}_proj.bias": (n * D,) for x, n in (("q", A), ("k", K), ("v", K))}
    tensors = {
        name: tiny.noise(*shape, scale=0.2, seed=i) for i, (name, shape) in enumerate(sorted(shapes.items()))
    }
    return config, {
        **tensors,
        "embed_tokens.weight": target.embed(torch.arange(target.vocab)).detach().clone(),
    }


def write(home, config: dict, tensors: dict[str, torch.Tensor], as_pickle: bool = False) -> str:
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(config))
    if as_pickle:
        torch.save(tensors, home / "pytorch_model.bin")
    else:
        save_file(tensors, home / "model.safetensors")
    return str(home)


def norm(config: dict, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean() + config["rms_norm_eps"]).sqrt() * weight


def turned(config: dict, D: int) -> list[float]:
    """Frequencies of the rotary positions: Llama 3.1 divides the slow ones by its factor, and some of those
    between."""
    plain = [config.get("rope_theta", 10000.0) ** (-2 * i / D) for i in range(D // 2)]
    scaling = config.get("rope_scaling")
    if scaling is None:
        return plain
    if "low_freq_factor" not in scaling:
        return [f / scaling["factor"] for f in plain]
    length, (low, high) = (
        config["max_position_embeddings"],
        (scaling["low_freq_factor"], scaling["high_freq_factor"]),
    )
    kept = [min(max((length * f / (2 * math.pi) - low) / (high - low), 0.0), 1.0) for f in plain]
    assert {0.0, 1.0} < set(kept)  # and some between
    return [x * f + (1 - x) * f / scaling["factor"] for x, f in zip(kept, plain, strict=True)]


def layer(config: dict, t: dict[str, torch.Tensor], of: str, reads: list, residuals: list) -> torch.Tensor:
    """A decoder layer, one row and one head at a time: attention of what it reads added to the residuals,
    then the MLP."""
    A, K = config["num_attention_heads"], groups(config)
    D = config["hidden_size"] // A
    frequencies = turned(config, D)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        bias = t.get(f"{of}{name}.bias")
        return t[f"{of}{name}.weight"] @ x + (0 if bias is None else bias)

    def rope(x: torch.Tensor, position: int) -> torch.Tensor:
        out = x.clone()
        for i in range(D // 2):
            angle = torch.tensor(position * frequencies[i], dtype=torch.float64)
            a, b = x[i], x[i + D // 2]
            out[i], out[i + D // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return out

    said = []
    for i, (x, residual) in enumerate(zip(reads, residuals, strict=True)):
        heads = []
        for head in range(A):
            at, group = slice(head * D, (head + 1) * D), head // (A // K)
            q = rope(linear("self_attn.q_proj", x)[at], i)
            kv = slice(group * D, (group + 1) * D)
            keys = [rope(linear("self_attn.k_proj", y)[kv], j) for j, y in enumerate(reads[: i + 1])]
            values = [linear("self_attn.v_proj", y)[kv] for y in reads[: i + 1]]
            p = torch.stack([q @ k / D**0.5 for k in keys]).softmax(0)
            heads.append(sum(w * v for w, v in zip(p, values, strict=True)))
        x = residual + linear("self_attn.o_proj", torch.cat(heads))
        n = norm(config, t[f"{of}post_attention_layernorm.weight"], x)
        gate = torch.nn.functional.silu(linear("mlp.gate_proj", n))
        said.append(x + linear("mlp.down_proj", gate * linear("mlp.up_proj", n)))
    return torch.stack(said)


def formulas(config: dict, t: dict[str, torch.Tensor], ids: list[int], f: torch.Tensor) -> torch.Tensor:
    """EAGLE's published layer, from the tensors alone. f̂ of every row."""
    pairs = [
        torch.cat([t["embed_tokens.weight"][token], feature]) for token, feature in zip(ids, f, strict=True)
    ]
    xs = [t["fc.weight"] @ pair + t.get("fc.bias", 0) for pair in pairs]
    return layer(config, t, "layers.0.", xs, xs)


IDS = "eagle_aux_hidden_state_layer_ids"
DEEP = tiny.GROUPED | {
    "hidden_size": H,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 8,
}


def public3(kind: dict) -> tuple[dict, dict[str, torch.Tensor]]:
    """The same of EAGLE-3; speculators' where the kind says so."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": H,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
    }
    config |= {
        "num_hidden_layers": 1,
        "vocab_size": tiny.VOCAB,
        "draft_vocab_size": 20,
        "hidden_act": "silu",
        **kind,
    }
    h, A, K = config["hidden_size"], config["num_attention_heads"], groups(config)
    D, width, Vd, nested = (
        h // A,
        config["intermediate_size"],
        config["draft_vocab_size"],
        "speculators_model_type" in kind,
    )
    of = "layers.0." if nested else "midlayer."
    shapes = {"fc.weight": (h, 3 * H), "norm.weight": (h,), "lm_head.weight": (Vd, h)}
    shapes |= {
        f"{of}{x}.weight": (h,) for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    shapes |= {f"{of}self_attn.{x}_proj.weight": (n * D, 2 * h) for x, n in (("q", A), ("k", K), ("v", K))}
    shapes |= {f"{of}self_attn.o_proj.weight": (h, A * D), f"{of}mlp.down_proj.weight": (h, width)}
    shapes |= {f"{of}mlp.{x}_proj.weight": (width, h) for x in ("gate", "up")}
    if config.get("norm_before_fc") or config.get("eagle_config", {}).get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * H,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    if config.get("attention_bias"):
        shapes |= {f"{of}self_attn.{x}_proj.bias": (n * D,) for x, n in (("q", A), ("k", K), ("v", K))}
        shapes[f"{of}self_attn.o_proj.bias"] = (h,)
    if h != H or config.get("embed_requires_grad"):
        shapes["embed_tokens.weight"] = (tiny.VOCAB, h)
    tensors = {
        name: tiny.noise(*shape, scale=0.2, seed=i) for i, (name, shape) in enumerate(sorted(shapes.items()))
    }
    if Vd < tiny.VOCAB:
        vocab = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(0))[:Vd].sort().values
        tensors["d2t"] = vocab - torch.arange(Vd)
        tensors["t2d"] = torch.isin(torch.arange(tiny.VOCAB), vocab)
    if nested:
        above = (
            "speculators_model_type",
            "draft_vocab_size",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
        )
        above += ("norm_output", "embed_requires_grad", "target_hidden_size")
        own = {name: config.pop(name) for name in above if name in config}
        config = {"target_hidden_size": H, **own, "transformer_layer_config": config}
    return config, tensors


def formulas3(
    config: dict, t: dict[str, torch.Tensor], embedded: torch.Tensor, f: torch.Tensor
) -> torch.Tensor:
    """EAGLE-3's published head, from the tensors alone: two steps, of which the second reads what the first
    said."""
    of = "layers.0." if "layers.0.hidden_norm.weight" in t else "midlayer."
    hidden, laws = [], []
    for x in f:
        if "input_norm.weight" in t:
            x = norm(config, t["input_norm.weight"], x)
        if "fc_norm.0.weight" in t:
            x = torch.cat([norm(config, t[f"fc_norm.{i}.weight"], part) for i, part in enumerate(x.split(H))])
        hidden.append(t["fc.weight"] @ x)
    for _ in range(2):
        normed = [norm(config, t[f"{of}hidden_norm.weight"], h) for h in hidden]
        es = [norm(config, t[f"{of}input_layernorm.weight"], e) for e in embedded]
        residuals = normed if config.get("norm_before_residual") else hidden
        hidden = list(
            layer(config, t, of, [torch.cat(pair) for pair in zip(es, normed, strict=True)], residuals)
        )
        said = [norm(config, t["norm.weight"], h) for h in hidden]
        laws.append(torch.stack([t["lm_head.weight"] @ x for x in said]))
        if config.get("norm_output"):
            hidden = said
    return torch.stack(laws)
