"""GLIDE drafts what its formulas say, and sees of the target what it may see."""

import io
from dataclasses import replace
from inspect import signature

import pytest
import torch
from transformers import CohereConfig, LlamaConfig

import tiny
from slipstream.core.span import Span
from slipstream.core.tree import chain
from slipstream.drafters.glide.model import CrossAttention, Glide, rotates_pairs, split_kv
from slipstream.drafters.glide.objective import GlideObjective, GlideRecipe
from slipstream.drafters.layers import Rope, attend_cache
from slipstream.engine.generate import generate
from slipstream.targets import HFTarget
from slipstream.targets.support import rope

PROMPTS = tiny.prompts(9, 4, 14)
ROTARY = [family for family in tiny.FAMILIES if family not in ("gpt2", "opt")]


def naive(drafter: Glide, target, text: list[int], path: list[int]) -> torch.Tensor:
    """Log q of the token after `text + path`: a decoder over all tokens, or all but the first. No cache of
    its own."""
    head, lead = drafter.head, int(drafter.head.config.first_token)
    tokens = torch.tensor([text[1 - lead :] + path])
    out = target(chain(torch.tensor([text[:-1]])), target.new_cache(1), drafter.taps)
    m = len(text) - 1  # what the target has read ends before the root
    at = torch.arange(1 - lead, m + 1 + len(path))
    causal = (at <= at[:, None])[None, None]
    # a token that was read again sees what came before it, and the first one itself
    seen = (torch.arange(m) < at.clamp(min=1)[:, None])[None, None]
    glimpses = [
        (*split_kv(part, head.config.target_head_dim), seen)
        for part in out.features.chunk(len(drafter.taps), -1)
    ]
    embed = target.embed if head.embed_tokens is None else head.embed_tokens
    attends = [lambda k, v: (k, v, causal)] * head.config.depth
    return drafter.logits(head(embed(tokens), at[None], attends, glimpses)[0, -1]).log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("tree", ["cape-3x9", "[[0],[1],[0,0],[1,0],[1,1],[1,0,0]]"])
@pytest.mark.parametrize("make", [{}, {"depth": 2}, {"own": True}, {"depth": 2, "published": True}])
def test_every_drafted_child_is_among_the_likeliest_of_its_path(family, tree, make):
    """A row that reads a cousin, a glimpse of what the target had not read, a query at another position."""
    target, trace = tiny.target(family), io.StringIO()
    drafter = tiny.glide(target, tree, **make)
    answer = generate(target, PROMPTS[0], drafter, max_new_tokens=12, temperature=0.0, trace=trace)
    checked = 0
    for text, path, kids in tiny.drafted(PROMPTS[0] + answer.tokens, len(PROMPTS[0]), trace):
        kids = [kid for kid in kids if kid >= 0]
        assert set(kids) == set(naive(drafter, target, text, path).topk(len(kids)).indices.tolist())
        checked += 1
    assert checked > 12


@pytest.mark.parametrize("published", [False, True])
def test_rows_of_a_batch_draft_as_they_do_alone(published, monkeypatch):
    """Ragged prefill, in chunks of which a text begins in the second; rows that end before others, slots of
    one row seen by another."""
    monkeypatch.setattr("slipstream.engine.engine.CHUNK", 5)
    target = tiny.target("llama")
    drafter = tiny.glide(target, depth=2, published=published)
    together = generate(target, PROMPTS, drafter, max_new_tokens=16, temperature=0.0)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        alone = generate(target, prompt, drafter, max_new_tokens=16, temperature=0.0)
        assert [r.accepted for r in alone.rounds] == [r.accepted for r in answer.rounds]


