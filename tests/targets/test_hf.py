"""A tree pass through Hugging Face's own modelling code, against each path run alone by the untouched
model."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    Gemma2Config,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ModernBertDecoderConfig,
    OPTConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import slipstream.engine.engine
import tiny
from slipstream.core.drafter import Drafter, State
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampler
from slipstream.core.span import Output, Span
from slipstream.core.tree import PAD, Probes, Tree, chain
from slipstream.core.tree_spec import TreeSpec
from slipstream.engine.engine import Engine
from slipstream.engine.generate import generate
from slipstream.engine.request import Request
from slipstream.measure.runner import hf_generate
from slipstream.targets import HFTarget
from slipstream.targets.attention_patch import OURS
from slipstream.targets.prompts import encode

PROMPTS = tiny.prompts(9, 5, 14)
BUSHY = [0, 0, 0, 1, 1, 2, 3, 3, 4, 6, 9]
DEEP = [
    0,
    0,
    0,
    2,
    2,
    4,
    5,
    5,
    7,
    8,
    9,
]  # deeper than the sliding window, and its path not in contiguous slots
WIDE = [0, 0, 0, 0, 0, 2, 5, 5, 1, 6, 9]
PARENTS = torch.tensor([BUSHY, DEEP, WIDE])
TOKENS = torch.randint(tiny.VOCAB, PARENTS.shape, generator=torch.Generator().manual_seed(1))
HOSTS = torch.tensor([[0, 6], [10, PAD], [4, 2]])
TREE = Tree(TOKENS, PARENTS, depth=7)

TOLERANCE = {
    "gemma2": 1e-6
}  # its eager attention takes the softmax in float32, at any precision of the model
every_family = pytest.mark.parametrize("family", tiny.FAMILIES)


def assert_equal(family: str, got: Tensor, want: Tensor) -> None:
    """Equal to the rounding of float64."""
    tolerance = TOLERANCE.get(family, 1e-9)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def prefilled(target: HFTarget, memory: Tensor | None = None) -> KVCache:
    """A cache that has read the prompts, which are ragged."""
    lengths = list(map(len, PROMPTS))
    tokens = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in PROMPTS])
    cache = target.new_cache(len(PROMPTS), memory)
    target(chain(tokens), cache)
    cache.keep(None, torch.tensor(lengths))
    cache.flush(lengths)
    return cache


def with_probes(probes: Tensor, hosts: Tensor = HOSTS) -> Tree:
    return Tree(TOKENS, PARENTS, TREE.depth, probes=Probes(probes, hosts))


def memory_of(target: HFTarget, length: int = 3, **how: float) -> Tensor:
    layers, heads, width = tiny.kv_shape(target)
    return tiny.noise(layers, 2, length, heads, width, **how)


def path_to(row: int, node: int) -> list[int]:
    """Slots from the root to a node."""
    return [0] if node == 0 else [*path_to(row, int(PARENTS[row, node])), node]


def text_to(row: int, node: int) -> list[int]:
    """The prompt and the tokens from the root to a node."""
    return PROMPTS[row] + TOKENS[row, path_to(row, node)].tolist()


@torch.no_grad()
def alone(family: str, text: list[int], **how: object):
    """The untouched model on one text, without any cache."""
    return tiny.reference(family)(input_ids=torch.tensor([text]), use_cache=False, **how)


@torch.no_grad()
def probed(family: str, text: list[int], probes: Tensor) -> Tensor:
    """What the untouched model's head would read at vectors that continue a text."""
    model = tiny.reference(family)
    embedded = torch.cat([model.get_input_embeddings()(torch.tensor([text])), probes[None]], 1)
    out = model(inputs_embeds=embedded, use_cache=False, output_hidden_states=True)
    return out.hidden_states[-1][0, -len(probes) :]


@every_family
def test_every_node_reads_its_own_path(family):
    """A mask that shows a node its cousins, a window in cache slots instead of positions, a depth taken for a
    slot."""
    target = tiny.target(family)
    logits = target(TREE, prefilled(target)).logits
    want = [
        [alone(family, text_to(b, i)).logits[0, -1] for i in range(TREE.nodes)] for b in range(len(PROMPTS))
    ]
    assert_equal(family, logits, torch.stack([torch.stack(row) for row in want]))


