"""generate: prompts in, answers out, with the arguments people know from Hugging Face."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.drafter import Drafter
from slipstream.core.sampling import Sampler, Sampling, rows_of
from slipstream.core.span import Span
from slipstream.core.verify import Law, coupled, lossy_typical, multi_round
from slipstream.decode.answer import Answer, Finish, Round, mean_accepted_length
from slipstream.decode.round import Decoder, Seconds
from slipstream.drafters import load_drafter
from slipstream.targets.hf import Target

LOSSY = "lossy-typical"
LAWS: dict[str, Law] = {"coupled": coupled, "multi-round": multi_round, LOSSY: lossy_typical}
Prompt = str | Sequence[int] | Sequence[dict[str, str]]


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
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    finish: Finish
    rounds: list[Round]
    seconds: Seconds

    @property
    def tau(self) -> float:
        """The answer's `mean_accepted_length`."""
        return mean_accepted_length(self.rounds)


def generate(
    target: Target,
    prompts: Prompt | Sequence[Prompt] | Tensor,
    drafter: str | Drafter = "vanilla",
    *,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    processors: Sequence[Any] = (),
    eos_token_ids: Iterable[int] | None = None,
    stop: str | Sequence[str] = (),
    law: str | None = None,
    streamer: Streamer | None = None,
    trace: Writer | None = None,
) -> Any:
    """Answer one prompt (a `Generation`) or several as one ragged batch (a list of them).

    The text is a function of (prompt, sampling, seed) alone, whatever the drafter and the batch: row i of a batch draws
    noise keyed by (seed, i). What is not given comes from the target's `generation_config`.

    Args:
        prompts: text (put through the chat template where there is one), messages, or token ids; or a list of such, or
            a tensor of ids [T] or [B, T].
        drafter: a name or a `Drafter`.
        temperature, …, processors: see `Sampling`.
        eos_token_ids: ids that end an answer; default: the target's.
        stop: strings that end an answer; they are not part of its text.
        law: "coupled" (same seed, same text) or "multi-round" (exact in distribution); default: the drafter's own.
            "lossy-typical" is Medusa's typical acceptance: at T > 0 the target would not say this.
        streamer: gets the prompt and then tokens as they come; one prompt only.
        trace: receives one JSON line per row and round.

    Raises:
        ValueError: an argument outside its range, an empty prompt, or one that fills the target's window.
    """
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, dict)))
    ids = [target.encode(prompt) for prompt in ([prompts] if single else prompts)]  # type: ignore[arg-type]
    if not ids:
        raise ValueError("there are no prompts: give at least one")
    if law is not None and law not in LAWS:
        raise ValueError(f"Unknown law: {law!r}. Available: {', '.join(LAWS)}")
    if streamer is not None and len(ids) > 1:
        raise ValueError(f"a streamer takes one prompt, {len(ids)} were given: call generate once for each")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise ValueError("a stop string is empty: leave it out, or give at least one character")
    check_limits(target, ids, max_new_tokens)
    sampling = resolve_sampling(
        target,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        processors=tuple(processors),
    )
    if isinstance(drafter, str):
        drafter = load_drafter(drafter, target.ends, sampling.temperature)
    law = law or drafter.law
    if drafter.peeks and law != "coupled":
        raise ValueError(f"this drafter looks at the target's noise, which the {law} law does not allow: use law coupled")
    eos = frozenset(_eos(target) if eos_token_ids is None else eos_token_ids)
    answers = [Answer(target, min(max_new_tokens, target.window - len(prompt)), eos, stops) for prompt in ids]
    seconds = decode(target, drafter, ids, rows_of(sampling, len(ids)), answers, LAWS[law], streamer, trace)
    made = [
        Generation(prompt, a.tokens, a.text if target.tokenizer else "", a.finish or "length", a.rounds, seconds)
        for prompt, a in zip(ids, answers, strict=True)
    ]
    return made[0] if single else made


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    answers: Sequence[Answer],
    law: Law = coupled,
    streamer: Streamer | None = None,
    trace: Writer | None = None,
) -> Seconds:
    """Fill `answers`, one per prompt; rows leave the batch as they finish. Returns where the time went."""
    sampler = Sampler(sampling, prompts, target.vocab, target.device)
    capacity = max(len(prompt) + answer.limit for prompt, answer in zip(prompts, answers, strict=True))
    decoder = Decoder.start(target, drafter, sampler, capacity, law)
    lengths, live = list(map(len, prompts)), list(range(len(prompts)))
    if streamer is not None:
        streamer.put(torch.tensor(prompts[0]))
    span = decoder.prefill(prompts)
    began = perf_counter()
    news, sound = [[token] for token in span.last(span.nexts).tolist()], sampler.sound.tolist()
    drafted = None  # the prompt's pass is no round
    while True:
        for i, row in enumerate(live):
            if not sound[i]:
                raise ValueError(target.unsound([*prompts[row], *answers[row].tokens]))
        for i, row in enumerate(live):
            taken = answers[row].extend(news[i])
            if drafted is not None:
                answers[row].rounds.append(Round(drafted[i], len(news[i]) - 1, len(taken)))
            if streamer is not None:
                streamer.put(torch.tensor(taken))
        going = [i for i, row in enumerate(live) if answers[row].finish is None]
        if not going:
            break
        if len(going) < len(live):
            live, lengths = [live[i] for i in going], [lengths[i] for i in going]
            decoder.select(going)
        decoder.cache.settle(lengths)
        decoder.seconds.host += perf_counter() - began
        span = decoder.step(limit=target.window - 1 - max(lengths))
        began = perf_counter()
        news, drafted, sound = _read(span, decoder.sampler)
        lengths = [length + len(tokens) for length, tokens in zip(lengths, news, strict=True)]
        if trace is not None:
            _write(trace, span, live, [len(answers[row].rounds) for row in live])
    decoder.seconds.host += perf_counter() - began
    if streamer is not None:
        streamer.end()
    return decoder.seconds


