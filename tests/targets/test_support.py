"""Architectures that would be served wrongly, in silence, are refused by name and with the reason."""

from copy import deepcopy

import pytest
import torch
from transformers import (
    BartConfig,
    BigBirdConfig,
    BloomConfig,
    DogeConfig,
    FalconConfig,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoConfig,
    HrmTextConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiMoV2FlashConfig,
    MixtralConfig,
    MllamaForCausalLM,
    MoshiConfig,
    MptConfig,
    OpenAIGPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3NextConfig,
    RoFormerConfig,
    RwkvConfig,
    SmolLM3Config,
    T5Config,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import slipstream
import tiny
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.engine.generate import generate
from slipstream.targets import HFTarget
from slipstream.targets.shadow_model import shadow_of
from slipstream.targets.support import attention_windows, check_supported, longest_text, rope

PADDED = tiny.GROUPED | {"pad_token_id": 0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
BY_LAYER = {"sliding_attention": DEFAULT, "full_attention": DYNAMIC}

REFUSED_CONFIGS = [
    (T5Config(), "t5: it is an encoder-decoder"),
    (MambaConfig(), "mamba: it keeps a recurrent state"),
    (JambaConfig(), "jamba: it keeps a recurrent state"),
    (Qwen3NextConfig(), "qwen3_next: it keeps a recurrent state"),
    (Lfm2Config(**PADDED, layer_types=["conv", "full_attention"]), "lfm2: it keeps a recurrent state"),
    (BloomConfig(), "bloom: ALiBi derives positions from cache slots"),
    (MptConfig(), "mpt: ALiBi derives positions from cache slots"),
    (FalconConfig(**tiny.FALCON, alibi=True), "falcon: ALiBi derives positions from cache slots"),
    (
        BigBirdConfig(is_decoder=True, attention_type="block_sparse"),
        "big_bird: its attention is sparse",
    ),
    (LlamaConfig(**tiny.GROUPED, rope_parameters=DYNAMIC), "llama: dynamic RoPE scaling changes"),
    (Gemma3TextConfig(**tiny.MIXED, rope_parameters=BY_LAYER), "gemma3_text: dynamic RoPE scaling changes"),
    (Phi3Config(**PADDED, rope_parameters=LONG), "phi3: longrope RoPE scaling changes"),
    (GPTNeoConfig(), "gpt_neo: its local attention counts cache slots"),
    (Gemma4TextConfig(), "gemma4_text: its layers keep keys and values of different sizes"),
    (MiMoV2FlashConfig(), "mimo_v2_flash: its layers keep keys and values of different sizes"),
    (Llama4TextConfig(), "llama4_text: layers of type chunked_attention use a mask that is not implemented"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED_CONFIGS, ids=lambda x: getattr(x, "model_type", None))
def test_refused_by_config(config: PreTrainedConfig, reason: str):
    """A target whose text would depend on the batch, the tree, or slots taken for positions."""
    with pytest.raises(ValueError, match=f"Unsupported target: {reason}.* Supported: decoder-only models"):
        check_supported(config)


def test_refused_by_model_where_the_config_does_not_tell():
    """A recurrent model that is known by its class alone."""
    model = tiny.build(RwkvConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(ValueError, match="rwkv: it keeps a recurrent state"):
        HFTarget(model)


@pytest.mark.parametrize(
    "config",
    [
        BartConfig(**(tiny.SHORT | {"pad_token_id": 0}), d_model=32, decoder_layers=1, decoder_ffn_dim=48),
        RoFormerConfig(**(tiny.SHAPE | {"pad_token_id": 0}), is_decoder=True),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_take_no_positions_are_refused(config: PreTrainedConfig):
    """`position_ids` swallowed by a forward's **kwargs: the model counts from its cache's length, and its
    text is wrong."""
    with pytest.raises(ValueError, match=f"Unsupported target: {config.model_type}: .*position_ids"):
        HFTarget(tiny.build(config))


def test_a_model_that_takes_no_cache_is_refused():
    """`past_key_values` swallowed likewise: the first pass behind a prompt ended in an error."""
    config = OpenAIGPTConfig(vocab_size=tiny.VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match=r"Unsupported target: openai-gpt: .*past_key_values"):
        HFTarget(tiny.build(config))


def test_a_model_that_runs_layers_several_times_is_refused():
    """It ended in a bare StopIteration."""
    config = HrmTextConfig(**PADDED)
    with pytest.raises(ValueError, match=r"Unsupported target: hrm_text: its \d+ layers are not one list"):
        HFTarget(tiny.build(config))


def test_a_model_without_an_lm_head_is_refused():
    with pytest.raises(ValueError, match=r"a LlamaModel has no LM head: load it with AutoModelForCausalLM"):
        HFTarget(tiny.reference("llama").model)


def test_offloaded_weights_are_refused():
    """They ended in a traceback about meta tensors."""
    model = deepcopy(tiny.reference("llama"))
    model.model.norm.to("meta")
    with pytest.raises(ValueError, match="load all on one device"):
        HFTarget(model)
    with pytest.raises(ValueError, match="load all on one device"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=slipstream.custom_generate)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sizes_tell_how_many_heads_a_cache_has(family: str):
    target = tiny.target(family)
    cached = target.features([[1, 2, 3]], ("cache of block 0",))[0]
    assert cached.shape[-1] == 2 * target.sizes.num_key_value_heads * target.sizes.head_dim


def test_layers_that_do_not_turn_say_so():
    config = SmolLM3Config(**PADDED | {"num_hidden_layers": 4}, no_rope_layers=[1, 1, 1, 0])
    assert [bool(rope(config, block)[0]) for block in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    "scaling", [DEFAULT, DEFAULT | {"rope_type": "linear", "factor": 2.0}], ids=lambda each: each["rope_type"]
)
def test_scaling_that_is_the_same_for_every_text_is_served(scaling: dict):
    """Refusing every scaled model for the sake of those whose scaling follows the batch."""
    check_supported(LlamaConfig(**tiny.GROUPED, rope_parameters=scaling))


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", {"full_attention": None}),
        ("mistral", {"sliding_attention": 6}),
        ("qwen3", {"full_attention": None}),
        ("gemma2", {"full_attention": None, "sliding_attention": 6}),
    ],
)
def test_windows_by_layer_type(family: str, windows: dict):
    """A window applied to layers that have none, or left out where it is active."""
    assert attention_windows(tiny.FAMILIES[family]) == windows


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "gemma2", "gemma3"])
def test_a_window_that_attention_has_ends_no_text(family: str):
    model = shadow_of(tiny.reference(family))
    before = deepcopy(model.config)
    assert longest_text(model) == 128
    assert model.config.to_dict() == before.to_dict()


def test_attention_that_drops_tokens_by_their_places_ends_texts():
    """Doge behind its `keep_window_size`: a tree's text was not that of plain decoding."""
    model = tiny.build(DogeConfig(**tiny.GROUPED, keep_window_size=12))
    assert HFTarget(model).window == 12


def test_llama_4_ends_where_its_queries_count_tokens_by_the_cache():
    """Blocks without RoPE took positions from Hugging Face's cache, which ours says is empty."""
    sizes = tiny.GROUPED | {"head_dim": 8, "intermediate_size_mlp": 48, "moe_layers": [], "floor_scale": 16}
    config = Llama4TextConfig(
        **sizes, layer_types=["full_attention"] * 2, no_rope_layers=[1, 0], attn_scale=5.0
    )
    model, prompt = tiny.build(config), tiny.prompts(9)[0]
    target = HFTarget(model)
    assert target.window == 15
    said = generate(target, prompt, max_new_tokens=6, **tiny.ENDLESS).tokens
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 9:]
    assert said == theirs.tolist()


def test_mllama_finds_out_its_exactness():
    """A model of some of its blocks called one that reads pictures, by another's number."""
    sizes = tiny.GROUPED | {"num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = MllamaForCausalLM(MllamaTextConfig(**sizes, cross_attention_layers=[3])).eval()
    assert HFTarget(model).exactness in ("bits", "audited")


def test_experts_are_computed_in_float64():
    """torch's grouped products know no float64: a traceback."""
    model = tiny.build(MixtralConfig(**tiny.GROUPED, num_local_experts=4))
    said = generate(HFTarget(model), [1, 2, 3], max_new_tokens=4, **tiny.ENDLESS).tokens
    model.set_experts_implementation("eager")
    assert (
        said == model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    )


def test_masks_are_refused_where_blocks_look_tokens_up_themselves():
    """Gemma 3n with BiTA: another text, without a word. MLPs of a width each ended its loading."""
    sizes = PADDED | {"num_hidden_layers": 4, "head_dim": 8, "intermediate_size": [48] * 4}
    sizes |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    sizes |= {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    target, prompt = HFTarget(tiny.build(Gemma3nTextConfig(**sizes))), tiny.prompts(9)[0]
    how = {"max_new_tokens": 12} | tiny.ENDLESS
    plain = generate(target, prompt, "vanilla", **how).tokens
    assert generate(target, prompt, TreeOracle([prompt + plain], target.vocab), **how).tokens == plain
    with pytest.raises(ValueError, match="gemma3n_text reads tokens beside their embeddings"):
        generate(target, prompt, tiny.bita(target), **how)
    for head in (tiny.eagle3, tiny.fasteagle):  # tracebacks
        with pytest.raises(ValueError, match="hands on several streams of states"):
            generate(target, prompt, head(target), **how)


@torch.no_grad()
def test_a_window_that_attention_has_not_ends_texts():
    """Moshi behind its window: Hugging Face's cache forgets tokens that its attention reads where there is no
    cache, and a window of ours is another text again."""
    sizes = tiny.GROUPED | {"head_dim": 8, "ffn_dim": 48, "sliding_window": 12}
    model = tiny.build(MoshiConfig(**{k: v for k, v in sizes.items() if k != "intermediate_size"}))
    target, prompt = HFTarget(model), tiny.prompts(5)[0]
    assert target.window == 12
    texts = [
        model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, use_cache=cached)[0, 5:]
        for cached in (True, False)
    ]
    made = generate(target, prompt, drafter="vanilla", max_new_tokens=20, **tiny.ENDLESS).tokens
    assert len(made) == 7
    assert all(text[:7].tolist() == made for text in texts)
    assert not torch.equal(*texts)
