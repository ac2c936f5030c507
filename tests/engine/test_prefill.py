"""Which prompts are read together, and how long texts under way wait for them."""

import tiny
from slipstream import generate
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.engine import Engine
from slipstream.engine.prefill import SHORT, TOGETHER, together
from slipstream.engine.request import Request


def groups(lengths):
    """Lengths of the prompts that are read together, group by group."""
    made = []
    while lengths:
        count = together([0] * length for length in lengths)
        made.append(lengths[:count])
        lengths = lengths[count:]
    return made


def test_prompts_that_are_read_together_are_alike():
    assert groups([100, 90, 2, 3, 4, 100]) == [[100, 90], [2, 3, 4], [100]]
    assert groups([TOGETHER - 1, TOGETHER - 1, 5000]) == [[TOGETHER - 1], [TOGETHER - 1], [5000]]
    assert groups([SHORT // 4] * 3 + [1]) == [[SHORT // 4] * 3 + [1]]
    assert groups([]) == []


def test_a_step_is_due_once_requests_have_waited_for_a_chunk(monkeypatch):
    monkeypatch.setattr("slipstream.engine.engine.CHUNK", 6)
    engine = Engine(tiny.target("llama"), Vanilla(), rows=4)
    engine.admit(Request([1] * 20))
    assert not engine.due  # nobody waited
    engine.admit(Request([1] * 4))
    assert not engine.due
    engine.admit(Request([1] * 4))
    assert engine.due
    engine.step()
    assert not engine.due


def test_no_pass_of_prompts_is_mostly_padding(monkeypatch):
    read, chunk = [], Engine._chunk

    def counted(self, new, tokens, nexts, count, last):
        read.append((int(count.sum()), tokens.numel()))
        return chunk(self, new, tokens, nexts, count, last)

    monkeypatch.setattr(Engine, "_chunk", counted)
    target, prompts = tiny.target("llama"), tiny.prompts(20, 90, 25, 90, 85, 20)
    alone = [generate(target, prompt, "vanilla", max_new_tokens=9).tokens for prompt in prompts]
    monkeypatch.setattr("slipstream.engine.prefill.SHORT", 0)
    read.clear()
    together = generate(target, prompts, "vanilla", max_new_tokens=9)
    assert [each.tokens for each in together] == alone
    assert read == [(20, 20), (90, 90), (25, 25), (175, 180), (20, 20)]
