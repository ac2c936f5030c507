"""Sampling parameters: all that an answer depends on beside its prompt, from the caller and
generation_config. Fields of the latter that change the text are honoured by Hugging Face's own processors, in
their order, or refused."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import torch
import transformers as hf
from jaxtyping import Float, Int
from torch import Tensor

from slipstream.core.grammar import Grammar, GrammarLimits
from slipstream.core.sampling import Processor, Sampling
from slipstream.core.target import Target
from slipstream.engine.detokenizer import silent_stops
from slipstream.engine.request import Request
from slipstream.files import is_whole, several
from slipstream.targets.prompts import check_readable, checked_ids

GRAMMARS = ("json_schema", "regex", "grammar", "choice")  # arguments of `generate`, of which one may be given
NEW_TOKENS = 256  # of an answer, where neither the caller nor the target gives a limit


class SamplingOptions(TypedDict, total=False):
    """Arguments of `SamplingParams.of`, which `generate` explains; None is not given."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    processors: Sequence[Any] | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str] | None
    grammar_limits: GrammarLimits | None
    eos_token_ids: int | Iterable[int] | None
    stop: str | Sequence[str] | None


@dataclass(frozen=True)
class Row:
    """What a processor is made from."""

    params: "SamplingParams"
    prompt: Any  # ids [1, start], which Hugging Face calls a LongTensor
    start: int
    limit: int  # the most tokens that the answer may have
    eos: list[int]
    device: Any


