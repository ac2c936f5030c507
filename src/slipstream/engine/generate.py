"""generate and stream: prompts in, answers out, with the arguments people know from Hugging Face."""

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from numbers import Real
from os import PathLike
from typing import Any, Literal, Protocol, TypeVar, Unpack, get_args, overload, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampling
from slipstream.core.target import Target
from slipstream.core.verify import Law, coupled, multi_round
from slipstream.drafters.drafter_cache import cached_drafter
from slipstream.engine.costs import keep, policy
from slipstream.engine.engine import Engine, Seconds
from slipstream.engine.memory import memory as text_memory
from slipstream.engine.request import Finish, Request, Step, mean_accepted_length
from slipstream.engine.sampling_params import SamplingOptions, SamplingParams, check_kind
from slipstream.engine.trace import Tracer
from slipstream.files import is_whole
from slipstream.spec import Named, Spec
from slipstream.targets.prompts import Prompt, read_prompts

INTERRUPTED: Literal["interrupted"] = "interrupted"
LAWS: dict[str, Law] = {"coupled": coupled, "multi-round": multi_round}


@runtime_checkable
class Streamer(Protocol):
    """A Hugging Face streamer, such as `TextStreamer`: it gets the prompt, then tokens as they come."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


@runtime_checkable
class Writer(Protocol):
    """Anything with `write`, such as an open file."""

    def write(self, text: str, /) -> Any: ...


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in `generate`, with what was made before.

    Attributes:
        partial: what `generate` would have returned, as far as it came: a `Generation` for one prompt, a list
            for several. Answers that had not ended have the `finish` "interrupted".
        finished: a list of the answers that had ended, and None for the others.
    """

    def __init__(self, answers: "list[Generation]", single: bool) -> None:
        tokens = sum(len(answer.tokens) for answer in answers)
        super().__init__(f"stopped after {tokens} tokens, which this error's `partial` holds")
        self.partial: Generation | list[Generation] = answers[0] if single else answers
        self.finished = [None if answer.finish == INTERRUPTED else answer for answer in answers]


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        prompt, tokens: token ids; `tokens` includes a closing EOS.
        text: the answer's text, without special tokens and without the stop string.
        finish: what ended it: "eos" (an end token), "stop" (a stop string), "length" (its limit), or
            "interrupted" (Ctrl-C, in `Interrupted.partial` alone).
        rounds: one entry per target pass after the prompt's.
        seconds: where the time of the whole call went, which all of its answers share.
        sampling: how its tokens were chosen, as `audit` takes it.
    """

    prompt: list[int] = field(repr=False)
    tokens: list[int] = field(repr=False)
    text: str
    finish: Finish | Literal["interrupted"]
    rounds: list[Step] = field(repr=False)
    seconds: Seconds
    sampling: Sampling = field(default_factory=Sampling, repr=False)

    @property
    def tau(self) -> float:
        """The answer's `mean_accepted_length`."""
        return mean_accepted_length(self.rounds)

    def _repr_html_(self) -> str:
        """The answer and a line of figures, as a notebook shows them."""
        figures = f"{len(self.tokens)} tokens, τ {self.tau:.2f}, {self.seconds.total:.2f} s, {self.finish}"
        text = escape(self.text) or "(no text)"
        return f'<div style="white-space: pre-wrap">{text}</div><p><small>{figures}</small></p>'


def generation(request: Request, seconds: Seconds) -> Generation:
    """What a request says, as far as it came."""
    finish, steps = request.finish or INTERRUPTED, request.steps
    return Generation(request.prompt, request.tokens, request.text, finish, steps, seconds, request.sampling)


class Options(SamplingOptions, total=False):
    """Keyword arguments of `generate` and `stream`, which `generate` explains; None is not given."""

    law: str | None
    trace: Writer | None


class BatchOptions(Options, total=False):
    """With those of `generate` alone."""

    batch: int | None
    memory: float | None
    attention_mask: Any
    streamer: Streamer | None


Message = Mapping[str, Any]
One = str | Sequence[int] | Sequence[Message]
Many = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]
Prompts = Prompt | Sequence[Prompt]
F = TypeVar("F", bound=Callable[..., Any])


def _spelled(function: F) -> F:
    """Names each of a function's options, a TypedDict, in its signature, for completion in shells."""
    own = inspect.signature(function)
    *before, options = own.parameters.values()
    (kind,) = get_args(options.annotation)
    named = [
        options.replace(name=name, kind=inspect.Parameter.KEYWORD_ONLY, default=None, annotation=of)
        for name, of in kind.__annotations__.items()
    ]
    function.__signature__ = own.replace(parameters=[*before, *named])  # type: ignore[attr-defined]
    return function


