"""Session: what a text says does not depend on when it joined, beside whom, or in which row it stands."""

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
from slipstream.engine import session as sessions
from slipstream.engine.session import Session

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
pytestmark = pytest.mark.usefixtures("unchecked")  # specs and types are checked by the exactness suite


@cache
def plain(kind: str) -> tiny.Texts:
    """Every text alone, one token a pass."""
    answers = []
    for prompt, sampling in zip(PROMPTS, KINDS[kind], strict=True):
        session = Session(tiny.target(FAMILY), Vanilla())
        [first] = session.admit([prompt], [sampling])
        answers.append(first.tokens + [session.step()[0].tokens[0] for _ in range(NEW)])
    return answers


def drafter_of(name: str, kind: str):
    target = tiny.target(FAMILY)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain(kind), strict=True)]
    return tiny.DRAFTERS[name](target, texts)


def play(session: Session, kind: str, seed: int, step=Session.step, bare=frozenset()) -> None:
    """Texts join when there is room, some early and some late, and leave at any length; each must be the
    beginning of plain decoding's. Some prompts are read between rounds. `bare` texts get no guesses."""
    chance, waiting = random.Random(seed), list(range(len(PROMPTS)))
    answers: dict[int, list[int]] = {}
    ends = [chance.randint(2, NEW) for _ in PROMPTS]
    joined_late = left_early = 0
    while waiting or session.texts or session.reading:
        free = 0 if session.reading else session.rows - len(session.texts)
        if session.reading and (not session.texts or chance.random() < 0.5):
            news = session.read()
        elif waiting and free and (not session.texts or chance.random() < 0.5):
            some = [waiting.pop(0) for _ in range(chance.randint(1, min(free, len(waiting))))]
            joined_late += bool(session.texts)
            joining = [PROMPTS[i] for i in some], [KINDS[kind][i] for i in some], [i in bare for i in some]
            if chance.random() < 0.5:
                session.begin(*joining)
                continue
            news = session.admit(*joining)
            assert [each.text for each in news] == some
        else:
            news = step(session)
            assert session.span.tokens.shape[0] == len(session.texts)  # idle rows are in no pass
            assert session.cache.read(0)[0].shape[0] == len(session.texts)
        for each in news:
            assert each.finite
            assert not (each.drafted and each.text in bare)
            answers.setdefault(each.text, []).extend(each.tokens)
        done = [text for text in session.texts if len(answers[text]) >= ends[text]]
        left_early += bool(done and len(done) < len(session.texts))
        session.retire(done)
        assert session.cache.texts.tolist() == session.texts
        assert session.cache.lengths.tolist() == session.lengths
    assert joined_late
    assert left_early
    for text, answer in answers.items():
        assert answer[: NEW + 1] == plain(kind)[text][: len(answer)]


@pytest.mark.parametrize(("kind", "seed"), [("T=0", 0), ("T=1", 1), ("mixed", 0), ("mixed", 1)])
@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_a_text_does_not_depend_on_the_others(name, kind, seed, monkeypatch):
    """A state, a history, a cache row or a noise key that goes to another text when one joins or leaves."""
    monkeypatch.setattr(sessions, "CHUNK", 5)
    play(Session(tiny.target(FAMILY), drafter_of(name, kind), rows=3), kind, seed)


@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_a_text_without_guesses_stands_beside_others_with_some(name):
    """Guesses in the wrong row after one has left; a drafter that loses track of a text it does not draft."""
    drafted = set()

    def step(session):
        news = session.step()
        drafted.update(each.text for each in news if each.drafted)
        return news

    session = Session(tiny.target(FAMILY), drafter_of(name, "mixed"), rows=3)
    play(session, "mixed", 2, step, bare={1, 2, 5})
    assert bool(drafted) == (name != "vanilla")


@pytest.mark.parametrize("name", ["ngram", "lookahead", "eagle", "glide", "draft model", "bita", "hybrid"])
def test_storages_grow_in_the_middle_of_texts(name, monkeypatch):
    """A cache, or a text table, that a longer text outgrows while others stand beside it."""
    monkeypatch.setattr(caches, "BLOCK", 4)
    monkeypatch.setattr("slipstream.core.drafter.BLOCK", 4)
    session, sizes = Session(tiny.target(FAMILY), drafter_of(name, "mixed"), rows=3), set()

    def step(session):
        sizes.add(session.cache.storage.capacity)
        return session.step()

    play(session, "mixed", 0, step)
    assert len(sizes) > 2


@pytest.mark.parametrize("name", ["eagle", "fasteagle", "glide, two layers, noise", "draft model", "bita"])
def test_no_storage_is_copied_when_a_text_joins_or_leaves(name):
    """A cache that is cut or glued whenever one text ends: the time of a whole pass."""
    session, places = Session(tiny.target(FAMILY), drafter_of(name, "mixed"), rows=3, capacity=64), set()

    def step(session):
        kept = [cache.storage.stored for cache in (session.cache, *session.state.caches)]
        places.add(tuple(stored[0].data_ptr() for stored in kept if stored))
        return session.step()

    play(session, "mixed", 1, step)
    assert len(places) == 1


