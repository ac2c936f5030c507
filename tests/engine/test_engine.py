"""Engine: what a text says does not depend on when it joined, beside whom, or in which row it stands."""

import random
from functools import cache

import pytest
import torch

import tiny
from slipstream.core import kv_cache as caches
from slipstream.core.sampling import Sampling
from slipstream.core.tree_spec import PLAIN, TreeSpec
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine import engine as engines
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request

NEW = 14
PROMPTS = tiny.prompts(7, 13, 5, 17, 9, 11, 6)
SAMPLING = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.2),
    Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=2**40 + 7, row=5),
]
ROWS = [SAMPLING[i % len(SAMPLING)] for i in range(len(PROMPTS))]
KINDS = {"T=0": [Sampling()] * len(PROMPTS), "T=1": [SAMPLING[1]] * len(PROMPTS), "mixed": ROWS}
FAMILY = "qwen2"  # sliding windows shorter than the prompts
pytestmark = pytest.mark.usefixtures("unchecked")  # shapes and types are checked by the exactness suite


@cache
def plain(kind: str) -> tiny.Texts:
    """Every text alone, one token a pass."""
    answers = []
    for prompt, sampling in zip(PROMPTS, KINDS[kind], strict=True):
        engine, request = Engine(tiny.target(FAMILY), Vanilla()), Request(prompt, sampling)
        engine.admit(request)
        for _ in range(NEW):
            engine.step()
        answers.append(request.tokens)
    return answers


def drafter_of(name: str, kind: str):
    target = tiny.target(FAMILY)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain(kind), strict=True)]
    return tiny.DRAFTERS[name](target, texts)


def play(engine: Engine, kind: str, seed: int, step=Engine.decode, bare=frozenset()) -> None:
    """Requests join when there is room, some early and some late, and leave at any length; each text must be
    the beginning of plain decoding's. Some prompts are read between steps. `bare` texts get no guesses."""
    chance, joined_late, left_early = random.Random(seed), 0, 0
    each = enumerate(zip(PROMPTS, KINDS[kind], strict=True))
    requests = [Request(prompt, sampling, plain=i in bare) for i, (prompt, sampling) in each]
    waiting, ends = requests[:], [chance.randint(2, NEW) for _ in PROMPTS]
    while waiting or engine.running or engine.prefill:
        free = 0 if engine.prefill else engine.rows - len(engine.running)
        if engine.prefill and (not engine.running or chance.random() < 0.5):
            updated = engine.read()
        elif waiting and free and (not engine.running or chance.random() < 0.5):
            some = [waiting.pop(0) for _ in range(chance.randint(1, min(free, len(waiting))))]
            joined_late += bool(engine.running)
            if chance.random() < 0.5:
                engine.begin(*some)
                continue
            updated = engine.admit(*some)
            assert updated == some
        else:
            updated = step(engine)
            assert engine.span.tokens.shape[0] == len(engine.running)  # idle rows are in no pass
            assert engine.cache.read(0)[0].shape[0] == len(engine.running)
        for request in updated:
            assert request.finite
            assert not (request.drafted and request.plain)
        done = [request for request in engine.running if len(request.tokens) >= ends[request.number]]
        left_early += bool(done and len(done) < len(engine.running))
        engine.cancel(*done)
        engine.free()
        assert engine.cache.texts.tolist() == engine.numbers
        assert engine.cache.lengths.tolist() == engine.lengths
    assert joined_late
    assert left_early
    assert [request.number for request in requests] == list(range(len(PROMPTS)))
    for request, answer in zip(requests, plain(kind), strict=True):
        assert request.tokens[: NEW + 1] == answer[: len(request.tokens)]


@pytest.mark.parametrize(("kind", "seed"), [("T=0", 0), ("T=1", 1), ("mixed", 0), ("mixed", 1)])
@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_what_steps_by_itself_says_the_same(name, kind, seed):
    """`step` admits, reads, decodes and frees rows by itself, while requests come and are cancelled."""
    chance, engine = random.Random(seed), Engine(tiny.target(FAMILY), drafter_of(name, kind), rows=3)
    each = zip(PROMPTS, KINDS[kind], strict=True)
    requests = [Request(prompt, sampling, chance.randint(2, NEW)) for prompt, sampling in each]
    late, gone = requests[3:], requests[4]
    engine.add(*requests[:3])
    while engine.busy or late:
        updated = engine.step()
        assert all(request.fresh for request in updated)
        if late and chance.random() < 0.3:
            engine.add(late.pop(0))
        if gone.tokens or chance.random() < 0.1:
            engine.cancel(gone)
    for request, answer in zip(requests, plain(kind), strict=True):
        assert request is gone or request.finish == "length"
        assert request.tokens == answer[: len(request.tokens)]
    engine.free()
    assert engine.running == []


