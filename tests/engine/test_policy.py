"""What a policy chooses, given what rounds cost and what they bring."""

import random

import pytest

from slipstream.core.tree_spec import PLAIN, TreeSpec
from slipstream.engine.policy import (
    DOUBTED,
    FADES_UNUSED,
    NO_GUESSES,
    RESTS,
    Accepted,
    Policy,
    TreeStatistics,
)

MATCH = TreeSpec("matches-3", (), 3, 4, 0, 0)
SMALL, LARGE = TreeSpec.parse("best-first-2x4"), TreeSpec.parse("best-first-3x16")
TREES = (PLAIN, MATCH, SMALL, LARGE)
COSTS = [20.0, 22.0, 26.0, 30.0]


def decode(policy, tokens, rounds, buckets=lambda i: 0, seconds=lambda spec: COSTS[TREES.index(spec)]):
    """Rounds of one text, whose accepted tokens are `tokens(spec)`. Returns the trees that were chosen."""
    chosen = []
    for i in range(rounds):
        spec = policy.choose([0], [buckets(i)])
        drafts = spec.depth and (spec.children or buckets(i))
        policy.learn([1 + (tokens(spec) if drafts else 0)], seconds(spec), [bool(drafts)])
        chosen.append(spec)
    return chosen


@pytest.fixture
def policy():
    return Policy(TreeStatistics(TREES, {1: list(COSTS)}))


def test_a_text_that_is_drafted_badly_is_decoded_plainly_within_16_tokens(policy):
    chosen = decode(policy, lambda spec: 0, 400)
    assert PLAIN in chosen[:16]
    assert chosen[16:].count(PLAIN) >= 0.93 * len(chosen[16:])
    assert chosen[100:].count(PLAIN) < 300, "it is never tried again"


@pytest.mark.parametrize("likely", [0.0, 0.05, 0.2])
def test_tries_cost_next_to_nothing_where_rows_are_dear(likely):
    """With AVX2 eight rows take nearly twice as long as one, so that little is left to gain. Texts of 96
    tokens, one after the other."""
    trees = (PLAIN, MATCH, TreeSpec.parse("best-first-1x2"), TreeSpec.parse("best-first-3x8"))
    costs, seconds, tokens, draws = [10.0, 13.5, 12.0, 19.0], 0.0, 0, random.Random(0)
    statistics = TreeStatistics(trees, {1: list(costs)})
    for text in range(40):
        policy, left = Policy(statistics), 96
        while left > 0:
            rests = policy.rests([text])
            spec = PLAIN if rests else policy.choose([text], [0])
            accepted = next(n for n in range(9) if n == spec.depth or draws.random() >= likely)
            took = costs[trees.index(spec)] * draws.gauss(1, 0.03)
            if not rests:
                policy.learn([1 + accepted], took, [spec.depth > 0])
            seconds, tokens, left = seconds + took, tokens + 1 + accepted, left - 1 - accepted
    assert tokens * costs[0] > 0.985 * seconds


def test_it_comes_back_where_drafts_are_accepted_again(policy):
    """Evidence that never fades would keep a text plain after one bad paragraph."""
    decode(policy, lambda spec: 0, 60)
    chosen = decode(policy, lambda spec: min(2, spec.depth), 400)
    assert chosen[-50:].count(PLAIN) == 0


def test_the_tree_is_that_with_most_tokens_a_second(policy):
    """Large trees bring more and cost more."""
    brings = {PLAIN: 0, MATCH: 0, SMALL: 0.9, LARGE: 1.0}
    draws = random.Random(0)
    chosen = decode(policy, lambda spec: int(draws.random() < brings[spec]), 600)
    assert chosen[-200:].count(SMALL) > 150
    brings[LARGE] = 1.6
    more = decode(policy, lambda spec: int(brings[spec]) + (draws.random() < brings[spec] % 1), 2000)
    assert more[-200:].count(LARGE) > 150


