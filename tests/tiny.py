"""Tiny float64 models of every family, with weights so large that their laws are far from uniform, and a
tokenizer."""

import io
import json
import os
import string
import sys
import types
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from slipstream.core.drafter import CACHE, Drafter
from slipstream.core.tree import chain
from slipstream.core.tree_spec import TreeSpec
from slipstream.drafters import load_drafter
from slipstream.drafters.auto import Auto
from slipstream.drafters.bita.model import Bita, BitaConfig, BitaHead
from slipstream.drafters.draft_model.model import DraftModel, LayerSubset
from slipstream.drafters.eagle.model import Eagle, EagleConfig, EagleHead
from slipstream.drafters.eagle3.model import Eagle3, Eagle3Config, Eagle3Head
from slipstream.drafters.fasteagle.model import FastEagle, FastEagleConfig, FastEagleHead
from slipstream.drafters.glide.model import Glide, GlideConfig, GlideHead
from slipstream.drafters.heads import Head, block_taps, layer_sizes
from slipstream.drafters.hybrid import Hybrid
from slipstream.drafters.lookahead import Lookahead
from slipstream.drafters.medusa.model import Medusa, MedusaConfig, MedusaHead
from slipstream.drafters.random_drafter import RandomDrafter
from slipstream.drafters.suffix import NGram, Suffix
from slipstream.drafters.tree_oracle import TreeOracle
from slipstream.engine.policy import Policy, TreeStatistics
from slipstream.methods import METHODS
from slipstream.targets import HFTarget

COMPILED = bool(os.environ.get("TEST_COMPILED"))
VOCAB = 64
WINDOW = 6  # of the families with sliding attention: shorter than most prompts
LETTERS = string.ascii_letters + string.digits + " "
EOS = len(LETTERS)  # of the tokenizer; the models themselves name no EOS

