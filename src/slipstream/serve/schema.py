"""What a request may ask for: OpenAI's fields and this server's own, as pydantic models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StrictInt,
    field_validator,
    model_validator,
)
from torch import Tensor
from typing_extensions import TypeAliasType

from slipstream.core.target import Target
from slipstream.engine.sampling_params import SamplingOptions
from slipstream.targets.prompts import check_readable, checked_ids, encode, message_of

MOST_LIKELY = 20  # alternatives that may be asked for with each token
STOPS, STOP_CHARACTERS = 16, 1024  # stop strings of a request, at most, and their characters in all
ANY = (object(),)
EMPTY: tuple[Any, ...] = ("", [], {}, False)

# Fields that are not honoured, and the values with which they ask for nothing. `ANY`: they never change text.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("auto",),
    "tools": ([],),
    "verbosity": ("medium",),
}
NEVER = ("metadata", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user")
HARMLESS |= dict.fromkeys(NEVER, ANY)

# Lists end at their first fault: a long one may hold thousands. In FastAPI they are less strict than others.
Ids = TypeAliasType("Ids", Annotated[list[StrictInt], FailFast()])
IdsOfSeveral = TypeAliasType("IdsOfSeveral", Annotated[list[Ids], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
BiasValue = Annotated[float, Field(ge=-100, le=100)]


def _first_fault(biases: Any) -> Any:
    """The first wrong bias alone, if there is one: a body may hold 50,000, and each would be a fault."""
    for token, bias in biases.items() if isinstance(biases, Mapping) else ():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            return {token: bias}
    return biases


class Strict(BaseModel):
    """A model that takes no other fields, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    harmless: ClassVar[dict[str, tuple[Any, ...]] | None] = None  # like `HARMLESS`; None of a field, too

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, fields: Any) -> Any:
        """Drop fields that ask for nothing, and all but one of those that are not known: a body may hold
        100,000, and each would be a fault."""
        if not isinstance(fields, Mapping):
            return fields
        if (harmless := cls.harmless) is not None:
            fields = {
                key: value
                for key, value in fields.items()
                if not (value is None or harmless.get(key) is ANY or value in harmless.get(key, ()))
            }
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((key for key in fields if key not in known), None)
        return {key: value for key, value in fields.items() if key == first or key in known}


class StreamOptions(Strict):
    """`include_usage`: the last event before the end holds the usage."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # pads events against eavesdroppers; none is needed here


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


TextParts = TypeAliasType("TextParts", Annotated[list[TextPart], FailFast()])


class Called(Strict):
    """The function of a call; `arguments` is JSON."""

    harmless = {"parsed_arguments": ANY}
    name: str
    arguments: str


class ToolCall(Strict):
    """A call that the assistant made."""

    harmless = {"index": ANY}
    id: str
    type: Literal["function"] = "function"
    function: Called


class Function(Strict):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


ToolCalls = TypeAliasType("ToolCalls", Annotated[list[ToolCall], FailFast()])
Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast()])


class Message(Strict):
    """One turn."""

    # Clients send back all that an answer had.
    harmless = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"), EMPTY)
    harmless["parsed"] = ANY
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | TextParts | None = None
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                raise ValueError(f"only parts of type 'text' can be read, not {part['type']!r:.60}")
        return content

    @model_validator(mode="after")
    def _says_or_calls(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs content")
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """As a chat template takes it: arguments as values, and content that may be empty."""
        message = {"content": "", **self.model_dump(exclude_none=True)}
        if self.role == "developer":  # OpenAI's newer word, which templates do not know
            message["role"] = "system"
        return message_of(message)


class JSONSchema(Strict):
    """A schema as OpenAI has it. It is kept to in any case."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer may be: OpenAI's "text", "json_object" and "json_schema", and this server's own "regex",
    "grammar" and "choice", each with a field of its name."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JSONSchema | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Texts | None = None

    @model_validator(mode="after")
    def _has_its_field(self) -> "ResponseFormat":
        fields = ("json_schema", "regex", "grammar", "choice")
        present = [name for name in fields if getattr(self, name) is not None]
        if present != [name for name in fields if name == self.type]:
            needs = f"the field {self.type}" if self.type in fields else "no other field"
            raise ValueError(f"type {self.type!r} needs {needs}")
        return self

    @property
    def bounds(self) -> dict[str, Any]:
        """The argument of `generate` that says the same, if there is one."""
        if self.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.json_schema}
        return {} if self.type == "text" else {self.type: getattr(self, self.type)}


