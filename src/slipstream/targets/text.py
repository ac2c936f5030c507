"""A Hugging Face tokenizer and its chat template."""

from collections.abc import Sequence
from typing import Any, final

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from slipstream.core.target import Messages, Text


@final
class HFText(Text):
    """Text through a Hugging Face tokenizer; `name` is what errors call its target."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name

    @property
    def has_chat(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def eos(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    def encode(self, prompt: str | Messages) -> list[int]:
        if not self.has_chat:
            if isinstance(prompt, str):
                return self.ids(prompt, special=True)
            raise ValueError(f"target {self.name} has no chat template: give the prompt as text")
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        how: Any = {"add_generation_prompt": True, "return_dict": True}
        try:
            encoded: Any = self.tokenizer.apply_chat_template(messages, **how)
            return list(encoded["input_ids"])
        except Exception as error:  # templates raise errors of many types
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"the chat template of {self.name} does not take these messages: {reason}"
            ) from error

    def ids(self, text: str, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def render(self, messages: Messages, ask: bool) -> str:
        how: Any = {"conversation": list(messages), "tokenize": False, "add_generation_prompt": ask}
        try:
            return str(self.tokenizer.apply_chat_template(**how))
        except (TemplateError, IndexError) as error:
            raise ValueError(f"the chat template of {self.name} refuses these turns: {error}") from error

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        # A clean-up of spaces would change text that was already given out.
        how: Any = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(tokens), **how))

    def written(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))
