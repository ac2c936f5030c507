"""FastEagle's head as our plugin of vLLM reads it (`vllm_fasteagle`). No other engine knows FastEagle."""

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from slipstream.core.drafter import FINAL, INPUT
from slipstream.core.target import Target
from slipstream.drafters.fasteagle import FastEagleConfig
from slipstream.drafters.store import VOCAB
from slipstream.interop.layouts import Config, Layout, Tensors, close, lm_head_rows
from slipstream.interop.sizes import IDS, SHARED, described, fits, layer, written
from slipstream.interop.vllm_plugin import FASTEAGLE


@final
class FastEagleLayout(Layout):
    """config.json as that of an EAGLE-3 head with N layers. Beside the head's tensors: d2t [Vd] (target id =
    i + d2t[i]), the LM head's rows of that vocabulary, and the target's last norm, because engines hand over
    the final state before it."""

    keys: ClassVar = SHARED | {"draft_vocab_size", "cascade", "input_norm", IDS, "num_hidden_layers"}
    embedding = "none"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.draft_vocab = target.vocab  # tokens of the head that was written

    def knows(self, config: Config, tensors: Tensors) -> bool:
        return FASTEAGLE in (config.get("architectures") or [])

    def sizes(self, config: Config, tensors: Tensors) -> FastEagleConfig:
        depth, blocks = config.get("num_hidden_layers"), self.target.sizes.blocks
        fits("hidden_size", config.get("hidden_size"), self.target.width)
        ids = config.get(IDS) or []
        if not (isinstance(depth, int) and depth > 0 and ids and all(0 <= i <= blocks for i in ids)):
            raise ValueError(f"num_hidden_layers={depth!r} and {IDS}={ids!r} name no layers of this target")
        own: Any = {name: bool(config.get(name)) for name in ("cascade", "input_norm")}
        taps = tuple(FINAL if i == blocks else f"{INPUT}{i}" for i in ids)
        sizes: Any = layer(config | {"num_hidden_layers": 1}, tensors, self.target)
        return FastEagleConfig(**sizes, taps=taps, depth=depth, **own)

    def tree(self, sizes: FastEagleConfig) -> str:
        return f"best-first-{sizes.depth}x8"

    def config(self, head: FastEagleConfig, name: str) -> Config:
        blocks = self.target.sizes.blocks
        ids = [blocks if tap == FINAL else int(tap.removeprefix(INPUT)) for tap in head.taps]
        if ids != sorted(set(ids)):
            raise ValueError(
                f"this head reads {', '.join(map(repr, head.taps))}, and engines hand states over in "
                "ascending order, the final one last: train one that reads them so (head.taps)"
            )
        if head.rank:
            raise ValueError(
                "this head's laws know the token above them (head.rank), which vLLM's way of drafting cannot "
                "express: train one with head.rank=0"
            )
        own: Config = {"architectures": [FASTEAGLE], "model_type": "llama", "tie_word_embeddings": False}
        own |= {"num_hidden_layers": head.depth, "cascade": head.cascade, "input_norm": head.input_norm}
        own |= {"draft_vocab_size": self.draft_vocab}
        return {**described(self.target), **written(head), **own, IDS: ids}

    def take(self, tensors: Tensors) -> Tensors:
        taken = dict(tensors)
        if (d2t := taken.pop("d2t", None)) is not None:
            taken[VOCAB] = d2t + torch.arange(len(d2t))
        lent = {
            "lm_head.weight": lambda: lm_head_rows(self.target, taken.get(VOCAB)),
            "norm.weight": self._norm,
        }
        for name, own in lent.items():
            if name in taken and not close(taken.pop(name), own()):
                raise ValueError(f"{name} is not this target's: import it for the target it was made for")
        self.notes.append(f"{', '.join(lent)}: the target's own, left out")
        return taken

    def give(self, tensors: Tensors) -> Tensors:
        given, dtype = dict(tensors), tensors["fuse.weight"].dtype
        given["norm.weight"] = self._norm().to(dtype)
        if (vocab := given.pop(VOCAB, None)) is not None:
            self.draft_vocab = len(vocab)
            given["d2t"] = vocab.long() - torch.arange(len(vocab))
            given["lm_head.weight"] = lm_head_rows(self.target, vocab).to(dtype)
        return given

    def _norm(self) -> Tensor:
        """The weight of the target's last norm. Raises ValueError where it is no plain RMSNorm."""
        for module in self.target.trunk()["between"].children():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.shape == (self.target.width,):
                x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)
                plain = torch.nn.functional.rms_norm(x, x.shape, weight, self.target.sizes.rms_norm_eps)
                if torch.allclose(module(x[None])[0], plain, rtol=2e-2, atol=1e-3):
                    return weight.detach().cpu()
        raise ValueError("the last norm of this target is no plain RMSNorm, which this layout cannot express")
