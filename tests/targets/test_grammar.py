"""Grammars of all kinds, on a tiny target whose tokens are letters and on SmolLM2's tokens."""

import json
from copy import deepcopy

import pytest
import torch
from tokenizers import normalizers

import tiny
from slipstream import generate
from slipstream.core.grammar import DeadEnd, guided
from slipstream.core.tree import PAD, Probes, Tree, chain
from slipstream.targets import HFTarget, load_target
from slipstream.targets.grammar import read_grammar

LETTER = {letter: i for i, letter in enumerate(tiny.LETTERS)}


def ids(text: str) -> list[int]:
    return [LETTER[letter] for letter in text]


def grammar(kind: str, source: object):
    return read_grammar(tiny.target("llama"), kind, source, [tiny.EOS])


def after(made, text: str):
    walk = made.begin()
    for token in ids(text):
        walk = walk.advance(token)
        assert walk is not None, text
    return walk


def allowed(walk) -> str:
    """The letters that may come next; $ is the end."""
    found = walk.allowed.nonzero()[:, 0].tolist()
    return "".join("$" if token == tiny.EOS else tiny.LETTERS[token] for token in sorted(found))


@pytest.mark.parametrize(
    ("kind", "source", "said", "follows"),
    [
        ("regex", "[a-c]{2,3}d?", "ab", "abcd$"),
        ("choice", ["yes", "yet", "no"], "ye", "st"),
        ("choice", ["yes", "yesno"], "yes", "n$"),
        ("grammar", 'start: "x" start "y" | "z"', "xx", "xz"),
        ("grammar", 'root ::= "a" [b-d]+', "a", "bcd"),  # llama.cpp's form
        ("json_schema", {"type": "integer", "minimum": 7, "maximum": 31}, "3", "01"),
        ("json_schema", '{"enum": [12, 15, true]}', "1", "25"),
    ],
)
def test_a_mask_holds_what_may_follow(kind, source, said, follows):
    """A kind that is read as another; a state that lags behind its text; an end that is not allowed."""
    assert allowed(after(grammar(kind, source), said)) == follows


def test_a_walk_goes_on_from_where_it_stands_and_never_changes():
    """Guesses that are refused would leave their tokens in the state."""
    walk = after(grammar("regex", "a(b|c)d"), "a")
    assert allowed(walk.advance(LETTER["b"])) == allowed(walk.advance(LETTER["c"])) == "d"
    assert walk.advance(LETTER["d"]) is None
    assert allowed(walk) == "bc"
    ended = after(grammar("regex", "ab"), "ab").advance(tiny.EOS)
    assert ended.allowed is None
    assert ended.advance(LETTER["x"]) is ended
    assert ended.forced == []


