"""The public layouts of EAGLE and EAGLE-3: written by hand here, read and written back by us."""

import json
import math
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import tiny
from slipstream.drafters import load_drafter
from slipstream.drafters.store import save_drafter
from slipstream.interop.public import export_head, import_head
from slipstream.targets import HFTarget

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "MHA": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "GQA": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "rope_theta": 500000.0,
    },
    "attention bias": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True},
    "no fc bias": {"num_attention_heads": 4, "num_key_value_heads": 1, "bias": False, "rms_norm_eps": 1e-2},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "qwen2"},
    "qkv bias": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "qkv_bias": True,
        "attention_bias": False,
    },
    "linear rope": {"num_attention_heads": 4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3 rope": {
        "num_attention_heads": 4,
        "rope_theta": 500.0,
        "max_position_embeddings": 32,
        "rope_scaling": LLAMA3,
    },
}
H = 48


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """A target of another width than the other tests'."""
    shape = tiny.GROUPED | {"hidden_size": H, "num_attention_heads": 6, "num_key_value_heads": 3}
    return HFTarget(tiny.build(LlamaConfig(**shape)), tiny.tokenizer(), "wide")


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


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_imported_head_says_what_the_formulas_say(target, tmp_path, kind):
    """Order of the concatenation, a norm too many, rope's base or pairing, the grouping of heads, a bias left
    out."""
    config, tensors = public(target, kind)
    import_head(write(tmp_path / "public", config, tensors), str(tmp_path / "d"), target)
    drafter = load_drafter(str(tmp_path / "d"), target)
    ids, f = tiny.prompts(7)[0], tiny.noise(7, H)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    said = drafter.head(
        target.embed(torch.tensor([ids])), f[None], torch.arange(7)[None], lambda k, v: (k, v, mask)
    )[0]
    expected, close = (
        formulas(config, tensors, ids, f),
        1e-5 if "rope_scaling" in kind else 1e-10,
    )  # float32 frequencies
    assert torch.allclose(said, expected, atol=close)
    assert torch.allclose(drafter.logits(said), expected @ target.lm_head().weight.T, atol=10 * close)


@pytest.mark.parametrize("as_pickle", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_round_trip_is_bit_identical(target, tmp_path, dtype, as_pickle):
    config, tensors = public(target, KINDS["GQA"])
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    report = import_head(write(tmp_path / "a", config, tensors, as_pickle), str(tmp_path / "d"), target)
    assert "architectures, torch_dtype" in report.notes[-1]
    back = export_head(str(tmp_path / "d"), str(tmp_path / "b"), target)
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert set(again) == set(tensors) == set(back.used)
    assert all(torch.equal(again[name], t) and again[name].dtype == t.dtype for name, t in tensors.items())
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


def test_our_own_head_comes_back_with_its_draft_vocabulary_and_its_tree(target, tmp_path):
    """A head that came back bit for bit, and drafted over the whole LM head at four times the cost."""
    drafter = tiny.eagle(target, "chain-3", vocab=40)
    drafter.vocab = torch.arange(3, 43)
    save_drafter(tmp_path / "d", "eagle", target, *drafter.pack(), {}, dtype=None)
    report = export_head(str(tmp_path / "d"), str(tmp_path / "p"), target)
    assert any("draft_vocab: in config.json" in note for note in report.notes)
    assert "draft_vocab" not in load_file(
        tmp_path / "p" / "model.safetensors"
    )  # engines refuse tensors they do not know
    report = import_head(str(tmp_path / "p"), str(tmp_path / "again"), target)
    assert any("draft_vocab: 40 tokens" in note for note in report.notes)
    again = load_drafter(str(tmp_path / "again"), target)
    for name, t in drafter.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], t)
    assert again.head.config == drafter.head.config
    assert torch.equal(again.vocab, drafter.vocab)
    assert again.shape.name == "chain-3"
    export_head(str(tmp_path / "again"), str(tmp_path / "b"), target)
    assert (tmp_path / "b" / "config.json").read_text() == (tmp_path / "p" / "config.json").read_text()