@every_family
@torch.inference_mode()  # as in `decode`: the cache is made of inference tensors
def test_rounds_after_an_accepted_path_read_what_was_kept(family):
    """Compaction that keeps the wrong slots, or keys whose positions are those of the slots they were written
    to."""
    target = tiny.target(family)
    cache = prefilled(target)
    target(TREE, cache)
    path = torch.tensor([path_to(b, 6)[:3] for b in range(len(PROMPTS))])
    cache.keep(path, torch.tensor([3, 3, 2]))
    texts = [text_to(b, int(path[b, n - 1])) for b, n in enumerate([3, 3, 2])]
    logits = target(chain(torch.tensor([[7], [8], [9]])), cache).logits[:, 0]
    want = [alone(family, [*text, root]).logits[0, -1] for text, root in zip(texts, [7, 8, 9], strict=True)]
    assert_equal(family, logits, torch.stack(want))


class Listener(Drafter):
    """Remembers all that it absorbed, and sees what its probes say."""

    taps = ("final",)
    probes = tiny.noise(2, 32)
    rows = 3

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start(self, batch: int, device: torch.device) -> State:
        return State(torch.zeros(batch, dtype=torch.long))

    def update(self, span: Span, state: State) -> None:
        self.spans.append(span)

    def propose(self, state: State, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        raise NotImplementedError("it only listens")

    def heard(self, what: str, row: int) -> Tensor:
        """A field of the spans at a row's real columns."""
        return torch.cat([getattr(span, what)[row][span.mask[row]] for span in self.spans])


def prefill(target: HFTarget) -> tuple[KVCache, Listener]:
    """The cache after ragged prompts, and the drafter that was told of them."""
    engine = Engine(target, Listener(), rows=len(PROMPTS))
    engine.admit(*map(Request, PROMPTS))
    return engine.cache, engine.drafter


@every_family
def test_prefill_in_chunks_equals_prefill_in_one(family, monkeypatch):
    """Chunks cut so that a short prompt is read twice, late or not at all, or its drafter misses tokens."""
    target = tiny.target(family)
    whole, once = prefill(target)
    monkeypatch.setattr(slipstream.engine.engine, "CHUNK", 4)
    parts, often = prefill(target)
    assert (len(once.spans), len(often.spans)) == (1, 4)
    assert parts.lengths.tolist() == whole.lengths.tolist() == list(map(len, PROMPTS))
    assert_equal(family, often.spans[-1].logits, once.spans[-1].logits)
    for b, prompt in enumerate(PROMPTS):
        kept = (slice(None), b, slice(None), slice(0, len(prompt)))
        assert_equal(family, parts.stored[0][kept], whole.stored[0][kept])
        assert_equal(family, parts.stored[1][kept], whole.stored[1][kept])
        assert often.heard("tokens", b).tolist() == prompt
        assert often.heard("nexts", b)[:-1].tolist() == prompt[1:]
        assert often.heard("nexts", b)[-1] == once.spans[-1].logits[b, 0].argmax()
        assert_equal(family, often.heard("features", b), once.heard("features", b))
        assert_equal(family, often.spans[-1].probed.features[b], probed(family, prompt, Listener.probes))


@every_family
def test_probes_and_memory_change_no_bit_of_ordinary_rows(family):
    """Probes that leak into the rows they ride behind, by attention or, scaled up, through a mask that only
    dampens."""
    target = tiny.target(family)

    def nodes(scale: float, seed: int) -> Tensor:
        cache = prefilled(target, memory_of(target, scale=scale, seed=seed))
        return target(with_probes(tiny.noise(2, 32, scale=scale, seed=seed)), cache).logits

    quiet = nodes(1.0, 0)
    for scale, seed in ((1.0, 1), (1e6, 2), (0.0, 3)):
        assert torch.equal(nodes(scale, seed), quiet)
    without = target(TREE, prefilled(target)).logits
    torch.testing.assert_close(quiet, without, rtol=1e-5, atol=1e-5 * float(without.abs().max()))


@every_family
def test_probe_rows_continue_their_hosts_path(family):
    """Probes at the wrong position, that see another group or another branch, or are scaled like token
    embeddings twice."""
    target, probes = tiny.target(family), tiny.noise(2, 32)
    features = target(with_probes(probes), prefilled(target), taps=("final",)).features
    for b, hosts in enumerate(HOSTS.tolist()):
        for group, host in enumerate(hosts):
            if host != PAD:
                rows = features[b, TREE.nodes + 2 * group :][:2]
                assert_equal(family, rows, probed(family, text_to(b, host), probes))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_probes_read_memory_and_their_path(family):
    """Memory that is rotated, misplaced, read at one layer only, or out of a sliding window's sight."""
    target, model, probes = tiny.target(family), tiny.reference(family), tiny.noise(2, 32)
    memory = memory_of(target)
    features = target(with_probes(probes), prefilled(target, memory), taps=("final",)).features
    P, M = memory.shape[2], len(probes)
    for b, hosts in enumerate(HOSTS.tolist()):
        text = text_to(b, hosts[0])
        T = len(text)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(memory.transpose(2, 3)):
            cache.update(keys[None], values[None], layer)
        seen = torch.ones(T + M, P + T + M, dtype=torch.bool).tril(P)
        seen[:T, :P] = False
        if target.windows.keys() == {"sliding_attention"}:
            seen[:, P:] = seen[:, P:].triu(1 - tiny.WINDOW)
        with torch.no_grad():
            embedded = torch.cat([model.get_input_embeddings()(torch.tensor([text])), probes[None]], 1)
            out = model(
                inputs_embeds=embedded,
                position_ids=torch.arange(T + M)[None],
                attention_mask=torch.zeros(1, 1, *seen.shape, dtype=torch.float64).masked_fill(
                    ~seen, -torch.inf
                ),
                past_key_values=cache,
                output_hidden_states=True,
            )
        assert_equal(family, features[b, TREE.nodes :][:M], out.hidden_states[-1][0, -M:])


def watched(family: str, text: list[int]) -> dict[str, Tensor]:
    """What each block and the LM head of the untouched model really receive, by the names of the taps."""
    model, seen = tiny.reference(family), {}

    def remember(tap: str):
        return lambda _, inputs: seen.update({tap: inputs[0][0]})

    layers = model.config.num_hidden_layers
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)
    hooks = [
        block.register_forward_pre_hook(remember(f"input of block {i}")) for i, block in enumerate(blocks)
    ]
    hooks.append(model.get_output_embeddings().register_forward_pre_hook(remember("final")))
    alone(family, text)
    for hook in hooks:
        hook.remove()
    return seen


