"""Traces: what a line says of its round, and files that are none."""

import io
import json

import pytest
import torch

import tiny
from slipstream.core.tree import PAD
from slipstream.engine.generate import generate
from slipstream.engine.trace import read_trace

PROMPTS = tiny.prompts(9, 4)


def traced(drafter, prompts=PROMPTS, **how):
    target, trace = tiny.target("llama"), io.StringIO()
    made = generate(target, prompts, drafter(target), trace=trace, max_new_tokens=14, **how)
    return target, made, trace.getvalue()


def grown(drafter, prompts):
    """By row: the nodes of each round's tree, each as the tokens that lead to it."""
    _, _, text = traced(drafter, prompts, temperature=0.0, eos_token_ids=())
    rows: dict[int, list[set[tuple[int, ...]]]] = {}
    for line in map(json.loads, text.splitlines()):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in list(zip(line["tokens"], line["parents"], strict=True))[1:]:
            paths.append((*paths[parent], token))
        rows.setdefault(line["row"], []).append({path for path in paths if path and min(path) >= 0})
    return rows


@pytest.mark.parametrize(
    "drafter",
    [
        lambda target: tiny.Lookahead(3, 3, 2),
        tiny.medusa,
        lambda target: tiny.bita(target, hosts=2),
        tiny.eagle3,
        lambda target: tiny.draft_model(target, "dynamic-3x3x9"),
        tiny.glide,
        lambda target: tiny.Suffix(),
        lambda target: tiny.Hybrid(tiny.eagle(target, "dynamic-3x4x14"), tiny.Suffix(8, 4)),
    ],
    ids=["lookahead", "medusa", "bita", "eagle3", "draft-model", "glide", "suffix", "hybrid"],
)
def test_rows_of_a_batch_grow_the_trees_that_they_grow_alone(drafter):
    """Guesses from another row's text or states leave the answers as they are: less is accepted alone."""
    prompts = [prompt * 2 for prompt in tiny.prompts(9, 4, 14)]
    together = grown(drafter, prompts)
    for i, prompt in enumerate(prompts):
        assert grown(drafter, [prompt])[0] == together[i]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_p_is_the_targets_and_q_the_drafters(temperature):
    """Probabilities of a sibling, of another row, behind another node, or after the cuts of sampling."""
    target, made, text = traced(lambda target: tiny.eagle(target, "full-2x2"), temperature=temperature)
    checked = 0
    for answer, rounds in zip(made, read_trace("", text), strict=True):
        read = [*answer.prompt, answer.tokens[0]]
        for line in rounds:

            def path(slot, line=line):
                return [*path(line.parents[slot]), line.tokens[slot]] if slot else []

            assert (line.p[0], line.q[0]) == (None, None)
            for slot in range(1, len(line.tokens)):
                if line.tokens[slot] == PAD:
                    assert line.p[slot] is None
                    continue
                seen = torch.tensor([read + path(line.parents[slot])])
                law = target.model(seen).logits[0, -1].softmax(-1)
                assert line.p[slot] == pytest.approx(float(law[line.tokens[slot]]), rel=1e-3)
                checked += 1
            siblings = [
                q for q, above in zip(line.q, line.parents, strict=True) if above == 0 and q is not None
            ]
            assert 0 < sum(siblings) <= 1.001
            law = target.model(torch.tensor([read + path(line.accepted[-1])])).logits[0, -1].softmax(-1)
            assert line.next_p == pytest.approx(float(law[line.next]), rel=1e-3)
            read += [line.tokens[slot] for slot in line.accepted[1:]] + [line.next]
    assert checked > 20


@pytest.mark.parametrize("tree", ["fig9", "cape-3x8", "chain-2"])
def test_a_head_that_says_no_numbers_is_traced(tree):
    """A trace, or a stream of the server, that ended in an error of JSON, where an answer alone did not."""

    def damaged(target):
        made = tiny.eagle(target, tree)
        made.head.fc.weight.fill_(torch.nan)
        return made

    _, made, text = traced(damaged)
    assert [a.tokens for a in made] == [a.tokens for a in traced(lambda target: "vanilla")[1]]
    assert all(0 <= q <= 1 for rounds in read_trace("", text) for r in rounds for q in r.q if q is not None)


def test_a_line_tells_the_answers_text_and_time():
    """Pieces that are not the answer's text, tokens behind its end, seconds that are counted twice."""
    _, made, text = traced(lambda target: tiny.eagle(target, "chain-2"))
    answers = read_trace("", text)
    for answer, rounds in zip(made, answers, strict=True):
        assert len(rounds) == len(answer.rounds)
        assert [line.opening is not None for line in rounds] == [True] + [False] * (len(rounds) - 1)
        assert [len(line.pieces) for line in rounds] == [each.kept for each in answer.rounds]
        opening = rounds[0].opening
        assert opening.first.strip() or made[0].text == ""
    steps = {line.round: line.seconds for line in max(answers, key=len)}
    spent = sum(sum(each.values()) for each in steps.values()) + answers[0][0].opening.prefill
    assert 0 < spent <= made[0].seconds.total + 1e-3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda line: line.pop("p"), "p: Field required"),
        (lambda line: line.update(parents=[0, *line["parents"][1:-1], 99]), "does not stand before"),
        (lambda line: line.update(p=[]), "as many parents"),
        (lambda line: line.update(accepted=[0, 0]), "leaves the tree"),
        (lambda line: line.update(round=5), "rounds before it are missing"),
        (lambda line: line["opening"].update(schema=7), "schema 7"),
    ],
)
def test_another_file_is_refused_in_one_line(change, says):
    """A cycle among the parents, which the page would draw for ever; a trace cut at its beginning."""
    _, _, text = traced(lambda target: tiny.eagle(target, "chain-2"), prompts=PROMPTS[:1])
    first, *others = text.splitlines()
    line = json.loads(first)
    change(line)
    with pytest.raises(ValueError, match=says) as refused:
        read_trace("odd.jsonl", "\n".join([json.dumps(line), *others]))
    assert "trace odd.jsonl line 1" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_text_with_unicode_line_ends_is_read_back():
    """A trace that the page refused: U+2028 stands raw in it, and is no end of a line."""
    _, _, text = traced(lambda target: tiny.eagle(target, "chain-2"), prompts=PROMPTS[:1])
    line = json.loads(text.splitlines()[0])
    line["opening"]["text"] = "a\u2028b\u0085c"
    others = text.splitlines()[1:]
    made = read_trace("", "\n".join([json.dumps(line, ensure_ascii=False), *others, ""]))
    assert made[0][0].opening.text == "a\u2028b\u0085c"


def test_an_empty_trace_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        read_trace("odd.jsonl", "")
