"""The worker: a request that fails or leaves takes no other with it."""

import threading

import pytest
import torch

from slipstream import generate
from slipstream.core.grammar import DeadEnd
from slipstream.drafters import load_drafter
from slipstream.engine import engine as engines
from slipstream.engine.prefill import TOGETHER
from slipstream.engine.prefix_cache import LEAST
from slipstream.engine.request import Request
from slipstream.engine.sampling_params import SamplingParams
from slipstream.serve.worker import Busy, Ended, Worker, likely

NEW = 12
PROMPTS = [[1, 2, 3, 1, 2, 3], [7, 8, 9, 10], [20, 21], [5, 5, 5, 5, 5]]


class Fails:
    """A processor that raises at the `at`-th token of its text, each time."""

    def __init__(self, start: int, at: int) -> None:
        self.place = start + at

    def __call__(self, ids, x):
        if ids.shape[1] == self.place:
            raise RuntimeError("this text fails")
        return x


class Listener:
    """A worker, and the updates of each request."""

    def __init__(self, target, rows=3, queue=10, keep=0) -> None:
        self.target, self.heard, self.ended = target, {}, threading.Condition()
        self.worker = Worker(target, load_drafter("ngram"), rows, 128, queue, self.post, keep=keep)

    def request(self, prompt, new=NEW, fails=None, **sampling) -> Request:
        processors = [] if fails is None else [Fails(len(prompt), fails)]
        params = SamplingParams.of(self.target, new, processors=processors, **sampling)
        return params.request(0, prompt, new, streams=True)

    def post(self, updates) -> None:
        with self.ended:
            for update in updates:
                self.heard.setdefault(update.request, []).append(update)
            self.ended.notify()

    def wait(self, *requests: Request) -> None:
        done = lambda: all(each in self.heard and self.heard[each][-1].last for each in requests)  # noqa: E731
        with self.ended:
            assert self.ended.wait_for(done, 20)

    def text(self, request: Request) -> str:
        return "".join(update.text for update in self.heard[request])


@pytest.fixture
def listen(chatting):
    made = []

    def listener(**how) -> Listener:
        made.append(Listener(chatting, **how))
        made[-1].worker.start()
        return made[-1]

    yield listener
    for each in made:
        each.worker.close()


def alone(target, prompt, **sampling) -> str:
    return generate(target, prompt, "vanilla", max_new_tokens=NEW, **sampling).text


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_text_that_fails_takes_no_other_with_it(listen, chatting, at):
    """In the pass of its prompt, in its first round, and in the midst of it. The others' texts go on where
    they were, and nothing is told twice."""
    here = listen()
    good = [here.request(prompt, temperature=1.0, frequency_penalty=0.3, seed=4) for prompt in PROMPTS]
    bad = here.request([30, 31, 32], fails=at)
    here.worker.submit([good[0], bad, *good[1:]])
    here.wait(bad, *good)
    assert here.heard[bad][-1].error == "RuntimeError: this text fails"
    for request, prompt in zip(good, PROMPTS, strict=True):
        assert here.text(request) == alone(chatting, prompt, temperature=1.0, frequency_penalty=0.3, seed=4)
        assert sum(update.tokens for update in here.heard[request]) == len(request.tokens)
        assert sum(update.last for update in here.heard[request]) == 1
    after = here.request(PROMPTS[0])
    here.worker.submit([after])
    here.wait(after)
    assert here.text(after) == alone(chatting, PROMPTS[0])


def test_a_dead_end_is_of_texts_with_a_grammar(listen, chatting, monkeypatch):
    """All that were under way began again, each alone: one client's grammar made a queue of everybody."""
    here, decode, failed = listen(), engines.Engine.decode, []

    def ends(this, *args):
        if len(this.running) == 3 and not failed:
            failed.append(this)
            raise DeadEnd("the grammar cannot go on")
        return decode(this, *args)

    monkeypatch.setattr(engines.Engine, "decode", ends)
    bad = here.request([30, 31, 32], regex="[a-z]+")
    good = [here.request(prompt) for prompt in PROMPTS[:2]]
    here.worker.submit([good[0], bad, good[1]])
    here.wait(bad, *good)
    assert here.heard[bad][-1].error == "the grammar cannot go on"
    assert not any(request.alone for request in good)
    assert [here.text(request) for request in good] == [alone(chatting, prompt) for prompt in PROMPTS[:2]]


def test_a_dead_end_takes_nothing_from_other_texts(listen, chatting):
    """Their prompts and answers were read again, and all kept prefixes were lost."""
    here = listen()
    bad, before = here.request([30, 31, 32], regex="([a-zA-M0-9 ]|[N-Z][!#])+"), here.worker.engine.cache
    good = [here.request(prompt) for prompt in PROMPTS[:2]]
    here.worker.submit([good[0], bad, good[1]])
    here.wait(bad, *good)
    assert "the grammar cannot go on" in here.heard[bad][-1].error
    assert here.worker.engine.cache is before
    assert [here.text(request) for request in good] == [alone(chatting, prompt) for prompt in PROMPTS[:2]]