def test_a_draft_vocabulary_of_another_target_is_refused(target, tmp_path):
    config, tensors = public(target, KINDS["MHA"])
    path = write(tmp_path / "a", config | {"slipstream": {"draft_vocab": "1 2 64"}}, tensors)
    with pytest.raises(ValueError, match="names other tokens than this target's 64"):
        import_head(path, str(tmp_path / "d"), target)


PUBLISHED = {
    "Llama 2": {
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pad_token_id": 0,
    },
    "Qwen2": {
        "attention_dropout": 0.0,
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
    },
    "Mixtral": {
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
    },
    "of the target": {
        "architectures": ["X"],
        "logit_scale": 0.5,
        "attn_implementation": "sdpa",
        "bos_token_id": 1,
    },
}


@pytest.mark.parametrize("keys", PUBLISHED.values(), ids=PUBLISHED)
def test_keys_that_change_nothing_are_listed_and_taken(target, tmp_path, keys, monkeypatch):
    """Checkpoints whose config.json is their target's own must not be refused for what describes the
    target."""
    monkeypatch.setattr(target.config, "logit_scale", 0.5, raising=False)
    config, tensors = public(target, KINDS["MHA"])
    report = import_head(write(tmp_path / "a", config | keys, tensors), str(tmp_path / "d"), target)
    listed = report.notes[-1].split(": ")[1].split(", ")
    assert set(keys) - {"rope_scaling"} <= set(listed)


def broken(tensors: dict, how: str) -> dict:
    if how == "missing":
        del tensors["layers.0.mlp.up_proj.weight"]
    elif how == "extra":
        tensors["layers.0.input_layernorm.weight"] = torch.ones(H)
    elif how == "misshapen":
        tensors["fc.weight"] = torch.ones(H, H)
    return tensors


@pytest.mark.parametrize(
    ("how", "says"),
    {
        "missing": r"layers\.0\.mlp\.up_proj\.weight is missing",
        "extra": r"layers\.0\.input_layernorm\.weight is not known",
        "misshapen": r"fc\.weight has shape \[48, 48\] and should have \[48, 96\]",
    }.items(),
)
def test_tensors_that_do_not_fit_are_named(target, tmp_path, how, says):
    config, tensors = public(target, KINDS["MHA"])
    path = write(tmp_path / "a", config, broken(tensors, how))
    with pytest.raises(ValueError, match=says):
        import_head(path, str(tmp_path / "d"), target)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 32}, "hidden_size=32"),
        ({"vocab_size": 99}, "vocab_size=99"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope 'dynamic'"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
    ],
)
def test_a_head_for_something_else_is_refused(target, tmp_path, change, says):
    config, tensors = public(target, KINDS["MHA"])
    with pytest.raises(ValueError, match=says):
        import_head(write(tmp_path / "a", config | change, tensors), str(tmp_path / "d"), target)


def test_another_targets_embedding_is_refused(target, tmp_path):
    config, tensors = public(target, KINDS["MHA"])
    tensors["embed_tokens.weight"] = tiny.noise(tiny.VOCAB, H)
    with pytest.raises(ValueError, match="is not this target's embedding"):
        import_head(write(tmp_path / "a", config, tensors), str(tmp_path / "d"), target)


class Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_pickle_of_other_things_is_refused_in_our_words(target, tmp_path):
    """torch's advice was passed on: to set weights_only=False, and so to run what the file says."""
    path = write(tmp_path / "a", {}, {}, as_pickle=True)
    torch.save({"fc.weight": object()}, tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds other things than tensors, or is damaged: convert it") as e:
        import_head(path, str(tmp_path / "d"), target)
    assert "weights_only" not in str(e.value)


def test_a_method_without_a_public_layout_says_so(tmp_path):
    """It was said to have "layout none, not 'fasteagle'"."""
    target = tiny.target("llama")
    config, tensors = tiny.fasteagle(target).pack()
    save_drafter(tmp_path / "d", "fasteagle", target, config, tensors, {})
    with pytest.raises(
        ValueError, match="no public layout exists for fasteagle drafters, only for eagle, eagle3, medusa"
    ):
        export_head(str(tmp_path / "d"), str(tmp_path / "p"), target)
    config, tensors = tiny.eagle(target).pack()
    save_drafter(tmp_path / "d", "eagle", target, config, tensors, {})
    with pytest.raises(ValueError, match="Unknown layout for eagle drafters: 'medusa'"):
        export_head(str(tmp_path / "d"), str(tmp_path / "p"), target, "medusa")


def test_a_pickle_that_would_run_code_is_refused(target, tmp_path, capsys):
    config, _ = public(target, KINDS["MHA"])
    path = write(tmp_path / "a", config, {}, as_pickle=True)
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="cannot be read"):
        import_head(path, str(tmp_path / "d"), target)
    assert "must not run" not in capsys.readouterr().out


def test_a_missing_file_is_named(target, tmp_path):
    config, tensors = public(target, KINDS["MHA"])
    write(tmp_path / "a", config, tensors)
    (tmp_path / "a" / "model.safetensors").unlink()
    for path, says in (
        (tmp_path / "none", "has no config.json"),
        (tmp_path / "a", "has no model.safetensors"),
    ):
        with pytest.raises(ValueError, match=says):
            import_head(str(path), str(tmp_path / "d"), target)


def test_a_variant_with_a_norm_is_not_exported(target, tmp_path):
    from slipstream.drafters.eagle import Eagle, EagleConfig, EagleHead
    from slipstream.drafters.heads import layer_sizes

    head = EagleHead(EagleConfig(**layer_sizes(target), input_norm=True))
    drafter = Eagle(head, target)
    save_drafter(tmp_path / "d", "eagle", target, *drafter.pack(), {})
    with pytest.raises(ValueError, match="norm before attention"):
        export_head(str(tmp_path / "d"), str(tmp_path / "p"), target)


IDS = "eagle_aux_hidden_state_layer_ids"
DEEP = tiny.GROUPED | {
    "hidden_size": H,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 8,
}


@pytest.fixture(scope="module")
def deep() -> HFTarget:
    """A target with blocks enough for EAGLE-3's three taps."""
    return HFTarget(tiny.build(LlamaConfig(**DEEP)), tiny.tokenizer(), "deep")