def _read(span: Span, sampler: Sampler) -> tuple[list[list[int]], list[int], list[int]]:
    """New tokens and drafted depth of each row, and whether they mean something: the round's one copy to the host."""
    assert span.tree is not None
    depths = replace(span.tree, probes=None).layout().depths
    drafted = depths.where(span.tree.tokens >= 0, 0).amax(1)
    about = torch.stack([span.count, drafted, sampler.sound], 1)
    table = torch.cat([about, span.nexts], 1).tolist()
    return [row[3 : 3 + row[0]] for row in table], [row[1] for row in table], [row[2] for row in table]


def _write(trace: Writer, span: Span, live: Sequence[int], rounds: Sequence[int]) -> None:
    """One JSON line per row: the tree, the accepted slots and the target's own token."""
    assert span.tree is not None and span.path is not None
    parents = span.tree.parent_slots().expand_as(span.tree.tokens).tolist()
    path, count, nexts = span.path.tolist(), span.count.tolist(), span.last(span.nexts).tolist()
    for i, tokens in enumerate(span.tree.tokens.tolist()):
        line = {"row": live[i], "round": rounds[i], "tokens": tokens, "parents": parents[i]}
        trace.write(json.dumps({**line, "accepted": path[i][: count[i]], "next": nexts[i]}) + "\n")


def check_limits(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse an answer without tokens and a prompt without room for one. Raises ValueError."""
    if max_new_tokens <= 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    for prompt in prompts:
        if len(prompt) >= target.window:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; {target.name} has a window of {target.window} for prompt and "
                "answer: shorten the prompt"
            )


def resolve_sampling(target: Target, **given: Any) -> Sampling:
    """`Sampling` from what was given and, for what is None, the target's generation_config; greedy unless that says
    `do_sample`."""
    config = target.generation_config
    defaults = {f.name: getattr(config, f.name, None) for f in fields(Sampling)}
    if not config.do_sample:
        defaults["temperature"] = 0.0
    elif config.temperature is None:
        defaults["temperature"] = 1.0
    settled = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    return Sampling(**{name: value for name, value in settled.items() if value is not None})


def _eos(target: Target) -> list[int]:
    ids = target.generation_config.eos_token_id
    if ids is None:
        ids = getattr(target.tokenizer, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
