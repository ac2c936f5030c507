"""Slipstream inside Hugging Face's own `generate`: the same text, its arguments, and the model as it was."""

import gc
import re
import shutil
import weakref
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

import tiny
from slipstream import custom_generate, generate
from slipstream.interop import hugging_face
from slipstream.interop.hugging_face import DIRECTORY
from slipstream.targets import HFTarget

PROMPTS = tiny.prompts(5, 12, 9)
OURS = {"custom_generate": custom_generate, "drafter": "ngram"}
FROM_DIRECTORY = {"custom_generate": DIRECTORY, "trust_remote_code": True, "drafter": "ngram"}
SEVERAL_EOS = {"eos_token_id": [3, 7, *range(20, 26)], "pad_token_id": 1}
SETTINGS = {
    "as it is": {},
    "EOS and padding": SEVERAL_EOS,
    "no EOS before the fifth": {**SEVERAL_EOS, "min_new_tokens": 5},
    "max_length": {"max_length": 20},
    "default length": {"max_new_tokens": None},
    "n-grams once": {"no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": [1, 2, 3, 4, 5, 6, 7, 8]},
    "a config": {"generation_config": GenerationConfig(max_new_tokens=7, suppress_tokens=[9, 10, 11])},
    "no cache": {"use_cache": False},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return deepcopy(tiny.reference("llama"))


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """Three prompts with padding on the left."""
    width = max(map(len, PROMPTS))
    rows = [(width - len(prompt), prompt) for prompt in PROMPTS]
    return {
        "input_ids": torch.tensor([[0] * n + prompt for n, prompt in rows]),
        "attention_mask": torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in rows]),
    }


def alone(inputs, row: int) -> dict[str, torch.Tensor]:
    """One prompt, without its padding."""
    return {"input_ids": torch.tensor([PROMPTS[row]])}


class Columns:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], 0

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_the_text_is_its_own(model, inputs, how):
    """Padding read as a part of the prompt, an argument lost on the way, rows padded elsewhere."""
    how = {"max_new_tokens": 24, "do_sample": False, **how}
    if "max_length" in how or "generation_config" in how:
        how.pop("max_new_tokens")
    theirs = model.generate(**inputs, **how)
    assert torch.equal(model.generate(**inputs, **how, **OURS), theirs)


@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name != "llama"])
def test_every_family(inputs, family):
    """Beside each prompt alone: with padding Gemma 2's own eager attention says nothing but NaN."""
    model = tiny.reference(family)
    ours = model.generate(**inputs, max_new_tokens=12, pad_token_id=1, **OURS)
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "pad_token_id": 1}
        theirs = model.generate(ids, **how)[0, len(prompt) :]
        assert torch.equal(ours[row, inputs["input_ids"].shape[1] :], theirs)


def test_penalties_count_no_padding(model, inputs):
    """In Hugging Face's own batches padding is penalised, too: each row is what it says alone."""
    how = {"max_new_tokens": 16, "repetition_penalty": 1.3}
    ours = model.generate(**inputs, **how, **OURS)
    for row in range(len(PROMPTS)):
        theirs = model.generate(**alone(inputs, row), **how)[0, len(PROMPTS[row]) :]
        assert torch.equal(ours[row, inputs["input_ids"].shape[1] :], theirs)


def test_the_directory_takes_stop_strings_too(model, inputs):
    tokenizer = tiny.tokenizer()
    plain = model.generate(**alone(inputs, 0), max_new_tokens=24)
    stop = tokenizer.decode(plain[0, len(PROMPTS[0]) + 8 : len(PROMPTS[0]) + 10])
    how = {"max_new_tokens": 24, "stop_strings": stop, "tokenizer": tokenizer}
    theirs = model.generate(**alone(inputs, 0), **how)
    assert theirs.shape[1] < plain.shape[1]
    assert torch.equal(model.generate(**alone(inputs, 0), **how, **FROM_DIRECTORY), theirs)


def test_a_model_directory_that_holds_the_file_answers_so(model, inputs, tmp_path):
    """A `generate` that calls itself without end."""
    model.save_pretrained(tmp_path)
    shutil.copytree(f"{DIRECTORY}/custom_generate", tmp_path / "custom_generate")
    own = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float64)
    theirs = model.generate(**inputs, max_new_tokens=8)
    assert torch.equal(own.generate(**inputs, max_new_tokens=8, drafter="ngram"), theirs)


