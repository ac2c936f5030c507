"""Sampling and Sampler against Hugging Face's own processors, row by row, and the histories that penalties
read."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import config
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.core.noise import words
from slipstream.core.sampling import RECENT, SHORTLIST, Sampler, Sampling, rows_of
from slipstream.core.tree import chain
from slipstream.core.verify import verify

V = 23
LIVE = torch.ones(1, dtype=torch.bool)


def hugging_face(logits, s, ids):
    """Scores [1, V] of one row after Hugging Face's processors, in the order of its `generate`."""
    processors = LogitsProcessorList()
    if s.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.temperature:
        processors.append(TemperatureLogitsWarper(s.temperature))
        if s.top_k:
            processors.append(TopKLogitsWarper(s.top_k))
        if s.top_p < 1:
            processors.append(TopPLogitsWarper(s.top_p))
        if s.min_p:
            processors.append(MinPLogitsWarper(s.min_p))
    return processors(torch.tensor([ids]), logits.double())


def logits_of(seed, rows=1, vocab=V, scale=3.0):
    """Random and, in float64, without ties."""
    return scale * torch.randn(
        rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def observed(sampler, *tokens):
    """A sampler whose row has answered with these tokens."""
    for token in tokens:
        sampler.observe(torch.tensor([token]), LIVE)
    return sampler


hundredths = st.integers(1, 99).map(lambda x: x / 100)
cuts = {
    "top_k": st.integers(0, V + 3),
    "top_p": st.just(1.0) | hundredths,
    "min_p": st.just(0.0) | hundredths,
}
settings_of_a_row = (
    st.fixed_dictionaries(  # keywords: Sampling itself is type-checked, which draws from `random`
        {
            "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
            **cuts,
            "repetition_penalty": st.sampled_from([1.0, 0.6, 1.7]),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "row": st.integers(0, 3),
        }
    )
)
ids = st.lists(st.integers(0, V - 1), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(settings_of_a_row, ids), min_size=1, max_size=4), st.integers(0, 2**32))
def test_batches_equal_hugging_face_row_by_row(rows, seed):
    """A filter in another order, a column read for the wrong row, or a greedy row filtered because its
    neighbour samples: support, law and draw of every row are those of the row alone, and the support is
    Hugging Face's.
    """
    rows = [(Sampling(**keywords), prompt) for keywords, prompt in rows]
    logits, at = logits_of(seed, len(rows)), torch.arange(len(rows)) * 5
    sampler = Sampler([s for s, _ in rows], [prompt for _, prompt in rows], V)
    scores, law, drawn = sampler.scores(logits), sampler.law(logits), sampler.draw(sampler.scores(logits), at)
    for b, (s, prompt) in enumerate(rows):
        own, expected = logits[b : b + 1], hugging_face(logits[b : b + 1], s, prompt)
        torch.testing.assert_close(scores[b : b + 1], expected)
        if s.temperature:
            torch.testing.assert_close(law[b : b + 1], expected.softmax(-1))
        else:
            assert law[b].argmax() == drawn[b] == expected.argmax()
            assert law[b].sum() == law[b].max() == 1
        alone = Sampler([s], [prompt], V)
        assert torch.equal(alone.scores(own)[0], scores[b])
        assert alone.draw(alone.scores(own), at[b : b + 1]) == drawn[b]
        assert scores[b, drawn[b]] > -torch.inf


@pytest.mark.parametrize(
    "s",
    [
        Sampling(1.0, top_p=0.9),  # the shortlist holds half the mass: all tokens must be sorted
        Sampling(1.0, top_p=0.2),
        Sampling(1.0, top_k=SHORTLIST + 500),
        Sampling(1.0, top_k=SHORTLIST + 500, top_p=0.9),
        Sampling(1.0, top_k=40, top_p=0.9, min_p=0.9),
        Sampling(1.0, min_p=0.97),
        Sampling(0.0, top_p=0.9),
    ],
    ids=repr,
)
def test_large_vocabularies_cut_where_a_full_sort_cuts(s):
    """Nearly flat laws over 3,000 tokens: a nucleus or a k beyond the shortlist would silently end at the
    shortlist."""
    flat, peaked = logits_of(1, vocab=3000, scale=0.05), logits_of(2, vocab=3000, scale=5.0)
    scores = Sampler([s, Sampling(1.0, top_p=0.5)], [[0], [0]], 3000).scores(torch.cat([flat, peaked]))
    torch.testing.assert_close(scores[:1], hugging_face(flat, s, [0]))
    torch.testing.assert_close(scores[1:], hugging_face(peaked, Sampling(1.0, top_p=0.5), [0]))


