"""Weights come back from a drafter directory as they were stored, and nobody else's directory is written
into."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from slipstream.directories import made_by
from slipstream.drafters import load_drafter
from slipstream.drafters.heads import layer_sizes
from slipstream.drafters.store import (
    VOCAB,
    read_drafter,
    read_tuned,
    restored,
    save_drafter,
    save_tuned,
    stored,
)
from slipstream.interop.public import export, import_checkpoint


@pytest.mark.parametrize("make", [tiny.eagle, tiny.eagle3, tiny.fasteagle])
def test_int8_takes_half_the_space_and_half_a_step(make, tmp_path):
    target = tiny.target("llama")
    drafter, sizes = make(target, "chain-2"), {}
    for dtype in (torch.bfloat16, torch.int8):
        save_drafter(tmp_path / str(dtype), drafter.method, target, *drafter.pack(), {}, dtype=dtype)
        sizes[dtype] = sum(t.numel() * t.itemsize for t in stored(drafter.pack()[1], dtype).values())
    assert sizes[torch.int8] < 0.7 * sizes[torch.bfloat16]  # tiny rows: their steps take an eighth
    config, tensors = read_drafter(tmp_path / "torch.int8", target)
    for name, tensor in drafter.pack()[1].items():
        if tensor.ndim == 2:
            step = tensor.float().abs().amax(1, keepdim=True) / 127
            assert ((tensors[name] - tensor.float()).abs() <= 0.5001 * step).all(), name
    again = type(drafter).load(config, tensors, target)
    assert again.tree_spec == drafter.tree_spec


def test_what_is_stored_does_not_change_when_it_is_stored_again():
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(5, 7), "b.weight": torch.randn(7), "vocab": torch.arange(5)}
    once = restored(stored(tensors, torch.int8))
    twice = restored(stored(once, torch.int8))
    assert all(torch.equal(once[name], twice[name]) for name in tensors)


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama")


@pytest.fixture
def drafter(target, tmp_path) -> str:
    made = tiny.eagle(target, "chain-2")
    save_drafter(tmp_path / "drafter", "eagle", target, *made.pack(), {}, dtype=None)
    return str(tmp_path / "drafter")


def write(directory, to: str, target, source: str, force: bool = False) -> None:
    """By import, export or save_drafter."""
    if to == "import":
        import_checkpoint(target, source, str(directory), force=force)
    elif to == "export":
        export(target, source, str(directory), force=force)
    else:
        save_drafter(directory, "eagle", target, *tiny.eagle(target, "chain-2").pack(), {}, force=force)


@pytest.mark.parametrize("to", ["import", "export", "train"])
def test_only_what_the_same_command_wrote_is_replaced(target, drafter, tmp_path, to):
    """--out at a model's directory replaced its config.json and its weights."""
    public, model, out = tmp_path / "public", tmp_path / "model", tmp_path / "out"
    export(target, drafter, str(public))
    source = str(public) if to == "import" else drafter
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, model / "model.safetensors")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ValueError, match=r"holds other files \(config.json, model.safetensors, …\).*--force"):
        write(model, to, target, source)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    (tmp_path / "empty").mkdir()
    for directory in (out, out, tmp_path / "empty"):  # the same once more
        write(directory, to, target, source)
        assert made_by(directory) == to
    for place in {"import": [drafter, public], "export": [], "train": [public]}[to]:
        with pytest.raises(ValueError, match=r"name a new or empty one|is read by this command"):
            write(place, to, target, source)
    write(model, to, target, source, force=True)
    assert made_by(model) == to


def test_a_drafter_is_not_exported_onto_itself(target, drafter, tmp_path):
    """`export D --out D`: the drafter was gone, and with --force it would be."""
    before = (tmp_path / "drafter" / "config.json").read_bytes()
    for force in (False, True):
        with pytest.raises(ValueError, match="is read by this command"):
            export(target, drafter, f"{drafter}/../drafter", force=force)
    assert (tmp_path / "drafter" / "config.json").read_bytes() == before


