"""Features on disk: what a run finds there, shares with others, and leaves behind when the disk is full."""

import fcntl
from contextlib import contextmanager
from copy import deepcopy
from threading import Thread
from time import monotonic, sleep

import pytest
import torch

from slipstream.files import cache_home
from slipstream.targets import HFTarget
from slipstream.training.data import load_examples
from slipstream.training.features import Features, pack

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def features(chat, data) -> Features:
    """Of the final state of all examples, not filled yet."""
    examples = load_examples([data], chat, 40)
    return Features(chat, examples, pack(examples, 64), ("final",), 2**30)


@contextmanager
def filling_beside_another(features, advance=lambda n: None):
    """A thread that fills them while another run holds the lock."""
    features.paths[0].parent.mkdir(parents=True, exist_ok=True)
    with open(features.paths[0].parent / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        filling = Thread(target=features.fill, args=[advance], daemon=True)
        filling.start()
        yield filling


def test_a_full_disk_while_features_are_cached_keeps_what_is_there(chat, features, monkeypatch):
    examples = features.examples
    read, calls = features._compute, []

    def fail(batch, taps):
        calls.append(batch)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return read(batch, taps)

    monkeypatch.setattr(features, "_compute", fail)
    with pytest.raises(ValueError, match=r"No space left on device.*disk_gib"):
        features.fill(lambda n: None)
    fresh = Features(chat, examples, pack(examples, 64), ("final",), 2**30)
    told = []
    fresh.fill(told.append)
    assert told[0] == sum(len(examples[i].tokens) for batch in pack(examples, 64)[:2] for i in batch)
    online = Features(chat, examples, pack(examples, 64), ("final",), 0)
    assert (online.stored, online.bytes) == (0, 0)
    for b in range(len(fresh.batches)):
        assert all(torch.equal(x, y) for x, y in zip(fresh.of(b), online.of(b), strict=True))
    assert list((cache_home() / "features").iterdir()) == [fresh.paths[0].parent]


def test_runs_on_the_same_examples_share_the_features_of_each_tap(chat, data, monkeypatch):
    examples = load_examples([data], chat, 40)
    batches = pack(examples, 64)
    Features(chat, examples, batches, ("final",), 2**30).fill(lambda n: None)
    both = Features(chat, examples, batches, ("input of block 1", "final"), 2**30)
    read, asked = both._compute, []
    monkeypatch.setattr(both, "_compute", lambda batch, taps: asked.append(taps) or read(batch, taps))
    both.fill(lambda n: None)
    assert asked == [("input of block 1",)] * len(batches)
    online = Features(chat, examples, batches, ("input of block 1", "final"), 0)
    for b in range(len(batches)):
        assert all(torch.equal(x, y) for x, y in zip(both.of(b), online.of(b), strict=True))


def test_a_run_whose_features_are_there_waits_for_no_other_run(features):
    """It waited, without a word, until a run that wrote other taps of the same data was done."""
    features.fill(lambda n: None)
    told = []
    with filling_beside_another(features, told.append) as filling:
        filling.join(60)
        assert told == [sum(len(example.tokens) for example in features.examples)]


def test_a_run_that_waits_for_another_says_so(features, capsys):
    with filling_beside_another(features) as filling:
        said, until = "", monotonic() + 60
        while "another run reads features of this data: waiting" not in said:
            assert filling.is_alive()
            assert monotonic() < until
            said += capsys.readouterr().err
            sleep(0.01)
    filling.join(60)
    assert features.paths[0].stat().st_size == features.bytes


def test_the_same_weights_under_another_rope_have_features_of_their_own(chat, features):
    """A fingerprint knows weights alone. A model that was moved has the same features."""
    moved, scaled = deepcopy(chat.model), deepcopy(chat.model)
    moved.config._name_or_path = "elsewhere"
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    keys = [
        Features(HFTarget(model, None, "other"), features.examples, features.batches, ("final",), 2**30).key
        for model in (moved, scaled)
    ]
    assert keys[0] == features.key != keys[1]


@pytest.mark.parametrize("tuned_part", ["norm.weight", "embed_tokens.weight"])
def test_a_model_that_was_tuned_has_features_of_its_own(chat, features, tuned_part):
    """The signs of weights stay, or all of their first values, and the states of the model before were
    learnt."""
    tuned = deepcopy(chat.model)
    with torch.no_grad():
        tuned.model.get_parameter(tuned_part)[-1:].mul_(1.5)
    other = HFTarget(tuned, chat.text.tokenizer, chat.name)
    assert other.fingerprint == chat.fingerprint
    theirs = Features(other, features.examples, features.batches, ("final",), 2**30)
    assert theirs.key != features.key


def test_a_run_goes_on_without_a_cache_that_was_cleaned(features):
    features.fill(lambda n: None)
    want = features.of(0)
    features.paths[0].unlink()
    assert all(map(torch.equal, features.of(0), want))


def test_a_run_of_other_batches_goes_on_in_a_file_that_is_read(chat, features):
    """It cut the file at the end of a batch of its own, which the other still read."""
    tokens, token = features._starts[3], chat.dtype.itemsize * chat.width
    some = Features(chat, features.examples, features.batches, ("final",), tokens * token)
    some.fill(lambda n: None)
    other = Features(chat, features.examples, pack(features.examples, 150), ("final",), 2**30)
    assert tokens not in other._starts
    sizes = []
    other.fill(lambda n: sizes.append(other.paths[0].stat().st_size))
    assert min(sizes) == tokens * token
    online = Features(chat, features.examples, other.batches, ("final",), 0)
    for b in range(len(other.batches)):
        for mine, theirs in zip(other.of(b), online.of(b), strict=True):
            torch.testing.assert_close(mine, theirs)
