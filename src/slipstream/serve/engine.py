"""The engine: one thread that owns the session. Texts join, are told about and leave between its rounds."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.grammar import DeadEnd, check_onward
from slipstream.core.sampling import Sampling
from slipstream.core.target import Target
from slipstream.engine.answer import Answer, Finish, Round
from slipstream.engine.costs import keep, policy
from slipstream.engine.generate import LAWS
from slipstream.engine.prefill import together
from slipstream.engine.session import Committed, Seconds, Session
from slipstream.engine.trace import Looked, Round as Traced, drawn

BLOCK = 64  # tokens
LADDER = (1, 4)  # texts for which the cost of rounds is measured, beside all rows
log = logging.getLogger(__name__)


class Busy(Exception):
    """The queue is full."""


class Ended(Exception):
    """No text is made any more."""


@dataclass(frozen=True)
class Likely:
    """A token's log-probability, at temperature 1 and without cuts, and the likeliest tokens beside it."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Task:
    """A text to make.

    Attributes:
        tell: gets the news of it, in the thread that the engine's `post` chooses.
        plain: it is decoded without guesses.
        most_likely: alternatives wanted with each token; None: no probabilities are wanted.
        salt: kept caches and remembered answers serve texts of the same salt alone.
        traced: news hold the trees of its rounds.
        arrived, began: when it was submitted, and when its prompt was read.
        text: its number in the session.
        shared: tokens of its prompt that were known from another text, and not read.
        again: tokens that it has already, and makes again after a failure of another text.
        alone: a round failed in which it took part, so it gets the session for itself.
    """

    prompt: list[int]
    sampling: Sampling
    answer: Answer
    tell: Callable[["News"], None]
    plain: bool = False
    most_likely: int | None = None
    traced: bool = False
    salt: int = 0
    arrived: float = 0.0
    began: float = 0.0
    text: int | None = None
    shared: int = 0
    again: int = 0
    alone: bool = False
    likely: list[Likely] = field(default_factory=list)
    told: int = 0  # pieces of its answer

    @property
    def cached(self) -> int:
        """What is said of `shared`: whole blocks. Every token would tell, one by one, what other texts of the
        salt begin with."""
        return self.shared // BLOCK * BLOCK


@dataclass(frozen=True)
class News:
    """What a round brought a text.

    Attributes:
        text: what became certain, without half characters or what may become a stop string.
        tokens: those that it took, of which `text` may lack some.
        likely: of the tokens that became certain.
        round: what was guessed and accepted; None for the prompt's pass.
        tree: of a round that is traced, as pages draw it.
        at: the time.
        finish: why it ended, if it did.
        error: why it failed, if it did.
        asked: it failed by what was asked for.
    """

    task: Task
    text: str = ""
    tokens: int = 0
    likely: Sequence[Likely] = ()
    round: Round | None = None
    tree: dict[str, Any] | None = None
    at: float = field(default_factory=perf_counter)
    finish: Finish | None = None
    error: str | None = None
    asked: bool = False

    @property
    def last(self) -> bool:
        """No other follows."""
        return self.finish is not None or self.error is not None


