"""Chat session: one conversation, whose answers come one after the other and do not read their past again."""

import json
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from slipstream.core.drafter import Drafter
from slipstream.core.target import Messages, Target
from slipstream.drafters.drafter_cache import cached_drafter
from slipstream.engine.costs import keep, policy
from slipstream.engine.engine import Engine
from slipstream.engine.generate import LAWS, Generation, generation
from slipstream.engine.sampling_params import SamplingParams
from slipstream.engine.trace import TracedStep, Tracer
from slipstream.spec import Named
from slipstream.targets.prompts import encode

KEEP = 2**15  # tokens that the conversation keeps, at most


class ChatSession:
    """A conversation with a target. `options` are those of `generate`, but for `law` and `trace`."""

    def __init__(self, target: Target, drafter: Named | Drafter = "auto", **options: Any) -> None:
        if target.text is None:
            raise ValueError(f"target {target.name} has no tokenizer: it cannot talk")
        self.target, self.options = target, options
        self.plain = False  # whether the next answers are decoded plainly
        self.last: Generation | None = None  # answer, as far as it came
        self.shared = 0  # tokens of its prompt that were not read again
        self._lines = list[str]()
        self.draft_with(drafter)

    @property
    def temperature(self) -> float:
        return SamplingParams.of(self.target, **self.options).sampling.temperature

    def draft_with(self, drafter: Named | Drafter) -> None:
        """Take another drafter from now on, which has read nothing yet. Raises ValueError."""
        temperature = self.temperature  # which checks the options
        if not isinstance(drafter, Drafter):
            drafter = cached_drafter(drafter, self.target, temperature)
        chooses, most = policy(self.target, drafter, 1), min(KEEP, self.target.window)
        self._engine = Engine(self.target, drafter, LAWS[drafter.law], policy=chooses, keep=most)
        self.drafter = drafter

    @property
    def steps(self) -> list[TracedStep]:
        """Those of the last answer, with their trees."""
        return [TracedStep.model_validate(json.loads(line)) for line in self._lines]

    def write(self, line: str) -> None:
        """Take a line of a trace."""
        self._lines.append(line)

    def answer(self, messages: Messages, **options: Any) -> Generator[list[str], None, None]:
        """Answer messages, step by step: what each token of a step made certain. To close it gives up the
        rest; to interrupt it within a step spoils the session. `options` replace those of the conversation.
        Raises ValueError as `generate` does."""
        params = SamplingParams.of(self.target, **self.options | options)
        request = params.request(0, encode(self.target, messages), streams=True, plain=self.plain)
        engine, self._lines = self._engine, []
        began, tracer = replace(engine.seconds), Tracer(self, engine)
        engine.add(request)
        try:
            while not request.done:
                if request not in engine.step():
                    continue
                engine.check([request])
                tracer.take([request])
                self.shared = request.shared
                answer = generation(request, engine.seconds - began)
                self.last = replace(answer, finish=request.finish or "length")
                yield request.new_pieces()
        finally:
            engine.cancel(request)
            engine.free()
            keep(self.target, self.drafter)
