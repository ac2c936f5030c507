"""A frozen LLM as one call."""

from slipstream.targets.hf import Target
from slipstream.targets.load import load_target

__all__ = ["Target", "load_target"]