@pytest.mark.parametrize("ours", [OURS, FROM_DIRECTORY], ids=["callable", "directory"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_gets_what_it_gets_there(model, inputs, ours, rows):
    """Columns of a row that is ahead of others, or the last ones lost."""
    given = {name: tensor[:rows] for name, tensor in inputs.items()}
    seen = []
    for how in ({}, ours):
        streamer = Columns()
        model.generate(**given, **SEVERAL_EOS, max_new_tokens=12, streamer=streamer, **how)
        seen.append((streamer.given, streamer.ended))
    assert seen[0] == seen[1]


def test_a_text_streamer_prints_the_same(model, inputs, capsys):
    printed = []
    for how in ({}, OURS):
        streamer = TextStreamer(tiny.tokenizer(), skip_prompt=True)
        model.generate(**alone(inputs, 1), max_new_tokens=20, streamer=streamer, **how)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_stopping_criteria_end_a_row_where_they_end_it_there(model, inputs):
    def even(ids, scores, **_):
        return (ids[:, -1] % 5 == 0) & (ids[:, -2] % 2 == 0)

    how = {"max_new_tokens": 30, **SEVERAL_EOS, "stopping_criteria": [even]}
    theirs = model.generate(**inputs, **how)
    assert torch.equal(model.generate(**inputs, **how, **OURS), theirs)
    late = model.generate(**inputs, max_new_tokens=30, stopping_criteria=[MaxTimeCriteria(0.0)], **OURS)
    assert late.shape[1] == inputs["input_ids"].shape[1] + 1


def test_a_criterion_that_names_an_end_decides_itself(model, inputs):
    """An attribute of that name made it a list of ends."""

    class Twice(StoppingCriteria):
        eos_token_id = 5

        def __call__(self, ids, scores, **_):
            return (ids[:, -20:] == self.eos_token_id).sum(1) >= 2

    how = {"max_new_tokens": 30, **SEVERAL_EOS, "stopping_criteria": [Twice()]}
    assert torch.equal(model.generate(**inputs, **how, **OURS), model.generate(**inputs, **how))


def test_processors_of_the_caller_are_honoured(model, inputs):
    def shifted(ids, scores):
        return scores.roll(1, -1) + 0.1 * ids[:, -1:]

    how = {"max_new_tokens": 12, "logits_processor": [shifted]}
    assert torch.equal(model.generate(**inputs, **how, **OURS), model.generate(**inputs, **how))


def test_samples_follow_torch_s_generator_and_the_seed(model, inputs):
    how = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.8, "top_k": 20, **OURS}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(**inputs, **how).tolist())
    assert texts[0] == texts[1] != texts[2]
    fixed = model.generate(**inputs, **how, seed=7)
    ours = HFTarget(model)
    made = generate(
        ours, PROMPTS, "vanilla", seed=7, temperature=0.8, top_k=20, max_new_tokens=16, eos_token_ids=()
    )
    assert fixed[:, inputs["input_ids"].shape[1] :].tolist() == [each.tokens for each in made]
    several = model.generate(**alone(inputs, 0), **how, num_return_sequences=3, seed=7)
    assert len({tuple(row) for row in several.tolist()}) == 3


def test_an_assistant_model_drafts(model, inputs, monkeypatch):
    used = []
    made = hugging_face.DraftModel
    monkeypatch.setattr(hugging_face, "DraftModel", lambda *args: used.append(args) or made(*args))
    theirs = model.generate(**inputs, max_new_tokens=12)
    ours = model.generate(**inputs, max_new_tokens=12, assistant_model=model, custom_generate=custom_generate)
    assert torch.equal(ours, theirs)
    assert used


def test_an_output_holds_the_sequences(model, inputs):
    how = {"max_new_tokens": 6, "return_dict_in_generate": True}
    theirs, ours = model.generate(**inputs, **how), model.generate(**inputs, **how, **OURS)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert type(ours) is type(theirs)


