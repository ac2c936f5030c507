"""NGram against a search in plain lists, and Suffix against counts in them."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings, strategies as st

import tiny
from slipstream.core.kv_cache import BLOCK, KVCache
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.span import Span
from slipstream.core.tree import PAD
from slipstream.drafters import load_drafter, suffix
from slipstream.drafters.store import save_drafter
from slipstream.drafters.suffix import AnswerMemory, NGram, Suffix
from slipstream.engine.engine import Engine
from slipstream.engine.generate import generate
from slipstream.engine.request import Request


def lookup(text, depth, longest, shortest):
    """The continuation of the longest (then latest) earlier occurrence of the text's end; `None` without
    one."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return [text[end + i % (len(text) - end)] for i in range(depth)]
    return None


def span_of(pieces, start):
    """What each row reads in one pass: tokens and the token that follows the last, padded to one width."""
    width = max(len(piece) - 1 for piece in pieces)
    padded = torch.tensor([piece + [99] * (width + 1 - len(piece)) for piece in pieces])
    count = torch.tensor([len(piece) - 1 for piece in pieces])
    return Span(padded[:, :-1], padded[:, 1:], torch.tensor(start), count, KVCache(0, len(pieces)))


def update(drafter, texts, cuts=()):
    """Feed the texts, root last, in pieces cut so many tokens before the end, where a shorter text has not
    begun."""
    state = drafter.start(len(texts), torch.device("cpu"))
    done = [0] * len(texts)
    for cut in sorted({0, *cuts}, reverse=True):
        ends = [max(0, len(text) - 1 - cut) for text in texts]
        if any(ends):
            pieces = [text[at : end + 1] for text, at, end in zip(texts, done, ends, strict=True)]
            drafter.update(span_of(pieces, done), state)
        done = ends
    return state


def propose(drafter, state):
    return drafter.propose(state, Sampler([Sampling()] * len(state.root), [[]] * len(state.root), 100))


texts_of = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=24), min_size=1, max_size=3)
limits = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5)).map(
    lambda x: (x[0], max(x[1:]), min(x[1:]))
)


@settings(max_examples=200, deadline=None)
@given(texts_of, limits, st.sets(st.integers(1, 20), max_size=3))
def test_ngram_equals_a_search_in_plain_lists(texts, limits, cuts):
    """Matches that start before the text or end in another row's padding, an earlier match preferred to a
    later one, a continuation off by one: the drafter would still be lossless, only useless, so no other test
    would tell.
    """
    drafter = NGram(*limits)
    tree = propose(drafter, update(drafter, texts, cuts=cuts))
    found = [lookup(text, *limits) for text in texts]
    assert tree.is_chain
    if not any(found):
        assert tree.tokens.tolist() == [[text[-1]] for text in texts]
        return
    drafts = [draft or [PAD] * limits[0] for draft in found]
    assert tree.tokens.tolist() == [[text[-1], *draft] for text, draft in zip(texts, drafts, strict=True)]
    assert tree.nodes <= drafter.rows
    assert tree.depth == drafter.depth


def test_the_reference_of_ngram_on_plain_cases():
    """Longest before latest, latest among the longest, and text that repeats goes round."""
    assert lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 3, longest=3, shortest=1) == [9, 2, 3]
    assert lookup([1, 2, 7, 1, 2, 8, 1, 2], 2, longest=2, shortest=1) == [8, 1]
    assert lookup([5, 6, 5, 6], 5, longest=2, shortest=2) == [5, 6, 5, 6, 5]
    assert lookup([1, 2, 3], 2, longest=3, shortest=1) is None


def test_rows_come_and_go_with_their_text():
    """A row that takes another's table with it drafts another's words."""
    drafter, texts = NGram(depth=3, longest=3, shortest=1), [[1, 2, 3, 1], [4, 5, 6, 4, 5], [7, 8, 7]]
    state = update(drafter, texts)
    state.select([2, 0, 1])
    expected = [[7, 8, 7, 8], [1, 2, 3, 1], [5, 6, 4, 5]]
    assert propose(drafter, state).tokens.tolist() == expected


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, 3 * BLOCK])
def test_padding_past_the_capacity_leaves_the_last_token_alone(length):
    """A row that fills its table while the span has padded columns beyond: all of them landed on the last
    slot; or a table that does not grow with its text."""
    drafter, cache = NGram(depth=1, longest=1, shortest=1), KVCache(0, 1)
    state = drafter.start(1, torch.device("cpu"))
    text = [1] * (length - 1) + [7, 7, 9]
    tokens, nexts = torch.tensor([[text[:-1]], [text[1:]]])
    cache.flush([length])
    drafter.update(Span(tokens, nexts, torch.tensor([0]), torch.tensor([length]), cache), state)
    assert propose(drafter, state).tokens.tolist() == [[7, 7]]