KINDS3 = {
    "MHA": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "GQA": {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 80,
    "rope_theta": 500000.0},
    "all tokens": {"num_attention_heads": 4, "num_key_value_heads": 2, "draft_vocab_size": tiny.VOCAB},
    "normed residual, named taps": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 3, 7],
    },
    "speculators": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "speculators_model_type": "eagle3",
        "norm_before_residual": False,
    },
    "outputs of "
    "blocks": {"num_attention_heads": 4, "eagle_config": {IDS: [0, 2, 6], "use_aux_hidden_state": True}},
    "inputs and outputs": {"num_attention_heads": 4, IDS: [1, 3, 7], "eagle_config": {IDS: [0, 2, 6]}},
    "EAGLE 3.1": {
        "num_attention_heads": 4, "speculators_model_type": "eagle3", "norm_output": True,
        "norm_before_fc": True,
        "norm_before_residual": True, "fc_norm": True, "target_hidden_size": None,
    },
    "nested "
    "norm": {"num_attention_heads": 4, "eagle_config": {"norm_before_fc": True, "use_last_layernorm": True}},
    "narrower than the target": {"num_attention_heads": 4, "hidden_size": 32, "target_hidden_size": H},
    "an embedding of its "
    "own": {"num_attention_heads": 4, "speculators_model_type": "eagle3", "embed_requires_grad": True},
    "biases and llama3 rope": {
        "num_attention_heads": 4, "attention_bias": True, "rope_theta": 500.0, "max_position_embeddings": 32,
        "rope_scaling": LLAMA3,
    },
}  # fmt: skip
READ = {
    "normed residual, named taps": (0, 3, 7),
    "outputs of blocks": (1, 3, 7),
    "inputs and outputs": (1, 3, 7),
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


@pytest.mark.parametrize("name", KINDS3)
def test_an_imported_eagle3_head_says_what_the_formulas_say(deep, tmp_path, name):
    """Norms exchanged, a recursion that is normed or passes the fc again, taps of other blocks, a shifted
    vocabulary."""
    kind = KINDS3[name]
    config, tensors = public3(kind)
    import_head(write(tmp_path / "public", config, tensors), str(tmp_path / "d"), deep)
    drafter = load_drafter(str(tmp_path / "d"), deep)
    assert drafter.taps == tuple(f"input of block {i}" for i in READ.get(name, (2, 4, 5)))
    ids = torch.tensor(tiny.prompts(7))
    states = tiny.build(LlamaConfig(**DEEP))(ids, output_hidden_states=True).hidden_states
    f = torch.cat([states[int(tap.split()[-1])][0] for tap in drafter.taps], -1).detach()
    assert torch.allclose(deep.features(ids.tolist(), drafter.taps)[0], f)
    table, mask = tensors.get("embed_tokens.weight"), torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    embedded = deep.embed(ids[0]).detach() if table is None else table[ids[0]]
    hidden, laws = f[None], []
    for fresh in (True, False):
        hidden = drafter._read(ids, hidden, torch.arange(7)[None], lambda k, v: (k, v, mask), fresh)
        laws.append(drafter.logits(hidden)[0])
    expected = formulas3({**config.get("transformer_layer_config", {}), **config}, tensors, embedded, f)
    assert torch.allclose(torch.stack(laws), expected, atol=1e-4 if "rope_scaling" in kind else 1e-10)
    known = tensors.get("t2d", torch.ones(tiny.VOCAB, dtype=torch.bool)).nonzero()[:, 0]
    assert torch.equal(drafter.vocab, known)


@pytest.mark.parametrize("kind", KINDS3.values(), ids=KINDS3)
def test_the_round_trip_of_an_eagle3_head_is_bit_identical(deep, tmp_path, kind):
    config, tensors = public3(kind)
    import_head(write(tmp_path / "a", config, tensors), str(tmp_path / "d"), deep)
    export_head(str(tmp_path / "d"), str(tmp_path / "b"), deep)
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert set(again) == set(tensors)
    assert all(torch.equal(again[name], t) and again[name].dtype == t.dtype for name, t in tensors.items())
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_our_own_eagle3_head_is_exported(deep, tmp_path, layout):
    drafter = tiny.eagle3(deep, vocab=40)
    save_drafter(tmp_path / "d", "eagle3", deep, *drafter.pack(), {}, dtype=None)
    export_head(str(tmp_path / "d"), str(tmp_path / "p"), deep, layout)
    import_head(str(tmp_path / "p"), str(tmp_path / "again"), deep)
    again = load_drafter(str(tmp_path / "again"), deep)
    for name, t in drafter.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], t)
    assert again.head.config == drafter.head.config
    assert torch.equal(again.vocab, drafter.vocab)
    with pytest.raises(
        ValueError, match=r"Unknown layout for eagle3 drafters: 'eagle'\. Available: eagle3, speculators"
    ):
        export_head(str(tmp_path / "d"), str(tmp_path / "p"), deep, "eagle")


