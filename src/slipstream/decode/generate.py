"""generate and stream: prompts in, answers out, with the arguments people know from Hugging Face."""

import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampling
from slipstream.core.target import Target
from slipstream.core.verify import Law, coupled, lossy_typical, multi_round
from slipstream.decode.answer import Answer, Finish, Round, mean_accepted_length
from slipstream.decode.session import Seconds, Session
from slipstream.decode.settings import Settings
from slipstream.drafters import load_drafter
from slipstream.drafters.spec import Named, Spec
from slipstream.targets.prompts import Prompt, read_prompts

LOSSY = "lossy-typical"
LAWS: dict[str, Law] = {"coupled": coupled, "multi-round": multi_round, LOSSY: lossy_typical}


@runtime_checkable
class Streamer(Protocol):
    """What Hugging Face streamers (`TextStreamer`, …) offer: the prompt first, then tokens as they come."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


@runtime_checkable
class Writer(Protocol):
    """Anything with `write`: an open file, a `StringIO`."""

    def write(self, text: str, /) -> Any: ...


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        prompt, tokens: token ids; `tokens` includes a closing EOS.
        text: without special tokens and stop string.
        finish: "eos", "stop" or "length".
        rounds: one entry per target pass; the prompt's own pass and the token it yields are not among them.
        seconds: of the whole batch this answer was made in.
        sampling: how its tokens were chosen, the target's own processors included: what `audit` judges them
            by.
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    finish: Finish
    rounds: list[Round]
    seconds: Seconds
    sampling: Sampling = field(default_factory=Sampling, repr=False)

    @property
    def tau(self) -> float:
        """The answer's `mean_accepted_length`."""
        return mean_accepted_length(self.rounds)


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt],
    drafter: Named | Drafter = "vanilla",
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    processors: Sequence[Any] = (),
    eos_token_ids: int | Iterable[int] | None = None,
    stop: str | Sequence[str] | None = None,
    law: str | None = None,
    attention_mask: Any = None,
    streamer: Streamer | None = None,
    trace: Writer | None = None,
) -> Any:
    """Answer one prompt (a `Generation`) or several as one ragged batch (a list of them).

    The text is a function of (prompt, sampling, seed) alone, whatever the drafter and the batch: exactly in
    float64, up to near-ties that rounding may turn in other precisions. Row i of a batch draws noise keyed by
    (seed, i). What is not given comes from the target's `generation_config`, whose other fields are honoured
    through Hugging Face's own processors, or refused by name.

    Args:
        prompts: text (put through the chat template where there is one), messages, token ids (a list, tensor
            or array) or what a tokenizer returns, without the padding that its attention mask names; or a
            list of such.
        drafter: a name, a directory or a `Drafter`.
        max_new_tokens: tokens per answer, at most; default: the target's limit, or 256.
        temperature, …, processors: see `Sampling`. Where neither this nor the target says `top_k`, all tokens
            stay.
        eos_token_ids: ids that end an answer; default: the target's.
        stop: strings that end an answer, in which alone they are looked for; they are not part of its text.
            Default: the target's.
        law: "coupled" (same seed, same text) or "multi-round" (exact in distribution); default: the drafter's
            own. "lossy-typical" is Medusa's typical acceptance: at T > 0 the target would not say this.
        attention_mask: 0 where `prompts`, then token ids, are padding.
        streamer: gets the prompt and then tokens as they come; one prompt only. With stop strings it gets
            only whole tokens of the text, and those once it is certain; `stream` gives every character.
        trace: receives one JSON line per row and round.

    Raises:
        ValueError: an argument of another type or outside its range, a field of generation_config that cannot
            be honoured, an empty prompt, or one that fills the target's window.
    """
    job = _Job.of(
        target,
        prompts if attention_mask is None else {"input_ids": prompts, "attention_mask": attention_mask},
        drafter,
        law,
        trace,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        processors=processors,
        eos_token_ids=eos_token_ids,
        stop=stop,
    )
    if streamer is not None and len(job.prompts) > 1:
        raise ValueError(
            f"a streamer takes one prompt, {len(job.prompts)} were given: call generate once for each"
        )
    if streamer is not None and not isinstance(streamer, Streamer):
        raise ValueError(
            f"streamer is a {type(streamer).__name__}: give an object with put and end, such as a "
            f"TextStreamer"
        )
    made = job.generations(decode(*job.work, streamer, trace))
    return made[0] if job.single else made


def stream(
    target: Target,
    prompt: Prompt,
    drafter: Named | Drafter = "vanilla",
    *,
    law: str | None = None,
    trace: Writer | None = None,
    **settings: Any,
) -> "Stream":
    """Answer one prompt piece by piece.

        for piece in stream(target, "What is gravity?", drafter="ngram"):
            print(piece, end="", flush=True)

    Args:
        settings: as `generate` takes them.

    Raises:
        ValueError: as in `generate`; more than one prompt; a target without tokenizer.
    """
    job = _Job.of(target, prompt, drafter, law, trace, read=True, **settings)
    if len(job.prompts) > 1:
        raise ValueError(f"stream takes one prompt, {len(job.prompts)} were given: call it once for each")
    return Stream(job)