def test_texts_of_different_blocks_share_a_table():
    drafter, states = NGram(depth=2, longest=1, shortest=1), []
    for text in ([3, 4, 5, 3], [1] * BLOCK + [2, 6, 7, 2]):
        cache = KVCache(0, 1)
        cache.flush([len(text) - 1])
        states.append(drafter.start(1, torch.device("cpu")))
        tokens, nexts = torch.tensor([[text[:-1]], [text[1:]]])
        drafter.update(
            Span(tokens, nexts, torch.tensor([0]), torch.tensor([len(text) - 1]), cache), states[-1]
        )
    states[0].join(states[1])
    assert propose(drafter, states[0]).tokens.tolist() == [[3, 4, 5], [2, 6, 7]]


@pytest.mark.parametrize("limits", [(0, 4, 2), (7, 1, 2), (7, 4, 0)])
def test_limits_that_no_match_can_meet_are_refused(limits):
    depth, longest, shortest = limits
    with pytest.raises(ValueError, match=f"depth={depth}, longest={longest}, shortest={shortest}; it needs"):
        NGram(*limits)


def test_found_by_name_and_misspelt_names_get_a_hint():
    assert isinstance(load_drafter("ngram"), NGram)
    with pytest.raises(ValueError, match="Did you mean 'ngram'"):
        load_drafter("n-gram")


def best(found):
    return sorted(found, key=lambda match: match[:2], reverse=True)[: suffix.MATCHES]


def matches(text, depth, earlier=()):
    """(length, place, continuation, worth) of the best matches in the text, and in one before it."""
    own, last = [], len(text) - 1

    def reach(other, end):
        n = 0
        while n < min(suffix.LONGEST, end + 1, last + 1) and other[end - n] == text[last - n]:
            n += 1
        return n

    for end in range(last):
        goes_on = [text[end + 1 + i % (last - end)] for i in range(depth)]
        own.append((reach(text, end), end, goes_on, 1.0))
    other = [(reach(earlier, end), end, earlier[end + 1 :][:depth], 0.25) for end in range(len(earlier))]
    return [match for match in best(own) + best(other) if match[0]]


def probabilities(text, depth, earlier=()):
    """Of every path that some match goes on with."""
    chances, waiting, known = {}, [()], matches(text, depth, earlier)
    for path in waiting:
        d, came, goes_on = len(path), 0.0, defaultdict(float)
        for length, _, tokens, worth in known:
            if tuple(tokens[:d]) == path:
                weight = worth * (length + d) ** 1.5
                came += weight
                if len(tokens) > d:
                    goes_on[tokens[d]] += weight
        for token, weight in goes_on.items():
            chances[*path, token] = chances.get(path, 1.0) * weight / (came + 4)
            waiting.append((*path, token))
    return chances


def drafted(tree, row):
    """Every path of the row, and its score."""
    tokens, parents = tree.tokens[row].tolist(), tree.parent_slots().expand_as(tree.tokens)[row].tolist()
    paths = [()]
    for slot in range(1, len(tokens)):
        assert parents[slot] < slot
        paths.append((*paths[parents[slot]], tokens[slot]))
    scores = tree.scores[row].exp().tolist()
    return {path: score for path, score in zip(paths, scores, strict=True) if PAD not in path and path}


def check(tree, texts, rows, depth, earlier=()):
    """The tree has the most probable paths of each text, with their probabilities."""
    assert tree.nodes <= rows
    for row, text in enumerate(texts):
        found, want = drafted(tree, row), probabilities(text, depth, earlier)
        assert all(score == pytest.approx(want[path]) for path, score in found.items())
        assert sorted(found.values()) == pytest.approx(sorted(want.values())[-rows + 1 :])


@pytest.mark.parametrize("looks", [True, False])
@settings(max_examples=60, deadline=None)
@given(texts=texts_of, rows=st.integers(2, 12), depth=st.integers(1, 6), cuts=st.sets(st.integers(1, 20)))
def test_equals_counts_in_plain_lists(looks, texts, rows, depth, cuts):
    """A match of another row or of padding, a node under the wrong parent, two nodes for one path, a count
    that misses a match: the text would stay right, only slow."""
    with pytest.MonkeyPatch.context() as patch:
        tiny.replace_is_host(patch, lambda x: looks)
        drafter = Suffix(rows, depth)
        tree = propose(drafter, update(drafter, texts, cuts))
    check(tree, texts, rows, drafter.depth)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=12), texts_of, st.integers(2, 10))