@dataclass(frozen=True)
class BeforeTopK:
    """A warper between temperature and top-k, as a processor, which runs before both."""

    warper: Any
    params: "SamplingParams"

    def __call__(self, ids: Int[Tensor, "1 T"], x: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        scores = self.warper(ids, x / self.params.sampling.temperature)
        return x.masked_fill(scores == -torch.inf, -torch.inf)


@dataclass(frozen=True)
class BeforeEnd:
    """A processor that is asked where plain decoding asks it: not behind a guess that ends the answer."""

    processor: Processor
    row: Row

    def __call__(self, ids: Int[Tensor, "1 T"], x: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        answer = ids[0, self.row.start :].tolist()
        ended = len(answer) >= self.row.limit or any(end in answer for end in self.row.eos)
        return x if ended or self.row.params.stopped(answer) else self.processor(ids, x)

    @property
    def __name__(self) -> str:
        return str(getattr(self.processor, "__name__", type(self.processor).__name__))


def _forced_bos(value: Any, row: Row) -> Processor:
    return hf.ForcedBOSTokenLogitsProcessor(*checked_ids([value], row.params.target.vocab, "it"))


def _forced_eos(value: Any, row: Row) -> Processor:
    ids = checked_ids(several(value), row.params.target.vocab, "it")
    return hf.ForcedEOSTokenLogitsProcessor(row.start + row.limit, ids, row.device)


def _decay(value: Any, row: Row) -> Processor:
    return hf.ExponentialDecayLengthPenalty(value, row.eos, row.start)


def _suppress_at_begin(value: Any, row: Row) -> Processor:
    forced = row.params.target.generation_config.forced_bos_token_id is not None
    second = forced and row.start == 1  # the second token is the first that is chosen
    return hf.SuppressTokensAtBeginLogitsProcessor(value, row.start + second, row.device)


def _watermark(value: Any, row: Row) -> Processor:
    if not isinstance(value, hf.WatermarkingConfig):  # SynthID's processor counts its calls
        raise ValueError(f"a {type(value).__name__} cannot be applied to a tree: use a WatermarkingConfig")
    processor: Processor = value.construct_processor(row.params.target.vocab, row.device)
    return processor


# For each field of generation_config, in Hugging Face's order: the value that, like None, turns it off, and
# what makes its processor of a value x and a row r.
Table = dict[str, tuple[Any, Callable[[Any, Row], Processor]]]
PROCESSORS: Table = {
    "sequence_bias": (None, lambda x, r: hf.SequenceBiasLogitsProcessor(x)),
    "encoder_repetition_penalty": (1, lambda x, r: hf.EncoderRepetitionPenaltyLogitsProcessor(x, r.prompt)),
    "repetition_penalty": (1, lambda x, r: hf.RepetitionPenaltyLogitsProcessor(x)),
    "no_repeat_ngram_size": (0, lambda x, r: hf.NoRepeatNGramLogitsProcessor(x)),
    "encoder_no_repeat_ngram_size": (0, lambda x, r: hf.EncoderNoRepeatNGramLogitsProcessor(x, r.prompt)),
    "bad_words_ids": (None, lambda x, r: hf.NoBadWordsLogitsProcessor(x, r.eos or None)),
    "min_length": (0, lambda x, r: hf.MinLengthLogitsProcessor(x, r.eos, r.device)),
    "min_new_tokens": (0, lambda x, r: hf.MinNewTokensLengthLogitsProcessor(r.start, x, r.eos, r.device)),
    "forced_bos_token_id": (None, _forced_bos),
    "forced_eos_token_id": (None, _forced_eos),
    "remove_invalid_values": (False, lambda x, r: hf.InfNanRemoveLogitsProcessor()),
    "exponential_decay_length_penalty": (None, _decay),
    "suppress_tokens": (None, lambda x, r: hf.SuppressTokensLogitsProcessor(x, r.device)),
    "begin_suppress_tokens": (None, _suppress_at_begin),
}
TOP_H: Table = {"top_h": (None, lambda x, r: BeforeTopK(hf.TopHLogitsWarper(x), r.params))}
WARPERS: Table = {
    "typical_p": (1, lambda x, r: hf.TypicalLogitsWarper(x)),
    "epsilon_cutoff": (0, lambda x, r: hf.EpsilonLogitsWarper(x)),
    "eta_cutoff": (0, lambda x, r: hf.EtaLogitsWarper(x, device=r.device)),
}
WATERMARK: Table = {"watermarking_config": (None, _watermark)}
NEED_EOS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")  # no effect without an EOS id
SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # read only where the target samples, as in Hugging Face

# Fields that change the text and are refused: the value that, like None, turns it off, and what it asks for.
REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "beam search"),
    "num_return_sequences": (1, "several answers to one prompt"),
    "penalty_alpha": (0, "contrastive search"),
    "dola_layers": (None, "DoLa"),
    "constraints": (None, "constrained beam search"),
    "force_words_ids": (None, "constrained beam search"),
    "guidance_scale": (1, "classifier-free guidance"),
    "token_healing": (False, "another end of the prompt"),
    "max_time": (None, "a limit in seconds"),
}


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of a call of `generate`."""

    target: Target
    sampling: Sampling  # the first row's, without what depends on its prompt
    max_new_tokens: int | None  # None if the target's `max_length` decides
    eos: frozenset[int]
    stop: tuple[str, ...]

    @classmethod
    def of(
        cls,
        target: Target,
        max_new_tokens: int | None = None,
        eos_token_ids: int | Iterable[int] | None = None,
        stop: str | Sequence[str] | None = None,
        grammar_limits: GrammarLimits | None = None,
        **sampling: Any,
    ) -> "SamplingParams":
        """From `generate`'s arguments; an argument of None comes from generation_config. Raises ValueError
        for an argument or a field of generation_config that is out of range or cannot be honoured."""
        check_kind("target", target, Target, "give slipstream.HFTarget(model, tokenizer) or load_target(…)")
        config = target.generation_config
        for name, (off, what) in REFUSED.items():
            if (value := getattr(config, name, None)) not in (None, off):
                raise ValueError(
                    f"the generation_config of {target.name} sets {name} to {value} ({what}), which cannot "
                    f"be honoured: set target.model.generation_config.{name} = {off}"
                )
        new = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        new = NEW_TOKENS if new is None and config.max_length is None else new
        if new is not None and (not is_whole(new) or new < 1):
            raise ValueError(f"max_new_tokens is {new!r}; it must be at least 1, a whole number")
        eos = _eos(target, eos_token_ids)
        stops = _stops(target, config.stop_strings if stop is None else stop)
        sources = {name: sampling.pop(name, None) for name in GRAMMARS}
        grammar = _grammar(target, sources, eos, grammar_limits)
        return cls(target, resolve_sampling(target, **sampling, grammar=grammar), new, eos, stops)

    def limit(self, prompt: Sequence[int]) -> int:
        """The most tokens that an answer to the prompt may have. Raises ValueError if it has no room."""
        config, new = self.target.generation_config, self.max_new_tokens
        if new is None and len(prompt) >= config.max_length:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; the generation_config of {self.target.name} has a "
                f"max_length of {config.max_length} for prompt and answer: give max_new_tokens, or "
                "max_tokens in a request"
            )
        if len(prompt) >= self.target.window:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; {self.target.name} has a window of "
                f"{self.target.window} for prompt and answer: shorten the prompt"
            )
        return min(config.max_length - len(prompt) if new is None else new, self.target.window - len(prompt))

    def request(self, i: int, prompt: list[int], limit: int | None = None, **fields: Any) -> Request:
        """The i-th request of a batch; `fields`: others of it. Raises ValueError if it has no room."""
        limit = self.limit(prompt) if limit is None else limit
        text = self.target.text
        return Request(prompt, self.row(i, prompt), limit, self.eos, self.stop, text, **fields)

    def row(self, i: int, prompt: Sequence[int]) -> Sampling:
        """Sampling of the i-th row of a batch: noise of its own, and the processors of generation_config."""
        target, own = self.target, self.sampling
        ids = torch.tensor([list(prompt)], device=target.device)
        eos = sorted(token for token in self.eos if token < target.vocab)
        row = Row(self, ids, len(prompt), self.limit(prompt), eos, target.device)
        config_processors = self._processors(PROCESSORS, row)
        if target.generation_config.min_new_tokens is not None:
            config_processors.pop("min_length", None)
        penalty = own.repetition_penalty
        replaced = any(type(one) is hf.RepetitionPenaltyLogitsProcessor for one in own.processors)
        if next(iter(config_processors), None) == "repetition_penalty" and not replaced:
            del config_processors["repetition_penalty"]  # the sampler's own also comes first, and is faster
        elif "repetition_penalty" in config_processors:
            penalty = 1.0
        merged = _merged(list(config_processors.values()), own.processors)
        processors: list[Processor] = [BeforeEnd(processor, row) for processor in merged]
        warpers: list[Processor] = [BeforeEnd(warper, row) for warper in own.warpers]
        if own.temperature:
            processors += self._processors(TOP_H, row).values()
            warpers += self._processors(WARPERS, row).values()
        warpers += self._processors(WATERMARK, row).values()
        own = replace(own, row=i, repetition_penalty=penalty)
        return replace(own, processors=tuple(processors), warpers=tuple(warpers))

    def stopped(self, tokens: list[int]) -> bool:
        """Whether an answer so far holds a stop string."""
        if not self.stop or (text := self.target.text) is None:
            return False
        answer = text.decode(tokens)
        return any(stop in answer for stop in self.stop) or not self._silent.isdisjoint(tokens)

    @cached_property
    def _silent(self) -> frozenset[int]:
        return frozenset() if self.target.text is None else silent_stops(self.target.text, self.stop)

    def _processors(self, table: Table, row: Row) -> dict[str, Processor]:
        processors = {}
        for name, (off, make) in table.items():
            value = getattr(self.target.generation_config, name, None)
            if name == "repetition_penalty":
                value = self.sampling.repetition_penalty
            if value not in (None, off, []) and (row.eos or name not in NEED_EOS):
                with _blamed(self.target, name, value):
                    processors[name] = make(value, row)
        return processors


def resolve_sampling(target: Target, **options: Any) -> Sampling:
    """`Sampling` from the arguments or else generation_config. It is greedy unless a temperature is given or
    generation_config sets `do_sample`. Raises ValueError."""
    config = target.generation_config
    options = {name: value for name, value in options.items() if value is not None}
    processors = options.get("processors", ())
    check_kind("processors", processors, (list, tuple), "give a list of LogitsProcessors")
    options["processors"] = tuple(processors)
    if "temperature" not in options and not config.do_sample:
        options["temperature"] = 0.0
    defaults = {"temperature": 1.0}
    for name in ("repetition_penalty", *(SAMPLED if options.get("temperature") != 0 else ())):
        value = getattr(config, name, None)
        if value is not None and name not in options:
            with _blamed(target, name, value):
                Sampling(**{name: value})
            defaults[name] = value
    return Sampling(**defaults | options)


def check_kind(name: str, value: Any, kind: Any, advice: str) -> None:
    """Raises ValueError for an argument of another type."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}: {advice}")