REFUSED = {
    "num_beams": {"num_beams": 2},
    "guidance_scale": {"guidance_scale": 1.5},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [1, 2]},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "position_ids": {"position_ids": torch.arange(12)[None].expand(3, -1)},
    "window of 128": {"max_new_tokens": 1000},
    "Unknown drafter": {"drafter": "nothing"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(model, inputs, named):
    how = {"max_new_tokens": 4, **OURS, **REFUSED[named]}
    with pytest.raises(ValueError, match=named):
        model.generate(**inputs, **how)


def test_padding_on_the_right_is_refused(model, inputs):
    given = {name: tensor.flip(1) for name, tensor in inputs.items()}
    with pytest.raises(ValueError, match="pad on the left"):
        model.generate(**given, max_new_tokens=4, **OURS)


def test_vectors_in_place_of_tokens_are_refused(model):
    vectors = model.get_input_embeddings()(torch.tensor(PROMPTS[:1])).detach()
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(inputs_embeds=vectors, max_new_tokens=4, **OURS)


def test_a_call_of_its_own_is_refused(model):
    with pytest.raises(ValueError, match=r"model\.generate"):
        custom_generate(model, torch.tensor([[1]]), model.generation_config, StoppingCriteriaList())


def test_the_model_stays_as_it_was_and_is_let_go(inputs):
    """An attribute left on it, a setting changed, or a table that keeps it alive."""
    model = deepcopy(tiny.reference("llama")).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names, config = set(vars(model)), model.generation_config.to_dict()
    modules = [type(each) for each in model.modules()]
    model.generate(**inputs, max_new_tokens=4, **OURS)
    assert model.training
    assert (set(vars(model)), model.generation_config.to_dict()) == (names, config)
    assert [type(each) for each in model.modules()] == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_changed_weights_are_seen(inputs):
    """A target that was kept says what the model said before."""
    model = deepcopy(tiny.reference("llama"))
    model.generate(**inputs, max_new_tokens=4, **OURS)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=8, **OURS), model.generate(**inputs, max_new_tokens=8)
    )
    model.get_output_embeddings().weight.data = -model.get_output_embeddings().weight.data
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=8, **OURS), model.generate(**inputs, max_new_tokens=8)
    )


def test_weights_that_an_adapter_was_merged_into_are_seen(inputs):
    """By `.data`, which no version counts, in a precision in which weights are packed."""
    model = deepcopy(tiny.reference("llama")).float()
    before = model.generate(**inputs, max_new_tokens=16, **OURS)
    for layer in model.model.layers:
        delta = tiny.noise(*layer.mlp.down_proj.weight.shape, scale=0.5)
        layer.mlp.down_proj.weight.data += delta.float()
    after = model.generate(**inputs, max_new_tokens=16, **OURS)
    assert not torch.equal(before, after)
    assert torch.equal(after, deepcopy(model).generate(**inputs, max_new_tokens=16, **OURS))


class Adapted(torch.nn.Linear):
    """A layer with adapters, of which some are active, as in PEFT."""

    _active = ("none",)

    def forward(self, x):
        return super().forward(x) * (1.0 if "none" in self._active else -2.0)


def test_another_adapter_and_a_hook_are_seen(inputs):
    """A target that was kept says what the model said with the adapter before."""
    model = deepcopy(tiny.reference("llama"))
    layer = model.model.layers[1].mlp.down_proj
    layer.__class__ = Adapted
    first = model.generate(**inputs, max_new_tokens=8, **OURS)
    layer._active = ("other",)
    other = model.generate(**inputs, max_new_tokens=8, **OURS)
    assert not torch.equal(first, other)
    assert torch.equal(other, model.generate(**inputs, max_new_tokens=8))
    hook = layer.register_forward_hook(lambda module, args, out: 0 * out)
    hooked = model.generate(**inputs, max_new_tokens=8, **OURS)
    assert not torch.equal(other, hooked)
    assert torch.equal(hooked, model.generate(**inputs, max_new_tokens=8))
    hook.remove()
    assert torch.equal(other, model.generate(**inputs, max_new_tokens=8, **OURS))


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """With `auto`, whose first use measures rounds."""
    tokenizer = deepcopy(tiny.tokenizer())
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "DIR")
    tiny.reference("llama").save_pretrained(tmp_path / "DIR")
    page = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text("utf-8")
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    known = {}
    exec(compile(first, "hugging_face.md", "exec"), known)
    assert "['" in capsys.readouterr().out
    exec(compile(second, "hugging_face.md", "exec"), known)
