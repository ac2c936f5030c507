"""Slipstream makes a frozen LLM answer faster without changing one token of what it says."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.core.drafter import Drafter, State
    from slipstream.core.sampling import Sampling
    from slipstream.core.span import Span
    from slipstream.core.tree import Tree
    from slipstream.decode.generate import Generation, Stream, generate, stream
    from slipstream.drafters import load_drafter
    from slipstream.drafters.ngram import NGram
    from slipstream.drafters.random_drafter import RandomDrafter
    from slipstream.drafters.tree_oracle import TreeOracle
    from slipstream.drafters.vanilla import Vanilla
    from slipstream.targets import Target, load_target

    __version__: str

_HOMES = {  # imported on first use: torch and transformers take seconds
    "Drafter": "core.drafter",
    "Generation": "decode.generate",
    "NGram": "drafters.ngram",
    "RandomDrafter": "drafters.random_drafter",
    "Sampling": "core.sampling",
    "Span": "core.span",
    "State": "core.drafter",
    "Stream": "decode.generate",
    "Target": "targets",
    "Tree": "core.tree",
    "TreeOracle": "drafters.tree_oracle",
    "Vanilla": "drafters.vanilla",
    "generate": "decode.generate",
    "load_drafter": "drafters",
    "load_target": "targets",
    "stream": "decode.generate",
}
__all__ = [
    "Drafter",
    "Generation",
    "NGram",
    "RandomDrafter",
    "Sampling",
    "Span",
    "State",
    "Stream",
    "Target",
    "Tree",
    "TreeOracle",
    "Vanilla",
    "generate",
    "load_drafter",
    "load_target",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream")
    if name not in _HOMES:
        raise AttributeError(
            f"module 'slipstream' has no attribute {name!r}. Available: {', '.join(__all__)}"
        )
    return getattr(import_module(f"slipstream.{_HOMES[name]}"), name)