def test_greedy_ties_go_to_the_lower_id():
    """In bf16 ties are common; two kernels that break them differently would change the text."""
    logits = torch.zeros(2, V)
    logits[:, [4, 9, 17]] = 2.0
    for other in (Sampling(0.0), Sampling(1.0, top_p=0.5)):
        sampler = Sampler([Sampling(0.0), other], [[], []], V)
        assert sampler.draw(sampler.scores(logits), torch.zeros(2).long())[0] == 4
        assert sampler.law(logits)[0].argmax() == 4
        assert sampler.law(logits)[0].max() == 1


def test_presence_and_frequency_count_the_answer_only_and_repetition_the_prompt_too():
    """A prompt that is punished for its own words, or an answer punished once for a word it said twice."""
    logits = logits_of(3)
    s = Sampling(1.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    scores = observed(Sampler([s], [[1, 2, 2]], V), 2, 5, 5).scores(logits)[0]
    expected = logits[0].clone()
    for token in (1, 2, 5):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[2] -= 0.4 + 0.3
    expected[5] -= 0.4 + 2 * 0.3
    torch.testing.assert_close(scores, expected)


def test_a_row_that_is_not_live_keeps_its_history():
    """Rows stop at different depths of a walk: a finished row that goes on counting penalises what it never
    said."""
    rows = [Sampling(frequency_penalty=1.0, processors=(lambda ids, x: x,))] * 2
    sampler = Sampler(rows, [[1], [2]], V)
    sampler.observe(torch.tensor([3, 3]), torch.tensor([True, False]))
    assert sampler.history == [[1, 3], [2]]
    assert sampler.scores(torch.zeros(2, V)).nonzero().tolist() == [[0, 3]]


def test_select_and_insert_carry_histories_along():
    """A request that leaves a batch must take its own counts with it, whatever settings the others have."""
    s = Sampling(0.7, repetition_penalty=1.3, frequency_penalty=0.5, seed=3)
    with_processor = replace(s, row=1, processors=(NoRepeatNGramLogitsProcessor(2),))
    plain = Sampling(1.0, top_k=5, seed=9)
    said = {0: [4, 4, 7], 1: [4, 6, 4], 2: [8]}
    kinds, prompts = [s, with_processor, plain], [[1, 2], [6], [3]]

    def alone(i):
        return observed(Sampler([kinds[i]], [prompts[i]], V), *said[i])

    batch = Sampler([s, with_processor], prompts[:2], V)
    for tokens in zip(said[0], said[1], strict=True):
        batch.observe(torch.tensor(tokens), torch.ones(2, dtype=torch.bool))
    mixed = batch.select([1, 0]).join(alone(2)).select([2, 0, 1])
    logits, at = logits_of(4), torch.tensor([6])
    for row, i in enumerate([2, 1, 0]):
        torch.testing.assert_close(mixed.scores(logits.expand(3, V))[row], alone(i).scores(logits)[0])
        assert mixed.draw(torch.zeros(3, V), at.expand(3))[row] == alone(i).draw(torch.zeros(1, V), at)[0]
    mixed.observe(torch.tensor([9, 9, 9]), torch.tensor([False, True, True]))  # and histories go on
    for row, i in ((1, 1), (2, 0)):
        torch.testing.assert_close(
            mixed.scores(logits.expand(3, V))[row], observed(alone(i), 9).scores(logits)[0]
        )


def test_processors_read_the_history_of_the_node_they_judge():
    """Processors called once with the root's history would judge every node of the tree by the wrong text."""
    histories = []

    def spy(ids, scores):
        histories.append(ids[0].tolist())
        return scores

    sampler = Sampler([Sampling(processors=(spy,))], [[7, 8]], V)
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 4, 5, 6]]), V).float()
    verdict = verify(chain(torch.tensor([[2, 3, 4, 9]])), logits, torch.tensor([2]), sampler)
    assert verdict.count == 3
    assert histories == [[7, 8, 2], [7, 8, 2, 3], [7, 8, 2, 3, 4]]


