"""Engine: requests share passes of the target, and join and leave at any step. No drafter is named here."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial, wraps
from itertools import islice
from operator import add, sub
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.core.drafter import Drafter, ScratchSlots
from slipstream.core.grammar import check_onward, guided, must_follow
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span, commit
from slipstream.core.target import Target
from slipstream.core.tree import PAD, Probes, Tree, chain
from slipstream.core.tree_spec import PLAIN, TreeSpec
from slipstream.core.verify import Law, Verdict, coupled, verify
from slipstream.engine.cuda_graphs import Captured, Record, recorder, rounded
from slipstream.engine.policy import NO_GUESSES, Policy
from slipstream.engine.prefill import Prefill, chunked, together
from slipstream.engine.prefix_cache import PrefixCache
from slipstream.engine.request import Request

CHUNK = 512  # prompt tokens per prefill pass: bounds the mask, the activations and how long requests wait
Result = tuple[list[int], int | None, bool]  # what a pass brought a request: see `Request.take`
F = TypeVar("F", bound=Callable[..., Any])


def _in_turn(method: F) -> F:
    """A method that holds its target's lock, in inference mode."""

    @wraps(method)
    def held(self: "Engine", *args: Any, **how: Any) -> Any:
        with self.target.lock, torch.inference_mode():
            return method(self, *args, **how)

    return held  # type: ignore[return-value]


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


class NotFinite(ValueError):
    """Scores that decided are not finite."""