def test_a_command_that_fails_leaves_no_directory(target, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        import_checkpoint(target, str(tmp_path / "nowhere"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("taps", []),
        ("taps", 3),
        ("taps", [0]),
        ("taps", [None]),
        ("taps", [[]]),
        ("head", []),
        ("head", {"x": {}}),
        ("head", {**layer_sizes(tiny.target("llama")), "inputs": "x"}),
        ("head", {**layer_sizes(tiny.target("llama")), "head_dim": 10**12}),
        ("tree", 7),
        ("target", []),
        ("method", []),
        (None, "[" * 9999),
    ],
)
def test_a_config_that_does_not_fit_is_one_line(target, drafter, tmp_path, key, value):
    path = tmp_path / "drafter" / "config.json"
    path.write_text(
        value if key is None else "\ufeff" + json.dumps(json.loads(path.read_text()) | {key: value})
    )
    for use in (
        lambda: load_drafter(drafter, target),
        lambda: export(target, drafter, str(tmp_path / "o")),
    ):
        with pytest.raises(ValueError, match=r"config\.json|does not fit|no drafter|Unknown") as refused:
            use()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("make", [tiny.eagle, tiny.medusa, tiny.glide])
def test_more_taps_than_a_head_reads_are_one_line(target, tmp_path, make):
    """They failed at the first draft."""
    drafter = make(target, "chain-2")
    config, tensors = drafter.pack()
    taps = {"taps": config["taps"] * 2}
    save_drafter(tmp_path, drafter.method, target, config | taps, tensors, {}, dtype=None)
    with pytest.raises(ValueError, match=r"config\.json of this .* head does not fit: taps is .*, '"):
        load_drafter(str(tmp_path), target)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("fc.weight", lambda t: t.fill_(math.nan), "fc.weight holds numbers that are not finite"),
        ("fc.weight", lambda t: t.index_fill(0, torch.tensor([1]), -math.inf), "not finite"),
        ("fc.weight.step", lambda t: torch.ones(3), "model.safetensors does not fit"),
        ("fc.weight.step", lambda t: torch.tensor(1.0), "model.safetensors does not fit"),
        ("fc.weight", lambda t: t.to(torch.float8_e4m3fn), "model.safetensors does not fit"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(target, drafter, tmp_path, name, change, says):
    """Those that are not finite drafted noise, or stopped a run much later."""
    path = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: change(tensors["fc.weight"].clone())}, path)
    with pytest.raises(ValueError, match=says) as refused:
        load_drafter(drafter, target)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "vocab", "says"),
    [
        (tiny.eagle, torch.tensor([3, 5, 3]), "names tokens twice"),  # `sampled` drew from another law
        (tiny.eagle, torch.tensor([3, 64]), "names other tokens than this target's 64"),
        (tiny.eagle, torch.arange(64)[None], "draft_vocab has shape"),
        (tiny.distilled, torch.arange(64)[None], "draft_vocab has shape"),
        (tiny.eagle3, torch.arange(40), "LM head has 64 tokens, and its draft vocabulary 40"),
        (tiny.medusa, torch.arange(40), "LM head has 64 tokens, and its draft vocabulary 40"),
    ],
)
def test_a_draft_vocabulary_that_does_not_fit_is_one_line(target, tmp_path, make, vocab, says):
    """Such heads failed at their first draft, or drew from another law than the target's."""
    drafter = make(target, "chain-2")
    config, tensors = drafter.pack()
    save_drafter(tmp_path, drafter.method, target, config, tensors | {VOCAB: vocab}, {}, dtype=None)
    with pytest.raises(ValueError, match=says):
        load_drafter(str(tmp_path), target)


def test_a_tuned_tree_goes_with_the_weights_that_it_was_found_for(target, tmp_path):
    """Other weights in the same directory, drafting with the tree of the old ones."""
    drafter = tiny.eagle(target, "chain-2")
    for _ in range(2):
        save_drafter(tmp_path, drafter.method, target, *drafter.pack(), {})
        assert read_tuned(tmp_path, "here", 0.0) == {}
        save_tuned(tmp_path, "here", {0.0: {"tree": "chain-1"}})
        assert read_tuned(tmp_path, "here", 0.0) == {"tree": "chain-1"}
