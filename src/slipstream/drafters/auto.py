"""The drafter that chooses for itself: plain decoding, matches, or a head's tree, round by round.

`engine.policy` decides which of its candidate trees a round grows.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import final

import torch

from slipstream.core.device import is_host
from slipstream.core.drafter import Drafter, ScratchSlots, State
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span, beside, merged
from slipstream.core.target import Target
from slipstream.core.tree import Tree
from slipstream.core.tree_spec import PLAIN, TreeSpec
from slipstream.drafters.hybrid import Hybrid, HybridState
from slipstream.drafters.proposer import Proposer
from slipstream.drafters.store import find_drafter, read_rungs
from slipstream.drafters.suffix import Suffix
from slipstream.spec import Named, Spec

HEADS = ("fasteagle", "eagle", "eagle3", "medusa", "glide")  # the quickest first, of those that ship
MATCHES = (4, 8, 16)  # nodes of the trees of matches
SAMPLED = ", T > 0"  # ends the name of an auto that samples
BUCKETS = (2, 4, 8)  # tokens of the shortest match in each match bucket but the first
FEWEST = 64  # tokens of a text that a head begins with, if it has more in its reach
BEHIND = 32 * 2**20  # bytes of states that a head may lag behind: texts that it never drafts are not read
MANY = 64  # so many tokens, read at once, show what reading one costs


@dataclass
class AutoState(HybridState):
    """`head` has yet to read the spans `missed`, which have so many `columns` over all rows. Before it has
    read for the first time (`reads`) it knows nothing of any row, and begins with what is in its reach."""

    drafter: "Auto"
    missed: list[Span] = field(default_factory=list)
    columns: int = 0
    reads: bool = False

    @property
    def column_bytes(self) -> int:
        features = self.missed[-1].features if self.missed else None
        return 0 if features is None else features[0, 0].nbytes

    def set_missed(self, spans: list[Span]) -> None:
        self.missed, self.columns = spans, sum(span.tokens.numel() for span in spans)

    def flush(self) -> None:
        self.drafter.catch_up(self)

    def before_copies(self) -> None:
        if self.reads:  # otherwise no round has used the head yet
            self.flush()

    def select(self, order: list[int]) -> None:
        rows = torch.tensor(order, dtype=torch.long, device=self.root.device)
        self.set_missed([span.select(rows) for span in self.missed] if order else [])
        self.reads &= bool(order)
        super().select(order)

    def join(self, other: State) -> None:
        assert isinstance(other, AutoState)
        if len(self.root) and (self.reads or other.reads):
            self.flush()
            other.flush()
        elif other.missed:
            missed = merged(other.missed)
            self.set_missed([beside(merged(self.missed), missed) if self.missed else missed])
        self.reads |= other.reads
        super().join(other)


@final
class Auto(Drafter):
    """A policy chooses among a bare root, a match, and the head's trees with a match in them; without a head
    there are matches alone. Its trees are those that `tune` found, by default its `ladder`. In rounds without
    its tree the head does nothing: it reads what it missed when it drafts again."""

    def __init__(
        self,
        head: Proposer | None = None,
        name: str = "auto",
        remember: int = 0,
        tuned: Sequence[TreeSpec] = (),
    ) -> None:
        self.matches, self.hybrid, self.name = Suffix(max(MATCHES), remember=remember), None, name
        self.candidate_trees = (PLAIN, *(TreeSpec(f"matches-{n}", (), n - 1, n, 0, 0) for n in MATCHES))
        self.rows, self.depth, self.remembers = self.matches.rows, self.matches.depth, self.matches.remembers
        if head is not None:
            self.tuned = tuple(tuned)
            trees = self.tuned or tuple(map(TreeSpec.parse, head.ladder))
            head.grow_as(trees[-1], head.proposal)
            self.hybrid = Hybrid(head, self.matches)
            self.candidate_trees += trees
            self.taps, self.uses_target_noise = head.taps, head.uses_target_noise
            self.probes, self.memory = head.probes, head.memory
            self.rows = max(self.rows, self.hybrid.rows)

    @classmethod
    def named(
        cls,
        target: Target,
        head: str | None = None,
        remember: int = 0,
        temperature: float = 0.0,
        texts: int = 1,
    ) -> "Auto":
        """With the weights that ship for the target, or a head by name or directory, and with the trees that
        `tune` found for it. Raises ValueError for a head that grows no trees or names one, and as
        `load_drafter` does."""
        from slipstream.drafters import load_drafter, tuned_home

        if (head := head or shipped(target)) is None:
            return cls(remember=remember)
        drafter, options = load_drafter(head, target, temperature, texts), Spec.parse(head).options
        if not isinstance(drafter, Proposer):
            wrong = "has no trees to choose among: take a head such as eagle or fasteagle, or its directory"
            raise ValueError(f"drafter 'auto': {head!r} {wrong}")
        if "tree" in options:
            wrong = "names a tree, and auto chooses its own: leave it out, or take hybrid or the head alone"
            raise ValueError(f"drafter 'auto': {head!r} {wrong}")
        trees = read_rungs(tuned_home(head, target), target.place, temperature, texts)
        tuned = trees and drafter.law == "coupled"  # `tune` chose the proposal, too
        if not (tuned or "proposal" in options):
            drafter.grow_as("chain-1", "noise" if temperature else "top-k")
        return cls(drafter, f"auto:head={head}{SAMPLED * bool(temperature)}", remember, trees)

    def start(self, batch: int, device: torch.device) -> AutoState:
        root = torch.zeros(batch, dtype=torch.long, device=device)
        head = State(root) if self.hybrid is None else self.hybrid.head.start(batch, device)
        return AutoState(root, head, self.matches.start(batch, device), self)

    def scratch_slots(self, spec: TreeSpec | None = None) -> ScratchSlots:
        if spec is None:
            return ScratchSlots.largest(map(self.scratch_slots, self.candidate_trees))
        drafter = self.hybrid if self.hybrid is not None and spec.children else self.matches
        return drafter.scratch_slots(spec)

    def update(self, span: Span, state: AutoState) -> None:
        self.matches.update(span, state.matches)
        state.root = span.root
        if self.hybrid is not None:
            state.missed.append(replace(span, tree=None, path=None, logits=None))
            state.columns += span.tokens.numel()
            if state.columns > 2 * self._columns_to_read(state):
                self._forget_out_of_reach(state)
            waits = is_host(span.root)  # what is captured cannot wait, nor can what masks have guessed
            if not waits or self.probes is not None or state.columns * state.column_bytes >= BEHIND:
                self.catch_up(state)

    def _columns_to_read(self, state: AutoState) -> float:
        """Columns that the head must read of what it missed: before its first tree those in its reach, which
        texts share, and no more than half of what it may lag behind."""
        reach = None if state.reads or self.hybrid is None else self.hybrid.head.reach
        if reach is None:
            return torch.inf
        texts = max(1, len(state.root))
        most = BEHIND // (2 * texts * max(1, state.column_bytes))
        return float(texts * max(1, min(most, max(reach // texts, min(reach, FEWEST)))))

    def _forget_out_of_reach(self, state: AutoState) -> None:
        if state.columns > (most := self._columns_to_read(state)):
            state.set_missed([merged(state.missed).latest(int(most) // len(state.root))])

    @torch.inference_mode()
    def catch_up(self, state: AutoState) -> None:
        """Let the head read what it missed, in its reach."""
        self._forget_out_of_reach(state)
        if state.missed and self.hybrid is not None:
            began, missed = perf_counter(), merged(state.missed)
            self.hybrid.head.update(missed, state.head)
            if missed.tokens.numel() >= MANY:
                self.catch_up_per_token = (perf_counter() - began) / missed.tokens.numel()
            state.reads = True
        state.set_missed([])

    def catch_up_cost(self, state: AutoState) -> float:
        return self.catch_up_per_token * min(state.columns, self._columns_to_read(state))

    def match_buckets(self, state: AutoState) -> list[int]:
        """How many of `BUCKETS` the longest match reaches."""
        return state.matches.matched(BUCKETS) if is_host(state.root) else super().match_buckets(state)

    def propose(self, state: AutoState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        if self.hybrid is None or (spec is not None and not spec.children):
            return self.matches.propose(state.matches, sampler, spec)
        self.catch_up(state)
        return self.hybrid.propose(state, sampler, spec)


def tuned_head(spec: Named, target: Target) -> Spec:
    """The drafter whose trees are tuned: of auto its head, any other itself. Raises ValueError for auto
    without a head."""
    spec = Spec.parse(spec)
    if spec.name != "auto":
        return spec
    if head := spec.options.get("head") or shipped(target):
        return Spec.parse(head)
    raise ValueError("no weights ship for this target, so auto has no head to tune: name one, auto:head=DIR")


def shipped(target: Target) -> str | None:
    """The method whose weights ship for the target: the first of `HEADS`, if there are several."""
    for name in HEADS:
        with suppress(ValueError):  # none of this method
            find_drafter(name, target)
            return name
    return None
