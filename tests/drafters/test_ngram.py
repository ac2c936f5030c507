"""NGram against a search in plain lists."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.core.kv_cache import BLOCK, KVCache
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.span import Span
from slipstream.core.tree import PAD
from slipstream.drafters import load_drafter
from slipstream.drafters.ngram import NGram


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
def test_equals_a_search_in_plain_lists(texts, limits, cuts):
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


def test_the_reference_itself_on_plain_cases():
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
