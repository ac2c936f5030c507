"""Prompts: token ids from text, messages, ids or a tokenizer's output; Hugging Face's tokenizers."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from numbers import Real
from pathlib import PurePath
from typing import Any, final

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from slipstream.core.target import Messages, Rendered, Target, Text
from slipstream.files import first_line, is_whole
from slipstream.targets.special_tokens import Specials, texts_in

# text, token ids, messages, or what a tokenizer returns
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Tensor | np.ndarray
FORMS = "text, messages, token ids, a tokenizer's output, or a list of such"
UNREADABLE = re.compile("[\ud800-\udfff]")  # stands in Python's strings for bytes that are not UTF-8
LONGEST = 2**22  # characters: tokenizers end the process where memory does not suffice for a text

# How vocabularies write bytes: SentencePiece's as <0xF0>; GPT-2's as letters, those that print as themselves
# and the others, in order, as the letters from 256 on.
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = sorted({*range(256)}.difference(PRINTED))
LETTERS = {chr(byte): byte for byte in PRINTED} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


@final
class HFText(Text):
    """Text through a Hugging Face tokenizer; `name`: what errors call its target."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name

    @cached_property
    def _specials(self) -> Specials:
        return Specials(self.tokenizer)

    @property
    def has_chat(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def eos(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    @cached_property
    def calls_tools(self) -> bool:
        call = {"name": "f", "arguments": {"a": "b"}}
        tool: Any = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        calls = [{"id": "call_0", "type": "function", "function": call}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        turns: Any = [{"role": "user", "content": "a"}, answer]
        render: Any = self.tokenizer.apply_chat_template
        try:
            bare, text = (render(turns, tools=tools, tokenize=False) for tools in (None, [tool]))
            written = str(text).rpartition("<tool_call>")[2].partition("</tool_call>")[0]
            return bare != text and json.loads(written) == call
        except Exception:  # no JSON, such as Qwen3-Coder's XML; templates raise errors of many types
            return False

    def encode(self, prompt: str | Messages, tools: Messages = ()) -> list[int]:
        if not self.has_chat:
            if isinstance(prompt, str):
                return self.ids(prompt, special=True)
            raise ValueError(f"target {self.name} has no chat template: give the prompt as text")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.ids(self.render(messages, ask=True, tools=tools))

    def ids(self, text: str, special: bool = False) -> list[int]:
        if isinstance(text, Rendered) and text.masked:
            return self._specials.ids(text)
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def render(self, messages: Messages, ask: bool, tools: Messages = ()) -> Rendered:
        text = self._rendered(messages, ask, tools)
        if tools and self._writes(text, messages, ask):
            raise ValueError(f"the chat template of {self.name} has no tools: leave them out")
        silent = [{key: turn[key] for key in turn if key != "tool_calls"} for turn in messages]
        if silent != list(messages) and self._writes(text, silent, ask, tools):
            raise ValueError(
                f"the chat template of {self.name} does not write calls of tools: leave tool_calls out"
            )
        return text

    def _writes(self, text: str, messages: Messages, ask: bool, tools: Messages = ()) -> bool:
        """Whether the template writes this text of these messages, too."""
        with suppress(ValueError):
            return text == self._rendered(messages, ask, tools)
        return False

    def _rendered(self, messages: Messages, ask: bool, tools: Messages = ()) -> Rendered:
        def template(texts: Any) -> str:
            turns, tools = texts
            how: Any = {"tools": tools or None, "tokenize": False, "add_generation_prompt": ask}
            return str(self.tokenizer.apply_chat_template(turns, **how))

        try:
            return self._specials.render(template, [list(messages), list(tools)])
        except Exception as error:  # templates raise errors of many types
            raise ValueError(
                f"the chat template of {self.name} does not take these messages: {first_line(error)}"
            ) from error

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        # A clean-up of spaces would change text that was already given out.
        how: Any = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(tokens), **how))

    def written(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def bytes_of(self, token: int) -> bytes | None:
        if "\ufffd" not in (text := self.decode([token], special=True)):
            return text.encode()
        word = self.written(token)
        if byte := BYTE.fullmatch(word):
            return bytes([int(byte[1], 16)])
        return bytes(map(LETTERS.__getitem__, word)) if LETTERS.keys() >= {*word} else None


def read_prompts(target: Target, prompts: Prompt | Sequence[Prompt]) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether a single prompt was given (not a list of one). Raises ValueError:
    there is no prompt, or `encode` refuses one."""
    value: Any = _plain(prompts)
    text = isinstance(value, (str, bytes, PurePath))
    if not text and not isinstance(value, (list, tuple)):
        raise ValueError(f"prompts is a {type(prompts).__name__}: give {FORMS}")
    if not value:
        raise ValueError("the prompt is empty" if text else "there are no prompts: give at least one")
    single = text or isinstance(value[0], Real) or _is_message(value[0])
    return [encode(target, prompt) for prompt in ([value] if single else value)], single


def encode(target: Target, prompt: Prompt, tools: Messages = ()) -> list[int]:
    """Token ids of one prompt. Ids lose the padding that an attention mask names. Messages, and text if there
    is a chat template, pass through the template, as do the tools that an answer to messages may call. Raises
    ValueError: the prompt is empty or no prompt, an id is outside the vocabulary, the chat template refuses
    the messages, or text is given to a target without a tokenizer."""
    value: Any = _plain(prompt)
    if isinstance(value, PurePath):
        raise ValueError(
            f"the prompt is the path {str(value)!r}: give what the file says, Path(…).read_text()"
        )
    if not isinstance(value, (str, list, tuple)):
        raise ValueError(f"the prompt is a {type(prompt).__name__}: give text, messages or token ids")
    if len(value) == 0 or (isinstance(value, str) and not value.strip()):
        raise ValueError("the prompt is empty: give at least one token")
    if isinstance(value, str) or all(map(_is_message, value)):
        check_readable([value, list(tools)], "the prompt")
        if target.text is None:
            raise ValueError(f"target {target.name} has no tokenizer: give the prompt as token ids")
        if isinstance(value, str) or not target.text.has_chat:
            value = target.text.encode(value)
        else:
            value = target.text.encode(list(map(message_of, value)), tools)
    tokens = checked_ids(value, target.vocab)
    if not tokens:
        raise ValueError("the prompt is empty: its text has no tokens")
    return tokens


def checked_ids(tokens: Iterable[Any], vocab: int, what: str = "the prompt") -> list[int]:
    """Token ids as Python's integers. Raises ValueError for anything else."""
    ids = list[int]()
    for token in tokens:
        if not is_whole(token):
            raise ValueError(
                f"{what} holds {str(token)[:40]!r}, a {type(token).__name__}, as a token id: give integers"
            )
        if not 0 <= token < vocab:
            raise ValueError(
                f"{what} holds the token id {token}; the target's vocabulary has 0 to {vocab - 1}"
            )
        ids.append(int(token))
    return ids


def check_readable(texts: Any, what: str) -> None:
    """Raise ValueError for text, anywhere in lists and mappings, that no encoding can write, or that is too
    long for a tokenizer."""
    for text in texts_in(texts, keys=True):
        if len(text) > LONGEST:
            raise ValueError(f"{what} has a text of {len(text):,} characters: give at most {LONGEST:,}")
        if UNREADABLE.search(text):
            raise ValueError(f"{what} is no Unicode text (bytes that are not UTF-8?): give it as UTF-8")


def _plain(value: Any) -> Any:
    """Tensors, arrays and a tokenizer's output as lists."""
    if isinstance(value, Mapping) and "input_ids" in value:
        return _unpadded(_plain(value["input_ids"]), _plain(value.get("attention_mask")))
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value


def _unpadded(ids: Any, mask: Any) -> Any:
    """The ids of one prompt or of several at which the mask is not 0."""
    if mask is None:
        return ids
    try:
        if all(isinstance(row, Sequence) for row in ids):
            return [_unpadded(*pair) for pair in zip(ids, mask, strict=True)]
        return [token for token, real in zip(ids, mask, strict=True) if real]
    except (TypeError, ValueError) as error:
        raise ValueError(
            "attention_mask does not fit input_ids: give both as the tokenizer returned them"
        ) from error


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "input_ids" not in value


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: content is text, "" where there are calls alone, and arguments of
    calls are values. Raises ValueError for what is no message."""
    if "role" not in message or not {"content", "tool_calls"} & message.keys():
        keys = ", ".join(map(str, message)) or "nothing"
        raise ValueError(f'a message has {keys}: it needs "role" and "content"')
    content, calls = message.get("content"), message.get("tool_calls") or ()
    if isinstance(content, (list, tuple)):
        content = "".join(map(_part, content))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"a message's content is a {type(content).__name__}: give text")
    return {**message, "content": content} | ({"tool_calls": list(map(_call, calls))} if calls else {})


def _call(call: Any) -> dict[str, Any]:
    """A call with its arguments as a value; as OpenAI has them they are JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('a message\'s tool_calls are no list of {"function": {"name", "arguments"}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")  # some clients write nothing for none
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of a call are no JSON: {error}") from error
    called = {**function, "arguments": arguments}
    return {**call, "function": called} if "function" in call else called


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ValueError(f"a message holds a part of type {kind!r}: only text parts can be read")
    return text