@pytest.mark.parametrize("published", [False, True])
def test_a_block_of_training_is_a_draft(published):
    """A mask that shows training what drafting will not have, or an offset that moves with anything but its
    generator."""
    target, T, block = tiny.target("llama"), 12, 4
    drafter = tiny.glide(target, "chain-4", published=published)
    objective, text = GlideObjective(drafter.head, target, None), torch.tensor(tiny.prompts(T + 1))
    features = target.features(text.tolist(), drafter.taps)[:, :-1]
    firsts = set()
    for seed in range(6):
        settings, generator = GlideRecipe.Loss(block=block), torch.Generator().manual_seed(seed)
        [said] = objective.steps(text, features, settings, generator)
        first = int(torch.randint(block, (), generator=torch.Generator().manual_seed(seed)))
        firsts.add(first)
        for row in range(first, T - block, block):  # the root is token row + 1
            cache, count = target.new_cache(1), torch.tensor([row + 1])
            cache.keep(None, count)
            state = drafter.start(1, target.device)
            drafter.update(
                Span(
                    text[:, : row + 1], text[:, 1 : row + 2], 0 * count, count, cache, features[:, : row + 1]
                ),
                state,
            )
            torch.testing.assert_close(state.hidden[0], said[0, row])
            for j in range(1, block):  # along the text itself
                own, positions = attend_cache(state.cache, 1, j - 1)
                glimpses = drafter._glimpses(state.target_cache, state.target_cache.lengths)
                hidden = drafter._read(
                    text[:, row + 1 + j, None], positions + 1 - drafter.lead, own, glimpses
                )
                torch.testing.assert_close(hidden[0, 0], said[0, row + j])
    assert len(firsts) > 2


SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *SCALED])
def test_queries_are_turned_as_the_targets_own(name):
    """Another base, width or scaling than the target's: glimpses of the wrong positions (the public code's
    fault)."""
    if name in SCALED:
        model = tiny.build(LlamaConfig(**tiny.GROUPED, rope_parameters={"rope_theta": 5e5, **SCALED[name]}))
    else:
        model = tiny.reference(name)
    theirs, config = getattr(model.get_decoder(), "rotary_emb", None), model.config
    at = torch.arange(100)[None]
    for block in range(config.num_hidden_layers):
        frequencies, factor = rope(config, block)
        assert (theirs is None) == (not frequencies)
        if theirs is None:
            continue
        kind = (config.layer_types[block],) if len(signature(theirs.forward).parameters) > 2 else ()
        wanted = theirs(torch.zeros(1), at, *kind)
        ours = Rope(frequencies, factor)(at, torch.float32)
        assert all(torch.allclose(mine, other, atol=1e-5) for mine, other in zip(ours, wanted, strict=True))


