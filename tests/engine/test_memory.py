"""Memory of keys and values: what is predicted is what a engine allocates."""

from itertools import cycle

import pytest

import tiny
from slipstream import generate
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.engine import Engine
from slipstream.engine.memory import GIB, memory
from slipstream.engine.request import Request

PROMPTS = tiny.prompts(7, 13)
NAMES = ["vanilla", "ngram", "eagle", "fasteagle", "medusa", "glide", "draft model", "bita", "auto"]


def under_way(name):
    """A target, a drafter, and an engine of two texts of at most 50 tokens."""
    target = tiny.target("llama")
    drafter = Vanilla() if name == "vanilla" else tiny.DRAFTERS[name](target, PROMPTS)
    engine = Engine(target, drafter, rows=2, capacity=50, specs=drafter.candidate_trees)
    engine.admit(*map(Request, PROMPTS))
    return target, drafter, engine


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_an_engine_allocates(name):
    """A cache that is not counted: a draft model's own, a copy of the target's, what only probes read."""
    target, drafter, engine = under_way(name)
    engine.step(spec=drafter.candidate_trees[-1] if drafter.candidate_trees else None)
    found = memory(target, drafter, 50)
    held = [sum(x.nbytes for x in cache.storage.stored) for cache in (engine.cache, *engine.state.caches)]
    assert (2 * found.target, 2 * found.drafter) == (held[0], sum(held[1:]))
    assert found.batch(2.5 * found.text / GIB) == 2


@pytest.mark.parametrize("name", NAMES)
def test_no_round_outgrows_it(name):
    """A cache that grows is copied as a whole, in the middle of an answer."""
    _, drafter, engine = under_way(name)
    caches, specs = (engine.cache, *engine.state.caches), cycle(drafter.candidate_trees or [None])
    held = [cache.storage.capacity for cache in caches]
    while max(engine.lengths) < 50:
        engine.step(49 - max(engine.lengths), next(specs))
    assert [cache.storage.capacity for cache in caches] == held


def test_draft_steps_take_no_slots_of_the_targets_cache():
    """Fewer texts fitted: `auto` kept room for them there, and twice for matches."""
    target = tiny.target("llama")
    auto = tiny.DRAFTERS["auto"](target, PROMPTS)
    rows = max(rung.nodes for rung in auto.candidate_trees)
    plain, drafted = (memory(target, drafter, 50).target for drafter in (Vanilla(), auto))
    assert drafted * (50 + 1 + 1) == plain * (50 + rows + 1)


def test_generate_takes_as_many_texts_at_once_as_fit(monkeypatch):
    target, rows = tiny.target("llama"), []
    init = Engine.__init__

    def spied(self, *args, **how):
        init(self, *args, **how)
        rows.append(self.rows)

    monkeypatch.setattr(Engine, "__init__", spied)
    prompts = tiny.prompts(5, 9, 7, 12, 6)
    room = memory(target, Vanilla(), 12 + 8)
    rows.clear()
    made = generate(target, prompts, Vanilla(), max_new_tokens=8, memory=3.2 * room.text / GIB)
    assert rows[-1] == 3
    plain = generate(target, prompts, Vanilla(), max_new_tokens=8, batch=1)
    assert [each.tokens for each in made] == [each.tokens for each in plain]
    with pytest.raises(ValueError, match="give at least"):
        generate(target, prompts, Vanilla(), max_new_tokens=8, memory=0.5 * room.text / GIB)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"memory is .* GiB"):
            generate(target, prompts, Vanilla(), memory=wrong)
