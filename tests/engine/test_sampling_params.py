"""generation_config: each field does what it does in Hugging Face's own generate, or is refused by name."""

from copy import deepcopy

import pytest
import torch
from jaxtyping import config as checks
from transformers import (
    GenerationConfig,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import tiny
from slipstream.core.sampling import Sampler
from slipstream.drafters.suffix import NGram
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.engine.generate import generate
from slipstream.engine.sampling_params import SamplingParams
from slipstream.measure.certify import certify
from slipstream.measure.datasets import Question
from slipstream.measure.runner import hf_answers, hf_generate
from slipstream.targets import HFTarget

PROMPTS = tiny.prompts(5, 9)
NEW = 14


@pytest.fixture(autouse=True)
def unchecked():
    """Shapes and types take most of the time, and arguments of wrong types are to reach our own errors."""
    checks.update("jaxtyping_disable", True)
    yield
    checks.update("jaxtyping_disable", False)


def configured(**fields: object) -> HFTarget:
    """A target whose generation_config says this."""
    model = deepcopy(tiny.reference("llama"))
    model.generation_config = GenerationConfig(**fields)
    return HFTarget(model, tiny.tokenizer(), "llama")


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What is said where generation_config says nothing."""
    return [generate(configured(), prompt, max_new_tokens=NEW, eos_token_ids=()).tokens for prompt in PROMPTS]


def theirs(target: HFTarget, prompt: list[int], **how: object) -> list[int]:
    return hf_generate(target, torch.tensor([prompt]), max_new_tokens=NEW, **how)[0, len(prompt) :].tolist()


# fields, given the tokens that plain decoding says, so that each of them bites
FIELDS = {
    "suppress_tokens": lambda said: {"suppress_tokens": said[1:3]},
    "begin_suppress_tokens": lambda said: {"begin_suppress_tokens": said[:1]},
    "bad_words_ids": lambda said: {"bad_words_ids": [said[:1], said[2:4]]},
    "bad_words_ids, an end token": lambda said: {"bad_words_ids": [said[3:4]], "eos_token_id": said[3]},
    "min_new_tokens": lambda said: {"min_new_tokens": 9, "eos_token_id": said[4]},
    "min_length": lambda said: {"min_length": len(PROMPTS[0]) + 9, "eos_token_id": [said[4], said[5]]},
    "min_new_tokens in place of min_length": lambda said: {
        "min_new_tokens": 5,
        "min_length": 40,
        "eos_token_id": said[4],
    },
    "sequence_bias": lambda said: {
        "sequence_bias": [[[said[0]], -9.0], [[said[3], said[5]], 30.0], [[7], 4.0]]
    },
    "sequence_bias before the penalty": lambda said: {
        "sequence_bias": [[[7], 8.0]],
        "repetition_penalty": 1.9,
    },
    "no_repeat_ngram_size": lambda said: {"no_repeat_ngram_size": 1},
    "penalty, then no_repeat_ngram_size": lambda said: {"no_repeat_ngram_size": 2, "repetition_penalty": 0.7},
    "encoder_repetition_penalty": lambda said: {"encoder_repetition_penalty": 3.0, "repetition_penalty": 1.2},
    "encoder_no_repeat_ngram_size": lambda said: {"encoder_no_repeat_ngram_size": 1},
    "forced_eos_token_id": lambda said: {"forced_eos_token_id": 9, "eos_token_id": 9},
    "exponential_decay_length_penalty": lambda said: {
        "exponential_decay_length_penalty": (3, 1.6),
        "eos_token_id": 9,
    },
    "remove_invalid_values": lambda said: {"remove_invalid_values": True, "suppress_tokens": said[:1]},
    "renormalize_logits": lambda said: {"renormalize_logits": True, "suppress_tokens": said[:1]},
    "watermarking_config": lambda said: {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "what only sampling reads": lambda said: {
        "typical_p": 0.1,
        "top_h": 0.1,
        "epsilon_cutoff": 0.5,
        "no_repeat_ngram_size": 1,
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_says_what_it_says_in_hugging_face(plain, name):
    """Fields ignored; applied once to a whole tree, in another order, or with another row's prompt length."""
    target = configured(**FIELDS[name](plain[0]))
    want = [theirs(target, prompt) for prompt in PROMPTS]
    assert want != plain
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, want, strict=True)]
    for drafter in ("vanilla", NGram(shortest=1), TreeOracle(texts, target.vocab)):
        made = generate(target, PROMPTS, drafter, max_new_tokens=NEW)
        eos = target.generation_config.eos_token_id
        assert [each.tokens for each in made] == (
            want if eos is not None else [ended(answer) for answer in want]
        )


