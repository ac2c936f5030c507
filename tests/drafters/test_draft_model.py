"""A draft model says what it would say by itself. A wrong mask, position or cache changes no text, only the
drafts."""

import io
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

import tiny
from slipstream.core.kv_cache import BLOCK
from slipstream.core.tree import chain
from slipstream.drafters import load_drafter, tuned_home
from slipstream.drafters.draft_model.model import DraftModel
from slipstream.drafters.store import read_tuned, save_drafter, save_tuned
from slipstream.engine import engine as engines
from slipstream.engine.generate import generate
from slipstream.kernels.ops import available
from slipstream.targets import HFTarget, load_target
from slipstream.targets.linear import Packed

PROMPTS = tiny.prompts(9, 4, 14)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
@pytest.mark.parametrize("options", [{"tree": "chain-3"}, {"tree": "[[0],[1],[0,0],[1,0],[0,0,0]]"}])
@pytest.mark.parametrize("chunk", [512, 5])
def test_a_model_that_drafts_for_itself_is_always_right(family, options, chunk, monkeypatch):
    """Ragged prompts in chunks, windows that end inside the draft, rows that read a cousin or what was
    rejected."""
    monkeypatch.setattr(engines, "CHUNK", chunk)
    target = tiny.target(family)
    for answer in generate(
        target, PROMPTS, DraftModel(target, target, **options), max_new_tokens=17, temperature=0.0
    ):
        assert [r.accepted for r in answer.rounds[:-1]] == [3] * (len(answer.rounds) - 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_reads_tokens_that_its_own_embedding_does_not_have(temperature):
    """Models of one tokenizer have embeddings of several sizes. Such a token was an IndexError."""
    narrow = HFTarget(tiny.build(LlamaConfig(**tiny.GROUPED | {"vocab_size": 40})))
    target = tiny.target("llama")
    settings = {"max_new_tokens": 17, "temperature": temperature, "seed": 1}
    plain = generate(target, PROMPTS, "vanilla", **settings)
    assert any(token >= narrow.vocab for answer in plain for token in answer.tokens)
    drafted = generate(target, PROMPTS, DraftModel(narrow, target, "chain-3"), **settings)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]


def test_with_the_targets_own_noise_it_is_right_at_every_temperature():
    target = tiny.target("llama")
    drafter = DraftModel(target, target, "chain-3", "noise")
    answers = generate(target, PROMPTS, drafter, max_new_tokens=17, temperature=1.3, seed=5)
    assert all(r.accepted == 3 for answer in answers for r in answer.rounds[:-1])


def saved(directory) -> str:
    """A model's directory, which `draft-model:model=` and `load_target` take."""
    tiny.reference("llama").save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_named_for_its_own_target_it_is_right_at_every_temperature(temperature, tmp_path):
    """The default proposal at T > 0 was top-k: a model that drafts for itself had most drafts refused."""
    target = load_target(saved(tmp_path), dtype="float64")
    how = {"max_new_tokens": 17, "temperature": temperature, "seed": 5}
    ids = [[3, 1, 4, 1, 5], [9, 2, 6]]
    answers = generate(target, ids, f"draft-model:model={tmp_path},tree=chain-3", **how)
    assert all(r.accepted == 3 for answer in answers for r in answer.rounds[:-1])
    plain = generate(target, ids, "vanilla", **how)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]


def test_under_another_law_it_does_not_look_at_the_noise(tmp_path):
    """The default proposal at T > 0, which the multi-round law refuses."""
    target = load_target(saved(tmp_path), dtype="float64")
    named = f"draft-model:model={tmp_path}"
    assert load_drafter(named, target, 1.0).proposal == "noise"
    assert load_drafter(f"{named},proposal=top-k", target, 1.0).proposal == "top-k"
    assert generate(target, [1, 2, 3], named, law="multi-round", max_new_tokens=3, temperature=1.0).tokens


@pytest.mark.skipif(not available(), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("said", "kind"), [("", "int8"), (",quantize=int4", "int4"), (",quantize=none", None)]
)
def test_it_has_the_targets_quantisation_unless_told_otherwise(said, kind, tmp_path):
    target = load_target(saved(tmp_path), "float32", quantize="int8")
    drafter = load_drafter(f"draft-model:model={tmp_path}{said}", target)
    assert drafter.model.quantize == kind


def test_every_drafted_child_is_among_the_likeliest_of_its_path():
    """Trees of another model, held against that model without a cache."""
    target, trace = tiny.target("llama"), io.StringIO()
    drafter = tiny.draft_model(target, "dynamic-3x3x9")
    answer = generate(target, PROMPTS[0], drafter, max_new_tokens=12, temperature=0.0, trace=trace)
    checked = 0
    for text, path, kids in tiny.drafted(PROMPTS[0] + answer.tokens, len(PROMPTS[0]), trace):
        logits = tiny.reference(drafter.model.name)(torch.tensor([text + path])).logits[0, -1]
        assert set(kids) == set(logits.topk(len(kids)).indices.tolist())
        checked += 1
    assert checked > 12


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_skipping_blocks_is_the_model_without_them(family):
    """The same weights and nothing copied; the target itself stays whole. A block keeps its own kind of
    window."""
    target, text = tiny.target(family), torch.tensor(tiny.prompts(11))
    whole = target.features(text.tolist(), ["final"])
    drafter = load_drafter("self-speculative:skip=0", target)
    model = tiny.build(tiny.FAMILIES[family])
    del model.model.layers[0]
    if types := getattr(model.config, "layer_types", None):
        assert types[0] != types[1]
        model.config.layer_types = types[1:]
    # Gemma 2's eager attention sums its softmax in float32, which rounds by the number of columns: the
    # reference has as many as the cache.
    padded = torch.nn.functional.pad(text, (0, BLOCK - text.shape[1]))
    want = model.model(padded, use_cache=False).last_hidden_state[:, : text.shape[1]]
    torch.testing.assert_close(drafter.model.features(text.tolist(), ["final"]), want)
    assert torch.equal(target.features(text.tolist(), ["final"]), whole)
    part, whole = (model.shadow_model for model in (drafter.model, target))
    assert set(map(id, part.parameters())) < set(map(id, whole.parameters()))


