"""Predicted τ: an engine's ordinary steps over a recorded target. No pass of the model is made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampler
from slipstream.core.target import Target
from slipstream.core.tree import Tree
from slipstream.core.tree_spec import TreeSpec
from slipstream.core.verify import Law, coupled
from slipstream.engine.engine import Engine
from slipstream.engine.generate import generate
from slipstream.engine.policy import Policy
from slipstream.engine.request import Request
from slipstream.targets.recorded import RecordedTarget


def record(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new: int,
    taps: tuple[str, ...],
    batch: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
) -> RecordedTarget:
    """Record the target's answers of at most `new` tokens, made `batch` at once. Answers of one token, behind
    which nothing is drafted, are left out. Raises ValueError if no other is left."""
    answers = generate(
        target, prompts, "vanilla", max_new_tokens=new, temperature=temperature, batch=batch, seed=seed
    )
    answers = [answer for answer in answers if len(answer.tokens) > 1]
    if not answers:
        raise ValueError(
            "every prompt is answered by the end token at once: give prompts that the target answers"
        )
    texts = [(answer.prompt, answer.tokens) for answer in answers]
    return RecordedTarget(target, texts, taps, [answer.sampling for answer in answers])


@dataclass(frozen=True)
class Prediction:
    """Acceptance over all steps."""

    committed: Int[Tensor, "steps B"]  # tokens of each, the target's own included; 0 after the text's end
    depth: int  # of the tree

    @property
    def rounds(self) -> int:
        """Target passes."""
        return int((self.committed > 0).sum())

    @property
    def tau(self) -> float:
        """Tokens a target pass."""
        return int(self.committed.sum()) / self.rounds

    @property
    def acceptance(self) -> list[float]:
        """By depth d: the share of the steps that accept d drafted tokens or more."""
        return [int((self.committed > d).sum()) / self.rounds for d in range(1, self.depth + 1)]


def steps(
    drafter: Drafter,
    recorded: RecordedTarget,
    law: Law | None,
    spec: TreeSpec | None = None,
    policy: Policy | None = None,
) -> Iterator[Engine]:
    """An engine after each step of all recorded texts, which end with their last token. Without a law the
    recorded target decodes them anew."""
    target, law = (recorded, law) if law else (recorded.target, coupled)
    capacity, specs = recorded.tokens.shape[1], (*drafter.candidate_trees, *filter(None, [spec]))
    requests, ends = list(map(Request, _prompts(recorded), recorded.sampling)), recorded.lengths.tolist()
    engine = Engine(target, drafter, law, len(requests), capacity, specs, policy)
    engine.admit(*requests)
    while True:
        engine.cancel(*(one for one in engine.running if len(one.sequence) >= ends[one.number]))
        engine.free()
        if not engine.running:
            return
        engine.step(spec=spec)
        yield engine


def one_by_one(
    tree: Tree, node: Tensor, logits: Tensor, at: Tensor, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """The recorded text's law, but no guess is accepted, so that the next step begins one token later."""
    child, token = RecordedTarget.law(tree, node, logits, at, sampler)
    return torch.full_like(child, -1), token


def predict(drafter: Drafter, recorded: RecordedTarget, spec: TreeSpec | None = None) -> Prediction:
    """τ of a drafter along the record, with its own tree or another `spec`, as decoding counts it: without
    tokens past an answer's end. Raises ValueError for probes and for sampled children, which `decoded`
    judges."""
    if drafter.probes is not None:
        raise ValueError(
            "this drafter guesses in the target's own passes, which a record does not have: judge it by "
            "decoding (bench)"
        )
    if drafter.law != "coupled" and any(row.temperature for row in recorded.sampling):
        raise ValueError(
            "proposal=sampled accepts Σ min(p, q) of its guesses, and a known text matches Σ p·q of them: "
            "judge it by decoding (bench), or predict proposal=top-k or noise"
        )
    committed, ends = [list[int]() for _ in recorded.tokens], recorded.lengths.tolist()
    for engine in steps(drafter, recorded, recorded.law, spec):
        for request in engine.running:
            past = len(request.sequence) - ends[request.number]
            committed[request.number].append(len(request.committed) - max(past, 0))
    return _prediction(committed, drafter.depth if spec is None else spec.depth)


def decoded(drafter: Drafter, recorded: RecordedTarget) -> Prediction:
    """The same by decoding the record's prompts anew."""
    prompts, new = _prompts(recorded), int((recorded.lengths - recorded.prompts).max())
    first = recorded.sampling[0]
    answers = generate(
        recorded.target, prompts, drafter, max_new_tokens=new, temperature=first.temperature, seed=first.seed
    )
    return _prediction([[step.kept for step in answer.rounds] for answer in answers], drafter.depth)


def _prompts(recorded: RecordedTarget) -> list[list[int]]:
    lines = zip(recorded.tokens.tolist(), recorded.prompts.tolist(), strict=True)
    return [tokens[:length] for tokens, length in lines]


def _prediction(committed: Sequence[Sequence[int]], depth: int) -> Prediction:
    return Prediction(pad_sequence([torch.tensor(steps, dtype=torch.long) for steps in committed]), depth)