@every_family
def test_taps_are_what_blocks_and_head_receive(family):
    """Hidden states off by one block, "final" taken before the last norm, features in another order than the
    taps'."""
    target = tiny.target(family)
    taps = ("input of block 1", "final", "input of block 0")
    features = target(TREE, prefilled(target), taps).features
    for b in range(len(PROMPTS)):
        text, path = text_to(b, 10), path_to(b, 10)
        seen = watched(family, text)
        want = torch.cat([seen[tap][len(PROMPTS[b]) :] for tap in taps], -1)
        assert_equal(family, features[b, path], want)


class Whole(LlamaForCausalLM):
    """Code of its own, which knows no `logits_to_keep`, and may swallow it."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
    ):
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        given |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        out = self.model(**given, use_cache=use_cache)
        logits = self.lm_head(out.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


class Swallowing(Whole):
    def forward(self, input_ids=None, position_ids=None, past_key_values=None, logits_to_keep=0, **kwargs):
        given = {"position_ids": position_ids, "past_key_values": past_key_values}
        return super().forward(input_ids, **given, **kwargs)


@pytest.mark.parametrize("kind", [Whole, Swallowing])
@pytest.mark.parametrize("drafter", ["vanilla", "ngram"])
def test_models_that_say_all_logits_are_read_at_the_right_rows(kind, drafter):
    """The first token was what the first row said, and the audit read the same wrong row."""
    reference = tiny.reference("llama")
    model = kind(reference.config).to(reference.dtype).eval()
    model.load_state_dict(reference.state_dict())
    ours = generate(HFTarget(model), PROMPTS, drafter, max_new_tokens=6)
    theirs = generate(tiny.target("llama"), PROMPTS, "vanilla", max_new_tokens=6)
    assert [made.tokens for made in ours] == [made.tokens for made in theirs]


def test_a_vision_tower_of_as_many_layers_is_not_the_decoder():
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16
    )
    text = tiny.FAMILIES["llama"]
    config = LlavaConfig(vision_config=vision, text_config=deepcopy(text), image_token_index=1)
    target = HFTarget(LlavaForConditionalGeneration(config))
    assert len(target.blocks) == vision.num_hidden_layers
    assert type(target.blocks[0]).__name__ == "LlamaDecoderLayer"
    assert target.features([[3, 4, 5]], ("input of block 1",)).shape == (1, 3, text.hidden_size)


def test_the_final_states_may_be_narrower_than_the_layers():
    """OPT-350m's are."""
    config = OPTConfig(**(tiny.SHAPE | {"pad_token_id": 1}), ffn_dim=48, word_embed_proj_dim=16)
    target, taps = HFTarget(tiny.build(config)), ("final", "input of block 1")
    assert target.widths(taps) == [16, config.hidden_size]
    assert target.features([[3, 4, 5]], taps).shape[-1] == sum(target.widths(taps))


