"""The engine: a text that fails or leaves takes no other with it."""

import threading

import pytest
import torch

from slipstream import generate
from slipstream.core.grammar import DeadEnd
from slipstream.drafters import load_drafter
from slipstream.engine import session
from slipstream.engine.answer import Answer
from slipstream.engine.prefill import TOGETHER
from slipstream.engine.prefix_cache import LEAST
from slipstream.engine.settings import Settings
from slipstream.serve.engine import Busy, Ended, Engine, Task, likely

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
    """An engine, and what it tells of each task."""

    def __init__(self, target, rows=3, queue=10, keep=0) -> None:
        self.target, self.heard, self.ended = target, {}, threading.Condition()
        self.engine = Engine(target, load_drafter("ngram"), rows, 128, queue, self.post, keep=keep)

    def task(self, prompt, new=NEW, fails=None, **sampling) -> Task:
        processors = [] if fails is None else [Fails(len(prompt), fails)]
        settings = Settings.of(self.target, new, processors=processors, **sampling)
        answer = Answer(self.target, new, settings.eos, settings.stop, read=True)
        return Task(prompt, settings.row(0, prompt), answer, lambda news: None)

    def post(self, news) -> None:
        with self.ended:
            for each in news:
                self.heard.setdefault(each.task, []).append(each)
            self.ended.notify()

    def wait(self, *tasks: Task) -> None:
        done = lambda: all(task in self.heard and self.heard[task][-1].last for task in tasks)  # noqa: E731
        with self.ended:
            assert self.ended.wait_for(done, 20)

    def text(self, task: Task) -> str:
        return "".join(news.text for news in self.heard[task])


@pytest.fixture
def listen(chatting):
    made = []

    def listener(**how) -> Listener:
        made.append(Listener(chatting, **how))
        made[-1].engine.start()
        return made[-1]

    yield listener
    for each in made:
        each.engine.close()


def alone(target, prompt, **sampling) -> str:
    return generate(target, prompt, "vanilla", max_new_tokens=NEW, **sampling).text


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_text_that_fails_takes_no_other_with_it(listen, chatting, at):
    """In the pass of its prompt, in its first round, and in the midst of it. The others' texts go on where
    they were, and nothing is told twice."""
    here = listen()
    good = [here.task(prompt, temperature=1.0, frequency_penalty=0.3, seed=4) for prompt in PROMPTS]
    bad = here.task([30, 31, 32], fails=at)
    here.engine.submit([good[0], bad, *good[1:]])
    here.wait(bad, *good)
    assert here.heard[bad][-1].error == "RuntimeError: this text fails"
    for task, prompt in zip(good, PROMPTS, strict=True):
        assert here.text(task) == alone(chatting, prompt, temperature=1.0, frequency_penalty=0.3, seed=4)
        assert sum(news.tokens for news in here.heard[task]) == len(task.answer.tokens)
        assert sum(news.last for news in here.heard[task]) == 1
    after = here.task(PROMPTS[0])
    here.engine.submit([after])
    here.wait(after)
    assert here.text(after) == alone(chatting, PROMPTS[0])


def test_a_dead_end_is_of_texts_with_a_grammar(listen, chatting, monkeypatch):
    """All that were under way began again, each alone: one client's grammar made a queue of everybody."""
    here, step, failed = listen(), session.Session.step, []

    def ends(this):
        if len(this.texts) == 3 and not failed:
            failed.append(this)
            raise DeadEnd("the grammar cannot go on")
        return step(this)

    monkeypatch.setattr(session.Session, "step", ends)
    bad = here.task([30, 31, 32], regex="[a-z]+")
    good = [here.task(prompt) for prompt in PROMPTS[:2]]
    here.engine.submit([good[0], bad, good[1]])
    here.wait(bad, *good)
    assert here.heard[bad][-1].error == "the grammar cannot go on"
    assert not any(task.alone for task in good)
    assert [here.text(task) for task in good] == [alone(chatting, prompt) for prompt in PROMPTS[:2]]


def test_a_dead_end_takes_nothing_from_other_texts(listen, chatting):
    """Their prompts and answers were read again, and all kept prefixes were lost."""
    here = listen()
    bad, before = here.task([30, 31, 32], regex="([a-zA-M0-9 ]|[N-Z][!#])+"), here.engine._session
    good = [here.task(prompt) for prompt in PROMPTS[:2]]
    here.engine.submit([good[0], bad, good[1]])
    here.wait(bad, *good)
    assert "the grammar cannot go on" in here.heard[bad][-1].error
    assert here.engine._session is before
    assert [here.text(task) for task in good] == [alone(chatting, prompt) for prompt in PROMPTS[:2]]


def test_a_prompt_that_is_read_again_after_a_failure_counts_as_read(listen):
    """What it shared with a text of the session that failed was counted on."""
    here = listen(keep=100)
    prompt = [i % 50 for i in range(2 * LEAST)]
    before, good, bad = here.task(prompt), here.task(prompt), here.task([30, 31, 32], fails=1)
    here.engine.submit([before])
    here.wait(before)
    task = here.task(prompt)
    here.engine.submit([task])
    here.wait(task)
    assert task.shared == len(prompt) - 1
    here.engine.submit([good, bad])
    here.wait(good, bad)
    assert good.shared == 0


