"""Medusa's two public layouts: written by hand here, read and written back by us."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from slipstream.decode.generate import generate
from slipstream.drafters import load_drafter
from slipstream.drafters.store import save_drafter
from slipstream.interop.public import export_head, import_head

H, V = 32, tiny.VOCAB


def official(layers: int, bias: bool = True) -> dict[str, torch.Tensor]:
    shapes = {f"{i}.{j}.linear.weight": (H, H) for i in range(3) for j in range(layers)}
    shapes |= {f"{i}.{j}.linear.bias": (H,) for i in range(3) for j in range(layers) if bias}
    shapes |= {f"{i}.{layers}.weight": (V, H) for i in range(3)}
    return {name: tiny.noise(*shape, scale=0.2, seed=k) for k, (name, shape) in enumerate(shapes.items())}


def served(layers: int) -> dict[str, torch.Tensor]:
    shapes = {f"blocks.{i}.layers.{j}.weight": (H, H) for i in range(3) for j in range(layers)}
    shapes |= {f"lm_heads.{i}.weight": (20, H) for i in range(3)}
    made = {name: tiny.noise(*shape, scale=0.2, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    return made | {"token_map": torch.arange(3, 63, 3)}


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_official_layout_says_what_it_says_and_comes_back_bit_for_bit(tmp_path, layers, pickled):
    """Its config.json may count fewer heads than the file has."""
    target, tensors = tiny.target("llama"), official(layers)
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "some/model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    else:
        save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    import_head(str(tmp_path), str(tmp_path / "d"), target)
    drafter, f = load_drafter(str(tmp_path / "d"), target), tiny.noise(1, 1, H)
    said = drafter.head.logits(drafter.head(f))[0, 0]
    for i in range(3):
        x = f[0, 0]
        for j in range(layers):
            y = tensors[f"{i}.{j}.linear.weight"] @ x + tensors[f"{i}.{j}.linear.bias"]
            x = x + y * y.sigmoid()
        torch.testing.assert_close(said[i], tensors[f"{i}.{layers}.weight"] @ x)
    export_head(str(tmp_path / "d"), str(tmp_path / "b"), target)
    again = load_file(tmp_path / "b" / "medusa_lm_head.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


def test_the_serving_engines_layout_comes_back_bit_for_bit(tmp_path):
    target, tensors = tiny.target("llama"), served(2)
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "truncated_vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    import_head(str(tmp_path), str(tmp_path / "d"), target)
    drafter = load_drafter(str(tmp_path / "d"), target)
    assert (drafter.vocab.tolist(), drafter.head.config.bias) == (list(range(3, 63, 3)), False)
    export_head(str(tmp_path / "d"), str(tmp_path / "b"), target)
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_our_own_heads_in_both_layouts(tmp_path):
    """A draft vocabulary, which only one of them can express."""
    target = tiny.target("llama")
    drafter = tiny.medusa(target, vocab=40)
    save_drafter(tmp_path / "d", "medusa", target, *drafter.pack(), {}, dtype=None)
    with pytest.raises(ValueError, match="medusa-vllm"):
        export_head(str(tmp_path / "d"), str(tmp_path / "p"), target)
    export_head(str(tmp_path / "d"), str(tmp_path / "p"), target, "medusa-vllm")
    import_head(str(tmp_path / "p"), str(tmp_path / "again"), target)
    again = load_drafter(str(tmp_path / "again"), target)
    assert again.head.config == drafter.head.config
    assert again.vocab.tolist() == drafter.vocab.tolist()
    for name, tensor in drafter.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], tensor)


@pytest.mark.parametrize("layout", ["medusa", "medusa-vllm"])
def test_blocks_alone_say_with_the_targets_own_lm_head(tmp_path, layout):
    """As the legacy trainer writes them; vLLM's file has that LM head once (`original_lm_head`)."""
    target, tensors = tiny.target("llama"), {name: t for name, t in official(2).items() if ".linear." in name}
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2, "version": "2"})
    )
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    report = import_head(str(tmp_path), str(tmp_path / "d"), target)
    assert any("lm_heads: absent" in note for note in report.notes)
    drafter, f = load_drafter(str(tmp_path / "d"), target), tiny.noise(1, 1, H)
    said = drafter.logits(drafter.head(f))[0, 0]
    for i in range(3):
        x = f[0, 0]
        for j in range(2):
            y = tensors[f"{i}.{j}.linear.weight"] @ x + tensors[f"{i}.{j}.linear.bias"]
            x = x + y * y.sigmoid()
        torch.testing.assert_close(said[i], target.lm_head().weight.detach() @ x)
    export_head(str(tmp_path / "d"), str(tmp_path / "b"), target, layout)
    import_head(str(tmp_path / "b"), str(tmp_path / "again"), target)
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
        import_head(str(tmp_path), str(tmp_path / "d"), target)


def test_heads_of_another_target_are_refused(tmp_path):
    target, tensors = tiny.target("llama"), official(1)
    tensors |= {f"{i}.1.weight": torch.zeros(V + 1, H) for i in range(3)}
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="the target it was made for"):
        import_head(str(tmp_path), str(tmp_path / "d"), target)
    assert not (tmp_path / "d").exists()