def test_a_prompt_that_is_read_again_after_a_failure_counts_as_read(listen):
    """What it shared with a text of the session that failed was counted on."""
    here = listen(keep=100)
    prompt = [i % 50 for i in range(2 * LEAST)]
    before, good, bad = here.request(prompt), here.request(prompt), here.request([30, 31, 32], fails=1)
    here.worker.submit([before])
    here.wait(before)
    again = here.request(prompt)
    here.worker.submit([again])
    here.wait(again)
    assert again.shared == len(prompt) - 1
    here.worker.submit([good, bad])
    here.wait(good, bad)
    assert good.shared == 0


def test_a_text_whose_tokens_cannot_be_read_takes_no_other_with_it(listen, chatting, monkeypatch):
    here = listen()
    bad, good = here.request([30, 31, 32]), here.request(PROMPTS[0])
    monkeypatch.setattr(bad, "take", lambda *result: 1 / 0)
    here.worker.submit([bad, good])
    here.wait(bad, good)
    assert here.heard[bad][-1].error == "ZeroDivisionError: division by zero"
    assert here.text(good) == alone(chatting, PROMPTS[0])


def test_numbers_that_are_not_finite_end_one_text(listen, chatting, monkeypatch):
    here = listen()
    bad, good = here.request([30, 31, 32], fails=999), here.request(PROMPTS[0])
    nan = lambda self, ids, x: x * (torch.nan if ids.shape[1] > 5 else 1.0)  # noqa: E731
    monkeypatch.setattr(Fails, "__call__", nan)
    here.worker.submit([bad, good])
    here.wait(bad, good)
    assert here.heard[bad][-1].error
    assert here.text(good) == alone(chatting, PROMPTS[0])


def test_a_text_that_is_cancelled_frees_its_row_within_a_round(listen, chatting):
    here = listen(rows=1)
    long, waits, other = here.request([1], new=100), here.request([2], new=100), here.request(PROMPTS[0])
    here.worker.submit([long, waits, other])
    with here.ended:
        assert here.ended.wait_for(lambda: len(here.heard.get(long, ())) > 3, 20)
        here.worker.cancel([long, waits])
        told = len(here.heard[long])
    here.wait(other)
    assert len(here.heard[long]) <= told + 1
    assert waits not in here.heard
    assert here.text(other) == alone(chatting, PROMPTS[0])


def test_texts_go_on_while_a_long_prompt_is_read(listen, chatting, monkeypatch):
    """Rounds between its chunks; one that is cancelled meanwhile says nothing."""
    monkeypatch.setattr(engines, "CHUNK", 2)
    here = listen(rows=3)
    first, long, gone = here.request([1], new=40), here.request(PROMPTS[0] * 8), here.request(PROMPTS[1] * 8)
    here.worker.submit([first])
    with here.ended:
        assert here.ended.wait_for(lambda: first in here.heard, 20)
    here.worker.submit([long])
    here.worker.submit([gone])
    here.worker.cancel([gone])
    here.wait(first, long)
    began = here.heard[long][0].at
    between = [update for update in here.heard[first] if long.began < update.at < began]
    assert len(between) > 5
    assert gone not in here.heard
    assert here.text(long) == alone(chatting, PROMPTS[0] * 8)
    assert here.worker.running == 0


def test_a_full_queue_takes_no_part_of_a_request(listen):
    here = listen(rows=1, queue=2)
    here.worker.submit([here.request([1], new=100)])
    with here.ended:
        assert here.ended.wait_for(lambda: here.heard, 20)
    with pytest.raises(Busy, match="0 texts wait for 1 rows"):
        here.worker.submit([here.request([i]) for i in range(3)])
    assert here.worker.waiting == 0
    here.worker.submit([here.request([i]) for i in range(2)])
    with pytest.raises(Busy):
        here.worker.submit([here.request([5])])


def test_prompts_that_are_read_together_are_alike(chatting):
    """A short prompt padded to a long one takes the time of the long one. The oldest are never overtaken."""
    here = Listener(chatting, rows=8)
    lengths = [100, 90, 2, 3, 4, 100, TOGETHER - 1, 2]
    for length in lengths:
        here.worker.engine.add(here.request([1], new=1))
        here.worker.engine.waiting[-1].prompt *= length
    groups = []
    while count := here.worker.engine._fitting():
        groups.append([len(here.worker.engine.waiting.popleft().prompt) for _ in range(count)])
    assert groups == [[100, 90], [2, 3, 4], [100], [TOGETHER - 1], [2]]
    here.worker.start()


def test_a_worker_that_ends_says_so_to_all(chatting, monkeypatch):
    here = Listener(chatting, rows=1)
    monkeypatch.setattr(here.worker, "_pass", lambda: 1 / 0)
    requests = [here.request([1]), here.request([2])]
    here.worker.submit(requests)
    here.worker.start()
    here.wait(*requests)
    assert "the engine has ended: division by zero" in here.heard[requests[1]][-1].error
    here.worker._thread.join()
    assert not here.worker.alive
    with pytest.raises(Ended, match="the engine has ended"):
        here.worker.submit([here.request([3])])


def test_probabilities_sum_to_one():
    logits = torch.tensor([1.0, 3.0, 2.0])
    made = likely(logits, 0, 5)
    assert [token for token, _ in made.top] == [1, 2, 0]
    assert sum(torch.tensor([p for _, p in made.top]).exp()) == pytest.approx(1.0)
    assert made.logprob == made.top[-1][1]
