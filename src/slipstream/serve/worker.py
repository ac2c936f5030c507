"""Worker: one thread that owns the engine. It takes requests in, and posts what each pass brought them."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.grammar import DeadEnd
from slipstream.core.target import Target
from slipstream.engine.costs import keep, policy
from slipstream.engine.engine import Engine, NotFinite, Seconds
from slipstream.engine.generate import LAWS
from slipstream.engine.request import Finish, Request, Step
from slipstream.engine.trace import PassTrees, TracedStep, drawn

BLOCK = 64  # tokens
LADDER = (1, 4)  # requests for which the cost of steps is measured, beside all rows
log = logging.getLogger(__name__)


class Busy(Exception):
    """The queue is full."""


class Ended(Exception):
    """No request is answered any more."""


@dataclass(frozen=True)
class Likely:
    """A token's log-probability, at temperature 1 and without cuts, and the likeliest tokens beside it."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Update:
    """What a pass brought a request."""

    request: Request
    text: str = ""  # what became certain, without half characters or what may become a stop string
    tokens: int = 0  # those that it took, of which `text` may lack some
    likely: Sequence[Likely] = ()  # of the tokens that became certain
    step: Step | None = None  # what was guessed and accepted; None for the prompt's pass
    tree: dict[str, Any] | None = None  # of a step that is traced, as pages draw it
    at: float = field(default_factory=perf_counter)
    finish: Finish | None = None
    error: str | None = None
    is_users: bool = False  # it failed by what it asks for

    @property
    def last(self) -> bool:
        """No other follows."""
        return self.finish is not None or self.error is not None


Post = Callable[[list[Update]], Any]


