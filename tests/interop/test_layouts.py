"""The layouts of EAGLE-3, speculators and Medusa: written by hand here, read and written back by us."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import tiny
from public_heads import DEEP, IDS, LLAMA3, H, formulas3, public3, write
from slipstream.drafters import load_drafter
from slipstream.drafters.heads import block_taps
from slipstream.drafters.store import save_drafter
from slipstream.engine.generate import generate
from slipstream.interop.public import export, import_checkpoint

KINDS3 = {
    "MHA": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "GQA": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "rope_theta": 500000.0,
    },
    "all tokens": {"num_attention_heads": 4, "num_key_value_heads": 2, "draft_vocab_size": tiny.VOCAB},
    "normed residual, named taps": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 3, 7],
    },
    "speculators": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
    },
    "outputs of blocks": {
        "num_attention_heads": 4,
        "eagle_config": {IDS: [0, 2, 6], "use_aux_hidden_state": True},
    },
    "inputs and outputs": {"num_attention_heads": 4, IDS: [1, 3, 7], "eagle_config": {IDS: [0, 2, 6]}},
    "EAGLE 3.1": {
        "num_attention_heads": 4,
        "speculators_model_type": "eagle3",
        "norm_output": True,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "fc_norm": True,
        "target_hidden_size": None,
    },
    "nested norm": {
        "num_attention_heads": 4,
        "eagle_config": {"norm_before_fc": True, "use_last_layernorm": True},
    },
    "narrower than the target": {"num_attention_heads": 4, "hidden_size": 32, "target_hidden_size": H},
    "an embedding of its own": {
        "num_attention_heads": 4,
        "speculators_model_type": "eagle3",
        "embed_requires_grad": True,
    },
    "biases and llama3 rope": {
        "num_attention_heads": 4,
        "attention_bias": True,
        "rope_theta": 500.0,
        "max_position_embeddings": 32,
        "rope_scaling": LLAMA3,
    },
}
READ = {
    "normed residual, named taps": (0, 3, 7),
    "outputs of blocks": (1, 3, 7),
    "inputs and outputs": (1, 3, 7),
}


@pytest.mark.parametrize("name", KINDS3)
def test_an_imported_eagle3_head_says_what_the_formulas_say(deep, tmp_path, name):
    """Norms exchanged, a recursion that is normed or passes the fc again, taps of other blocks, a shifted
    vocabulary."""
    kind = KINDS3[name]
    config, tensors = public3(kind)
    import_checkpoint(deep, write(tmp_path / "public", config, tensors), str(tmp_path / "d"))
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
        hidden = drafter._read(ids, hidden, torch.arange(7)[None], [lambda k, v: (k, v, mask)], fresh)
        laws.append(drafter.logits(hidden)[0])
    expected = formulas3({**config.get("transformer_layer_config", {}), **config}, tensors, embedded, f)
    assert torch.allclose(torch.stack(laws), expected, atol=1e-4 if "rope_scaling" in kind else 1e-10)
    known = tensors.get("t2d", torch.ones(tiny.VOCAB, dtype=torch.bool)).nonzero()[:, 0]
    assert torch.equal(drafter.vocab, known)


@pytest.mark.parametrize("kind", KINDS3.values(), ids=KINDS3)
def test_the_round_trip_of_an_eagle3_head_is_bit_identical(deep, tmp_path, kind):
    config, tensors = public3(kind)
    import_checkpoint(deep, write(tmp_path / "a", config, tensors), str(tmp_path / "d"))
    export(deep, str(tmp_path / "d"), str(tmp_path / "b"))
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert set(again) == set(tensors)
    assert all(torch.equal(again[name], t) and again[name].dtype == t.dtype for name, t in tensors.items())
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_our_own_eagle3_head_is_exported(deep, tmp_path, layout):
    drafter = tiny.eagle3(deep, vocab=40)
    save_drafter(tmp_path / "d", "eagle3", deep, *drafter.pack(), {}, dtype=None)
    export(deep, str(tmp_path / "d"), str(tmp_path / "p"), layout=layout)
    import_checkpoint(deep, str(tmp_path / "p"), str(tmp_path / "again"))
    again = load_drafter(str(tmp_path / "again"), deep)
    for name, t in drafter.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], t)
    assert again.head.config == drafter.head.config
    assert torch.equal(again.vocab, drafter.vocab)
    with pytest.raises(
        ValueError, match=r"Unknown layout for eagle3 drafters: 'eagle'\. Available: eagle3, speculators"
    ):
        export(deep, str(tmp_path / "d"), str(tmp_path / "p"), layout="eagle")


@pytest.mark.parametrize("name", KINDS3)
def test_a_head_in_the_other_layout_is_the_same_head(deep, tmp_path, name):
    """A key that is read in one place and written in another, or not at all."""
    config, tensors = public3(KINDS3[name])
    import_checkpoint(deep, write(tmp_path / "a", config, tensors), str(tmp_path / "d"))
    other = "eagle3" if "speculators_model_type" in config else "speculators"
    export(deep, str(tmp_path / "d"), str(tmp_path / "b"), layout=other)
    import_checkpoint(deep, str(tmp_path / "b"), str(tmp_path / "again"))
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
            export(deep, str(tmp_path / "d"), str(tmp_path / "p"))


@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 6, 30])
def test_what_heads_read_by_default_engines_can_hand_over(blocks):
    """Of four blocks they read the third before the second, so that no head of theirs could be exported."""
    inputs = [int(tap.split()[-1]) for tap in block_taps(blocks)]
    assert inputs == sorted(inputs)
    assert 0 <= inputs[0] <= inputs[-1] < blocks
    assert blocks < 6 or inputs == [2, blocks // 2, blocks - 3]


def test_what_a_missing_key_was_taken_for_is_said(deep, tmp_path):
    config, tensors = public3({"num_attention_heads": 4, "speculators_model_type": "eagle3"})
    report = import_checkpoint(deep, write(tmp_path / "a", config, tensors), str(tmp_path / "d"))
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
        import_checkpoint(deep, write(tmp_path / "a", config | change, tensors), str(tmp_path / "d"))


def test_a_draft_vocabulary_that_contradicts_itself_is_refused(deep, tmp_path):
    config, tensors = public3(KINDS3["MHA"])
    tensors["t2d"] = ~tensors["t2d"]
    with pytest.raises(ValueError, match="d2t and t2d"):
        import_checkpoint(deep, write(tmp_path / "a", config, tensors), str(tmp_path / "d"))


HIDDEN, V = 32, tiny.VOCAB


def official(layers: int, bias: bool = True) -> dict[str, torch.Tensor]:
    shapes = {f"{i}.{j}.linear.weight": (HIDDEN, HIDDEN) for i in range(3) for j in range(layers)}
    shapes |= {f"{i}.{j}.linear.bias": (HIDDEN,) for i in range(3) for j in range(layers) if bias}
    shapes |= {f"{i}.{layers}.weight": (V, HIDDEN) for i in range(3)}
    return {name: tiny.noise(*shape, scale=0.2, seed=k) for k, (name, shape) in enumerate(shapes.items())}


def served(layers: int) -> dict[str, torch.Tensor]:
    shapes = {f"blocks.{i}.layers.{j}.weight": (HIDDEN, HIDDEN) for i in range(3) for j in range(layers)}
    shapes |= {f"lm_heads.{i}.weight": (20, HIDDEN) for i in range(3)}
    made = {name: tiny.noise(*shape, scale=0.2, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    return made | {"token_map": torch.arange(3, 63, 3)}


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 11])
def test_the_official_layout_says_what_it_says_and_comes_back_bit_for_bit(tmp_path, layers, pickled):
    """Its config.json may count fewer heads than the file has."""
    target, tensors = tiny.target("llama"), official(layers)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "some/model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    import_checkpoint(target, str(tmp_path), str(tmp_path / "d"))
    drafter, f = load_drafter(str(tmp_path / "d"), target), tiny.noise(1, 1, HIDDEN)
    said = drafter.head.logits(drafter.head(f))[0, 0]
    for i in range(3):
        x = f[0, 0]
        for j in range(layers):
            y = tensors[f"{i}.{j}.linear.weight"] @ x + tensors[f"{i}.{j}.linear.bias"]
            x = x + y * y.sigmoid()
        torch.testing.assert_close(said[i], tensors[f"{i}.{layers}.weight"] @ x)
    export(target, str(tmp_path / "d"), str(tmp_path / "b"))
    again = load_file(tmp_path / "b" / "medusa_lm_head.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


def test_the_serving_engines_layout_comes_back_bit_for_bit(tmp_path):
    target, tensors = tiny.target("llama"), served(2)
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "truncated_vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    import_checkpoint(target, str(tmp_path), str(tmp_path / "d"))
    drafter = load_drafter(str(tmp_path / "d"), target)
    assert (drafter.vocab.tolist(), drafter.head.config.bias) == (list(range(3, 63, 3)), False)
    export(target, str(tmp_path / "d"), str(tmp_path / "b"))
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_our_own_heads_in_both_layouts(tmp_path):
    """A draft vocabulary, which only one of them can express."""
    target = tiny.target("llama")
    drafter = tiny.medusa(target, vocab=40)
    save_drafter(tmp_path / "d", "medusa", target, *drafter.pack(), {}, dtype=None)
    with pytest.raises(ValueError, match="medusa-vllm"):
        export(target, str(tmp_path / "d"), str(tmp_path / "p"))
    export(target, str(tmp_path / "d"), str(tmp_path / "p"), layout="medusa-vllm")
    import_checkpoint(target, str(tmp_path / "p"), str(tmp_path / "again"))
    again = load_drafter(str(tmp_path / "again"), target)
    assert again.head.config == drafter.head.config
    assert again.vocab.tolist() == drafter.vocab.tolist()
    for name, tensor in drafter.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], tensor)


def test_a_directory_holds_one_export(tmp_path):
    """Another layout left the first one's tensors beside its own, and `import` took them."""
    target = tiny.target("llama")
    drafter = tiny.medusa(target)
    for name in ("d0", "d1"):
        drafter.head.load_state_dict({key: -t for key, t in drafter.head.state_dict().items()})
        save_drafter(tmp_path / name, "medusa", target, *drafter.pack(), {}, dtype=None)
    for first, second in (("medusa-vllm", "medusa"), ("medusa", "medusa-vllm")):
        export(target, str(tmp_path / "d0"), str(tmp_path / "p"), layout=first)
        export(target, str(tmp_path / "d1"), str(tmp_path / "p"), layout=second)
        assert len([*(tmp_path / "p").glob("*.safetensors")]) == 1
        import_checkpoint(target, str(tmp_path / "p"), str(tmp_path / "again"))
        again = load_drafter(str(tmp_path / "again"), target).head.state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in drafter.head.state_dict().items())
    (tmp_path / "p" / "medusa_lm_head.safetensors").write_bytes(b"another's")
    with pytest.raises(ValueError, match="leave the one that config"):
        import_checkpoint(target, str(tmp_path / "p"), str(tmp_path / "more"))