class Engine:
    """Makes texts, `rows` at once, while others wait in a queue.

    Args:
        capacity: tokens of the longest prompt and answer together.
        queue: texts that may wait, at most.
        keep: tokens of texts whose caches are kept, for prompts that begin as they did.
        post: takes a round's news, and passes them on to `Task.tell`. It must not wait.

    Attributes:
        running, waiting: texts under way and in the queue.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rows: int,
        capacity: int,
        queue: int,
        post: Callable[[list[News]], Any],
        keep: int = 0,
    ) -> None:
        self.target, self.drafter, self.rows, self.queue, self.post = target, drafter, rows, queue, post
        self.capacity, self.keep = capacity, keep
        self._waiting = deque[Task]()
        self._running: dict[int, Task] = {}  # by number of the text
        self._joining = list[Task]()
        self._gone = set[Task]()
        self._closing = False
        self._changed = threading.Condition()
        self._spent = Seconds()  # of the last round
        self._looked: Looked | None = None
        for texts in {*(n for n in LADDER if n < rows), rows}:
            policy(target, drafter, texts)  # measures what rounds cost, unless it is known
        self._session = self._new_session()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def running(self) -> int:
        return len(self._joining) + len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether it works."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Requests may come at once."""
        self._thread.start()

    def close(self) -> None:
        """End after the round under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        keep(self.target, self.drafter)

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue texts. Raises Busy, and queues none, if they do not all fit; Ended after the end."""
        with self._changed:
            free = self.rows - self.running + self.queue - self.waiting
            if self._closing:
                raise Ended("the engine has ended")
            if len(tasks) > free:
                raise Busy(f"{len(self._waiting)} texts wait for {self.rows} rows")
            for task in tasks:
                task.arrived = perf_counter()
            self._waiting += tasks
            self._changed.notify()

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Let texts go: those that wait at once, those under way before the next round. No news follow."""
        with self._changed:
            self._gone |= {task for task in tasks if task.answer.finish is None}
            self._waiting = deque(task for task in self._waiting if task not in self._gone)
            self._changed.notify()

    def _run(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # a thread of its own begins with the default
        try:
            while self._wait():
                self._leave()
                self._read()
                self._tell(self._step)
        except Exception as error:
            log.exception("the engine has ended")
            with self._changed:
                self._closing = True
                tasks = [*self._joining, *self._running.values(), *self._waiting]
            self.post([News(task, error=f"the engine has ended: {error}") for task in tasks])

    def _wait(self) -> bool:
        """Until there is work; False: the engine closes."""
        with self._changed:
            while not (self._closing or self._waiting or self._joining or self._running):
                self._changed.wait()
            return not self._closing

    def _leave(self) -> None:
        """Free the rows of texts that nobody waits for any more."""
        with self._changed:  # those that join leave once they have
            gone, self._gone = self._gone - {*self._joining}, self._gone & {*self._joining}
        self._session.retire(self._forget(gone))

    def _forget(self, tasks: set[Task]) -> list[int]:
        """Count tasks as under way no more. Returns the numbers of their texts."""
        texts = [text for text, task in self._running.items() if task in tasks]
        for text in texts:
            del self._running[text]
        return texts

    def _tell(self, made: Callable[[], list[News]]) -> None:
        """Post the news of a pass, and free the rows of texts that have ended."""
        if news := made():
            ended = self._forget({each.task for each in news if each.last})
            self.post(news)
            self._session.retire(ended)

    def _read(self) -> None:
        """Read prompts until none are left, or a round is due."""
        before = -1
        while before < self._session.unrounded and not self._session.due:
            before = self._session.unrounded
            self._tell(self._join)

    def _join(self) -> list[News]:
        """Read a chunk of the prompts of texts that join, of those that wait where none do."""
        try:
            if not self._joining:
                self._begin(self._next())
            made = self._session.read() if self._joining else []
        except Exception as error:
            return self._failed(self._joining, error)
        if made:
            self._running |= {each.text: task for each, task in zip(made, self._joining, strict=True)}
            self._joining = []
        return [self._taken(each, i) for i, each in enumerate(made)]

    def _begin(self, tasks: list[Task]) -> None:
        """Let texts join."""
        if tasks:
            began = perf_counter()
            for task in tasks:
                task.began = task.began or began
            plain, salts = [task.plain for task in tasks], [task.salt for task in tasks]
            self._session.begin([t.prompt for t in tasks], [t.sampling for t in tasks], plain, salts)

    def _next(self) -> list[Task]:
        """Texts to join now, the oldest first: those of the free rows that are worth reading together."""
        with self._changed:
            fit, alone = list[Task](), any(task.alone for task in self._running.values())
            for task in islice(self._waiting, self.rows - len(self._running)):
                if alone or (task.alone and (fit or self._running)):
                    break
                fit.append(task)
                alone = task.alone
            count = together(task.prompt for task in fit)
            self._joining = [self._waiting.popleft() for _ in range(count)]
        return self._joining

    def _step(self) -> list[News]:
        """One round."""
        if not self._running:
            return []
        before = replace(self._session.seconds)
        try:
            made = self._session.step()
        except Exception as error:
            return self._failed([], error)
        self._spent = self._session.seconds - before
        self._looked = None
        return [self._taken(each, i) for i, each in enumerate(made)]

    def _taken(self, made: Committed, row: int) -> News:
        """`_take`, whose failure is that of the text alone. So is a dead end of its grammar, which the
        next pass would meet."""
        try:
            news = self._take(made, row)
            if not news.last:
                walk = self._session.sampler.grammar_states[self._session.texts.index(made.text)]
                check_onward(walk, made.tokens[-1])
            return news
        except DeadEnd as error:
            return _failure(self._running[made.text], error)
        except Exception as error:
            log.error("a text failed", exc_info=error)
            return _failure(self._running[made.text], error)

    def _take(self, made: Committed, row: int) -> News:
        """Let a text's answer take what a pass brought; `row`: its row in that pass."""
        task = self._running[made.text]
        answer, start = task.answer, min(task.again, len(made.tokens))
        if not made.finite:
            return News(task, error=self.target.explain_non_finite([*task.prompt, *answer.tokens]))
        task.again -= start
        task.shared += made.shared
        taken = answer.take(made, task.prompt, start)
        round = answer.rounds[-1] if made.drafted is not None and taken else None
        if task.most_likely is not None:
            scores = self._scores(row, made)[start:]
            task.likely += [
                likely(x, token, task.most_likely) for x, token in zip(scores, taken, strict=False)
            ]
        released = len(answer.released())
        sure, task.likely = task.likely[:released], task.likely[released:]
        pieces, task.told = answer.pieces[task.told :], len(answer.pieces)
        if answer.finish == "eos":
            sure = sure[:-1]  # the closing token is no text
        tree = self._tree(row, pieces) if task.traced and round is not None else None
        return News(task, "".join(pieces), len(taken), sure, round, tree, finish=answer.finish)

    def _tree(self, row: int, pieces: list[str]) -> dict[str, Any]:
        """What a row's round guessed and accepted. Its texts stand beside it, the target's own token too."""
        self._looked = self._looked or Looked(self.target, self._session)
        made = self._looked.row(row, pieces, self._spent)
        places: dict[str, int] = {}
        tree = drawn(Traced.model_validate({"row": row, "round": 0, **made}), places)
        return tree | {"words": list(places)}

    def _scores(self, row: int, made: Committed) -> Float[Tensor, "T V"]:
        """The logits from which the tokens of a row were chosen."""
        span = self._session.span
        assert span is not None and span.logits is not None and span.path is not None
        first = made.drafted is None
        return span.logits[row, :1] if first else span.logits[row, span.path[row, : len(made.tokens)]]

    def _failed(self, joining: list[Task], error: Exception) -> list[News]:
        """A pass failed, over texts that joined or else over all that are under way. A text that had the pass
        for itself fails. Otherwise these texts begin again, each alone, so that one cannot take others with
        it. Texts that took no part begin again, too, in a new session: this one may be half changed."""
        if not isinstance(error, DeadEnd):  # that is of a request's own grammar, and no fault of ours
            log.error("a pass failed", exc_info=error)
        under_way, read = list(self._running.values()), self._joining
        suspects = joining or under_way
        if isinstance(error, DeadEnd):
            suspects = [task for task in suspects if task.sampling.grammar is not None]
        self._running.clear()
        self._joining = []
        self._session = self._new_session()
        again, news = [*under_way, *read], list[News]()
        if len(suspects) == 1:
            again.remove(suspects[0])
            news = [_failure(suspects[0], error)]
        for task in again:
            task.again, task.shared = len(task.answer.tokens), 0  # its prompt is read again
            task.alone = task.alone or task in suspects
        with self._changed:
            self._waiting.extendleft(task for task in reversed(again) if task not in self._gone)
        return news

    def _new_session(self) -> Session:
        chooses = policy(self.target, self.drafter, self.rows)
        how: Any = {"rows": self.rows, "capacity": self.capacity, "policy": chooses, "keep": self.keep}
        return Session(self.target, self.drafter, LAWS[self.drafter.law], **how)


def _failure(task: Task, error: Exception) -> News:
    if isinstance(error, DeadEnd):
        return News(task, error=str(error), asked=True)
    return News(task, error=f"{type(error).__name__}: {error}")


def likely(logits: Float[Tensor, " V"], token: int, most: int) -> Likely:
    """A token's probability, and the `most` likeliest. The same for the same logits, whatever rows stand
    beside them."""
    x = logits.double()
    x = x - x.logsumexp(0)
    top = x.topk(min(most, len(x)))
    return Likely(token, float(x[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
