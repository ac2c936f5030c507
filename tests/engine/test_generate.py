"""`generate`: where answers end, what is streamed, traced and counted, and what is left behind."""

import gc
import io
import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, count

import pytest
import torch
from transformers import GPT2Config, NoRepeatNGramLogitsProcessor, TextStreamer

import tiny
from slipstream.core.tree import _shared_layout
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.engine import Engine
from slipstream.engine.generate import Generation, Interrupted, generate
from slipstream.measure.runner import hf_generate
from slipstream.targets import HFTarget

EVERY = {"vanilla": lambda target, texts: Vanilla(), **tiny.DRAFTERS}
PROMPTS, SAMPLED, ENDLESS = tiny.PROMPTS, tiny.SAMPLED, tiny.ENDLESS
PROMPT = PROMPTS[0]


@pytest.fixture(scope="module")
def oracle(answer: list[int]) -> TreeOracle:
    """Drafts past every end that a test sets."""
    return TreeOracle([PROMPT + answer], tiny.VOCAB)


def cut(made: Generation) -> bool:
    """Whether the last round brought more than was kept."""
    return made.rounds[-1].kept < made.rounds[-1].accepted + 1


def test_an_answer_ends_at_the_first_eos_of_a_round(target, answer, oracle):
    """Accepted tokens after an EOS kept, or only the first of several EOS ids known."""
    cuts = 0
    for a, b in zip(answer, reversed(answer), strict=True):
        made = generate(target, PROMPT, oracle, **SAMPLED, eos_token_ids=[a, b])
        end = min(answer.index(a), answer.index(b)) + 1
        assert (made.tokens, made.finish) == (answer[:end], "eos")
        cuts += end > 1 and cut(made)
    assert cuts > 3


@pytest.mark.parametrize(
    "spans", [[(10, 13)], [(8, 14), (10, 13)], [(8, 13), (10, 13)], [(9, 12), (11, 14)], [(20, 21), (9, 12)]]
)
def test_an_answer_ends_before_its_first_stop_string(target, answer, oracle, spans):
    """A stop string missed because it spans tokens or rounds, found late, or left in the text."""
    stops = [target.text.decode(answer[a:b]) for a, b in spans]
    made = generate(target, PROMPT, oracle, **SAMPLED, **ENDLESS, stop=stops)
    end = next(n for n in range(41) if any(stop in target.text.decode(answer[:n]) for stop in stops))
    text = target.text.decode(answer[:end])
    assert (made.tokens, made.finish) == (answer[:end], "stop")
    assert made.text == text[: min(text.index(stop) for stop in stops if stop in text)]
    assert not any(stop in made.text for stop in stops)
    one = generate(target, PROMPT, **SAMPLED, **ENDLESS, stop=stops[0])
    assert stops[0] not in one.text
    assert target.text.decode(one.tokens).endswith(stops[0])


def test_max_new_tokens_cuts_inside_a_round(target, answer, oracle):
    """A round that brings more than was asked for."""
    cuts = 0
    for limit in range(1, 16):
        made = generate(target, PROMPT, oracle, max_new_tokens=limit, **SAMPLED, **ENDLESS)
        assert (made.tokens, made.finish) == (answer[:limit], "length")
        cuts += limit > 1 and cut(made)
    assert cuts > 3


WINDOW = 24


@cache
def narrow() -> HFTarget:
    """A target of few positions."""
    return HFTarget(tiny.build(GPT2Config(**tiny.SHORT, n_embd=32, n_layer=2, n_head=4, n_positions=WINDOW)))


@cache
def filled(*lengths: int) -> list[Generation]:
    """What it says to prompts of these lengths, up to the end of its window."""
    return generate(narrow(), tiny.prompts(*lengths), **SAMPLED)


@pytest.mark.parametrize("drafter", EVERY)
@pytest.mark.parametrize("prompts", [[23], [17], [20, 5, 12]], ids=str)
def test_the_end_of_the_window(drafter, prompts):
    """Learned positions beyond the last one: an index error, or a text that ends early or differs from plain
    decoding."""
    target, ids = narrow(), tiny.prompts(*prompts)
    plain = filled(*prompts)
    assert [len(each.prompt + each.tokens) for each in plain] == [WINDOW] * len(ids)
    beyond = [each.prompt + each.tokens + [1, 2, 3, 4, 5, 6] for each in plain]
    made = generate(target, ids, EVERY[drafter](target, beyond), law="coupled", **SAMPLED)
    assert [each.tokens for each in made] == [each.tokens for each in plain]
    assert {each.finish for each in made} == {"length"}
    for each in made:
        root = len(each.prompt)
        for r in each.rounds:
            assert root + r.drafted < WINDOW  # positions of the deepest guesses
            root += r.kept


