"""EAGLE-3: a head that reads three of the target's states."""

from slipstream.drafters.eagle3.model import Eagle3, Eagle3Config, Eagle3Head

__all__ = ["Eagle3", "Eagle3Config", "Eagle3Head"]
