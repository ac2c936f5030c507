"""A smaller model drafts for a larger one. In self-speculation it consists of the target's own layers.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023,
"Accelerating Large Language Model Decoding with Speculative Sampling"; Zhang et al. 2023, "Draft & Verify".
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from slipstream.core.device import is_host
from slipstream.core.drafter import State
from slipstream.core.kv_cache import KVCache
from slipstream.core.sampling import Sampler
from slipstream.core.span import Span
from slipstream.core.target import Target
from slipstream.core.tree import Tree, TreeLayout, chain
from slipstream.core.tree_spec import DEEPEST, TreeSpec
from slipstream.drafters.proposer import Draft, Proposer, Vocab
from slipstream.drafters.store import VOCAB, load_weights
from slipstream.provenance import suggested
from slipstream.targets import load_target


@dataclass
class DraftModelState(State):
    scores: Float[Tensor, "B Vd"]  # the logits at the root
    cache: KVCache  # the draft model's own, which also holds the root


@dataclass(frozen=True)
class LayerSubsetConfig:
    blocks: tuple[int, ...]
    taps: tuple[str, ...] = ()


class LayerSubset(nn.Module):
    """The weights of a draft model of some of the target's blocks: copies of these and of the last norm. It
    uses the target's embedding and LM head, for the tokens of `vocab`. Raises ValueError if there is no such
    block."""

    def __init__(self, blocks: tuple[int, ...], target: Target, vocab: Vocab | None = None) -> None:
        super().__init__()
        self.config = LayerSubsetConfig(tuple(sorted(set(blocks))))
        self.model = target.part(self.config.blocks, own=True, vocab=vocab)
        for name, module in self.model.trunk().items():
            self.add_module(name, module)

    def drafter(
        self, tensors: dict[str, Tensor], target: Target, vocab: Vocab | None, **how: Any
    ) -> "DraftModel":
        """Drafts with trained weights, in the target's precision. Raises ValueError for tensors that do not
        fit."""
        fitted = {name: t.to(self.model.device, self.model.dtype) for name, t in tensors.items()}
        load_weights(self, fitted, "this draft model")
        return DraftModel(self.model, target, vocab=vocab, part=self, **how)


@final
class DraftModel(Proposer):
    """Drafts with any causal LM that has the target's tokenizer: a `model`, as a target of its own, whose
    logits are of the sorted tokens `vocab`, by default of all. It may be a `part` of the target. "sampled"
    chains are speculative sampling as published. Raises ValueError if the tokenizers differ, and as
    `Proposer` does."""

    method = "draft-model"

    def __init__(
        self,
        model: Target,
        target: Target,
        tree: str | TreeSpec = "chain-5",
        proposal: str = "top-k",
        vocab: Vocab | None = None,
        part: LayerSubset | None = None,
    ) -> None:
        if model.text is not None and target.text is not None and model.text is not target.text:
            own, wanted = model.text.vocabulary, target.text.vocabulary
            if own != wanted:
                differing = min(own.items() ^ wanted.items())
                raise ValueError(
                    f"draft model {model.name} reads other tokens than the target ({len(own)} against "
                    f"{len(wanted)}; {differing[0]!r} is not the same): take one of the target's tokenizer"
                )
        ids = torch.arange(min(model.vocab, target.vocab)) if vocab is None else vocab
        self.model, self.part = model, part
        super().__init__(ids.to(target.device), target.vocab, tree, proposal)

    @property
    def ladder(self) -> tuple[str, ...]:
        """A whole model takes a long pass for each level, and a longer one where the level is wide."""
        return super().ladder if self.part else ("chain-1", "chain-2", "chain-4", "chain-8")

    @classmethod
    def named(
        cls, model: str, target: Target, tree: str = "chain-5", proposal: str = "top-k", quantize: str = ""
    ) -> "DraftModel":
        """Draft with a model that `load_target` finds, in the target's precision and quantisation, or in
        another one: int8, int4 or none. Raises ValueError."""
        kind = None if quantize == "none" else quantize or target.quantize
        place = target.dtype_name, str(target.device), target.compiles
        return cls(load_target(model, *place, quantize=kind), target, tree, proposal)

    @classmethod
    def of_itself(
        cls, target: Target, skip: str = "", tree: str = "chain-5", proposal: str = "top-k"
    ) -> "DraftModel":
        """Draft with the target itself without some blocks: "10,11,12" or "10-12". Raises ValueError."""
        L, skipped = target.sizes.blocks, set[int]()
        if not skip:
            raise ValueError(
                f"drafter 'self-speculative' skips some of the target's blocks 0 to {L - 1}: name them, as "
                "in self-speculative:skip=10-14, or let "
                f"`{suggested('tune --drafter self-speculative')}` find and keep them"
            )
        for part in skip.split(","):
            first, _, last = (word.strip() for word in part.partition("-"))
            last = last or first
            if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
                fix = "write numbers and rising ranges, such as 10-14,20"
                raise ValueError(f"skip={skip!r} names no blocks: {fix}")
            # L + 1 of the blocks are enough to refuse a range.
            skipped.update(range(int(first), min(int(last), int(first) + L) + 1))
        if not skipped < set(range(L)):
            has = f"this target has blocks 0 to {L - 1}; keep one"
            raise ValueError(f"blocks {sorted(skipped)} cannot be skipped: {has}")
        return cls(target.part([i for i in range(L) if i not in skipped]), target, tree, proposal)

    @classmethod
    def load(
        cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target, **options: Any
    ) -> "DraftModel":
        """A trained draft model, from what `pack` returned. Raises ValueError for tensors that do not fit."""
        tensors = dict(tensors)
        vocab = tensors.pop(VOCAB, None)
        try:
            part, tree = LayerSubset(tuple(config["blocks"]), target, vocab), config["tree"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"config.json of this draft model is not complete: {error}") from error
        return part.drafter(tensors, target, vocab, **{"tree": tree, **options})

    def pack(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert self.part is not None
        return self.packed(self.part, {"blocks": list(self.part.config.blocks)})

    def start(self, batch: int, device: torch.device) -> DraftModelState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        scores = torch.zeros(batch, len(self.vocab), device=device)
        return DraftModelState(zeros, scores, self.model.new_cache(batch))

    def update(self, span: Span, state: DraftModelState) -> None:
        """Read the tokens chosen since the last time, with the root, which the target has not read yet."""
        begins = (span.start == 0) & (span.count > 0)  # a text's first token is not among `span.nexts`
        tokens = torch.cat([span.tokens[:, :1], span.nexts], 1)
        at = torch.arange(tokens.shape[1], device=tokens.device) + ~begins[:, None]
        tokens = tokens.gather(1, at.clamp(max=tokens.shape[1] - 1))
        tokens = tokens.clamp(max=self.model.vocab - 1)  # models pad embeddings: the target may have more
        count = span.count + begins
        host = is_host(begins)
        if host and not bool(begins.any()):
            tokens = tokens[:, :-1]
        alone = host or tokens.shape[1] > DEEPEST + 2  # a captured step takes all logits: its shape is fixed
        last = (count - 1).clamp(min=0)[:, None]
        logits = self.model(chain(tokens), state.cache, rows=last if alone else None).logits
        state.cache.follow(span.cache, count, ahead=1)
        at_last = logits if alone else logits.gather(1, last[..., None].expand(-1, -1, logits.shape[2]))
        state.scores, state.root = at_last[:, 0, : len(self.vocab)], span.root

    def propose(self, state: DraftModelState, sampler: Sampler, spec: TreeSpec | None = None) -> Tree:
        depths = state.root.new_zeros(0)

        def step(tokens: Tensor, origin: Tensor, visible: Tensor, level: int) -> Tensor:
            nonlocal depths
            n = tokens.shape[1]
            depths = torch.cat([depths, depths.new_full((n,), level - 1)])
            layout, earlier = TreeLayout(depths[None], visible), visible.shape[2] - n
            return self.model.extend(tokens, layout, state.cache, earlier)[..., : len(self.vocab)]

        draft = Draft(self, self.shaped(spec), sampler)
        return draft.step_by_step(state.root, state.cache.lengths - 1, state.scores[:, None], step)
