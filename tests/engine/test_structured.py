"""Answers that a grammar bounds: plain constrained decoding's, whatever the drafter and the batch."""

import io
import json
import re
from dataclasses import replace
from functools import cache

import pytest

import tiny
from slipstream import generate
from slipstream.core.grammar import DeadEnd
from slipstream.core.sampling import Sampling, rows_of
from slipstream.core.verify import multi_round
from slipstream.drafters.lookahead import Lookahead
from slipstream.drafters.suffix import NGram
from slipstream.drafters.vanilla import Vanilla
from slipstream.engine.audit import audit
from slipstream.engine.generate import Job
from slipstream.engine.request import Request
from slipstream.targets.grammar import read_grammar

SAMPLINGS = {
    "T=0": Sampling(),
    "T=1": Sampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=5),
}
WORDS = "(Once|upon|a|time|there|was)"
REGEX = f"Dear {WORDS}(, {WORDS})*".replace(",", "0")
LARK = 'start: "Sum " sum\nsum: /[0-9]{1,3}/ | "L" sum "plus" sum "R"'
GRAMMARS = [("regex", REGEX), ("grammar", LARK), None, ("choice", ["Certainly not", "Certainly yes"])]
PROMPTS = tiny.prompts(11, 5, 19, 7)
NEW = 24


def rows(sampling: str) -> list[Sampling]:
    """Every row has a grammar of its own, and one has none."""
    target = tiny.target("llama")
    read = [each and read_grammar(target, *each, [tiny.EOS]) for each in GRAMMARS]
    each = zip(rows_of(SAMPLINGS[sampling], len(PROMPTS)), read, strict=True)
    return [replace(row, grammar=grammar) for row, grammar in each]


def run(drafter, prompts, sampling, trace=None, **how) -> list[list[int]]:
    target = tiny.target("llama")
    each = zip(prompts, sampling, strict=True)
    requests = [Request(prompt, row, NEW, frozenset([tiny.EOS])) for prompt, row in each]
    Job(target, drafter, requests, trace=trace, **how).run()
    return [request.tokens for request in requests]


@cache
def plain(sampling: str) -> list[list[int]]:
    """Every prompt alone, one token a pass."""
    each = zip(PROMPTS, rows(sampling), strict=True)
    return [run(Vanilla(), [prompt], [row])[0] for prompt, row in each]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", tiny.DRAFTERS)
def test_the_text_is_that_of_plain_constrained_decoding(name, sampling):
    """A state that follows guesses instead of what was accepted, a mask of another row or another node."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain(sampling), strict=True)]
    drafter = tiny.DRAFTERS[name](tiny.target("llama"), texts)
    assert run(drafter, PROMPTS, rows(sampling)) == plain(sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_answer_stays_within_its_grammar(sampling):
    """In answers that end, and in those that their limit cuts; and in batches of other sizes."""
    said = [tiny.tokenizer().decode(answer, skip_special_tokens=True) for answer in plain(sampling)]
    assert re.fullmatch(rf"Dear {WORDS}.*", said[0])
    assert re.fullmatch("Sum [0-9L].*", said[1])
    assert said[3] in GRAMMARS[3][1]
    assert plain(sampling)[3][-1] == tiny.EOS
    for batch in (1, 2, 3):
        assert run(NGram(shortest=1), PROMPTS, rows(sampling), batch=batch) == plain(sampling)


@pytest.mark.parametrize(
    "name", ["ngram", "eagle, dynamic", "fasteagle", "auto", "hybrid, bita", "lookahead"]
)
def test_drafts_obey_the_grammar_and_hold_what_it_forces(name):
    """Guesses that cannot be accepted take the place of others; forced tokens that wait for a pass each."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain("T=1"), strict=True)]
    drafter, trace = tiny.DRAFTERS[name](tiny.target("llama"), texts), io.StringIO()
    (row,) = rows("T=1")[3:]
    run(drafter, PROMPTS[3:], [row], trace)
    said, passes = plain("T=1")[3], [json.loads(line) for line in trace.getvalue().splitlines()]
    assert len(passes) <= 4  # "Certainly", a choice, and the rest
    for line, at in zip(passes, _ends(passes), strict=True):
        for slot in range(len(line["tokens"])):
            path, node = list[int](), slot
            while node:
                path, node = [line["tokens"][node], *path], line["parents"][node]
            walk = row.grammar.begin()
            for token in [*said[:at], *path] if tiny.EOS not in path else ():
                walk = walk.advance(token)
                assert walk is not None


def _ends(passes: list[dict]) -> list[int]:
    """Tokens of the answer up to the root of each round."""
    ends = [1]
    for line in passes[:-1]:
        ends.append(ends[-1] + len(line["accepted"]))
    return ends


