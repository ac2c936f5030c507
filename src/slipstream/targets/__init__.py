"""A frozen LLM as one call."""

from slipstream.targets.hf import HFTarget
from slipstream.targets.load import load_target

__all__ = ["HFTarget", "load_target"]