@pytest.mark.parametrize("name", KINDS3)
def test_a_head_in_the_other_layout_is_the_same_head(deep, tmp_path, name):
    """A key that is read in one place and written in another, or not at all."""
    config, tensors = public3(KINDS3[name])
    import_head(write(tmp_path / "a", config, tensors), str(tmp_path / "d"), deep)
    other = "eagle3" if "speculators_model_type" in config else "speculators"
    export_head(str(tmp_path / "d"), str(tmp_path / "b"), deep, other)
    import_head(str(tmp_path / "b"), str(tmp_path / "again"), deep)
    drafter, again = (load_drafter(str(tmp_path / home), deep) for home in ("d", "again"))
    assert again.head.config == drafter.head.config
    assert torch.equal(again.vocab, drafter.vocab)
    assert all(torch.equal(again.head.state_dict()[key], t) for key, t in drafter.head.state_dict().items())
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    inputs = [int(tap.split()[-1]) for tap in drafter.taps]
    assert written[IDS] == inputs  # as vLLM reads it
    if other == "eagle3":
        assert [i + 1 for i in written["eagle_config"][IDS]] == inputs  # as SGLang does
    else:
        assert written["speculators_config"]["verifier"]["name_or_path"] == "deep"


def test_a_head_that_engines_cannot_feed_is_not_exported(deep, tmp_path):
    """Engines hand states over in ascending order, and the final one to no EAGLE-3 head."""
    drafter = tiny.eagle3(deep)
    for taps in (("input of block 2", "final"), ("input of block 4", "input of block 2")):
        about, tensors = drafter.pack()
        tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * H].contiguous()
        save_drafter(tmp_path / "d", "eagle3", deep, about | {"taps": taps}, tensors, {}, dtype=None)
        with pytest.raises(ValueError, match=f"this head reads {taps[0]!r}, {taps[1]!r}, and engines"):
            export_head(str(tmp_path / "d"), str(tmp_path / "p"), deep)


def test_what_a_missing_key_was_taken_for_is_said(deep, tmp_path):
    config, tensors = public3({"num_attention_heads": 4, "speculators_model_type": "eagle3"})
    report = import_head(write(tmp_path / "a", config, tensors), str(tmp_path / "d"), deep)
    assert any("norm_before_residual: absent, false as speculators has it" in note for note in report.notes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({IDS: [0, 3, 9]}, "this target has blocks 0 to 7"),
        ({IDS: [3, 0, 7]}, "engines read them in ascending order"),
        ({"eagle_config": {IDS: [0, 3, 7]}}, r"inputs of blocks \[1, 4, 8\]"),
        ({IDS: [1, 3, 7], "eagle_config": {IDS: [1, 3, 7]}}, "they say different states"),
        (
            {"eagle_config": {"use_last_layernorm": False}},
            "eagle_config.use_last_layernorm=False, which may change",
        ),
        ({"mlp_bias": True, "novel": 3}, "mlp_bias=True, novel=3, which may change"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, "layer_types=.*sliding_window=4"),
        ({"speculators_model_type": "peagle"}, "speculators' 'peagle' heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope 'full_attention'"),
        ({"hidden_size": 32, "target_hidden_size": H}, "embed_tokens.weight is missing"),
        ({"target_hidden_size": 96}, "target_hidden_size=96"),
        ({"draft_vocab_size": 21}, r"lm_head.weight has shape \[20, 48\] and should have \[21, 48\]"),
    ],
)
def test_an_eagle3_head_for_something_else_is_refused(deep, tmp_path, change, says):
    config, tensors = public3(KINDS3["MHA"])
    with pytest.raises(ValueError, match=says):
        import_head(write(tmp_path / "a", config | change, tensors), str(tmp_path / "d"), deep)


def test_a_draft_vocabulary_that_contradicts_itself_is_refused(deep, tmp_path):
    config, tensors = public3(KINDS3["MHA"])
    tensors["t2d"] = ~tensors["t2d"]
    with pytest.raises(ValueError, match="d2t and t2d"):
        import_head(write(tmp_path / "a", config, tensors), str(tmp_path / "d"), deep)