@overload
def generate(
    target: Target, prompts: One, drafter: Named | Drafter = ..., **options: Unpack[BatchOptions]
) -> Generation: ...
@overload
def generate(
    target: Target, prompts: Many, drafter: Named | Drafter = ..., **options: Unpack[BatchOptions]
) -> list[Generation]: ...
@overload  # tensors and what a tokenizer returns hold one prompt or several
def generate(
    target: Target, prompts: Prompts, drafter: Named | Drafter = ..., **options: Unpack[BatchOptions]
) -> Any: ...
@_spelled
def generate(
    target: Target, prompts: Prompts, drafter: Named | Drafter = "auto", **options: Unpack[BatchOptions]
) -> Any:
    """Answer one prompt (a `Generation`) or several (a list of them), `batch` at once.

    The text depends on (prompt, sampling, seed) alone, not on drafter and batch: token for token where
    `target.exactness` is "bits", and elsewhere up to near-ties within `target.margin`. The i-th prompt draws
    noise keyed by (seed, i). What is not given comes from the target's `generation_config`, whose other
    fields are honoured through Hugging Face's own processors, or refused by name.

    Args:
        prompts: text (put through the chat template where there is one), messages, token ids (a list, tensor
            or array), or what a tokenizer returns, whose masked padding is dropped; or a list of such.
        drafter: a name, a directory or a `Drafter`. "auto" takes what is quickest here, round by round. Its
            first use measures rounds for a few seconds, and keeps the result in the user's cache.
        max_new_tokens: tokens per answer, at most; default: the target's limit, or 256.
        temperature, top_k, top_p, min_p, seed, processors: see `Sampling`. `top_k` is off unless this or the
            target sets it.
        repetition_penalty, presence_penalty, frequency_penalty: see `Sampling`.
        json_schema, regex, grammar, choice: what an answer may be, at most one of them: JSON of a schema, a
            match of a regular expression, a text of a grammar in Lark's or llama.cpp's form, one of several
            texts. An answer that its limit or a stop string ends may be a beginning of one.
        grammar_limits: what reading the grammar may take; default: `GrammarLimits()`.
        eos_token_ids: ids that end an answer; default: the target's.
        stop: strings that end an answer and are no part of its text; default: the target's.
        law: "coupled" (same seed, same text) or "multi-round" (exact in law); default: the drafter's own.
        trace: receives one JSON line per text and round, which `slipstream report` shows.
        batch: answers under way at once, default all. Waiting prompts take the place of ended answers.
        memory: GiB that keys and values may take: fewer answers are under way where not all fit.
        attention_mask: 0 where `prompts`, then token ids, are padding.
        streamer: gets one prompt, then its tokens as they come. With stop strings it gets only tokens that
            are certain to belong to the text; `stream` gives every character.

    Raises:
        ValueError: an argument of another type or outside its range, a field of generation_config that cannot
            be honoured, an empty prompt, or one that fills the target's window.
        Interrupted: Ctrl-C, a KeyboardInterrupt whose `partial` holds what was made until then.
    """
    if (mask := options.pop("attention_mask", None)) is not None:
        prompts = {"input_ids": prompts, "attention_mask": mask}
    streamer = options.pop("streamer", None)
    job = Job.of(target, prompts, drafter, **options)
    if streamer is not None:
        job.check_single("a streamer", "generate")
        check_kind("streamer", streamer, Streamer, "give an object with put and end, such as a TextStreamer")
    answers = job.run(streamer)
    return answers[0] if job.single else answers