@contextmanager
def _blamed(target: Target, name: str, value: Any) -> Iterator[None]:
    """Turn an error over a field of generation_config into a ValueError that names the field."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"the generation_config of {target.name} sets {name} to {str(value)[:60]!r}, which cannot be "
            f"honoured: {error}"
        ) from error


def _merged(processors: list[Processor], own: Sequence[Processor]) -> list[Processor]:
    """Both lists. The caller's `own` replace those of their type, as in Hugging Face."""
    merged = [next((one for one in own if type(one) is type(other)), other) for other in processors]
    return [*merged, *(one for one in own if not any(one is other for other in merged))]


def _grammar(
    target: Target, sources: Mapping[str, Any], eos: frozenset[int], limits: GrammarLimits | None
) -> Grammar | None:
    kinds = [kind for kind, source in sources.items() if source is not None]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} are given: an answer has one grammar")
    if not kinds:
        return None
    from slipstream.targets.grammar import read_grammar

    (kind,) = kinds
    source = sources[kind]
    return source if isinstance(source, Grammar) else read_grammar(target, kind, source, eos, limits)


def _eos(target: Target, own: Any) -> frozenset[int]:
    if own is not None:
        return frozenset(checked_ids(several(own), target.vocab, "eos_token_ids"))
    ids = target.generation_config.eos_token_id
    if ids is None and target.text is not None:
        ids = target.text.eos
    with _blamed(target, "eos_token_id", ids):  # an id outside the vocabulary is no error: it never comes
        return frozenset(() if ids is None else checked_ids(several(ids), 2**63))


def _stops(target: Target, stop: Any) -> tuple[str, ...]:
    stops = () if stop is None else tuple(several(stop))
    for string in stops:
        if not isinstance(string, str):
            raise ValueError(f"stop holds {string!r}, a {type(string).__name__}: give strings")
    if "" in stops:
        raise ValueError("a stop string is empty: leave it out, or give at least one character")
    check_readable(stops, "a stop string")
    if stops and target.text is None:
        raise ValueError(
            f"target {target.name} has no tokenizer: end answers with eos_token_ids, not with stop strings"
        )
    return stops