@pytest.mark.parametrize("tap", ["input of block 2", "input of block -1", "Final", "block 1"])
def test_unknown_taps_are_refused_with_the_choices(tap):
    """A tap that does not exist, taken for another one."""
    target = tiny.target("llama")
    with pytest.raises(
        ValueError, match=f"Unknown tap: '{tap}'.*'final', 'input of block 0' to 'input of block 1'"
    ):
        target(TREE, target.new_cache(3), taps=(tap,))


@every_family
@pytest.mark.parametrize("probes", [None, tiny.noise(2, 32)], ids=["plain", "probes"])
def test_rows_give_the_logits_of_those_rows(family, probes):
    """Logits of other rows where the wanted ones are ragged, unsorted or none."""
    target = tiny.target(family)
    tree = TREE if probes is None else with_probes(probes)

    def run(rows: Tensor | None) -> Output:
        return target(tree, prefilled(target), rows=rows)

    everything = run(None).logits
    assert everything.shape == (3, TREE.nodes, tiny.VOCAB)
    for rows in (
        torch.tensor([[6, 2], [0, 0], [3, 4]]),
        torch.tensor([[1], [5], [3]]),
        torch.zeros(3, 0, dtype=torch.long),
    ):
        want = everything.gather(1, rows[..., None].expand(-1, -1, tiny.VOCAB))
        torch.testing.assert_close(run(rows).logits, want, rtol=1e-12, atol=1e-12)


def test_softcap_survives_sdpa():
    """Gemma 2 whose logits' softcap is dropped without a word, because sdpa has no such argument."""
    capped = Gemma2Config(**tiny.MIXED, head_dim=8, attn_logit_softcapping=0.5)
    logits = {}
    for attention in ("eager", "sdpa"):
        capped._attn_implementation = attention
        target = HFTarget(tiny.build(capped))
        logits[attention] = target(TREE, prefilled(target)).logits
    torch.testing.assert_close(logits["sdpa"], logits["eager"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon, new"])
def test_hf_generate_runs_hugging_faces_own_parts(family, monkeypatch):
    """A baseline measured, or an equality checked, with our attention or compiled layers."""
    target = HFTarget(deepcopy(tiny.reference(family)), compile=True)
    theirs = tiny.reference(family).config._attn_implementation
    ours = OURS if family == "llama" else theirs

    def parts(model: nn.Module) -> tuple[str, int]:
        compiled = [m for m in model.modules() if type(m.forward).__name__ == "CompiledForward"]
        return model.config._attn_implementation, len(compiled)

    assert parts(target.shadow_model) == (ours, 3)  # two layers and the head
    assert parts(target.plain) == (theirs, 0)
    monkeypatch.setattr(target.plain, "generate", lambda tokens, **_: tokens + 1)
    assert hf_generate(target, torch.tensor([[1, 2]])).tolist() == [[2, 3]]


def test_text_goes_through_the_chat_template_where_there_is_one():
    """A base model fed a template it never saw, or a chat model without its turns and the cue to answer."""
    model, tokenizer = deepcopy(tiny.reference("llama")), deepcopy(tiny.tokenizer())
    ids = {text: tokenizer(text)["input_ids"] for text in ("hi", "UhiA", "UhiUyesA")}
    assert encode(HFTarget(model, tokenizer), "hi") == ids["hi"]
    tokenizer.chat_template = (
        "{% for m in messages %}U{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    chat = HFTarget(model, tokenizer)
    assert encode(chat, "hi") == ids["UhiA"]
    assert (
        encode(chat, [{"role": "user", "content": "hi"}, {"role": "user", "content": "yes"}])
        == ids["UhiUyesA"]
    )
    assert encode(chat, ids["hi"]) == ids["hi"]


def test_a_head_that_is_named_decoder_is_not_the_decoder():
    """Parts, taps and states of ModernBERT's decoder, whose LM head Hugging Face takes for it."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = ModernBertDecoderConfig(**tiny.SHAPE | ids, global_attn_every_n_layers=2, local_attention=12)
    target = HFTarget(tiny.build(config))
    assert [*target.trunk()["between"]] == ["embeddings", "final_norm", "rotary_emb"]
    assert target.part([1], own=True).shadow_model.base_model.config.layer_types == ["sliding_attention"]
    tokens = torch.tensor([PROMPTS[0]])
    final = target.features(tokens.tolist(), ("final",))
    seen, at = torch.ones(1, 9, 9, dtype=torch.bool).tril(), torch.arange(9)[None]
    states, _ = target.states(target.embed(tokens), at, seen, at)
    torch.testing.assert_close(final, states, rtol=1e-9, atol=1e-9)
    assert HFTarget(tiny.build(config).float()).exactness in ("bits", "audited")
