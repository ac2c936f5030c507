"""A drafter that is named in each call is read once, and again once its files have changed."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch

import tiny
from slipstream import generate
from slipstream.drafters import drafter_cache as kept
from slipstream.drafters.drafter_cache import LIMIT, cached_drafter
from slipstream.drafters.store import save_drafter
from slipstream.targets import HFTarget

PROMPT = tiny.prompts(9)[0]


def fresh():
    """A target that no other test has."""
    return HFTarget(deepcopy(tiny.reference("llama")), tiny.tokenizer(), "llama")


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """A target of its own, and the directory of a head for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = fresh()
    save(target, tmp_path / "head")
    return target, tmp_path / "head"


def save(target, directory):
    head = tiny.eagle(target, "chain-2")
    save_drafter(directory, head.method, target, *head.pack(), {})


@pytest.mark.parametrize("spec", ["{}", "hybrid:head={}", "auto:head={}"])
def test_it_is_read_once_for_all_calls_of_a_kind(saved, spec):
    target, home = saved
    name = spec.format(home)
    first = cached_drafter(name, target)
    assert cached_drafter(name, target) is first
    assert cached_drafter(name, target, 1.0) is not first, "tune may have found another tree for T > 0"
    assert cached_drafter(name, target, 0.0, 4) is not first
    assert cached_drafter(name, fresh()) is not first


@pytest.mark.parametrize("spec", ["{}", "hybrid:head={}", "auto:head={}"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tuned.json"])
def test_a_directory_that_was_written_again_is_read_again(saved, spec, file):
    """Old weights after `train`, old trees after `tune`."""
    target, home = saved
    first = cached_drafter(spec.format(home), target)
    if file == "tuned.json":
        (home / file).write_text("{}")
    else:
        beside = home / "beside"
        beside.write_bytes((home / file).read_bytes())
        beside.replace(home / file)  # as it is written: a file of the same size in the place of the old one
    again = cached_drafter(spec.format(home), target)
    assert again is not first
    assert cached_drafter(spec.format(home), target) is again


@pytest.mark.parametrize(
    ("spec", "other"),
    [("draft-model:model={}", "tree=chain-2"), ("auto:head=draft-model:model={}", "remember=1")],
)
def test_a_draft_model_is_loaded_once(saved, tmp_path, spec, other):
    """It was read, and compiled, in every call of `generate`."""
    target, home = saved[0], tmp_path / "small"
    tiny.reference("llama").save_pretrained(home)
    tiny.tokenizer().save_pretrained(home)
    name = spec.format(home)
    first = cached_drafter(name, target)
    assert cached_drafter(name, target) is first
    assert cached_drafter(f"{name},{other}", target) is not first
    (home / "config.json").write_text((home / "config.json").read_text() + " ")
    assert cached_drafter(name, target) is not first


def test_changed_weights_draft(saved):
    target, home = saved
    before = cached_drafter(str(home), target).head.fc.weight.clone()
    head = tiny.eagle(target, "chain-2")
    config, tensors = head.pack()
    doubled = {name: 2 * tensor for name, tensor in tensors.items()}
    save_drafter(home, head.method, target, config, doubled, {})
    torch.testing.assert_close(cached_drafter(str(home), target).head.fc.weight, 2 * before)


def test_answers_are_the_same(saved, monkeypatch):
    target, home = saved
    some = [generate(target, PROMPT, str(home), max_new_tokens=20).tokens for _ in range(2)]
    monkeypatch.setattr(kept, "load_drafter", None)
    some.append(generate(target, PROMPT, str(home), max_new_tokens=20).tokens)
    monkeypatch.undo()
    assert some == 3 * [generate(target, PROMPT, "vanilla", max_new_tokens=20).tokens]


def test_no_target_is_kept_alive(saved):
    _, home = saved
    target = fresh()
    drafter, gone = weakref.ref(cached_drafter(str(home), target)), weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    assert drafter() is None


def test_a_released_target_keeps_no_drafter(saved):
    target, home = saved
    drafter = weakref.ref(cached_drafter(str(home), target))
    target.release()
    gc.collect()
    assert drafter() is None


def test_few_are_kept(saved):
    target, home = saved
    for depth in range(1, 3 * LIMIT):
        cached_drafter(f"{home}:tree=chain-{depth}", target)
    assert len(target.drafters) == LIMIT


def test_what_remembers_answers_is_made_for_each_call(saved):
    target, home = saved
    name = f"hybrid:head={home},remember=1"
    assert cached_drafter(name, target) is not cached_drafter(name, target)


def test_a_name_that_is_none_is_refused_as_ever(saved):
    with pytest.raises(ValueError, match="Unknown drafter: 'nonsense'"):
        cached_drafter("nonsense", saved[0])
