"""Special tokens, such as <|im_end|>, where the text of a message writes them: there they are text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from secrets import token_hex
from typing import Any, final

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from slipstream.core.target import Rendered

SIGNS = range(0x2980, 0x110000)  # where stand-ins are looked for: from symbols on that no template looks for


@final
class Specials:
    """Tells special tokens of a chat template from the same texts in the messages that it renders.

    In messages the first character of what would be a special token becomes one that stands nowhere else, and
    in what the template made of them it is turned back. So a template may strip and cut texts as it always
    does. Where there was one, a second tokenizer reads the text: in it special tokens have names that nobody
    knows, which are put in where the template wrote one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ends, added = {tokenizer.eos_token_id, tokenizer.bos_token_id}, tokenizer.added_tokens_decoder
        self._tokenizer = tokenizer
        self._tokens = {str(token): i for i, token in added.items() if token.special or i in ends}
        longest_first = sorted(filter(None, self._tokens), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(self, template: Callable[[Any], str], texts: Any) -> Rendered:
        """What `template` writes of `texts`: nested lists and mappings of texts."""
        strings = list(texts_in(texts, keys=True))
        if not any(map(self._any.search, strings)):
            return Rendered(template(texts))
        taken = set("".join(strings))
        free = (sign for sign in map(chr, SIGNS) if sign.isprintable() and sign not in taken)
        signs = dict(zip(sorted({token[0] for token in self._tokens if token}), free, strict=False))
        masked, back = template(self._masked(texts, signs)), {ord(sign): x for x, sign in signs.items()}
        text = Rendered(masked.translate(back))
        text.masked, text.signs = masked, back
        return text

    def ids(self, text: Rendered) -> list[int]:
        """Token ids of a rendered text with stand-ins. Raises ValueError if the tokenizer cannot do it."""
        if not self._tokenizer.is_fast:
            raise ValueError(
                "a message writes a special token, which this tokenizer cannot read as text: leave it out"
            )
        tokenizer, names, ids = self._renamed
        named = self._any.sub(lambda match: names[match[0]], text.masked).translate(text.signs)
        return [ids.get(token, token) for token in tokenizer.encode(named, add_special_tokens=False).ids]

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """A tokenizer in which special tokens have other names, and their texts are text; each one's name by
        its text; and its id in the first tokenizer, by that in this one."""
        backend: Any = self._tokenizer
        record = json.loads(backend.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        for token in record["added_tokens"]:
            token["special"] = token["content"] in self._tokens
        tokenizer = Tokenizer.from_str(json.dumps(record))
        tokenizer.encode_special_tokens = True  # as text
        names = {token: f"\ufdd0{token_hex(16)}\ufdd0" for token in self._tokens}
        for token, i in self._tokens.items():
            like = self._tokenizer.added_tokens_decoder[i]
            how = {"single_word": like.single_word, "lstrip": like.lstrip, "rstrip": like.rstrip}
            tokenizer.add_tokens([AddedToken(names[token], normalized=False, **how)])
        new_ids = ((tokenizer.token_to_id(name), self._tokens[token]) for token, name in names.items())
        return tokenizer, names, {i: token for i, token in new_ids if i is not None}

    def _masked(self, texts: Any, signs: Mapping[str, str]) -> Any:
        if isinstance(texts, str):
            while self._any.search(texts):  # again where two overlap
                texts = self._any.sub(lambda match: signs[match[0][0]] + match[0][1:], texts)
            return texts
        if isinstance(texts, Mapping):
            return {self._masked(key, signs): self._masked(value, signs) for key, value in texts.items()}
        return [self._masked(part, signs) for part in texts] if isinstance(texts, (list, tuple)) else texts


def texts_in(value: Any, keys: bool = False) -> Iterator[str]:
    """Every text in nested lists and mappings, in order; `keys`: those of mappings, too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from texts_in(key, keys) if keys else ()
            yield from texts_in(entry, keys)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from texts_in(entry, keys)
