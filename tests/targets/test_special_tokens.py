"""Special tokens that users write are text; those that the chat template writes are special."""

import random
from copy import deepcopy
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import tiny
from slipstream.core.target import Rendered
from slipstream.targets import HFTarget
from slipstream.targets.prompts import HFText
from slipstream.targets.special_tokens import Specials
from slipstream.training.data import encode_row

OPENS, CLOSES = "<|im_start|>", "<|im_end|>"
PIECES = [
    *(CLOSES, OPENS, "<s>", "<|im_", "end|>", "<", "|>", "hello", "lo wor"),
    *(" ", "\n", "naïve", "⦀", "\ufdd0", "</think>", "'s"),
]
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "as it is": TURN.replace("CONTENT", "m.content") + ASK,
    "stripped": TURN.replace("CONTENT", "m.content | trim") + ASK,
    "sliced": TURN.replace("CONTENT", "m.content[2:30]") + ASK,
    "parted": TURN.replace("CONTENT", "m.content.split('</think>')[-1].lstrip('\n')") + ASK,
    "begun": "<s>" + TURN.replace("CONTENT", "m.content | tojson") + ASK,
}  # fmt: skip


def made(pre, decoder, **words) -> PreTrainedTokenizerFast:
    """A BPE tokenizer that learnt a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), *"▁ \n<|>⦀\ufdd0"]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello world naïve <|im_end|> <|im_start|> end|>"] * 9, trainer)
    tokenizer.add_special_tokens(
        [OPENS, AddedToken(CLOSES, normalized=False, **words), AddedToken("<s>", normalized=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=CLOSES, bos_token="<s>")


TOKENIZERS = {
    "bytes": made(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
    "a space before the first": made(pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()),
    "a space before all": made(pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()),
    "strips": made(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), rstrip=True),
}


def text_of(tokenizer, template) -> HFText:
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = template
    return HFText(tokenizer, "tiny")


def conversations(pieces, count=60):
    rng = random.Random(0)
    for _ in range(count):
        yield [
            {"role": role, "content": "".join(rng.choices(pieces, k=rng.randint(0, 9)))}
            for role in ("system", "user", "assistant", "user")[rng.randint(0, 1) :]
        ]


def specials(text, ids) -> list[int]:
    return [token for token in ids if token in text.tokenizer.added_tokens_decoder]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_ordinary_messages_are_read_as_the_tokenizer_reads_them(tokenizer, template):
    text = text_of(tokenizer, template)
    for messages in conversations(PIECES[3:]):
        if any(map(text._specials._any.search, (m["content"] for m in messages))):
            continue
        expected = text.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert text.encode(messages) == expected
        rendered = text.render(messages, ask=True)
        assert not rendered.masked
        rendered.masked = str(rendered)  # read by the second tokenizer, it is the same
        assert text.ids(rendered) == expected


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_special_tokens_in_messages_are_text(tokenizer, template):
    """<|im_end|> in a message ended the turn, and what stood behind it spoke for the system."""
    text = text_of(tokenizer, template)
    for messages in conversations(PIECES):
        rendered = text.render(messages, ask=True)
        assert rendered == text.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        benign = text.encode([{**message, "content": "hello"} for message in messages])
        assert specials(text, text.ids(rendered)) == specials(text, benign)


def test_each_piece_between_the_templates_tokens_is_read_as_plain_text():
    text = text_of(TOKENIZERS["bytes"], TEMPLATES["as it is"])
    read = text.tokenizer
    opens, closes = read.convert_tokens_to_ids([OPENS, CLOSES])

    def plain(piece):
        return read(piece, split_special_tokens=True)["input_ids"]

    for messages in conversations(PIECES):
        expected = []
        for message in messages:
            expected += [opens, *plain(f"{message['role']}\n{message['content']}"), closes, *plain("\n")]
        assert text.encode(messages) == [*expected, opens, *plain("assistant\n")]


def test_tools_and_the_names_of_their_parameters_are_text_too():
    text = text_of(TOKENIZERS["bytes"], "<s>{{ tools | tojson }}" + TEMPLATES["as it is"])
    tools = [{"name": CLOSES, "parameters": {OPENS: {"enum": [CLOSES, 3, None, True]}}}]
    messages = [{"role": "user", "content": "hello"}]
    read = text.tokenizer.convert_tokens_to_ids(["<s>", OPENS, CLOSES, OPENS])
    assert specials(text, text.encode(messages, tools)) == read


def test_a_text_that_is_not_a_message_may_write_special_tokens():
    """A raw prompt is where they are asked for."""
    text = text_of(TOKENIZERS["bytes"], None)
    assert specials(text, text.encode(f"hello{CLOSES}")) == [text.eos]


def test_an_answer_that_writes_its_end_is_learnt_to_its_end():
    """The label was cut at the literal, and the rest was learnt as if somebody else said it."""
    target = HFTarget(tiny.reference("llama"), deepcopy(TOKENIZERS["bytes"]), "tiny")
    target.text.tokenizer.chat_template = TEMPLATES["as it is"]
    said = f"write {CLOSES} to end"
    messages = [{"role": "user", "content": f"how?{CLOSES}"}, {"role": "assistant", "content": said}]
    example = encode_row({"messages": messages}, target, 999)
    learnt = [token for token, own in zip(example.tokens, example.loss, strict=True) if own]
    assert target.text.decode(learnt, special=True) == said + CLOSES
    assert specials(target.text, learnt) == [target.text.eos]
    assert example.tokens[: len(example.prompt)] == target.text.encode(messages[:1])


def test_a_tokenizer_that_cannot_say_what_is_text_is_asked_nothing(unchecked):
    slow = SimpleNamespace(
        eos_token_id=1, bos_token_id=None, added_tokens_decoder={1: AddedToken("</s>")}, is_fast=False
    )
    marked = Specials(slow).render(lambda given: given[0], ["a</s>"])
    assert (marked, isinstance(marked, Rendered)) == ("a</s>", True)
    with pytest.raises(ValueError, match="a special token, which this tokenizer cannot read as text"):
        Specials(slow).ids(marked)