def test_plain_decoding_drafts_nothing():
    """A baseline that is helped."""
    (row,), trace = rows("T=0")[3:], io.StringIO()
    run(Vanilla(), PROMPTS[3:], [row], trace)
    assert all(len(json.loads(line)["tokens"]) == 1 for line in trace.getvalue().splitlines())


@pytest.mark.parametrize("name", ["ngram", "eagle, sampled", "fasteagle, sampled", "bita, sampled"])
def test_the_multi_round_law_keeps_the_grammar(name):
    """Drafts drawn from a law with forbidden tokens, or from none at all."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain("T=1"), strict=True)]
    drafter = tiny.DRAFTERS[name](tiny.target("llama"), texts)
    (answer,) = run(drafter, PROMPTS[3:], rows("T=1")[3:], law=multi_round)
    assert tiny.tokenizer().decode(answer, skip_special_tokens=True) in GRAMMARS[3][1]


def test_lookahead_bears_a_grammar_that_cuts_its_tree():
    """Slots of its own tree were looked up in one of fewer nodes. In a batch another row kept the width."""
    target, cuts = tiny.target("llama"), 0
    for prompt in PROMPTS:
        how = {"regex": "[a-zA-Z ]{30}", "max_new_tokens": NEW, "eos_token_ids": tiny.EOS}
        trace = io.StringIO()
        made = generate(target, prompt, Lookahead(), trace=trace, **how)
        assert made.tokens == generate(target, prompt, "vanilla", **how).tokens
        sizes = [len(json.loads(line)["tokens"]) for line in trace.getvalue().splitlines()]
        cuts += sum(1 < size < Lookahead().rows for size in sizes)
    assert cuts > 3


def test_a_cape_bears_a_head_that_says_no_allowed_token():
    """A padding token was read as a token."""
    target = tiny.target("llama")
    for vocab in (2, 4, 8):
        head = tiny.eagle(target, "cape-2x3-1@0.5-0", vocab=vocab)
        how = {"regex": "[a-z]{9}", "max_new_tokens": 9, "eos_token_ids": tiny.EOS}
        made = generate(target, PROMPTS[0], head, **how)
        assert made.tokens == generate(target, PROMPTS[0], "vanilla", **how).tokens


def test_generate_takes_one_grammar():
    target = tiny.target("llama")
    how = {"max_new_tokens": NEW, "eos_token_ids": tiny.EOS}
    made = generate(target, PROMPTS, "ngram", choice=["yes", "no"], **how)
    assert {each.text for each in made} <= {"yes", "no"}
    assert {each.finish for each in made} == {"eos"}
    assert audit(target, made[0].prompt, made[0].tokens, made[0].sampling) == []
    with pytest.raises(ValueError, match="regex and choice are given"):
        generate(target, PROMPTS, "ngram", choice=["yes", "no"], regex="a", **how)
    with pytest.raises(ValueError, match="give eos_token_ids"):
        generate(target, PROMPTS, "ngram", regex="a", max_new_tokens=4, eos_token_ids=[])


def test_a_processor_that_leaves_nothing_of_a_grammar_is_named():
    """`min_new_tokens` behind the end of every text, for one."""
    forbids = lambda ids, x: x.index_fill(1, ids.new_tensor([4]), -float("inf"))  # noqa: E731
    with pytest.raises(ValueError, match="left no token"):
        generate(tiny.target("llama"), [[1, 2]], "ngram", regex="e", processors=[forbids], max_new_tokens=4)


@pytest.mark.parametrize(
    "name", ["oracle", "suffix", "eagle, dynamic", "eagle, sampled", "fasteagle", "medusa"]
)
def test_a_dead_end_that_plain_decoding_does_not_reach_is_no_error(name):
    """Guesses that lead to one, and a round that goes on to one behind the end of the answer."""
    target, ends = tiny.target("llama"), 0
    how = {"regex": "([a-zA-M0-9 ]|[N-Z][!#])+", "eos_token_ids": tiny.EOS}  # these signs have no tokens
    for prompt in PROMPTS:
        said = generate(target, prompt, "vanilla", max_new_tokens=NEW, eos_token_ids=tiny.EOS).tokens
        drafter = tiny.DRAFTERS[name](target, [prompt + said])
        for new in range(1, 8):
            try:
                made = generate(target, prompt, "vanilla", max_new_tokens=new, **how)
            except DeadEnd:
                ends += 1
                with pytest.raises(DeadEnd):
                    generate(target, prompt, drafter, max_new_tokens=new, **how)
                break
            assert generate(target, prompt, drafter, max_new_tokens=new, **how).tokens == made.tokens
    assert ends
