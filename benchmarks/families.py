r"""What each family of models gets on this machine: who runs its layers, and whether rows keep their bits.

    python benchmarks/families.py --json benchmarks/results/families.json
    python benchmarks/table.py benchmarks/results/families.json docs/exactness.md

A random model of each family, of two layers, is made a target in each precision. "bits": each row's logits
are the same in passes of 1 to 64 rows, in a tree as in a chain. The difference is the largest between its
logits in float32 and those of Hugging Face's own modules, over their standard deviation.
"""

from typing import Annotated, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common import run
from slipstream.cli import common as cli
from slipstream.core.tree import chain
from slipstream.files import check_writable
from slipstream.progress import bars
from slipstream.results import Figures, Part, Report, heading
from slipstream.targets import HFTarget

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
HEADS = {"head_dim": 32}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # by name: the model type, and what it has beside SIZES
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 16}),
    "Qwen 2": ("qwen2", {"use_sliding_window": False}),
    "Qwen 3": ("qwen3", HEADS),
    "Gemma 2": ("gemma2", {**MIXED, **HEADS, "query_pre_attn_scalar": 32, "attn_implementation": "eager"}),
    "Gemma 3": ("gemma3_text", {**MIXED, **HEADS, "query_pre_attn_scalar": 32}),
    "Phi-3, Phi-4": ("phi3", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", MIXED),
    "Granite": ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "StableLM": ("stablelm", {}),
    "StarCoder 2": ("starcoder2", {}),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", MIXED),
    "GPT-NeoX": ("gpt_neox", {}),
    "Mixtral": ("mixtral", {"num_local_experts": 6}),
    "Qwen3-MoE": ("qwen3_moe", {**EXPERTS, **HEADS}),
    "OLMoE": ("olmoe", {**EXPERTS, "intermediate_size": 96}),
    "gpt-oss": (
        "gpt_oss",
        {
            **MIXED,
            **HEADS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "num_local_experts": 6,
            "attn_implementation": "eager",
        },
    ),
    "GPT-2": ("gpt2", {}),
    "OPT": ("opt", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "Phi-2": ("phi", {}),
    "Falcon": ("falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
}
PRECISIONS = ("float32", "bfloat16", "int8", "int4")


class Family(Part):
    """What a family gets.

    Attributes:
        described: its layers run in one call of our kernels, in each precision.
        exactness: "bits", "audited", or why there is no such target, by precision.
        difference: see above.
    """

    type: str
    described: dict[str, bool]
    exactness: dict[str, str]
    difference: float

    @property
    def layers(self) -> str:
        """Who runs them."""
        return "described" if all(self.described.values()) else "Hugging Face's"


class FamiliesReport(Report):
    """What `main` found. The target is none: a random model of each family."""

    families: dict[str, Family]

    def __rich__(self) -> Figures:
        table = Figures(str(self.hardware["cpu"]), "family", "layers", *PRECISIONS, "difference")
        for name, each in self.families.items():
            table.add_row(name, each.layers, *each.exactness.values(), f"{each.difference:.0e}")
        return table


def build(kind: str, more: dict[str, Any]) -> Any:
    """A random model of this type in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | more)
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.05 if p.dim() > 1 else 0.1))
    return model


@torch.no_grad()
def family_of(kind: str, more: dict[str, Any]) -> tuple[Family, HFTarget]:
    """What a family gets, and its target in float32."""
    described, exactness = dict[str, bool](), dict[str, str]()
    for precision in reversed(PRECISIONS):
        quantize = precision if precision.startswith("int") else None
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        target = HFTarget(build(kind, more).to(dtype), name=kind, quantize=quantize)
        described[precision], exactness[precision] = target.decoder is not None, target.exactness
    tokens = torch.randint(512, (1, 48), generator=torch.Generator().manual_seed(1))
    theirs = build(kind, more)(tokens).logits
    ours = target(chain(tokens), target.new_cache(1)).logits
    difference = float((ours - theirs).abs().max() / theirs.std())
    ordered = {precision: exactness[precision] for precision in PRECISIONS}
    return Family(type=kind, described=described, exactness=ordered, difference=difference), target


def main(json: Annotated[str, cli.option("the result", "FILE")]) -> None:
    """Try every family, and print."""
    check_writable(json)
    found: dict[str, Family] = {}
    with bars(cli.err) as progress:
        task = progress.add_task("families", total=len(FAMILIES), note="")
        for name, (kind, more) in FAMILIES.items():
            found[name], target = family_of(kind, more)
            progress.update(task, advance=1, note=name)
    named = heading(target) | {"target": "random models", "dtype": "four precisions"}
    report = FamiliesReport(**named, families=found)
    report.write(json)
    cli.out.print(report)


if __name__ == "__main__":
    run(main)