class Recorder:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_then_exactly_the_answer(target, answer, oracle):
    """Tokens of a round streamed though the answer had ended, twice, or late."""
    recorder = Recorder()
    made = generate(target, PROMPT, oracle, **SAMPLED, eos_token_ids=[answer[23]], streamer=recorder)
    assert recorder.values[0] == PROMPT
    assert list(chain.from_iterable(recorder.values[1:])) == made.tokens
    assert list(map(len, recorder.values[1:])) == [1] + [r.kept for r in made.rounds]
    assert recorder.ended == 1


def test_hugging_face_streamers_work(target, oracle, capsys):
    """A tensor of a shape that `TextStreamer` does not take."""
    streamer = TextStreamer(target.text.tokenizer, skip_prompt=True, skip_special_tokens=True)
    made = generate(target, PROMPT, oracle, max_new_tokens=20, **SAMPLED, **ENDLESS, streamer=streamer)
    assert capsys.readouterr().out == made.text + "\n"


def depth_of(slot: int, parents: list[int]) -> int:
    return 0 if slot == 0 else 1 + depth_of(parents[slot], parents)


@pytest.fixture(scope="module")
def texts(target: HFTarget) -> tiny.Texts:
    """The prompts with what plain decoding says."""
    return [each.prompt + each.tokens for each in generate(target, PROMPTS, max_new_tokens=20)]


@pytest.mark.parametrize("drafter", EVERY)
def test_trace_and_counts_tell_what_happened(target, texts, drafter):
    """A trace whose rows are renamed as others leave, or that shows other slots than were kept; τ that counts
    drafted tokens, the prompt's own token, or tokens after the end."""
    trace = io.StringIO()
    made = generate(target, PROMPTS, EVERY[drafter](target, texts), max_new_tokens=20, trace=trace)
    tokens = [each.tokens[:1] for each in made]
    rounds: list[list[tuple[int, int]]] = [[] for _ in made]
    for line in map(json.loads, trace.getvalue().splitlines()):
        row, nodes, parents, path = (line[key] for key in ("row", "tokens", "parents", "accepted"))
        assert nodes[0] == tokens[row][-1]
        assert path[0] == 0
        assert [parents[slot] for slot in path[1:]] == path[:-1]
        assert line["round"] == len(rounds[row])
        rounds[row].append(
            (max(depth_of(slot, parents) for slot, t in enumerate(nodes) if t >= 0), len(path) - 1)
        )
        tokens[row] += [nodes[slot] for slot in path[1:]] + [line["next"]]
    for each, seen, counted in zip(made, tokens, rounds, strict=True):
        assert each.tokens == seen[: len(each.tokens)]
        assert [(r.drafted, r.accepted) for r in each.rounds] == counted
        assert sum(r.kept for r in each.rounds) + 1 == len(each.tokens)
        assert all(1 <= r.kept <= r.accepted + 1 <= r.drafted + 1 for r in each.rounds)
        assert each.tau == pytest.approx((len(each.tokens) - 1) / len(each.rounds))
        assert {"vanilla": each.tau == 1, "oracle": each.tau > 2}.get(drafter, True)


def test_one_token_takes_no_round(target):
    assert generate(target, PROMPT, max_new_tokens=1).tau == 1


