"""The audit must explain near-ties and nothing else: one that explains everything proves nothing."""

import math

import pytest

import tiny
from slipstream.core.sampling import Sampling
from slipstream.core.verify import coupled
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.audit import audit
from slipstream.engine.generate import Job
from slipstream.engine.request import Request

PROMPT = tiny.prompts(5)[0]


def plain(sampling: Sampling) -> list[int]:
    request = Request(PROMPT, sampling, 12)
    Job(tiny.target("llama"), Vanilla(), [request], coupled).run()
    return request.tokens


SETTINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3, presence_penalty=0.4),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_p=0.8, min_p=0.05, frequency_penalty=0.3, seed=4),
    Sampling(temperature=1.0, top_k=1, seed=5),
    Sampling(temperature=1.0, top_p=0.05, seed=6),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_plain_decoding_passes_and_wrong_tokens_do_not(sampling):
    """Where the narrowed support is empty, −inf − −inf is NaN, and NaN passed for a margin of 0."""
    target, answer = tiny.target("llama"), plain(sampling)
    assert audit(target, PROMPT, answer, sampling) == []
    for at in (0, 5, 11):
        wrong = [*answer[:at], (answer[at] + 7) % tiny.VOCAB, *answer[at + 1 :]]
        found = {d.position: d for d in audit(target, PROMPT, wrong, sampling)}
        assert found[at].plain == answer[at]
        assert found[at].margin > 1e-6
        assert min(found) == at


def test_a_token_outside_the_support_is_infinitely_wrong():
    sampling = Sampling(temperature=1.0, top_k=1, seed=5)
    answer = plain(sampling)
    wrong = [(token + 7) % tiny.VOCAB for token in answer]
    assert all(d.margin == math.inf for d in audit(tiny.target("llama"), PROMPT, wrong, sampling))


def test_another_seed_is_another_text():
    """An audit that forgot the noise would pass any likely token."""
    answer = plain(Sampling(temperature=1.0, seed=3))
    assert audit(tiny.target("llama"), PROMPT, answer, Sampling(temperature=1.0, seed=4))
