"""Import and export of EAGLE's public layout: written by hand here, read and written back by us."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file

import tiny
from public_heads import LLAMA3, H, formulas, public, write
from slipstream.drafters import load_drafter
from slipstream.drafters.store import save_drafter
from slipstream.interop.public import export, import_checkpoint

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


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_imported_head_says_what_the_formulas_say(target, tmp_path, kind):
    """Order of the concatenation, a norm too many, rope's base or pairing, the grouping of heads, a bias left
    out."""
    config, tensors = public(target, kind)
    import_checkpoint(target, write(tmp_path / "public", config, tensors), str(tmp_path / "d"))
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
    report = import_checkpoint(target, write(tmp_path / "a", config, tensors, as_pickle), str(tmp_path / "d"))
    assert "architectures, torch_dtype" in report.notes[-1]
    back = export(target, str(tmp_path / "d"), str(tmp_path / "b"))
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert set(again) == set(tensors) == set(back.used)
    assert all(torch.equal(again[name], t) and again[name].dtype == t.dtype for name, t in tensors.items())
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


def test_what_was_imported_before_layouts_had_names_is_exported_as_it_was(target, tmp_path):
    config, tensors = public(target, KINDS["GQA"])
    import_checkpoint(target, write(tmp_path / "a", config, tensors), str(tmp_path / "d"))
    path = tmp_path / "d" / "config.json"
    stored = json.loads(path.read_text())
    del stored["layout"]
    path.write_text(json.dumps(stored))
    export(target, str(tmp_path / "d"), str(tmp_path / "b"))
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


def test_our_own_head_comes_back_with_its_draft_vocabulary_and_its_tree(target, tmp_path):
    """A head that came back bit for bit, and drafted over the whole LM head at four times the cost."""
    drafter = tiny.eagle(target, "chain-3", vocab=40)
    drafter.vocab = torch.arange(3, 43)
    save_drafter(tmp_path / "d", "eagle", target, *drafter.pack(), {}, dtype=None)
    report = export(target, str(tmp_path / "d"), str(tmp_path / "p"))
    assert any("draft_vocab: in config.json" in note for note in report.notes)
    assert "draft_vocab" not in load_file(
        tmp_path / "p" / "model.safetensors"
    )  # engines refuse tensors they do not know
    report = import_checkpoint(target, str(tmp_path / "p"), str(tmp_path / "again"))
    assert any("draft_vocab: 40 tokens" in note for note in report.notes)
    again = load_drafter(str(tmp_path / "again"), target)
    for name, t in drafter.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], t)
    assert again.head.config == drafter.head.config
    assert torch.equal(again.vocab, drafter.vocab)
    assert again.tree_spec.name == "chain-3"
    export(target, str(tmp_path / "again"), str(tmp_path / "b"))
    assert (tmp_path / "b" / "config.json").read_text() == (tmp_path / "p" / "config.json").read_text()


def test_a_drafter_directory_is_not_imported_again(target, tmp_path):
    """It was said to be another target's."""
    save_drafter(tmp_path / "d", "eagle", target, *tiny.eagle(target, "chain-3").pack(), {}, dtype=None)
    with pytest.raises(ValueError, match="is a drafter of Slipstream's already: use it where it is"):
        import_checkpoint(target, str(tmp_path / "d"), str(tmp_path / "again"))


def test_another_tree_stays_with_an_imported_head(target, tmp_path):
    """What `import --tree` chose was lost by the next export."""
    config, tensors = public(target, KINDS["MHA"])
    import_checkpoint(
        target, write(tmp_path / "a", config, tensors), str(tmp_path / "d"), tree="best-first-2x3"
    )
    export(target, str(tmp_path / "d"), str(tmp_path / "b"))
    import_checkpoint(target, str(tmp_path / "b"), str(tmp_path / "again"))
    assert load_drafter(str(tmp_path / "again"), target).tree_spec.name == "best-first-2x3"


