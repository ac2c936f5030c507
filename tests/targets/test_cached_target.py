"""Targets that start from a description in the cache: they say what the model says, without its modules,
which come when somebody asks for them."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import tiny
from slipstream import generate, load_drafter
from slipstream.core.tree import chain
from slipstream.files import cache_home
from slipstream.kernels import ops
from slipstream.targets import HFTarget, load_target
from slipstream.targets.cached_target import TARGET, CachedTarget

pytestmark = [
    pytest.mark.skipif(not ops.available(), reason="there is no C++ compiler"),
    pytest.mark.usefixtures("home"),
]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral")
PROMPT = [1, 5, 9, 2, 5, 9]


def saved(directory: Path, family: str = "llama") -> str:
    tiny.build(tiny.FAMILIES[family]).save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return str(directory)


def says(target: HFTarget) -> torch.Tensor:
    tokens = torch.arange(1, 12)[None] % target.vocab
    return target(chain(tokens), target.new_cache(1)).logits


def descriptions(home: Path) -> list[Path]:
    return [path.parent for path in home.glob(f"*/{TARGET}")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_start_says_the_same(tmp_path, family, quantize, dtype):
    """Norms by one more, scaled embeddings, biases, softcaps, tied heads: each may be lost on the way."""
    name = saved(tmp_path / "model", family)
    one, other = (load_target(name, dtype, quantize=quantize) for _ in range(2))
    assert (type(one), type(other)) == (HFTarget, CachedTarget)
    assert torch.equal(says(one), says(other))
    for field in (
        "fingerprint",
        "exactness",
        "window",
        "read_bytes",
        "source",
        "described",
        "manner",
        "place",
    ):
        assert getattr(one, field) == getattr(other, field), field
    assert repr(one) == repr(other)
    assert type(other) is CachedTarget
    assert one.stamp == other.stamp


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_drafters_are_the_models(tmp_path, family):
    name = saved(tmp_path / "model", family)
    one, other = (load_target(name, "float32") for _ in range(2))
    texts = [generate(target, PROMPT, max_new_tokens=12).tokens for target in (one, other)]
    assert type(other) is CachedTarget
    assert texts[0] == texts[1]
    drafted = generate(other, PROMPT, drafter=load_drafter("auto", other), max_new_tokens=12).tokens
    assert type(other) is CachedTarget
    assert drafted == texts[0]


def test_it_becomes_the_target_of_its_modules(tmp_path):
    name = saved(tmp_path / "model")
    load_target(name, "float32")
    target = load_target(name, "float32")
    before, head = says(target), target.lm_head()
    target.generation_config.temperature = 0.5
    assert isinstance(target, HFTarget)
    assert target.model.config.model_type == "llama"
    assert type(target) is HFTarget
    assert target.generation_config.temperature == 0.5
    assert torch.equal(says(target), before)
    assert torch.equal(head.weight, target.lm_head().weight)
    with torch.no_grad():
        target.model.lm_head.weight.mul_(2)
    assert torch.equal(says(target), 2 * before)


@pytest.mark.parametrize(
    "asks", [lambda t: t.part([0]), lambda t: t.rope(0), lambda t: t.margin, lambda t: t.plain]
)
def test_what_modules_say_is_as_before(tmp_path, asks):
    name = saved(tmp_path / "model")
    one, other = (load_target(name, "float32") for _ in range(2))
    assert repr(asks(one)) == repr(asks(other))
    assert type(other) is HFTarget


def test_threads_may_ask_for_modules_at_once(tmp_path):
    """A pass in a target that is half the one and half the other."""
    name = saved(tmp_path / "model")
    load_target(name, "float32")
    target = load_target(name, "float32")
    whole, wrong = says(target), list[str]()

    def passes() -> None:
        for _ in range(20):
            if not torch.equal(says(target), whole):
                wrong.append("logits")

    threads = [threading.Thread(target=passes) for _ in range(3)]
    threads += [threading.Thread(target=lambda: target.model) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_files_that_are_written_again_change_no_target(tmp_path):
    """SIGBUS: a training that saves into the directory that a server answers from."""
    name = saved(tmp_path / "model")
    load_target(name, "float32")
    target = load_target(name, "float32")
    before = says(target)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert torch.equal(says(target), before)
    with pytest.raises(ValueError, match="were written again since it was loaded: load it anew"):
        target.part([0])
    assert torch.equal(says(target), before)


def test_released_ones_load_nothing(tmp_path):
    name = saved(tmp_path / "model")
    load_target(name, "float32")
    with load_target(name, "float32") as target:
        pass
    for asks in (says, lambda target: target.model):
        with pytest.raises(ValueError, match="was released"):
            asks(target)


def test_a_damaged_description_is_made_again(tmp_path, home):
    name = saved(tmp_path / "model")
    whole = says(load_target(name, "float32"))
    for file in sorted(path.name for path in descriptions(home)[0].iterdir()):
        (place,) = descriptions(home)
        (place / file).write_bytes((place / file).read_bytes()[:40])
        assert torch.equal(says(load_target(name, "float32")), whole), file


def test_one_that_says_something_else_is_not_kept(tmp_path, home, monkeypatch):
    write = torch.save

    def wrongly(record: dict[str, Any], file: Path) -> None:
        write(tree_map_only(torch.Tensor, lambda x: 2 * x, record), file)

    monkeypatch.setattr(torch, "save", wrongly)
    name = saved(tmp_path / "model")
    for _ in range(2):
        assert type(load_target(name, "float32")) is HFTarget
    assert descriptions(home) == []


def test_experts_and_undescribed_layers_keep_their_modules(tmp_path, home):
    for family in ("mixtral", "gpt2"):
        name = saved(tmp_path / family, family)
        for _ in range(2):
            assert type(load_target(name, "float32")) is HFTarget
    assert descriptions(home) == []


def test_other_weights_are_another_target(tmp_path, home):
    name = saved(tmp_path / "model")
    before = says(load_target(name, "float32"))
    config = tmp_path / "model" / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "temperature": 0.3, "do_sample": True}))
    assert load_target(name, "float32").generation_config.temperature == 0.3
    model = tiny.build(tiny.FAMILIES["llama"])
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(says(load_target(name, "float32")), 2 * before)


@pytest.fixture(scope="module")
def kernels() -> Path:
    """Those of the whole run, before a test has a cache of its own."""
    return cache_home() / "kernels"


def test_a_second_start_imports_no_modelling_code(tmp_path, home, kernels):
    """A second and a half of a start of three: Dynamo, Hugging Face's modelling code, GGUF's reader."""
    name = saved(tmp_path / "model")
    load_target(name, "float32")
    (home / "kernels").symlink_to(kernels)  # the other process compiles none
    script = (
        "import sys, slipstream\n"
        f"target = slipstream.load_target({name!r}, 'float32')\n"
        "slipstream.generate(target, [1, 5, 9], drafter='auto', max_new_tokens=4)\n"
        "late = 'torch._dynamo', 'transformers.modeling_utils', 'gguf'\n"
        "print([name for name in late if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
