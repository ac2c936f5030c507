"""FastEagle: a cascade of layers that drafts all depths in one pass."""

from slipstream.drafters.fasteagle.model import FastEagle, FastEagleConfig, FastEagleHead

__all__ = ["FastEagle", "FastEagleConfig", "FastEagleHead"]
