"""EAGLE: a head of one layer that reads its own predictions."""

from slipstream.drafters.eagle.model import INPUTS, Eagle, EagleConfig, EagleHead

__all__ = ["INPUTS", "Eagle", "EagleConfig", "EagleHead"]