def test_a_text_whose_tokens_cannot_be_read_takes_no_other_with_it(listen, chatting, monkeypatch):
    here = listen()
    bad, good = here.task([30, 31, 32]), here.task(PROMPTS[0])
    monkeypatch.setattr(bad.answer, "extend", lambda tokens: 1 / 0)
    here.engine.submit([bad, good])
    here.wait(bad, good)
    assert here.heard[bad][-1].error == "ZeroDivisionError: division by zero"
    assert here.text(good) == alone(chatting, PROMPTS[0])


def test_numbers_that_are_not_finite_end_one_text(listen, chatting, monkeypatch):
    here = listen()
    bad, good = here.task([30, 31, 32], fails=999), here.task(PROMPTS[0])
    nan = lambda self, ids, x: x * (torch.nan if ids.shape[1] > 5 else 1.0)  # noqa: E731
    monkeypatch.setattr(Fails, "__call__", nan)
    here.engine.submit([bad, good])
    here.wait(bad, good)
    assert here.heard[bad][-1].error
    assert here.text(good) == alone(chatting, PROMPTS[0])


def test_a_text_that_is_cancelled_frees_its_row_within_a_round(listen, chatting):
    here = listen(rows=1)
    long, waits, other = here.task([1], new=100), here.task([2], new=100), here.task(PROMPTS[0])
    here.engine.submit([long, waits, other])
    with here.ended:
        assert here.ended.wait_for(lambda: len(here.heard.get(long, ())) > 3, 20)
        here.engine.cancel([long, waits])
        told = len(here.heard[long])
    here.wait(other)
    assert len(here.heard[long]) <= told + 1
    assert waits not in here.heard
    assert here.text(other) == alone(chatting, PROMPTS[0])


def test_texts_go_on_while_a_long_prompt_is_read(listen, chatting, monkeypatch):
    """Rounds between its chunks; one that is cancelled meanwhile says nothing."""
    monkeypatch.setattr(session, "CHUNK", 2)
    here = listen(rows=3)
    first, long, gone = here.task([1], new=40), here.task(PROMPTS[0] * 8), here.task(PROMPTS[1] * 8)
    here.engine.submit([first])
    with here.ended:
        assert here.ended.wait_for(lambda: first in here.heard, 20)
    here.engine.submit([long])
    here.engine.submit([gone])
    here.engine.cancel([gone])
    here.wait(first, long)
    began = here.heard[long][0].at
    between = [news for news in here.heard[first] if long.began < news.at < began]
    assert len(between) > 5
    assert gone not in here.heard
    assert here.text(long) == alone(chatting, PROMPTS[0] * 8)
    assert here.engine.running == 0


def test_a_full_queue_takes_no_part_of_a_request(listen):
    here = listen(rows=1, queue=2)
    here.engine.submit([here.task([1], new=100)])
    with here.ended:
        assert here.ended.wait_for(lambda: here.heard, 20)
    with pytest.raises(Busy, match="0 texts wait for 1 rows"):
        here.engine.submit([here.task([i]) for i in range(3)])
    assert here.engine.waiting == 0
    here.engine.submit([here.task([i]) for i in range(2)])
    with pytest.raises(Busy):
        here.engine.submit([here.task([5])])


def test_prompts_that_are_read_together_are_alike(chatting):
    """A short prompt padded to a long one takes the time of the long one. The oldest are never overtaken."""
    here = Listener(chatting, rows=8)
    lengths = [100, 90, 2, 3, 4, 100, TOGETHER - 1, 2]
    for length in lengths:
        here.engine._waiting.append(here.task([1], new=1))
        here.engine._waiting[-1].prompt *= length
    groups = []
    while tasks := here.engine._next():
        groups.append([len(task.prompt) for task in tasks])
    assert groups == [[100, 90], [2, 3, 4], [100], [TOGETHER - 1], [2]]
    here.engine.start()


def test_an_engine_that_ends_says_so_to_all(chatting, monkeypatch):
    here = Listener(chatting, rows=1)
    monkeypatch.setattr(here.engine, "_leave", lambda: 1 / 0)
    tasks = [here.task([1]), here.task([2])]
    here.engine.submit(tasks)
    here.engine.start()
    here.wait(*tasks)
    assert "the engine has ended: division by zero" in here.heard[tasks[1]][-1].error
    here.engine._thread.join()
    assert not here.engine.alive
    with pytest.raises(Ended, match="the engine has ended"):
        here.engine.submit([here.task([3])])


def test_probabilities_sum_to_one():
    logits = torch.tensor([1.0, 3.0, 2.0])
    made = likely(logits, 0, 5)
    assert [token for token, _ in made.top] == [1, 2, 0]
    assert sum(torch.tensor([p for _, p in made.top]).exp()) == pytest.approx(1.0)
    assert made.logprob == made.top[-1][1]
