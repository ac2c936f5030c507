"""Lookahead against the paper's two branches, written as lists."""

import io
import json

import pytest
import torch

import tiny
from slipstream.drafters.lookahead import Lookahead
from slipstream.engine.generate import generate

PROMPTS = tiny.prompts(9, 4, 14)
W, N, G = 3, 4, 2


def naive(prompt, answer, trace, target):
    """Levels and n-grams of every round, from the text and the target alone."""
    text, pool = list(prompt), [tuple(prompt[i : i + N]) for i in range(len(prompt) - N + 1)]
    cells = [text[i * 7919 % len(text)] for i in range((N - 1) * W)]
    levels = [cells[i * W : (i + 1) * W] for i in range(N - 1)]
    for line in map(json.loads, trace.getvalue().splitlines()):
        root = answer[len(text) - len(prompt)]
        guesses = []
        for gram in reversed(pool):
            if gram[0] == root and gram[1:] not in guesses:
                guesses.append(gram[1:])
        yield line, levels, guesses[:G]
        said = []
        for j in range(W):
            seen = [*text, root, *levels[0][: j + 1], *(levels[i][j] for i in range(1, N - 1))]
            state = target.features([seen], ("final",))[0, -1]
            said.append(int((target.lm_head().weight @ state).argmax()))
        pool += [(*(levels[i][j] for i in range(N - 1)), said[j]) for j in range(W)]
        levels = [*levels[1:], said]
        for token in [root, *(line["tokens"][slot] for slot in line["accepted"][1:])]:
            text.append(token)
            pool.append(tuple(text[-N:]))


@pytest.mark.parametrize("row", range(3))
def test_every_round_drafts_its_columns_and_the_latest_ngrams(row):
    """A column that goes on from another's token, levels shifted the wrong way, n-grams of another row, a
    stale pool."""
    target, trace = tiny.target("llama"), io.StringIO()
    prompt, drafted = PROMPTS[row], 0
    answer = generate(target, prompt, Lookahead(W, N, G), max_new_tokens=24, temperature=0.0, trace=trace)
    for line, levels, guesses in naive(prompt, answer.tokens, trace, target):
        tokens, parents = line["tokens"], line["parents"]

        def path(slot, tokens=tokens, parents=parents):
            return [*path(parents[slot]), tokens[slot]] if slot else []

        paths = [path(slot) for slot in range(1, len(tokens))]
        for j in range(W):
            assert [*levels[0][: j + 1], *(levels[i][j] for i in range(1, N - 1))] in paths
        branches = [
            paths[slot - 1] for slot in range(len(tokens) - G * (N - 1), len(tokens)) if tokens[slot] >= 0
        ]
        assert [tuple(branch) for branch in branches if len(branch) == N - 1] == guesses
        drafted += len(guesses)
    assert drafted


def test_numbers_that_leave_nothing_to_draft_are_refused():
    with pytest.raises(ValueError, match="ngram >= 2"):
        Lookahead(ngram=1)
    assert Lookahead(window=1, ngram=2, guesses=1).rows == 3
    assert torch.equal(
        Lookahead(window=2, ngram=3, guesses=1)._parents[0], torch.tensor([0, 0, 1, 1, 2, 0, 5])
    )