@settings(max_examples=40, deadline=None)
@given(ids, ids, st.integers(0, 2**32))
def test_hugging_face_processor_equals_the_built_in_penalty(prompt, answer, seed):
    """Two ways to ask for one thing."""
    built_in = observed(Sampler([Sampling(1.0, repetition_penalty=1.7)], [prompt], V), *answer)
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    theirs = observed(Sampler([Sampling(1.0, processors=(processor,))], [prompt], V), *answer)
    torch.testing.assert_close(built_in.scores(logits_of(seed)), theirs.scores(logits_of(seed)))


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(cuts),
    st.integers(0, 2**32),
    st.sampled_from([0.3, -0.3, 2.0, -2.0]),
    st.floats(-6, 6),
)
def test_slack_brackets_every_support_that_rounding_could_make(keywords, seed, shift, parting):
    """The audit's promise: if no score moves by more than slack/2, the support stays between the narrowed and
    the widened one. The worst move pushes all tokens above a parting one way and all below it the other.
    """
    logits, sampler = logits_of(seed), Sampler([Sampling(1.0, **keywords)], [[]], V)
    moved, slack = logits + torch.where(logits > parting, shift, -shift) / 2, abs(shift) + 1e-9

    def support(x, slack=0.0):
        return set((sampler.scores(x, slack)[0] > -torch.inf).nonzero()[:, 0].tolist())

    assert support(logits, -slack) <= support(moved) <= support(logits, slack)
    assert support(logits, -slack) <= support(logits) <= support(logits, slack)


def test_slack_moves_the_boundary_by_so_much_and_no_more():
    """A slack that lets everything in would make the audit pass anything."""
    logits = torch.tensor([[3.0, 2.0, 1.9, 1.0, 0.0]], dtype=torch.float64)  # p: 0.53, 0.20, 0.18, 0.07, 0.03
    for s in (Sampling(1.0, top_k=2), Sampling(1.0, min_p=0.35), Sampling(1.0, top_p=0.69)):
        sampler = Sampler([s], [[]], 5)
        kept = {
            slack: (sampler.scores(logits, slack) > -torch.inf).sum().item() for slack in (0.0, 0.2, -0.2)
        }
        assert kept == {0.0: 2, 0.2: 3, -0.2: 1}


