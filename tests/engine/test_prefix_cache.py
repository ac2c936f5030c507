"""Prompts that begin as another text did: they say the same as alone, and only what is new is read."""

import pytest
import torch

import tiny
from slipstream.core.sampling import Sampling
from slipstream.core.verify import multi_round
from slipstream.drafters import load_drafter
from slipstream.drafters.store import save_drafter
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request

KEEP = 200
FIRST, OTHER = tiny.prompts(23, 17)
HOW = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3)
MORE = 8


def made(engine: Engine, prompts: list[list[int]], new: int = 12) -> tuple[list[list[int]], list[int]]:
    """Answers of texts that join at once, and what each took from others."""
    requests = [Request(prompt, HOW) for prompt in prompts]
    engine.admit(*requests)
    while min(len(request.tokens) for request in requests) < new:
        engine.step()
    leave(engine, *requests)
    return [request.tokens[:new] for request in requests], [request.shared for request in requests]


def leave(engine: Engine, *requests: Request) -> None:
    engine.cancel(*requests)
    engine.free()


def engine_of(name: str, keep: int) -> Engine:
    target = tiny.target("llama")
    drafter = tiny.DRAFTERS[name](target, [FIRST + OTHER] * 40)
    law = {"law": multi_round} if drafter.law == "multi-round" else {}
    policy = tiny.Restless(drafter) if drafter.candidate_trees else None
    return Engine(target, drafter, **law, rows=3, policy=policy, keep=keep)


@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_a_second_turn_reads_what_is_new_and_says_the_same(name):
    """Keys of another text, a drafter's caches that lag, a position that is one off."""
    here, fresh = engine_of(name, KEEP), engine_of(name, 0)
    ((answer,), taken) = made(here, [FIRST])
    assert taken == [0]
    turns = [FIRST + answer + OTHER[:MORE], OTHER, FIRST[:15] + OTHER]
    said, taken = made(here, turns)
    assert (
        taken[0] >= len(FIRST) + len(answer) - 2
    )  # the last token's keys need not be there, nor its drafter's
    assert taken[1:] == [0, 14]
    plain = made(fresh, [FIRST])[0]
    if here.law is multi_round:  # exact in distribution alone
        return
    assert plain == [answer]
    assert said == made(fresh, turns)[0]
    assert said == [made(engine_of("ngram", 0), [turn])[0][0] for turn in turns]


def test_the_second_turns_pass_reads_only_what_is_new(monkeypatch):
    here = engine_of("ngram", KEEP)
    (answer,), _ = made(here, [FIRST])
    read, call = list[int](), type(here.target).__call__

    def counted(self, tree, cache, *args, **kwargs):
        read.append(tree.nodes)
        return call(self, tree, cache, *args, **kwargs)

    monkeypatch.setattr(type(here.target), "__call__", counted)
    prompt = FIRST + answer + OTHER[:MORE]
    [request] = here.admit(Request(prompt, HOW))
    assert read == [len(prompt) - request.shared]
    assert read[0] <= MORE + 2


def test_what_is_kept_is_bounded_and_what_was_used_last_stays():
    here = engine_of("ngram", 60)
    made(here, [FIRST])  # 34 tokens
    made(here, [OTHER])  # 28 more, which do not fit beside them
    assert here._prefixes.tokens <= 60
    assert made(here, [FIRST + OTHER])[1] == [0]
    assert made(here, [FIRST + OTHER])[1] == [len(FIRST + OTHER) - 1]
    assert made(engine_of("ngram", 0), [FIRST])[1] == [0]


@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_guesses_are_of_no_text_that_is_not_shared(name):
    """Lookahead took over the n-grams of all of a kept text, and a trace showed another client's words."""
    here, beginning = engine_of(name, KEEP), FIRST[:15]
    secret = {*range(30, 60)}.difference(beginning, OTHER)
    made(here, [[*beginning, *secret]], 1)
    assert here.admit(Request(beginning + OTHER, HOW))[0].shared == 14
    for _, field, value in here.state.fields():
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            assert not secret & {*value.flatten().tolist()} - {*here.state.root.tolist()}, field


def test_texts_under_way_share_what_they_begin_with():
    """A prompt that many clients have in common, at the same time."""
    here = engine_of("ngram", KEEP)
    here.admit(Request(FIRST, HOW))
    assert here.admit(Request(FIRST + OTHER, HOW))[0].shared == len(FIRST) - 1


def test_texts_of_another_salt_share_nothing():
    """How much was known, and the time to the first token, told what another client had asked."""
    here = engine_of("ngram", KEEP)

    def known(prompt: list[int], salt: int) -> int:
        [request] = here.admit(Request(prompt, HOW, salt=salt))
        here.step()
        leave(here, request)
        return request.shared

    assert known(FIRST, 1) == 0
    assert known(FIRST, 2) == 0
    assert known(FIRST + OTHER, 1) >= len(FIRST) - 1
    assert known(FIRST, 2) == len(FIRST) - 1  # a longer text of another salt has not taken its place
    two = here.admit(Request(FIRST + OTHER, HOW, salt=3), Request(FIRST, HOW, salt=1))
    assert [request.shared for request in two] == [0, len(FIRST) - 1]
    leave(here, two[0])
    leave(here, two[1])  # in a row that has moved
    assert known(FIRST + OTHER, 3) == len(FIRST + OTHER) - 1
    assert known(FIRST + OTHER, 2) == len(FIRST) - 1


@pytest.mark.parametrize("name", ["suffix:remember=1", "auto:remember=1,head={head}"])
def test_remembered_answers_serve_texts_of_their_salt_alone(name, tmp_path):
    target = tiny.target("llama")
    config, tensors = tiny.eagle(target, "chain-7").pack()
    save_drafter(tmp_path, "eagle", target, config, tensors, {}, dtype=None)
    drafter = load_drafter(name.format(head=tmp_path), target)
    here = Engine(target, drafter, rows=1)

    def accepted(salt: int) -> int:
        spec = next((rung for rung in drafter.candidate_trees if rung.depth), None)
        [request] = here.admit(Request(FIRST, HOW, salt=salt))
        for _ in range(4):
            here.step(spec=spec)
        leave(here, request)
        return sum(step.accepted for step in request.steps)

    alone, again = accepted(1), accepted(1)
    assert again > alone
    assert accepted(2) == alone