def test_sglang_gets_a_bias_and_a_class_of_its_own(target, tmp_path):
    """Its fc has a bias whether the file has one or not, and then one that nobody initialised."""
    drafter = tiny.eagle(target, "chain-3")
    save_drafter(tmp_path / "d", "eagle", target, *drafter.pack(), {}, dtype=None)
    export(target, str(tmp_path / "d"), str(tmp_path / "p"), layout="eagle-sglang")
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    tensors = load_file(tmp_path / "p" / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert "bias" not in config
    if not drafter.head.config.bias:
        assert not tensors["fc.bias"].any()
    import_checkpoint(target, str(tmp_path / "p"), str(tmp_path / "again"))
    ids, f = torch.tensor([tiny.prompts(7)[0]]), tiny.noise(1, 7, H)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    said = [
        each.head(target.embed(ids), f, torch.arange(7)[None], lambda k, v: (k, v, mask))
        for each in (drafter, load_drafter(str(tmp_path / "again"), target))
    ]
    assert torch.equal(*said)


def test_a_draft_vocabulary_of_another_target_is_refused(target, tmp_path):
    config, tensors = public(target, KINDS["MHA"])
    path = write(tmp_path / "a", config | {"slipstream": {"draft_vocab": "1 2 64"}}, tensors)
    with pytest.raises(ValueError, match="names other tokens than this target's 64"):
        import_checkpoint(target, path, str(tmp_path / "d"))


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
    report = import_checkpoint(target, write(tmp_path / "a", config | keys, tensors), str(tmp_path / "d"))
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
        import_checkpoint(target, path, str(tmp_path / "d"))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 32}, "hidden_size=32"),
        ({"vocab_size": 99}, "vocab_size=99"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope 'dynamic'"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
        ({"head_dim": 10**12}, "can't allocate memory"),
    ],
)
def test_a_head_for_something_else_is_refused(target, tmp_path, change, says):
    config, tensors = public(target, KINDS["MHA"])
    with pytest.raises(ValueError, match=says):
        import_checkpoint(target, write(tmp_path / "a", config | change, tensors), str(tmp_path / "d"))


def test_another_targets_embedding_is_refused(target, tmp_path):
    config, tensors = public(target, KINDS["MHA"])
    tensors["embed_tokens.weight"] = tiny.noise(tiny.VOCAB, H)
    with pytest.raises(ValueError, match="is not this target's embedding"):
        import_checkpoint(target, write(tmp_path / "a", config, tensors), str(tmp_path / "d"))


class Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_pickle_of_other_things_is_refused_in_our_words(target, tmp_path):
    """torch's advice was passed on: to set weights_only=False, and so to run what the file says."""
    path = write(tmp_path / "a", {}, {}, as_pickle=True)
    torch.save({"fc.weight": object()}, tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds other things than tensors, or is damaged: convert it") as e:
        import_checkpoint(target, path, str(tmp_path / "d"))
    assert "weights_only" not in str(e.value)


def test_a_method_without_a_public_layout_says_so(tmp_path):
    """It was said to have "layout none, not 'bita'"."""
    target = tiny.target("llama")
    config, tensors = tiny.bita(target).pack()
    save_drafter(tmp_path / "d", "bita", target, config, tensors, {})
    with pytest.raises(ValueError, match="for bita drafters, only for eagle, eagle3, fasteagle, medusa"):
        export(target, str(tmp_path / "d"), str(tmp_path / "p"))
    config, tensors = tiny.eagle(target).pack()
    save_drafter(tmp_path / "d", "eagle", target, config, tensors, {})
    with pytest.raises(ValueError, match="Unknown layout for eagle drafters: 'medusa'"):
        export(target, str(tmp_path / "d"), str(tmp_path / "p"), layout="medusa")


def test_a_pickle_that_would_run_code_is_refused(target, tmp_path, capsys):
    config, _ = public(target, KINDS["MHA"])
    path = write(tmp_path / "a", config, {}, as_pickle=True)
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="cannot be read"):
        import_checkpoint(target, path, str(tmp_path / "d"))
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
            import_checkpoint(target, str(path), str(tmp_path / "d"))


@pytest.mark.parametrize(
    ("variant", "says"),
    [({"input_norm": True}, "norm before attention"), ({"inputs": "tokens"}, "reads tokens inputs")],
)
def test_a_variant_that_no_layout_expresses_is_not_exported(target, tmp_path, variant, says):
    from slipstream.drafters.eagle.model import Eagle, EagleConfig, EagleHead
    from slipstream.drafters.heads import layer_sizes

    head = EagleHead(EagleConfig(**layer_sizes(target), **variant))
    drafter = Eagle(head, target)
    save_drafter(tmp_path / "d", "eagle", target, *drafter.pack(), {})
    with pytest.raises(ValueError, match=says):
        export(target, str(tmp_path / "d"), str(tmp_path / "p"))