def test_slack_moves_the_mass_of_a_nucleus_too():
    """A token of 0.81 that may as well have 0.78 may need a second to reach 0.8, however far below it that
    one is."""
    sampler = Sampler([Sampling(1.0, top_p=0.8)], [[]], 2)
    logits = torch.tensor([[0.81, 0.19]], dtype=torch.float64).log()
    moved = logits + torch.tensor([[-0.1, 0.1]])
    assert sampler.scores(logits)[0, 1] == -torch.inf
    assert sampler.scores(moved).isfinite().all()
    assert sampler.scores(logits, 0.2).isfinite().all()


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "0 (greedy) or a positive number"),
        ("temperature", float("inf"), "0 (greedy) or a positive number"),
        ("temperature", float("nan"), "0 (greedy) or a positive number"),
        ("top_k", -1, "0 (off) or a positive whole number"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", 1.01, "in (0, 1]"),
        ("min_p", 1.0, "in [0, 1)"),
        ("min_p", -0.1, "in [0, 1)"),
        ("repetition_penalty", 0.0, "positive"),
        ("repetition_penalty", float("inf"), "positive"),
        ("presence_penalty", float("nan"), "a finite number"),
        ("frequency_penalty", float("-inf"), "a finite number"),
        ("seed", 2**63, "a 64-bit whole number"),
        ("temperature", 1e-320, "1e-30"),  # scores over it would be infinite
        ("temperature", "hot", "0 (greedy) or a positive number"),
        ("temperature", True, "0 (greedy) or a positive number"),
        ("top_k", 0.5, "positive whole number"),
        ("top_k", 2**63, "positive whole number below 2**63"),
        ("top_p", float("nan"), "in (0, 1]"),
        ("min_p", None, "in [0, 1)"),
        ("repetition_penalty", 1e-320, "positive"),
        ("presence_penalty", "1", "a finite number"),
        ("seed", 1.5, "a 64-bit whole number"),
        ("seed", False, "a 64-bit whole number"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value, allowed, monkeypatch):
    monkeypatch.setattr(
        config, "jaxtyping_disable", True
    )  # values of wrong types are to reach our own errors
    with pytest.raises(ValueError, match=f"^{field} is ") as error:
        Sampling(**{field: value})
    assert allowed in str(error.value)


def test_rows_of_one_seed_draw_apart_and_the_first_draws_what_a_single_row_would():
    """`generate` of a batch and of its first prompt alone must agree."""
    s = Sampling(1.0, top_k=5, seed=11)
    sampler, at = Sampler(rows_of(s, 3), [[]] * 3, V), torch.full((3,), 4)
    noise = sampler.noise(at)
    assert torch.equal(noise[:1], Sampler([s], [[]], V).noise(at[:1]))
    assert noise.unique().numel() == noise.numel()
    assert [row.top_k for row in sampler.rows] == [5, 5, 5]


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (
            lambda ids, x: x[:, :2],
            r"torch.float64 of shape \[1, 2\]; it must return scores of shape \[1, 23\]",
        ),
        (lambda ids, x: x[0], r"of shape \[23\]"),
        (lambda ids, x: None, "NoneType"),
        (lambda ids, x: x.argmax(-1, keepdim=True).expand(1, V), "torch.int64"),
        (lambda ids, x: x * float("nan"), "NaN of scores"),
        (lambda ids, x: x.where(x > 0, float("nan")), "NaN of scores"),
        (lambda ids, x: x - float("inf"), "no token"),
    ],
)
@pytest.mark.parametrize("when", ["processors", "warpers"])
def test_a_processor_that_makes_no_scores_is_refused_by_name(processor, says, when, monkeypatch):
    """Broadcast over the vocabulary, or an argmax of NaN: a text that nobody asked for."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    sampler = Sampler([Sampling(1.0, **{when: (processor,)})], [[1]], V)
    with pytest.raises(ValueError, match=f"processor <lambda> .*{says}"):
        sampler.scores(logits_of(5))


def test_a_processor_may_answer_in_another_precision():
    sampler = Sampler([Sampling(1.0, processors=(lambda ids, x: x.float(),))], [[1]], V)
    assert sampler.scores(logits_of(5)).dtype == torch.float64


def test_warpers_come_last_and_for_greedy_rows_too():
    """Hugging Face's order: what a watermark adds is added to what the cuts left."""

    def green(ids, x):
        seen.append((x > -torch.inf).sum().item())
        return x + torch.nn.functional.one_hot(torch.tensor([4]), V) * 50.0

    seen, logits = [], logits_of(6)
    rows = [Sampling(0.5, top_k=3, warpers=(green,)), Sampling(warpers=(green,)), Sampling(1.0)]
    scores = Sampler(rows, [[1], [2], [3]], V).scores(logits.expand(3, V))
    assert seen == [3, V]
    assert scores[1].argmax() == 4
    torch.testing.assert_close(scores[2], logits[0])
    assert Sampler(rows[:1], [[1]], V).remembers


def test_noise_of_the_positions_ahead_is_held(monkeypatch):
    """A walk drew anew what five guesses had looked at."""
    sampler, drawn = Sampler([Sampling(1.0)], [[0]], V), []
    monkeypatch.setattr(
        "slipstream.core.sampling.words", lambda *how: drawn.append(int(how[2])) or words(*how)
    )
    for position in range(3, 3 + RECENT):
        sampler.noise(torch.tensor([position]), torch.tensor([1, 2]))
    for position in range(3, 3 + RECENT):
        sampler.draw_alone(0, logits_of(1)[0], position)
    assert drawn == [*range(3, 3 + RECENT)]


def test_noise_of_some_tokens_is_that_of_all():
    sampler, at = Sampler([Sampling(1.0), Sampling()], [[0], [1]], V), torch.tensor([3, 5])
    some = torch.tensor([4, 0, 2])
    assert torch.equal(sampler.noise(at, some), sampler.noise(at)[:, some])
    assert sampler.noise(at)[1].count_nonzero() == 0