def ended(answer: list[int]) -> list[int]:
    """Up to the tokenizer's end token, where the model names none."""
    return answer[: answer.index(tiny.EOS) + 1] if tiny.EOS in answer else answer


def test_a_first_token_is_forced_behind_a_prompt_of_one():
    target = configured(forced_bos_token_id=0, begin_suppress_tokens=[4, 5])  # 0 is a token, and not "off"
    want = theirs(target, [3])
    assert want[0] == 0
    assert generate(target, [3], "ngram", max_new_tokens=NEW, eos_token_ids=()).tokens == want


def test_a_special_token_can_be_a_stop_string(plain):
    """<|im_end|> among stop strings: an answer's text leaves it out, and went on."""
    target = configured()
    tokenizer = deepcopy(target.text.tokenizer)
    word = tokenizer.convert_ids_to_tokens(plain[0][3])
    tokenizer.add_special_tokens({"additional_special_tokens": [word]})
    for new in (0, plain[0].index(plain[0][3]) + 4):  # the second: a processor that stops with the text
        model = deepcopy(target.model)
        model.generation_config = GenerationConfig(stop_strings=[word], min_new_tokens=new or None)
        special = HFTarget(model, tokenizer, "llama")
        [want] = hf_answers(special, PROMPTS[:1], NEW, 0.0)
        made = generate(special, PROMPTS[0], "ngram", max_new_tokens=NEW, eos_token_ids=())
        assert (made.tokens, made.finish) == (want, "stop")
        assert word not in made.text


def test_stop_strings_and_limits_of_the_target_hold(plain):
    said = configured().text.decode(plain[0])
    target = configured(stop_strings=[said[6:8]])
    made = generate(target, PROMPTS[0], max_new_tokens=NEW)
    assert (made.tokens, made.finish) == (hf_answers(target, PROMPTS[:1], NEW, 0.0)[0], "stop")
    assert made.text == said[: said.index(said[6:8])]
    assert generate(target, PROMPTS[0], max_new_tokens=NEW, stop=()).tokens == ended(
        plain[0]
    )  # what is given holds
    assert generate(configured(max_new_tokens=7), PROMPTS[0], eos_token_ids=()).tokens == plain[0][:7]
    long = configured(max_length=len(PROMPTS[0]) + 4)
    assert generate(long, PROMPTS[0], eos_token_ids=()).tokens == plain[0][:4]
    with pytest.raises(ValueError, match="max_length of 9 for prompt and answer: give max_new_tokens"):
        generate(long, PROMPTS[1])


@pytest.mark.parametrize(
    ("setting", "own"),
    [
        ({"no_repeat_ngram_size": 1}, [NoRepeatNGramLogitsProcessor(2)]),
        ({"repetition_penalty": 1.5}, [RepetitionPenaltyLogitsProcessor(1.1)]),  # the sampler has its own
    ],
)
def test_a_processor_of_ones_own_takes_the_place_of_the_targets(setting, own):
    target = configured(**setting)
    want = theirs(target, PROMPTS[0], logits_processor=own)
    assert generate(target, PROMPTS[0], max_new_tokens=NEW, processors=own, eos_token_ids=()).tokens == want
    assert want != theirs(target, PROMPTS[0])


CUTS = {
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.03},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "top_h": {"top_h": 0.5},
    "all": {"top_h": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8, "epsilon_cutoff": 0.01},
    "watermark": {
        "watermarking_config": WatermarkingConfig(bias=3.0),
        "top_p": 0.8,
        "suppress_tokens": [1, 2],
    },
}