def test_earlier_answers_are_matched_too(earlier, texts, rows):
    """An answer that goes on into the next one, or into the ring's empty slots."""
    drafter = Suffix(rows, 5, remember=1)
    state = update(drafter, texts)
    state.memory.put(torch.tensor(earlier), torch.tensor(0))
    check(propose(drafter, state), texts, rows, drafter.depth, earlier)


def test_answers_of_another_salt_are_not_matched():
    """The number of tokens that were accepted told what another client had been answered."""
    drafter, texts, earlier = Suffix(8, 5, remember=1), [[1, 2, 3], [9, 2, 3]], [2, 3, 7, 8]
    state = update(drafter, texts)
    state.set_salts(torch.tensor([5, 6]))
    state.memory.put(torch.tensor(earlier), torch.tensor(6))
    tree = propose(drafter, state)
    assert not tree.tokens[0, 1:].clamp(min=0).any()
    assert {7, 8} <= {*tree.tokens[1].tolist()}
    state.memory.put(torch.tensor([2, 3, 4]), torch.tensor(5))
    tree = propose(drafter, state)
    assert {*tree.tokens[0, 1:].tolist()} <= {4, PAD}
    assert 4 in tree.tokens[0]
    assert 4 not in tree.tokens[1]


def test_the_reference_itself_on_plain_cases():
    """A longer match weighs more, two alike more than one, and text that repeats goes round."""
    chances = probabilities([1, 2, 3, 9, 3, 8, 1, 2, 3], 1)
    assert chances == {(9,): 3**1.5 / (3**1.5 + 1 + 4), (8,): 1 / (3**1.5 + 1 + 4)}
    assert probabilities([7, 7], 2)[7, 7] == pytest.approx(1 / 5 * 2**1.5 / (2**1.5 + 4))
    assert probabilities([1, 2], 3) == {}


def test_the_memory_is_bounded_and_forgets_the_oldest():
    memory = AnswerMemory(8, torch.device("cpu"))
    for text in ([1, 2, 3], [4, 5], list(range(10, 30)), [6]):
        memory.put(torch.tensor(text), torch.tensor(0))
        assert memory.ring.shape == (1, 8)
    assert sorted(memory.ring[0].tolist()) == [PAD, PAD, 6, 25, 26, 27, 28, 29]


def test_answers_that_leave_are_remembered_without_their_prompts():
    """What a row leaves when another moves into its place; or a text that left before it was answered."""
    drafter, texts = Suffix(remember=1), [[1, 2, 3, 4], [5, 6, 7]]
    state = update(drafter, texts)
    propose(drafter, state)
    drafter.update(span_of([[4, 9, 8], [7, 6, 5, 4]], [3, 2]), state)
    state.select([1])
    assert drafter._memory.ring[0, :4].tolist() == [4, 9, 8, PAD]
    assert propose(drafter, state).tokens[0, 0] == 4
    update(drafter, texts).select([])
    assert drafter._memory.written == 4
    state.select([])
    assert drafter._memory.ring[0, 4:9].tolist() == [7, 6, 5, 4, PAD]
    assert drafter.start(1, torch.device("cpu")).memory is state.memory


@pytest.mark.parametrize("name", ["suffix:remember=1", "hybrid:remember=1,head={head}"])
def test_an_answer_that_was_given_before_is_drafted_and_stays_the_same(name, tmp_path):
    """A memory that no one fills, as inside another drafter; or one that changes the text."""
    target, prompt = tiny.target("llama"), tiny.prompts(9)[0]
    config, tensors = tiny.eagle(target, "chain-7").pack()
    save_drafter(tmp_path, "eagle", target, config, tensors, {}, dtype=None)
    drafter = load_drafter(name.format(head=tmp_path), target)
    options = {"max_new_tokens": 40, "temperature": 0.8, "seed": 3}
    first, second = (generate(target, prompt, drafter, **options) for _ in range(2))
    assert first.tokens == second.tokens == generate(target, prompt, **options).tokens
    assert second.tau > 1.3 * first.tau


def test_a_round_may_ask_for_fewer_nodes():
    target, spec = tiny.target("llama"), tiny.eagle(tiny.target("llama"), "best-first-2x4").tree_spec
    engine = Engine(target, Suffix(), specs=[spec])
    engine.admit(Request([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 1, 2, 5, 1, 2] * 3))
    for _ in range(6):
        engine.step(spec=spec)
        assert engine.span.tree.nodes <= 4
        assert engine.span.tree.depth <= 2


@pytest.mark.parametrize(
    "options",
    [{"rows": 1}, {"rows": 3000}, {"depth": 0}, {"depth": 65}, {"remember": -1}, {"remember": 1025}],
)
def test_numbers_that_leave_nothing_to_draft_are_refused(options):
    with pytest.raises(ValueError, match="it needs rows from 2 to 2,048, depth from 1 to 64 and remember"):
        Suffix(**options)