@pytest.mark.parametrize(("kind", "seed"), [("T=0", 0), ("T=1", 1), ("mixed", 0), ("mixed", 1)])
@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_a_text_does_not_depend_on_the_others(name, kind, seed, monkeypatch):
    """A state, a history, a cache row or a noise key that goes to another text when one joins or leaves."""
    monkeypatch.setattr(engines, "CHUNK", 5)
    play(Engine(tiny.target(FAMILY), drafter_of(name, kind), rows=3), kind, seed)


@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_a_text_without_guesses_stands_beside_others_with_some(name):
    """Guesses in the wrong row after one has left; a drafter that loses track of a text it does not draft."""
    drafted = set()

    def step(engine):
        updated = engine.decode()
        drafted.update(request.number for request in updated if request.drafted)
        return updated

    engine = Engine(tiny.target(FAMILY), drafter_of(name, "mixed"), rows=3)
    play(engine, "mixed", 2, step, bare={1, 2, 5})
    assert bool(drafted) == (name != "vanilla")


@pytest.mark.parametrize("name", ["ngram", "lookahead", "eagle", "glide", "draft model", "bita", "hybrid"])
def test_storages_grow_in_the_middle_of_texts(name, monkeypatch):
    """A cache, or a text table, that a longer text outgrows while others stand beside it."""
    monkeypatch.setattr(caches, "BLOCK", 4)
    monkeypatch.setattr("slipstream.core.drafter.BLOCK", 4)
    engine, sizes = Engine(tiny.target(FAMILY), drafter_of(name, "mixed"), rows=3), set()

    def step(engine):
        sizes.add(engine.cache.storage.capacity)
        return engine.decode()

    play(engine, "mixed", 0, step)
    assert len(sizes) > 2


@pytest.mark.parametrize("name", ["eagle", "fasteagle", "glide, two layers, noise", "draft model", "bita"])
def test_no_storage_is_copied_when_a_text_joins_or_leaves(name):
    """A cache that is cut or glued whenever one text ends: the time of a whole pass."""
    engine, places = Engine(tiny.target(FAMILY), drafter_of(name, "mixed"), rows=3, capacity=64), set()

    def step(engine):
        kept = [cache.storage.stored for cache in (engine.cache, *engine.state.caches)]
        places.add(tuple(stored[0].data_ptr() for stored in kept if stored))
        return engine.decode()

    play(engine, "mixed", 1, step)
    assert len(places) == 1


TREES = ["[[0],[1],[0,0]]", "chain-3", "full-2x2", "[[0]]"]
GROWN = [*TREES, "dynamic-3x4x14", "best-first-3x10", "beam-2x3", "cape-3x9"]


@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_every_step_may_grow_another_tree(name):
    """A depth, hosts or laws that stay those of the default tree; scratch that overwrites the text; a round
    without guesses that leaves a stale state behind."""
    drafter = drafter_of(name, "mixed")
    law = drafter.law if drafter.law == "coupled" else "sampled"
    specs = [None, PLAIN, *map(TreeSpec.parse, TREES if law == "sampled" else GROWN)]
    chance, drafted = random.Random(0), set()

    def step(engine):
        spec = chance.choice(specs)
        updated = engine.decode(spec=spec)
        if spec is PLAIN:
            assert engine.span.tree.nodes == 1
        elif spec is not None and isinstance(drafter, Proposer):
            assert engine.span.tree.nodes <= spec.nodes
            assert engine.span.tree.depth <= spec.depth
        drafted.add(engine.span.tree.nodes)
        return updated

    for capacity in (0, 40):
        engine = Engine(tiny.target(FAMILY), drafter, rows=3, capacity=capacity, specs=specs[1:])
        play(engine, "mixed", 0, step)
    assert len(drafted) > 1