SHORT = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": VOCAB}
SHAPE = SHORT | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
MIXED = GROUPED | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FALCON = SHORT | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**MIXED, use_sliding_window=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mistral": MistralConfig(**GROUPED, sliding_window=WINDOW),
    "mixtral": MixtralConfig(
        **GROUPED, sliding_window=WINDOW, num_local_experts=4, experts_implementation="eager"
    ),
    "gemma2": Gemma2Config(**MIXED, head_dim=8, attn_implementation="eager"),
    "gemma3": Gemma3TextConfig(**MIXED, head_dim=8),
    "gpt-neox": GPTNeoXConfig(**SHAPE),
    "gpt2": GPT2Config(**SHORT, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "opt": OPTConfig(**(SHAPE | {"pad_token_id": 1}), ffn_dim=48, word_embed_proj_dim=32),
    "phi": PhiConfig(**SHAPE),
    "falcon, multi-query": FalconConfig(**FALCON, alibi=False, multi_query=True),
    "falcon, new": FalconConfig(**FALCON, alibi=False, new_decoder_architecture=True, num_kv_heads=2),
}


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """A random float64 model whose next-token laws are neither uniform nor certain."""
    model = AutoModelForCausalLM.from_config(deepcopy(config)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            x = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.copy_(0.3 * x if p.dim() > 1 else p + 0.1 * x)
    model.generation_config = GenerationConfig()
    return model


@cache
def reference(family: str) -> PreTrainedModel:
    """The family's model as Hugging Face runs it."""
    return build(FAMILIES[family])


@cache
def target(family: str) -> HFTarget:
    """The same weights as a target."""
    return HFTarget(deepcopy(reference(family)), tokenizer(), family, COMPILED)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, joined without spaces, so that strings span tokens; the last id is EOS."""
    vocab = {letter: i for i, letter in enumerate(LETTERS)} | {"</s>": EOS}
    words = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", clean_up_tokenization_spaces=False
    )


def prompts(*lengths: int) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts(5, 11, 7, 9)  # of tests of `generate`, with how they ask
SAMPLED = {"temperature": 0.8, "seed": 3}
ENDLESS: dict[str, tuple[int, ...]] = {"eos_token_ids": ()}


def noise(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal float64 numbers."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kv_shape(target: HFTarget) -> tuple[int, int, int]:
    """Layers, heads and head width of what the target caches."""
    cache = target.new_cache(1)
    target(chain(torch.zeros(1, 1, dtype=torch.long)), cache)
    assert cache.stored
    layers, _, heads, _, width = cache.stored[0].shape
    return layers, heads, width


def random_drafter(target: HFTarget, sampled: bool = False) -> RandomDrafter:
    """Random trees, some of whose nodes carry probes that read memory."""
    layers, heads, width = kv_shape(target)
    memory = noise(layers, 2, 3, heads, width)
    return RandomDrafter(
        target.vocab, width=4, probes=noise(2, target.config.hidden_size), memory=memory, sampled=sampled
    )


def scrambled(head: Head) -> Any:
    """Random float64 weights, so large that a law is not uniform."""
    generator = torch.Generator().manual_seed(1)
    for p in head.double().parameters():
        p.data.copy_(
            (1.0 if p.dim() == 1 else 0.3) * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        )
    return head


def eagle(
    target: HFTarget,
    tree: str = "fig9",
    proposal: str = "top-k",
    vocab: int | None = None,
    inputs: str = "shifted",
) -> Eagle:
    """A random head; `vocab` trims its candidates to the lowest ids."""
    head = scrambled(EagleHead(EagleConfig(**layer_sizes(target), inputs=inputs)))
    return Eagle(head, target, None if vocab is None else torch.arange(vocab), tree, proposal)


def eagle3(target: HFTarget, tree: str = "fig9", proposal: str = "top-k", vocab: int | None = None) -> Eagle3:
    """The same of EAGLE-3."""
    taps = tuple(dict.fromkeys(block_taps(target.config.num_hidden_layers)))
    head = scrambled(
        Eagle3Head(Eagle3Config(**layer_sizes(target), taps=taps, draft_vocab_size=vocab or VOCAB))
    )
    return Eagle3(head, target, None if vocab is None else torch.arange(vocab), tree, proposal)


def fasteagle(
    target: HFTarget,
    tree: str = "backbone-3x4",
    proposal: str = "top-k",
    vocab: int | None = None,
    rank: int = 0,
) -> FastEagle:
    """The same of FastEagle, three layers deep; with a rank, laws know the token above them."""
    sizes = {"depth": 3, "rank": rank, "draft_vocab_size": (vocab or target.vocab) if rank else 0}
    taps = ("input of block 0", "input of block 1", "final")
    head = scrambled(FastEagleHead(FastEagleConfig(**layer_sizes(target), taps=taps, **sizes)))
    return FastEagle(head, target, None if vocab is None else torch.arange(vocab), tree, proposal)


def medusa(
    target: HFTarget, tree: str = "best-first-3x8", proposal: str = "top-k", vocab: int | None = None
) -> Medusa:
    """Three random heads of two blocks."""
    sizes = MedusaConfig(target.config.hidden_size, vocab or VOCAB, depth=3, layers=2)
    return Medusa(
        scrambled(MedusaHead(sizes)),
        target,
        None if vocab is None else torch.arange(vocab),
        tree,
        proposal,
    )


def bita(
    target: HFTarget, tree: str = "backbone-3x2", proposal: str = "top-k", prompts: int = 2, hosts: int = 0
) -> Bita:
    """Random masks and prompts."""
    layers, heads, width = kv_shape(target)
    sizes = BitaConfig(target.config.hidden_size, layers, heads, width, depth=3, prompts=prompts)
    return Bita(scrambled(BitaHead(sizes)), target, None, tree, proposal, hosts)


def draft_model(own: HFTarget, tree: str, proposal: str = "top-k") -> DraftModel:
    """Another family's model of the same vocabulary, with windows where the target has none."""
    return DraftModel(target("llama" if own.name == "qwen2" else "qwen2"), own, tree, proposal)


def distilled(
    target: HFTarget, tree: str = "chain-3", proposal: str = "top-k", blocks: tuple[int, ...] = (1,)
) -> DraftModel:
    """Part of the target, as if it had been trained, over a draft vocabulary."""
    vocab = torch.arange(0, target.vocab, 2)
    part = scrambled(LayerSubset(blocks, target, vocab))
    return DraftModel(part.model, target, tree, proposal, vocab, part)


def glide(
    target: HFTarget,
    tree: str = "cape-3x9",
    proposal: str = "top-k",
    depth: int = 1,
    own: bool = False,
    published: bool = False,
) -> Glide:
    """A random head that reads the last blocks' caches; `own` embedding and LM head or the target's; as
    `published`."""
    layers, heads, width = kv_shape(target)
    sizes = layer_sizes(target) | {"taps": tuple(f"{CACHE}{i}" for i in range(layers - depth, layers))}
    about = {"depth": depth, "target_size": target.config.hidden_size, "target_head_dim": width}
    about["target_rope"] = tuple(target.rope(i) for i in range(layers - depth, layers))
    ends = {"vocab_size": VOCAB, "draft_vocab_size": VOCAB} if own else {}
    about |= {"cross_norm": not published, "first_token": published}
    queries = heads * (target.config.num_attention_heads // heads)
    head = scrambled(GlideHead(GlideConfig(**sizes, **about, **ends, target_heads=queries)))
    return Glide(head, target, None, tree, proposal)


def drafted(text: list[int], at: int, trace: io.StringIO) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """(text up to the root, path to a node below it, its children) for every inner node of every round of a
    trace. The answer in `text` begins `at`."""
    for line in map(json.loads, trace.getvalue().splitlines()):
        tokens, parents = line["tokens"], line["parents"]
        for parent in sorted(set(parents)):
            path, slot = list[int](), parent
            while slot:
                path, slot = [tokens[slot], *path], parents[slot]
            yield text[: at + 1], path, [tokens[i] for i in range(1, len(tokens)) if parents[i] == parent]
        at += len(line["accepted"])


@cache
def documented() -> Any:
    """The drafter of docs/adding_a_drafter.md. Its name is given back."""
    page = Path(__file__).parent.parent / "docs" / "adding_a_drafter.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    assert code.count("\n") < 60
    module = types.ModuleType("documented")
    sys.modules["documented"] = module  # dataclasses look their module up
    exec(compile(code, str(page), "exec"), vars(module))
    del METHODS["successor"]
    return module.Successor


Texts = list[list[int]]


class Restless(Policy):
    """Takes turns among a drafter's candidate trees, in an order without a short period."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(TreeStatistics(drafter.candidate_trees))
        self.trees, self.rounds = drafter.candidate_trees, 0

    def choose(self, texts, buckets, catch_up_cost=0.0):
        assert len(texts) == len(buckets)
        self.rounds += 1
        return self.trees[self.rounds * self.rounds // 3 % len(self.trees)]

    def learn(self, tokens, seconds, guessed):
        assert seconds > 0
        assert len(guessed) == len(tokens)
        assert min(tokens) > 0


# what it is called -> a drafter for a target and the texts (prompt and plain answer) of its rows
DRAFTERS: dict[str, Callable[[HFTarget, Texts], Drafter]] = {
    "the documented one": lambda target, texts: documented()(target),
    "ngram": lambda target, texts: NGram(shortest=1),
    "lookahead": lambda target, texts: Lookahead(window=3, ngram=3, guesses=2),
    "suffix": lambda target, texts: Suffix(),
    "suffix, remembering": lambda target, texts: Suffix(12, 5, remember=1),
    "hybrid": lambda target, texts: Hybrid(eagle(target, "dynamic-3x4x14"), Suffix(8, 4)),
    "hybrid, noise": lambda target, texts: Hybrid(fasteagle(target, "best-first-3x8", "noise"), Suffix(8, 5)),
    "hybrid, bita": lambda target, texts: Hybrid(
        bita(target, "best-first-3x8", "noise", hosts=2), Suffix(8, 5, remember=1)
    ),
    "auto": lambda target, texts: Auto(eagle(target)),
    "auto, matches, noise": lambda target, texts: Auto(fasteagle(target, "best-first-3x8", "noise")),
    "auto, bita": lambda target, texts: Auto(bita(target, hosts=2)),
    "auto, tuned": lambda target, texts: Auto(
        eagle(target), tuned=[*map(TreeSpec.parse, ("chain-1", "[[0],[1],[0,0]]", "dynamic-3x3x9"))]
    ),
    "oracle": lambda target, texts: TreeOracle(texts, target.vocab),
    "random, probes, memory": lambda target, texts: random_drafter(target),
    "eagle": lambda target, texts: eagle(target),
    "eagle, chain": lambda target, texts: eagle(target, "chain-3", vocab=40),
    "eagle, dynamic": lambda target, texts: eagle(target, "dynamic-3x4x14"),
    "eagle, best-first, noise": lambda target, texts: eagle(target, "best-first-3x10", "noise"),
    "eagle, sampled": lambda target, texts: eagle(
        target, "[[0],[1],[2],[0,0],[1,0],[1,1],[1,0,0]]", "sampled"
    ),
    "eagle3, dynamic": lambda target, texts: eagle3(target, "dynamic-3x4x14", vocab=40),
    "eagle3, noise": lambda target, texts: eagle3(target, proposal="noise"),
    "eagle3, sampled": lambda target, texts: eagle3(target, "fig9", "sampled"),
    "draft model": lambda target, texts: draft_model(target, "chain-3"),
    "draft model, dynamic, noise": lambda target, texts: draft_model(target, "dynamic-3x3x9", "noise"),
    "draft model, sampled": lambda target, texts: draft_model(
        target, "[[0],[1],[0,0],[1,0],[1,1],[1,0,0]]", "sampled"
    ),
    "self-speculative": lambda target, texts: load_drafter("self-speculative:skip=0,tree=chain-2", target),
    "distilled, sampled": lambda target, texts: distilled(target, "[[0],[1],[0,0],[1,0]]", "sampled"),
    "glide": lambda target, texts: glide(target),
    "glide, two layers, noise": lambda target, texts: glide(target, "dynamic-3x3x9", "noise", depth=2),
    "glide, as published, sampled": lambda target, texts: glide(
        target, "[[0],[1],[0,0],[1,0],[1,1],[1,0,0]]", "sampled", 2, True, True
    ),
    "bita": lambda target, texts: bita(target),
    "bita, straightforward": lambda target, texts: bita(target, "chain-3", hosts=1),
    "bita, noise, few hosts": lambda target, texts: bita(
        target, "best-first-3x8", "noise", prompts=0, hosts=3
    ),
    "bita, sampled": lambda target, texts: bita(target, "[[0],[1],[0,0],[0,0,0]]", "sampled", hosts=3),
    "medusa": lambda target, texts: medusa(target),
    "medusa, sampled": lambda target, texts: medusa(
        target, "[[0],[1],[0,0],[1,0],[0,0,0]]", "sampled", vocab=40
    ),
    "fasteagle": lambda target, texts: fasteagle(target),
    "fasteagle, chain": lambda target, texts: fasteagle(target, "chain-2", vocab=40),
    "fasteagle, best-first, noise": lambda target, texts: fasteagle(target, "best-first-3x10", "noise"),
    "fasteagle, sampled": lambda target, texts: fasteagle(
        target, "[[0],[1],[2],[0,0],[1,0],[1,1],[1,0,0]]", "sampled"
    ),
    "fasteagle of rank 6, noise": lambda target, texts: fasteagle(
        target, "best-first-3x10", "noise", vocab=40, rank=6
    ),
    "fasteagle of rank 6, sampled": lambda target, texts: fasteagle(
        target, "[[0],[1],[2],[0,0],[1,0],[1,1],[1,0,0]]", "sampled", rank=6
    ),
}


def replace_is_host(patch: pytest.MonkeyPatch, is_host: Callable[[Tensor], bool]) -> None:
    """In every module that asks whether a tensor is on the host, as on a GPU."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("slipstream.") and hasattr(module, "is_host"):
            patch.setattr(module, "is_host", is_host)