TREES = ["[[0],[1],[0,0]]", "chain-3", "full-2x2", "[[0]]"]
GROWN = [*TREES, "dynamic-3x4x14", "best-first-3x10", "beam-2x3", "cape-3x9"]


@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_every_round_may_grow_another_tree(name):
    """A depth, hosts or laws that stay those of the default tree; scratch that overwrites the text; a round
    without guesses that leaves a stale state behind."""
    drafter = drafter_of(name, "mixed")
    law = drafter.law if drafter.law == "coupled" else "sampled"
    specs = [None, PLAIN, *map(TreeSpec.parse, TREES if law == "sampled" else GROWN)]
    chance, drafted = random.Random(0), set()

    def step(session):
        spec = chance.choice(specs)
        news = session.step(spec=spec)
        if spec is PLAIN:
            assert session.span.tree.nodes == 1
        elif spec is not None and isinstance(drafter, Proposer):
            assert session.span.tree.nodes <= spec.nodes
            assert session.span.tree.depth <= spec.depth
        drafted.add(session.span.tree.nodes)
        return news

    for capacity in (0, 40):
        session = Session(tiny.target(FAMILY), drafter, rows=3, capacity=capacity, specs=specs[1:])
        play(session, "mixed", 0, step)
    assert len(drafted) > 1


def test_room_for_the_largest_tree_is_made_at_once():
    """A storage that grows, and so is copied, in the middle of a text because a tree is larger than the
    drafter's own."""
    target, specs = tiny.target(FAMILY), [TreeSpec.parse("best-first-4x60"), TreeSpec.parse("chain-2")]
    for drafter in (tiny.eagle(target), tiny.glide(target, "chain-1"), tiny.draft_model(target, "chain-1")):
        session = Session(target, drafter, capacity=len(PROMPTS[0]) + NEW, specs=specs)
        session.admit(PROMPTS[:1], ROWS[:1])
        held = [cache.storage.stored[0].data_ptr() for cache in (session.cache, *session.state.caches)]
        while session.lengths[0] < len(PROMPTS[0]) + NEW:
            session.step(spec=specs[0])
        assert [
            cache.storage.stored[0].data_ptr() for cache in (session.cache, *session.state.caches)
        ] == held


def test_a_tree_that_cannot_be_grown_is_refused():
    """A spec that a drafter was not made with came past the checks of its own."""
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
            Session(target, drafter, specs=[TreeSpec.parse(tree)])
        session = Session(target, drafter)
        session.admit(PROMPTS[:1], ROWS[:1])
        with pytest.raises(ValueError, match=message):
            session.step(spec=TreeSpec.parse(tree))


def test_no_text_waits_longer_than_a_chunk(monkeypatch):
    """A long prompt that is read to its end, or chunks of several that are read as if each stood alone."""
    monkeypatch.setattr(sessions, "CHUNK", 8)
    session = Session(tiny.target(FAMILY), Vanilla(), rows=3)
    session.admit(PROMPTS[:1], ROWS[:1])
    session.begin(PROMPTS[2:4], ROWS[2:4])
    with pytest.raises(ValueError, match="read to their end"):
        session.begin(PROMPTS[4:5], ROWS[4:5])
    before, chunks = max(session.reading.cache.lengths.tolist()), 0
    new, news = session.reading, session.read()
    while not news:
        assert len(session.step()) == 1
        assert max(new.cache.lengths.tolist()) - before <= 8 // 2
        before, chunks, news = max(new.cache.lengths.tolist()), chunks + 1, session.read()
    assert chunks == len(PROMPTS[3]) // 4
    assert [each.text for each in news] == [1, 2]


def test_rows_that_are_free_are_counted():
    session = Session(tiny.target(FAMILY), Vanilla(), rows=2)
    session.admit(PROMPTS[:2], ROWS[:2])
    with pytest.raises(
        ValueError, match="1 texts cannot join 2: this session has 2 rows; retire others first"
    ):
        session.admit(PROMPTS[2:3], ROWS[2:3])
    session.retire([0])
    assert [each.text for each in session.admit(PROMPTS[2:3], ROWS[2:3])] == [2]
    assert session.texts == [1, 2]


def test_a_limit_is_the_depth_of_the_guesses():
    """A policy that drafts less in one round than in another."""
    answers: list[int] = []
    session = Session(tiny.target(FAMILY), drafter_of("oracle", "T=0"))
    answers += session.admit(PROMPTS[:1], [Sampling()])[0].tokens
    for limit in (0, 1, 2, 0, 3):
        [each] = session.step(limit)
        assert each.drafted <= limit
        answers += each.tokens
    assert answers == plain("T=0")[0][: len(answers)]
    assert torch.equal(session.cache.lengths, torch.tensor([len(PROMPTS[0]) + len(answers) - 1]))