class RequestBody(Strict):
    """What both kinds of requests may hold. What is not given comes from the target, as in `generate`."""

    harmless = HARMLESS
    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, BiasValue] | None, BeforeValidator(_first_fault)] = None
    seed: int | None = None
    stop: str | Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_cache_key: str | None = None  # requests of one key share what is kept of prompts and answers
    drafter: str | None = None  # "vanilla" decodes plainly: the same text, but for proposal=sampled
    trace: bool | None = None  # each event of a stream holds the tree of its round

    @field_validator("stop")
    @classmethod
    def _bounded(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > STOPS or sum(map(len, strings)) > STOP_CHARACTERS:
            raise ValueError(f"at most {STOPS} stop strings, of {STOP_CHARACTERS} characters in all")
        return stop

    @model_validator(mode="after")
    def _streams(self) -> "RequestBody":
        for name in ("stream_options", "trace"):
            if getattr(self, name) and not self.stream:
                raise ValueError(f"{name} needs stream to be true")
        return self

    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        names = SamplingOptions.__annotations__.keys() & RequestBody.model_fields
        return {name: getattr(self, name) for name in names}


class Completion(RequestBody):
    """The body of /v1/completions: text as it stands, without a chat template."""

    prompt: str | Ids | Texts | IdsOfSeveral
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELY)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _echoes(self) -> "Completion":
        if self.echo and self.logprobs is not None:
            raise ValueError("echo cannot be had with logprobs: this server has none of prompts")
        return self

    @property
    def most_likely(self) -> int | None:
        """Alternatives wanted with each token; None: no probabilities are wanted at all."""
        return self.logprobs

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of each prompt: its characters, and how many tokens it has at least, whatever these say."""
        return [(len(row), 0) if isinstance(row, str) else (0, len(row)) for row in self.prompts]

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or several prompts, as a list."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt

    def ids(self, target: Target) -> list[list[int]]:
        """The prompts as tokens. Raises ValueError."""
        assert target.text is not None
        rows = []
        for prompt in self.prompts:
            check_readable(prompt, "the prompt")
            ids = target.text.ids(prompt, special=True) if isinstance(prompt, str) else prompt
            if not ids:
                raise ValueError("the prompt is empty: give at least one token")
            rows.append(checked_ids(ids, target.vocab))
        return rows


class ChatCompletion(RequestBody):
    """The body of /v1/chat/completions: messages, through the target's chat template."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELY)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "ChatCompletion":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if None not in (two := {self.max_tokens, self.max_completion_tokens}) and len(two) > 1:
            raise ValueError("max_tokens is the older name of max_completion_tokens: give one of them")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    @property
    def most_likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        contents = [message.content or "" for message in self.messages]
        texts = [text if isinstance(text, str) else "".join(part.text for part in text) for text in contents]
        return [(sum(map(len, texts)), len(texts))]

    def ids(self, target: Target) -> list[list[int]]:
        return [encode(target, [message.turn for message in self.messages], self.offered)]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that may be called, as a chat template takes them."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


@dataclass(frozen=True)
class Bias:
    """logit_bias: adds to the logits of tokens, as a processor."""

    tokens: tuple[int, ...]
    biases: tuple[float, ...]

    @classmethod
    def of(cls, biases: Mapping[str, float], vocab: int) -> "Bias":
        """From token ids as text, which JSON asks for. Raises ValueError."""
        if wrong := [token for token in biases if not (token.isdecimal() and len(token) < 20)]:
            raise ValueError(f"logit_bias holds {wrong[0][:40]!r}, which is no token id")
        return cls(tuple(checked_ids(map(int, biases), vocab, "logit_bias")), tuple(biases.values()))

    def __call__(self, ids: Int[Tensor, "1 T"], x: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        tokens = torch.tensor(self.tokens, device=x.device)
        return x.index_add(1, tokens, torch.tensor([self.biases], dtype=x.dtype, device=x.device))