def test_rows_that_finish_early_leave_the_others_alone(target):
    """State, cache or sampler rows mixed up when some rows leave a batch."""
    how = {"max_new_tokens": 30, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    endless = generate(target, PROMPTS, **how, **ENDLESS)
    ends = [endless[0].tokens[3], endless[2].tokens[9]]
    alone = [generate(target, prompt, **how, eos_token_ids=ends) for prompt in PROMPTS]
    assert len({len(each.tokens) for each in alone}) > 2
    for drafter in tiny.DRAFTERS.values():
        texts = [each.prompt + each.tokens for each in endless]
        batch = generate(target, PROMPTS, drafter(target, texts), **how, eos_token_ids=ends)
        assert [(each.tokens, each.finish) for each in batch] == [
            (each.tokens, each.finish) for each in alone
        ]


def test_rows_of_a_batch_have_noise_of_their_own(target):
    """The same answer three times; or an answer that changes with the number of prompts beside it."""
    three = [each.tokens for each in generate(target, [PROMPT] * 3, max_new_tokens=12, **SAMPLED, **ENDLESS)]
    two = [each.tokens for each in generate(target, [PROMPT] * 2, max_new_tokens=12, **SAMPLED, **ENDLESS)]
    assert three[0] == generate(target, PROMPT, max_new_tokens=12, **SAMPLED, **ENDLESS).tokens
    assert three[:2] == two
    assert len(set(map(tuple, three))) == 3


PENALISED = {"max_new_tokens": 16, "temperature": 0.8, "repetition_penalty": 1.2, "law": "coupled"}


@pytest.fixture(scope="module")
def endless(target: HFTarget) -> list[Generation]:
    """What plain decoding says to the prompts without any EOS."""
    return generate(target, PROMPTS, **PENALISED, **ENDLESS)


@pytest.fixture(scope="module")
def ends(endless: list[Generation]) -> list[int]:
    """EOS tokens that two answers come to."""
    return [endless[0].tokens[3], endless[3].tokens[5]]


@pytest.fixture(scope="module")
def ended(target: HFTarget, ends: list[int]) -> list[Generation]:
    """The answers with these EOS tokens."""
    return generate(target, PROMPTS, **PENALISED, eos_token_ids=ends)


@pytest.mark.parametrize("drafter", EVERY)
def test_more_prompts_than_are_answered_at_once(target, endless, ends, ended, drafter):
    """A text, a trace or a count that goes to another prompt when a row is taken again."""
    texts, how = [each.prompt + each.tokens for each in endless], PENALISED | {"eos_token_ids": ends}
    for batch in (1, 3):
        trace = io.StringIO()
        made = generate(target, PROMPTS, EVERY[drafter](target, texts), batch=batch, trace=trace, **how)
        assert [(each.tokens, each.finish) for each in made] == [(each.tokens, each.finish) for each in ended]
        lines = list(map(json.loads, trace.getvalue().splitlines()))
        for i, each in enumerate(made):
            brought = [line["accepted"] for line in lines if line["row"] == i]
            assert [len(path) - 1 for path in brought] == [r.accepted for r in each.rounds]


def test_a_batch_bounds_the_rows_that_are_allocated(target, monkeypatch):
    """A cache of all the prompts, of which some are answered at once."""
    rows = []
    monkeypatch.setattr(
        "slipstream.engine.generate.Engine",
        lambda *args, **named: rows.append(args[3]) or Engine(*args, **named),
    )
    generate(target, PROMPTS, max_new_tokens=3, batch=2)
    generate(target, PROMPTS, max_new_tokens=3, batch=9)
    generate(target, PROMPTS, max_new_tokens=3)
    assert rows == [2, 4, 4]


@pytest.fixture(scope="module")
def theirs(target: HFTarget) -> tiny.Texts:
    """Hugging Face's texts, in which nothing is said twice, and plain decoding does say things twice."""
    texts = [
        hf_generate(target, torch.tensor([p]), max_new_tokens=24, no_repeat_ngram_size=2)[0].tolist()
        for p in PROMPTS
    ]
    plain = generate(target, PROMPTS, max_new_tokens=24, **ENDLESS)
    assert texts != [each.prompt + each.tokens for each in plain]
    return texts


@pytest.mark.parametrize("drafter", EVERY)
def test_processors_see_each_nodes_own_history(target, theirs, drafter):
    """A Hugging Face processor called with the prompt alone, with another branch, or with rejected tokens."""
    processors = [NoRepeatNGramLogitsProcessor(2)]
    made = generate(
        target, PROMPTS, EVERY[drafter](target, theirs), max_new_tokens=24, processors=processors, **ENDLESS
    )
    assert [each.prompt + each.tokens for each in made] == theirs


def test_processors_are_not_asked_behind_a_guess_that_ends_the_answer(target, answer, oracle):
    """A trie of allowed answers knows nothing behind their ends; plain decoding never asks there."""
    eos, asked = answer[7], list[list[int]]()

    def noting(ids, x):
        asked.append(ids[0, len(PROMPT) :].tolist())
        return x

    how = {"processors": [noting], "max_new_tokens": 20, **SAMPLED}
    assert generate(target, PROMPT, oracle, **how, **ENDLESS).tokens == answer[:20]
    assert max(map(len, asked)) == 19
    asked.clear()
    made = generate(target, PROMPT, oracle, eos_token_ids=[eos], **how)
    assert made.tokens == answer[: answer.index(eos) + 1]
    assert asked
    assert not any(eos in said for said in asked)
    asked.clear()
    stop = target.text.decode(answer[6:9])
    made = generate(target, PROMPT, oracle, stop=stop, **how, **ENDLESS)
    assert made.finish == "stop"
    assert asked
    assert not any(stop in target.text.decode(said) for said in asked)


def test_sampled_children_bear_a_processor_that_allows_none_of_theirs(target):
    """An error that plain decoding does not raise: the token is the target's, and not the head's."""
    head = tiny.eagle(target, "chain-3", "sampled", vocab=8)
    only = lambda ids, x: x.masked_fill(torch.arange(x.shape[1]) != 40, -torch.inf)  # noqa: E731
    made = generate(target, PROMPT, head, processors=[only], max_new_tokens=6, **SAMPLED, **ENDLESS)
    assert made.tokens == [40] * 6


@pytest.mark.parametrize("name", EVERY)
def test_a_round_leaves_nothing_behind(target, answer, name):
    """Trees, masks or spans that somebody holds on to: memory that grows as long as the answer does."""
    alive: list[int] = []

    class Meter:
        def put(self, value: torch.Tensor) -> None:
            _shared_layout.cache_clear()  # it holds so many and no more
            gc.collect()
            alive.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))

        def end(self) -> None: ...

    drafter = EVERY[name](target, [PROMPT + answer])
    gc.freeze()  # what was there before is not looked at again and again
    try:
        generate(target, PROMPT, drafter, max_new_tokens=40, streamer=Meter(), **ENDLESS)
    finally:
        gc.unfreeze()
    assert len(alive) > 8
    # Some hold more behind a round with a match than behind one without, or what their head has yet to read.
    before = alive[2:-3] if name.startswith(("ngram", "suffix", "auto")) else alive[2:6]
    assert max(alive[-3:]) <= max(before)


