"""Session: texts under way. Others join and leave at any round. No drafter is named here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial, wraps
from operator import add, sub
from time import perf_counter
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from slipstream.core.drafter import Drafter, ScratchSlots, State
from slipstream.core.grammar import guided, must_follow
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampler, Sampling
from slipstream.core.span import Span, commit
from slipstream.core.target import Target
from slipstream.core.tree import PAD, Probes, Tree, chain
from slipstream.core.tree_spec import PLAIN, TreeSpec
from slipstream.core.verify import Law, Verdict, coupled, verify
from slipstream.engine.cuda_graphs import Captured, Record, recorder, rounded
from slipstream.engine.policy import NO_GUESSES, Policy
from slipstream.engine.prefill import Reading, chunked
from slipstream.engine.prefix_cache import Prefixes

CHUNK = 512  # prompt tokens per prefill pass: bounds the mask, the activations and how long texts wait


P = ParamSpec("P")
R = TypeVar("R")


def _in_turn(method: Callable[Concatenate["Session", P], R]) -> Callable[Concatenate["Session", P], R]:
    """A method that holds its target's lock, in inference mode."""

    @wraps(method)
    def held(self: "Session", /, *args: P.args, **how: P.kwargs) -> R:
        with self.target.lock, torch.inference_mode():
            return method(self, *args, **how)

    return held


