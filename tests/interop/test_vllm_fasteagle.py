"""FastEagle for vLLM's plugin: what is written, what comes back, and that the plugin is found."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CohereConfig

import slipstream
import tiny
from slipstream.drafters import load_drafter
from slipstream.drafters.store import save_drafter
from slipstream.interop.public import export, import_checkpoint
from slipstream.interop.vllm_plugin import FASTEAGLE
from slipstream.targets import HFTarget

ROOT = Path(__file__).parents[2]


@pytest.fixture
def public(target, tmp_path):
    """A head whose candidates are ids 3 to 42, and the directory that it is written to."""
    drafter = tiny.fasteagle(target, vocab=40)
    drafter.vocab = torch.arange(3, 43)
    save_drafter(tmp_path / "d", "fasteagle", target, *drafter.pack(), {}, dtype=None)
    export(target, str(tmp_path / "d"), str(tmp_path / "p"))
    return drafter, tmp_path / "p"


def test_it_comes_back_bit_for_bit(target, tmp_path, public):
    drafter, written = public
    import_checkpoint(target, str(written), str(tmp_path / "again"))
    again = load_drafter(str(tmp_path / "again"), target)
    assert again.head.config == drafter.head.config
    assert torch.equal(again.vocab, drafter.vocab)
    assert again.tree_spec.name == drafter.tree_spec.name
    for name, t in drafter.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], t)
    export(target, str(tmp_path / "again"), str(tmp_path / "b"))
    assert (tmp_path / "b" / "config.json").read_text() == (written / "config.json").read_text()
    first, second = (load_file(home / "model.safetensors") for home in (written, tmp_path / "b"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_head_that_knows_the_token_above_is_refused(target, tmp_path):
    """It was written, and nothing could read it."""
    drafter = tiny.fasteagle(target, rank=4)
    save_drafter(tmp_path / "d", "fasteagle", target, *drafter.pack(), {}, dtype=None)
    with pytest.raises(ValueError, match=r"head\.rank=0"):
        export(target, str(tmp_path / "d"), str(tmp_path / "p"))


def test_an_engine_finds_what_it_reads(target, public):
    """The final state counted as the output of the last block, ids of candidates one apart, a norm lost."""
    _, written = public
    config = json.loads((written / "config.json").read_text())
    tensors = load_file(written / "model.safetensors")
    assert config["architectures"] == [FASTEAGLE]
    assert FASTEAGLE.endswith("Eagle3")  # others get a name that nobody registered
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, target.sizes.blocks]
    assert config["num_hidden_layers"] == 3
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == 40
    ids = torch.arange(40) + tensors["d2t"]
    assert torch.equal(tensors["lm_head.weight"], target.lm_head().weight[ids])
    assert torch.equal(tensors["norm.weight"], target.model.model.norm.weight)


@pytest.mark.parametrize(
    "config", [tiny.FAMILIES["gemma3"], CohereConfig(**tiny.GROUPED)], ids=["gemma3", "cohere"]
)
def test_another_norm_is_refused(tmp_path, config):
    """Cohere's takes the mean away, which states without one do not show."""
    other = HFTarget(tiny.build(config), tiny.tokenizer())
    save_drafter(tmp_path / "d", "fasteagle", other, *tiny.fasteagle(other).pack(), {}, dtype=None)
    with pytest.raises(ValueError, match="no plain RMSNorm"):
        export(other, str(tmp_path / "d"), str(tmp_path / "p"))


@pytest.mark.parametrize("name", ["lm_head.weight", "norm.weight"])
def test_a_head_of_another_target_is_refused(target, tmp_path, public, name):
    """It was imported without a word, and drafted badly."""
    _, written = public
    tensors = load_file(written / "model.safetensors")
    save_file({**tensors, name: -tensors[name]}, written / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is not this target's"):
        import_checkpoint(target, str(written), str(tmp_path / "again"))


def test_states_in_another_order_are_refused(target, tmp_path):
    drafter = tiny.fasteagle(target)
    config, tensors = drafter.pack()
    config["taps"] = config["taps"][::-1]
    save_drafter(tmp_path / "d", "fasteagle", target, config, tensors, {}, dtype=None)
    with pytest.raises(ValueError, match="ascending order"):
        export(target, str(tmp_path / "d"), str(tmp_path / "p"))


def test_vllm_finds_the_plugin_and_loads_little(target: HFTarget):
    """vLLM imports it in each of its processes: an import of transformers or of our kernels costs seconds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    ((name, place),) = project["entry-points"]["vllm.general_plugins"].items()
    assert (name, place) == ("slipstream", "slipstream.interop.vllm_plugin:register")
    module = place.partition(":")[0]
    look = f"import sys, {module} as m; print(m.register.__name__, 'torch' in sys.modules)"
    path = str(Path(slipstream.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", look], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "register False\n", done.stderr
