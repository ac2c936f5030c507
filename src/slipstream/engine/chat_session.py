"""Talk: one conversation, whose answers come one after the other and do not read their past again."""

import json
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from slipstream.core.drafter import Drafter
from slipstream.core.target import Messages, Target
from slipstream.drafters.drafter_cache import cached_drafter
from slipstream.engine.answer import Answer
from slipstream.engine.costs import keep, policy
from slipstream.engine.generate import LAWS, Generation
from slipstream.engine.session import Session
from slipstream.engine.settings import Settings
from slipstream.engine.trace import Round as Traced, Tracer
from slipstream.spec import Named
from slipstream.targets.prompts import encode

KEEP = 2**15  # tokens that the conversation keeps, at most


class Talk:
    """A conversation with a target.

    Args:
        drafter: a name, a directory or a `Drafter`; see `draft_with`.
        options: of `generate`, but for `law` and `trace`.

    Attributes:
        plain: the next answers are decoded plainly. They say the same, but for a drafter of
            `proposal=sampled` at T > 0.
        made: the last answer, as far as it came.
        shared: tokens of its prompt that were not read again.
        rounds: its rounds, with their trees.
    """

    def __init__(self, target: Target, drafter: Named | Drafter = "auto", **options: Any) -> None:
        if target.text is None:
            raise ValueError(f"target {target.name} has no tokenizer: it cannot talk")
        self.target, self.options, self.plain = target, options, False
        self.made: Generation | None = None
        self.shared, self._lines = 0, list[str]()
        Settings.of(target, **options)
        self.draft_with(drafter)

    def draft_with(self, drafter: Named | Drafter) -> None:
        """Take another drafter from now on, which has read nothing yet. Raises ValueError."""
        temperature = Settings.of(self.target, **self.options).sampling.temperature
        made = drafter if isinstance(drafter, Drafter) else cached_drafter(drafter, self.target, temperature)
        chooses = policy(self.target, made, 1)
        law = LAWS[made.law]
        self._session = Session(self.target, made, law, policy=chooses, keep=min(KEEP, self.target.window))
        self.drafter = made

    @property
    def rounds(self) -> list[Traced]:
        return [Traced.model_validate(json.loads(line)) for line in self._lines]

    def write(self, line: str) -> None:
        """Take a line of a trace."""
        self._lines.append(line)

    def answer(self, messages: Messages, **options: Any) -> Generator[list[str], None, None]:
        """Answer messages, round by round: what each token of a round made certain. All but a round's last
        token were guesses, unless the answer ended among them. To close it gives up the rest; to interrupt it
        in the midst of a round spoils the session. `options` replace those of the conversation. Raises
        ValueError as `generate` does."""
        settings, prompt = Settings.of(self.target, **self.options | options), encode(self.target, messages)
        answer = Answer(self.target, settings.limit(prompt), settings.eos, settings.stop, read=True)
        session, self._lines = self._session, []
        began, shown = replace(session.seconds), 0
        before, sampling = began, settings.row(0, prompt)
        news = session.admit([prompt], [sampling], [self.plain])
        self.shared, text = news[0].shared, news[0].text
        tracer = Tracer(self, self.target, {text: prompt}, {text: sampling}, {text: answer})
        tracer.take(session, session.seconds - began, [text])
        try:
            while True:
                answer.take(news[0], prompt)
                if news[0].drafted is not None:
                    tracer.take(session, session.seconds - before, [])
                pieces, shown = answer.pieces[shown:], len(answer.pieces)
                spent = session.seconds - began
                self.made = Generation(
                    prompt,
                    answer.tokens,
                    answer.text,
                    answer.finish or "length",
                    answer.rounds,
                    spent,
                    sampling,
                )
                yield pieces
                if answer.finish is not None:
                    return
                before = replace(session.seconds)
                news = session.step()
        finally:
            session.retire([text])
            keep(self.target, self.drafter)
