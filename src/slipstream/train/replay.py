"""Predicted τ: drafts along texts whose features are known, held against the text itself. No pass of the target.

Along the target's own greedy text this is what decoding would do: the walk, the drafts and their cache are the same, only
the target's answers come from a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.cache import KVCache
from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.span import Output, Span, commit
from slipstream.core.tree import Tree
from slipstream.core.verify import child_with, verify
from slipstream.decode.generate import generate
from slipstream.targets import Target
from slipstream.train.data import Example


@dataclass(frozen=True)
class Record:
    """Greedy texts of the target.

    Attributes:
        tokens: prompt and answer, right-padded with −1, which no draft matches.
        prompts, lengths: tokens of each prompt, and of prompt and answer.
        features: of every token; meaningless in the padding.
    """

    tokens: Int[Tensor, "B S"]
    prompts: Int[Tensor, " B"]
    lengths: Int[Tensor, " B"]
    features: Float[Tensor, "B S F"]

    @classmethod
    def of(cls, target: Target, examples: Sequence[Example], new: int, taps: tuple[str, ...], batch: int = 16) -> "Record":
        """Let the target answer the examples' first questions, at T = 0, with at most `new` tokens."""
        asked = [example.tokens[: max(example.loss.index(True), 1)] for example in examples]
        answered = []
        for i in range(0, len(asked), batch):
            answered += generate(target, asked[i : i + batch], "vanilla", max_new_tokens=new, temperature=0.0)
        rows = [answer.prompt + answer.tokens for answer in answered if len(answer.tokens) > 1]
        prompts = [len(answer.prompt) for answer in answered if len(answer.tokens) > 1]
        if not rows:
            raise ValueError(
                "every held-out prompt is answered by the end token at once: give prompts that the target answers"
            )
        width = max(map(len, rows)) + 1  # past the longest, too, nothing matches
        features = torch.cat(
            [_padded(target.features(rows[i : i + batch], taps), width) for i in range(0, len(rows), batch)]
        )
        tokens = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        return cls(tokens.to(target.device), torch.tensor(prompts).to(target.device), lengths.to(target.device), features)


@dataclass(frozen=True)
class Prediction:
    """Acceptance over all rounds.

    Attributes:
        tau: tokens a target pass.
        acceptance: by depth d: the share of the rounds that accept d drafted tokens or more.
        rounds: target passes.
    """

    tau: float
    acceptance: list[float]
    rounds: int


@torch.inference_mode()
def predict(drafter: Drafter, record: Record) -> Prediction:
    """τ of a drafter along the record, counted as decoding counts it: tokens past an answer's end are none."""
    B = len(record.tokens)
    rows = torch.arange(B, device=record.tokens.device)[:, None]
    sampler = Sampler([Sampling()] * B, [[]] * B, 1, record.tokens.device)
    cache = KVCache(0, B, 2 * record.tokens.shape[1] + drafter.rows, record.tokens.device)
    state = drafter.start(B, cache.capacity, record.tokens.device)
    width = int(record.prompts.max())
    at = torch.arange(width, device=rows.device).expand(B, -1)
    cache.reserve(width)
    cache.keep(None, record.prompts)
    prompt = record.tokens.clamp(min=0)
    drafter.absorb(
        Span(
            prompt[:, :width],
            prompt[:, 1 : width + 1],
            0 * record.prompts,
            record.prompts,
            cache,
            record.features[rows, at],
        ),
        state,
    )
    accepted: list[Tensor] = []

    def known(tree: Tree, node: Tensor, logits: Tensor, position: Tensor, _: Sampler) -> tuple[Tensor, Tensor]:
        """The law of a text that is already written."""
        token = record.tokens.gather(1, position.clamp(max=record.tokens.shape[1] - 1)[:, None])[:, 0]
        return child_with(tree, node, token), token.clamp(min=0)

    while bool((live := cache.lengths + 1 < record.lengths).any()):
        cache.settle(cache.lengths.tolist())
        tree = drafter.propose(state, sampler)
        cache.reserve(tree.rows)
        position = (cache.lengths[:, None] + tree.layout().depths).clamp(max=record.tokens.shape[1] - 1)
        out = Output(record.features.new_zeros(B, tree.nodes, 1), record.features[rows, position.expand(B, -1)], 0.0)
        verdict = verify(tree, out.logits, cache.lengths, sampler, known)
        left = (record.lengths - cache.lengths - 1).clamp(min=0)
        accepted.append(torch.where(live, torch.minimum(verdict.count, left), 0))
        drafter.absorb(commit(tree, out, verdict, cache), state)
    counts = torch.stack(accepted).flatten()
    counts = counts[counts > 0]
    by_depth = [float((counts > d).float().mean()) for d in range(1, drafter.depth + 1)]
    return Prediction(float(counts.float().mean()), by_depth, len(counts))


def _padded(features: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(features, (0, 0, 0, width - features.shape[1]))
