"""A frozen LLM as one call."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.targets.hf import HFTarget as HFTarget
    from slipstream.targets.load import load_target as load_target
    from slipstream.targets.recorded import RecordedTarget as RecordedTarget

_HOMES = {"HFTarget": "hf", "load_target": "load", "RecordedTarget": "recorded"}  # imported on first use


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream.targets' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.targets.{_HOMES[name]}"), name)