def test_room_for_the_largest_tree_is_made_at_once():
    """A storage that grows, and so is copied, in the middle of a text because a tree is larger than the
    drafter's own."""
    target, specs = tiny.target(FAMILY), [TreeSpec.parse("best-first-4x60"), TreeSpec.parse("chain-2")]
    for drafter in (tiny.eagle(target), tiny.glide(target, "chain-1"), tiny.draft_model(target, "chain-1")):
        engine = Engine(target, drafter, capacity=len(PROMPTS[0]) + NEW, specs=specs)
        engine.admit(Request(PROMPTS[0], ROWS[0]))
        held = [cache.storage.stored[0].data_ptr() for cache in (engine.cache, *engine.state.caches)]
        while engine.lengths[0] < len(PROMPTS[0]) + NEW:
            engine.step(spec=specs[0])
        assert [cache.storage.stored[0].data_ptr() for cache in (engine.cache, *engine.state.caches)] == held


def test_a_tree_that_cannot_be_grown_is_refused():
    """A tree that a drafter was not made with came past the checks of its own."""
    target = tiny.target(FAMILY)
    for drafter, tree, message in (
        (tiny.fasteagle(target), "chain-4", "is 4 deep and this drafter drafts 3 tokens"),
        (
            tiny.eagle(target, "chain-2", "sampled"),
            "dynamic-3x4x14",
            "drops some of a node's sampled children",
        ),
        (tiny.eagle(target, "chain-2", vocab=5), "backbone-2x6", "asks for 6 children a node"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(target, drafter, specs=[TreeSpec.parse(tree)])
        engine = Engine(target, drafter)
        engine.admit(Request(PROMPTS[0], ROWS[0]))
        with pytest.raises(ValueError, match=message):
            engine.step(spec=TreeSpec.parse(tree))


def test_no_text_waits_longer_than_a_chunk(monkeypatch):
    """A long prompt that is read to its end, or chunks of several that are read as if each stood alone."""
    monkeypatch.setattr(engines, "CHUNK", 8)
    engine = Engine(tiny.target(FAMILY), Vanilla(), rows=3)
    engine.admit(Request(PROMPTS[0], ROWS[0]))
    engine.begin(*map(Request, PROMPTS[2:4], ROWS[2:4]))
    with pytest.raises(ValueError, match="read to their end"):
        engine.begin(Request(PROMPTS[4], ROWS[4]))
    before, chunks = max(engine.prefill.cache.lengths.tolist()), 0
    new, joined = engine.prefill, engine.read()
    while not joined:
        assert len(engine.decode()) == 1
        assert max(new.cache.lengths.tolist()) - before <= 8 // 2
        before, chunks, joined = max(new.cache.lengths.tolist()), chunks + 1, engine.read()
    assert chunks == len(PROMPTS[3]) // 4
    assert [request.number for request in joined] == [1, 2]


def test_requests_that_leave_while_their_prompts_are_read_are_read_no_further(monkeypatch):
    """A row that a client left is taken until a long prompt is read; or no step is due, and none is made."""
    monkeypatch.setattr(engines, "CHUNK", 4)
    engine, gone = Engine(tiny.target(FAMILY), Vanilla(), rows=2), Request(PROMPTS[3])
    first, other = Request(PROMPTS[0]), Request(PROMPTS[1], limit=4)
    engine.admit(first)
    engine.add(gone)
    engine.step()
    assert engine.prefill is not None
    engine.cancel(first, gone)
    engine.add(other)
    while engine.busy:
        engine.step()
    assert not gone.tokens
    assert other.tokens == plain("T=0")[1][:4]


def test_rows_that_are_free_are_counted():
    engine = Engine(tiny.target(FAMILY), Vanilla(), rows=2)
    engine.admit(*map(Request, PROMPTS[:2]))
    with pytest.raises(
        ValueError, match="1 texts cannot join 2: this engine has 2 rows; cancel others first"
    ):
        engine.admit(Request(PROMPTS[2]))
    engine.cancel(engine.running[0])
    engine.free()
    assert [request.number for request in engine.admit(Request(PROMPTS[2]))] == [2]
    assert engine.numbers == [1, 2]


def test_a_limit_is_the_depth_of_the_guesses():
    """A policy that drafts less in one round than in another."""
    engine, request = Engine(tiny.target(FAMILY), drafter_of("oracle", "T=0")), Request(PROMPTS[0])
    engine.admit(request)
    for limit in (0, 1, 2, 0, 3):
        engine.step(limit)
        assert request.drafted <= limit
    assert request.tokens == plain("T=0")[0][: len(request.tokens)]
    assert torch.equal(engine.cache.lengths, torch.tensor([len(PROMPTS[0]) + len(request.tokens) - 1]))