def published(
    config: dict, t: dict[str, torch.Tensor], text: list[int], drafted: list[int], cached
) -> torch.Tensor:
    """Logits of the public code's draft (GliDe_with_a_CaPE_ICML_24, glideModel.py) after text and drafted
    tokens, one token and one head at a time. It has its own embedding and LM head, reads every token from the
    first on at its position, and no norm stands before cross-attention; that turns queries by the base 10000
    and sees all that the target has cached."""
    heads, width = config["heads"], config["width"]
    large, wide = config["large_heads"], config["large_width"]
    keys, values = cached  # of one block: [kv heads, positions, width], keys turned

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean() + config["eps"]).sqrt() * t[f"model.{name}.weight"]

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        half, out = len(x) // 2, torch.empty_like(x)
        for i in range(half):
            angle = torch.tensor(position * 10000.0 ** (-i / half), dtype=torch.float64)
            out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return out

    def mix(q: torch.Tensor, ks: list, vs: list) -> torch.Tensor:
        p = torch.stack([q @ k / len(q) ** 0.5 for k in ks]).softmax(0)
        return sum(weight * v for weight, v in zip(p, vs, strict=True))

    xs = [t["model.embed_tokens.weight"][token] for token in text + drafted]
    said, of = [], "layers.0."
    for position in range(len(xs)):
        read = [norm(f"{of}input_layernorm", x) for x in xs[: position + 1]]
        parts = []
        for head in range(heads):
            at = slice(head * width, (head + 1) * width)
            q, k, v = (
                [t[f"model.{of}self_attn.{name}_proj.weight"][at] @ x for x in read]
                for name in ("q", "k", "v")
            )
            parts.append(mix(turn(q[-1], position), [turn(each, i) for i, each in enumerate(k)], v))
        x = xs[position] + t[f"model.{of}self_attn.o_proj.weight"] @ torch.cat(parts)
        queries = (t[f"model.{of}cross_attn.q_proj.weight"] @ x).split(wide)
        group = large // len(keys)
        parts = [
            mix(turn(q, position), list(keys[i // group]), list(values[i // group]))
            for i, q in enumerate(queries)
        ]
        x = x + t[f"model.{of}cross_attn.o_proj.weight"] @ torch.cat(parts)
        y = norm(f"{of}post_attention_layernorm", x)
        gate = torch.nn.functional.silu(t[f"model.{of}mlp.gate_proj.weight"] @ y)
        said.append(
            x + t[f"model.{of}mlp.down_proj.weight"] @ (gate * (t[f"model.{of}mlp.up_proj.weight"] @ y))
        )
    return t["lm_head.weight"] @ norm("norm", said[-1])


def test_a_head_of_the_public_code_loads_and_says_what_it_says_there():
    """A norm that it does not have, a first token that it reads and ours did not, another base than it turns
    queries by."""
    target = tiny.target("llama")
    d, kv, wide = 24, 2, 8  # the target's keys: 2 heads of 8
    shapes = {"model.embed_tokens": (64, d), "model.norm": (d,), "lm_head": (64, d)}
    of = "model.layers.0."
    shapes |= {f"{of}{name}_layernorm": (d,) for name in ("input", "post_attention")}
    shapes |= {f"{of}self_attn.{name}_proj": (d, d) for name in "qkvo"}
    shapes |= {f"{of}cross_attn.q_proj": (4 * wide, d), f"{of}cross_attn.o_proj": (d, 4 * wide)}
    shapes |= {f"{of}mlp.{name}_proj": (40, d) for name in ("gate", "up")} | {f"{of}mlp.down_proj": (d, 40)}
    tensors = {
        f"{name}.weight": tiny.noise(*shape, scale=0.5, seed=i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    frequencies = [10000.0 ** (-i / (wide // 2)) for i in range(wide // 2)]
    sizes = {
        "hidden_size": d, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3,
        "head_dim": 8,
        "target_size": 32, "target_heads": 4, "target_head_dim": wide, "target_rope": [(frequencies, 1.0)],
        "vocab_size": 64, "draft_vocab_size": 64, "cross_norm": False, "first_token": True,
    }  # fmt: skip
    config = {"head": sizes, "taps": ["cache of block 1"], "tree": "chain-3"}
    theirs = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    drafter, trace = Glide.load(config, theirs, target), io.StringIO()
    answer = generate(target, PROMPTS[0], drafter, max_new_tokens=6, temperature=0.0, trace=trace)
    about = {"heads": 3, "width": 8, "large_heads": 4, "large_width": wide, "eps": 1e-6}
    checked = 0
    for text, path, [kid] in tiny.drafted(PROMPTS[0] + answer.tokens, len(PROMPTS[0]), trace):
        cached = split_kv(target.features([text[:-1]], drafter.taps), wide)
        logits = published(about, tensors, text, path, [part[0].detach() for part in cached])
        assert kid == int(logits.argmax())
        torch.testing.assert_close(
            naive(drafter, target, text, path), logits.log_softmax(-1), atol=1e-9, rtol=0
        )
        checked += 1
    assert checked > 6
    assert kv == len(cached[0][0])


def test_a_directory_of_before_has_the_norm_and_no_first_token():
    """Old drafter directories load unchanged."""
    target = tiny.target("llama")
    config, tensors = tiny.glide(target, own=True).pack()
    for name in ("cross_norm", "first_token", "rope_scaling", "output_bias", "target_pairs"):
        del config["head"][name]
    again = Glide.load(config, tensors, target)
    assert (again.head.config.cross_norm, again.lead) == (True, 0)


@pytest.mark.parametrize("family", ["cohere", *ROTARY])
def test_queries_are_turned_as_the_targets_keys_are(family):
    """By halves or by neighbours: a score depends on the distance alone. Keys of equal tokens differ by their
    positions alone, in block 0."""
    if family == "cohere":
        target = HFTarget(tiny.build(CohereConfig(**tiny.GROUPED, logit_scale=1.0)), None, family)
    else:
        target = tiny.target(family)
    D, pairs = target.sizes.head_dim, rotates_pairs(target)
    config = replace(
        tiny.glide(tiny.target("llama")).head.config,
        **{"target_head_dim": D, "target_rope": [target.rope(0)], "target_pairs": pairs},
    )
    attention, q = CrossAttention(config, 0), tiny.noise(1, 1, 1, D)
    key, _ = split_kv(target.features([[7] * 40], ("cache of block 0",))[0][None], D)
    scores = [
        (attention.rotated(q, torch.tensor([[at]]))[0, 0, 0] * key[0, 0, at - 5]).sum() for at in (20, 30, 39)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3))
    assert pairs == (family == "cohere")