def test_a_match_is_read_where_there_is_one(policy):
    chosen = decode(policy, lambda spec: 3 if spec is MATCH else 0, 300, buckets=lambda i: 2 * (i % 4 == 0))
    with_match, without = chosen[200::4], [spec for i, spec in enumerate(chosen[200:]) if i % 4]
    assert set(with_match) == {MATCH}
    assert without.count(MATCH) <= 2  # of 75: it may be tried again


def test_a_text_that_repeats_nothing_may_still_be_drafted_by_a_head(policy):
    """Matches that failed had spoken for the head, which then was not tried."""
    brings = {PLAIN: 0, MATCH: 0, SMALL: 1, LARGE: 2}
    chosen = decode(policy, lambda spec: 0, 30)
    policy._evidence = {key: seen for key, seen in policy._evidence.items() if key[1] != "head"}
    chosen = decode(policy, brings.get, 100)
    assert chosen[-50:].count(LARGE) > 45


def test_costs_follow_the_rounds(policy):
    """A tree that was measured too cheap, in a quiet second or behind a short text."""
    slow = {PLAIN: 20.0, MATCH: 22.0, SMALL: 70.0, LARGE: 80.0}
    chosen = decode(policy, lambda spec: 1, 300, seconds=slow.get)
    assert chosen[-50:].count(PLAIN) > 45


@pytest.mark.parametrize(
    "brings", [{PLAIN: 0, MATCH: 0, SMALL: 0, LARGE: 0}, {PLAIN: 0, MATCH: 0, SMALL: 1, LARGE: 2}]
)
def test_a_longer_text_makes_every_round_dearer(policy, brings):
    """Grown trees get dearer, and then all trees with plain decoding: what nobody grew looks too dear."""
    longer = [1.6 * cost for cost in COSTS]
    decode(policy, brings.get, 30)
    decode(policy, brings.get, 150, seconds=lambda spec: longer[TREES.index(spec)])
    assert policy.statistics.costs(1) == pytest.approx(longer, rel=0.15)


def test_a_disturbed_round_says_little_of_what_rounds_cost(policy):
    """One stop of a second, after which a tree is not grown for long."""
    decode(policy, lambda spec: 2, 30)
    before = policy.statistics.costs(1)[:]
    decode(policy, lambda spec: 2, 1, seconds=lambda spec: 50 * COSTS[-1])
    assert policy.statistics.costs(1) == pytest.approx(before, rel=0.05)


def test_what_many_rounds_told_outlives_rounds_of_others():
    """A mean that faded to the worth of a guess: a few unlucky rounds then kept the best tree from use."""
    known = Accepted(0.5)
    for _ in range(100):
        known.add(1, 1.0)
    for _ in range(5000):
        known.fade(FADES_UNUSED)
    for _ in range(3):
        known.add(0, 1.0)
    assert known.mean > 0.85


def test_a_tree_that_nobody_grew_is_known_from_its_like():
    """Rounds of a small tree that say nothing of a large one, or everything about matches."""
    statistics = TreeStatistics(TREES, {1: list(COSTS)})
    large, match = (statistics.average(TREES.index(spec), 0).mean for spec in (LARGE, MATCH))
    for _ in range(40):
        statistics.add(TREES.index(SMALL), 0, 2, 1.0)
    small = statistics.average(TREES.index(SMALL), 0).mean
    assert small > 1.8
    assert statistics.average(TREES.index(LARGE), 0).mean > max(small, 1.5 * large)
    assert statistics.average(TREES.index(MATCH), 0).mean == match
    for _ in range(200):
        statistics.add(TREES.index(LARGE), 0, 1, 1.0)
    assert statistics.average(TREES.index(LARGE), 0).mean == pytest.approx(1, abs=0.1)
    statistics.add(TREES.index(SMALL), 0, 0, 1.0)
    assert statistics.average(TREES.index(LARGE), 0).mean == pytest.approx(1, abs=0.1)