@dataclass
class Seconds:
    """Where time went. `host`: layout, masks, sampling, verification, compaction, bookkeeping."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(astuple(self))

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(*map(sub, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Committed:
    """What a round brought one text, or the pass of its prompt.

    Attributes:
        text: its number, counted from 0 in order of admission.
        tokens: the accepted ones, then the target's own.
        drafted: depth of the deepest guess; None for the pass of the prompt.
        finite: all scores that decided were finite; otherwise the tokens mean nothing.
        shared: tokens of its prompt that were known from another text, and not read.
    """

    text: int
    tokens: list[int]
    drafted: int | None
    finite: bool
    shared: int = 0


class Session:
    """Texts under way that share passes of the target: `admit` (or `begin` and `read`), `step`, `retire`.

    A text depends on its prompt and its sampling alone, not on the texts beside it. It takes a free row of
    caches that are allocated once. No pass reads free rows.

    Args:
        rows: texts that may be under way at once.
        capacity: tokens of the longest text, if known; caches that are too small grow by blocks.
        specs: trees that steps may ask for beside the drafter's own; the largest one has room, and the
            deepest one says how deep a parallel head drafts.
        policy: chooses the tree of a step that asks for none.
        keep: tokens of texts whose caches are kept, for prompts that begin as they did.

    Attributes:
        texts, lengths: of each row, the number of its text and the tokens that the target has read of it.
        plain: of each row, whether it is decoded without guesses, beside others that may have some.
        scratch_slots: those that its largest tree needs.
        seconds: where the time went so far.
        span: what the last round read, or the last chunk of prompts.
        reading: texts that join, while their prompts are read.
        unrounded: tokens of prompts, padding included, that texts under way have waited for since a round.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        law: Law = coupled,
        rows: int = 1,
        capacity: int = 0,
        specs: Sequence[TreeSpec] = (),
        policy: Policy | None = None,
        keep: int = 0,
    ) -> None:
        self.target, self.drafter, self.law, self.rows = target, drafter, law, rows
        self.policy = policy
        self.texts, self.lengths, self._admitted = list[int](), list[int](), 0
        self._said = list[list[int]]()  # of each row its tokens, the root included
        self._salts = list[int]()
        self._prefixes = Prefixes(keep)
        self._mark([])
        self.seconds = Seconds()
        self.span: Span | None = None
        self.reading: Reading | None = None
        self.unrounded = 0
        self._forced = False  # in the last round a grammar added tokens
        self._record = recorder(target) if law is coupled else None  # other laws look at what they drew
        self._captured: dict[TreeSpec | None, Captured] = {}
        self.sampler = Sampler([], [], target.vocab, target.device)
        # of all trees, before the drafter starts
        self.scratch_slots = ScratchSlots.largest(map(drafter.scratch_slots, (None, *specs)))
        self.cache, self.state = target.new_cache(rows, drafter.memory), drafter.start(rows, target.device)
        if capacity:
            slots = rounded(capacity) if self._record else capacity
            self.cache.storage.hold(slots + self.scratch_slots.target)
            for cache in self.state.caches:
                cache.storage.hold(slots + self.scratch_slots.drafter)
        self.cache.select([])
        self.state.select([])

    @property
    def capacities(self) -> list[int]:
        """Slots for a text in each of the caches."""
        return [cache.storage.capacity for cache in (self.cache, *self.state.caches)]

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        plain: Sequence[bool] = (),
        salts: Sequence[int] = (),
    ) -> list[Committed]:
        """`begin`, and `read` to the end."""
        self.begin(prompts, sampling, plain, salts)
        while not (made := self.read()):
            pass
        return made

    @_in_turn
    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        plain: Sequence[bool] = (),
        salts: Sequence[int] = (),
    ) -> None:
        """Let texts join: `read` reads their prompts, chunk by chunk, between which there may be rounds.

        Args:
            plain: texts, default none, that get no guesses.
            salts: of each text, in 64 bits, default 0. Kept caches and remembered answers serve texts of the
                same salt alone, so that none tells what is in another.

        Raises:
            ValueError: there are fewer free rows than prompts, or others are being read.
        """
        if self.reading is not None:
            raise ValueError("other prompts are being read, of one group at a time: read to their end first")
        if len(self.texts) + len(prompts) > self.rows:
            raise ValueError(
                f"{len(prompts)} texts cannot join {len(self.texts)}: this session has {self.rows} rows; "
                "retire others first"
            )
        lap, count, device = _stopwatch(), len(prompts), self.target.device
        cache, state = self.cache.window(count), self.drafter.start(count, device)
        salts = list(salts) or [0] * count
        state.set_salts(torch.tensor(salts, device=device))
        cache.texts += self._admitted
        state.share_storage(self.state)
        sampler = Sampler(sampling, prompts, self.target.vocab, device)
        held = self.capacities
        pairs = enumerate(zip(prompts, salts, strict=True))
        taken = [self._prefixes.take(prompt, salt, cache, state, i) for i, (prompt, salt) in pairs]
        if self.capacities != held:
            self._captured.clear()
        rest = [prompt[n:] for n, prompt in zip(taken, prompts, strict=True)]
        # With texts under way a chunk is one of all prompts together.
        chunks = chunked(rest, device, max(1, CHUNK // count) if self.texts else CHUNK)
        marks = list(plain) or [False] * count
        self.reading = Reading(self._admitted, prompts, taken, marks, salts, cache, state, sampler, chunks)
        self._admitted += count
        self.seconds.prefill += lap()

    def _keep(
        self,
        read: Mapping[int, Sequence[int]],
        salts: Sequence[int],
        sampler: Sampler,
        cache: KVCache,
        state: State,
    ) -> None:
        """Keep what was `read` in some rows, where there is room, unless it has numbers that are not
        finite."""
        finite = sampler.finite.tolist() if self._prefixes.most else []
        for row, tokens in read.items():
            if finite and finite[row]:
                with suppress(MemoryError, torch.OutOfMemoryError):
                    self._prefixes.put(list(tokens), salts[row], cache, state, row)

    @property
    def due(self) -> bool:
        """Whether a round is due: texts under way have waited for a chunk of tokens of prompts."""
        return self.unrounded >= CHUNK

    @_in_turn
    def read(self) -> list[Committed]:
        """Read a chunk of the prompts under way. Returns nothing before the last, and then the first token of
        each text, its first root."""
        assert self.reading is not None, "no prompts are being read: begin comes first"
        lap, before, new = _stopwatch(), self.capacities, self.reading
        tokens, nexts, count, last = next(new.chunks)
        self.unrounded += tokens.numel() if self.texts else 0
        try:
            span = self._chunk(new, tokens, nexts, count, last)
        except BaseException:
            self.reading = None  # others may be read
            raise
        if self.capacities != before:  # rounds were captured over memory that is given up
            self._captured.clear()
        if not last:
            self.seconds.prefill += lap()
            return []
        self.span, self.reading = span, None
        self._keep(dict(enumerate(new.prompts)), new.salts, new.sampler, new.cache, new.state)
        self.cache.join(new.cache)
        self.state.join(new.state)
        self.sampler = self.sampler.join(new.sampler)
        self._captured.clear()
        numbers = range(new.first, new.first + len(new.prompts))
        self.texts += numbers
        self.lengths += map(len, new.prompts)
        self._salts += new.salts
        self._mark([*self.plain, *new.plain])
        self.seconds.prefill += lap()
        firsts = torch.stack([span.root, new.sampler.finite], 1).tolist()
        self.seconds.host += lap()
        self._said += [[*prompt, first] for prompt, (first, _) in zip(new.prompts, firsts, strict=True)]
        news = zip(numbers, firsts, new.taken, strict=True)
        return [Committed(text, [first], None, bool(finite), n) for text, (first, finite), n in news]

    def _chunk(self, new: Reading, tokens: Tensor, nexts: Tensor, count: Tensor, last: bool) -> Span:
        """Read a chunk. The last one's span has the tokens that the law drew."""
        rows = (count - 1)[:, None]
        vectors = self.drafter.probes if last else None
        probes = None if vectors is None else Probes(vectors, rows)
        tree = Tree(tokens, None, tokens.shape[1] - 1, probes=probes)
        start = new.cache.lengths
        out = self.target(tree, new.cache, self.drafter.taps, rows=rows if last else rows[:, :0])
        path = torch.minimum(torch.arange(tree.nodes, device=rows.device), rows.clamp(min=0))
        if last:
            bare = chain(tokens.gather(1, rows))
            _, nexts = self.law(bare, 0 * count, out.logits[:, 0], start + count, new.sampler)
        span = commit(tree, out, Verdict(path, count, nexts), new.cache)
        self.drafter.update(span, new.state)
        return span

    @_in_turn
    def step(self, limit: int | None = None, spec: TreeSpec | None = None) -> list[Committed]:
        """One round for every text, with guesses at most `limit` deep. Returns what it brought, in the order
        of the rows. `spec` is the round's tree, by default the policy's or the drafter's own; `PLAIN` is
        plain decoding."""
        self.unrounded = 0
        if spec is None and self.policy is not None and self.policy.rests(self.texts):
            spec = PLAIN
        if spec is None and self.policy is not None:
            whole = _stopwatch()
            buckets = self.drafter.match_buckets(self.state)
            quiet = [plain or forced for plain, forced in zip(self.plain, self._must_follow(), strict=True)]
            buckets = [NO_GUESSES if each else bucket for bucket, each in zip(buckets, quiet, strict=True)]
            catch_up = self.drafter.catch_up_cost(self.state)
            made = self.step(limit, self.policy.choose(self.texts, buckets, catch_up))
            drafted = [bool(each.drafted) for each in made]
            if not self._forced or len(made) > 1:  # else it was not the drafter's doing
                self.policy.learn([len(each.tokens) for each in made], whole(), drafted)
            return made
        lap = _stopwatch()
        room = self.target.window - 1 - max(self.lengths)
        limit = room if limit is None else min(limit, room)
        assert room >= 0, "a text has reached the end of the target's window"
        self.cache.flush(self.lengths)
        depth = max(self.drafter.depth, spec.depth if spec else 0)
        if self._record is not None and not self.sampler.remembers and limit >= depth:
            self.span = self._replayed(self._record, spec, depth)
        else:
            tree = self._propose(spec).clip(limit)
            self.seconds.draft += lap()
            self.span = self._check(tree)
        lap()
        made = self._read(self.span)
        self.seconds.host += lap()
        return made

    def _must_follow(self) -> list[bool]:
        """Which of several texts go on as their grammars say, whatever is guessed. Guesses for a single text
        may reach further than that."""
        if len(self.texts) == 1 or not any(self.sampler.grammar_states):
            return [False] * len(self.texts)
        return [bool(tokens) for tokens in must_follow(self.sampler.grammar_states, self.state.root.tolist())]

    def _mark(self, plain: list[bool]) -> None:
        """Rounds read the marks as a tensor, which must be there before they are captured."""
        self.plain = plain
        self._plain = torch.tensor(plain, dtype=torch.bool, device=self.target.device)[:, None]

    def _propose(self, spec: TreeSpec | None) -> Tree:
        if all(self.plain) or (spec is not None and spec.depth == 0):
            tree = chain(self.state.root[:, None])
        else:
            tree = self.drafter.propose(self.state, self.sampler, spec)
            if any(self.plain):
                guesses = torch.arange(tree.nodes, device=tree.tokens.device) > 0
                tree = replace(tree, tokens=tree.tokens.masked_fill(self._plain & guesses, PAD))
        forces = [self.drafter.depth > 0 and not plain for plain in self.plain]  # plain decoding stays plain
        tree, self._forced = guided(tree, self.sampler.grammar_states, forces)
        return tree

    def _check(self, tree: Tree) -> Span:
        lap = _stopwatch()
        out = self.target(tree, self.cache, self.drafter.taps)
        verdict = verify(tree, out.logits, self.cache.lengths, self.sampler, self.law)
        span = commit(tree, out, verdict, self.cache)
        self.seconds.verify += out.seconds
        self.seconds.host += lap() - out.seconds
        self.drafter.update(span, self.state)
        self.seconds.draft += lap()
        return span

    def _replayed(self, record: Record, spec: TreeSpec | None, depth: int) -> Span:
        """A round by capture. It cannot be split into parts; all its time is booked as verify."""
        lap, before = _stopwatch(), replace(self.seconds)
        if spec not in self._captured:
            propose = partial(self._propose, spec)
            self._captured[spec] = Captured(propose, self._check, self.cache, self.state, depth, record)
        span: Span = self._captured[spec].step()
        span.count.tolist()  # wait for it
        self.seconds = replace(before, verify=before.verify + lap())
        return span

    def _read(self, span: Span) -> list[Committed]:
        """The round's one copy to the host: counts, drafted depths, soundness and tokens."""
        assert span.tree is not None
        depths = replace(span.tree, probes=None).layout().depths
        drafted = depths.where(span.tree.tokens >= 0, 0).amax(1)
        figures = torch.stack([span.count, drafted, self.sampler.finite], 1)
        made = []
        for row, (count, deepest, finite, *tokens) in enumerate(torch.cat([figures, span.nexts], 1).tolist()):
            self.lengths[row] += count
            self._said[row] += tokens[:count]
            made.append(Committed(self.texts[row], tokens[:count], deepest, bool(finite)))
        return made

    @_in_turn
    def retire(self, texts: Iterable[int]) -> None:
        """Let texts go, by their numbers. The last rows move into their rows."""
        gone = {self.texts.index(text) for text in texts}
        if not gone:
            return
        lap = _stopwatch()
        left = len(self.texts) - len(gone)
        movers = iter([row for row in range(left, len(self.texts)) if row not in gone])
        order = [next(movers) if row in gone else row for row in range(left)]
        self.cache.flush(self.lengths)
        read = {row: self._said[row][: self.lengths[row]] for row in sorted(gone)}
        self._keep(read, self._salts, self.sampler, self.cache, self.state)
        if non_finite := [row for row, finite in enumerate(self.sampler.finite.tolist()) if not finite]:
            for cache in (self.cache, *self.state.caches):
                cache.wipe(non_finite)
        self.cache.select(order)
        self.state.select(order)
        self.sampler = self.sampler.select(order)
        self._captured.clear()
        self.texts, self.lengths = ([each[row] for row in order] for each in (self.texts, self.lengths))
        self._said, self._salts = [self._said[row] for row in order], [self._salts[row] for row in order]
        self._mark([self.plain[row] for row in order])
        self.seconds.host += lap()


def _stopwatch() -> Callable[[], float]:
    """Gives the seconds since its last call."""
    last = perf_counter()

    def lap() -> float:
        nonlocal last
        before, last = last, perf_counter()
        return last - before

    return lap