@_spelled
def stream(
    target: Target, prompt: Prompt, drafter: Named | Drafter = "auto", **options: Unpack[Options]
) -> "Stream":
    """Answer one prompt piece by piece, with the options of `generate`.

        for piece in stream(target, "What is gravity?", drafter="ngram"):
            print(piece, end="", flush=True)

    Raises ValueError as `generate` does, for more than one prompt, and for a target without tokenizer.
    """
    job = Job.of(target, prompt, drafter, streams=True, **options)
    job.check_single("stream", "it")
    return Stream(job)


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer's text as it is made. Together they are `generation.text`.

    Attributes:
        rounds: the same text in lists, one for each round, with the text that each token made certain.
        tokens: the most tokens that prompt and answer can have together.
        generation: the whole answer. None until the last piece has been taken.
    """

    def __init__(self, job: "Job") -> None:
        self.generation: Generation | None = None
        self.tokens = job.longest
        self.rounds = self._rounds(job)

    def __next__(self) -> str:
        return next(filter(None, map("".join, self.rounds)))

    def close(self) -> None:
        """Stop decoding. `generation` stays None if the answer had not ended."""
        self.rounds.close()

    def _rounds(self, job: "Job") -> Generator[list[str], None, None]:
        (request,) = job.requests
        for seconds in job.steps():
            if request.finish is not None:
                self.generation = generation(request, seconds)
            yield request.new_pieces()


@dataclass(frozen=True)
class Job:
    """Requests of one call, and how they are answered."""

    target: Target
    drafter: Drafter
    requests: list[Request]
    law: Law = coupled
    trace: Writer | None = None
    batch: int | None = None
    single: bool = False  # one prompt was given, not a list

    @classmethod
    def of(
        cls,
        target: Target,
        prompts: Prompts,
        drafter: Named | Drafter,
        law: str | None = None,
        trace: Writer | None = None,
        batch: int | None = None,
        memory: float | None = None,
        streams: bool = False,
        **options: Any,
    ) -> "Job":
        """From the arguments of `generate`. Raises ValueError; TypeError for one that there is not."""
        if unknown := options.keys() - Options.__annotations__.keys():
            known = ", ".join(BatchOptions.__annotations__)
            raise TypeError(f"generate has no argument {unknown.pop()!r}: it has {known}")
        params = SamplingParams.of(target, **options)
        ids, single = read_prompts(target, prompts)
        if law is not None and law not in list(LAWS):
            raise ValueError(f"Unknown law: {law!r}. Available: {', '.join(LAWS)}")
        if batch is not None and not (is_whole(batch) and batch > 0):
            raise ValueError(f"batch is {batch!r}; it must be at least 1, a whole number")
        if isinstance(drafter, str | PathLike | Spec):
            # Laws other than the coupled do not allow drafts that depend on the noise.
            temperature = params.sampling.temperature if law in (None, "coupled") else 0.0
            drafter = cached_drafter(drafter, target, temperature, min(batch or len(ids), len(ids)))
        if not isinstance(drafter, Drafter):
            raise ValueError(f"drafter is {drafter!r}: give a name, a directory or a slipstream.Drafter")
        if trace is not None:
            check_kind("trace", trace, Writer, "give an open file, or anything else with write")
        law = law or drafter.law
        if drafter.uses_target_noise and law != "coupled":
            raise ValueError(
                f"this drafter looks at the target's noise, which the {law} law does not allow: use law "
                "coupled"
            )
        if streams and target.text is None:
            raise ValueError(f"target {target.name} has no tokenizer: call generate, and read its token ids")
        streams |= trace is not None
        requests = [params.request(i, prompt, streams=streams) for i, prompt in enumerate(ids)]
        job = cls(target, drafter, requests, LAWS[law], trace, batch, single)
        if memory is None:
            return job
        check_kind("memory", memory, Real, "give GiB")
        return replace(job, batch=min(job.rows, text_memory(target, drafter, job.longest).batch(memory)))

    @property
    def rows(self) -> int:
        """Requests that are under way at once."""
        return min(self.batch or len(self.requests), len(self.requests))

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(len(request.prompt) + request.limit for request in self.requests)

    def check_single(self, taker: str, caller: str) -> None:
        """Raises ValueError for more than one prompt."""
        if (count := len(self.requests)) > 1:
            raise ValueError(f"{taker} takes one prompt, {count} were given: call {caller} once for each")

    def steps(self) -> Iterator[Seconds]:
        """Answer the requests, step by step; those that wait take the rows of finished ones. Yields where the
        time went so far. What was learnt of steps is kept, also where the caller ends them."""
        chooses = policy(self.target, self.drafter, self.rows)
        engine = Engine(self.target, self.drafter, self.law, self.rows, capacity=self.longest, policy=chooses)
        tracer = None if self.trace is None else Tracer(self.trace, engine)
        engine.add(*self.requests)
        try:
            while engine.busy:
                requests = engine.step()
                engine.check(requests)
                if tracer is not None and requests:
                    tracer.take(requests)
                yield engine.seconds
            engine.free()  # a drafter may remember texts that leave
        finally:
            keep(self.target, self.drafter)

    def run(self, streamer: Streamer | None = None) -> list[Generation]:
        """Answer the requests. Raises Interrupted."""
        seconds = Seconds()

        def answers() -> list[Generation]:
            return [generation(request, seconds) for request in self.requests]

        try:
            if streamer is not None:
                streamer.put(torch.tensor(self.requests[0].prompt))
            for seconds in self.steps():  # noqa: B007
                if streamer is not None and (tokens := self.requests[0].released()):
                    streamer.put(torch.tensor(tokens))
        except KeyboardInterrupt as stopped:
            raise Interrupted(answers(), self.single) from stopped
        if streamer is not None:
            streamer.end()
        return answers()
