"""A frozen LLM as one call."""

from slipstream.targets.hf import HFTarget
from slipstream.targets.load import load_target
from slipstream.targets.recorded import RecordedTarget

__all__ = ["HFTarget", "RecordedTarget", "load_target"]