@pytest.mark.parametrize(
    ("kind", "source", "fault"),
    [
        ("json_schema", {"type": "objekt"}, "json_schema cannot be read"),
        ("json_schema", "{", "is no JSON"),
        ("json_schema", [1], "is a list: give a JSON object"),
        ("json_schema", False, "json_schema cannot be read"),
        ("regex", "[a", "regex cannot be read"),
        ("regex", "(", "regex cannot be read.*: unclosed group$"),
        ("regex", "\ud800", "regex is no Unicode text"),
        ("choice", ["yes", "\ud800"], "choice is no Unicode text"),
        ("json_schema", {"enum": ["\ud800"]}, "json_schema is no Unicode text"),
        ("json_schema", '{"enum": ["\\ud800"]}', "json_schema is no JSON"),
        ("json_schema", f'{{"const": {"1" * 5000}}}', r"no JSON: Exceeds the limit \(4300 digits\)[^;]*$"),
        ("regex", "", "give it as text"),
        ("regex", 7, "give it as text"),
        ("grammar", "start: missing", "grammar cannot be read"),
        ("grammar", "start: start", "allows no text|cannot go on"),
        ("grammar", "root ::= (", "grammar cannot be read"),
        ("choice", [], "give a list of texts"),
        ("choice", "yes", "give a list of texts"),
        ("choice", ["yes", ""], "none of them empty"),
        ("regex", "a" * 300_000, "characters: at most"),
    ],
)
def test_what_cannot_be_read_is_refused(kind, source, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        grammar(kind, source)
    assert "\n" not in str(caught.value)


def test_what_has_no_tokens_or_no_end_is_refused():
    with pytest.raises(ValueError, match="give eos_token_ids"):
        read_grammar(tiny.target("llama"), "regex", "a", [])
    silent = HFTarget(tiny.reference("llama"))
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_grammar(silent, "regex", "a", [3])


def test_a_tree_keeps_what_the_grammar_allows_and_gains_what_it_forces():
    """Forbidden nodes with their descendants go, places of hosts and parents follow, forced tokens hang below
    the root."""
    made = grammar("regex", "abcde|ax")
    tokens = torch.tensor([ids("abxzc")])  # a > (b > (z, c), x)
    parents = torch.tensor([[0, 0, 0, 1, 1]])
    scores = torch.tensor([[0.0, -1, -2, -3, -4]])
    probes = Probes(torch.zeros(2, 4), torch.tensor([[3, 4]]))
    tree = Tree(tokens, parents, 2, probes=probes, scores=scores)
    kept, added = guided(tree, [made.begin()], [True])
    assert not added
    assert kept.tokens.tolist() == [ids("abxc")]
    assert kept.parents.tolist() == [[0, 0, 0, 1]]
    assert kept.scores.tolist() == [[0, -1, -2, -4]]
    assert kept.probes.hosts.tolist() == [[PAD, 3]]

    forced, added = guided(tree, [after(made, "a")], [True])  # its root may not come: nothing is kept
    assert (forced.nodes, added) == (1, False)
    made = grammar("regex", "abcd[ef]")
    chained, added = guided(chain(torch.tensor([ids("ab"), ids("zz")])), [made.begin(), None], [True, True])
    assert added
    assert chained.is_chain
    assert chained.tokens.tolist() == [ids("abcd"), [*ids("zz"), PAD, PAD]]
    assert guided(chain(torch.tensor([ids("ab")])), [made.begin()], [False])[1] is False


def test_smollm2_writes_json_as_json_dumps_does():
    """Characters of several tokens, escapes and recursion; names that are forced come as the tokenizer
    writes them."""
    node = {
        "type": "object",
        "properties": {"é": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    }
    node |= {"required": ["é", "next"], "additionalProperties": False}
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node}}
    smollm2 = load_target("smollm2", "bfloat16")
    walk = read_grammar(smollm2, "json_schema", schema, [2]).begin()
    value = {"é": "日本\n", "next": {"é": "", "next": None}}
    text = smollm2.text
    assert text.decode(walk.forced) == '{"é": '[: len(text.decode(walk.forced))]
    assert len(walk.forced) >= 3
    for token in text.ids(json.dumps(value, ensure_ascii=False)):
        assert walk.allowed[token]
        walk = walk.advance(token)
    assert walk.allowed.nonzero().tolist() == [[2]]


def test_a_text_that_the_tokenizer_writes_otherwise_is_kept_to():
    """One that composes accents, as Qwen's does, or has no token for a character: what was forced was no text
    of the grammar, and behind it anything could follow."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("ne", "m")
    target = HFTarget(tiny.reference("llama"), tokenizer, "normalised")
    how = {"max_new_tokens": 12, "eos_token_ids": tiny.EOS}
    for drafter in ("vanilla", "ngram", tiny.eagle(target)):
        made = generate(target, [1, 2, 3], drafter, regex="one[0-9]", **how)
        assert (made.text[:3], len(made.text), made.finish) == ("one", 4, "eos")
        with pytest.raises(DeadEnd, match="allows no token"):
            generate(target, [1, 2, 3], drafter, regex="a!b", **how)
    with pytest.raises(ValueError, match="it allows no text"):
        read_grammar(target, "regex", "!", [tiny.EOS])


def test_forced_tokens_that_cost_other_texts_more_are_left_out():
    """A pass as wide as one text's forced tokens, in which fifteen others stand idle."""
    made = grammar("regex", "a" + "b" * 40)
    one, _ = guided(chain(torch.tensor([ids("a")])), [made.begin()], [True])
    assert one.nodes == 41
    many = chain(torch.tensor([ids("a")] * 16))
    alone, added = guided(many, [made.begin(), *[None] * 15], [True] * 16)
    assert (alone.nodes, added) == (1, False)
    every, added = guided(many, [made.begin()] * 16, [True] * 16)
    assert (every.nodes, added) == (41, True)
    most, added = guided(many, [*[made.begin()] * 15, None], [True] * 16)
    assert (most.nodes, added) == (8, True)