def test_one_bad_text_does_not_spoil_the_average():
    """What was accepted of it counts by how bad it is, or the next text would be decoded plainly."""
    statistics = TreeStatistics(TREES, {1: list(COSTS)})
    decode(Policy(statistics), lambda spec: 1, 200)
    before = statistics.average(2, 0).mean
    decode(Policy(statistics), lambda spec: 0, 300)
    assert statistics.average(2, 0).mean > 0.6 * before


def test_a_head_that_could_not_guess_yet_is_not_blamed():
    """A round of masks alone counted as a bad draft, after which the head was never tried again."""
    known = TreeStatistics(TREES, {1: list(COSTS)})
    policy = Policy(known)
    for _ in range(20):
        before = known.average(3, 0).mean
        policy.choose([0], [0])
        policy._tree = 3
        policy.learn([1], 21.0, [False])
        assert known.average(3, 0).mean == before
        assert policy._of(0, 0, True).factor == 1
    assert known.seconds[1] == COSTS
    policy._tree = 3
    policy.learn([1], 21.0, [True])
    assert policy._of(0, 0, True).factor < 1
    assert known.seconds[1] != COSTS


CHAINS = (PLAIN, *map(TreeSpec.parse, ("chain-1", "chain-2", "chain-4", "chain-8")))
PASSES = {spec: 40.0 + 20.0 * spec.depth for spec in CHAINS}  # a draft model of half the target's time


def test_a_draft_model_that_never_agrees_is_dropped_at_once():
    """A round of eight passes that nothing comes of is five plain ones."""
    chosen = decode(
        Policy(TreeStatistics(CHAINS, {1: list(PASSES.values())})), lambda spec: 0, 128, seconds=PASSES.get
    )
    assert 0 < max(spec.depth for spec in chosen) <= 2
    assert sum(map(PASSES.get, chosen)) <= 128 * PASSES[PLAIN] / 0.97


def test_a_draft_model_that_is_right_soon_drafts_far():
    """A chain's guess was that of a head's tree, so that none was tried. A longer one promised too little
    beside a shorter one that was right."""
    policy = Policy(TreeStatistics(CHAINS, {1: list(PASSES.values())}))
    chosen = decode(policy, lambda spec: spec.depth, 60, seconds=PASSES.get)
    assert chosen[0].depth
    assert min(spec.depth for spec in chosen[20:]) >= 4


@pytest.mark.parametrize(("trees", "left"), [(CHAINS, DOUBTED), (TREES, 10.0)])
def test_what_few_rounds_told_of_a_chain_fades(trees, left):
    """One text made a draft model look a little too dear, and no text after it was drafted."""
    last = len(trees) - 1
    statistics = TreeStatistics(trees, {1: [20.0, *[200.0] * last]}, {(last, 0): Accepted(0.5, 10.0)})
    policy = Policy(statistics)
    for _ in range(400):
        assert policy.choose([0], [0]) is PLAIN
        policy.learn([1], 20.0, [False])
    assert statistics.average(last, 0).rounds == left


def test_a_draft_model_reads_a_long_prompt_only_if_that_may_pay():
    policy = Policy(TreeStatistics(CHAINS, {1: list(PASSES.values())}))
    assert policy.choose([0], [0], catch_up_cost=100.0).depth
    assert not policy.choose([0], [0], catch_up_cost=1000.0).depth


def test_texts_in_a_batch_decide_together_and_are_forgotten_when_they_leave():
    policy = Policy(TreeStatistics(TREES, {4: list(COSTS)}))
    for _ in range(40):
        spec = policy.choose([0, 1, 2, 3], [0] * 4)
        policy.learn([2, 2, 2, 1] if spec.depth else [1] * 4, 25.0, [bool(spec.depth)] * 4)
    assert policy.choose([0, 1, 2, 3], [0] * 4).depth
    assert {text for text, _ in policy._evidence} == {0, 1, 2, 3}
    policy.choose([1], [0])
    assert {text for text, _ in policy._evidence} == {1}