class Worker:
    """Answers requests, `rows` at once, while others wait in a queue.

    Args:
        longest: tokens of the longest prompt and answer together.
        queue: requests that may wait, at most.
        keep: tokens of texts whose caches are kept, for prompts that begin as they did.
        post: takes a pass's updates, and passes them on to `Request.tell`. It must not wait.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rows: int, longest: int, queue: int, post: Post, keep: int = 0
    ) -> None:
        self.queue, self.post = queue, post
        for texts in {*(n for n in LADDER if n < rows), rows}:
            policy(target, drafter, texts)  # measures what steps cost, unless it is known
        chooses, law = policy(target, drafter, rows), LAWS[drafter.law]
        self.engine = Engine(target, drafter, law, rows, longest, policy=chooses, keep=keep)
        self._inbox, self._gone, self._closing = list[Request](), list[Request](), False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self.engine.joining) + sum(not request.done for request in self.engine.running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return sum(not request.done for request in (*self._inbox, *self.engine.waiting))

    @property
    def alive(self) -> bool:
        """Whether it works."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Requests may come at once."""
        self._thread.start()

    def close(self) -> None:
        """End after the pass under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        keep(self.engine.target, self.engine.drafter)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises Busy, and queues none, if they do not all fit; Ended after the end."""
        with self._changed:
            rows = self.engine.rows
            if self._closing:
                raise Ended("the engine has ended")
            if len(requests) > rows - self.running + self.queue - self.waiting:
                raise Busy(f"{self.waiting} texts wait for {rows} rows")
            for request in requests:
                request.arrived = perf_counter()
            self._inbox += requests
            self._changed.notify()

    def cancel(self, requests: Sequence[Request]) -> None:
        """Let requests go: those that wait at once, others before the next step. No updates follow."""
        with self._changed:
            self._gone += [request for request in requests if not request.done]
            for request in self._gone:
                request.cancelled = True
            self._changed.notify()

    def _run(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # a thread of its own begins with the default
        try:
            while self._wait():
                self._pass()
        except Exception as error:
            log.exception("the engine has ended")
            with self._changed:
                self._closing = True
                engine = self.engine
                left = [*engine.joining, *engine.running, *engine.waiting, *self._inbox]
            self.post([Update(request, error=f"the engine has ended: {error}") for request in left])

    def _wait(self) -> bool:
        """Until there is work; False: the worker closes."""
        with self._changed:
            while not (self._closing or self._inbox or self._gone or self.engine.busy or self.engine.running):
                self._changed.wait()
            return not self._closing

    def _pass(self) -> None:
        """One pass of the engine, and its updates."""
        engine = self.engine
        with self._changed:
            engine.add(*self._inbox)
            engine.cancel(*self._gone)
            self._inbox, self._gone = [], []
        before = replace(engine.seconds)
        try:
            rows = enumerate(engine.step())
            trees, seconds = cache(partial(PassTrees, engine.target, engine.span)), engine.seconds - before
            updates = [self._update(row, it, trees, seconds) for row, it in rows if not it.cancelled]
        except Exception as error:
            updates = self._failed(error)
        if updates:
            self.post(updates)
            engine.free()

    def _update(self, row: int, request: Request, trees: Callable[[], PassTrees], seconds: Seconds) -> Update:
        """What a pass brought a request, in this row. A failure is its own alone."""
        try:
            self.engine.check([request])
            fresh, most = request.fresh, request.most_likely
            step = request.steps[-1] if request.drafted is not None and fresh else None
            if most is not None:
                scores = self._scores(row, request)
                request.likely += [likely(x, token, most) for x, token in zip(scores, fresh, strict=True)]
            released = len(request.released())
            sure, request.likely = request.likely[:released], request.likely[released:]
            pieces = request.new_pieces()
            if request.finish == "eos":
                sure = sure[:-1]  # the closing token is no text
            tree = None
            if request.traced and step is not None:
                places: dict[str, int] = {}
                line = {"row": row, "round": 0, **trees().row(row, pieces, seconds)}
                tree = drawn(TracedStep.model_validate(line), places) | {"words": list(places)}
            return Update(request, "".join(pieces), len(fresh), sure, step, tree, finish=request.finish)
        except Exception as error:
            if not isinstance(error, DeadEnd | NotFinite):
                log.error("a text failed", exc_info=error)
            return _failure(request, error)

    def _scores(self, row: int, request: Request) -> Float[Tensor, "T V"]:
        """The logits from which the tokens that a request took were chosen."""
        span = self.engine.span
        assert span is not None and span.logits is not None and span.path is not None
        fresh = slice(request.known, request.known + len(request.fresh))
        if request.drafted is None:
            return span.logits[row, :1][fresh]
        return span.logits[row, span.path[row, fresh]]

    def _failed(self, error: Exception) -> list[Update]:
        """A pass failed. A request that had it for itself fails. Otherwise those that took part begin again,
        each alone, so that one cannot take others with it. All others begin again, too: the engine's caches
        may be half changed."""
        suspects = self.engine.suspects
        if isinstance(error, DeadEnd):  # that is of a request's own grammar, and no fault of ours
            suspects = [request for request in suspects if request.sampling.grammar is not None]
        else:
            log.error("a pass failed", exc_info=error)
        for request in suspects:
            request.alone = True
        updates = [_failure(request, error) for request in suspects] if len(suspects) == 1 else []
        self.engine.restart()
        return updates


def _failure(request: Request, error: Exception) -> Update:
    request.error = error.with_traceback(None)  # whose frames hold the request
    fault = str(error) if isinstance(error, DeadEnd | NotFinite) else f"{type(error).__name__}: {error}"
    return Update(request, error=fault, is_users=isinstance(error, DeadEnd))


def cached_tokens(request: Request) -> int:
    """What is told of `shared`: whole blocks. Every token would tell, one by one, what others begin with."""
    return request.shared // BLOCK * BLOCK


def likely(logits: Float[Tensor, " V"], token: int, most: int) -> Likely:
    """A token's probability, and the `most` likeliest. The same for the same logits, whatever rows stand
    beside them."""
    x = logits.double()
    x = x - x.logsumexp(0)
    top = x.topk(min(most, len(x)))
    return Likely(token, float(x[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