def test_ctrl_c_keeps_what_was_finished(target, monkeypatch):
    """An hour of answers that a keystroke loses."""
    ended, step = [], Engine.step

    def stops(engine, *args):
        if len(ended) == 2:
            raise KeyboardInterrupt
        updated = step(engine, *args)
        ended.extend(request for request in updated if request.finish)
        return updated

    monkeypatch.setattr(Engine, "step", stops)
    whole = {"max_new_tokens": 4, "temperature": 0.0, **ENDLESS}
    with pytest.raises(KeyboardInterrupt) as stopped:
        generate(target, PROMPTS, "vanilla", batch=1, **whole)
    monkeypatch.undo()
    plain = [generate(target, prompt, "vanilla", **whole) for prompt in PROMPTS[:2]]
    assert [each and each.tokens for each in stopped.value.finished] == [
        *(each.tokens for each in plain),
        *[None] * (len(PROMPTS) - 2),
    ]
    assert [each.finish for each in stopped.value.partial] == [
        *["length"] * 2,
        *["interrupted"] * (len(PROMPTS) - 2),
    ]


def test_what_ctrl_c_leaves_of_one_answer_is_kept(target, monkeypatch):
    """The half of a long answer that a keystroke in a notebook loses."""
    how = {"temperature": 0.0, **ENDLESS}
    passes, decode = count(1), Engine.decode

    def stops(engine, *args):
        if next(passes) == 6:
            raise KeyboardInterrupt
        return decode(engine, *args)

    monkeypatch.setattr(Engine, "decode", stops)
    with pytest.raises(Interrupted, match=r"stopped after 6 tokens, which this error's `partial`") as stopped:
        generate(target, "abcabc", "vanilla", max_new_tokens=20, **how)
    monkeypatch.undo()
    partial, whole = stopped.value.partial, generate(target, "abcabc", "vanilla", max_new_tokens=20, **how)
    assert partial.tokens == whole.tokens[:6]
    assert whole.text.startswith(partial.text)
    assert (partial.finish, stopped.value.finished) == ("interrupted", [None])
    assert partial.seconds.verify > 0


@pytest.mark.parametrize(
    ("tree", "proposal"),
    [("chain-3", "sampled")]  # the others drop sampled children
    + [
        (tree, proposal)
        for tree in ("chain-3", "best-first-3x8", "dynamic-3x4x9", "beam-3x4", "cape-3x9")
        for proposal in ("top-k", "noise")
    ],
)
@pytest.mark.parametrize("head", [tiny.eagle, tiny.eagle3, tiny.fasteagle, tiny.medusa, tiny.glide])
def test_a_head_that_says_no_numbers_changes_no_text(target, answer, head, tree, proposal):
    """Its guesses stood above the root, and another text was checked."""
    drafter = head(target, tree, proposal)
    for weight in drafter.head.parameters():
        weight.fill_(torch.nan)
    made = generate(target, PROMPT, drafter, max_new_tokens=20, **SAMPLED, **ENDLESS)
    assert len(made.tokens) == 20
    if proposal != "sampled":  # whose draws are others
        assert made.tokens == answer[:20]


@pytest.mark.parametrize("name", ["eagle", "fasteagle"])
def test_threads_share_a_target(target, name):
    """A pass took what another thread's had left: AssertionErrors, features of another shape."""
    drafter = tiny.DRAFTERS[name](target, [PROMPT] * 40)

    def said(prompt: list[int]) -> list[int]:
        return generate(target, prompt, drafter, **SAMPLED, max_new_tokens=12).tokens

    prompts = tiny.prompts(*range(5, 13))
    alone = list(map(said, prompts))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(said, prompts)) == alone