def test_rounds_rest_where_no_tree_comes_near():
    """Eight texts whose trees cost twice a plain round were weighed in each one, for 2 % of it."""
    dear, cheap = (
        Policy(TreeStatistics(TREES, {2: [20.0, 60.0, 70.0, 90.0]})),
        Policy(TreeStatistics(TREES, {2: COSTS})),
    )
    for policy, rests in ((dear, RESTS), (cheap, 0)):
        spec = policy.choose([0, 1], [0, 0])
        policy.learn([1, 1], 20.0, [bool(spec.depth)] * 2)
        assert [policy.rests([0, 1]) for _ in range(RESTS + 1)] == [True] * rests + [False] * (
            RESTS + 1 - rests
        )
    assert dear.statistics.chosen == {0: 1 + RESTS}
    dear.choose([0, 1], [0, 0])
    assert not dear.rests([0]), "a text left: what pays for two says little of one"


@pytest.mark.parametrize(("texts", "chosen", "rests"), [(4, SMALL, 0), (8, PLAIN, 8)])
def test_many_texts_ask_for_more_of_a_tree(texts, chosen, rests):
    """Eight texts that grow a tree for a promise of 8 %, or choose anew in every fifth round."""
    brings = Accepted(1.0, 1e6)
    statistics = TreeStatistics(TREES, {texts: [20.0, 200.0, 40.0 / 1.08, 200.0]}, {(2, 0): brings})
    policy, all_of_them = Policy(statistics), list(range(texts))
    assert policy.choose(all_of_them, [0] * texts) == chosen
    policy.learn([1] * texts, 20.0, [False] * texts)
    assert [policy.rests(all_of_them) for _ in range(9)] == [True] * rests + [False] * (9 - rests)


def test_what_was_seen_fades_in_rounds_that_rest():
    """A text would be tried again five times as late."""
    left = []
    for rests in (0, RESTS):
        policy = Policy(TreeStatistics(TREES, {1: [20.0, 60.0, 70.0, 90.0]}))
        policy.choose([0], [0])
        policy._of(0, 0, True).promised = 1.0
        policy._rested = rests
        policy.learn([1], 20.0, [False])
        left.append(policy._of(0, 0, True).promised)
    assert left == pytest.approx([FADES_UNUSED, FADES_UNUSED ** (1 + RESTS)])


def test_rests_end_though_a_round_behind_them_taught_nothing():
    """A text whose grammar forced tokens in the round behind rests was decoded plainly to its end. `learn` is
    not called for such a round, so the rests of before stayed counted."""
    policy = Policy(TreeStatistics(TREES, {1: [20.0, 60.0, 70.0, 90.0]}))
    policy.choose([0], [0])
    policy.learn([1], 20.0, [False])
    assert [policy.rests([0]) for _ in range(RESTS)] == [True] * RESTS
    policy.statistics.seconds[1] = [20.0, 20.0, 20.0, 20.0]
    assert policy.choose([0], [0]).depth
    assert not policy.rests([0])


def test_a_text_without_guesses_is_no_evidence_against_them():
    """It brings one token whatever the tree, which says nothing of what the others' guesses are worth."""
    policy = Policy(TreeStatistics(TREES, {2: list(COSTS)}))
    for _ in range(40):
        spec = policy.choose([0, 1], [0, NO_GUESSES])
        policy.learn([3 if spec.depth else 1, 1], 21.0, [bool(spec.depth), False])
    seen = {
        text: [each.factor for (other, _), each in policy._evidence.items() if other == text]
        for text in (0, 1)
    }
    assert max(seen[0]) > 1
    assert set(seen[1]) == {1}
    assert {bucket for _, bucket in policy.statistics.accepted} == {0}
    assert not policy.choose([0, 1], [NO_GUESSES, NO_GUESSES]).depth
