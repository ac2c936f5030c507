"""Quantised models are read again as they were made, or made again."""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from slipstream.core.tree import chain
from slipstream.kernels import ops
from slipstream.targets import (
    HFTarget,
    load_target,
    model_cache,
    models,
)
from slipstream.targets.cached_target import TARGET

pytestmark = pytest.mark.skipif(not ops.available(), reason="there is no C++ compiler")
TOKENS = torch.arange(1, 12)[None]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of models whose weights were rounded."""
    names, rounded = list[str](), models.quantised

    def quantised(model, kind, name):
        names.append(name)
        return rounded(model, kind, name)

    monkeypatch.setattr(models, "quantised", quantised)
    return names


def saved(family: str, directory: Path) -> str:
    tiny.reference(family).save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return str(directory)


def models_in(home: Path) -> list[Path]:
    """All that the cache holds beside the hashes of files and descriptions."""
    models = (path for path in home.iterdir() if path.name != model_cache.DIGESTS)
    return [path for path in models if not (path / TARGET).exists()]


def says(target: HFTarget) -> torch.Tensor:
    return target(chain(TOKENS % target.vocab), target.new_cache(1)).logits


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "gpt2", "phi", "mixtral"])
def test_a_second_start_reads_the_same_model(unchecked, tmp_path, home, made, family, kind):
    """Weights rounded at every start: 20 seconds and three times the memory. Rotary positions, tied heads,
    factors of embeddings and biases are no parameters of linear layers, and may be lost."""
    name = saved(family, tmp_path / "model")
    one, other = (load_target(name, "float32", quantize=kind) for _ in range(2))
    assert made == [name]
    assert torch.equal(says(one), says(other))
    plain = HFTarget(tiny.build(tiny.FAMILIES[family]).float(), quantize=kind)
    assert torch.equal(says(one), says(plain))
    for field in ("fingerprint", "exactness", "window", "read_bytes", "source", "stamp", "described"):
        assert getattr(one, field) == getattr(other, field), field
    assert repr(one) == repr(other)
    assert (one.decoder is None) == (other.decoder is None)


def test_a_kept_model_is_no_other_kind(unchecked, tmp_path, home):
    """A model of 8 bits that calls itself int4."""
    target = load_target(saved("llama", tmp_path / "model"), "float32", quantize="int8")
    assert HFTarget(target.model, quantize="int8").fingerprint == target.fingerprint
    with pytest.raises(ValueError, match="is quantised already"):
        HFTarget(target.model, quantize="int4")


def test_other_contents_dtypes_and_kinds_are_other_models(unchecked, tmp_path, home, made):
    """An answer by weights that were replaced since."""
    name = saved("llama", tmp_path / "model")
    for quantize, dtype in (("int8", "float32"), ("int4", "float32"), ("int8", "bfloat16")):
        load_target(name, dtype, quantize=quantize)
    assert len(made) == 3
    weights = tmp_path / "model" / "model.safetensors"
    content, said = bytearray(weights.read_bytes()), os.stat(weights)
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(said.st_atime_ns, said.st_mtime_ns))  # of the same size and time
    load_target(name, "float32", quantize="int8")
    assert len(made) == 4


@pytest.mark.parametrize("file", [model_cache.WEIGHTS, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_copy_is_made_again(unchecked, tmp_path, home, made, file, left):
    name = saved("llama", tmp_path / "model")
    whole = says(load_target(name, "float32", quantize="int8"))
    (copy,) = models_in(home)
    (copy / file).write_bytes((copy / file).read_bytes()[:left])
    for _ in range(2):
        target = load_target(name, "float32", quantize="int8")
        assert torch.equal(says(target), whole)
        assert target.model is not None
        assert torch.equal(says(target), whole)
        assert len(made) == 2


def test_what_would_be_read_otherwise_is_not_kept(unchecked, tmp_path, home, made, monkeypatch):
    """A copy that lost something is compared with the model before anyone reads it."""
    write = torch.save

    def wrongly(record: dict[str, Any], file: Path) -> None:
        tensors = {name: x * ("norm" not in name) for name, x in record.get("tensors", {}).items()}
        write(record | {"tensors": tensors}, file)

    monkeypatch.setattr(torch, "save", wrongly)
    name = saved("llama", tmp_path / "model")
    load_target(name, "float32", quantize="int8")
    assert [path for path in home.iterdir() if path.name != model_cache.DIGESTS] == []


@pytest.mark.parametrize("said", ["", "{", "[]", '{"a": 1}', '{"/": {"stamp": 3}}'])
def test_damaged_hashes_of_files_are_made_again(unchecked, tmp_path, home, made, said):
    """A refusal of every target: move it away."""
    name = saved("llama", tmp_path / "model")
    for text in (said, None):
        if text is not None:
            home.mkdir(parents=True, exist_ok=True)
            (home / model_cache.DIGESTS).write_text(text)
        load_target(name, "float32", quantize="int8")
    assert len(made) == 1
    assert json.loads((home / model_cache.DIGESTS).read_text())


def test_a_cache_that_cannot_be_written_is_no_error(unchecked, tmp_path, monkeypatch, made):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    name = saved("llama", tmp_path / "model")
    for _ in range(2):
        load_target(name, "float32", quantize="int8")
    assert len(made) == 2


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file that holds a tiny Qwen 2."""

    def read_gguf(file: Path, dtype: torch.dtype) -> models.Loaded:
        return deepcopy(tiny.reference("qwen2")).to(dtype), tiny.tokenizer()

    monkeypatch.setattr(models, "read_gguf", read_gguf)
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


def test_a_gguf_file_is_kept_once(unchecked, home, made, gguf):
    """The dequantised model beside the quantised one: 3 GB that nobody reads."""
    for _ in range(2):
        load_target(gguf, "float32", quantize="int8")
    (copy,) = models_in(home)
    assert torch.load(copy / model_cache.WEIGHTS)["origin"]["quantize"] == "int8"
    assert len(made) == 1


@pytest.mark.parametrize("kind", [None, "int8"])
def test_the_tokenizer_of_a_gguf_file_stays_what_it_is(unchecked, home, gguf, kind):
    """AutoTokenizer knows a class of its own for Qwen 2, which normalises text: the second start read other
    tokens than the first."""
    for _ in range(2):
        tokenizer = load_target(gguf, "float32", quantize=kind).text.tokenizer
        assert tokenizer.backend_tokenizer.to_str() == tiny.tokenizer().backend_tokenizer.to_str()