class Stream(Iterator[str]):
    """An answer under way: pieces of text as rounds bring them, which together are `generation.text`.

    Closed early, or left and forgotten, it frees what it holds.

    Attributes:
        rounds: the same, round by round, as a list of what each of its tokens made certain.
        generation: the whole answer, once the last piece has been taken.
    """

    def __init__(self, job: "_Job") -> None:
        self.generation: Generation | None = None
        self.rounds = self._rounds(job)

    def __next__(self) -> str:
        return next(filter(None, map("".join, self.rounds)))

    def close(self) -> None:
        """Give up the rest."""
        self.rounds.close()

    def _rounds(self, job: "_Job") -> Generator[list[str], None, None]:
        (answer,), shown = job.answers, 0
        for seconds in _rounds(*job.work, job.trace, None):
            pieces, shown = answer.pieces[shown:], len(answer.pieces)
            if answer.finish is not None:
                (self.generation,) = job.generations(seconds)
            yield pieces


@dataclass(frozen=True)
class _Job:
    """Checked arguments: what is to be answered, and how."""

    target: Target
    drafter: Drafter
    prompts: list[list[int]]
    single: bool
    sampling: list[Sampling]
    answers: list[Answer]
    law: Law
    trace: Writer | None

    @classmethod
    def of(
        cls,
        target: Target,
        prompts: Prompt | Sequence[Prompt],
        drafter: Named | Drafter,
        law: str | None,
        trace: Writer | None,
        read: bool = False,
        **given: Any,
    ) -> "_Job":
        settings = Settings.of(target, **given)
        ids, single = read_prompts(target, prompts)
        if law is not None and law not in list(LAWS):
            raise ValueError(f"Unknown law: {law!r}. Available: {', '.join(LAWS)}")
        if isinstance(drafter, (str, PathLike, Spec)):
            drafter = load_drafter(drafter, target, settings.sampling.temperature)
        if not isinstance(drafter, Drafter):
            raise ValueError(f"drafter is {drafter!r}: give a name, a directory or a slipstream.Drafter")
        if trace is not None and not isinstance(trace, Writer):
            raise ValueError(
                f"trace is a {type(trace).__name__}: give an open file, or anything else with write"
            )
        law = law or drafter.law
        if drafter.peeks and law != "coupled":
            raise ValueError(
                f"this drafter looks at the target's noise, which the {law} law does not allow: use law "
                f"coupled"
            )
        if read and target.text is None:
            raise ValueError(f"target {target.name} has no tokenizer: call generate, and read its token ids")
        answers = [
            Answer(target, settings.limit(prompt), settings.eos, settings.stop, read) for prompt in ids
        ]
        rows = [settings.row(i, prompt) for i, prompt in enumerate(ids)]
        return cls(target, drafter, ids, single, rows, answers, LAWS[law], trace)

    @property
    def work(self) -> tuple[Target, Drafter, list[list[int]], list[Sampling], list[Answer], Law]:
        return self.target, self.drafter, self.prompts, self.sampling, self.answers, self.law

    def generations(self, seconds: Seconds) -> list[Generation]:
        return [
            Generation(
                prompt,
                a.tokens,
                a.text,
                a.finish or "length",
                a.rounds,
                seconds,
                s,
            )
            for prompt, a, s in zip(self.prompts, self.answers, self.sampling, strict=True)
        ]


def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    answers: Sequence[Answer],
    law: Law = coupled,
    streamer: Streamer | None = None,
    trace: Writer | None = None,
    batch: int | None = None,
) -> Seconds:
    """Fill `answers`, one per prompt. Returns where the time went."""
    if streamer is not None:
        streamer.put(torch.tensor(prompts[0]))
    seconds = Seconds()
    for seconds in _rounds(target, drafter, prompts, sampling, answers, law, trace, batch):  # noqa: B007
        if streamer is not None and (tokens := answers[0].released()):
            streamer.put(torch.tensor(tokens))
    if streamer is not None:
        streamer.end()
    return seconds


def _rounds(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    answers: Sequence[Answer],
    law: Law,
    trace: Writer | None,
    batch: int | None,
) -> Iterator[Seconds]:
    """Fill `answers`, round by round. Texts leave the session as they finish, and waiting ones take their
    rows. Gives where the time went so far."""
    rows = min(batch or len(prompts), len(prompts))
    capacity = max(len(prompt) + answer.limit for prompt, answer in zip(prompts, answers, strict=True))
    session, waiting = Session(target, drafter, law, rows, capacity), deque(range(len(prompts)))
    while waiting or session.texts:
        joining = [waiting.popleft() for _ in range(min(len(waiting), rows - len(session.texts)))]
        if joining:
            news = session.admit([prompts[i] for i in joining], [sampling[i] for i in joining])
        else:
            news = session.step()
        began = perf_counter()
        if trace is not None and not joining:
            _write(trace, session, answers)
        for each in news:
            answer = answers[each.text]
            if not each.sound:
                raise ValueError(target.unsound([*prompts[each.text], *answer.tokens]))
            taken = answer.extend(each.tokens)
            if each.drafted is not None:
                answer.rounds.append(Round(each.drafted, len(each.tokens) - 1, len(taken)))
        session.retire(each.text for each in news if answers[each.text].finish is not None)
        session.seconds.host += perf_counter() - began
        yield session.seconds


def _write(trace: Writer, session: Session, answers: Sequence[Answer]) -> None:
    """One JSON line per text: the tree, the accepted slots and the target's own token."""
    span = session.span
    assert span is not None and span.tree is not None and span.path is not None
    parents = span.tree.parent_slots().expand_as(span.tree.tokens).tolist()
    path, count, nexts = span.path.tolist(), span.count.tolist(), span.last(span.nexts).tolist()
    for i, tokens in enumerate(span.tree.tokens.tolist()):
        text = session.texts[i]
        line = {"row": text, "round": len(answers[text].rounds), "tokens": tokens, "parents": parents[i]}
        trace.write(json.dumps({**line, "accepted": path[i][: count[i]], "next": nexts[i]}) + "\n")