@dataclass(eq=False, repr=False)
class Engine:
    """Answers requests: `add` them and `step` while it is `busy`.

    A text depends on its prompt and its sampling alone, not on the texts beside it. It takes a free row of
    caches that are allocated once. No pass reads free rows.
    """

    target: Target
    drafter: Drafter
    law: Law = coupled
    rows: int = 1  # requests that may be under way at once
    capacity: int = 0  # tokens of the longest text, if known; caches that are too small grow by blocks
    specs: Sequence[TreeSpec] = ()  # trees that steps may ask for beside the drafter's own
    policy: Policy | None = None  # chooses the tree of a step that asks for none
    keep: int = 0  # tokens of texts whose caches are kept, for prompts that begin as they did

    def __post_init__(self) -> None:
        self.waiting = deque[Request]()  # requests without a row, the oldest first
        self.seconds = Seconds()  # where the time went so far
        self._admitted = 0
        self._record = recorder(self.target) if self.law is coupled else None  # others look at what they drew
        # Of all trees, which are checked.
        self.scratch_slots = ScratchSlots.largest(map(self.drafter.scratch_slots, (None, *self.specs)))
        self._start()

    def _start(self) -> None:
        target, drafter = self.target, self.drafter
        self.running = list[Request]()  # in the order of their rows; ended ones leave at the next step
        self.joining = list[Request]()  # whose prompts are being read
        self.prefill: Prefill | None = None  # None though requests are joining: that failed
        self.span: Span | None = None  # what the last step read, or the last chunk of prompts
        self.waited = 0  # tokens of prompts, padding included, that those under way waited for since a step
        self._forced = False  # in the last step a grammar added tokens
        self._captured: dict[TreeSpec | None, Captured] = {}
        self._prefixes = PrefixCache(self.keep)
        self.sampler = Sampler([], [], target.vocab, target.device)
        self.cache = target.new_cache(self.rows, drafter.memory)
        self.state = drafter.start(self.rows, target.device)
        if self.capacity:
            slots = rounded(self.capacity) if self._record else self.capacity
            self.cache.storage.hold(slots + self.scratch_slots.target)
            for cache in self.state.caches:
                cache.storage.hold(slots + self.scratch_slots.drafter)
        self.cache.select([])
        self.state.select([])
        self._regroup([])

    @property
    def numbers(self) -> list[int]:
        """Of the requests under way, by row."""
        return [request.number for request in self.running]

    @property
    def lengths(self) -> list[int]:
        """Tokens that the target has read of each row."""
        return [len(request.sequence) - 1 for request in self.running]

    @property
    def busy(self) -> bool:
        """Whether a request needs another step."""
        return bool(self.waiting or self.joining) or not all(request.done for request in self.running)

    @property
    def due(self) -> bool:
        """Whether a step is due: requests under way have waited for a chunk of tokens of prompts."""
        return self.waited >= CHUNK and bool(self.running)

    def add(self, *requests: Request) -> None:
        """Let requests wait for rows."""
        self.waiting += requests

    def cancel(self, *requests: Request) -> None:
        """Let requests go: those that wait at once, others at the next step."""
        for request in requests:
            request.cancelled = True
        self.waiting = deque(request for request in self.waiting if not request.cancelled)

    def step(self, limit: int | None = None, spec: TreeSpec | None = None) -> list[Request]:
        """One pass: the next chunk of prompts, or `decode`. Returns the requests that it brought tokens, by
        row of `span`. What fails one of them alone stands in its `error`."""
        self.free()
        if self.prefill is None and (count := self._fitting()):
            self.joining = [self.waiting.popleft() for _ in range(count)]
            self.begin(*self.joining)
        if self.prefill is not None and not self.due:
            return self.read()
        return self.decode(limit, spec) if self.running else []

    def _fitting(self) -> int:
        """How many of the oldest requests to read together now, in the free rows."""
        prompts, alone = list[list[int]](), any(request.alone for request in self.running)
        for request in islice(self.waiting, self.rows - len(self.running)):
            if alone or (request.alone and (prompts or self.running)):
                break
            prompts.append(request.prompt)
            alone = request.alone
        return together(prompts)

    def admit(self, *requests: Request) -> list[Request]:
        """`begin`, and `read` to the end."""
        self.begin(*requests)
        while not (joined := self.read()):
            pass
        return joined

    @_in_turn
    def begin(self, *requests: Request) -> None:
        """Let requests join at once: `read` reads their prompts, chunk by chunk, between which there may be
        steps. Raises ValueError if others are being read, or for fewer free rows than requests."""
        if self.prefill is not None:
            raise ValueError("other prompts are being read, of one group at a time: read to their end first")
        if len(self.running) + len(requests) > self.rows:
            raise ValueError(
                f"{len(requests)} texts cannot join {len(self.running)}: this engine has {self.rows} rows; "
                "cancel others first"
            )
        lap, count, device, self.joining = _stopwatch(), len(requests), self.target.device, list(requests)
        cache, state = self.cache.window(count), self.drafter.start(count, device)
        state.set_salts(torch.tensor([request.salt for request in requests], device=device))
        cache.texts += self._admitted
        state.share_storage(self.state)
        rows, prompts = [request.sampling for request in requests], [request.prompt for request in requests]
        sampler = Sampler(rows, prompts, self.target.vocab, device)
        for row, request in enumerate(requests):
            request.began = request.began or perf_counter()
            request.number, request.sequence = self._admitted + row, list(request.prompt)
            request.shared = self._prefixes.take(request.prompt, request.salt, cache, state, row)
        # With others under way a chunk is one of all prompts together.
        width = max(1, CHUNK // count) if self.running else CHUNK
        chunks = chunked([request.prompt[request.shared :] for request in requests], device, width)
        self.prefill = Prefill(requests, cache, state, sampler, chunks)
        self._admitted += count
        self.seconds.prefill += lap()

    @_in_turn
    def read(self) -> list[Request]:
        """Read a chunk of the prompts of those that join. Returns nothing before the last, and then these
        requests, which have their first token each."""
        assert self.prefill is not None, "no prompts are being read: begin comes first"
        lap, new = _stopwatch(), self.prefill
        try:
            tokens, nexts, count, last = next(new.chunks)
            self.waited += tokens.numel() if self.running else 0
            span = self._chunk(new, tokens, nexts, count, last)
        except BaseException:
            self.prefill = None  # others may be read
            raise
        if not last:
            self.seconds.prefill += lap()
            return []
        self.span, self.prefill = span, None
        for row, finite in enumerate(new.sampler.finite.tolist() if self.keep else ()):
            if finite:
                request = new.requests[row]
                self._prefixes.put(list(request.prompt), request.salt, new.cache, new.state, row)
        self.cache.join(new.cache)
        self.state.join(new.state)
        self.sampler = self.sampler.join(new.sampler)
        self._regroup([*self.running, *new.requests])
        self.joining = []
        self.seconds.prefill += lap()
        firsts = torch.stack([span.root, new.sampler.finite], 1).tolist()
        self.seconds.host += lap()
        return self._take(new.requests, [([token], None, bool(finite)) for token, finite in firsts])

    def _chunk(self, new: Prefill, tokens: Tensor, nexts: Tensor, count: Tensor, last: bool) -> Span:
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
    def decode(self, limit: int | None = None, spec: TreeSpec | None = None) -> list[Request]:
        """One step of all requests under way, with guesses at most `limit` deep. `spec` is its tree, by
        default the policy's or the drafter's own; `PLAIN` is plain decoding."""
        self.waited, policy = 0, self.policy if spec is None else None
        if policy is not None and policy.rests(self.numbers):
            spec, policy = PLAIN, None
        lap = _stopwatch()
        if policy is not None:
            rows = zip(self.running, self._must_follow(), self.drafter.match_buckets(self.state), strict=True)
            buckets = [NO_GUESSES if row.plain or forced else bucket for row, forced, bucket in rows]
            spec = policy.choose(self.numbers, buckets, self.drafter.catch_up_cost(self.state))
        results = self._step(limit, spec)
        if policy is not None and (not self._forced or len(results) > 1):  # else a grammar's doing
            drafted = [bool(depth) for _, depth, _ in results]
            policy.learn([len(tokens) for tokens, _, _ in results], lap(), drafted)
        return self._take(self.running, results)

    def _step(self, limit: int | None, spec: TreeSpec | None) -> list[Result]:
        lap, lengths = _stopwatch(), self.lengths
        room = self.target.window - 1 - max(lengths)
        limit = room if limit is None else min(limit, room)
        assert room >= 0, "a text has reached the end of the target's window"
        self.cache.flush(lengths)
        depth = max(self.drafter.depth, spec.depth if spec else 0)
        if self._record is not None and not self.sampler.remembers and limit >= depth:
            self.span = self._replayed(self._record, spec, depth)
        else:
            tree = self._propose(spec).clip(limit)
            self.seconds.draft += lap()
            self.span = self._check(tree)
        lap()
        results = _results(self.span, self.sampler)
        self.seconds.host += lap()
        return results

    def _must_follow(self) -> list[bool]:
        """Which of several texts go on as their grammars say; guesses for a single text may reach further."""
        if len(self.running) == 1 or not any(self.sampler.grammar_states):
            return [False] * len(self.running)
        return [bool(tokens) for tokens in must_follow(self.sampler.grammar_states, self.state.root.tolist())]

    def _regroup(self, running: list[Request]) -> None:
        """Other requests are under way. A captured step needs the tensor of those that get no guesses."""
        self.running = running
        plain, device = [request.plain for request in running], self.target.device
        self._plain = torch.tensor(plain, dtype=torch.bool, device=device)[:, None]
        self._captured.clear()

    def _propose(self, spec: TreeSpec | None) -> Tree:
        plain = [request.plain for request in self.running]
        if all(plain) or (spec is not None and spec.depth == 0):
            tree = chain(self.state.root[:, None])
        else:
            tree = self.drafter.propose(self.state, self.sampler, spec)
            if any(plain):
                guesses = torch.arange(tree.nodes, device=tree.tokens.device) > 0
                tree = replace(tree, tokens=tree.tokens.masked_fill(self._plain & guesses, PAD))
        forces = [self.drafter.depth > 0 and not one for one in plain]  # plain decoding stays plain
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
        """A step by capture. It cannot be split into parts; all its time is booked as verify."""
        lap, before = _stopwatch(), replace(self.seconds)
        if spec not in self._captured:
            propose = partial(self._propose, spec)
            self._captured[spec] = Captured(propose, self._check, self.cache, self.state, depth, record)
        span: Span = self._captured[spec].step()
        span.count.tolist()  # wait for it
        self.seconds = replace(before, verify=before.verify + lap())
        return span

    def _take(self, requests: Sequence[Request], results: Iterable[Result]) -> list[Request]:
        """Let the requests of the last rows take what a pass brought. What fails here fails one of them
        alone, such as a dead end that the next pass would meet."""
        began, walks = perf_counter(), self.sampler.grammar_states[-len(requests) :]
        for request, walk, result in zip(requests, walks, results, strict=True):
            try:
                request.take(*result)
                if not request.done:
                    check_onward(walk, request.committed[-1])
            except Exception as error:
                request.error = error
        self.seconds.host += perf_counter() - began
        return list(requests)

    def check(self, requests: Iterable[Request]) -> None:
        """Raise what the last pass of these requests failed by."""
        for request in requests:
            if not request.finite:
                raise NotFinite(self.target.explain_non_finite([*request.prompt, *request.tokens]))
            if request.error is not None:
                raise request.error

    def free(self) -> None:
        """Let ended and cancelled requests leave. The last rows move into theirs."""
        if gone := [row for row, request in enumerate(self.running) if request.done]:
            self._leave(gone)
        if all(request.done for request in self.joining):
            self.joining, self.prefill = [], None

    @_in_turn
    def _leave(self, gone: list[int]) -> None:
        lap, left = _stopwatch(), len(self.running) - len(gone)
        movers = iter([row for row in range(left, len(self.running)) if row not in gone])
        order = [next(movers) if row in gone else row for row in range(left)]
        self.cache.flush(self.lengths)
        finite = self.sampler.finite.tolist()
        for row in gone:
            request = self.running[row]
            read, request.sequence = request.sequence[:-1], []
            if finite[row]:
                self._prefixes.put(read, request.salt, self.cache, self.state, row)
        if non_finite := [row for row, is_finite in enumerate(finite) if not is_finite]:
            for cache in (self.cache, *self.state.caches):
                cache.wipe(non_finite)
        self.cache.select(order)
        self.state.select(order)
        self.sampler = self.sampler.select(order)
        self._regroup([self.running[row] for row in order])
        self.seconds.host += lap()

    @property
    def suspects(self) -> list[Request]:
        """Those that took part in the pass that failed last."""
        return self.joining if self.joining and self.prefill is None else self.running

    def restart(self) -> None:
        """Begin anew with all requests, after a pass that failed: it may have left caches half changed. Those
        that were under way or joined come first, and make the tokens that they have again."""
        begun = [request for request in (*self.running, *self.joining) if not request.done]
        for request in begun:
            request.again = len(request.tokens)
        self.waiting.extendleft(reversed(begun))
        self._start()


def _results(span: Span, sampler: Sampler) -> list[Result]:
    """The step's one copy to the host: counts, drafted depths, whether scores are finite, and tokens."""
    assert span.tree is not None
    depths = replace(span.tree, probes=None).layout().depths
    drafted = depths.where(span.tree.tokens >= 0, 0).amax(1)
    figures = torch.stack([span.count, drafted, sampler.finite], 1)
    rows = torch.cat([figures, span.nexts], 1).tolist()
    return [(tokens[:count], deepest, bool(finite)) for count, deepest, finite, *tokens in rows]


def _stopwatch() -> Callable[[], float]:
    """Gives the seconds since its last call."""
    last = perf_counter()

    def lap() -> float:
        nonlocal last
        before, last = last, perf_counter()
        return last - before

    return lap