@pytest.mark.parametrize("layout", ["medusa", "medusa-vllm"])
def test_blocks_alone_say_with_the_targets_own_lm_head(tmp_path, layout):
    """As the legacy trainer writes them; vLLM's file has that LM head once (`original_lm_head`)."""
    target, tensors = tiny.target("llama"), {name: t for name, t in official(2).items() if ".linear." in name}
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2, "version": "2"})
    )
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    report = import_checkpoint(target, str(tmp_path), str(tmp_path / "d"))
    assert any("lm_heads: absent" in note for note in report.notes)
    drafter, f = load_drafter(str(tmp_path / "d"), target), tiny.noise(1, 1, HIDDEN)
    said = drafter.logits(drafter.head(f))[0, 0]
    for i in range(3):
        x = f[0, 0]
        for j in range(2):
            y = tensors[f"{i}.{j}.linear.weight"] @ x + tensors[f"{i}.{j}.linear.bias"]
            x = x + y * y.sigmoid()
        torch.testing.assert_close(said[i], target.lm_head().weight.detach() @ x)
    export(target, str(tmp_path / "d"), str(tmp_path / "b"), layout=layout)
    import_checkpoint(target, str(tmp_path / "b"), str(tmp_path / "again"))
    again = load_drafter(str(tmp_path / "again"), target)
    assert again.head.config == drafter.head.config
    assert all(torch.equal(again.head.state_dict()[name], t) for name, t in drafter.head.state_dict().items())
    prompt = tiny.prompts(9)[0]
    assert (
        generate(target, prompt, again, max_new_tokens=8).tokens
        == generate(target, prompt, max_new_tokens=8).tokens
    )


def test_the_lm_head_of_another_target_is_refused(tmp_path):
    target, tensors = tiny.target("llama"), served(1)
    tensors = {name: t for name, t in tensors.items() if not name.startswith(("lm_heads.1", "lm_heads.2"))}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa", "original_lm_head": True}))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not this target's LM head"):
        import_checkpoint(target, str(tmp_path), str(tmp_path / "d"))


def test_heads_of_another_target_are_refused(tmp_path):
    target, tensors = tiny.target("llama"), official(1)
    tensors |= {f"{i}.1.weight": torch.zeros(V + 1, HIDDEN) for i in range(3)}
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="the target it was made for"):
        import_checkpoint(target, str(tmp_path), str(tmp_path / "d"))
    assert not (tmp_path / "d").exists()