@pytest.mark.parametrize("fields", CUTS.values(), ids=CUTS)
def test_a_sampled_token_has_hugging_faces_law(fields):
    """A cut before temperature or before top-k that comes after it, or another support."""
    target = configured(do_sample=True, temperature=1.4, **({"top_k": 0} | fields))
    torch.manual_seed(0)
    prompt = PROMPTS[0]
    out = hf_generate(
        target,
        torch.tensor([prompt]),
        max_new_tokens=6,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    row = SamplingParams.of(target, max_new_tokens=6).row(0, prompt)
    for i, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        law = Sampler([row], [out.sequences[0, : len(prompt) + i].tolist()], target.vocab).law(logits)
        torch.testing.assert_close(law, scores.double().softmax(-1), atol=1e-6, rtol=1e-4)
    plain = generate(target, PROMPTS, max_new_tokens=NEW, seed=5)
    oracle = TreeOracle([each.prompt + each.tokens for each in plain], target.vocab)
    for drafter in (NGram(shortest=1), oracle):
        made = generate(target, PROMPTS, drafter, max_new_tokens=NEW, seed=5)
        assert [each.tokens for each in made] == [each.tokens for each in plain]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_beams": 4}, "sets num_beams to 4 (beam search)"),
        ({"num_return_sequences": 2, "num_beams": 1, "do_sample": True}, "sets num_return_sequences to 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "sets penalty_alpha to 0.6 (contrastive search)"),
        ({"guidance_scale": 1.5}, "sets guidance_scale to 1.5"),
        ({"token_healing": True}, "sets token_healing"),
        ({"max_time": 3.0}, "sets max_time"),
        ({"dola_layers": "high"}, "sets dola_layers"),
        (
            {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2])},
            "sets watermarking_config",
        ),
        ({"do_sample": True, "temperature": "hot"}, "sets temperature to 'hot'"),
        ({"do_sample": True, "top_k": 0.5}, "sets top_k to '0.5'"),
        ({"eos_token_id": "</s>"}, "sets eos_token_id to '</s>'"),
        ({"suppress_tokens": "abc"}, "sets suppress_tokens to 'abc'"),
        ({"forced_eos_token_id": 999}, "sets forced_eos_token_id to '999'"),
        ({"bad_words_ids": [5]}, "sets bad_words_ids"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields, says):
    """Beam search in the baseline beside greedy decoding of ours; or a traceback from within Hugging Face."""
    target = configured()
    for name, value in fields.items():
        setattr(target.model.generation_config, name, value)  # also what GenerationConfig itself refuses
    for ask in (
        (generate, hf_answers) if "temperature" not in fields else (generate,)
    ):  # the baseline is always given one
        with pytest.raises(ValueError, match="generation_config of llama") as error:
            ask(
                target,
                PROMPTS[:1],
                **{"max_new_tokens": 2} | ({"temperature": 1.0} if ask is hf_answers else {}),
            )
        assert says in str(error.value)
        assert "\n" not in str(error.value)


def test_what_is_read_only_by_sampling_cannot_harm_greedy_decoding(plain):
    target = configured()
    target.model.generation_config.temperature = "hot"
    target.model.generation_config.top_p = 0.0
    assert generate(target, PROMPTS[0], max_new_tokens=NEW, eos_token_ids=()).tokens == plain[0]


def test_certify_asks_and_audits_with_the_targets_processors():
    """An audit without them called every token that they had changed unexplained."""
    target = configured(
        no_repeat_ngram_size=1, prompt_lookup_num_tokens=3, repetition_penalty=1.2, typical_p=0.8
    )
    questions = [Question("f", "1", "c", ("abcabc",)), Question("f", "2", "c", ("hello",))]
    report = certify(target, ["ngram"], questions, temperatures=[0.0, 1.0], max_new_tokens=12)
    assert report.certified
    assert all(result.identical == 2 for result in report.results)


@pytest.mark.parametrize("bounds", [{"max_new_tokens": 2}, {"max_new_tokens": 9, "stop": "f"}])
def test_a_field_leaves_nothing_behind_the_end_alone(bounds):
    """Forced tokens that end the answer, behind which the grammar allows an end alone, and the field none."""
    target = configured(min_new_tokens=5)
    how = {"regex": "ef", "eos_token_ids": tiny.EOS, **bounds}
    for drafter in ("vanilla", "ngram", tiny.eagle(target)):
        assert len(generate(target, PROMPTS[0], drafter, **how).tokens) == 2
