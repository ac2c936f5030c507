"""The round: propose, check, keep, absorb. No drafter is named here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from jaxtyping import Int
from torch import Tensor

from slipstream.core.cache import KVCache
from slipstream.core.drafter import Drafter, State
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span, commit
from slipstream.core.tree import Tree
from slipstream.core.verify import Law, Verdict, coupled, verify
from slipstream.decode.capture import Captured, Record, recorder, rounded
from slipstream.targets.hf import Target

CHUNK = 512  # prompt tokens per prefill pass: bounds the mask and the activations


@dataclass
class Seconds:
    """Where the time of a run went. Host: layout, masks, sampling, verification, compaction, bookkeeping."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.prefill + self.draft + self.verify + self.host

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.prefill + other.prefill,
            self.draft + other.draft,
            self.verify + other.verify,
            self.host + other.host,
        )


@dataclass
class Decoder:
    """B rows under way: the target, the drafter, and all that changes from round to round."""

    target: Target
    drafter: Drafter
    cache: KVCache
    state: State
    sampler: Sampler
    law: Law
    seconds: Seconds
    record: Record | None = None  # captures rounds, where they can be
    _captured: Captured | None = None

    @classmethod
    def start(
        cls, target: Target, drafter: Drafter, sampler: Sampler, capacity: int, law: Law = coupled
    ) -> "Decoder":
        """Room for `capacity` tokens a row beside the rows of a round."""
        record = (
            recorder(target) if law is coupled and not sampler.remembers else None
        )  # others look at what they drew
        capacity = rounded(capacity) if record else capacity
        cache = target.new_cache(len(sampler), capacity + drafter.rows, drafter.memory)
        state = drafter.start(len(sampler), capacity + drafter.rows, target.device)
        return cls(target, drafter, cache, state, sampler, law, Seconds(), record)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Span:
        """Read the prompts in chunks and draw each row's first token, which is the root of its first
        round."""
        began = perf_counter()
        for tokens, nexts, count, last in _chunks(prompts, self.target.device):
            rows = (count - 1)[:, None]
            probes = self.drafter.probes if last else None
            tree = Tree(
                tokens, None, tokens.shape[1] - 1, probes=probes, hosts=None if probes is None else rows
            )
            start = self.cache.lengths
            out = self.target(tree, self.cache, self.drafter.taps, rows=rows if last else rows[:, :0])
            path = torch.minimum(torch.arange(tree.nodes, device=rows.device), rows.clamp(min=0))
            if last:
                nexts = self.sampler.draw(self.sampler.scores(out.logits[:, 0]), start + count)
            span = commit(tree, out, Verdict(path, count, nexts), self.cache)
            self.drafter.absorb(span, self.state)
        self.seconds.prefill += perf_counter() - began
        return span

    def step(self, limit: int) -> Span:
        """One round for every row, with guesses at most `limit` deep."""
        began = perf_counter()
        if self.record is not None and limit >= self.drafter.depth:
            return self._replay(self.record)
        tree = self.drafter.propose(self.state, self.sampler).clip(limit)
        self.seconds.draft += perf_counter() - began
        return self._check(tree)

    def _check(self, tree: Tree) -> Span:
        """The target reads the tree, what agrees is kept, and the drafter absorbs it."""
        began = perf_counter()
        out = self.target(tree, self.cache, self.drafter.taps)
        verdict = verify(tree, out.logits, self.cache.lengths, self.sampler, self.law)
        span = commit(tree, out, verdict, self.cache)
        committed = perf_counter()
        self.drafter.absorb(span, self.state)
        ended = perf_counter()
        self.seconds.draft += ended - committed
        self.seconds.verify += out.seconds
        self.seconds.host += (committed - began) - out.seconds
        return span

    def _replay(self, record: Record) -> Span:
        """The same without a limit, captured. It is not told apart where its time goes: all counts as
        verification."""
        began, before = perf_counter(), replace(self.seconds)
        if self._captured is None:
            propose = partial(self.drafter.propose, self.state, self.sampler)
            self._captured = Captured(
                propose, self._check, self.cache, self.state, self.drafter.depth, record
            )
        span: Span = self._captured.step()
        span.count.tolist()  # wait for it
        self.seconds = replace(before, verify=before.verify + perf_counter() - began)
        return span

    def select(self, rows: list[int]) -> None:
        """Go on with some of the rows."""
        self.cache, self.state = self.cache.select(rows), self.state.select(rows)
        self.sampler, self._captured = self.sampler.select(rows), None


def _chunks(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> Iterator[tuple[Int[Tensor, "B T"], Int[Tensor, " B"], Int[Tensor, " B"], bool]]:
    """(tokens, next token, count, last?) per chunk. Chunks are cut from the end, so that all rows end in the
    last one and a shorter prompt has no tokens in the first ones: nothing has to tell a finished row from an
    unfinished one."""
    longest = max(map(len, prompts))
    first = longest % CHUNK or CHUNK
    for end in range(first, longest + 1, CHUNK):
        start = max(0, end - CHUNK)
        rows = []
        for prompt in prompts:
            shift = longest - len(prompt)
            rows.append(list(prompt[max(0, start - shift) : max(0, end - shift)]))
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        nexts = [prompt[max(0, end - longest + len(prompt))] if end < longest else 0 for prompt in prompts]
        yield (
            tokens,
            torch.tensor(nexts, device=device),
            torch.tensor(list(map(len, rows)), device=device),
            end == longest,
        )