def test_another_tokenizer_is_refused_with_the_reason():
    target, other = tiny.target("llama"), tiny.tokenizer()
    other = type(other)(tokenizer_object=other._tokenizer, eos_token="</s>")
    other.add_tokens(["zz"])
    model = HFTarget(tiny.build(tiny.FAMILIES["llama"]), other, "mine")
    with pytest.raises(
        ValueError, match=r"mine reads other tokens than the target \(65 against 64; 'zz' is not the same\)"
    ):
        DraftModel(model, target)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("self-speculative", "skips some of the target's blocks 0 to 1: name them"),
        (
            "draft-model:tree=chain-3",
            r"no draft-model weights ship for this target .* or write draft-model:model=…",
        ),
        ("self-speculative:skip=0-1", "keep one"),
        ("self-speculative:skip=7", r"blocks \[7\] cannot be skipped: this target has blocks 0 to 1"),
        ("self-speculative:skip=a", "names no blocks"),
        ("draft-model:model=/nowhere", "no such file or directory"),
    ],
)
def test_a_draft_that_cannot_be_made_is_one_clear_line(spec, says):
    with pytest.raises(ValueError, match=says):
        load_drafter(spec, tiny.target("llama"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
def test_a_trained_part_comes_back_from_its_directory(family, tmp_path):
    """Copies that share a weight with the target, or lose one on the way: drafts of a model that nobody
    trained."""
    target, text = tiny.target(family), tiny.prompts(9)
    whole = [p.clone() for p in target.model.parameters()]
    drafter = tiny.distilled(target, blocks=(0, 1))
    assert all(torch.equal(p, q) for p, q in zip(target.model.parameters(), whole, strict=True))
    save_drafter(tmp_path, "draft-model", target, *drafter.pack(), {}, dtype=None)
    again = load_drafter(str(tmp_path), target)
    assert torch.equal(again.vocab, drafter.vocab)
    said, before = (d.model(chain(torch.tensor(text)), d.model.new_cache(1)).logits for d in (again, drafter))
    assert torch.equal(said, before)
    assert said.shape[-1] == tiny.VOCAB // 2
    untrained = DraftModel(target.part([0, 1], own=True, vocab=drafter.vocab), target, vocab=drafter.vocab)
    own = target(chain(torch.tensor(text)), target.new_cache(1)).logits[..., drafter.vocab]
    torch.testing.assert_close(
        untrained.model(chain(torch.tensor(text)), untrained.model.new_cache(1)).logits, own
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_trained_part_of_a_target_that_has_answered_reads_its_own_weights(dtype, monkeypatch, tmp_path):
    """Packed copies of the target's weights, which came along with its blocks: draft models drafted as if
    nobody had trained them."""
    target = HFTarget(deepcopy(tiny.reference("llama")).to(dtype), tiny.tokenizer(), "llama")
    text = chain(torch.tensor(tiny.prompts(9)))
    target(text, target.new_cache(1))  # packs its weights
    save_drafter(tmp_path, "draft-model", target, *tiny.distilled(target).pack(), {}, dtype=None)
    model = load_drafter(str(tmp_path), target).model
    said = model(text, model.new_cache(1)).logits
    monkeypatch.setattr(Packed, "product", lambda self, x, weight, bias: F.linear(x, weight, bias))
    torch.testing.assert_close(said, model(text, model.new_cache(1)).logits, atol=0.05, rtol=0.05)


def test_without_skip_the_blocks_that_tune_found_are_skipped(monkeypatch, tmp_path):
    """`generate --drafter self-speculative`, as the help offers it, wanted skip=… even after tune."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ends = tiny.target("llama")
    found = {"skip": "0", "tree": "chain-2", "proposal": "top-k"}
    save_tuned(tuned_home("self-speculative", ends), ends.place, {0.0: found})
    made = load_drafter("self-speculative", ends)
    assert (made.tree_spec.name, len(made.model.blocks)) == ("chain-2", 1)


def test_what_tune_finds_for_a_model_of_a_long_path_is_kept(monkeypatch, tmp_path):
    """The path named the file: `tune` raced trees for minutes, and failed when it stored the best."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, homes = tiny.target("llama"), [tmp_path / f"{'a' * 120}" / f"{'é' * 70}{end}" for end in "12"]
    places = [tuned_home(f"draft-model:model={home}", target) for home in homes]
    for i, place in enumerate(places):
        save_tuned(place, target.place, {0.0: {"tree": f"chain-{i + 1}"}})
    assert [read_tuned(place, target.place, 0.0)["tree"] for place in places] == ["chain-1", "chain-2"]
