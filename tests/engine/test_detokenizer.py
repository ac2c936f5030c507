"""One text everywhere: pieces as they come, streamers and `.text`, for every kind of tokenizer."""

import gc
import random
import re
import weakref

import pytest
import torch
from jaxtyping import config as checks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextStreamer

import tiny
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.engine.detokenizer import Detokenizer
from slipstream.engine.generate import Stream, generate, stream
from slipstream.targets import HFTarget

PROMPT = tiny.prompts(5)[0]
HOW = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3, "eos_token_ids": ()}


@pytest.fixture(autouse=True)
def unchecked():
    checks.update("jaxtyping_disable", True)
    yield
    checks.update("jaxtyping_disable", False)


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's and SmolLM2's: every token is some bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "Ġt", "he", "Ġthe", "ab", "</s>"]
    core = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("a", "b")]
        )
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space is part of the word behind it, but for the first, and rare characters are
    bytes."""
    words = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁a", "b", "c", "é", "▁€"]
    core = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def cleaning() -> PreTrainedTokenizerFast:
    """One that would take spaces back."""
    core = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(["a", " ", ".", "n", "'t", "</s>"])}, unk_token="a"
        )
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=True)


@pytest.mark.parametrize(
    "make", [byte_level, sentencepiece, cleaning, tiny.tokenizer], ids=lambda make: make.__name__
)
def test_pieces_are_the_text(make):
    """Half a character printed, a leading space lost or won, a byte that changes those before it, a stop
    string shown."""
    target = HFTarget(tiny.reference("llama"), make())
    drawn = random.Random(0)
    common = [
        i
        for i, word in enumerate(target.text.tokenizer.convert_ids_to_tokens(range(len(make()))))
        if len(word) != 6
    ]
    euro = [make().convert_tokens_to_ids(f"<0x{b:02X}>") for b in "€".encode()]
    stops = 0
    for _ in range(300):
        tokens = (
            drawn.choices(range(len(make())), k=12) if drawn.random() < 0.5 else drawn.choices(common, k=12)
        )
        if make is sentencepiece and drawn.random() < 0.5:
            at = drawn.randrange(12)
            tokens[at:at] = euro[: drawn.randrange(1, 4)]
        whole = target.text.decode(tokens)
        reader = Detokenizer(target.text)
        pieces = [reader.push(token) for token in tokens]
        assert all(whole.startswith("".join(pieces[:n])) for n in range(len(pieces)))
        assert "".join(pieces) + reader.flush() == whole
        begin = drawn.randrange(max(1, len(whole) - 3))
        if "\ufffd" in (stop := whole[begin : begin + 3]) or not stop:
            continue
        reader, shown = Detokenizer(target.text, [stop, "no such stop"]), ""
        for token in tokens:
            shown += reader.push(token)
            if reader.stopped:
                break
        assert shown + reader.flush() == whole[: whole.index(stop)]
        stops += 1
    assert stops > 50


def test_bytes_go_on_behind_a_special_token():
    """A character given out that a byte behind the special token changes: a run is decoded as a whole."""
    text = HFTarget(tiny.reference("llama"), sentencepiece()).text
    for written in ("<0x41></s><0xFB>", "<0xC3></s></s><0xA9>", "<0x41></s>b", "b</s><0x41>"):
        ids = text.tokenizer.convert_tokens_to_ids(re.findall("<.*?>|b", written))
        reader = Detokenizer(text)
        assert "".join(map(reader.push, ids)) + reader.flush() == text.decode(ids)
        assert reader.released == reader.decoded


@pytest.fixture(scope="module")
def said(target) -> list[int]:
    return generate(target, PROMPT, **HOW).tokens


@pytest.fixture(scope="module")
def oracle(said) -> TreeOracle:
    return TreeOracle([PROMPT + said], tiny.VOCAB)


def test_stream_gives_the_text_and_then_the_answer(target, said, oracle):
    """Pieces past a stop string, or of another answer than `generate` gives."""
    text = target.text.decode(said)
    for stop in ((), text[9:12], [text[3], text[9:14]]):
        want = generate(target, PROMPT, oracle, **HOW, stop=stop)
        pieces = stream(target, PROMPT, oracle, **HOW, stop=stop)
        assert pieces.generation is None
        shown = list(pieces)
        assert all(shown)
        assert "".join(shown) == want.text == pieces.generation.text
        assert (pieces.generation.tokens, pieces.generation.finish) == (want.tokens, want.finish)
    assert len(shown) <= len(want.rounds) + 1


def test_a_stream_can_be_left(target, oracle):
    """A cache that stays for as long as the program runs, or inference mode left on in the caller."""
    pieces = stream(target, PROMPT, oracle, **HOW)
    next(pieces)
    assert not torch.is_inference_mode_enabled()
    held = weakref.ref(pieces.rounds)
    pieces.close()
    assert list(pieces) == []
    assert pieces.generation is None
    del pieces
    gc.collect()
    assert held() is None


class Recorder:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.tolist()

    def end(self) -> None: ...


def test_a_streamer_never_shows_more_than_the_text(target, said, oracle, capsys):
    """Tokens of a stop string were streamed before it was complete."""
    text = target.text.decode(said)
    for begin, end in ((9, 12), (3, 4), (14, 20)):
        how = HOW | {"stop": text[begin:end]}
        streamer = TextStreamer(target.text.tokenizer, skip_prompt=True, skip_special_tokens=True)
        made = generate(target, PROMPT, oracle, **how, streamer=streamer)
        assert capsys.readouterr().out == made.text + "\n"
    recorder, held = Recorder(), HOW | {"stop": text[-1] + "never"}
    made = generate(target, PROMPT, oracle, **held, streamer=recorder)
    assert recorder.tokens == PROMPT + made.tokens  # what was held back comes in the end


def test_of_a_token_that_a_stop_string_cuts_a_streamer_gets_nothing():
    core = Tokenizer(models.WordLevel({"ab": 0, "c.d": 1, "e": 2, "</s>": 3}, unk_token="e"))
    core.decoder = decoders.Fuse()
    target = HFTarget(
        tiny.reference("llama"), PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    )
    from slipstream.engine.request import Request

    request = Request([0], limit=9, stop=(".",), tokenizer=target.text)
    request.take([2, 0, 1, 2], None, True)
    assert request.fresh == [2, 0, 1]
    assert (request.text, request.released(), request.finish) == ("eabc", [2, 0], "stop")


@pytest.mark.parametrize(
    ("prompt", "how", "says"),
    [
        ([PROMPT, PROMPT], {}, "stream takes one prompt, 2 were given"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_a_mistake_is_told_before_the_first_piece(target, prompt, how, says):
    with pytest.raises(ValueError, match=says):
        stream(target, prompt, **how)


def test_stream_is_public():
    import slipstream

    assert (slipstream.stream, slipstream.Stream) == (stream, Stream)
